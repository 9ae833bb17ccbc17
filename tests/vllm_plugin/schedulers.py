"""The scheduler's half of the connector, step by step, without an engine."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from tests.vllm_plugin.models import prompt

BLOCK_SIZE, CHUNK = 32, 64


STORED = prompt(200, seed=1)


NEW = 7  # what is sampled, unless a test says otherwise


class Steps:
    """A vLLM scheduler whose model is the test."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, Any] = {}
        self._output: Any = None

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 100, **fields: Any) -> Any:
        """A request of this name: see `request`."""
        request = self.requests[name] = self.request(name, tokens, max_tokens, **fields)
        self.scheduler.add_request(request)
        return request

    def request(
        self, name: str, tokens: Sequence[int], max_tokens: int = 100, **fields: Any
    ) -> Any:
        """fields: of vLLM's Request, sampling: of its SamplingParams."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        sampling = fields.pop("sampling", {})
        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
            **fields,
        )

    def ask(self, request: Any) -> tuple[int, bool]:
        """What the connector answers when the request's lookup is over."""
        connector = self.scheduler.connector
        while (answer := connector.get_num_new_matched_tokens(request, 0))[0] is None:
            connector._scheduler.lookups.wait(60)
        return answer  # type: ignore[no-any-return]

    def plan(self) -> Any:
        """Schedules a step; what the workers are told to save and load.

        Lookups beside steps are over before it: else requests would be scheduled a step later.
        """
        for request in self.requests.values():
            if request.status.name in ("WAITING", "PREEMPTED"):
                self.ask(request)
        self._output = self.scheduler.schedule()
        # As it is sent to workers in other processes.
        return pickle.loads(pickle.dumps(self._output.kv_connector_metadata))

    def run(self, sampled: Mapping[str, list[int]] | None = None, **connector_output: Any) -> None:
        """The workers' answer to the step: tokens for requests whose prompt is computed."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        ids = list(self._output.num_scheduled_tokens)
        tokens = []
        for name in ids:
            done = self.requests[name].num_computed_tokens >= self.requests[name].num_prompt_tokens
            tokens.append((sampled or {}).get(name, [NEW]) if done else [])
        self.scheduler.update_from_output(
            self._output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=tokens,
                kv_connector_output=KVConnectorOutput(**connector_output),
            ),
        )

    def blocks(self, name: str) -> list[int]:
        """The blocks of a request in the scheduler's only group."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(ids)

    def num_free_blocks(self) -> int:
        num: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return num
