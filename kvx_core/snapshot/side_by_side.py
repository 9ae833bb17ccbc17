"""Restores snapshots that lie side by side in memory, with one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvx_core.migrate import copy_tokens
from kvx_core.ops import device_status
from kvx_core.snapshot.contents import Stored, is_row, is_scale
from kvx_core.snapshot.dense import Dense
from kvx_core.snapshot.errors import StoreError
from kvx_core.snapshot.scales import has_vector_scales
from kvx_core.snapshot.section import Section, device_of, ints_on, table_on
from kvx_core.tables import BlockTable
from kvx_core.view import CacheView

if TYPE_CHECKING:
    from kvx_core.snapshot.snapshot import Snapshot


def restore_all(
    snapshots: Sequence[Snapshot],
    section: Section,
    start: int,
    stop: int,
    *,
    stream: int | None = None,
) -> int:
    """Snapshot.restore of snapshots that follow one another in a sequence.

    start, stop: positions in the sequence: from the first snapshot into the last one
    Snapshots are copied together if `can_join` of them and the section has K and V without scales
    per vector and planes. Mutates the section's cache, except null blocks. Waits for a device.
    Returns the bytes of these tokens as the section stores them.
    Raises StoreError if Snapshot.mismatch has a reason, InvalidArgumentError, UnsupportedError,
    OutOfRangeError.
    """
    view = section.view
    if not can_join(snapshots) or view.planes or not view.layers or has_vector_scales(view):
        num_bytes = 0
        for one in snapshots:
            begin, end = one.header.start, one.header.start + len(one.tokens)
            num_bytes += one.restore(section, max(start, begin), min(stop, end), stream=stream)
        return num_bytes
    first = snapshots[0]
    if reasons := first.mismatch(section):
        raise StoreError(f"{first.name}: {'; '.join(reasons)}")
    here = set(first.header.layers)
    layers = [layer for layer in section.layers if layer in here]
    heads = [first.header.heads, section.heads]
    begin, end = max(one[0] for one in heads), min(one[1] for one in heads)
    if not layers or begin >= end or start >= stop:
        return 0
    device, section = device_of([section]), section.of(layers)
    blocks = np.arange(len(snapshots), dtype=np.int32)[None]
    copy_tokens(
        _view(snapshots, layers).at(
            block_table=table_on(BlockTable.packed(blocks), device),
            starts=ints_on([start - first.header.start], device),
            head_start=begin - first.header.heads[0],
        ),
        section.view.at(
            block_table=table_on(section.block_table, device),
            starts=ints_on([start], device),
            head_start=begin - section.heads[0],
        ),
        ints_on([stop - start], device),
        num_heads=end - begin,
        stream=stream,
    )
    if device is not None:
        device_status(stream)  # waits: tables and memory that the device reads are freed now
    return (stop - start) * section.view.bytes_per_token(end - begin)


def can_join(snapshots: Sequence[Snapshot]) -> bool:
    """Whether one copy can take all of them: several snapshots of as many tokens, of the same
    layers, heads and formats, K and V alone, that follow one another and lie side by side.
    """
    if len(snapshots) < 2:
        return False
    first, second = snapshots[:2]
    step = _address(second) - _address(first)
    if step < sum(tensor.num_bytes for tensor in first.tensors.values()):
        return False
    num_heads = first.header.heads[1] - first.header.heads[0]
    if any(step % t.dtype.itemsize or is_row(t, num_heads) for t in first.tensors.values()):
        return False
    if any(map(is_scale, first.tensors)) or any(part.planes for part in first.header.parts):
        return False
    return all(
        _address(one) == _address(first) + i * step
        and one.header.start == first.header.start + i * len(first.tokens)
        and len(one.tokens) == len(first.tokens)
        and one.header.heads == first.header.heads
        and one.header.parts == first.header.parts
        and (one.tensors is first.tensors or _are_alike(one.tensors, first.tensors))
        for i, one in enumerate(snapshots[1:], 1)
    )


def _are_alike(tensors: dict[str, Stored], others: dict[str, Stored]) -> bool:
    """Whether tensors have the same names, types and offsets."""
    return tensors.keys() == others.keys() and all(
        (t.type, t.offset) == (others[n].type, others[n].offset) for n, t in tensors.items()
    )


def _address(snapshot: Snapshot) -> int:
    assert snapshot.memory is not None
    address: int = snapshot.memory.ctypes.data
    return address


def _view(snapshots: Sequence[Snapshot], layers: Sequence[int]) -> CacheView:
    """K and V of these layers, as those of a paged cache."""
    first = snapshots[0]
    assert first.memory is not None
    step = _address(snapshots[1]) - _address(first)
    types = tuple((name, t.dtype, t.shape, t.offset) for name, t in first.tensors.items())
    key = _address(first), tuple(layers), len(snapshots), step, types
    views = {} if first.views is None else first.views
    found = views.get(key)
    if found is None:
        found = views[key] = Dense(first.tensors, first.memory).blocks(layers, len(snapshots), step)
    return found
