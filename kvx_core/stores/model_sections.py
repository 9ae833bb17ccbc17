"""ModelSections: checks that sections are of a store's model, and completes their facts.
ModelPlanes: the planes of tokens, and the states, that the model has beside K and V.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvx_core.argument_checks import each, instance
from kvx_core.desc.by_view import ByView
from kvx_core.desc.planes import Plane
from kvx_core.desc.states import StateFacts, stored_heads
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot import PlaneKind, Section, StorageFormat, StoreError
from kvx_core.snapshot.planes import stored_kinds, stored_planes
from kvx_core.stores import arguments
from kvx_core.types import Role


@dataclass(frozen=True, slots=True)
class ModelPlanes:
    """The planes of all layers of a model, without K and V in tiles."""

    kinds: frozenset[PlaneKind] = frozenset()
    heads: Mapping[int, int] = field(default_factory=dict)  # of states, by layer, where they say it

    @classmethod
    def of(cls, planes: Iterable[Plane | PlaneKind]) -> Self:
        planes = each("planes", planes, "a list or tuple of Plane")
        for i, plane in enumerate(planes):
            instance(f"planes[{i}]", plane, (Plane, PlaneKind), "a Plane")
        given = [plane for plane in planes if isinstance(plane, Plane)]
        kinds = [plane for plane in planes if isinstance(plane, PlaneKind)]
        kinds += map(PlaneKind.of, stored_planes(given))
        states: dict[int, list[StateFacts]] = {}
        for plane in given:
            if plane.state is not None:
                states.setdefault(plane.layer, []).append(plane.state)
        return cls(
            frozenset(kind for kind in kinds if kind.role not in (Role.K, Role.V)),
            {layer: stored_heads(facts) for layer, facts in states.items()},
        )

    @property
    def states(self) -> frozenset[PlaneKind]:
        """The planes that belong to all tokens of a prefix together."""
        return frozenset(kind for kind in self.kinds if not kind.tokens_per_entry)

    def state_heads(self, given: Any, kv_heads: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of heads of the states of each layer, as SpaceRecord has it.

        given: the argument of PrefixStore: one number for all layers, or one for each layer; None:
               those of `heads`, else as many as K and V have
        Raises InvalidArgumentError.
        """
        if not self.states:
            return ()
        heads = tuple(self.heads.get(layer, count) for layer, count in enumerate(kv_heads))
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
        here = {kind for one in (part, section) for kind in stored_kinds(one.view)}
        odd = (expected - set(stored_kinds(part.view))) | (here - self.kinds)
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
        lacking = expected - {kind for section in states for kind in stored_kinds(section.view)}
        if lacking:
            _refuse(min(lacking), "store")
        if stop != end:
            raise StoreError(
                f"stop is {stop}, expected {end}: the states of a match belong to all of its tokens"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ModelSections:
    """The facts of a model that a store's sections must have. Each view is checked once.

    is_lossy: True: the store may round values when it stores them
    """

    fingerprint: str
    kv_heads: tuple[int, ...]  # of each layer
    state_heads: tuple[int, ...]  # of each layer's states
    planes: ModelPlanes
    format: StorageFormat
    is_lossy: bool
    # The layers of a part and its view; None in place of the view: that of the section
    _parts: ByView[tuple[object, ...], tuple[tuple[int, ...], CacheView | None] | None] = field(
        init=False, default_factory=ByView
    )

    def all_of(
        self, sections: Iterable[Section], *, states: bool = False, captured: bool = False
    ) -> list[Section]:
        """Returns the part of each section that holds tokens; sections without one are left out.

        states:   True: returns the part that holds states instead
        captured: True: the values of the sections are to be stored
        Raises as `_of`; and InvalidArgumentError if `captured` and no section has such a part.
        """
        each = [self._of(section, states, captured) for section in sections]
        found = [section for section in each if section is not None]
        if captured and each and not found:
            raise InvalidArgumentError(
                f"sections have no {'states' if states else 'keys and values of tokens'}, expected "
                f"some. Capture what they have with states={not states}"
            )
        return found

    def _of(self, section: Section, states: bool, captured: bool) -> Section | None:
        """Returns a part of a section, with the fingerprint and heads of this model filled in.

        states:   True: the part is its states; False: it is all but its states
        captured: True: its values are to be stored
        Returns None if the section has no such part. The result is kept for the section's view.
        Raises InvalidArgumentError if the section is of another model; UnsupportedError if
        `captured`, the store is exact and the format rounds the section.
        """
        kept = self._parts.of(section.view)
        key = states, captured, section.layers, section.encoding
        if key not in kept:
            part = section.states if states else section.tokens
            if part is not None:
                self.planes.check_section(section, part, states=states)
                part = self._completed(part, states)
                if captured:
                    self._check_exact(part)
            is_same = part is not None and part.view is section.view
            kept[key] = None if part is None else (part.layers, None if is_same else part.view)
        found = kept[key]
        if found is None:
            return None
        layers, view = found
        return section if view is None else replace(section, layers=layers, view=view)

    def _completed(self, section: Section, states: bool) -> Section:
        view, heads = section.view, self.state_heads if states else self.kv_heads
        facts = view.facts
        if states and all(plane.replicated for plane in view.planes):
            facts = replace(facts, first_kv_head=0)  # every rank stores the same
        elif facts.fingerprint is not None and facts.total_kv_heads is not None and not states:
            self._check(section, heads, states)
            return section
        section = replace(section, view=replace(view, facts=facts))
        self._check(section, heads, states)
        total = heads[section.layers[0]]
        facts = replace(facts, fingerprint=self.fingerprint, total_kv_heads=total)
        return replace(section, view=replace(view, facts=facts))

    def _check(self, section: Section, heads: tuple[int, ...], states: bool) -> None:
        num_layers, last = len(heads), section.heads[1]
        if max(section.layers) >= num_layers or any(last > heads[i] for i in section.layers):
            raise InvalidArgumentError(
                f"section has layers {section.layers} and heads {section.heads}, expected them "
                f"within the {num_layers} layers of the store and their heads {_words(heads)}"
            )
        totals = {heads[layer] for layer in section.layers}
        if len(totals) > 1:
            raise InvalidArgumentError(
                f"section has layers {section.layers} of a model in which they have "
                f"{sorted(totals)} heads, expected as many in all. Make a section of each"
            )
        wanted: dict[str, object] = {"fingerprint": self.fingerprint}
        if not states:  # total_kv_heads of a section with K and V is not that of its states
            wanted["total_kv_heads"] = totals.pop()
        for name, expected in wanted.items():
            found = getattr(section.view.facts, name)
            if found not in (None, expected):
                raise InvalidArgumentError(
                    f"section.view.facts.{name} is {found!r}, expected {expected!r} "
                    "as the store has"
                )

    def _check_exact(self, section: Section) -> None:
        """Raises UnsupportedError if the store is exact and the format rounds the section."""
        if not self.is_lossy and self.format.rounds(section):
            raise UnsupportedError(
                f"format is {self.format.name!r} and rounds K or V of layers {section.layers}, "
                "expected numbers that it holds: the precision of this store says so, and its "
                "entries are shared with exact ones. Choose a format that holds them all, or none. "
                "If they are such numbers in a wider dtype, set facts.compute_dtype of the section"
            )


def _words(heads: tuple[int, ...]) -> str:
    each = sorted(set(heads))
    return str(each[0]) if len(each) == 1 else f"{heads}"


def _refuse(one: PlaneKind, where: str) -> None:
    raise InvalidArgumentError(
        f"{one.words} is a plane of the {where} alone: {one}, expected the same planes. "
        "PrefixStore(planes=...) takes those of the model"
    )
