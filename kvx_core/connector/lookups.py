"""Lookups: answers from memory, or asks the store's disk in threads while the engine goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.plan import RequestId
from kvx_core.connector.threads import Workers
from kvx_core.stores.index import NotCached
from kvx_core.stores.match import Match
from kvx_core.stores.pace import Pace
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.token_chain import TokenChain
from kvx_core.stores.walk import Walk

_OWN_SECONDS = 5e-5  # that a lookup in memory may take of the engine's thread
_PATIENCE_SECONDS = 5e-4  # that it waits for a thread that is free: a step later takes much longer
_OWN_TOKENS = 4096  # of a longer prompt, the keys are computed in a thread
_MOST = 4096  # durations that are kept until they are taken; beginnings of prompts that are known
_ENOUGH = 100  # lookups that should have hit, after which a store that has nothing is reported
NOTHING = Match(0, ())


@dataclass(slots=True)
class _Lookup:
    store: PrefixStore
    walk: Walk
    begun: float
    is_over: bool = False
    has_failed: bool = False
    is_forgotten: bool = False


class Lookups:
    """Lookups of requests. `ask` waits half a millisecond for a disk, and only if no other lookup
    is under way; `wait` at most as long as it is told.

    Owns threads, which `shutdown` ends. Called by one thread.
    """

    def __init__(self, boundary: Boundary, *, threads: int = 2, seconds: float = 1.0) -> None:
        """seconds: then a request is answered that the store has nothing. Its lookup goes on if it
        has begun, and the next one finds what it has seen in memory
        """
        self._boundary, self.seconds = boundary, seconds
        self._workers = Workers(threads, "kvx-lookup", exit_seconds=0)
        self._pending: dict[RequestId, _Lookup] = {}
        self._lookup_is_over = threading.Condition()
        self._num_hits = self._num_misses = self._num_repeats = 0
        self._beginnings: dict[tuple[str, bytes], None] = {}  # of prompts, the oldest first
        self._repeats_without_a_hit = 0  # since the start; -1: there was a hit, or it was reported
        self._durations: deque[float] = deque(maxlen=_MOST)

    def ask(
        self,
        request_id: RequestId,
        store: PrefixStore,
        chain: TokenChain,
        num_tokens: int,
        at_least: int = 1,
    ) -> Match | None:
        """What the store has of the first tokens of a chain; None: ask again later.

        at_least: at least 1; shorter matches need not be found
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
        """Counts a lookup that could have hit: an earlier prompt began with the same tokens."""
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
        """The answers since the last call; empty if there were none.

        lookup_hits:    answers with at least `at_least` tokens
        lookup_misses:  all others, also those of lookups that have failed or took too long
        lookup_repeats: those whose prompt begins with `at_least` tokens of an earlier one, and
                        which therefore could have hit if this engine saves
        lookup_seconds: from the first `ask` to the answer; of the last 4,096 answers
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
            return NOTHING if lookup.has_failed else lookup.walk.match
        if time.monotonic() - lookup.begun > self.seconds:
            del self._pending[request_id]
            self._workers.cancel(request_id)  # if it has not begun, so that others are in time
            return NOTHING
        return None

    def prepare(self, request_id: RequestId, chain: TokenChain, num_tokens: int) -> None:
        """Computes the keys of the first tokens of a chain in a thread, which then are at hand."""
        self._workers.submit(lambda: self._compute_keys(chain, num_tokens), request_id)

    def forget(self, request_id: RequestId) -> None:
        """The request needs no answer any more."""
        if lookup := self._pending.pop(request_id, None):
            lookup.is_forgotten = True
        self._workers.cancel(request_id)

    def forget_all(self) -> None:
        for request_id in tuple(self._pending):
            self.forget(request_id)

    def wait(self, seconds: float) -> None:
        """Waits until a lookup is over, if there is one."""
        pending = tuple(self._pending.values())
        if pending:
            with self._lookup_is_over:
                self._lookup_is_over.wait_for(lambda: any(p.is_over for p in pending), seconds)

    def shutdown(self) -> None:
        """Waits for nothing."""
        self.forget_all()
        self._workers.shutdown(0, drop=True)

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
            walk.go_on(store.known, lambda: time.monotonic() - begun > _OWN_SECONDS)
        if not walk.is_over and self._workers.stuck_seconds() > self.seconds:
            return NOTHING  # the store does not answer
        if walk.is_over and num_tokens <= _OWN_TOKENS:
            return walk.match
        lookup = _Lookup(store, walk, begun, is_over=walk.is_over)
        is_alone = not self._pending and self._workers.has_free_thread
        self._workers.submit(lambda: self._look(lookup), request_id)
        if walk.is_over:
            return walk.match
        self._pending[request_id] = lookup
        if is_alone:
            with self._lookup_is_over:
                self._lookup_is_over.wait_for(lambda: lookup.is_over, _PATIENCE_SECONDS)
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
                walk.go_on(finder, is_enough)
        for error in lookup.store.index.take_failures():
            self._boundary.caught(
                error, "did not read what a prompt may begin with", "", "lookup_failures"
            )
        lookup.has_failed = guard.failed
        with self._lookup_is_over:
            lookup.is_over = True
            self._lookup_is_over.notify_all()
        pace.rest()  # who has waited for the answer goes first
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
