"""Nulls: which tokens of a run of a sequence are stored nowhere, found once for many chunks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvx_core.lookup import null_blocks
from kvx_core.snapshot.section import Section, row_on_host


class Nulls:
    """Section.has_null and is_null for any part of a run of tokens.

    Reads the block table once, where each tensor of the section has an entry per token: the table
    must not change meanwhile. Raises OutOfRangeError as Section.has_null.
    """

    def __init__(
        self, section: Section, start: int, stop: int, *, are_copied: bool = False
    ) -> None:
        """start, stop: positions in the sequence
        are_copied: all tokens that are not null are copied to new memory, which checks their blocks
        """
        self._section = section
        self._found: list[npt.NDArray[np.bool_]] | None = None
        self._start, self._tokens = start, 1  # of an element of these
        if section.view.planes:  # which have entries of several tokens
            return
        blocks = row_on_host(section.block_table) if are_copied else None
        if blocks is not None:
            section.check_reach(stop)
            self._found = [null_blocks(section.view, blocks)]
            self._start, self._tokens = 0, section.view.layers[0].block_size
            return
        found = list(section.nulls(start, stop))
        if all(len(null) == stop - start for null in found):  # else it has beams
            self._found = found

    def any(self, start: int, stop: int) -> bool:
        """Whether some of these tokens are stored nowhere, be it in K, V or a plane."""
        if self._found is None:
            return self._section.has_null(start, stop)
        return any(null[self._part(start, stop)].any() for null in self._found)

    def all(self, start: int, stop: int) -> bool:
        """Whether all of them are stored nowhere, in all tensors."""
        if self._found is None:
            return self._section.is_null(start, stop)
        return all(null[self._part(start, stop)].all() for null in self._found)

    def _part(self, start: int, stop: int) -> slice:
        first, last = start - self._start, stop - self._start
        return slice(first // self._tokens, -(-last // self._tokens))
