"""MLX: the caches of mlx-lm as KVX views. Imports no mlx.

KVCache and its kin hold keys and values as arrays (batch, num_kv_heads, num_slots, head_dim), K
after the rotation: a paged cache with one block per row of the batch. num_slots is what is
allocated, in steps of 256 tokens; the cache says how many are filled.

An array's memory can move, and MLX does not say so. Four rules keep views safe:

- Views hold the memory by DLPack, so it is never freed under them, as it is under numpy.asarray.
- While a view is kept, the engine's next step copies its whole cache elsewhere. That is noticed:
  migrate and verify then refuse the view. Drop views before a step, and describe again after it.
- A lazy array has no memory: arrays are evaluated before they are described. An operation that was
  recorded before a migration and is evaluated after it reads the new numbers: evaluate first.
- An array that repeats its memory, as mx.broadcast_to makes, is refused.

So is a view whose cache has other counts than when it was described (a trim moves no array), and a
BatchKVCache between prepare(right_padding=...) and finalize(), whose counts are wrong until then.
Source: mlx 0.32.4 on CPU and mlx-lm 0.32.2, models/cache.py, as measured
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    SeqLens,
    TensorDesc,
    UnsupportedError,
    borrow,
    describe,
)
from kvx_core.argument_checks import integer

_PLAIN = ("KVCache", "ChunkedKVCache", "RotatingKVCache", "BatchKVCache")
_KINDS = (*_PLAIN, "QuantizedKVCache")
# Why others are refused, and how their tokens are reached.
_OTHERS = {
    "BatchRotatingKVCache": "its rows are rings, each with a padding of its own. Take them one by "
    "one: after finalize(), extract(row) gives a RotatingKVCache",
    "ConcatenateKVCache": "each of its steps makes new arrays. Take them into a KVCache: "
    "KVCache.from_state((c.keys, c.values, c.offset))",
    "CacheList": "it holds several caches of a layer. Give those of one place of all layers: "
    "[c[0] for c in cache], then c[1]. extract(row) takes a row out of batched ones first",
}
_COUNTS = ("offset", "start_position", "_idx", "keep", "max_size", "left_padding")


def cache_desc(layer: Any) -> CacheDesc:
    """One layer, zero-copy: each row of the batch is a block of all allocated slots.

    layer: a cache of mlx_lm.models.cache that holds tokens. Is evaluated
    Raises UnsupportedError, InvalidArgumentError.
    """
    parts = _parts(layer, "layer")
    return CacheDesc.from_kv(parts.k, parts.v)


def cache_view(cache: Sequence[Any], facts: CacheFacts) -> CacheView:
    """All layers, zero-copy, with scales and biases of QuantizedKVCache. See `span` for the tokens.

    cache: a prompt cache, of one class. Where layers differ, give the layers of each class and
           facts that say which they are. Is evaluated
    facts: see `cache_facts`
    The view is valid until the engine's next step, which then refuses it if it has moved.
    Raises UnsupportedError, InvalidArgumentError.
    """
    layers = list(cache)
    kinds = sorted({type(layer).__name__ for layer in layers})
    if len(kinds) != 1:
        raise UnsupportedError(
            f"cache has layers of {', '.join(kinds) or 'no class'}, expected one class: tokens of "
            "others lie elsewhere. Give the layers of one class at a time"
        )
    parts = [_parts(layer, f"cache[{i}]") for i, layer in enumerate(layers)]
    described = [
        (_counts(layer), _addresses(part)) for layer, part in zip(layers, parts, strict=True)
    ]
    quantized = parts[0].k_scale is not None
    return CacheView(
        tuple(CacheDesc.from_kv(part.k, part.v) for part in parts),
        facts,
        k_scales=tuple(part.k_scale for part in parts) if quantized else None,
        v_scales=tuple(part.v_scale for part in parts) if quantized else None,
        dense=True,
        outdated=partial(_outdated, layers, described),
        holds=partial(_held, layers),
        k_zeros=tuple(part.k_bias for part in parts) if quantized else None,
        v_zeros=tuple(part.v_bias for part in parts) if quantized else None,
    )


def span(
    cache: Sequence[Any], facts: CacheFacts, *, first: int | None = None, kept: bool = False
) -> CacheSpan:
    """The tokens from position `first` on, as one end of a migration of `seq_lens(...)` tokens.

    first: None: the first position that `positions` gives. Other engines hold this token at their
           own `first`: view.at(starts=[first]). None for a BatchKVCache, whose rows begin at their
           left padding
    kept:  True: before these tokens come those that a RotatingKVCache keeps from the beginning, as
           `num_kept` counts them. Their positions do not go on: the other end is an engine that
           keeps as many, or one whose attention asks for no positions
    Raises UnsupportedError, InvalidArgumentError.
    """
    view = cache_view(cache, facts)
    layer = cache[0]
    _require_same_tokens(cache)
    if type(layer).__name__ == "BatchKVCache":
        if first is not None:
            raise InvalidArgumentError(
                f"first is {first}, expected None for a BatchKVCache: its rows begin "
                "at left_padding"
            )
        padding = [int(pad) for pad in layer.left_padding.tolist()]
        return view.at(starts=padding, first_positions=[-pad for pad in padding])
    rows = view.layers[0].k.shape[0]
    held = positions(layer)
    wanted = held[0] if first is None and held else first or 0
    if held and wanted not in held:
        raise InvalidArgumentError(
            f"first is {wanted}, expected a position that the cache holds: {held[0]} to {held[-1]}"
        )
    if type(layer).__name__ != "RotatingKVCache":
        return view.at(starts=[wanted - held.start] * rows, first_positions=held.start)
    slots, room = ring_slots(layer), view.layers[0].k.shape[2]
    taken = [*range(num_kept(layer) if kept else 0), *slots[wanted - held.start :]]
    # Of tokens that are kept, which do not go on, one number does not tell the positions.
    first_positions = None if kept and num_kept(layer) else wanted
    taken_slots = [row * room + slot for row in range(rows) for slot in taken]
    return view.at(slots=taken_slots, first_positions=first_positions)


def seq_lens(cache: Sequence[Any], *, first: int | None = None, kept: bool = False) -> SeqLens:
    """Tokens of each row from position `first` on, and those `kept`, as `span` takes them.

    Raises UnsupportedError, InvalidArgumentError.
    """
    _require_same_tokens(cache)
    layer = cache[0]
    if type(layer).__name__ == "BatchKVCache":
        # A row whose padding is longer than what has been computed has no token yet.
        return SeqLens.of([max(layer._idx - int(pad), 0) for pad in layer.left_padding.tolist()])
    held = positions(layer)
    begin = held.start if first is None else first
    if kept:
        begin -= num_kept(layer)
    keys = layer.keys[0] if isinstance(layer.keys, (tuple, list)) else layer.keys
    return SeqLens.of([held.stop - begin] * keys.shape[0])


def positions(layer: Any) -> range:
    """Positions in the sequence of the tokens that a layer holds, but for those that a
    RotatingKVCache keeps from the beginning.

    layer: of any class here but BatchKVCache, whose rows differ
    Raises UnsupportedError.
    """
    kind = _kind(layer, "layer")
    if kind == "BatchKVCache":
        raise UnsupportedError(
            "layer is a BatchKVCache, expected another: each row has tokens of its own. Use span "
            "and seq_lens"
        )
    if kind == "ChunkedKVCache":
        return range(layer.start_position, layer.offset)
    if kind == "RotatingKVCache":
        return range(layer.offset - len(ring_slots(layer)), layer.offset)
    return range(layer.offset)


def num_kept(layer: Any) -> int:
    """Tokens that a RotatingKVCache keeps from the beginning and that positions(layer) leaves out.

    0 for a cache that has not dropped a token yet, and for all others.
    """
    if type(layer).__name__ != "RotatingKVCache":
        return 0
    slots = ring_slots(layer)
    return 0 if not slots or 0 in slots else int(layer.keep)


def ring_slots(layer: Any) -> list[int]:
    """The slot of each token of positions(layer), of a RotatingKVCache.

    Slots 0 to keep - 1 hold the first tokens for good; the others are a ring whose next slot is
    _idx. A prompt of several tokens lies in order until the next single token. What is older than
    max_size tokens is never read again, and is left out: in a row that BatchRotatingKVCache has
    extracted, it may be padding.
    Source: mlx-lm 0.32.2 models/cache.py, RotatingKVCache._temporal_order, BatchRotatingKVCache
    """
    if layer.keys is None:
        return []
    allocated, keep, idx, offset = layer.keys.shape[2], layer.keep, layer._idx, layer.offset
    if idx < min(offset, allocated):  # turned round: the oldest token is the next to go
        return [*range(idx, allocated), *range(keep, idx)]
    first = 0 if offset == idx else keep  # nothing dropped yet: also the kept tokens are in order
    if idx > layer.max_size:
        first = idx - (layer.max_size - keep)
    return list(range(first, idx))


def cache_facts(
    *,
    rotary: Literal["half", "interleaved", "none"],
    rotary_dim: int,
    num_layers: int,
    num_kv_heads: int,
    window: int = 0,
    quantized: bool = False,
    version: str | None = None,
    fingerprint: str | None = None,
) -> CacheFacts:
    """The facts of a prompt cache.

    rotary:      "interleaved" if the model's nn.RoPE is traditional, else "half"
    rotary_dim:  its dims
    window:      sliding window of the attention in all layers given, 0 for none. A
                 RotatingKVCache's max_size is not always the model's window
    quantized:   the layers are QuantizedKVCache
    version:     mlx_lm.__version__
    fingerprint: of the model as it is computed; mlx-community's quantized weights give other keys
    Raises InvalidArgumentError.
    """
    return CacheFacts(
        engine=f"mlx-lm {version}" if version else "mlx-lm",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=integer("rotary_dim", rotary_dim),
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=integer("num_layers", num_layers, 1),
        first_layer=0,
        window=integer("window", window),
        total_kv_heads=integer("num_kv_heads", num_kv_heads, 1),
        first_kv_head=0,
        negative_slots="wrap",  # -1 indexes the last slot
        lossy="u8_bias" if quantized else None,
    )


def reserve(
    cache: Sequence[Any],
    *,
    batch_size: int,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str = "float32",
) -> None:
    """Makes an empty prompt cache hold `num_tokens` zero tokens per row, to migrate into.

    cache: of KVCache, ChunkedKVCache or QuantizedKVCache with 8 bits
    dtype: of the model, as MLX calls it; of scales and biases too
    Mutates the cache, whose arrays have room for the next multiple of 256 tokens.
    Raises InvalidArgumentError if a layer holds tokens, UnsupportedError.
    """
    mx = sys.modules["mlx.core"]
    tokens = integer("num_tokens", num_tokens, 1)
    room = -(-tokens // 256) * 256
    for i, layer in enumerate(cache):
        kind = _kind(layer, f"cache[{i}]")
        if kind in ("RotatingKVCache", "BatchKVCache"):
            raise UnsupportedError(
                f"cache[{i}] is a {kind}, expected KVCache, ChunkedKVCache or "
                "QuantizedKVCache. Set its state to arrays of mx.zeros, or run any prompt "
                "of as many tokens"
            )
        if layer.keys is not None:
            raise InvalidArgumentError(
                f"cache[{i}] holds {layer.offset} tokens, expected none. Pass a new one"
            )

        widths = [(head_dim, dtype)]
        if kind == "QuantizedKVCache":
            _require_bytes(layer, f"cache[{i}]")
            groups = head_dim // layer.group_size
            widths = [(head_dim // 4, "uint32"), (groups, dtype), (groups, dtype)]
        halves = [
            tuple(
                mx.zeros((batch_size, num_kv_heads, room, n), getattr(mx, of)) for n, of in widths
            )
            for _ in range(2)
        ]
        layer.keys, layer.values = (half if len(half) > 1 else half[0] for half in halves)
        layer.offset = tokens
        mx.eval(layer.keys, layer.values)


class _Parts(NamedTuple):
    """A layer: each half with its scales and biases, if it is quantized."""

    k: TensorDesc
    v: TensorDesc
    k_scale: ScaleDesc | None = None
    v_scale: ScaleDesc | None = None
    k_bias: ScaleDesc | None = None
    v_bias: ScaleDesc | None = None


def _kind(layer: Any, name: str) -> str:
    kind = type(layer).__name__
    if kind not in _KINDS:
        why = _OTHERS.get(kind, "others do not hold each token's keys and values")
        raise UnsupportedError(f"{name} is a {kind}, expected one of {', '.join(_KINDS)}: {why}")
    pending = _pending(layer, name)
    if pending is not None:
        raise InvalidArgumentError(pending)
    return kind


def _pending(layer: Any, name: str) -> str | None:
    """Why the counts of a layer are not those of its tokens; None if they are.

    Source: mlx-lm 0.32.2 models/cache.py, BatchKVCache.prepare, finalize
    """
    if getattr(layer, "_right_padding", None) is None:  # a cache from a file has no such field
        return None
    return (
        f"{name} has right padding {layer._right_padding.tolist()}, which it counts as tokens "
        "until finalize(), expected None. Call finalize() of all layers first"
    )


def _counts(layer: Any) -> list[Any]:
    """What a layer says of its tokens and their slots."""
    found: list[Any] = [getattr(layer, name, None) for name in _COUNTS]
    return [value.tolist() if hasattr(value, "tolist") else value for value in found]


def _held(layers: Sequence[Any]) -> int:
    """The slots from the first on, of each row, in which every layer has tokens or left padding."""
    return min(map(_filled, layers))


def _filled(layer: Any) -> int:
    if type(layer).__name__ == "BatchKVCache":
        return int(layer._idx)
    # A ring that has turned has counted more tokens than it has slots.
    return int(layer.offset - getattr(layer, "start_position", 0))


def _require_bytes(layer: Any, name: str) -> None:
    if layer.bits != 8:
        raise UnsupportedError(
            f"{name}.bits is {layer.bits}, expected 8: KVX has no MLX format of fewer. Use "
            "QuantizedKVCache(bits=8), or mx.dequantize into a KVCache"
        )


def _require_same_tokens(cache: Sequence[Any]) -> None:
    """Raises unless all layers hold the same tokens at the same slots."""
    for i, layer in enumerate(cache):
        pending = _pending(layer, f"cache[{i}]")
        if pending is not None:
            raise InvalidArgumentError(pending)
    found = [_counts(layer) for layer in cache]
    for i, of_layer in enumerate(found):
        if of_layer != found[0]:
            raise InvalidArgumentError(
                f"cache[{i}] has offset {cache[i].offset} and its slots elsewhere, expected as "
                f"cache[0], whose offset is {cache[0].offset}: between steps all layers agree"
            )


def _parts(layer: Any, name: str) -> _Parts:
    kind = _kind(layer, name)
    if layer.keys is None:
        raise InvalidArgumentError(
            f"{name}.keys is None, expected (batch, num_kv_heads, num_slots, head_dim). Call "
            "reserve(cache, ...) or run the model once"
        )
    mx = sys.modules["mlx.core"]
    mx.eval(layer.keys, layer.values)
    if kind != "QuantizedKVCache":
        return _Parts(_array(layer.keys, f"{name}.keys"), _array(layer.values, f"{name}.values"))
    _require_bytes(layer, name)
    (k, k_scale, k_bias), (v, v_scale, v_bias) = (
        _quantized(half, f"{name}.{word}", mx)
        for half, word in ((layer.keys, "keys"), (layer.values, "values"))
    )
    return _Parts(k, v, k_scale, v_scale, k_bias, v_bias)


def _array(array: Any, name: str, *, dtype: DType | None = None) -> TensorDesc:
    found = describe(array, Layout.BLOCK_HND, dtype=dtype, name=name)
    if 0 in found.shape:
        raise InvalidArgumentError(
            f"{name}.shape is {found.shape}, expected a slot at least: the cache holds no token, "
            "as a row that was all padding. Leave it out, or run the model once"
        )
    repeated = [
        axis
        for axis, (extent, step) in enumerate(zip(found.shape, found.stride, strict=True))
        if extent > 1 and step == 0
    ]
    if repeated:
        raise InvalidArgumentError(
            f"{name}.stride[{repeated[0]}] is 0, expected memory for each number: the array "
            "repeats its memory. Make it with mx.zeros, or mx.contiguous, and evaluate it"
        )
    return found


def _quantized(half: Any, name: str, mx: Any) -> tuple[TensorDesc, ScaleDesc, ScaleDesc]:
    """Four numbers in each uint32, the first in its lowest byte: bytes in order on this machine.

    Source: mlx 0.32.4 mlx/backend/cpu/quantized.cpp
    """
    packed, scales, biases = half
    data = packed.view(mx.uint8)  # the same memory
    mx.eval(data)
    if borrow(data).data != borrow(packed).data:
        raise UnsupportedError(
            f"{name}[0] is strided so that MLX copies it to view it as bytes, expected contiguous. "
            "Replace it by mx.contiguous of it"
        )
    beside = [
        ScaleDesc.of(part.transpose(0, 2, 1, 3), "PER_GROUP", name=f"{name}[{i}]")
        for i, part in ((1, scales), (2, biases))
    ]
    return _array(data, name, dtype=DType.U8_BIAS), beside[0], beside[1]


def _addresses(parts: _Parts) -> list[int]:
    return [part.data for part in parts if part is not None]


def _now(layer: Any) -> Iterator[int]:
    """Where a layer's arrays are, in the order of _Parts."""
    if not isinstance(layer.keys, (tuple, list)):
        yield borrow(layer.keys).data
        yield borrow(layer.values).data
        return
    for k, v in zip(layer.keys, layer.values, strict=True):
        yield borrow(k).data
        yield borrow(v).data


def _outdated(
    layers: Sequence[Any], described: Sequence[tuple[list[Any], list[int]]]
) -> str | None:
    """Why a cache is no longer as it was described; None if it is."""
    for i, (layer, (counts, addresses)) in enumerate(zip(layers, described, strict=True)):
        pending = _pending(layer, f"cache[{i}]")
        if pending is not None:
            return pending
        if layer.keys is None or list(_now(layer)) != addresses:
            return (
                f"cache[{i}] has its keys or values elsewhere, expected where they were described. "
                "MLX moves them when they grow, and in a step while a view is kept: drop the view "
                "before a step, and call cache_view again after it"
            )
        for name, now, then in zip(_COUNTS, _counts(layer), counts, strict=True):
            if now != then:
                return (
                    f"cache[{i}].{name} is {now}, expected {then} as when it was described: tokens "
                    "were added, trimmed or moved. Call cache_view again"
                )
    return None
