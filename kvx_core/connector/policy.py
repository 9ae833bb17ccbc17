"""Policy: what a connector looks up, loads and saves. The scheduler's half, whatever the engine.

It has token ids and block ids, never a tensor. It does not wait for a disk, but for half a
millisecond at the first lookup.

If a load fails, a step computes wrong tokens: in the request that loaded, and in any that shares
its blocks. The engine drops these, and the store must not save them. So if a load runs in the same
step as the forward pass that reads it, a request's tokens are saved only after the engine has
accepted one of its tokens. Asynchronous loads end before their request runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.lookups import NOTHING, Lookups
from kvx_core.connector.plan import BlockIds, Load, Plan, RequestId, SaltedStores, Save
from kvx_core.connector.spread import Spread
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
    salt: str
    block_ids: BlockIds
    hold: int  # saves begin when the request has more tokens than this
    saved: int = 0  # tokens that are in the store, or need not be saved
    is_stale: bool = False  # some of its tokens were computed before a reset
    is_prepared: bool = False  # a thread was asked to compute its keys


@dataclass(slots=True)
class _Found:
    """The tokens of a request that the store has, kept until blocks are allocated for them."""

    match: Match
    num_tokens: int  # of the request when it was looked up
    start: int = 0  # tokens that the engine has already


@dataclass(slots=True)
class Policy:
    """Plans saves and loads. An engine computes a request without a plan as without a store.

    If a method raises, its caller catches the error and calls one of these, which never raise:
    `give_up`, `give_up_loads`, `forget`, `forget_all`, `ended`, `stop`.
    """

    stores: SaltedStores
    boundary: Boundary
    lookups: Lookups
    chunk_tokens: int
    min_tokens: int = 8  # loads and saves at least this many at once
    save_generated: bool = True  # saves generated tokens too, not only prompts
    produces: bool = True
    consumes: bool = True
    asynchronous: bool = False  # loads run beside other requests' steps
    window: int = 0  # the shortest sliding window of a group of layers; 0: there is none
    spread: Spread | None = None  # None: a step saves all that it completes
    _tracked: dict[RequestId, _Tracked] = field(default_factory=dict)
    _lookups: dict[RequestId, _Found] = field(default_factory=dict)
    _chains: dict[RequestId, TokenChain] = field(default_factory=dict)
    _given_up: set[RequestId] = field(default_factory=set)  # they load nothing from now on
    _loading: dict[RequestId, Match] = field(default_factory=dict)  # in this or past steps
    _next: Plan = field(default_factory=Plan)
    _index: Index | None = None  # of all stores
    _epoch: str = ""

    def lookup(self, request: Request, salt: str, num_computed_tokens: int) -> int | None:
        """How many tokens past `num_computed_tokens` can be loaded; None: ask again in a step.

        Only requests whose keys and values depend on nothing but their token ids and the salt.
        """
        request_id = request.request_id
        if not self.consumes or request_id in self._given_up:
            return 0
        num_tokens = len(request.all_token_ids)
        found = self._lookups.get(request_id)
        if found is None or found.num_tokens != num_tokens:
            match = self._lookup(request, salt, num_tokens)
            if match is None:
                return None
            found = self._lookups[request_id] = _Found(match, num_tokens)
        found.start = num_computed_tokens
        # The last token is computed by the engine: its logits choose the next one.
        count = min(found.match.num_tokens, num_tokens - 1) - num_computed_tokens
        return count if count >= self.min_tokens else 0

    def allocated(
        self, request: Request, salt: str, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Tracks `request`, which has blocks now, and plans to load `num_external_tokens` tokens.

        May be called a second time, with 0, after an asynchronous load.
        """
        request_id = request.request_id
        found = self._lookups.get(request_id)
        hold = len(request.all_token_ids) if self.consumes and not self.asynchronous else 0
        tracked = self._tracked.get(request_id)
        if tracked is None:
            salted = self._salt(salt)
            tracked = self._tracked[request_id] = _Tracked(request, salted, block_ids, hold)
        tracked.block_ids, tracked.hold = block_ids, hold
        if num_external_tokens:
            assert found is not None  # `lookup` found these tokens
            stop = found.start + num_external_tokens
            tracked.saved = max(tracked.saved, stop)
            self._load(request_id, tracked.salt, found.match, found.start, stop, block_ids)
        if (
            found is not None
            and found.match.num_tokens
            and (num_external_tokens or self._finds_equals(tracked.salt))
        ):
            tracked.saved = max(tracked.saved, found.match.num_tokens)
        self._lookups.pop(request_id, None)

    def give_up(self, request_id: RequestId, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Called if `allocated` raised. Saves nothing of the request, and plans a load that fails:
        the engine then computes the tokens that it expected to be loaded.
        """
        found = self._lookups.get(request_id)
        self.forget(request_id)
        if num_external_tokens:
            self._given_up.add(request_id)
            start = 0 if found is None else found.start
            stop = start + num_external_tokens
            self._load(request_id, "", NOTHING, start, stop, block_ids)

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
            if self.produces:
                self._save(tracked, num_computed_tokens, stop)
        if guard.failed:  # its block ids may be out of date
            self.forget(request_id)

    def take_plan(self, *, is_idle: bool) -> Plan:
        """The plan of this step, for the workers. Steps without a forward pass wait for lookups."""
        plan, self._next = self._next, Plan()
        plan.is_idle = is_idle
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
        tracked = self._tracked.get(request.request_id)
        chain = self._chains.get(request.request_id)
        self.ended(request.request_id)
        if tracked is None or tracked.is_stale or not self.produces:
            return False
        stop = min(len(request.all_token_ids) - 1, num_computed_tokens)
        if not self.save_generated:
            stop = min(stop, request.num_prompt_tokens)
        at_prompt = tracked.saved < request.num_prompt_tokens <= stop
        if stop - tracked.saved < (1 if at_prompt else self.min_tokens):
            return False
        tracked.block_ids = block_ids
        if chain is None:
            chain = self.stores[tracked.salt].chain_of(request.all_token_ids)
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
        """Takes the workers' reports of loads: failed and finished requests, or failed blocks."""
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
        """What the store lacks of a running request, no tokens if it lacks none; None: it may not
        be saved, or its blocks are still being loaded.

        num_computed_tokens: as the engine counts them; drafts of the last step do not matter
        Raises StoreError.
        """
        tracked = self._tracked.get(request_id)
        is_loading = self.asynchronous and request_id in self._loading
        if tracked is None or tracked.is_stale or is_loading or not self.produces:
            return None
        known = len(tracked.request.all_token_ids)
        if known <= tracked.hold:
            return None
        stop = min(known - 1, num_computed_tokens)
        chain = self._chain(tracked.request, tracked.salt)
        if stop > tracked.saved:
            return self._save_of(tracked, stop, chain)
        blocks = _lists(tracked.block_ids)
        return Save(request_id, tracked.salt, chain.node(0), stop, chain.ids(stop, stop), blocks)

    def reset(self) -> None:
        """Saves nothing that was computed until now: the model's weights may have changed."""
        self._epoch = secrets.token_hex(16)
        self.lookups.forget_all()
        self._lookups.clear()
        self._chains.clear()
        self._given_up.update(self._tracked)
        for tracked in self._tracked.values():
            tracked.is_stale = True

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
            for span in match.spans:
                for name in span.names:
                    self._index.doubt(name)

    def _load(
        self,
        request_id: RequestId,
        salt: str,
        match: Match,
        start: int,
        stop: int,
        block_ids: BlockIds,
    ) -> None:
        self._loading[request_id] = match
        self._next.loads.append(
            Load(request_id, salt, match, start, stop, block_ids, wait=not self.asynchronous)
        )

    def _save(self, tracked: _Tracked, num_computed_tokens: int, stop: int) -> None:
        """Plans what to save once `stop` tokens have been computed.

        Full chunks when they are complete, and the whole prompt when its end is computed.
        """
        request = tracked.request
        known = len(request.all_token_ids)  # without draft tokens, which may be rejected
        if known <= tracked.hold or tracked.is_stale:
            return
        stop = min(stop, known)
        chunk, num_prompt_tokens = self.chunk_tokens, request.num_prompt_tokens
        full = stop - stop % chunk
        if stop >= num_prompt_tokens > tracked.saved:
            full = max(full, num_prompt_tokens)
        if not self.save_generated:
            full = min(full, num_prompt_tokens)
        # Engines free the blocks of tokens that no sliding window reaches any more.
        # Source: vllm 0.32 v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens
        gone = num_computed_tokens - self.window + 1 if self.window else 0
        if gone > tracked.saved - tracked.saved % chunk:
            tracked.saved = min(-(-gone // chunk) * chunk, full)
        if full > tracked.saved:
            chain = self._chain(request, tracked.salt)
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

    def _save_of(
        self, tracked: _Tracked, stop: int, chain: TokenChain, *, final: bool = False
    ) -> Save:
        start = tracked.saved - tracked.saved % self.chunk_tokens
        return Save(
            request_id=tracked.request.request_id,
            salt=tracked.salt,
            node=chain.node(start // self.chunk_tokens),
            start=start,
            tokens=chain.ids(start, stop),
            block_ids=_lists(tracked.block_ids),
            final=final,
        )

    def _chain(self, request: Request, salt: str) -> TokenChain:
        """The keys of a request's tokens. Raises StoreError."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            store = self.stores[salt]
            chain = self._chains[request.request_id] = store.chain_of(request.all_token_ids)
            self._index = store.index
        return chain

    def _lookup(self, request: Request, salt: str, num_tokens: int) -> Match | None:
        """What the store has; an error counts as nothing. None: ask again."""
        with self.boundary.guard(
            "found nothing for", f"request {request.request_id}", count="lookup_failures"
        ):
            salted = self._salt(salt)
            chain = self._chain(request, salted)
            return self.lookups.ask(
                request.request_id, self.stores[salted], chain, num_tokens, self.min_tokens
            )
        return NOTHING

    def _finds_equals(self, salt: str) -> bool:
        """Whether what lookups find is as precise as what would be saved in its place."""
        return self.stores[salt].accept == "same"

    def _salt(self, salt: str) -> str:
        return "\n".join(filter(None, (self._epoch, salt)))


def _lists(block_ids: Sequence[Sequence[int]]) -> BlockIds:
    return tuple(map(list, block_ids))
