"""Policy: what a connector looks up, loads and saves. The scheduler's half, whatever the engine.

It has token ids and block ids, never a tensor. It does not wait for a disk, but for half a
millisecond at the first lookup.

If a load fails, a step computes wrong tokens: in the request that loaded, and in any that shares
its blocks. The engine drops these, and the store must not save them. So if a load runs in the same
step as the forward pass that reads it, or if others than this connector fill blocks, a request's
tokens are saved only after the engine has accepted one of its tokens. Asynchronous loads end before
their request runs.

An engine may change what a request is, and its weights, while the request runs. `scope_of` maps a
request as it is now to what its keys depend on besides its tokens, and every method asks it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.epochs import FIRST, Epoch, Epochs
from kvx_core.connector.lookups import NOTHING, Lookups
from kvx_core.connector.plan import BlockIds, Load, Plan, RequestId, Save, Scope, ScopedStores
from kvx_core.connector.spread import SaveBudget
from kvx_core.stores.index import Index
from kvx_core.stores.match import Match
from kvx_core.stores.token_chain import TokenChain

_OWN_TOKENS = 1024  # of a request, that a step converts and hashes if no thread has done so
_PATIENCE_SECONDS = 0.005  # that a step without a forward pass waits for lookups


class Request(Protocol):
    """What a policy reads of an engine's request."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and what was generated; grows as tokens are accepted."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...


@dataclass(slots=True)
class _Tracked:
    """A request that has blocks."""

    request: Request
    scope: Scope  # when it got its first blocks, as the epoch
    epoch: Epoch
    block_ids: BlockIds
    hold: int  # saves begin when the request has more tokens than this
    saved: int = 0  # tokens that are in the store, or need not be saved
    has_gap: bool = False  # a sliding window has left some of them before they were saved
    is_prepared: bool = False  # a thread was asked to compute its keys


@dataclass(slots=True)
class _Found:
    """The tokens of a request that the store has, kept until blocks are allocated for them."""

    match: Match
    num_tokens: int  # of the request when it was looked up
    scope: Scope
    start: int = 0  # tokens that the engine has already


