"""FileLayout says where every part of a file lies.

The layout depends on the kind and the number of tokens alone: files of a prompt share it.
Format: docs/store_format.md, "Entries".
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import NamedTuple, Self

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot.contents import Header, Stored, is_scale, names_of
from kvx_core.snapshot.pieces import MOST_BYTES, Group, Piece, Range, cut, groups_of, runs_of
from kvx_core.snapshot.record import KEY_BYTES, RECORD_AT, START_BYTES, Form, Head
from kvx_core.snapshot.room import Placed, placed

MOST_FILES = 64  # that C reads with one call
_MOST_RUNS = 62
_MAX_KEPT = 16  # selections that a layout remembers, and sources


class Selection(NamedTuple):
    """The tensors that some layers need from a file, and the pieces to read for them."""

    place: Placed  # places of the tensors in memory
    groups: tuple[Group, ...]
    scales: tuple[str, ...]  # names of the tensors that are scales
    plan: bytes | None  # tells C what to read; None: C cannot read these files


class Source(NamedTuple):
    """The places of a file's bytes in the memory of a captured snapshot."""

    ranges: tuple[tuple[Range, ...], ...]  # of each piece
    runs: tuple[Range, ...]  # of all pieces; adjacent ranges are joined


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """The layout of files of one kind and number of tokens."""

    header: Header  # with the parts of all these files
    num_tokens: int
    tensors: dict[str, Stored]  # in the order of the file; offsets count bytes in memory
    pieces: tuple[Piece, ...]
    head: Head
    num_bytes: int  # of the data; the most that it can have, if it is coded
    is_coded: bool
    is_direct: bool  # True if the file has the same bytes as the memory
    sizes: tuple[int, ...]  # of the pieces in memory
    entry_tokens: frozenset[int]  # files begin at multiples of each of these numbers
    least_bytes: int  # of a file
    most_bytes: int  # of a file
    _kind: bytes  # digest of the files' kind
    _selections: dict[tuple[tuple[int, ...], int], Selection] = field(default_factory=dict)
    _sources: dict[int, tuple[Mapping[str, Stored], Source]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        header: Header,
        tensors: Mapping[str, Stored],
        num_tokens: int,
        *,
        signed: bool,
        encrypted: bool,
        digest: bytes,
        kind: bytes = b"",
    ) -> Self:
        """tensors: in the order of the file
        digest:  of the kind
        kind:    the text of the kind, if files contain it
        """
        num_bytes, placed_tensors = 0, dict[str, Stored]()
        for name, stored in tensors.items():
            placed_tensors[name] = replace(stored, offset=num_bytes)
            num_bytes += stored.num_bytes
        pieces = tuple(cut(placed_tensors))
        is_coded = any(piece.coding for piece in pieces)
        is_direct = not (is_coded or encrypted)
        form = Form(num_tokens, len(pieces), signed, encrypted)
        head = Head(placed_tensors, form, is_whole=not is_direct, kind=kind)
        per = {kind.tokens_per_entry for part in header.parts for kind in part.planes}
        return cls(
            header,
            num_tokens,
            placed_tensors,
            pieces,
            head,
            num_bytes,
            is_coded,
            is_direct,
            tuple(piece.num_bytes for piece in pieces),
            frozenset(per - {0, 1}),
            head.num_bytes + (len(pieces) if is_coded else num_bytes),
            head.num_bytes + num_bytes,
            digest,
        )

    def selection(self, layers: Sequence[int], room_tokens: int) -> Selection:
        """Returns the tensors and pieces that these layers need, and their places in memory.

        room_tokens: Room.num_tokens of the room that the tensors are read into
        """
        key = tuple(layers), room_tokens
        found = self._selections.get(key)
        if found is None:
            if len(self._selections) >= _MAX_KEPT:
                self._selections.clear()
            names = tuple(names_of(self.header, self.tensors, key[0]))
            place = placed(self.header, self.tensors, names, room_tokens)
            groups = tuple(groups_of(self.pieces, place.tensors))
            scales = tuple(filter(is_scale, names))
            plan = _packed_plan(self, groups, place.num_bytes, self._kind)
            found = self._selections[key] = Selection(place, groups, scales, plan)
        return found

    def source(self, tensors: Mapping[str, Stored]) -> Source:
        """Returns the places of a file's bytes in the memory of a captured snapshot.

        tensors: of the snapshot; must not change: the result is remembered for this object
        Raises InvalidArgumentError if the tensors differ from those of these files.
        """
        known = self._sources.get(id(tensors))
        if known is not None and known[0] is tensors:
            return known[1]
        wrong = [name for name in tensors if name not in self.tensors]
        for name, stored in self.tensors.items():
            there = tensors.get(name)
            if there is None or _type_of(there) != _type_of(stored):
                wrong.append(name)
        if wrong:
            raise InvalidArgumentError(
                f"{wrong[0]} of the snapshot is {tensors.get(wrong[0])}, expected "
                f"{self.tensors.get(wrong[0])} as files of this kind have"
            )

        def range_of(name: str, begin: int, end: int) -> Range:
            offset = tensors[name].offset
            return Range(offset + begin, offset + end)

        each = [[range_of(*part) for part in piece.slices] for piece in self.pieces]
        runs = tuple(runs_of([one for ranges in each for one in ranges]))
        found = Source(tuple(tuple(runs_of(ranges)) for ranges in each), runs)
        if len(self._sources) >= _MAX_KEPT:
            self._sources.clear()
        self._sources[id(tensors)] = tensors, found
        return found


def _type_of(stored: Stored) -> tuple[object, ...]:
    return stored.dtype, stored.shape, stored.original, stored.coding


def _packed_plan(
    layout: FileLayout, groups: tuple[Group, ...], memory_bytes: int, kind: bytes
) -> bytes | None:
    """Returns a plan for C to read files of a layout; None if C cannot read them.

    The bytes are a Plan of csrc/python/read_chunks.cc.
    groups:       the pieces to read
    memory_bytes: bytes of the memory that they are read into
    kind:         digest of the files' kind
    """
    form, head = layout.head.form, layout.head
    if not layout.is_direct or form.signed or layout.num_bytes > MOST_BYTES:
        return None
    runs = [run for group in groups for run in group.runs]
    if len(groups) > 1 or (groups and groups[0].first) or len(runs) > _MOST_RUNS:
        return None  # C reads at most one group, right behind the head, in few runs
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
