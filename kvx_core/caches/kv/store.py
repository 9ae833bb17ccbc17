"""KvCacheStore: the keys and values of one sequence, all layers, in formats of one's choice.

Buffers for max_seq_len tokens are allocated at once, so that an append writes its own rows and
nothing else, a range of tokens is one piece of memory, and views stay where they are.

Threads: stores share nothing. append, append_token, append_zeros, evict and clear of one store take
one caller at a time; there are no locks. Reads and attend may run meanwhile on tokens that were
there when they began, unless these are evicted.
"""

from __future__ import annotations

from typing import Any

import torch

from kvx_core.argument_checks import bad_argument, format_repr, instance, integer, plural, product
from kvx_core.caches.kv.attend import Attention
from kvx_core.caches.kv.encodings import encoding_of, of_preset
from kvx_core.caches.kv.half import Half, KvStorage, Sizes
from kvx_core.caches.kv.report import KvMemoryReport
from kvx_core.caches.kv.tokens import copied, one_token, some_tokens, token_major
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, OutOfRangeError
from kvx_core.types import DType


class KvCacheStore:
    """Keys and values of one sequence in all layers, which grow at their end.

    num_layers, num_heads (KV heads of a layer), head_dim, max_seq_len: sizes
    key_encoding, value_encoding: a DType or its name: any format that write_kv writes and whose
                   unit divides head_dim, such as bfloat16, float8_e4m3fn (with a scale per token
                   and head), Q8_0 or Q4_0, or else num_heads * head_dim, such as Q4_K; each its own
    placement:     torch device of the buffers
    One thread at a time may change it, see the top of this file. No call records gradients.
    Raises InvalidArgumentError, UnsupportedError. Spec: 4.3, E.10
    """

    __slots__ = (
        "__weakref__",
        "_attention",
        "_keys",
        "_seq_lens",
        "_values",
    )

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        key_encoding: DType | str = DType.BF16,
        value_encoding: DType | str = DType.BF16,
        placement: torch.device | str = "cpu",
    ) -> None:
        sizes = Sizes(
            integer("num_layers", num_layers, 1),
            integer("max_seq_len", max_seq_len, 1),
            integer("num_heads", num_heads, 1),
            integer("head_dim", head_dim, 1),
        )
        of_keys = encoding_of("key_encoding", key_encoding, *sizes[2:])
        of_values = encoding_of("value_encoding", value_encoding, *sizes[2:])
        self._keys = Half("key", sizes, of_keys, _placement(placement))
        self._values = Half("value", sizes, of_values, _placement(placement))
        self._attention = Attention(self._keys, self._values)
        self._seq_lens = [0] * sizes.num_layers

    @classmethod
    def from_preset(
        cls,
        preset: str,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        placement: torch.device | str = "cpu",
    ) -> KvCacheStore:
        """A store with the formats of a preset: "safe-lowbit", "balanced" or "experimental-max".

        kvx_core.caches.kv.PRESETS has their formats. All have TurboQuant's, whose units hold 128
        numbers: head_dim or num_heads * head_dim is a multiple of 128.
        Raises InvalidArgumentError.
        """
        of_keys, of_values = of_preset(preset)
        return cls(
            num_layers,
            num_heads,
            head_dim,
            max_seq_len,
            key_encoding=of_keys,
            value_encoding=of_values,
            placement=placement,
        )

    def __repr__(self) -> str:
        held, more = self.current_seq_len, None
        ahead = {count - held for count in self._seq_lens} - {0}
        if ahead:
            layers = plural(sum(count > held for count in self._seq_lens), "layer")
            more = f"{'up to ' if len(ahead) > 1 else ''}{max(ahead)} more in {layers}"
        return format_repr(
            "KvCacheStore",
            product(
                (plural(self.num_layers, "layer"), plural(self.num_heads, "head"), self.head_dim)
            ),
            f"{held} of {self.max_seq_len} tokens",
            more,
            f"K {self.key_encoding.name}",
            f"V {self.value_encoding.name}",
            None if self.placement.type == "cpu" else str(self.placement),
        )

    @property
    def num_layers(self) -> int:
        return self._keys.sizes.num_layers

    @property
    def num_heads(self) -> int:
        """KV heads of a layer."""
        return self._keys.sizes.num_heads

    @property
    def head_dim(self) -> int:
        return self._keys.sizes.head_dim

    @property
    def max_seq_len(self) -> int:
        """Tokens that it has room for."""
        return self._keys.sizes.max_seq_len

    @property
    def current_seq_len(self) -> int:
        """Tokens that all layers hold."""
        return min(self._seq_lens)

    @property
    def key_encoding(self) -> DType:
        return self._keys.encoding

    @property
    def value_encoding(self) -> DType:
        return self._values.encoding

    @property
    def placement(self) -> torch.device:
        """Where the buffers are."""
        return self._keys.device

    def layer_seq_len(self, layer: int) -> int:
        """Tokens that a layer holds: current_seq_len, and those that other layers still miss.

        Raises InvalidArgumentError.
        """
        return self._seq_lens[integer("layer", layer, 0, self.num_layers - 1)]

    # ---- tokens in ----

    def append_token(self, layer: int, key: Any, value: Any) -> None:
        """Appends one token's keys and values to a layer.

        key, value: (num_heads * head_dim,) or (num_heads, head_dim): a list of numbers, or of torch
                    or numpy, float32, float16, bfloat16 or float64, which is rounded to float32;
                    strides are not negative
        Layers take their tokens in any order: a step layer by layer, or a whole prompt in one layer
        before the next. current_seq_len counts a token when all layers have it, and `attend` of a
        layer sees it at once.
        Mutates the store. Raises InvalidArgumentError for a wrong size or dtype, OutOfRangeError
        for a full layer, UnsupportedError; the store then holds what it held.
        """
        half = self._keys
        self._append(layer, one_token("key", key, half), one_token("value", value, half))

    def append(self, layer: int, keys: Any, values: Any) -> None:
        """Appends tokens to a layer, such as a prompt: the same bytes as one by one.

        keys, values: (num_tokens, num_heads, head_dim), at least one token; as in append_token
        Mutates the store. Raises as append_token; the store then holds what it held.
        """
        found = some_tokens("keys", keys, self._keys), some_tokens("values", values, self._keys)
        if len(found[0]) != len(found[1]):
            raise InvalidArgumentError(
                f"values.shape[0] is {len(found[1])}, expected {len(found[0])} tokens as keys has"
            )
        self._append(layer, *found)

    def _append(self, layer: int, keys: Any, values: Any) -> None:
        begin, count = self.layer_seq_len(layer), len(keys)
        if count > self.max_seq_len - begin:
            raise self._too_full(f"layer {layer}", begin, count)
        # Views of the store's own memory may lie where the tokens go.
        if any(self._keys.owns(t) or self._values.owns(t) for t in (keys, values)):
            keys, values = copied(keys), copied(values)
        self._keys.write(layer, begin, keys)
        # If this fails, keys lie behind the last token, where nobody reads them.
        self._values.write(layer, begin, values)
        self._seq_lens[layer] = begin + count

    def append_zeros(self, num_tokens: int) -> None:
        """Appends tokens of zeros to all layers: room for tokens that a migration brings.

        Mutates the store. Raises InvalidArgumentError where layers hold unequally many tokens,
        OutOfRangeError for a full store; the store then holds what it held.
        """
        count, held = integer("num_tokens", num_tokens), self.current_seq_len
        if max(self._seq_lens) > held:
            layer = self._seq_lens.index(held)
            raise InvalidArgumentError(
                f"layer {layer} holds {plural(held, 'token')}, expected {max(self._seq_lens)} as "
                f"another layer holds: append to it first, or drop the others' with evict({held})"
            )
        if count > self.max_seq_len - held:
            raise self._too_full("the store", held, count)
        for half in (self._keys, self._values):
            half.fill_zeros(held, held + count)
        self._seq_lens = [held + count] * self.num_layers

    def _too_full(self, holder: str, held: int, count: int) -> OutOfRangeError:
        return OutOfRangeError(
            f"{holder} holds {held} of max_seq_len {self.max_seq_len} tokens, expected room for "
            f"{plural(count, 'token')} more. Evict tokens, or make a larger store"
        )

    def evict(self, from_pos: int) -> None:
        """Drops all tokens from position `from_pos` on in all layers.

        evict(current_seq_len) drops what not all layers have. The bytes stay until they are
        overwritten. Mutates the store. Raises InvalidArgumentError.
        """
        kept = integer("from_pos", from_pos, 0, max(self._seq_lens))
        self._seq_lens = [min(held, kept) for held in self._seq_lens]

    def clear(self) -> None:
        """Drops all tokens. Mutates the store, which keeps its memory."""
        self.evict(0)

    # ---- tokens out ----

    def read_keys(
        self,
        layer: int,
        start: int = 0,
        end: int | None = None,
        *,
        head: int | None = None,
        out: Any = None,
    ) -> Any:
        """Decodes the keys of positions `start` to `end` of a layer, and no others.

        end:  None: current_seq_len, the tokens that all layers hold; at most layer_seq_len(layer)
        head: a KV head; None: all
        out:  a tensor of torch or numpy to fill, of the shape that is returned, float32, float16
              or bfloat16, strides not negative; None: a new torch tensor of float32
        Returns (num_heads, end - start, head_dim), or (1, end - start, head_dim) of one head.
        Raises InvalidArgumentError, UnsupportedError.
        """
        return self._read(self._keys, layer, start, end, head, out)

    def read_values(
        self,
        layer: int,
        start: int = 0,
        end: int | None = None,
        *,
        head: int | None = None,
        out: Any = None,
    ) -> Any:
        """Decodes the values of positions `start` to `end` of a layer: read_keys of values."""
        return self._read(self._values, layer, start, end, head, out)

    def _read(
        self, half: Half, layer: int, start: int, end: int | None, head: int | None, out: Any
    ) -> Any:
        layer, start, end = self._range(layer, start, end, None)
        if head is not None:
            head = integer("head", head, 0, self.num_heads - 1)
        shape = self.num_heads if head is None else 1, end - start, self.head_dim
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=self.placement)
        half.read(layer, start, end, head, token_major("out", out, shape))
        return out

    def read_key_storage(self, layer: int, start: int = 0, end: int | None = None) -> KvStorage:
        """The keys of positions `start` to `end` as they are stored, without a copy.

        end: as for read_keys
        The views show what appends write into these positions after evict.
        Raises InvalidArgumentError.
        """
        return self._keys.storage(*self._range(layer, start, end, None))

    def read_value_storage(self, layer: int, start: int = 0, end: int | None = None) -> KvStorage:
        """The stored values of positions `start` to `end`: read_key_storage of values."""
        return self._values.storage(*self._range(layer, start, end, None))

    def _range(
        self, layer: int, start: int, end: int | None, default: int | None
    ) -> tuple[int, int, int]:
        held = self.layer_seq_len(layer)
        if end is None:
            end = self.current_seq_len if default is None else default
        elif integer("end", end) > held:
            raise InvalidArgumentError(
                f"end is {end}, expected 0 to {held}: layer {layer} holds {plural(held, 'token')}"
            )
        return integer("layer", layer), integer("start", start, 0, end), integer("end", end)

    def attend(
        self,
        layer: int,
        query: Any,
        *,
        scale: float | None = None,
        start: int = 0,
        end: int | None = None,
    ) -> Any:
        """Attention of one query to positions `start` to `end` of a layer: softmax(q k scale) v.

        query: (num_q_heads, head_dim), of torch or numpy, any float dtype; num_q_heads is a
               multiple of num_heads, and query head h uses KV head h // (num_q_heads / num_heads)
        scale: of the scores; None: 1 / sqrt(head_dim)
        end:   None: layer_seq_len(layer), with the token just appended; a query at position p sees
               end = p + 1
        Decodes a few tokens at a time, never the whole range. Computes in float32.
        Returns (num_q_heads, head_dim), of the query's library and dtype.
        Raises InvalidArgumentError, also for no tokens; UnsupportedError.
        """
        where = self._range(layer, start, end, self.layer_seq_len(layer))
        return self._attention(*where, query, scale)

    # ---- the whole ----

    def memory_report(self) -> KvMemoryReport:
        """What the buffers take, and what of it tokens use, to the byte."""
        keys, values = self._keys, self._values
        rows = sum(self._seq_lens)
        return KvMemoryReport(
            **keys.sizes._asdict(),
            current_seq_len=self.current_seq_len,
            key_encoding=keys.encoding,
            value_encoding=values.encoding,
            placement=self.placement,
            key_allocated_bytes=keys.allocated_bytes,
            value_allocated_bytes=values.allocated_bytes,
            key_used_bytes=rows * keys.bytes_per_token,
            value_used_bytes=rows * values.bytes_per_token,
            key_bytes_per_token=keys.bytes_per_token,
            value_bytes_per_token=values.bytes_per_token,
        )

    def cache_view(self, facts: CacheFacts, *, block_size: int | None = None) -> CacheView:
        """The tokens that it holds now as an end of a migration, zero-copy.

        facts:      what the numbers mean
        block_size: None: a dense view of one sequence; otherwise a paged one, in which block b has
                    the positions from b * block_size on, and current_seq_len is whole blocks
        To migrate into a store, make room first: append_zeros(n). Where keys and values are both
        FP8, migrate with find_scales. The view is out of date when the store holds fewer tokens,
        as after evict: migrate and verify then refuse it.
        Raises InvalidArgumentError; UnsupportedError where units span heads, of which no view has
        one.
        """
        instance("facts", facts, CacheFacts, "a CacheFacts: what the bytes mean")
        count = self.current_seq_len
        if count == 0:
            raise InvalidArgumentError(
                "the store holds no tokens, expected at least one. To migrate into it, make room "
                "with append_zeros(num_tokens)"
            )
        size = count if block_size is None else integer("block_size", block_size, 1)
        if count % size:
            raise InvalidArgumentError(
                f"block_size is {size}, expected a divisor of the {plural(count, 'token')} that "
                "the store holds"
            )
        halves = self._keys, self._values
        for half in halves:
            half.require_heads()
        layers = [
            [h.blocks(layer, count, size) for h in halves] for layer in range(self.num_layers)
        ]
        k_scales, v_scales = (tuple(layer[i][1] for layer in layers) for i in range(2))
        return CacheView(
            tuple(CacheDesc.from_kv(k, v) for (k, _), (v, _) in layers),
            facts,
            dense=block_size is None,
            k_scales=k_scales if any(k_scales) else None,
            v_scales=v_scales if any(v_scales) else None,
            outdated=lambda: self._fewer_than(count),
        )

    def _fewer_than(self, described: int) -> str | None:
        """Why a view of `described` tokens is out of date."""
        if self.current_seq_len >= described:
            return None
        return (
            f"the store holds {plural(self.current_seq_len, 'token')}, expected the {described} "
            "described. Call cache_view again"
        )


def _placement(placement: Any) -> torch.device:
    expected = "a torch device, such as 'cpu' or 'cuda:0'"
    if not isinstance(placement, (str, torch.device)):
        raise bad_argument("placement", placement, expected)
    try:
        return torch.device(placement)
    except RuntimeError:
        raise bad_argument("placement", placement, expected) from None
