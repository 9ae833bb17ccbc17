"""Nulls finds the tokens of a sequence that lie in null blocks, once for many chunks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvx_core.desc.find_tokens import null_blocks
from kvx_core.snapshot.section import Section, row_on_host


class Nulls:
    """Answers Section.has_null and is_null for any part of a run of tokens.

    Reads the block table once if each tensor of the section has an entry per token. The table must
    not change meanwhile. Raises OutOfRangeError as Section.has_null.
    """

    def __init__(self, section: Section, start: int, stop: int) -> None:
        """start, stop: positions in the sequence"""
        self._section = section
        # An element of `_found` stands for `_tokens` tokens; the first one begins at `_start`.
        self._start, self._tokens = start, 1
        self._found = self._find(section, start, stop)
        # False: no token of the run lies in a null block.
        self.may_be_any = self._found is None or any(null.any() for null in self._found)

    def _find(self, section: Section, start: int, stop: int) -> list[npt.NDArray[np.bool_]] | None:
        """Returns masks of the tokens or blocks that are null, one for each tensor that may differ.

        Returns None if the section must be asked for each chunk.
        """
        if section.view.planes:  # planes may have entries of several tokens
            return None
        blocks = row_on_host(section.block_table)
        if blocks is not None:
            section.check_reach(stop)
            first = section.view.layers[0]
            begin = start // first.block_size
            blocks = blocks[begin : -(-stop // first.block_size)]
            lowest, highest = (blocks.min(), blocks.max()) if blocks.size else (-1, -1)
            if highest < first.num_blocks:  # else find_tokens raises the error
                if lowest > max(section.view.null_block_id, -1):
                    return []
                self._start, self._tokens = begin * first.block_size, first.block_size
                return [null_blocks(section.view, blocks)]
        found = list(section.nulls(start, stop))
        # With beams, a mask has more than one element for each token.
        return found if all(len(null) == stop - start for null in found) else None

    def any(self, start: int, stop: int) -> bool:
        """True if K, V or a plane of some of these tokens lies in a null block."""
        if self._found is None:
            return self._section.has_null(start, stop)
        return self.may_be_any and any(null[self._part(start, stop)].any() for null in self._found)

    def all(self, start: int, stop: int) -> bool:
        """True if all tensors of all these tokens lie in null blocks."""
        if self._found is None:
            return self._section.is_null(start, stop)
        return self.may_be_any and all(null[self._part(start, stop)].all() for null in self._found)

    def _part(self, start: int, stop: int) -> slice:
        first, last = start - self._start, stop - self._start
        return slice(first // self._tokens, -(-last // self._tokens))
