"""Tokens that a migration leaves out since one end has no place for them. Spec: 5.1, 5.2"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvx_core.desc.find_tokens import find_tokens
from kvx_core.desc.planes import Plane
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.view import CacheSpan
from kvx_core.types import BlockTableFormat, Memory


class _Part(NamedTuple):
    """K, V or a plane at both ends, as find_tokens takes it, and its bytes per token."""

    v: bool
    layer: int
    planes: tuple[int, int] | None  # at the source and the destination
    token_bytes: int


def may_have_holes(span: CacheSpan, *, zero_fill: bool = False) -> bool:
    """True if a table of this end may have entries without a block.

    zero_fill: the call zeroes tokens without a source instead, so that any table may have holes
    """
    finders: list[CacheSpan | Plane] = [span, *span.view.planes]
    tables = (one.block_table for one in finders)
    return any(table is not None and (zero_fill or table.has_holes) for table in tables)


def has_slots(span: CacheSpan) -> bool:
    """True if slots name tokens at this end: some may be skipped."""
    return span.slots is not None or any(plane.slots is not None for plane in span.view.planes)


def may_skip(span: CacheSpan) -> bool:
    """True if a slot of this end is skipped, or lies on a device. Reads all slots."""
    finders: list[CacheSpan | Plane] = [span, *span.view.planes]
    return any(one.slots is not None and _may_skip(one.slots) for one in finders)


def _may_skip(slots: SlotMapping) -> bool:
    if slots.memory is Memory.DEVICE:
        return True
    slots.require_in_place("slots")  # since the move another thread may have freed them
    numbers, skipped = slots.to_numpy(), slots.invalid_slot
    if numbers.min(initial=0) < 0:
        return True
    return skipped >= 0 and bool((numbers == skipped).any())


def bytes_left_out(src: CacheSpan, dst: CacheSpan, lens: SeqLens, num_heads: int | None) -> int:
    """Bytes, as the destination stores them, of the tokens that have no place at one end.

    Reads tables and slots. Those on a device are not read back: their tokens count as moved.
    """
    tables = [end.block_table for end in (src, dst) if end.block_table is not None]
    places: list[BlockTable | SlotMapping] = [*tables]
    places += [end.slots for end in (src, dst) if end.slots is not None]
    if any(place.memory is Memory.DEVICE for place in places):
        return 0
    rows = max((table.num_rows for table in tables), default=lens.seq_count)
    of_rows = SeqLens.of(np.repeat(lens.to_numpy(), rows // max(lens.seq_count, 1) or 1))
    counts: dict[tuple[bool, int, tuple[int, int] | None], int] = {}
    total = 0
    for part in _parts(src, dst, num_heads):
        key = part[:3]
        if key not in counts:
            counts[key] = int(np.count_nonzero(~_moves(src, dst, of_rows, part)))
        total += counts[key] * part.token_bytes
    return total


def _parts(src: CacheSpan, dst: CacheSpan, num_heads: int | None) -> Iterator[_Part]:
    tables = [end.block_table for end in (src, dst) if end.block_table is not None]
    by_plane = any(table.has_planes for table in tables)
    by_half = by_plane or any(table.format is BlockTableFormat.KV_OFFSETS for table in tables)
    for i, layer in enumerate(dst.view.layers):
        for kv, dim in zip(layer.tensors, (layer.head_dim, layer.v_head_dim), strict=False):
            dtype = layer.tensors[kv].dtype
            bytes_of_head = dim // dtype.numbers * dtype.itemsize
            heads = num_heads or layer.num_kv_heads
            yield _Part(kv == "v" and by_half, i if by_plane else 0, None, heads * bytes_of_head)
    there = {plane.key: i for i, plane in enumerate(dst.view.planes)}
    for i, plane in enumerate(src.view.planes):
        if plane.tokens_per_entry == 1 and plane.key in there:
            at_dst = there[plane.key]
            of_token = dst.view.planes[at_dst].entry_bytes(num_heads)
            yield _Part(False, 0, (i, at_dst), of_token)


def _moves(src: CacheSpan, dst: CacheSpan, lens: SeqLens, part: _Part) -> npt.NDArray[np.bool_]:
    """Which tokens have a place at both ends."""
    moves: npt.NDArray[np.bool_] = np.ones(int(lens.to_numpy().sum()), np.bool_)
    for number, end in enumerate((src, dst)):
        table = end.block_table
        by_plane = table is not None and table.has_planes
        by_half = by_plane or (table is not None and table.format is BlockTableFormat.KV_OFFSETS)
        planes = tuple(plane.of_parts() for plane in end.view.planes)
        span = replace(
            end,
            view=replace(end.view, planes=planes) if planes else end.view,
            block_table=None if table is None else table.of_parts(),
        )
        found = find_tokens(
            span,
            lens,
            v=part.v and by_half,
            layer=part.layer if by_plane else 0,
            plane=None if part.planes is None else part.planes[number],
        )
        moves &= found["block"] >= 0
    return moves
