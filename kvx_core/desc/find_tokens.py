"""find_tokens: where libkvx finds the tokens of a span. Spec: E.12"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi
from kvx_core.desc.planes import Plane
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import OutOfRangeError
from kvx_core.types import Memory

_PLACE = np.dtype([("block", np.int64), ("offset", np.uint32), ("pool", np.uint32)])


def find_tokens(
    span: CacheSpan, lens: SeqLens, *, v: bool = False, layer: int = 0, plane: int | None = None
) -> npt.NDArray[Any]:
    """Finds each token that a migration from `span` would read.

    lens:  (seq_count,), tokens of each sequence, from its start on
    v:     find V, for which KV_OFFSETS and POINTERS tables have entries of their own
    layer: with a POINTERS table, the layer of K or V; otherwise 0
    plane: find the entries of this plane of the view that a migration would move, not K or V
    Returns an array with an element for each token or entry, the rows one after the other: `block`,
    -1 where nothing is stored (null blocks, skipped slots), `offset` into it and `pool`, 0 or 1.
    Index arrays on a device are read back. Raises InvalidArgumentError, UnsupportedError,
    OutOfRangeError, with the messages of migrate about its source.
    Spec: E.12
    """
    span.require_in_place("src")  # refuses arrays that have moved
    on_host = _with_tables_on_host(span)
    view = on_host.view
    if lens.memory is Memory.DEVICE:
        lens = SeqLens.of(lens.to_numpy())
    lengths = lens.to_numpy()
    beams = 1
    if span.block_table is not None and span.block_table.seq_count == len(lengths):
        beams = max(span.block_table.beam_width, 1)
    tokens_per_entry = 1 if plane is None else view.planes[plane].tokens_per_entry
    count = sum(num_entries(lengths, tokens_per_entry).tolist()) * beams
    try:
        places = np.zeros(min(count, 2**62), _PLACE)
    except (MemoryError, ValueError):
        raise OutOfRangeError(
            f"seq_lens adds up to {count} tokens, whose places no memory holds; expected lengths "
            "that the span has places for (spec 5.3)"
        ) from None
    desc = abi.kvx_find_desc_t(
        is_v=v,
        layer=layer,
        plane_plus_1=0 if plane is None else plane + 1,
        span=abi.pointer_to(on_host),
        seq_lens=abi.pointer_to(lens),
        place_count=len(places),
        places=places.ctypes.data,
    )
    abi.check(abi.library().kvx_find_tokens(desc))
    return places


def null_blocks(view: CacheView, blocks: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which entries of a PACKED table stand for no block. Does not check them. Spec: 5.1, E.2

    blocks: ids of blocks of the view
    """
    null: npt.NDArray[np.bool_] = blocks < 0
    if view.null_block_id >= 0:
        null |= blocks == view.null_block_id
    return null


def _with_tables_on_host(span: CacheSpan) -> CacheSpan:
    """The span as one of stored bytes, whose tables, slots and starts the host can read."""
    view = span.view.without_scales()
    if any(one.memory is Memory.DEVICE for one in view.planes):
        view = replace(view, planes=tuple(map(_with_indices_on_host, view.planes)))
    indices = span.block_table, span.slots, span.starts
    if view is span.view and all(one is None or one.memory is Memory.HOST for one in indices):
        return span
    return replace(
        span,
        view=view,
        block_table=None if span.block_table is None else span.block_table.on_host(),
        slots=None if span.slots is None else span.slots.on_host(),
        starts=None if span.starts is None else SeqLens.of(span.starts.to_numpy()),
    )


def num_entries(lengths: npt.NDArray[np.int64], tokens_per_entry: int) -> npt.NDArray[np.int64]:
    """The entries that move of as many tokens: complete ones, or that of a sequence. Spec: E.11"""
    tokens = np.maximum(lengths, 0)
    return np.minimum(tokens, 1) if tokens_per_entry == 0 else tokens // tokens_per_entry


def _with_indices_on_host(plane: Plane) -> Plane:
    """The plane for a call that reads only its table or slots: its memory is not checked."""
    return replace(
        plane,
        memory=Memory.HOST,
        scale=_on_host(plane.scale),
        zero=_on_host(plane.zero),
        block_table=None if plane.block_table is None else plane.block_table.on_host(),
        slots=None if plane.slots is None else plane.slots.on_host(),
    )


def _on_host(scale: ScaleDesc | None) -> ScaleDesc | None:
    return None if scale is None else replace(scale, memory=Memory.HOST)