@dataclass(slots=True)
class Policy:
    """Plans saves and loads. An engine computes a request without a plan as without a store.

    If a method raises, its caller catches the error and calls one of these, which never raise:
    `give_up`, `give_up_loads`, `forget`, `forget_all`, `ended`, `stop`.
    """

    stores: ScopedStores
    boundary: Boundary
    lookups: Lookups
    chunk_tokens: int
    min_tokens: int = 8  # loads and saves at least this many at once
    save_generated: bool = True  # saves generated tokens too, not only prompts
    produces: bool = True
    consumes: bool = True
    asynchronous: bool = False  # loads run beside other requests' steps
    window: int = 0  # the shortest sliding window of a group of layers; 0: there is none
    spread: SaveBudget | None = None  # None: a step saves all that it completes
    others_fill: bool = False  # blocks may hold what another connector has loaded
    epochs: Epochs = field(default_factory=Epochs)
    _tracked: dict[RequestId, _Tracked] = field(default_factory=dict)
    _lookups: dict[RequestId, _Found] = field(default_factory=dict)
    _chains: dict[RequestId, tuple[Scope, TokenChain]] = field(default_factory=dict)
    _given_up: set[RequestId] = field(default_factory=set)  # they load nothing from now on
    _loading: dict[RequestId, Match] = field(default_factory=dict)  # in this or past steps
    _next: Plan = field(default_factory=Plan)
    _index: Index | None = None  # of all stores
    _now: Epoch | None = FIRST  # None: the weights have no name that others may use
    _unnamed_since: float = 0.0
    _unproven: set[RequestId] = field(default_factory=set)  # some of their blocks may be older

    def salt_of(self, request: Request) -> str | None:
        """The salt of a request as it is now; None: its keys and values depend on more than its
        tokens, a salt and the weights. Engines override this.
        """
        return ""

    def scope_of(self, request: Request) -> Scope | None:
        """What the keys of a request depend on besides its tokens, as it is now; None: it is not
        shared.
        """
        if self._now is None or request.request_id in self._unproven:
            return None
        salt = self.salt_of(request)
        return None if salt is None else Scope(salt, self._now.name)

    def look_at_weights(self) -> None:
        """Notices that they have changed: every method that an engine's hook calls does so first,
        but for `step`, which is called for each request of a step.
        """
        before, self._now = self._now, self.epochs.current()
        if self._now is before:
            return
        if self._now is None:
            self._unnamed_since = time.monotonic()
        self.reset()
        # Of what the old weights computed: these fail.
        self._next.loads = [replace(load, match=NOTHING) for load in self._next.loads]

    def lookup(
        self, request: Request, num_computed_tokens: int, *, may_load: bool = True
    ) -> int | None:
        """How many tokens past `num_computed_tokens` can be loaded; None: ask again in a step.

        num_computed_tokens: that the engine has found in its own blocks
        """
        self.look_at_weights()
        request_id = request.request_id
        if num_computed_tokens and not self.epochs.has_current_blocks():
            self._unproven.add(request_id)  # the engine has them in blocks that may be older
        else:  # it begins anew, if it had blocks
            self._unproven.discard(request_id)
        if not (self.consumes and may_load) or request_id in self._given_up:
            return 0
        scope = self.scope_of(request)
        if scope is None:
            waits = self._now is None and not self._has_waited_for_weights
            return None if waits and self.salt_of(request) is not None else 0
        num_tokens = len(request.all_token_ids)
        found = self._lookups.get(request_id)
        if found is None or found.num_tokens != num_tokens or found.scope != scope:
            match = self._lookup(request, scope, num_tokens)
            if match is None:
                return None
            found = self._lookups[request_id] = _Found(match, num_tokens, scope)
        found.start = num_computed_tokens
        # The last token is computed by the engine: its logits choose the next one.
        count = min(found.match.num_tokens, num_tokens - 1) - num_computed_tokens
        return count if count >= self.min_tokens else 0

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Tracks `request`, which has blocks now, and plans to load `num_external_tokens` tokens.

        May be called a second time, with 0, after an asynchronous load.
        """
        self.look_at_weights()
        request_id = request.request_id
        found, scope = self._lookups.get(request_id), self.scope_of(request)
        if scope is None or (num_external_tokens and (found is None or found.scope != scope)):
            self.give_up(request_id, block_ids, num_external_tokens)
            return
        assert self._now is not None  # there is a scope
        hold = len(request.all_token_ids) if self._holds else 0
        tracked = self._tracked.get(request_id)
        if tracked is None:
            tracked = _Tracked(request, scope, self._now, block_ids, hold)
            self._tracked[request_id] = tracked
        tracked.block_ids, tracked.hold = block_ids, hold
        if num_external_tokens:
            assert found is not None  # `lookup` found these tokens
            stop = found.start + num_external_tokens
            tracked.saved = max(tracked.saved, stop)
            self._load(request_id, scope, found.match, found.start, stop, block_ids)
        if (
            found is not None
            and found.scope == scope
            and found.match.num_tokens
            and (num_external_tokens or self._finds_equals(scope))
        ):
            tracked.saved = max(tracked.saved, found.match.num_tokens)
        self._lookups.pop(request_id, None)

    def give_up(self, request_id: RequestId, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Saves nothing of a request, and plans a load that fails: the engine then computes the
        tokens that it expected to be loaded.
        """
        found = self._lookups.get(request_id)
        self.forget(request_id)
        if num_external_tokens:
            self._given_up.add(request_id)
            start = 0 if found is None else found.start
            if found is None or start:  # it keeps blocks of before
                self._unproven.add(request_id)
            stop = start + num_external_tokens
            self._load(request_id, Scope(), NOTHING, start, stop, block_ids)

    def forget(self, request_id: RequestId) -> None:
        """Drops the request's lookup and saves. It may be looked up again."""
        self.lookups.forget(request_id)
        self._lookups.pop(request_id, None)
        self._tracked.pop(request_id, None)

    def ended(self, request_id: RequestId) -> None:
        """Forgets everything about a request."""
        self.forget(request_id)
        self._chains.pop(request_id, None)
        self._given_up.discard(request_id)
        self._unproven.discard(request_id)
        if self.spread is not None:
            self.spread.forget(request_id)
        self._doubt(self._loading.pop(request_id, None))  # its load may have failed

    def has_loaded(self, request_id: RequestId, stop: int) -> None:
        """The store has the request's tokens up to `stop`."""
        if tracked := self._tracked.get(request_id):
            tracked.saved = stop

    def step(
        self,
        request_id: RequestId,
        num_computed_tokens: int,
        stop: int,
        block_ids: Sequence[Sequence[int]],
        *,
        are_new: bool,
    ) -> None:
        """Plans what to save of a request of which this step computes tokens up to `stop`.

        block_ids: new ones, which follow those known before; are_new: they replace them
        An error is caught: then nothing more of the request is saved.
        """
        if self.spread is not None:
            self.spread.computes(stop - num_computed_tokens)
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        with self.boundary.guard(
            "did not save", f"request {request_id}", count="dropped_saves"
        ) as guard:
            if are_new:
                tracked.block_ids = _lists(block_ids)
            elif block_ids:
                for group, more in zip(tracked.block_ids, block_ids, strict=True):
                    group.extend(more)
            if self.produces and self._is_shared(tracked):
                self._save(tracked, num_computed_tokens, stop)
        if guard.failed:  # its block ids may be out of date
            self.forget(request_id)

    def take_plan(self, *, is_idle: bool) -> Plan:
        """The plan of this step, for the workers. Steps without a forward pass wait for lookups."""
        self.look_at_weights()
        plan, self._next = self._next, Plan()
        plan.is_idle, plan.generation = is_idle, self.epochs.generation
        plan.stamp = None if self._now is None else self._now.stamp
        if self.spread is not None:
            if is_idle:  # there may be no other step soon
                plan.saves += self.spread.take_all()
            self._next.saves += self.spread.next_step()
        if is_idle and not plan.saves and not plan.loads:
            self.lookups.wait(_PATIENCE_SECONDS)
        return plan

    def finished(self, request: Request, block_ids: BlockIds, num_computed_tokens: int) -> bool:
        """Forgets a request. Returns whether its blocks have to stay until they are saved.

        num_computed_tokens: 0 if it was aborted, or nothing of it may be saved
        """
        self.look_at_weights()
        tracked = self._tracked.get(request.request_id)
        known = self._chains.get(request.request_id)
        is_shared = tracked is not None and self._is_shared(tracked)
        self.ended(request.request_id)
        if tracked is None or not is_shared or not self.produces:
            return False
        stop = min(len(request.all_token_ids) - 1, num_computed_tokens)
        if not self.save_generated:
            stop = min(stop, request.num_prompt_tokens)
        at_prompt = tracked.saved < request.num_prompt_tokens <= stop
        if stop - tracked.saved < (1 if at_prompt else self.min_tokens):
            return False
        tracked.block_ids = block_ids
        if known is not None and known[0] == tracked.scope:
            chain = known[1]
        else:
            chain = self.stores[tracked.scope].chain_of(request.all_token_ids)
        save = self._save_of(tracked, stop, chain, final=True)
        if self.spread is None:
            self._next.saves.append(save)
        else:
            self.spread.wait(save, chain)
            self._next.saves += self.spread.take()
        return True

    def reported(
        self, failed: Collection[RequestId], finished: Collection[RequestId], *, blocks: bool
    ) -> None:
        """Takes the workers' reports of loads: failed and finished requests, or failed blocks.

        Blocks may be those of another connector's load, which any request may share.
        """
        if blocks:
            for each in self._tracked.values():
                each.saved = 0
        for request_id in tuple(self._loading) if blocks else failed:
            if tracked := self._tracked.get(request_id):  # None: it was aborted meanwhile
                self._given_up.add(request_id)
                tracked.saved = 0  # its tokens may not be in the store any more
                self._doubt(self._loading.get(request_id))
        for request_id in (*failed, *finished):
            self._loading.pop(request_id, None)

    def give_up_loads(self) -> None:
        """Called if `reported` raised: treats all loads as failed, since any of them may have."""
        self._given_up.update(self._loading)
        for request_id in self._loading:
            self.forget(request_id)

    def handed_over(self, request_id: RequestId, num_computed_tokens: int) -> Save | None:
        """What the store lacks of a running request, no tokens if it lacks none, or perhaps their
        states; None: it may not be saved, its blocks are still being loaded, or a sliding window
        has left some of it.

        num_computed_tokens: as the engine counts them; drafts of the last step do not matter
        Raises StoreError.
        """
        self.look_at_weights()
        tracked = self._tracked.get(request_id)
        is_loading = self.asynchronous and request_id in self._loading
        if tracked is None or not self._is_shared(tracked) or is_loading or not self.produces:
            return None
        if len(tracked.request.all_token_ids) <= tracked.hold:
            return None
        stop = min(len(tracked.request.all_token_ids) - 1, num_computed_tokens)
        start = tracked.saved - tracked.saved % self.chunk_tokens
        if tracked.has_gap or (stop > tracked.saved and self._gone(num_computed_tokens) > start):
            return None
        chain = self._chain(tracked.request, tracked.scope)
        if stop > tracked.saved or (stop and self.stores[tracked.scope].has_states):
            return self._save_of(tracked, stop, chain)
        blocks = _lists(tracked.block_ids)
        return Save(request_id, tracked.scope, chain.node(0), stop, chain.ids(stop, stop), blocks)

    def reset(self) -> None:
        """Forgets what has been looked up. What is stored stays, and is looked up anew."""
        self.lookups.forget_all()
        for found in self._lookups.values():  # what the engine has already is still true
            found.match, found.num_tokens = NOTHING, -1
        self._chains.clear()

    def forget_all(self) -> None:
        """Saves nothing of the current requests."""
        self._tracked.clear()

    def stop(self) -> None:
        """Called if `reset` raised: saves and loads nothing from now on."""
        self.produces = self.consumes = False
        self.lookups.forget_all()
        self._lookups.clear()
        self._tracked.clear()

    def _doubt(self, match: Match | None) -> None:
        """Asks the disk for the files of a match before memory answers again. Never raises."""
        if match is not None and self._index is not None:
            for name in match.names:
                self._index.doubt(name)

    def _load(
        self,
        request_id: RequestId,
        scope: Scope,
        match: Match,
        start: int,
        stop: int,
        block_ids: BlockIds,
    ) -> None:
        self._loading[request_id] = match
        self._next.loads.append(
            Load(request_id, scope, match, start, stop, block_ids, wait=not self.asynchronous)
        )

    def _save(self, tracked: _Tracked, num_computed_tokens: int, stop: int) -> None:
        """Plans what to save once `stop` tokens have been computed.

        Full chunks when they are complete, and the whole prompt when its end is computed.
        """
        request = tracked.request
        known = len(request.all_token_ids)  # without draft tokens, which may be rejected
        if known <= tracked.hold:
            return
        stop = min(stop, known)
        chunk, num_prompt_tokens = self.chunk_tokens, request.num_prompt_tokens
        full = stop - stop % chunk
        if stop >= num_prompt_tokens > tracked.saved:
            full = max(full, num_prompt_tokens)
        if not self.save_generated:
            full = min(full, num_prompt_tokens)
        gone = self._gone(num_computed_tokens)
        if gone > tracked.saved - tracked.saved % chunk:
            tracked.saved = min(-(-gone // chunk) * chunk, full)
            tracked.has_gap = True
        if full > tracked.saved:
            chain = self._chain(request, tracked.scope)
            ready = chain.num_ids + _OWN_TOKENS
            if ready < full and not self.window:  # the rest is saved by later steps
                full = ready - ready % chunk
                if not tracked.is_prepared:  # no lookup has computed its keys
                    tracked.is_prepared = True
                    num_tokens = min(known, num_prompt_tokens)
                    self.lookups.prepare(request.request_id, chain, num_tokens)
        start = tracked.saved - tracked.saved % chunk
        if self.spread is not None and not self.window:
            full = self.spread.cut(start, full)
        if full > tracked.saved:
            self._next.saves.append(self._save_of(tracked, full, chain))
            tracked.saved = full
            if self.spread is not None:
                self.spread.saves(full - start)

    def _gone(self, num_computed_tokens: int) -> int:
        """How many of the first tokens no sliding window reaches: engines free their blocks.

        Source: vllm 0.32 v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens
        """
        return num_computed_tokens - self.window + 1 if self.window else 0

    def _save_of(
        self, tracked: _Tracked, stop: int, chain: TokenChain, *, final: bool = False
    ) -> Save:
        start = min(tracked.saved, stop - 1) // self.chunk_tokens * self.chunk_tokens
        return Save(
            request_id=tracked.request.request_id,
            scope=tracked.scope,
            node=chain.node(start // self.chunk_tokens),
            start=start,
            tokens=chain.ids(start, stop),
            block_ids=_lists(tracked.block_ids),
            final=final,
        )

    def _chain(self, request: Request, scope: Scope) -> TokenChain:
        """The keys of a request's tokens. Raises StoreError."""
        known = self._chains.get(request.request_id)
        if known is None or known[0] != scope:
            store = self.stores[scope]
            known = scope, store.chain_of(request.all_token_ids)
            self._chains[request.request_id] = known
            self._index = store.index
        return known[1]

    def _lookup(self, request: Request, scope: Scope, num_tokens: int) -> Match | None:
        """What the store has; an error counts as nothing. None: ask again."""
        with self.boundary.guard(
            "found nothing for", f"request {request.request_id}", count="lookup_failures"
        ):
            chain, store = self._chain(request, scope), self.stores[scope]
            asked = num_tokens - store.has_states  # a state behind the last token is no use
            return self.lookups.ask(request.request_id, store, chain, asked, self.min_tokens)
        return NOTHING

    def _finds_equals(self, scope: Scope) -> bool:
        """Whether what lookups find is as precise as what would be saved in its place."""
        return self.stores[scope].accept == "same"

    def _is_shared(self, tracked: _Tracked) -> bool:
        """Whether the request is what it was when it got blocks, and so are the weights."""
        if tracked.epoch is not self._now:
            return False
        return (
            self.salt_of(tracked.request) == tracked.scope.salt
            and tracked.request.request_id not in self._unproven
        )

    @property
    def _holds(self) -> bool:
        return self.others_fill or (self.consumes and not self.asynchronous)

    @property
    def _has_waited_for_weights(self) -> bool:
        return time.monotonic() - self._unnamed_since > self.lookups.seconds


def _lists(block_ids: Sequence[Sequence[int]]) -> BlockIds:
    return tuple(map(list, block_ids))
