"""Restores snapshots that lie side by side in a room, with one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvx_core.desc.tables import BlockTable
from kvx_core.errors import StoreError
from kvx_core.ops.migrate import copy_rows, copy_tokens
from kvx_core.ops.write_gather import device_status
from kvx_core.snapshot.scales import has_vector_scales
from kvx_core.snapshot.section import Section, device_of, ints_on, row_on_host, table_on

if TYPE_CHECKING:
    from kvx_core.snapshot.snapshot import Snapshot


def restore_all(
    snapshots: Sequence[Snapshot],
    section: Section,
    start: int,
    stop: int,
    *,
    stream: int | None = None,
    is_checked: bool = False,
) -> int:
    """Restores snapshots that follow one another in a sequence, as Snapshot.restore.

    start, stop: positions in the sequence: `start` in the first snapshot, `stop` in the last one
    is_checked:  the caller knows that Snapshot.mismatch of each snapshot is empty, and `can_join`
                 true
    One copy restores all snapshots if `can_join` is true for them, and the section has K and V
    without planes and without scales per token and head. Mutates the section's cache, except null
    blocks. Waits for a device. Returns the bytes of these tokens as the section stores them.
    Raises StoreError if Snapshot.mismatch has a reason, InvalidArgumentError, UnsupportedError,
    OutOfRangeError.
    """
    view = section.view
    first = snapshots[0]
    held = _heads(first, section) if is_checked or can_join(snapshots) else set()
    if len(held) != 1 or view.planes or not view.layers or has_vector_scales(view):
        num_bytes = 0
        for one in snapshots:
            begin, end = one.header.start, one.header.start + len(one.tokens)
            num_bytes += one.restore(section, max(start, begin), min(stop, end), stream=stream)
        return num_bytes
    if not is_checked and (reasons := first.mismatch(section)):
        raise StoreError(f"{first.name}: {'; '.join(reasons)}")
    here = set(first.header.layers)
    layers = [layer for layer in section.layers if layer in here]
    (heads,) = held
    begin, end = max(heads[0], section.heads[0]), min(heads[1], section.heads[1])
    if begin >= end or start >= stop:
        return 0
    device, section = device_of([section]), section.of(layers)
    room, at, place = first.room, first.at, first.place
    assert room is not None
    assert place is not None
    cache, index = room.cache(place, layers), at // place.num_bytes
    blocks = np.arange(index, index + len(snapshots), dtype=np.int64)
    row = row_on_host(section.block_table) if device is None and heads == section.heads else None
    if row is not None:
        at_first = start - first.header.start
        copy_rows(cache, blocks, at_first, section.view, row, start, stop - start)
        return (stop - start) * view.bytes_per_token(end - begin)
    table = table_on(section.block_table, device)
    copy_tokens(
        cache.at(
            block_table=table_on(BlockTable.packed(blocks[None]), device),
            starts=ints_on([start - first.header.start], device),
            head_start=begin - heads[0],
        ),
        section.view.at(
            block_table=None if table is None else table.with_holes(),  # the copy skips null blocks
            starts=ints_on([start], device),
            head_start=begin - section.heads[0],
        ),
        ints_on([stop - start], device),
        num_heads=end - begin,
        stream=stream,
    )
    if device is not None:
        device_status(stream)  # waits: tables and memory that the device reads are freed next
    return (stop - start) * section.view.bytes_per_token(end - begin)


def _heads(snapshot: Snapshot, section: Section) -> set[tuple[int, int]]:
    """Returns the ranges of heads that a snapshot has in layers of the section."""
    here = set(section.layers)
    return {part.heads for part in snapshot.header.parts if not here.isdisjoint(part.layers)}


def can_join(snapshots: Sequence[Snapshot]) -> bool:
    """True if one copy can restore all these snapshots.

    They must be blocks that follow one another in a room and in the sequence, with the same parts
    and formats, and all but the last must be full.
    """
    if not snapshots:
        return False
    first = snapshots[0]
    room, place = first.room, first.place
    if room is None or place is None or place.block is None or first.at % place.num_bytes:
        return False
    return all(
        one.room is room
        and one.place is not None
        and (one.place.block is place.block or one.place.block == place.block)
        and one.at == first.at + i * place.num_bytes
        and one.header.start == first.header.start + i * room.num_tokens
        and (len(one.tokens) == room.num_tokens or one is snapshots[-1])
        and (one.header.parts is first.header.parts or one.header.parts == first.header.parts)
        for i, one in enumerate(snapshots)
    )
