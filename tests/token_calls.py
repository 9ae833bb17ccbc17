"""Writes and gathers of tokens, compared byte for byte with the reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from kvx_core.types import Layout
from tests import reference
from tests.caches import (
    LAYOUTS,
    SAME_HEAD_DIM,
    Allocation,
    Cache,
    Geometry,
    assert_same_bytes,
    assert_same_elements,
    random_values,
)
from tests.calls import Backend
from tests.reference import Half, KvOffsets, Layer, Packed, Ragged

# Each breaks an assumption that fast code likes to make.
GEOMETRIES = {
    "usual": Geometry(),
    "one_head_of_80": Geometry(num_kv_heads=1, head_dim=80),
    "block_size_1": Geometry(num_blocks=11, block_size=1),
    "one_block": Geometry(num_blocks=1, block_size=32),
    "odd": Geometry(num_blocks=3, block_size=5, num_kv_heads=3, head_dim=7),
    "head_dim_1": Geometry(num_kv_heads=5, head_dim=1),
    "llama": Geometry(num_blocks=4, block_size=16, num_kv_heads=8, head_dim=128),
    "wider_k": Geometry(head_dim=24, v_head_dim=16),
}


CASES = [
    pytest.param(layout, geometry, id=f"{layout}-{geometry}")
    for layout, geometry in product(LAYOUTS, GEOMETRIES)
    if not (layout in SAME_HEAD_DIM and GEOMETRIES[geometry].v_head_dim)
]


def key_value(layer: Layer, num_tokens: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """key and value, or key alone, of random numbers: [num_tokens, num_kv_heads, head_dim]."""
    return [
        random_values((num_tokens, half.num_kv_heads, half.head_dim), dtype, seed + i)
        for i, half in enumerate(layer.halves())
    ]


def check_write(
    backend: Backend, cache: Cache, tokens: list[Tensor], slots: Tensor, invalid_slot: int = -1
) -> None:
    """Writes into the last layer and compares all of memory with the reference."""
    key, value = (*tokens, None)[:2]
    expected, inputs = cache.clone(), [t.clone() for t in tokens]
    reference.write(expected.layers[-1], key, value, slots, invalid_slot)
    backend.write(cache.layers[-1], key, value, slots, invalid_slot)
    assert_same_bytes(cache, expected)
    for tensor, before in zip(tokens, inputs, strict=True):
        assert_same_elements(tensor, before, "the input of the write")


def output(layer: Layer, rows: int, tokens: int, dtype: torch.dtype, style: str) -> Cache:
    """Outputs of a gather, [rows, tokens, num_kv_heads, head_dim], in memory of their own."""
    shapes = [(rows, tokens, h.num_kv_heads, h.head_dim) for h in layer.halves()]
    storages, halves = [], []
    for i, (r, t, h, d) in enumerate(shapes):
        if style == "dense":
            memory = Allocation(r * t * h * d * dtype.itemsize, 70 + i)
            tensor = memory.take((r, t, h, d), dtype)
        elif style == "strided":  # every axis padded, heads outermost, not aligned to 16 bytes
            memory = Allocation((h + 1) * (r + 1) * (t + 2) * (d + 3) * dtype.itemsize, 70 + i, 4)
            stored = memory.take((h + 1, r + 1, t + 2, d + 3), dtype)
            tensor = stored.permute(1, 2, 0, 3)[:r, :t, :h, :d]
        else:
            assert style == "transposed"  # tokens innermost
            memory = Allocation(r * t * h * d * dtype.itemsize, 70 + i)
            tensor = memory.take((r, h, d, t), dtype).permute(0, 3, 1, 2)
        storages.append(memory.storage)
        halves.append(Half(tensor, Layout.BLOCK_CUSTOM))
    return Cache(tuple(storages), (Layer(*(*halves, None)[:2]),))


def check_gather(
    backend: Backend,
    cache: Cache,
    end: Packed | Ragged | KvOffsets,
    lengths: Tensor,
    max_seq_len: int,
    *,
    dtype: torch.dtype | None = None,
    style: str = "dense",
    flat: bool = False,
    zero_fill: bool = False,
) -> None:
    """Gathers from the last layer into random bytes and compares all of memory."""
    layer = cache.layers[-1]
    beams = end.indices.shape[1] if isinstance(end, KvOffsets) else 1
    dtype = dtype or layer.k.tensor.dtype
    result = output(layer, lengths.numel() * beams, max_seq_len, dtype, style)
    expected, source = result.clone(), cache.clone()
    row_lens = lengths.repeat_interleave(beams).clamp(max=max_seq_len).tolist()
    reference.gather(layer, end, row_lens, *outputs(expected), zero_fill=zero_fill)
    key, value = outputs(result)
    if flat:
        key, value = (t if t is None else t.flatten(0, 1) for t in (key, value))
    backend.gather(
        layer,
        end,
        lengths,
        key,
        value,
        max_seq_len=max_seq_len,
        zero_fill=zero_fill,
        bytes_per_block=cache.bytes_per_block,
        secondary_num_blocks=0 if layer.k.secondary is None else layer.k.secondary.shape[0],
        null_block_id=end.null_block_id,
    )
    assert_same_bytes(result, expected)
    assert_same_bytes(cache, source)


def outputs(result: Cache) -> tuple[Tensor, Tensor | None]:
    """key and value of an `output`."""
    layer = result.layers[0]
    return layer.k.tensor, None if layer.v is None else layer.v.tensor
