"""The scheduler's half of KVXConnector: a Policy that takes vLLM's requests and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvx_adapters.vllm_plugin.items import VllmItems
from kvx_adapters.vllm_plugin.spoilt import SpoiltBlocks
from kvx_adapters.vllm_plugin.steps import StepPlan
from kvx_core.connector.plan import BlockIds, RequestId, Save
from kvx_core.connector.policy import Policy
from kvx_core.connector.weights import Report

# If a request ends in another way, vLLM may not have accepted the tokens that it computed.
# Source: vllm 0.32 v1/request.py, RequestStatus
_FINISHED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


Offered = Callable[[Iterable[tuple[int, int, int]], BlockIds], Iterable[tuple[int, BlockIds]]]


@dataclass(slots=True)
class SchedulerHalf(Policy):
    """A Policy for vLLM's requests."""

    block_size: int = 1  # tokens of a block, as the scheduler counts them
    offered: Offered | None = None  # States.offered; None: the model has no states
    items: VllmItems | None = None  # None: requests with items are not shared
    _unshared: Counter[str] = field(default_factory=Counter)  # number of requests, by reason
    _told: set[str] = field(default_factory=set)  # unshared requests that are already counted
    _spoilt: SpoiltBlocks = field(init=False)

    def __post_init__(self) -> None:
        self._spoilt = SpoiltBlocks(self.block_size)

    def salt_of(self, request: Any) -> str | None:
        """Returns a request's cache_salt; None: its keys and values depend on more than its tokens
        and items. A session may get more of these while it runs.
        """
        return None if self._unknown_in(request) else request.cache_salt or ""

    def ids_of(self, request: Any) -> Any:
        if not _has_items(request):
            return request.all_token_ids
        assert self.items is not None  # else `salt_of` is None
        return self.items.of(request)

    def is_pending(self, request: Any) -> bool:
        return _has_items(request) and self.items is not None and self.items.are_pending(request)

    def _unknown_in(self, request: Any) -> str | None:
        """Returns what a request's keys and values currently depend on besides what is known: its
        tokens and items, a salt, an adapter and the model's files; None: on nothing.
        """
        if _has_items(request):
            weights = self.epochs.weights
            if weights.encoders != weights.generation or self.items is None:
                return _kind_of_items(request)
            if self.items.of(request) is None:
                return _kind_of_items(request)
        elif request.prompt_token_ids is None:
            return "embeddings"
        return "pooling" if request.sampling_params is None else None

    def adapter_of(self, request: Any) -> tuple[int, Hashable]:
        """Returns the number of a request's adapter, and what vLLM's prefix cache calls it.

        Source: vllm 0.32 v1/core/kv_cache_utils.py, _gen_lora_extra_hash_keys
        """
        adapter = request.lora_request
        return (0, None) if adapter is None else (adapter.lora_int_id, adapter.lora_name)

    def num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns how many tokens past `num_computed_tokens` can be loaded, and True if the load is
        asynchronous.

        None: vLLM asks again in its next step. Source: vllm 0.26 to 0.33 v1/core/sched/scheduler.py
        """
        may_load = not _computes_all(request) and self._has_adapters_files(request)
        count = self.lookup(request, num_computed_tokens, may_load=may_load)
        return count, self.asynchronous and bool(count)

    def blocks_allocated(self, request: Any, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Tracks `request`, which has blocks now, and plans to load `num_external_tokens` tokens.

        vLLM calls it a second time, with 0, after an asynchronous load.
        """
        self.look_at_weights()
        self._count(request)
        if self._spoilt and num_external_tokens:
            found = self._lookups.get(request.request_id)
            start = 0 if found is None else found.start
            self._spoilt.loads(block_ids[0], start, start + num_external_tokens)
        self.allocated(request, block_ids, num_external_tokens)

    def blocks_failed(self, block_ids: Collection[int]) -> None:
        """Notes the blocks of loads that have failed, those of other connectors included.

        Only models with one group of layers have such reports.
        """
        if block_ids:
            self._spoilt.failed(block_ids)
            for request_id, tracked in self._tracked.items():
                self._spoilt.gets(request_id, 0, tracked.block_ids[0])

    def ended(self, request_id: RequestId) -> None:
        """Forgets all about a request that has ended."""
        Policy.ended(self, request_id)
        if self.items is not None:
            self.items.forget(request_id)
        self._spoilt.ends(request_id)

    def plan_saves(self, output: Any) -> None:
        """Plans the saves of a step. output: vLLM's SchedulerOutput, which describes the step"""
        self.look_at_weights()
        if self.choices is not None:
            self.choices.costs.step(sum(output.num_scheduled_tokens.values()))
        if output.num_scheduled_tokens:
            self.epochs.step_computes()
        for request_id, num_computed_tokens, block_ids, are_new in _scheduled(output):
            stop = num_computed_tokens + output.num_scheduled_tokens[request_id]
            if self._spoilt:
                self._look_for_spoilt(request_id, num_computed_tokens, stop, block_ids, are_new)
            self.step(request_id, num_computed_tokens, stop, block_ids, are_new=are_new)
        if self.offered is not None:
            self._save_offered(output.kv_connector_block_state, self.offered)

    def _save_offered(self, kept: Any, offered: Offered) -> None:
        """Plans saves of the states that vLLM keeps until this step ends."""
        for request_id, offers in () if kept is None else kept.boundary_state_offloads.items():
            if tracked := self._tracked.get(request_id):
                for num_tokens, there in offered(offers, tracked.block_ids):
                    self.save_states(request_id, num_tokens, there)

    def take_step(self, output: Any) -> StepPlan:
        """Returns the plan of this step, for the workers."""
        plan = self.take_plan(is_idle=not output.num_scheduled_tokens)
        return StepPlan(
            plan.saves, plan.loads, plan.is_idle, plan.generation, plan.stamp, plan.asks
        )

    def has_finished(self, request: Any, block_ids: BlockIds) -> bool:
        """Forgets a request. Returns True if its blocks must stay until they are saved."""
        self._told.discard(request.request_id)
        is_good = request.status.name in _FINISHED
        return self.finished(request, block_ids, request.num_computed_tokens if is_good else 0)

    def to_hand_over(self, request: Any) -> Save | None:
        """Calls Policy.handed_over. Raises StoreError."""
        return self.handed_over(request.request_id, request.num_computed_tokens)

    def take_reports(self, reports: Mapping[int, Report]) -> None:
        """Takes the reports of ranks about their weights and adapters."""
        self.epochs.take(reports)
        self.adapters.take({rank: report.adapters for rank, report in reports.items()})

    def take_unshared(self) -> dict[str, int]:
        """Returns the number of requests that got blocks but are not shared since the last call, by
        reason.
        """
        found, self._unshared = self._unshared, Counter()
        return dict(found)

    def shutdown(self) -> None:
        """Ends the threads without waiting for them."""
        self.lookups.shutdown()
        self.epochs.shutdown()
        if self.items is not None:
            self.items.shutdown()

    def _look_for_spoilt(
        self, request_id: str, start: int, stop: int, block_ids: BlockIds, are_new: bool
    ) -> None:
        """Saves nothing of a request that reads a block whose load has failed."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if block_ids:
            self._spoilt.gets(request_id, 0 if are_new else len(tracked.block_ids[0]), block_ids[0])
        if self._spoilt.computes(request_id, start, stop):
            self.forget(request_id)

    def _has_adapters_files(self, request: Any) -> bool:
        """True if the files of a request's adapter are those that vLLM has loaded: it may load them
        again in the step that computes the request.
        """
        adapter = request.lora_request
        if adapter is None or not (found := self.adapters.sources(adapter.lora_int_id)):
            return True
        return any(files.path == adapter.lora_path and files.are_unchanged() for files in found)

    def _count(self, request: Any) -> None:
        """Counts a request once, for the first reason why it is not shared."""
        reason = self._unknown_in(request)
        if reason is None and self.loaded_adapter(request) is None:
            reason = "lora"
        if reason is None and self.scope_of(request) is None:
            reason = "weights"
        if reason is not None and request.request_id not in self._told:
            self._told.add(request.request_id)
            self._unshared[reason] += 1


def _scheduled(output: Any) -> Iterator[tuple[str, int, BlockIds, bool]]:
    """Yields the scheduled requests: id, number of computed tokens, block ids, and True if these
    replace the earlier block ids, False if they follow them.
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


def _has_items(request: Any) -> bool:
    return bool(request.mm_features) or request.prompt_embeds is not None


def _kind_of_items(request: Any) -> str:
    return "images" if request.mm_features else "embeddings"


def _computes_all(request: Any) -> bool:
    """True if vLLM must compute every prompt token: for logits, or because the user wants it."""
    has_logprobs = getattr(request.sampling_params, "prompt_logprobs", None) is not None
    return has_logprobs or bool(getattr(request, "skip_reading_prefix_cache", False))
