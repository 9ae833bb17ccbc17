"""Plans: what C reads and checks of plain files. They follow Plan of csrc/python/read_chunks.cc."""

from __future__ import annotations

from array import array
from math import lcm
from typing import TYPE_CHECKING

from kvx_core.snapshot.pieces import MOST_BYTES, Group
from kvx_core.snapshot.record import KEY_BYTES, RECORD_AT, START_BYTES

if TYPE_CHECKING:
    from kvx_core.snapshot.file_layout import FileLayout

MOST_FILES = 64  # that are read with one call
_MOST_RUNS = 62


def packed_plan(
    layout: FileLayout, groups: tuple[Group, ...], memory_bytes: int, kind: bytes
) -> bytes | None:
    """What C reads of the files of a layout; None: it reads none of them.

    groups:       what is wanted
    memory_bytes: where it goes to
    kind:         digest of the files' kind
    """
    form, head = layout.head.form, layout.head
    if not layout.is_direct or form.signed or layout.num_bytes > MOST_BYTES:
        return None
    runs = [run for group in groups for run in group.runs]
    if len(groups) > 1 or (groups and groups[0].first) or len(runs) > _MOST_RUNS:
        return None  # not behind the head in one piece
    wanted = [(i, ranges) for group in groups for i, ranges in enumerate(group.ranges, group.first)]
    joined = [layout.pieces[i].num_bytes for i, ranges in wanted if len(ranges) > 1]
    numbers = [
        form.num_tokens,
        layout.most_bytes,
        head.num_bytes,
        RECORD_AT,
        form.num_bytes,
        lcm(*layout.entry_tokens),
        memory_bytes,
        sum(group.unwanted_bytes for group in groups),
        max(joined, default=0),
        len(runs),
        sum(len(ranges) for _, ranges in wanted),
        len(wanted),
        len(layout.pieces),
    ]
    for run in (*runs, *(run for _, ranges in wanted for run in ranges)):
        numbers += run
    for i, ranges in wanted:
        numbers += i, len(ranges)
    numbers += layout.sizes
    record = head.record.without_keys + bytes(KEY_BYTES) + kind + bytes(START_BYTES)
    text = head.text(bytes(form.num_bytes), layout.num_bytes)
    return array("q", numbers).tobytes() + record + text
