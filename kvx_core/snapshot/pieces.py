"""Pieces are the parts of a file that are checked, decoded and decrypted at once.

Format: docs/store_format.md, "Pieces".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvx_core.snapshot.contents import Stored

_JOINED_BYTES = 1 << 18  # of several tensors in one piece
MOST_BYTES = 1 << 20  # of a piece, and of all pieces that one call reads


class Slice(NamedTuple):
    """Bytes of a tensor."""

    tensor: str
    begin: int  # counted from the tensor's first byte
    end: int


class Piece(NamedTuple):
    """Bytes of one or several tensors that follow one another in a file."""

    slices: tuple[Slice, ...]
    coding: str
    num_bytes: int  # in memory


def cut(tensors: Mapping[str, Stored]) -> Iterator[Piece]:
    """Yields the pieces of tensors, in the order of the file."""
    joined: list[Slice] = []
    kind, num_bytes = None, 0
    for name, stored in tensors.items():
        more, own = stored.num_bytes, (stored.dtype, stored.coding)
        if joined and (own != kind or num_bytes + more > _JOINED_BYTES):
            yield _piece(joined, kind[1] if kind else "")
            joined, num_bytes = [], 0
        if more > MOST_BYTES:
            for begin in range(0, more, MOST_BYTES):
                part = Slice(name, begin, min(begin + MOST_BYTES, more))
                yield _piece([part], stored.coding)
            continue
        joined.append(Slice(name, 0, more))
        kind, num_bytes = own, num_bytes + more
    if joined:
        yield _piece(joined, kind[1] if kind else "")


def _piece(slices: list[Slice], coding: str) -> Piece:
    return Piece(tuple(slices), coding, sum(end - begin for _, begin, end in slices))


class Range(NamedTuple):
    """A range of memory for bytes of a piece.

    It lies in the memory of the snapshot, or in the memory for tensors that nobody wants.
    """

    begin: int
    end: int
    is_wanted: bool = True


class Group(NamedTuple):
    """Pieces that follow one another in a file. One call reads them.

    They have so few bytes that these are still in the processor's cache when they are checked.
    """

    first: int  # index of the first piece
    ranges: tuple[tuple[Range, ...], ...]  # of each piece
    runs: tuple[Range, ...]  # of all pieces; adjacent ranges are joined
    num_bytes: int  # of the pieces in memory
    unwanted_bytes: int


def groups_of(pieces: tuple[Piece, ...], places: Mapping[str, Stored]) -> Iterator[Group]:
    """Yields the groups of pieces to read for some tensors of a file.

    places: the tensors by name, with their offsets in memory
    """
    first, found, num_bytes, unwanted = -1, list[tuple[Range, ...]](), 0, 0
    for i, piece in enumerate(pieces):
        wanted = any(each.tensor in places for each in piece.slices)
        if found and (not wanted or num_bytes + piece.num_bytes > MOST_BYTES):
            yield _group(first, found, num_bytes, unwanted)
            found, num_bytes, unwanted = [], 0, 0
        if not wanted:
            continue
        if not found:
            first = i
        ranges = []
        for tensor, begin, end in piece.slices:
            if tensor in places:
                offset = places[tensor].offset
                ranges.append(Range(offset + begin, offset + end))
            else:
                ranges.append(Range(unwanted, unwanted + end - begin, is_wanted=False))
                unwanted += end - begin
        found.append(tuple(runs_of(ranges)))
        num_bytes += piece.num_bytes
    if found:
        yield _group(first, found, num_bytes, unwanted)


def _group(first: int, found: list[tuple[Range, ...]], num_bytes: int, unwanted: int) -> Group:
    runs = tuple(runs_of([each for ranges in found for each in ranges]))
    return Group(first, tuple(found), runs, num_bytes, unwanted)


def runs_of(ranges: list[Range]) -> Iterator[Range]:
    """Yields the ranges, with adjacent ranges joined."""
    last: Range | None = None
    for each in ranges:
        if last is not None and last.end == each.begin and last.is_wanted == each.is_wanted:
            last = Range(last.begin, each.end, last.is_wanted)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last
