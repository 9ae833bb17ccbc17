"""The scheduler's half of KVXConnector: translates vLLM's requests and steps for a Policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvx_adapters.vllm_plugin.steps import StepPlan
from kvx_core.connector.plan import BlockIds, Save
from kvx_core.connector.policy import Policy

# If a request ends in another way, vLLM may not have accepted what it computed.
# Source: vllm 0.32 v1/request.py, RequestStatus
_FINISHED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass(slots=True)
class SchedulerHalf(Policy):
    """A Policy of vLLM's requests."""

    def num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens past `num_computed_tokens` can be loaded, and whether asynchronously.

        None: vLLM asks again in its next step. Source: vllm 0.26 to 0.33 v1/core/sched/scheduler.py
        """
        if not _is_plain(request):
            return 0, False
        if request.sampling_params.prompt_logprobs is not None:
            return 0, False  # needs the logits of every token of the prompt
        count = self.lookup(request, request.cache_salt or "", num_computed_tokens)
        return count, self.asynchronous and bool(count)

    def blocks_allocated(self, request: Any, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Tracks `request`, which has blocks now, and plans to load `num_external_tokens` tokens.

        Called a second time, with 0, after an asynchronous load.
        """
        if _is_plain(request):
            self.allocated(request, request.cache_salt or "", block_ids, num_external_tokens)

    def plan_saves(self, output: Any) -> None:
        """Plans what to save of the step that `output`, vLLM's SchedulerOutput, describes."""
        for request_id, num_computed_tokens, block_ids, are_new in _scheduled(output):
            stop = num_computed_tokens + output.num_scheduled_tokens[request_id]
            self.step(request_id, num_computed_tokens, stop, block_ids, are_new=are_new)

    def take_step(self, output: Any) -> StepPlan:
        """The plan of this step, for the workers."""
        plan = self.take_plan(is_idle=not output.num_scheduled_tokens)
        return StepPlan(plan.saves, plan.loads, plan.is_idle)

    def has_finished(self, request: Any, block_ids: BlockIds) -> bool:
        """Forgets a request. Returns whether its blocks have to stay until they are saved."""
        is_good = request.status.name in _FINISHED
        return self.finished(request, block_ids, request.num_computed_tokens if is_good else 0)

    def to_hand_over(self, request: Any) -> Save | None:
        """See Policy.handed_over. Raises StoreError."""
        return self.handed_over(request.request_id, request.num_computed_tokens)


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
