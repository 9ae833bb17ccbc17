"""ModelPlanes: the planes of tokens, and the states, that a store's model has beside K and V."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvx_core.argument_checks import each, instance
from kvx_core.desc.planes import Plane
from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import PlaneKind, Section, StoreError
from kvx_core.snapshot.planes import kinds_of
from kvx_core.stores import arguments
from kvx_core.types import Role


@dataclass(frozen=True, slots=True)
class ModelPlanes:
    """The planes of all layers of a model, without K and V in tiles."""

    kinds: frozenset[PlaneKind] = frozenset()

    @classmethod
    def of(cls, planes: Iterable[Plane | PlaneKind]) -> Self:
        planes = each("planes", planes, "a list or tuple of Plane")
        for i, plane in enumerate(planes):
            instance(f"planes[{i}]", plane, (Plane, PlaneKind), "a Plane")
        kinds = (PlaneKind.of(p) if isinstance(p, Plane) else p for p in planes)
        return cls(frozenset(kind for kind in kinds if kind.role not in (Role.K, Role.V)))

    @property
    def states(self) -> frozenset[PlaneKind]:
        """The planes that belong to all tokens of a prefix together."""
        return frozenset(kind for kind in self.kinds if not kind.tokens_per_entry)

    def state_heads(self, given: Any, kv_heads: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of heads of the states of each layer, as SpaceRecord has it.

        given: the argument of PrefixStore: one number for all layers, or one for each layer; None:
               as many as K and V have
        Raises InvalidArgumentError.
        """
        if not self.states:
            return ()
        heads = kv_heads
        if given is not None:
            heads = arguments.of_layers("state_heads", given, len(kv_heads))
        found = [0] * len(kv_heads)
        for kind in sorted(self.states):
            if not kind.layer < len(kv_heads):
                raise InvalidArgumentError(
                    f"{kind.words} is one of planes, expected layers below num_layers "
                    f"{len(kv_heads)}"
                )
            if not (kind.replicated or heads[kind.layer]):
                raise InvalidArgumentError(
                    f"state_heads of layer {kind.layer} is 0, expected how many heads "
                    f"{kind.words} has on all ranks together, or a plane that is replicated"
                )
            found[kind.layer] = max(found[kind.layer], 1 if kind.replicated else heads[kind.layer])
        return tuple(found)

    def check_chunks(self, chunk_tokens: int) -> None:
        """Raises InvalidArgumentError unless a chunk consists of complete entries of each plane."""
        for kind in self.kinds:
            if kind.tokens_per_entry and chunk_tokens % kind.tokens_per_entry:
                raise InvalidArgumentError(
                    f"chunk_tokens is {chunk_tokens}, expected a multiple of "
                    f"{kind.tokens_per_entry}: an entry of {kind.words} stands for so many tokens"
                )

    def check_section(self, section: Section, part: Section, *, states: bool) -> None:
        """Raises InvalidArgumentError if a section has a plane that the model does not have, or if
        `part` lacks a plane of its sort that the model has in the same layers.

        part:   the part of the section that holds tokens, or its states
        states: True: `part` is the states
        """
        there = self.states if states else self.kinds - self.states
        expected = {kind for kind in there if kind.layer in part.layers}
        odd = (expected - set(kinds_of(part.view))) | (set(kinds_of(section.view)) - self.kinds)
        if odd:
            _refuse(min(odd), "store" if min(odd) in self.kinds else "section")

    def check_load(
        self, sections: Iterable[Section], states: Iterable[Section], stop: int, end: int
    ) -> None:
        """Raises unless tokens up to `stop` of a match of `end` tokens can be loaded into sections.

        states: all states of the sections
        Raises InvalidArgumentError if a layer lacks states that the model has there; StoreError if
        `stop` is not `end`, since the states of a match belong to all of its tokens.
        """
        if not self.states or not stop:
            return
        layers = {layer for section in sections for layer in section.layers}
        expected = {kind for kind in self.states if kind.layer in layers}
        lacking = expected - {kind for section in states for kind in kinds_of(section.view)}
        if lacking:
            _refuse(min(lacking), "store")
        if stop != end:
            raise StoreError(
                f"stop is {stop}, expected {end}: the states of a match belong to all of its tokens"
            )


def _refuse(one: PlaneKind, where: str) -> None:
    raise InvalidArgumentError(
        f"{one.words} is a plane of the {where} alone: {one}, expected the same planes. "
        "PrefixStore(planes=...) takes those of the model"
    )
