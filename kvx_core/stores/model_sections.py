"""ModelSections: checks that sections are of a store's model, and completes their facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvx_core.desc.by_view import ByView
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot import Section, StorageFormat
from kvx_core.stores.model_planes import ModelPlanes


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
