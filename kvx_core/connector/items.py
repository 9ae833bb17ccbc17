"""The items of a running request, such as images: the ids of their positions, once they are known.

A thread digests what the model takes. Until then the request is not shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvx_core.connector.plan import RequestId
from kvx_core.connector.threads import Workers
from kvx_core.model.items import MIN_ITEM_TOKENS, item_ids

_Ids = npt.NDArray[np.int64]


class Item(NamedTuple):
    """An item at positions [start, start + length) of a prompt.

    digest: computes the digest of the item, of at least all that its keys and values depend on
            besides the tokens before it. Runs in a thread; None: it is not known. It may raise
    """

    start: int
    length: int
    digest: Callable[[], bytes | None]


class TokensWithItems:
    """A sequence of tokens with the ids of items in the place of those that stand for them."""

    def __init__(self, tokens: Sequence[int], items: Sequence[tuple[int, _Ids]]) -> None:
        """tokens: may grow; items: the first position and the ids of each"""
        self._tokens, self._items = tokens, items

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, at: slice) -> _Ids:
        start, stop, _ = at.indices(len(self))
        found = np.array(self._tokens[start:stop], np.int64)
        for first, ids in self._items:
            low, high = max(first, start), min(first + len(ids), stop)
            if low < high:
                found[low - start : high - start] = ids[low - first : high - first]
        return found


@dataclass(slots=True)
class _Known:
    """The items of a request."""

    request: Any
    count: int
    begun: float
    source: TokensWithItems | None = None  # None: not known, or not yet
    is_over: bool = False


@dataclass(slots=True)
class RequestItems:
    """Digests the items of requests. Only one thread may call it.

    seconds: a request waits no longer for its digests
    """

    seconds: float = 1.0
    _known: dict[RequestId, _Known] = field(default_factory=dict)
    _workers: Workers | None = None

    def of(
        self, request: Any, count: int, items: Callable[[], list[Item]]
    ) -> TokensWithItems | None:
        """Returns the tokens and items of a request; None: some item is not known, or not yet.

        count: a number that changes when the request gets more items
        items: all of them
        """
        known = self._known.get(request.request_id)
        if known is None or known.request is not request or known.count != count:
            known = self._known[request.request_id] = _Known(request, count, time.monotonic())
            self._begin(request, known, items())
        return known.source

    def are_pending(self, request_id: RequestId) -> bool:
        """True if the items of a request may soon be known."""
        known = self._known.get(request_id)
        if known is None or known.is_over:
            return False
        return time.monotonic() - known.begun <= self.seconds

    def forget(self, request_id: RequestId) -> None:
        self._known.pop(request_id, None)

    def shutdown(self) -> None:
        """Ends the threads without waiting for them."""
        if self._workers is not None:
            self._workers.shutdown(0)

    def _begin(self, request: Any, known: _Known, items: list[Item]) -> None:
        if any(item.length < MIN_ITEM_TOKENS for item in items):
            known.is_over = True
            return
        if self._workers is None:
            self._workers = Workers(1, "kvx-items", exit_seconds=0)
        tokens = request.all_token_ids

        def run() -> None:
            try:
                found = []
                for start, length, digest in items:
                    named = digest()
                    if named is None:
                        return
                    found.append((start, item_ids(named, length)))
                known.source = TokensWithItems(tokens, found)
            finally:
                known.is_over = True

        self._workers.submit(run, request.request_id)
