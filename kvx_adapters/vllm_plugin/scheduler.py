"""The scheduler's half of KVXConnector: looks prompts up, and plans what a step saves and loads.

It has token ids and block ids, never a tensor.

If a load fails, a step computes wrong tokens: in the request that loaded, and in any that found its
blocks in the prefix cache. vLLM drops these, and the store must not save them. So if a load runs in
the same step as the forward pass that reads it, a request's tokens are saved only after vLLM has
accepted one of its tokens. Asynchronous loads end before their request runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_adapters.vllm_plugin.settings import Settings
from kvx_adapters.vllm_plugin.steps import BlockIds, Load, SaltedStores, Save, StepPlan
from kvx_core.connector.boundary import Boundary
from kvx_core.stores.prefix import Match

# If a request ends in another way, vLLM may not have accepted what it computed.
# Source: vllm 0.32 v1/request.py, RequestStatus
_FINISHED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass(slots=True)
class _Tracked:
    """A request that has blocks."""

    request: Any  # vllm's Request: all_token_ids grows as tokens are accepted
    salt: str
    block_ids: BlockIds
    hold: int  # saves begin when the request has more tokens than this
    saved: int = 0  # tokens that are in the store, or need not be saved
    is_stale: bool = False  # some of its tokens were computed before a reset


@dataclass(slots=True)
class _Lookup:
    """The tokens of a request that the store has, kept until blocks are allocated for them."""

    match: Match
    num_tokens: int  # of the request when it was looked up
    start: int = 0  # tokens that the engine has already


@dataclass(slots=True)
class SchedulerHalf:
    """Plans saves and loads. vLLM computes a request without a plan as if there were no store.

    If a method raises, its caller catches the error and calls one of these, which never raise:
    `give_up`, `give_up_loads`, `forget`, `forget_all`, `ended`, `stop`.
    """

    stores: SaltedStores
    settings: Settings
    boundary: Boundary
    chunk_tokens: int
    produces: bool
    consumes: bool
    asynchronous: bool  # loads run beside other requests' steps
    window: int  # the shortest sliding window of a cache group; 0: there is none
    _tracked: dict[str, _Tracked] = field(default_factory=dict)
    _lookups: dict[str, _Lookup] = field(default_factory=dict)
    _given_up: set[str] = field(default_factory=set)  # requests that load nothing from now on
    _loading: set[str] = field(default_factory=set)  # requests with a load in this or past steps
    _next: StepPlan = field(default_factory=StepPlan)
    _epoch: str = ""

    def num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens past `num_computed_tokens` can be loaded, and whether asynchronously."""
        request_id = request.request_id
        if not self.consumes or request_id in self._given_up or not _is_plain(request):
            return 0, False
        if request.sampling_params.prompt_logprobs is not None:
            return 0, False  # needs the logits of every token of the prompt
        found = self._lookups.get(request_id)
        if found is None or found.num_tokens != request.num_tokens:
            found = _Lookup(self._lookup(request), request.num_tokens)
            self._lookups[request_id] = found
        found.start = num_computed_tokens
        # The last token is computed here: its logits choose the next one.
        count = min(found.match.num_tokens, request.num_tokens - 1) - num_computed_tokens
        return (count, self.asynchronous) if count >= self.settings.min_tokens else (0, False)

    def allocated(self, request: Any, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Tracks `request`, which has blocks now, and plans to load `num_external_tokens` tokens.

        Called a second time, with 0, after an asynchronous load.
        """
        request_id = request.request_id
        found = self._lookups.get(request_id)
        if not _is_plain(request):
            return
        hold = request.num_tokens if self.consumes and not self.asynchronous else 0
        tracked = self._tracked.get(request_id)
        if tracked is None:
            salt = self._salt(request)
            tracked = self._tracked[request_id] = _Tracked(request, salt, block_ids, hold)
        tracked.block_ids, tracked.hold = block_ids, hold
        if num_external_tokens:
            assert found is not None  # num_new_matched_tokens found these tokens
            stop = found.start + num_external_tokens
            tracked.saved = max(tracked.saved, stop)
            self._load(request_id, tracked.salt, found.match, found.start, stop, block_ids)
        self._lookups.pop(request_id, None)

    def give_up(self, request_id: str, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Called if `allocated` raised. Saves nothing of the request, and plans a load that fails:
        vLLM then computes the tokens that it expected to be loaded.
        """
        found = self._lookups.get(request_id)
        self.forget(request_id)
        if num_external_tokens:
            self._given_up.add(request_id)
            start = 0 if found is None else found.start
            stop = start + num_external_tokens
            self._load(request_id, "", Match(0, ()), start, stop, block_ids)

    def forget(self, request_id: str) -> None:
        """Drops the request's lookup and saves. It may be looked up again."""
        self._lookups.pop(request_id, None)
        self._tracked.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """Forgets everything about a request."""
        self.forget(request_id)
        self._given_up.discard(request_id)
        self._loading.discard(request_id)

    def plan_saves(self, output: Any) -> None:
        """Plans what to save of the step that `output`, vLLM's SchedulerOutput, describes."""
        for request_id, num_computed_tokens, block_ids, are_new in _scheduled(output):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            with self.boundary.guard(
                "did not save", f"request {request_id}", count="dropped_saves"
            ) as guard:
                if are_new:
                    tracked.block_ids = _lists(block_ids)
                elif block_ids:
                    for group, more in zip(tracked.block_ids, block_ids, strict=True):
                        group.extend(more)
                if self.produces:
                    stop = num_computed_tokens + output.num_scheduled_tokens[request_id]
                    self._save(tracked, num_computed_tokens, stop)
            if guard.failed:  # its block ids may be out of date
                self.forget(request_id)

    def take_plan(self, output: Any) -> StepPlan:
        """The plan of this step, for the workers."""
        step, self._next = self._next, StepPlan()
        step.is_idle = not output.num_scheduled_tokens
        return step

    def finished(self, request: Any, block_ids: BlockIds) -> bool:
        """Forgets a request. Returns whether its blocks have to stay until they are saved."""
        tracked = self._tracked.get(request.request_id)
        self.ended(request.request_id)
        if tracked is None or tracked.is_stale or not self.produces:
            return False
        if request.status.name not in _FINISHED:
            return False
        stop = min(len(request.all_token_ids) - 1, request.num_computed_tokens)
        if not self.settings.save_generated:
            stop = min(stop, request.num_prompt_tokens)
        at_prompt = tracked.saved < request.num_prompt_tokens <= stop
        if stop - tracked.saved < (1 if at_prompt else self.settings.min_tokens):
            return False
        tracked.block_ids = block_ids
        self._next.saves.append(self._save_of(tracked, stop, final=True))
        return True

    def reported(self, failed: Collection[str], finished: Collection[str], blocks: bool) -> None:
        """Takes the workers' reports of loads: failed and finished requests, or failed blocks."""
        for request_id in tuple(self._loading) if blocks else failed:
            if tracked := self._tracked.get(request_id):  # None: it was aborted meanwhile
                self._given_up.add(request_id)
                tracked.saved = 0  # its tokens may not be in the store any more
        self._loading.difference_update(failed, finished)

    def give_up_loads(self) -> None:
        """Called if `reported` raised: treats all loads as failed, since any of them may have."""
        self._given_up.update(self._loading)
        for request_id in self._loading:
            self.forget(request_id)

    def reset(self) -> None:
        """Saves nothing that was computed until now: the model's weights may have changed."""
        self._epoch = secrets.token_hex(16)
        self._lookups.clear()
        self._given_up.update(self._tracked)
        for tracked in self._tracked.values():
            tracked.is_stale = True

    def forget_all(self) -> None:
        """Saves nothing of the current requests."""
        self._tracked.clear()

    def stop(self) -> None:
        """Called if `reset` raised: saves and loads nothing from now on."""
        self.produces = self.consumes = False
        self._lookups.clear()
        self._tracked.clear()

    def _load(
        self,
        request_id: str,
        salt: str,
        match: Match,
        start: int,
        stop: int,
        block_ids: BlockIds,
    ) -> None:
        self._loading.add(request_id)
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
        if not self.settings.save_generated:
            full = min(full, num_prompt_tokens)
        # vLLM has freed the blocks of tokens that no sliding window reaches any more.
        # Source: vllm 0.32 v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens
        gone = num_computed_tokens - self.window + 1 if self.window else 0
        if gone > tracked.saved - tracked.saved % chunk:
            tracked.saved = min(-(-gone // chunk) * chunk, full)
        if full > tracked.saved:
            self._next.saves.append(self._save_of(tracked, full))
            tracked.saved = full

    def _save_of(self, tracked: _Tracked, stop: int, *, final: bool = False) -> Save:
        return Save(
            request_id=tracked.request.request_id,
            salt=tracked.salt,
            tokens=_tokens(tracked.request, stop),
            start=tracked.saved - tracked.saved % self.chunk_tokens,
            block_ids=_lists(tracked.block_ids),
            final=final,
        )

    def _lookup(self, request: Any) -> Match:
        """Looks the request's tokens up in the store; an error counts as nothing found."""
        with self.boundary.guard(
            "found nothing for", f"request {request.request_id}", count="lookup_failures"
        ):
            tokens = _tokens(request, request.num_tokens)
            return self.stores[self._salt(request)].lookup(tokens)
        return Match(0, ())

    def _salt(self, request: Any) -> str:
        return "\n".join(filter(None, (self._epoch, request.cache_salt)))


def _scheduled(output: Any) -> Iterator[tuple[str, int, BlockIds, bool]]:
    """Scheduled requests: id, tokens computed, block ids, and whether these replace the ids known
    before (else they follow them).
    """
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids, True
    cached = output.scheduled_cached_reqs
    for i, request_id in enumerate(cached.req_ids):
        block_ids = cached.new_block_ids[i] or ()
        yield (
            request_id,
            cached.num_computed_tokens[i],
            block_ids,
            request_id in cached.resumed_req_ids,
        )


def _is_plain(request: Any) -> bool:
    """Whether its keys and values depend only on its token ids and the model's files."""
    return (
        request.sampling_params is not None
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.lora_request is None
        and not request.mm_features
    )


def _tokens(request: Any, num_tokens: int) -> npt.NDArray[np.int64]:
    return np.asarray(request.all_token_ids[:num_tokens], dtype=np.int64)


def _lists(block_ids: BlockIds) -> BlockIds:
    return tuple(map(list, block_ids))
