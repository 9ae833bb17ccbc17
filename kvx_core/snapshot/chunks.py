"""Chunks holds what the captures of the chunks of one sequence share, computed once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvx_core.snapshot.capture import check_sections, check_span, parts_of, to_capture_all
from kvx_core.snapshot.contents import Part, Stored
from kvx_core.snapshot.memory import Bytes, host_memory, laid_out
from kvx_core.snapshot.nulls import Nulls
from kvx_core.snapshot.pool import Lease, MemoryPool
from kvx_core.snapshot.precision import Precision, Precisions
from kvx_core.snapshot.section import Section, device_of
from kvx_core.snapshot.storage_format import StorageFormat
from kvx_core.types import DType


class Reserved(NamedTuple):
    """The memory of a snapshot, and the description of the tensors in it."""

    parts: tuple[Part, ...]
    tensors: dict[str, Stored]
    memory: Bytes
    lease: Lease | None  # of `memory`, if it belongs to a pool


class Chunks:
    """A run of tokens of one sequence. Each snapshot captures a part of the run.

    Checks the sections and searches for null blocks once for the whole run. The block tables of
    the sections must not change as long as snapshots are reserved.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        start: int,
        stop: int,
        *,
        precision: Precisions | None = None,
        format: StorageFormat | DType | str | None = None,
        pool: MemoryPool | None = None,
        kind: object = None,
    ) -> None:
        """start, stop: the run, as positions in the sequence; all snapshots lie in it
        precision, format, pool: see Snapshot.reserve
        kind:        the kind of the store's files that the snapshots are written to

        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        self.sections = tuple(sections)
        self._format, carried = StorageFormat.of(format), precision or Precision()
        carried = carried if isinstance(carried, Precision) else tuple(carried)
        self.kind = kind
        self._laid_out: dict[int, tuple[dict[str, Stored], int]] = {}  # by number of tokens
        self._pooled = None
        if pool is not None:
            self._pooled = pool.kind(self.sections, self._format, carried, stop - start)
        if self._pooled is not None:
            self._parts = self._pooled.parts
        else:
            check_sections(sections, self._format, carried)
            self._parts = tuple(parts_of(sections, self._format, carried))
        has_planes = any(section.view.planes for section in sections)
        self._has_planes = self._pooled is None and has_planes
        nulls = (Nulls(section, start, stop) for section in self.sections)
        self._nulls = [null for null in nulls if null.may_be_any]

    def reserve(self, start: int, num_tokens: int) -> Reserved | None:
        """Returns memory for a snapshot of num_tokens tokens of the run, from `start` on.

        Returns None if one of their blocks is null. Raises InvalidArgumentError if the caches
        cannot give these tokens, OutOfRangeError, StoreError if there is not enough memory.
        """
        if self._has_planes:
            check_span(self.sections, start, num_tokens)
        if self._nulls and any(null.any(start, start + num_tokens) for null in self._nulls):
            return None
        if self._pooled and num_tokens <= self._pooled.num_tokens:
            lease = self._pooled.lend()
            tensors = self._pooled.of_length(num_tokens)
            return Reserved(self._parts, tensors, np.asarray(lease), lease)
        known = self._laid_out.get(num_tokens)
        if known is None:
            known = laid_out(to_capture_all(self.sections, num_tokens, self._format))
            self._laid_out[num_tokens] = known
        tensors, num_bytes = known
        memory = host_memory(num_bytes, pinned=device_of(self.sections) is not None)
        return Reserved(self._parts, tensors, memory, None)
