"""StoredKind: the files of one kind in a space, and what their sizes tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kvx_core.stores.kind import Kind

if TYPE_CHECKING:
    from kvx_core.stores.inventory import StoredFile

_MOST_SIZES = 512  # of files of one kind, whose tokens are found out


class Layers(NamedTuple):
    """Layers that follow one another and have the same heads in the same precision."""

    first: int
    last: int
    heads: tuple[int, int]  # the first, and one past the last
    precision: str

    @property
    def words(self) -> str:
        """The layers: "0-31"."""
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


@dataclass(slots=True)
class StoredKind:
    """The files of one kind in a space."""

    id: str
    kind: Kind | None = None
    reason: str = ""  # why there is no kind
    files: list[StoredFile] = field(default_factory=list)

    @property
    def layers(self) -> Iterator[Layers]:
        """What layers its files hold, in order. None if the kind is not known."""
        if self.kind is None:
            return
        kind = self.kind
        facts = ((i, kind.heads_of(i), kind.precision_of(i).name) for i in sorted(kind.layers))
        # Layers that follow one another differ from their place by the same number.
        for (_, heads, precision), group in groupby(
            enumerate(facts), lambda found: (found[1][0] - found[0], *found[1][1:])
        ):
            held = [layer for _, (layer, _, _) in group]
            yield Layers(held[0], held[-1], heads, precision)

    @property
    def precisions(self) -> set[str]:
        """The precisions of its layers, by name."""
        return {layers.precision for layers in self.layers}

    def num_tokens(self, chunk_tokens: int) -> dict[int, int]:
        """How many tokens files of these sizes have, by the size. Sizes that tell nothing are left
        out: those of files with a coding, and those that no file of the kind has.
        """
        if self.kind is None or any(coding for *_, coding in self.kind.tensors):
            return {}
        sizes = Counter(file.size for file in self.files)
        found = ((s, _tokens(self.kind, s, chunk_tokens)) for s, _ in sizes.most_common(_MOST_SIZES))
        return {size: num_tokens for size, num_tokens in found if num_tokens}


def _tokens(kind: Kind, size: int, chunk_tokens: int) -> int:
    """How many tokens a file of this size has; 0: it is no file of this kind.

    Files with more tokens are longer.
    """
    low, high = 1, chunk_tokens
    while low < high:
        middle = (low + high) // 2
        if kind.layout(middle).num_bytes < size:
            low = middle + 1
        else:
            high = middle
    return low if kind.layout(low).num_bytes == size else 0
