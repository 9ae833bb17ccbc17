"""Alike: reads files that differ from one that was read before in a few words and in their data.

The files of a prompt are alike. What such a file has to begin with follows from its data: its first
token, its prefix, and the checksums of what was read. If it does begin so, byte for byte, it is
what a writer wrote, and nothing of it has to be parsed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from kvx_core.snapshot.contents import Header
from kvx_core.snapshot.file import digest
from kvx_core.snapshot.header import XXH3
from kvx_core.snapshot.layout import Layout
from kvx_core.snapshot.room import Placed, Room, Tensors, placed
from kvx_core.snapshot.signing import Key
from kvx_core.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_MOST_BYTES = 1 << 20  # of data: more is read and checked in threads, by SnapshotFile
_MOST_RUNS = 1000  # that one preadv reads. Source: Linux include/uapi/linux/uio.h, UIO_MAXIOV


@dataclass(frozen=True, slots=True)
class Alike:
    """Files with the parts, heads and tensors of one that was found right.

    All of their tensors are read: K and V, without scales and planes, as they are in memory.
    """

    known: Snapshot  # that one, without its data
    place: Placed  # of the tensors in the room
    layout: Layout  # in the file
    runs: tuple[tuple[int, int], ...]  # of bytes in the memory, in the order of the file
    key: Key | None

    @classmethod
    def of(cls, snapshot: Snapshot, room: Room, key: bytes | None) -> Alike | None:
        """Files like that of a snapshot, whose data is in the file; None: none can be read so.

        room: one of those that they are read into, which have as many num_tokens
        """
        signer = None if key is None else Key(key)
        header, tensors = snapshot.header, snapshot.tensors
        names = tuple(snapshot.names_of(header.layers))
        place = placed(header, tensors, names, room.num_tokens)
        layout = Layout.of(header, tensors, is_signed=signer is not None)
        if (
            place.block is None
            or len(names) + 1 != len(tensors)
            or layout.names[0] != "tokens"
            or layout.num_bytes > _MOST_BYTES
            or any(stored.coding for stored in tensors.values())
        ):
            return None
        runs = tuple(_runs(layout.names[1:], place.tensors))
        if len(runs) > _MOST_RUNS:
            return None
        return cls(Snapshot(header, snapshot.tokens, tensors), place, layout, runs, signer)

    def read(
        self, file: BinaryIO, start: int, prefix: str, room: Room, name: str = "the snapshot"
    ) -> Snapshot | None:
        """The snapshot in a file, with its data in the room, every byte checked.

        file:          open for reading, unbuffered
        start, prefix: those that it has to have
        room:          has place.num_bytes
        name:          for messages
        None: it is no such file, it is not good, or it cannot be read. Snapshot.open says which.
        """
        header, num_tokens = self.known.header, len(self.known.tokens)
        num_header_bytes = self.layout.num_header_bytes(start, prefix, num_tokens)
        first, tokens, more = (bytearray(n) for n in (num_header_bytes, 8 * num_tokens, 1))
        at, memory = room.take(self.place.num_bytes)
        view = memory.data
        parts: list[Buffer] = [first, tokens, *(view[begin:end] for begin, end in self.runs), more]
        try:
            count = os.preadv(file.fileno(), parts, 0)
        except OSError:
            count = -1
        found = bytes(tokens)
        if count == num_header_bytes + self.layout.num_bytes and first == self.layout.header(
            start, prefix, self._checksums(found, view), found, self.key
        ):
            return Snapshot(
                Header(start, prefix, header.parts),
                np.frombuffer(found, "<i8"),
                self.place.tensors,
                memory,
                room=room,
                at=at,
                place=self.place,
                name=name,
            )
        room.give_back(at)
        return None

    def _checksums(self, tokens: bytes, view: memoryview) -> list[str]:
        """Of each tensor, in the order of the file."""
        sums = [digest(tokens, XXH3, self.key)]
        for name in self.layout.names[1:]:
            stored = self.place.tensors[name]
            data = view[stored.offset : stored.offset + stored.num_bytes]
            sums.append(digest(data, XXH3, self.key))
        return sums


def _runs(names: tuple[str, ...], tensors: Tensors) -> Iterator[tuple[int, int]]:
    """Where tensors lie, those that follow one another together."""
    begin = end = -1
    for name in names:
        stored = tensors[name]
        if stored.offset != end:
            if begin >= 0:
                yield begin, end
            begin = stored.offset
        end = stored.offset + stored.num_bytes
    if begin >= 0:
        yield begin, end
