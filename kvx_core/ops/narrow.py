"""A view of some tensors of another, and a table that finds these alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tables import BlockTable
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import TensorLike, read_array
from kvx_core.desc.view import CacheView
from kvx_core.types import DType, Memory

_MOST_ALIGNED = 16  # bytes: spec E.12


def narrowed(
    view: CacheView, table: BlockTable | None, chosen: Sequence[tuple[int, str]], **fields: Any
) -> tuple[CacheView, BlockTable | None]:
    """K, V or both of some layers of a view, without scales and planes, and their table.

    chosen: index of a layer, and which of its tensors: "k", "v" or "kv"; V alone becomes K
    fields: of the new view: its scales, zero points and planes, if it has any
    The table is the given one; of POINTERS with an address per plane, a copy with those of these
    tensors.
    """
    pointers = table is not None and table.has_planes
    data = 0  # its bits that are 0 are 0 in the addresses of all tensors
    columns: dict[tuple[int, str], int] = {}  # of a POINTERS table
    for i, layer in enumerate(view.layers if pointers else ()):
        for kind, tensor in layer.tensors.items():
            data |= tensor.data
            columns[i, kind] = len(columns)
    layers, kept = [], []
    for i, kinds in chosen:
        cache = view.layers[i]
        found = {kind: tensor for kind, tensor in cache.tensors.items() if kind in kinds}
        tensors = list(found.values())
        if pointers:
            kept += [columns[i, kind] for kind in found]
            tensors = [_aligned_as(tensor, data) for tensor in tensors]
        if pointers or len(found) < len(cache.tensors):
            cache = CacheDesc.from_kv(*tensors, pool=cache.pool, shared_kv=cache.shared_kv)
        layers.append(cache)
    if pointers and table is not None:
        table = _of_planes(table, kept)
    none: dict[str, Any] = dict.fromkeys(("k_scales", "v_scales", "k_zeros", "v_zeros"))
    if any(kinds == "v" for _, kinds in chosen):
        none["facts"] = view.facts.of_parts()
    return replace(view, layers=tuple(layers), **(none | {"planes": ()} | fields)), table


def _of_planes(table: BlockTable, planes: Sequence[int]) -> BlockTable:
    """A copy of a POINTERS table with the addresses of some of its planes, in this order.

    Raises UnsupportedError for a table on a device that is not torch's.
    """
    columns = table.seq_count * table.max_blocks_per_seq
    num_planes = table.indices_count // columns if columns else 0
    shape = table.seq_count, table.max_blocks_per_seq, num_planes
    chosen = list(planes) if columns else []
    owner = table.owner[0] if isinstance(table.owner, tuple) else table.owner
    found: TensorLike
    if table.memory is Memory.DEVICE and is_torch(owner):
        found = owner.view(shape)[..., chosen].contiguous()
    else:
        stride = num_planes * table.max_blocks_per_seq, num_planes, 1
        name = "block_table.indices"
        addresses = read_array(name, table.indices, shape, stride, DType.U64, table.memory)
        found = np.ascontiguousarray(addresses[..., chosen])
    made = BlockTable.pointers(found)
    # The copy keeps the blocks of the table alive and checks them.
    kept = table.owner[1:] if isinstance(table.owner, tuple) else (table.owner,)
    return replace(made, memory=table.memory, owner=(made.owner, *kept), flags=table.flags)


def _aligned_as(tensor: TensorDesc, data: int) -> TensorDesc:
    """The tensor at an address that is as aligned as `data` is.

    libkvx expects every address of a table to be as aligned as the tensors of a call are (spec
    E.12), and the blocks of these may be less aligned, as other tensors of the view are. Where a
    tensor of such a call lies is not looked at otherwise.
    """
    alignment = min(data & -data, _MOST_ALIGNED)
    if tensor.data % (2 * alignment) or alignment == _MOST_ALIGNED:
        return tensor
    return replace(tensor, data=tensor.data + alignment, owner=(tensor.owner,))
