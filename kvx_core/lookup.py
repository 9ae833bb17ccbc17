"""find_tokens: where libkvx finds the tokens of a span. Spec: E.12"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core import _abi
from kvx_core.errors import UnsupportedError
from kvx_core.tables import BlockTable, SeqLens
from kvx_core.tensors import is_torch, read_array
from kvx_core.types import DType, Memory
from kvx_core.view import CacheSpan

_PLACE = np.dtype([("block", np.int64), ("offset", np.uint32), ("pool", np.uint32)])


def find_tokens(span: CacheSpan, lens: SeqLens, *, v: bool = False) -> npt.NDArray[Any]:
    """Finds each token that a migration from `span` would read.

    lens: (seq_count,), tokens of each sequence, from its start on
    v:    find V, for which a KV_OFFSETS table has blocks of its own
    Returns an array with an element for each token, row after row: `block`, -1 where nothing is
    stored (null blocks, skipped slots), `offset` in the block and `pool`, 0 or 1. Reads index
    arrays on a device back. Raises InvalidArgumentError, UnsupportedError, OutOfRangeError, with
    the messages of migrate about its source.
    Spec: E.12
    """
    view = span.view.without_scales()
    on_host = replace(
        span,
        view=view,
        block_table=None if span.block_table is None else span.block_table.on_host(),
        slots=None if span.slots is None else span.slots.on_host(),
        starts=None if span.starts is None else SeqLens.of(span.starts.to_numpy()),
    )
    lengths = lens.to_numpy()
    beams = 1
    if span.block_table is not None and span.block_table.seq_count == len(lengths):
        beams = max(span.block_table.beam_width, 1)
    places = np.zeros(int(lengths[lengths > 0].sum()) * beams, _PLACE)
    lens = SeqLens.of(lengths)
    desc = _abi.kvx_find_desc_t(
        is_v=v,
        span=_abi.pointer_to(on_host),
        seq_lens=_abi.pointer_to(lens),
        place_count=len(places),
        places=places.ctypes.data,
    )
    _abi.check(_abi.library().kvx_find_tokens(desc))
    return places


def table_of_plane(table: BlockTable, plane: int) -> BlockTable:
    """The table of one plane, K or V of a layer, of a POINTERS table with an address for each.

    Raises UnsupportedError where a block is null in some planes, and for what cannot be read.
    """
    rows, columns = table.seq_count, table.max_blocks_per_seq
    planes = table.indices_count // (rows * columns)
    owner = table.owner[0] if isinstance(table.owner, tuple) else table.owner
    if table.memory is Memory.DEVICE and is_torch(owner):
        pointers = owner.reshape(rows, columns, planes).cpu().numpy()
    else:
        shape, stride = (rows, columns, planes), (columns * planes, planes, 1)
        name = "block_table.indices"
        pointers = read_array(name, table.indices, shape, stride, DType.U64, table.memory)
    null = pointers == 0
    if (null.any(axis=-1) != null.all(axis=-1)).any():
        raise UnsupportedError(
            "block_table has blocks that are null in some planes, expected null in all or none "
            "where planes are read one by one (spec E.12)"
        )
    one: Any = np.ascontiguousarray(pointers[..., plane : plane + 1])
    if table.memory is Memory.DEVICE and is_torch(owner):
        one = owner.new_tensor(one.view(np.int64).tolist())
    return replace(BlockTable.pointers(one), flags=table.flags)
