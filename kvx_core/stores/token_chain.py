"""TokenChain: the ids of a growing sequence and the keys of its chunks, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import items
from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import token_ids
from kvx_core.stores.names import Ids, key_of

_PART = 1 << 15
_PIECE = 4096  # ids that are converted in one go: 0.1 ms, in which no other thread runs


class TokenChain:
    """Converts and hashes a sequence in pieces. Threads may share one.

    When the sequence grows, only its new tokens are converted and hashed.
    """

    def __init__(
        self, source: Sequence[int] | npt.NDArray[Any], space: str, chunk_tokens: int
    ) -> None:
        """source: the sequence; it may grow at its end, but not change

        space: the key before the first chunk
        Raises InvalidArgumentError if `source` does not have a length and positions.
        """
        if isinstance(items("tokens", source), np.ndarray):
            token_ids(source[:0])
        self._source = source
        self.chunk_tokens = chunk_tokens
        self._lock = Lock()
        self._parts: list[Ids] = []  # of _PART ids each; one array would be copied to grow
        self._num_ids = 0
        self._last: np.int64 | None = None  # the last converted id
        self._nodes = [space]

    @property
    def num_ids(self) -> int:
        """The number of tokens that have been converted."""
        return self._num_ids

    def ids(self, start: int, stop: int) -> Ids:
        """Returns tokens [start, stop), all of which the source must have. Do not write to them.

        Raises InvalidArgumentError if they are not integers, or if the source has changed.
        """
        while self._num_ids < stop:
            with self._lock:
                self._convert(min(stop, self._num_ids + _PIECE))
        first, last = start // _PART, max(start, stop - 1) // _PART
        if first == last and first < len(self._parts):
            return self._parts[first][start % _PART : start % _PART + stop - start]
        parts = self._parts[first : last + 1]
        found: Ids = np.concatenate([_EMPTY, *parts])
        return found[start - first * _PART : stop - first * _PART]

    def node(self, chunk: int) -> str:
        """Returns the key of all tokens before a chunk; the source must have these tokens."""
        step = self.chunk_tokens
        while len(self._nodes) <= chunk:
            at = (len(self._nodes) - 1) * step
            self.ids(at, min(at + max(step, _PIECE), chunk * step))
            with self._lock:
                known = len(self._nodes) - 1
                if known < chunk and (known + 1) * step <= self._num_ids:
                    ids = self.ids(known * step, (known + 1) * step)
                    self._nodes.append(key_of(self._nodes[-1], ids))
        return self._nodes[chunk]

    def _convert(self, stop: int) -> None:
        while self._num_ids < stop:  # else another thread was first
            at = self._num_ids % _PART
            if at == 0:
                self._parts.append(np.empty(_PART, np.int64))
            count = min(stop - self._num_ids, _PART - at)
            first = max(0, self._num_ids - 1)  # converted before: compared below
            more = token_ids(self._source[first : self._num_ids + count])
            if len(more) != self._num_ids - first + count or (
                first < self._num_ids and more[0] != self._last
            ):
                raise InvalidArgumentError(
                    f"tokens before position {self._num_ids} have changed or were removed, "
                    "expected a sequence that only grows at its end"
                )
            self._parts[-1][at : at + count] = more[self._num_ids - first :]
            self._last = more[-1]
            self._num_ids += count


_EMPTY: Ids = np.empty(0, np.int64)
