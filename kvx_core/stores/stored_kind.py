"""StoredFile, StoredKind, Lengths: the files of a space, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from kvx_core.snapshot import StoreError
from kvx_core.snapshot.kind import Kind
from kvx_core.stores.names import parse_entry

_MOST_WORK = 200_000  # tensors and pieces of all layouts that are made of one kind: a second


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a space."""

    name: str
    num_bytes: int  # on the disk
    used: float  # when it was last used, in seconds since 1970

    @property
    def space(self) -> str:
        """The name of its space."""
        return self.name.partition("/")[0]

    @property
    def key(self) -> str:
        """The key of an entry, or the rung of a mark."""
        return self.name.rpartition("/")[2].partition(".")[0]

    @property
    def kind(self) -> str:
        """The id of the kind of an entry's file."""
        return self.name.split(".")[1]

    @property
    def is_entry(self) -> bool:
        """True if it is a file of an entry, not a mark or a record."""
        return parse_entry(self.name) is not None


class Layers(NamedTuple):
    """Consecutive layers that have the same heads in the same precision."""

    first: int
    last: int
    heads: tuple[int, int]  # the first, and one past the last
    precision: str

    @property
    def words(self) -> str:
        """The layers as text, such as "0-31"."""
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


@dataclass(slots=True)
class StoredKind:
    """The files of one kind in a space."""

    id: str
    kind: Kind | None = None
    reason: str = ""  # why `kind` is None
    files: list[StoredFile] = field(default_factory=list)

    @property
    def is_states(self) -> bool:
        """True if the kind is known, and its files have states alone."""
        return self.kind is not None and self.kind.is_states

    @property
    def layers(self) -> Iterator[Layers]:
        """Yields the layers that its files hold, in order; nothing if the kind is not known."""
        if self.kind is None:
            return
        kind = self.kind
        facts = ((i, kind.heads_of(i), kind.precision_of(i).name) for i in sorted(kind.layers))
        # Consecutive layers have the same difference from their place in the list.
        for (_, heads, precision), group in groupby(
            enumerate(facts), lambda found: (found[1][0] - found[0], *found[1][1:])
        ):
            held = [layer for _, (layer, _, _) in group]
            yield Layers(held[0], held[-1], heads, precision)

    @property
    def precisions(self) -> set[str]:
        """The names of the precisions of its layers."""
        return {layers.precision for layers in self.layers}


class Lengths:
    """Tells from the length of a file how many tokens it has: more tokens make a longer file."""

    def __init__(self, kind: Kind, chunk_tokens: int) -> None:
        # A kind of its own, freed with this object: a kind remembers every layout.
        self._kind = Kind.parse(kind.text, kind.id)
        self._chunk_tokens = chunk_tokens
        self._found: dict[int, int] = {}  # tokens, by length of the file
        self._lengths: dict[int, tuple[int, int]] = {}  # least and most bytes, by tokens
        self._left = _MOST_WORK

    def tokens(self, length: int) -> int:
        """Returns how many tokens a file of this length has.

        Returns 0 if the length does not tell, since bytes are encoded, or if no file of this kind
        has this length.
        """
        found = self._found.get(length)
        if found is None:
            try:
                found = self._found[length] = self._search(length)
            except StoreError:  # a file of a store cannot be so long
                found = self._found[length] = 0
        return found

    def _search(self, length: int) -> int:
        # From below, so that no layout is made that is much larger than the file.
        low, high = 1, 1
        while high < self._chunk_tokens and self._lengths_of(high)[1] < length:
            low, high = high, min(2 * high, self._chunk_tokens)
        while low < high:
            middle = (low + high) // 2
            if self._lengths_of(middle)[1] < length:
                low = middle + 1
            else:
                high = middle
        return low if self._lengths_of(low) == (length, length) else 0

    def _lengths_of(self, num_tokens: int) -> tuple[int, int]:
        """Returns the least and the most bytes of a file of so many tokens.

        Raises StoreError if the file is too long, or if this kind has cost too much work already.
        """
        found = self._lengths.get(num_tokens)
        if found is None:
            if self._left < 0:
                raise StoreError("too many layouts")
            layout = self._kind.layout(num_tokens)
            self._left -= len(layout.tensors) + len(layout.pieces)
            found = self._lengths[num_tokens] = layout.least_bytes, layout.most_bytes
        return found
