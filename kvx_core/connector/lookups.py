"""Lookups: answers from memory, or asks the disk in threads while the engine runs its steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.plan import RequestId
from kvx_core.connector.threads import Workers
from kvx_core.stores.index import NotCached
from kvx_core.stores.match import Match
from kvx_core.stores.pace import Pace
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.token_chain import TokenChain
from kvx_core.stores.walk import Walk

_OWN_SECONDS = 5e-5  # the most time that a lookup in memory may take in the engine's thread
_LOOKUP_WAIT_SECONDS = 5e-4  # the wait for a lookup in a thread: another step takes much longer
_MOST_WALKED_TOKENS = 4096  # a thread computes the keys of longer prompts
_MOST = 4096  # the most durations kept until they are taken, and beginnings of prompts remembered
_ENOUGH = 100  # a warning is logged after so many repeats without any cache hit
NOTHING = Match(0, ())


@dataclass(slots=True)
class _Lookup:
    store: PrefixStore
    walk: Walk
    begun: float
    is_over: bool = False
    has_failed: bool = False
    is_forgotten: bool = False
    is_far: bool = False  # what was found has to come over a network


class Lookups:
    """Looks requests up. `ask` waits for the disk for at most half a millisecond, and only if no
    other lookup is under way. `wait` waits at most as long as its caller says.

    Owns threads, which `shutdown` ends. Only one thread may call it.
    """

    def __init__(self, boundary: Boundary, *, threads: int = 2, seconds: float = 1.0) -> None:
        """seconds: after this time a lookup is answered as a miss. If it has begun, it goes on in
        its thread, and the next lookup finds in memory what this one has seen
        """
        self._boundary, self.seconds = boundary, seconds
        self._workers = Workers(threads, "kvx-lookup", exit_seconds=0)
        self._pending: dict[RequestId, _Lookup] = {}
        self._lookup_is_over = threading.Condition()
        self._num_hits = self._num_misses = self._num_repeats = 0
        self._beginnings: dict[tuple[str, bytes], None] = {}  # of prompts, oldest first
        self._repeats_without_a_hit = 0  # -1: there was a hit, or the warning was logged
        self._durations: deque[float] = deque(maxlen=_MOST)

    def ask(
        self,
        request_id: RequestId,
        store: PrefixStore,
        chain: TokenChain,
        num_tokens: int,
        at_least: int = 1,
    ) -> Match | None:
        """Returns the match of the first `num_tokens` tokens of a chain; None: ask again later.

        at_least: at least 1; matches with fewer tokens may be missed
        """
        lookup = self._pending.get(request_id)
        if lookup is not None and (
            lookup.walk.num_tokens != num_tokens or lookup.walk.chain is not chain
        ):
            self.forget(request_id)
            lookup = None
        if lookup is None:
            begun = time.monotonic()
            match = self._begin(request_id, store, chain, num_tokens, at_least)
        else:
            begun = lookup.begun
            match = self._answer(request_id, lookup)
        if match is not None:
            self._durations.append(time.monotonic() - begun)
            is_hit = match.num_tokens >= at_least
            if is_hit:
                self._num_hits += 1
            else:
                self._num_misses += 1
            self._count_repeat(chain, num_tokens, at_least, is_hit=is_hit)
        return match

    def _count_repeat(
        self, chain: TokenChain, num_tokens: int, at_least: int, *, is_hit: bool
    ) -> None:
        """Counts a lookup whose prompt begins with the same tokens as an earlier prompt."""
        if is_hit:
            self._repeats_without_a_hit = -1
        if num_tokens <= at_least:  # the last token is never loaded
            return
        beginning = chain.node(0), chain.ids(0, at_least).tobytes()
        if beginning not in self._beginnings:
            if len(self._beginnings) >= _MOST:
                del self._beginnings[next(iter(self._beginnings))]
            self._beginnings[beginning] = None
            return
        self._num_repeats += 1
        if self._repeats_without_a_hit < 0:
            return
        self._repeats_without_a_hit += 1
        if self._repeats_without_a_hit == _ENOUGH:
            self._repeats_without_a_hit = -1
            self._boundary.warn(
                f"KVX: none of {_ENOUGH} lookups found anything, whose prompts begin as earlier "
                "ones did. Either nobody stores prompts of this engine's model, or saves are "
                "dropped: see the metrics saved_tokens and dropped_saves"
            )

    def take_counts(self) -> dict[str, int | list[float]]:
        """Returns counts of the answers since the last call; empty if there were none.

        lookup_hits:    answers with at least `at_least` tokens
        lookup_misses:  all other answers, also of lookups that failed or took too long
        lookup_repeats: answers for prompts that begin with the first `at_least` tokens of an
                        earlier prompt: if this engine saves, they could have been hits
        lookup_seconds: the times from the first `ask` to the answer, of the last 4,096 answers
        """
        if not self._durations:
            return {}
        taken: dict[str, int | list[float]] = {
            "lookup_hits": self._num_hits,
            "lookup_misses": self._num_misses,
            "lookup_repeats": self._num_repeats,
            "lookup_seconds": list(self._durations),
        }
        self._num_hits = self._num_misses = self._num_repeats = 0
        self._durations.clear()
        return taken

    def _answer(self, request_id: RequestId, lookup: _Lookup) -> Match | None:
        if lookup.is_over:
            del self._pending[request_id]
            if lookup.has_failed:
                return NOTHING
            found = lookup.walk.match
            return replace(found, is_far=True) if lookup.is_far else found
        if time.monotonic() - lookup.begun > self.seconds:
            del self._pending[request_id]
            self._workers.cancel(request_id)  # drops it if it has not begun: others wait
            return NOTHING
        return None

    def prepare(self, request_id: RequestId, chain: TokenChain, num_tokens: int) -> None:
        """Has a thread compute the keys of a chain's first tokens; the chain then keeps them."""
        self._workers.submit(lambda: self._compute_keys(chain, num_tokens), request_id)

    def run(self, job: Callable[[], object]) -> None:
        """Has a thread run a job, which should not raise."""
        self._workers.submit(job)

    def forget(self, request_id: RequestId) -> None:
        """Drops the lookup of a request that needs no answer any more."""
        if lookup := self._pending.pop(request_id, None):
            lookup.is_forgotten = True
        self._workers.cancel(request_id)

    def forget_all(self) -> None:
        for request_id in tuple(self._pending):
            self.forget(request_id)

    def wait(self, seconds: float) -> None:
        """Waits until a lookup is over, if any is under way, for at most `seconds`."""
        pending = tuple(self._pending.values())
        if pending:
            with self._lookup_is_over:
                self._lookup_is_over.wait_for(lambda: any(p.is_over for p in pending), seconds)

    def shutdown(self) -> None:
        """Ends the threads without waiting for them."""
        self.forget_all()
        self._workers.shutdown(0)

    def _begin(
        self,
        request_id: RequestId,
        store: PrefixStore,
        chain: TokenChain,
        num_tokens: int,
        at_least: int,
    ) -> Match | None:
        walk = store.walk(chain, num_tokens, at_least)
        begun = time.monotonic()
        with suppress(NotCached):
            walk.resume(store.known, lambda: time.monotonic() - begun > _OWN_SECONDS)
        if not walk.is_over and self._workers.stuck_seconds() > self.seconds:
            return NOTHING  # the store does not answer
        if walk.is_over and num_tokens <= _MOST_WALKED_TOKENS:
            return walk.match
        lookup = _Lookup(store, walk, begun, is_over=walk.is_over)
        is_alone = not self._pending and self._workers.has_free_thread
        self._workers.submit(lambda: self._look(lookup), request_id)
        if walk.is_over:
            return walk.match
        self._pending[request_id] = lookup
        if is_alone:
            with self._lookup_is_over:
                self._lookup_is_over.wait_for(lambda: lookup.is_over, _LOOKUP_WAIT_SECONDS)
        return self._answer(request_id, lookup)

    def _look(self, lookup: _Lookup) -> None:
        """Runs in a thread."""
        pace, walk = Pace(), lookup.walk

        def is_enough() -> bool:
            pace.yield_gil()
            return lookup.is_forgotten

        with self._boundary.guard("found nothing for a prompt", count="lookup_failures") as guard:
            finder = lookup.store.finder
            while not walk.is_over and not lookup.is_forgotten:
                walk.resume(finder, is_enough)
            lookup.is_far = walk.is_over and finder.is_far(walk.match)
        for error in lookup.store.index.take_failures():
            self._boundary.caught(
                error, "did not read what a prompt may begin with", "", "lookup_failures"
            )
        lookup.has_failed = guard.failed
        with self._lookup_is_over:
            lookup.is_over = True
            self._lookup_is_over.notify_all()
        pace.rest()  # lets the thread that waits for the answer run first
        if not lookup.has_failed:
            with self._boundary.guard("did not look for more corrupt files"):
                walk.check_rest(finder, is_enough)
        if not lookup.is_forgotten:
            self._compute_keys(walk.chain, walk.num_tokens)

    def _compute_keys(self, chain: TokenChain, num_tokens: int) -> None:
        """Runs in a thread."""
        pace = Pace.gentle()
        with self._boundary.guard("did not compute the keys of a prompt"):
            for chunk in range(num_tokens // chain.chunk_tokens + 1):
                chain.node(chunk)
                pace.yield_gil()
