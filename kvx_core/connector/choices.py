"""Choices: whether a request loads what was found or computes it, and when a load is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvx_core.connector.costs import Costs
from kvx_core.connector.plan import RequestId
from kvx_core.snapshot import StoreError
from kvx_core.stores.finder import Finder
from kvx_core.stores.match import Match

_PROBE_SECONDS = 1.0  # between two probes of a place
_LATE = 0.95  # of its limit: a load that failed after so long was given up


class _Begun(NamedTuple):
    place: str
    num_tokens: int
    at: float
    limit: float | None


@dataclass(slots=True)
class Choices:
    """Chooses with the costs that it sees. One thread calls it, but for `probe`.

    gives_up: the engine computes what a load that failed has not loaded
    """

    gives_up: bool
    costs: Costs = field(default_factory=Costs)
    clock: Callable[[], float] = time.monotonic
    _begun: dict[RequestId, _Begun] = field(default_factory=dict)
    _probed: dict[str, float] = field(default_factory=dict)  # when, by place

    def pays(self, match: Match, num_tokens: int) -> bool:
        """True if loading so many tokens of a match is expected to be sooner than computing."""
        return self.costs.pays(_place(match), num_tokens)

    def is_due(self, match: Match) -> bool:
        """True if it is time to probe where the files of a match are; the caller then does."""
        now, place = self.clock(), _place(match)
        if now - self._probed.get(place, float("-inf")) < _PROBE_SECONDS:
            return False
        self._probed[place] = now
        return True

    def probe(self, finder: Finder, match: Match) -> None:
        """Reads a file that a request could have loaded, to see how long it takes. Any thread."""
        with suppress(StoreError):  # it is as bad as before
            found = finder.probe(match)
            if found is not None:
                self.costs.replaced(_place(match), *found)

    def begins(self, request_id: RequestId, match: Match, num_tokens: int) -> float | None:
        """Notes that a load begins. Returns the seconds after which it is given up; None: never."""
        limit = self.costs.limit(num_tokens) if self.gives_up else None
        self._begun[request_id] = _Begun(_place(match), num_tokens, self.clock(), limit)
        return limit

    def ended(self, request_id: RequestId, *, good: bool) -> None:
        """Notes that a load has ended, or that the request has."""
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        seconds = self.clock() - begun.at
        if good:
            self.costs.loaded(begun.place, begun.num_tokens, seconds)
        elif begun.limit is not None and seconds >= _LATE * begun.limit:
            self.costs.gave_up(begun.place, begun.num_tokens, seconds)


def _place(match: Match) -> str:
    return "far" if match.is_far else "near"
