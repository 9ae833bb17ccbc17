"""Nulls: which tokens of a run of a sequence are stored nowhere, found once for many chunks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot.section import Section
from kvx_core.snapshot.sequences import Sequences


class Nulls:
    """Section.has_null and is_null for any part of a run of tokens.

    Reads the block table once, where each tensor of the section has an entry per token: the table
    must not change meanwhile. Raises OutOfRangeError as Section.has_null.
    """

    def __init__(
        self, section: Section, start: int, stop: int, sequences: Sequences | None = None
    ) -> None:
        """start, stop: positions in the sequence
        sequences:   of the section's view, if it has K and V alone; None: they are not kept
        """
        self._section, self._start = section, start
        self._found: list[npt.NDArray[np.bool_]] | None = None
        if sequences is not None:
            section.check_reach(stop)
            null = sequences.nulls(section.block_table, start, stop - start)
            if null is not None:
                self._found = [null]
                return
        if not section.view.planes:  # which have entries of several tokens
            found = list(section.nulls(start, stop))
            if all(len(null) == stop - start for null in found):  # else it has beams
                self._found = found

    def any(self, start: int, stop: int) -> bool:
        """Whether some of these tokens are stored nowhere, be it in K, V or a plane."""
        if self._found is None:
            return self._section.has_null(start, stop)
        return any(null[start - self._start : stop - self._start].any() for null in self._found)

    def all(self, start: int, stop: int) -> bool:
        """Whether all of them are stored nowhere, in all tensors."""
        if self._found is None:
            return self._section.is_null(start, stop)
        return all(null[start - self._start : stop - self._start].all() for null in self._found)
