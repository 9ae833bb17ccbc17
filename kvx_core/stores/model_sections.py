"""ModelSections: sections as those of a store's model, each view checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot import Section, StorageFormat
from kvx_core.stores.model_planes import ModelPlanes


@dataclass(frozen=True, slots=True, eq=False)
class ModelSections:
    """What a store requires of sections.

    is_lossy: the store's entries may be rounded when they are stored
    """

    fingerprint: str
    kv_heads: tuple[int, ...]  # of each layer
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
        num_layers, last = len(self.kv_heads), section.heads[1]
        if max(section.layers) >= num_layers or any(
            last > self.kv_heads[layer] for layer in section.layers
        ):
            raise InvalidArgumentError(
                f"section has layers {section.layers} and heads {section.heads}, expected them "
                f"within the {num_layers} layers of the store and their heads {self._words}"
            )
        totals = {self.kv_heads[layer] for layer in section.layers}
        if len(totals) > 1:
            raise InvalidArgumentError(
                f"section has layers {section.layers} of a model in which they have "
                f"{sorted(totals)} heads, expected as many in all. Make a section of each"
            )
        self.planes.check_section(section)
        wanted = {"total_kv_heads": totals.pop(), "fingerprint": self.fingerprint}
        for name, expected in wanted.items():
            found = getattr(section.view.facts, name)
            if found not in (None, expected):
                raise InvalidArgumentError(
                    f"section.view.facts.{name} is {found!r}, expected {expected!r} "
                    "as the store has"
                )

    @property
    def _words(self) -> str:
        each = sorted(set(self.kv_heads))
        return str(each[0]) if len(each) == 1 else f"{self.kv_heads}"

    def _completed(self, section: Section) -> Section:
        view, facts = section.view, section.view.facts
        if facts.fingerprint is not None and facts.total_kv_heads is not None:
            return section
        total = self.kv_heads[section.layers[0]]
        facts = replace(facts, fingerprint=self.fingerprint, total_kv_heads=total)
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
