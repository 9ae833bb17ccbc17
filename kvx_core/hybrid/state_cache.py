"""The part of one layer's cache that has a fixed size per request: window and tails.

A request has a slot for as long as it lives. The window is a ring: the token that a request's
`head`-th append brought lies at head % window. The tails hold tokens that no entry stands for yet.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvx_core.argument_checks import bad_argument, instance, integer, one_of
from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid.schema import LayerCacheSchema

# The score of a token that is not there. Softmax gives it the weight 0 beside any real score, and,
# unlike -inf, a row of nothing else gives no NaN.
NO_SCORE = -1e9

TailRowWidth = Literal["wide", "single"]


class Tails(NamedTuple):
    """The tails of one compressor of a layer; see StateCache."""

    ka: Tensor
    za: Tensor
    kb: Tensor | None  # None: of HCA
    zb: Tensor | None
    tail_len: Tensor

    @property
    def ratio(self) -> int:
        """Tokens of an entry."""
        return self.ka.shape[1]

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.ka.shape[2]


class StateCache:
    """The state of R requests in one layer, by slot.

    swa_fp8:  (R, window, nope_dim) uint8, E4M3 codes; number = code * swa_inv
    swa_rope: (R, window, rope_dim) bfloat16
    swa_inv:  (R, window) float32; None if the schema needs no inverse scales: all are 1
    swa_pos:  (R, window) int32, the position of the token in each place; -1: none
    swa_head: (R,) int32, tokens that were appended
    tail_ka, tail_za: (R, m, width) tail_dtype: values and scores of the tokens since the last entry
    tail_kb, tail_zb: the same of the tokens of the last entry; None for HCA
    tail_len: (R,) int32, rows of tail_ka and tail_za that are filled
    idx_ka, idx_za, idx_kb, idx_zb, idx_tail_len: the same of the indexer's own compressor; None but
              for CSA
    All of tail_ka to idx_tail_len are None for SWA.

    A token of a CSA layer has two projections: one for the entry that it ends up in (a) and one for
    the entry after that (b). Rows are [b | a], twice as wide as an entry. An entry reads the a half
    of tail_ka and tail_za and the b half of tail_kb and tail_zb: a flush has only to copy ka to kb.
    tail_row_width: "wide"; "single" keeps one projection per row, as narrow as an entry, and reads
              it as both. That is not DeepSeek-V4's attention: entries after the first are wrong. It
              is here to compare with caches that did so. HCA rows are single in either case
    tail_dtype: float32 or bfloat16
    Raises InvalidArgumentError.
    """

    def __init__(
        self,
        schema: LayerCacheSchema,
        max_requests: int,
        device: torch.device | str = "cpu",
        *,
        tail_row_width: TailRowWidth = "wide",
        tail_dtype: torch.dtype = torch.float32,
    ) -> None:
        instance("schema", schema, LayerCacheSchema, "a LayerCacheSchema")
        self.max_requests = integer("max_requests", max_requests, 1, 2**31 - 1)
        self.schema = schema
        one_of("tail_row_width", tail_row_width, "wide", "single")
        if not any(tail_dtype is dtype for dtype in (torch.float32, torch.bfloat16)):
            raise bad_argument(
                "tail_dtype",
                str(tail_dtype),
                "torch.float32 or torch.bfloat16: in float16 the "
                "score of an absent token, -1e9, is infinite",
            )
        self.tail_row_width: TailRowWidth = tail_row_width

        def rows(*shape: int, dtype: torch.dtype, value: float = 0) -> Tensor:
            return torch.full((self.max_requests, *shape), value, dtype=dtype, device=device)

        window = schema.swa_window_size
        self.swa_fp8 = rows(window, schema.nope_dim, dtype=torch.uint8)
        self.swa_rope = rows(window, schema.rope_dim, dtype=torch.bfloat16)
        scaled = schema.needs_inv_scale
        self.swa_inv = rows(window, dtype=torch.float32, value=1) if scaled else None
        self.swa_pos = rows(window, dtype=torch.int32, value=-1)
        self.swa_head = rows(dtype=torch.int32)

        a, b = schema.tail_buffer_size_a, schema.tail_buffer_size_b
        halves = 2 if b and tail_row_width == "wide" else 1

        def tail(count: int, dim: int, value: float = 0) -> Tensor | None:
            if not count or not dim:
                return None
            return rows(count, halves * dim, dtype=tail_dtype, value=value)

        def length(dim: int) -> Tensor | None:
            return rows(dtype=torch.int32) if a and dim else None

        self.tail_ka, self.tail_za = tail(a, schema.entry_head_dim), tail(a, schema.entry_head_dim)
        self.tail_kb = tail(b, schema.entry_head_dim)
        self.tail_zb = tail(b, schema.entry_head_dim, NO_SCORE)
        self.tail_len = length(schema.entry_head_dim)
        self.idx_ka, self.idx_za = (
            tail(a, schema.indexer_head_dim),
            tail(a, schema.indexer_head_dim),
        )
        self.idx_kb = tail(b, schema.indexer_head_dim)
        self.idx_zb = tail(b, schema.indexer_head_dim, NO_SCORE)
        self.idx_tail_len = length(schema.indexer_head_dim)
        # What a slot without a request holds; 0 where nothing is said.
        self._fresh = {"swa_inv": 1.0, "swa_pos": -1, "tail_zb": NO_SCORE, "idx_zb": NO_SCORE}

    def __repr__(self) -> str:
        return (
            f"StateCache({self.schema.attn_type.name} layer {self.schema.layer_idx}, "
            f"{self.max_requests} requests, {self.memory_bytes()} bytes)"
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; the first axis of each is the slot."""
        return {name: t for name in _NAMES if (t := getattr(self, name)) is not None}

    def tails(self, *, indexer: bool = False) -> Tails:
        """The tails of the entries' compressor, or of the indexer's.

        Raises InvalidArgumentError for a layer that has none.
        """
        ka, za, tail_len = self.tail_ka, self.tail_za, self.tail_len
        kb, zb = self.tail_kb, self.tail_zb
        if indexer:
            ka, za, tail_len = self.idx_ka, self.idx_za, self.idx_tail_len
            kb, zb = self.idx_kb, self.idx_zb
        if ka is None or za is None or tail_len is None:
            raise InvalidArgumentError(
                f"layer {self.schema.layer_idx} is of type {self.schema.attn_type.name}, which has "
                f"no tails{' of an indexer' if indexer else ''}"
            )
        return Tails(ka, za, kb, zb, tail_len)

    def memory_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(t.nbytes for t in self.tensors.values())

    def reset_slot(self, slot: int) -> None:
        """Empties the slot of a request that has ended. Mutates this slot only.

        Raises InvalidArgumentError.
        """
        slot = integer("slot", slot, 0, self.max_requests - 1)
        for name, tensor in self.tensors.items():
            tensor[slot].fill_(self._fresh.get(name, 0))


_NAMES = (
    *("swa_fp8", "swa_rope", "swa_inv", "swa_pos", "swa_head"),
    *("tail_ka", "tail_za", "tail_kb", "tail_zb", "tail_len"),
    *("idx_ka", "idx_za", "idx_kb", "idx_zb", "idx_tail_len"),
)
