"""Runs: consecutive chunks of a prompt as one snapshot, and a snapshot cut into chunks.

Bytes stay as they are: neither encoded nor rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import PlaneKind, Snapshot
from kvx_core.snapshot.contents import Stored
from kvx_core.snapshot.memory import host_memory, laid_out
from kvx_core.stores.names import key_of
from kvx_core.types import DType


class Run:
    """Chunks of a prompt that follow one another, in one memory.

    Chunks of one kind go together unless they have states, which belong to one prefix each, or
    scales for all of a chunk's tokens that differ.
    """

    def __init__(self, first: Snapshot, num_tokens: int) -> None:
        """num_tokens: of all chunks that may be added. Raises StoreError without memory for them"""
        self._first, self._planes, self._most_tokens = first, _planes(first), num_tokens
        self._tokens = [first.tokens]
        self._tensors, num_bytes = laid_out(self._of(num_tokens, first.tensors).items())
        self._memory = host_memory(num_bytes)
        self._used = dict.fromkeys(self._tensors, 0)  # bytes
        self._copy(first)

    def _of(self, num_tokens: int, tensors: dict[str, Stored]) -> dict[str, Stored]:
        """Tensors as they are for so many tokens."""
        found = dict(tensors)
        for name, stored in tensors.items():
            if each := _tokens_per_row(name, stored, self._planes):
                found[name] = replace(stored, shape=(num_tokens // each, *stored.shape[1:]))
        return found

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunks so far."""
        return sum(map(len, self._tokens))

    def add(self, chunk: Snapshot) -> bool:
        """Puts a chunk behind the others; False if it is not like them, or does not follow them."""
        if not self._goes_on_with(chunk):
            return False
        self._tokens.append(chunk.tokens)
        self._copy(chunk)
        return True

    def _goes_on_with(self, chunk: Snapshot) -> bool:
        first, start = self._first, self._first.header.start + self.num_tokens
        if chunk.header.parts != first.header.parts or chunk.header.start != start:
            return False
        if self.num_tokens + len(chunk.tokens) > self._most_tokens:
            return False
        if any(self.num_tokens % (p.tokens_per_entry or -1) for p in self._planes.values()):
            return False
        if any(not p.tokens_per_entry for p in self._planes.values()):
            return False
        for name, stored in chunk.tensors.items():
            known = first.tensors.get(name)
            if known is None or _type(known)[:3] != _type(stored)[:3]:
                return False
            if _tokens_per_row(name, stored, self._planes):
                if known.shape[1:] != stored.shape[1:]:
                    return False
            elif known.shape != stored.shape or not np.array_equal(
                first.array(name).view(np.uint8), chunk.array(name).view(np.uint8)
            ):
                return False
        return True

    def _copy(self, chunk: Snapshot) -> None:
        for name, stored in chunk.tensors.items():
            is_new = not self._used[name] or _tokens_per_row(name, stored, self._planes)
            if not is_new:
                continue
            data = chunk.array(name).reshape(-1).view(np.uint8)
            at = self._tensors[name].offset + self._used[name]
            self._memory[at : at + len(data)] = data
            self._used[name] += len(data)

    def snapshot(self) -> Snapshot:
        """All chunks so far. It shares this memory."""
        tokens = np.concatenate(self._tokens)
        tensors = self._of(len(tokens), self._tensors)
        return Snapshot(self._first.header, tokens, tensors, self._memory)


def chunks_of(snapshot: Snapshot, space: str, chunk_tokens: int) -> Iterator[Snapshot]:
    """The chunks of a snapshot in memory, each with the key of the tokens before it as its prefix.

    space: the prefix of a sequence's first chunk; a snapshot that begins later names its own
    They share the snapshot's memory. Raises InvalidArgumentError if it cannot be cut so.
    """
    header, planes = snapshot.header, _planes(snapshot)
    num_tokens = len(snapshot.tokens)
    if header.start % chunk_tokens:
        raise InvalidArgumentError(
            f"{snapshot.name} begins at token {header.start}, expected a multiple of chunk_tokens "
            f"{chunk_tokens} of the store. A snapshot that begins at token 0 fits every store"
        )
    for plane in planes.values():
        each = plane.tokens_per_entry
        if not each and num_tokens > chunk_tokens:
            raise InvalidArgumentError(
                f"{snapshot.name} has {num_tokens} tokens and a state, {plane.words}, which "
                f"belongs to all of them, expected at most chunk_tokens {chunk_tokens} of the store"
            )
        if each and chunk_tokens % each:
            raise InvalidArgumentError(
                f"{snapshot.name} has {plane.words} with an entry for {each} tokens, expected a "
                f"divisor of chunk_tokens {chunk_tokens} of the store"
            )
    parent = header.prefix if header.start else space
    for at in range(0, num_tokens, chunk_tokens):
        ids = snapshot.tokens[at : at + chunk_tokens]
        tensors = {}
        for name, stored in snapshot.tensors.items():
            each = _tokens_per_row(name, stored, planes)
            if not each:
                tensors[name] = stored
            elif rows := min(len(ids) // each, stored.shape[0] - at // each):
                row_bytes = prod(stored.shape[1:]) * stored.dtype.itemsize
                offset = stored.offset + at // each * row_bytes
                tensors[name] = replace(stored, shape=(rows, *stored.shape[1:]), offset=offset)
        yield replace(
            snapshot,
            header=replace(header, start=header.start + at, prefix=parent),
            tokens=ids,
            tensors=tensors,
            file=None,
            place=None,
        )
        parent = key_of(parent, ids)


def holds_states(snapshot: Snapshot) -> bool:
    """Whether it has states alone, which belong to all of its tokens together."""
    is_planes = not any(name.startswith("layers.") for name in snapshot.tensors)
    return is_planes and not any(plane.tokens_per_entry for plane in _planes(snapshot).values())


def _planes(snapshot: Snapshot) -> dict[str, PlaneKind]:
    """The planes beside K and V, by the names of their tensors."""
    return {plane.name: plane for part in snapshot.header.parts for plane in part.planes}


def _tokens_per_row(name: str, stored: Stored, planes: dict[str, PlaneKind]) -> int:
    """How many tokens a row of a tensor belongs to; 0: to all that the snapshot has."""
    if name.startswith("planes."):
        return planes[name].tokens_per_entry if name in planes else 0  # else it is a scale
    return 1 if len(stored.shape) > 1 else 0


def _type(stored: Stored) -> tuple[DType, DType | None, str, tuple[int, ...]]:
    return stored.dtype, stored.original, stored.coding, stored.shape
