"""ModelSections: sections as those of a store's model, each view checked once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot import Section, StorageFormat
from kvx_core.stores.model_planes import ModelPlanes


def check_heads(sections: Iterable[Section]) -> None:
    """Raises InvalidArgumentError unless sections hold the same heads."""
    held = sorted({section.heads for section in sections})
    if len(held) > 1:
        raise InvalidArgumentError(
            f"sections have the heads {held[-1]} and {held[0]}, expected the same. Capture them "
            "apart"
        )


@dataclass(frozen=True, slots=True, eq=False)
class ModelSections:
    """What a store requires of sections.

    is_lossy: the store's entries may be rounded when they are stored
    """

    fingerprint: str
    shape: tuple[int, int]  # layers and KV heads
    planes: ModelPlanes
    format: StorageFormat
    is_lossy: bool

    def of(self, section: Section, *, captured: bool = False) -> Section:
        """The section with the fingerprint and heads of this model filled in.

        captured: its values are to be stored
        Raises InvalidArgumentError if it is of another model, UnsupportedError if the format rounds
        what an exact store would capture. What is found of a view is kept with it.
        """
        kept, key = section.view.memo, (self, captured, section.layers, section.encoding)
        if key not in kept:
            self._check(section)
            found = self._completed(section)
            if captured:
                self._check_exact(found)
            # A view that referred to itself would stay until garbage collection.
            kept[key] = None if found is section else found.view
        view = kept[key]
        return section if view is None else replace(section, view=view)

    def _check(self, section: Section) -> None:
        num_layers, total_kv_heads = self.shape
        if max(section.layers) >= num_layers or section.heads[1] > total_kv_heads:
            raise InvalidArgumentError(
                f"section has layers {section.layers} and heads {section.heads}, expected them "
                f"within the {num_layers} layers and {total_kv_heads} heads of the store"
            )
        self.planes.check_section(section)
        for name, expected in (
            ("total_kv_heads", total_kv_heads),
            ("fingerprint", self.fingerprint),
        ):
            found = getattr(section.view.facts, name)
            if found not in (None, expected):
                raise InvalidArgumentError(
                    f"section.view.facts.{name} is {found!r}, expected {expected!r} "
                    "as the store has"
                )

    def _completed(self, section: Section) -> Section:
        view, facts = section.view, section.view.facts
        if facts.fingerprint is not None and facts.total_kv_heads is not None:
            return section
        facts = replace(facts, fingerprint=self.fingerprint, total_kv_heads=self.shape[1])
        return replace(section, view=replace(view, facts=facts))

    def _check_exact(self, section: Section) -> None:
        """Raises UnsupportedError if the format rounds a section and the store is an exact one."""
        if not self.is_lossy and self.format.rounds(section):
            raise UnsupportedError(
                f"format is {self.format.name!r} and rounds K or V of layers {section.layers}, "
                "expected numbers that it holds: the precision of this store says so, and its "
                "entries are shared with exact ones. Choose a format that holds them all, or none. "
                "If they are such numbers in a wider dtype, set facts.compute_dtype of the section"
            )
