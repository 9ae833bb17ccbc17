"""Policy: decides what a connector looks up, loads and saves, in the scheduler of any engine.

It handles token ids and block ids, never a tensor. It waits for the disk for at most half a
millisecond at a request's first lookup, and at most 5 ms in a step without a forward pass.

If a load fails, a step computes wrong tokens, in the request that loaded and in each that shares
its blocks. The engine drops these tokens, and the store must not save them. So if a load runs in
the step whose forward pass reads it, or if another connector fills blocks too, a request is saved
only after the engine has accepted a token of it. Asynchronous loads end before their request runs.

Each method that plans a load or a save asks RequestScopes again what the request's keys depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.choices import Choices
from kvx_core.connector.lookups import NOTHING, Lookups
from kvx_core.connector.plan import BlockIds, Load, Plan, RequestId, Save, Scope, ScopedStores
from kvx_core.connector.requests import Found, Request, Tracked, copied
from kvx_core.connector.scopes import RequestScopes
from kvx_core.connector.spread import SaveBudget
from kvx_core.connector.state_positions import StatePositions
from kvx_core.stores.index import Index
from kvx_core.stores.match import Match
from kvx_core.stores.token_chain import TokenChain

_MOST_HASHED_TOKENS = 1024  # of a request, by a step, if no thread has hashed them
_IDLE_STEP_SECONDS = 0.005  # the wait for lookups in a step without a forward pass


@dataclass(slots=True)
class Policy(RequestScopes):
    """Plans saves and loads. The engine computes a request without a plan as if it had no store.

    If a method raises, its caller catches the error and calls one of these methods, which never
    raise: `give_up`, `give_up_loads`, `forget`, `forget_all`, `ended`, `stop`.
    """

    stores: ScopedStores
    boundary: Boundary
    lookups: Lookups
    chunk_tokens: int
    min_tokens: int = 8  # fewer are not loaded, nor saved at the end of an answer
    save_generated: bool = True  # saves prompts and generated tokens, not only prompts
    produces: bool = True
    consumes: bool = True
    asynchronous: bool = False  # loads run beside the steps of other requests
    window: int = 0  # the shortest sliding window of any group of layers; 0: none
    spread: SaveBudget | None = None  # None: a step saves all tokens that it completes
    others_fill: bool = False  # another connector may load into blocks
    states: StatePositions | None = None  # None: where saves end, if sections say they are of there
    choices: Choices | None = None  # None: all that is found is loaded
    _tracked: dict[RequestId, Tracked] = field(default_factory=dict)
    _lookups: dict[RequestId, Found] = field(default_factory=dict)
    _chains: dict[RequestId, tuple[Scope, Sequence[int], TokenChain]] = field(default_factory=dict)
    _given_up: set[RequestId] = field(default_factory=set)  # these requests load nothing any more
    _loading: dict[RequestId, Match] = field(default_factory=dict)  # not reported yet
    _next: Plan = field(default_factory=Plan)
    _index: Index | None = None  # shared by all stores

    def weights_changed(self) -> None:
        """Drops what the old weights have to do with: lookups, and loads, which fail."""
        self.reset()
        self._next.loads = [replace(load, match=NOTHING) for load in self._next.loads]

    def lookup(
        self, request: Request, num_computed_tokens: int, *, may_load: bool = True
    ) -> int | None:
        """Returns how many tokens past `num_computed_tokens` can be loaded; None: ask again later.

        num_computed_tokens: the tokens that the engine has found in its own blocks
        """
        self.look_at_weights()
        self.look_at_blocks(request, num_computed_tokens)
        request_id = request.request_id
        if tracked := self._tracked.get(request_id):
            tracked.computed = 0  # it has lost its blocks
        if request_id in self._given_up or not (self.produces or self.consumes):
            return 0
        scope = self.scope_of(request)
        if scope is None:
            return None if self.may_get_scope(request, self.lookups.seconds) else 0
        if not (self.consumes and may_load):
            return 0
        num_tokens = len(request.all_token_ids)
        found = self._lookups.get(request_id)
        if found is None or found.num_tokens != num_tokens or found.scope != scope:
            match = self._lookup(request, scope, num_tokens)
            if match is None:
                return None
            found = self._lookups[request_id] = Found(match, num_tokens, scope)
        found.start = num_computed_tokens
        # The last token is computed by the engine: its logits choose the next one.
        count = min(found.match.num_tokens, num_tokens - 1) - num_computed_tokens
        return count if count >= self.min_tokens and self._pays(found, count) else 0

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Tracks `request`, which has blocks now, and plans to load `num_external_tokens` tokens.

        An engine may call it a second time, with 0, after an asynchronous load.
        """
        self.look_at_weights()
        self.note_blocks(request)
        request_id = request.request_id
        found, scope = self._lookups.get(request_id), self.scope_of(request)
        if scope is None or (num_external_tokens and (found is None or found.scope != scope)):
            self.give_up(request_id, block_ids, num_external_tokens)
            return
        assert self._now is not None  # there is a scope
        hold = len(request.all_token_ids) if self._holds else 0
        tracked = self._tracked.get(request_id)
        if tracked is None:
            tracked = Tracked(request, scope, self._now, block_ids, hold)
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
            tracked.stated = max(tracked.stated, found.match.num_tokens)
        self._lookups.pop(request_id, None)

    def give_up(self, request_id: RequestId, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Drops a request's lookup and saves, and plans a load that fails, so that the engine
        computes the tokens that it expected to be loaded.
        """
        found = self._lookups.get(request_id)
        self.forget(request_id)
        if num_external_tokens:
            self._given_up.add(request_id)
            start = 0 if found is None else found.start
            if found is None or start:  # it keeps its earlier blocks
                self._unproven.add(request_id)
            stop = start + num_external_tokens
            self._load(request_id, Scope(), NOTHING, start, stop, block_ids)

    def forget(self, request_id: RequestId) -> None:
        """Drops a request's lookup and saves. The request may be looked up again."""
        self.lookups.forget(request_id)
        self._lookups.pop(request_id, None)
        self._tracked.pop(request_id, None)

    def ended(self, request_id: RequestId) -> None:
        """Forgets all about a request that has ended."""
        self.forget(request_id)
        self._chains.pop(request_id, None)
        self._given_up.discard(request_id)
        self._unproven.discard(request_id)
        if self.choices is not None:
            self.choices.ended(request_id, good=False)
        if self.spread is not None:
            self.spread.forget(request_id)
        self._doubt(self._loading.pop(request_id, None))  # its load may have failed

    def has_loaded(self, request_id: RequestId, stop: int) -> None:
        """Notes that the store has the request's tokens up to `stop`."""
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
        """Plans the saves of a request whose tokens up to `stop` this step computes.

        block_ids: the new block ids; they follow the earlier ids, or replace them if are_new
        Catches errors; after an error it saves nothing more of the request.
        """
        if self.spread is not None:
            self.spread.computes(stop - num_computed_tokens)
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if self.states is not None and num_computed_tokens < tracked.computed:
            self._unproven.add(request_id)  # its tokens were taken back: states do not go back
        tracked.computed = stop
        with self.boundary.guard(
            "did not save", f"request {request_id}", count="dropped_saves"
        ) as guard:
            if are_new:
                tracked.block_ids = copied(block_ids)
            elif block_ids:
                for group, more in zip(tracked.block_ids, block_ids, strict=True):
                    group.extend(more)
            if self.produces and self._is_shared(tracked):
                self._save(tracked, num_computed_tokens, stop)
        if guard.failed:  # its block ids may be out of date
            self.forget(request_id)

    def save_states(self, request_id: RequestId, stop: int, block_ids: BlockIds) -> None:
        """Plans a save of a request's states after `stop` tokens, which an engine keeps apart in
        these blocks until the step ends: call it after `step`. Catches errors.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or not self.produces:
            return
        with self.boundary.guard("did not save", f"request {request_id}", count="dropped_saves"):
            request, known = tracked.request, len(tracked.request.all_token_ids)
            most = known if self.save_generated else request.num_prompt_tokens
            is_computed = known > tracked.hold and stop <= min(most, tracked.computed)
            if is_computed and self._is_shared(tracked):
                chain = self._chain(request, tracked.scope)
                save = self._save_of(tracked, stop, chain, has_states=True)
                self._next.put(replace(save, block_ids=block_ids))

    def take_plan(self, *, is_idle: bool) -> Plan:
        """Returns the plan of this step. An empty plan waits a little for lookups if `is_idle`.

        is_idle: the step has no forward pass
        """
        self.look_at_weights()
        plan, self._next = self._next, Plan()
        plan.is_idle, plan.generation = is_idle, self.epochs.generation
        plan.stamp = None if self._now is None else self._now.stamp
        plan.asks = self.adapters.asks
        if self.spread is not None:
            if is_idle:  # there may be no other step soon
                plan.saves += self.spread.take_all()
            self._next.saves += self.spread.next_step()
        if is_idle and not plan.saves and not plan.loads:
            self.lookups.wait(_IDLE_STEP_SECONDS)
        return plan

    def finished(self, request: Request, block_ids: BlockIds, num_computed_tokens: int) -> bool:
        """Forgets a request. Returns True if its blocks must stay until they are saved.

        num_computed_tokens: 0 if the request was aborted, or may not be saved
        """
        self.look_at_weights()
        tracked = self._tracked.get(request.request_id)
        known = self._chains.get(request.request_id)
        ids = self.ids_of(request) if tracked is not None and self._is_shared(tracked) else None
        self.ended(request.request_id)
        if tracked is None or ids is None or not self.produces:
            return False
        stop = min(len(request.all_token_ids) - 1, num_computed_tokens)
        if not self.save_generated:
            stop = min(stop, request.num_prompt_tokens)
        saved, has_states = tracked.saved, self.states is None or tracked.computed == stop
        if self.states is not None and has_states:  # tokens are no use without them
            saved = min(saved, tracked.stated)
        at_prompt = saved < request.num_prompt_tokens <= stop
        if stop - saved < (1 if at_prompt else self.min_tokens):
            return False
        tracked.block_ids = block_ids
        if known is not None and known[0] == tracked.scope and known[1] is ids:
            chain = known[2]
        else:
            chain = self.stores[tracked.scope].chain_of(ids)
        save = self._save_of(tracked, stop, chain, final=True, has_states=has_states)
        if self.spread is None:
            self._next.saves.append(save)
        else:
            self.spread.wait(save, chain)
            self._next.saves += self.spread.take()
        return True

    def reported(
        self, failed: Collection[RequestId], finished: Collection[RequestId], *, blocks: bool
    ) -> None:
        """Takes the workers' reports of loads: failed and finished requests, and failed blocks.

        blocks: some block failed; another connector may have loaded it, and any request share it
        """
        if blocks:
            for each in self._tracked.values():
                each.saved = each.stated = 0
        for request_id in tuple(self._loading) if blocks else failed:
            if tracked := self._tracked.get(request_id):  # None: it was aborted meanwhile
                self._given_up.add(request_id)
                tracked.saved = tracked.stated = 0  # the store may have lost its tokens
                self._doubt(self._loading.get(request_id))
        for request_id in (*failed, *finished):
            self._loading.pop(request_id, None)
            if self.choices is not None:
                self.choices.ended(request_id, good=request_id not in failed and not blocks)

    def give_up_loads(self) -> None:
        """Treats all loads as failed. Called if `reported` raised: any load may have failed."""
        self._given_up.update(self._loading)
        for request_id in self._loading:
            self.forget(request_id)

    def handed_over(self, request_id: RequestId, num_computed_tokens: int) -> Save | None:
        """Returns a Save of the tokens of a running request that the store lacks: no tokens if it
        lacks none, or in a store with states the last chunk, whose states it may lack. None: the
        request may not be saved, its blocks are still being loaded, or unsaved tokens have left a
        sliding window.
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
            has_states = self.states is None or tracked.computed == stop
            return self._save_of(tracked, stop, chain, has_states=has_states)
        blocks = copied(tracked.block_ids)
        return Save(request_id, tracked.scope, chain.node(0), stop, chain.ids(stop, stop), blocks)

    def reset(self) -> None:
        """Forgets the results of lookups. The store keeps its entries, and lookups ask it again."""
        self.lookups.forget_all()
        for found in self._lookups.values():  # `start` stays: it counts the engine's own tokens
            found.match, found.num_tokens = NOTHING, -1
        self._chains.clear()

    def forget_all(self) -> None:
        """Stops saving the current requests."""
        self._tracked.clear()

    def stop(self) -> None:
        """Saves and loads nothing from now on. Called if `reset` raised."""
        self.produces = self.consumes = False
        self.lookups.forget_all()
        self._lookups.clear()
        self._tracked.clear()

    def _doubt(self, match: Match | None) -> None:
        """Has later lookups ask the disk, not memory, for the files of a match. Never raises."""
        if match is not None and self._index is not None:
            for name in match.names:
                self._index.mark_uncertain(name)

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
        seconds = None
        if self.choices is not None and self.asynchronous and match.num_tokens:
            seconds = self.choices.begins(request_id, match, stop - start)
        waits = not self.asynchronous
        self._next.loads.append(
            Load(request_id, scope, match, start, stop, block_ids, waits, seconds)
        )

    def _save(self, tracked: Tracked, num_computed_tokens: int, stop: int) -> None:
        """Plans what to save when the first `stop` tokens have been computed: all full chunks, the
        whole prompt once its end is computed, and all tokens that states are stored of.
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
        takes = self.states.takes if self.states and stop == tracked.computed else None
        keeps_states = takes is not None and takes(num_computed_tokens, stop, num_prompt_tokens)
        if keeps_states:  # the next step changes them
            full = stop
        if not self.save_generated:
            full = min(full, num_prompt_tokens)
        gone = self._gone(num_computed_tokens)
        if gone > tracked.saved - tracked.saved % chunk:
            tracked.saved = min(-(-gone // chunk) * chunk, full)
            tracked.has_gap = True
        if full > tracked.saved:
            chain = self._chain(request, tracked.scope)
            ready = chain.num_ids + _MOST_HASHED_TOKENS
            if ready < full and not (self.window or keeps_states):  # later steps save the rest
                full = ready - ready % chunk
                if not tracked.is_prepared:  # no thread has computed its keys
                    tracked.is_prepared = True
                    num_tokens = min(known, num_prompt_tokens)
                    self.lookups.prepare(request.request_id, chain, num_tokens)
        start = tracked.saved - tracked.saved % chunk
        if self.spread is not None and not self.window:
            full = self.spread.cut(start, full)
        if full > tracked.saved:
            has_states = self.states is None or (keeps_states and full == stop)
            self._next.saves.append(self._save_of(tracked, full, chain, has_states=has_states))
            tracked.saved = full
            if self.spread is not None:
                self.spread.saves(full - start)

    def _gone(self, num_computed_tokens: int) -> int:
        """Returns how many first tokens have left the shortest window: engines free their blocks.

        Source: vllm 0.32 v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens
        """
        return num_computed_tokens - self.window + 1 if self.window else 0

    def _save_of(
        self,
        tracked: Tracked,
        stop: int,
        chain: TokenChain,
        *,
        has_states: bool,
        final: bool = False,
    ) -> Save:
        start = min(tracked.saved, stop - 1) // self.chunk_tokens * self.chunk_tokens
        if has_states:
            tracked.stated = max(tracked.stated, stop)
        return Save(
            request_id=tracked.request.request_id,
            scope=tracked.scope,
            node=chain.node(start // self.chunk_tokens),
            start=start,
            tokens=chain.ids(start, stop),
            block_ids=copied(tracked.block_ids),
            final=final,
            has_states=has_states,
        )

    def _chain(self, request: Request, scope: Scope) -> TokenChain:
        """Returns the chain of keys of a request's tokens. Raises StoreError."""
        known, ids = self._chains.get(request.request_id), self.ids_of(request)
        if known is None or known[0] != scope or known[1] is not ids:
            store = self.stores[scope]
            known = scope, ids, store.chain_of(ids)
            self._chains[request.request_id] = known
            self._index = store.index
        return known[2]

    def _lookup(self, request: Request, scope: Scope, num_tokens: int) -> Match | None:
        """Returns the match of a request; an error counts as a miss. None: ask again."""
        with self.boundary.guard(
            "found nothing for", f"request {request.request_id}", count="lookup_failures"
        ):
            chain, store = self._chain(request, scope), self.stores[scope]
            asked = num_tokens - store.has_states  # a state after the last token is useless
            return self.lookups.ask(request.request_id, store, chain, asked, self.min_tokens)
        return NOTHING

    def _pays(self, found: Found, num_tokens: int) -> bool:
        """True if loading so many tokens of what was found is sooner than computing them."""
        choices, match = self.choices, found.match
        if choices is None or choices.pays(match, num_tokens):
            return True
        if choices.is_due(match):
            finder = self.stores[found.scope].finder
            self.lookups.run(lambda: choices.probe(finder, match))
        return False

    def _finds_equals(self, scope: Scope) -> bool:
        """True if found entries are at least as precise as those that a save would write."""
        return self.stores[scope].accept == "same"

    @property
    def _holds(self) -> bool:
        return self.others_fill or (self.consumes and not self.asynchronous)
