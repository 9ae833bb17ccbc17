"""ModelPlanes: the planes beside K and V that every entry of a prefix store has."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Self

from kvx_core.errors import InvalidArgumentError
from kvx_core.planes import Plane
from kvx_core.snapshot import PlaneKind, Section, StoreError
from kvx_core.snapshot.planes import kinds_of
from kvx_core.types import Role
from kvx_core.words import each, instance


@dataclass(frozen=True, slots=True)
class ModelPlanes:
    """The planes of all layers of a model, K and V in tiles left out."""

    kinds: frozenset[PlaneKind] = frozenset()

    @classmethod
    def of(cls, planes: Iterable[Plane | PlaneKind]) -> Self:
        planes = each("planes", planes, "a list or tuple of Plane")
        for i, plane in enumerate(planes):
            instance(f"planes[{i}]", plane, (Plane, PlaneKind), "a Plane")
        kinds = (PlaneKind.of(p) if isinstance(p, Plane) else p for p in planes)
        return cls(frozenset(kind for kind in kinds if kind.role not in (Role.K, Role.V)))

    @property
    def have_states(self) -> bool:
        """Whether entries have states, which belong to all of their tokens together."""
        return any(kind.tokens_per_entry == 0 for kind in self.kinds)

    def check_chunks(self, chunk_tokens: int) -> None:
        """Raises InvalidArgumentError unless chunks consist of complete entries of planes."""
        for kind in self.kinds:
            if kind.tokens_per_entry and chunk_tokens % kind.tokens_per_entry:
                raise InvalidArgumentError(
                    f"chunk_tokens is {chunk_tokens}, expected a multiple of "
                    f"{kind.tokens_per_entry}: an entry of {kind.words} stands for so many tokens"
                )

    def check_section(self, section: Section) -> None:
        """Raises InvalidArgumentError unless a section has the planes of its layers."""
        expected = {kind for kind in self.kinds if kind.layer in section.layers}
        found = set(kinds_of(section.view))
        if expected != found:
            one = min(expected ^ found)
            where = "store" if one in expected else "section"
            raise InvalidArgumentError(
                f"{one.words} is a plane of the {where} alone: {one}, expected the same planes. "
                "PrefixStore(planes=...) takes those of the model"
            )

    def check_stop(self, stop: int, ends: Set[int]) -> None:
        """Raises StoreError if tokens up to `stop` have no state; those up to `ends` have."""
        if self.have_states and stop not in ends:
            raise StoreError(
                f"stop is {stop}, expected one of {sorted(ends)}: the states that are stored "
                "belong to the prefixes that end there"
            )
