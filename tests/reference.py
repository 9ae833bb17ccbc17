"""The spec in Python: what every operation means, one token at a time.

Slow and obvious on purpose, and independent of libkvx: addressing is a loop over tokens, conversion
goes through float32 and explicit tables of every value that a format can hold. Tests run it on a
copy of the memory that libkvx works on and compare the bytes of the whole allocation, so a byte
written where none should be is as visible as a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvx_core.types import Layout, ScaleGranularity

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALED = (*FP8, torch.int8)  # those that take scales

# ---------------------------------------------------------------------------------------------
# Numbers. Spec: E.6
# ---------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A binary floating point format of at most 16 bits."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool
    saturates: bool  # a value past the largest becomes the largest; otherwise infinity
    bits: type  # unsigned integer of the same size


FORMATS = {
    torch.float8_e4m3fn: Format(4, 3, 7, False, True, np.uint8),
    torch.float8_e5m2: Format(5, 2, 15, True, True, np.uint8),
    torch.float16: Format(5, 10, 15, True, False, np.uint16),
    torch.bfloat16: Format(8, 7, 127, True, False, np.uint16),
}


def _magnitudes(fmt: Format) -> np.ndarray:
    """Every finite value with a positive sign as float64; the position is the code."""
    values = []
    for code in range(1 << (fmt.exponent_bits + fmt.mantissa_bits)):
        exponent, mantissa = divmod(code, 1 << fmt.mantissa_bits)
        top = (1 << fmt.exponent_bits) - 1
        if exponent == top and (fmt.has_infinity or mantissa == (1 << fmt.mantissa_bits) - 1):
            break  # from here on infinity and NaN
        if exponent == 0:
            values.append(2.0 ** (1 - fmt.bias - fmt.mantissa_bits) * mantissa)
        else:
            values.append(2.0 ** (exponent - fmt.bias) * (1 + mantissa / (1 << fmt.mantissa_bits)))
    return np.array(values)


MAGNITUDES = {dtype: _magnitudes(fmt) for dtype, fmt in FORMATS.items()}
MAGNITUDES[torch.int8] = np.arange(128.0)


def bits_of(stored: Tensor) -> np.ndarray:
    """The codes of a tensor of a format in FORMATS, as unsigned integers of the same shape."""
    as_int = {1: torch.uint8, 2: torch.int16}[stored.element_size()]
    return stored.contiguous().view(as_int).numpy().view(FORMATS[stored.dtype].bits)


def from_bits(codes: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The tensor with these codes."""
    signed = codes.astype(FORMATS[dtype].bits).view({1: np.uint8, 2: np.int16}[codes.itemsize])
    return torch.from_numpy(signed.copy()).view(dtype)


def decode(stored: Tensor) -> Tensor:
    """The float32 value of every element, exactly."""
    if stored.dtype == torch.float32:
        return stored.clone()
    if stored.dtype == torch.int8:
        return stored.float()
    fmt, table = FORMATS[stored.dtype], MAGNITUDES[stored.dtype]
    codes = bits_of(stored).astype(np.int64)
    sign_bit = 1 << (fmt.exponent_bits + fmt.mantissa_bits)
    magnitude = codes & (sign_bit - 1)
    values = np.full(codes.shape, np.nan)
    finite = magnitude < len(table)
    values[finite] = table[magnitude[finite]]
    if fmt.has_infinity:
        values[magnitude == len(table)] = np.inf
    negative = (codes & sign_bit) != 0
    return torch.from_numpy(np.where(negative, -values, values).astype(np.float32))


