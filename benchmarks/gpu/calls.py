"""KVX's calls for these caches, ready to be made: what a CUDA graph captures is their launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from benchmarks.gpu.caches import Layer
from benchmarks.gpu.places import Call, Place
from kvx_core import (
    BlockTable,
    CacheSpan,
    Layout,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    TensorDesc,
    Transfer,
    WriteLayersPlan,
    describe,
    gather_kv,
    write_kv,
)
from kvx_core.ops.migrate import copy_tokens

Scales = tuple[ScaleDesc, ScaleDesc]  # of K and V
Index = TypeVar("Index", BlockTable, SeqLens, SlotMapping)


def write(
    place: Place,
    layer: Layer,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    scales: Scales | None = None,
    find_scales: bool = False,
    transfer: Transfer = Transfer.KERNEL,
) -> Call:
    """key, value: (num_tokens, num_kv_heads, head_dim)"""
    k_scale, v_scale = scales or (None, None)
    return partial(
        write_kv,
        layer.desc,
        _dense(place, key),
        _dense(place, value),
        _slots(place, slots),
        k_scale=k_scale,
        v_scale=v_scale,
        find_scales=find_scales,
        transfer=transfer,
    )


def write_layers(
    place: Place, layers: Sequence[Layer], keys: Tensor, values: Tensor, slots: Tensor
) -> Call:
    """All layers in one call. keys, values: (num_layers, num_tokens, num_kv_heads, head_dim)"""
    plan = WriteLayersPlan([layer.desc for layer in layers])
    given = ([_dense(place, token) for token in half] for half in (keys, values))
    return partial(plan, *given, _slots(place, slots))


def gather(
    place: Place,
    layer: Layer,
    table: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scales: Scales | None = None,
    transfer: Transfer = Transfer.KERNEL,
) -> Call:
    """key, value: (seq_count, max_seq_len, num_kv_heads, head_dim)"""
    k_scale, v_scale = scales or (None, None)
    return partial(
        gather_kv,
        layer.desc,
        indices(place, BlockTable.packed(table), transfer),
        indices(place, SeqLens.of(seq_lens), transfer),
        out=(_dense(place, key), _dense(place, value)),
        k_scale=k_scale,
        v_scale=v_scale,
        transfer=transfer,
    )


def migrate(
    place: Place,
    src: CacheSpan,
    dst: CacheSpan,
    seq_lens: Tensor,
    *,
    find_scales: bool = False,
    transfer: Transfer = Transfer.KERNEL,
) -> Call:
    """All layers."""
    lens = indices(place, SeqLens.of(seq_lens), transfer)
    return partial(copy_tokens, src, dst, lens, find_scales=find_scales, transfer=transfer)


def indices(place: Place, desc: Index, transfer: Transfer = Transfer.KERNEL) -> Index:
    """What says where tokens lie. The copy engines do not read it, so then the host has it."""
    return desc if transfer is Transfer.COPY_ENGINE else place.located(desc)


# A GPU's tensors are passed as engines pass them, so that C reads them: to describe a tensor takes
# the host longer than to write it. Where the CPU stands for a GPU, they are described as the GPU's.


def _dense(place: Place, tokens: Tensor) -> Tensor | TensorDesc:
    return tokens if tokens.is_cuda else place.located(describe(tokens, Layout.BLOCK_CUSTOM))


def _slots(place: Place, slots: Tensor) -> Tensor | SlotMapping:
    return slots if slots.is_cuda else indices(place, SlotMapping.of(slots))