def encode(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of `dtype`: ties to even, bytes saturate, NaN stays NaN but in int8."""
    assert value.dtype == torch.float32
    if dtype == torch.float32:
        return value.clone()
    if dtype == torch.int8:
        return value.nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8)
    fmt, table = FORMATS[dtype], MAGNITUDES[dtype]
    exact = value.numpy().astype(np.float64)
    magnitude = np.abs(exact)
    last = len(table) - 1
    if not fmt.saturates:  # rounding past the largest value meets the next power of two: infinity
        table = np.append(table, 2 * table[-1] - table[-2])
    below = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, None)
    above = np.minimum(below + 1, len(table) - 1)
    middle = (table[below] + table[above]) / 2
    even = np.where(below % 2 == 0, below, above)
    codes = np.where(magnitude < middle, below, np.where(magnitude > middle, above, even))
    codes = np.minimum(codes, last if fmt.saturates else last + 1)
    sign_bit = 1 << (fmt.exponent_bits + fmt.mantissa_bits)
    codes = np.where(np.signbit(exact), codes | sign_bit, codes)
    nan = {1: 0x7F, 2: (((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits) | (1 << 6)}
    codes = np.where(np.isnan(exact), nan[np.dtype(fmt.bits).itemsize], codes)
    return from_bits(codes.astype(fmt.bits), dtype)


def convert(
    stored: Tensor,
    dtype: torch.dtype,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
) -> Tensor:
    """What `stored` becomes in a cache of `dtype`. Scales are float32 and broadcast."""
    if stored.dtype == dtype and src_scale is None and dst_scale is None:
        return stored  # the same bytes
    value = decode(stored)
    if src_scale is not None:
        value = value * src_scale
    if dst_scale is not None:
        value = value / dst_scale
    return encode(value, dtype)


# ---------------------------------------------------------------------------------------------
# Caches. Spec: 4, 6.6
# ---------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where one token lies."""

    block: int
    offset: int
    secondary: bool = False


@dataclass(frozen=True)
class Half:
    """K or V of one layer: a tensor in the axes of its layout, and the scales of FP8 or int8."""

    tensor: Tensor
    layout: Layout
    scale: Tensor | None = None
    granularity: ScaleGranularity = ScaleGranularity.NONE
    secondary: Tensor | None = None  # the secondary pool, in the same axes

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.tensor.shape[2 if self.layout == Layout.BLOCK_NHD else 1]

    @property
    def block_size(self) -> int:
        packed = self.tensor.ndim == 5
        return self.tensor.shape[1 if self.layout == Layout.BLOCK_NHD else 3 if packed else 2]

    @property
    def head_dim(self) -> int:
        packed = self.tensor.ndim == 5
        return self.tensor.shape[2] * self.tensor.shape[4] if packed else self.tensor.shape[3]

    def at(self, place: Place) -> Tensor:
        """The memory of one token: [num_kv_heads, head_dim] or [num_kv_heads, dim / pack, pack]."""
        pool = self.secondary if place.secondary else self.tensor
        assert pool is not None
        if self.layout == Layout.BLOCK_NHD:
            return pool[place.block, place.offset]
        if pool.ndim == 5:
            return pool[place.block, :, :, place.offset]
        return pool[place.block, :, place.offset]

    def scale_at(self, place: Place) -> Tensor | None:
        """The scale of every head of one token, float32: [1, 1] or [num_kv_heads, 1]."""
        if self.scale is None:
            return None
        scale = self.scale.to(torch.float32)
        block, offset = place.block, place.offset
        match self.granularity:
            case ScaleGranularity.PER_TENSOR:
                picked = scale.reshape(1)
            case ScaleGranularity.PER_BLOCK:
                picked = scale[block].reshape(1)
            case ScaleGranularity.PER_HEAD:
                picked = scale
            case ScaleGranularity.PER_BLOCK_HEAD:
                picked = scale[block]
            case ScaleGranularity.PER_TOKEN_HEAD:
                picked = scale[block, offset]
        return picked[:, None]

    def heads(self, scale: Tensor | None, first: int, count: int) -> Tensor | None:
        """The rows of `scale_at` that belong to heads [first, first + count)."""
        return scale if scale is None or len(scale) == 1 else scale[first : first + count]

    def read(self, place: Place) -> Tensor:
        """The stored elements of one token, [num_kv_heads, head_dim]."""
        return self.at(place).reshape(self.num_kv_heads, self.head_dim)

    def put(self, place: Place, stored: Tensor, head: int = 0) -> None:
        """Stores rows [n, head_dim] as the heads from `head` on."""
        memory = self.at(place)[head : head + stored.shape[0]]
        memory.copy_(stored.reshape(memory.shape))


@dataclass(frozen=True)
class Layer:
    """K and V of one layer; V is None for MLA."""

    k: Half
    v: Half | None

    def halves(self) -> list[Half]:
        return [self.k] if self.v is None else [self.k, self.v]


# ---------------------------------------------------------------------------------------------
# Addressing. Spec: 5
# ---------------------------------------------------------------------------------------------


class End(Protocol):
    """Where token `token` of row `row` lies for K (kv 0) or V (kv 1); None: nowhere."""

    def place(self, row: int, token: int, kv: int) -> Place | None: ...


def slot_place(slot: int, block_size: int, invalid_slot: int = -1) -> Place | None:
    """A slot counts tokens across blocks; negative slots and `invalid_slot` are nowhere."""
    if slot < 0 or slot == invalid_slot:
        return None
    return Place(slot // block_size, slot % block_size)


@dataclass(frozen=True)
class Dense:
    """Row r is block r."""

    def place(self, row: int, token: int, kv: int) -> Place | None:
        return Place(row, token)


@dataclass(frozen=True)
class Packed:
    """One row of block ids per sequence: [seq_count, max_blocks_per_seq]."""

    indices: Tensor
    block_size: int
    null_block_id: int = -1

    def place(self, row: int, token: int, kv: int) -> Place | None:
        block = int(self.indices[row, token // self.block_size])
        if block < 0 or block == self.null_block_id:
            return None
        return Place(block, token % self.block_size)


@dataclass(frozen=True)
class Ragged:
    """One block id per token; sequence s owns indices[indptr[s] : indptr[s + 1]]."""

    indices: Tensor
    indptr: Tensor
    block_size: int
    null_block_id: int = -1

    def place(self, row: int, token: int, kv: int) -> Place | None:
        block = int(self.indices[int(self.indptr[row]) + token])
        if block < 0 or block == self.null_block_id:
            return None
        return Place(block, token % self.block_size)


@dataclass(frozen=True)
class KvOffsets:
    """TensorRT-LLM's [seq_count, beam_width, 2, max_blocks_per_seq] of KVCacheIndex.

    `per_block` sub-blocks make one block of the pool.
    """

    indices: Tensor
    block_size: int
    per_block: int
    null_block_id: int = -1

    def place(self, row: int, token: int, kv: int) -> Place | None:
        rows = self.indices.reshape(-1, 2, self.indices.shape[-1])
        index = int(rows[row, kv, token // self.block_size])
        if index == -1:
            return None
        secondary = bool(index & 0x8000_0000)
        block = (index & 0x7FFF_FFFF) // self.per_block
        if block == self.null_block_id:
            return None
        return Place(block, token % self.block_size, secondary)


@dataclass(frozen=True)
class Slots:
    """One slot per moved token, the sequences one after the other."""

    slots: Tensor
    seq_lens: Sequence[int]
    block_size: int
    invalid_slot: int = -1

    def place(self, row: int, token: int, kv: int) -> Place | None:
        slot = int(self.slots[sum(self.seq_lens[:row]) + token])
        return slot_place(slot, self.block_size, self.invalid_slot)


# ---------------------------------------------------------------------------------------------
# Operations. Spec: 7, E.2, E.3
# ---------------------------------------------------------------------------------------------


def write(
    layer: Layer, key: Tensor, value: Tensor | None, slots: Tensor, invalid_slot: int = -1
) -> None:
    """Stores token i, key[i] and value[i] [num_kv_heads, head_dim], in slot i of the cache."""
    for half, tokens in zip(layer.halves(), (key, value), strict=False):
        for i, slot in enumerate(slots.tolist()):
            place = slot_place(slot, half.block_size, invalid_slot)
            if place is not None:
                scale = half.scale_at(place)
                half.put(place, convert(tokens[i], half.tensor.dtype, None, scale))


def gather(
    layer: Layer,
    end: End,
    row_lens: Sequence[int],
    key: Tensor,
    value: Tensor | None,
    zero_fill: bool = False,
) -> None:
    """Fills key and value, [rows, max_seq_len, num_kv_heads, head_dim], from the cache.

    `row_lens` has one length per row: with beams, every beam of a sequence has its length.
    """
    for kv, (half, out) in enumerate(zip(layer.halves(), (key, value), strict=False)):
        for row, length in enumerate(row_lens):
            for token in range(out.shape[1]):
                place = end.place(row, token, kv) if token < length else None
                if place is not None:
                    stored = half.read(place)
                    out[row, token] = convert(stored, out.dtype, half.scale_at(place), None)
                elif zero_fill:
                    out[row, token] = torch.zeros(out.shape[2:], dtype=out.dtype)


def migrate(
    src: Sequence[Layer],
    src_end: End,
    dst: Sequence[Layer],
    dst_end: End,
    row_lens: Sequence[int],
    *,
    src_starts: Sequence[int] | None = None,
    dst_starts: Sequence[int] | None = None,
    src_head: int = 0,
    dst_head: int = 0,
    num_heads: int | None = None,
    zero_fill: bool = False,
) -> None:
    """Moves token starts[row] + i of every row from one cache to another, all layers, K and V."""
    for src_layer, dst_layer in zip(src, dst, strict=True):
        halves = zip(src_layer.halves(), dst_layer.halves(), strict=True)
        for kv, (source, target) in enumerate(halves):
            count = source.num_kv_heads if num_heads is None else num_heads
            for row, length in enumerate(row_lens):
                for i in range(length):
                    there = dst_end.place(row, i + (dst_starts[row] if dst_starts else 0), kv)
                    here = src_end.place(row, i + (src_starts[row] if src_starts else 0), kv)
                    if there is None:
                        continue
                    if here is not None:
                        stored = source.read(here)[src_head : src_head + count]
                        moved = convert(
                            stored,
                            target.tensor.dtype,
                            source.heads(source.scale_at(here), src_head, count),
                            target.heads(target.scale_at(there), dst_head, count),
                        )
                        target.put(there, moved, dst_head)
                    elif zero_fill:
                        zeros = torch.zeros(count, target.head_dim, dtype=target.tensor.dtype)
                        target.put(there, zeros, dst_head)
