"""The tiny model in a vLLM of this process, on CPU.

vLLM changes the process that it runs in: a script imports this module, a test does not.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import vllm

from kvx_adapters import vllm as adapter
from kvx_conformance.engines.vllm import in_this_process
from kvx_core import CacheSpan
from tests.engines import tiny_model
from tests.engines.engine import FINGERPRINT

_FOLDER = tempfile.TemporaryDirectory()


@cache
def _llm() -> Any:
    tiny_model.model().save_pretrained(_FOLDER.name)
    return in_this_process(
        _FOLDER.name,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=64,
    )


class Live:
    """See LiveEngine. A new sequence ends the one before, since each step runs all of them.

    vLLM samples behind a prompt's last token, so a request has one token more than is computed: the
    first step is limited to the others, and `decode` puts `after` into its place.
    """

    def __init__(self, num_tokens: int = 256) -> None:
        assert num_tokens <= 512
        self._engine = _llm().llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._request: str | None = None
        self._sampled: int | None = None

    @property
    def lengths(self) -> list[int]:
        if self._request is None:
            return [0]
        return [int(self._scheduler.requests[self._request].num_computed_tokens)]

    def prefill(self, tokens: Sequence[int]) -> None:
        """Once per Live."""
        assert self._request is None
        params = vllm.SamplingParams(
            temperature=0, max_tokens=128, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": [*tokens, 0]}
        self._engine.abort_request([*self._scheduler.requests], internal=True)
        self._request = self._engine.add_request(f"kvx-{id(self)}", prompt, params)
        limit = self._scheduler.max_num_scheduled_tokens
        self._scheduler.max_num_scheduled_tokens = len(tokens)
        self._engine.step()
        self._scheduler.max_num_scheduled_tokens = limit
        assert self.lengths == [len(tokens)]

    def reserve(self, num_tokens: int) -> None:
        """vLLM hands out blocks when it computes, so it computes any tokens."""
        self.prefill([0] * num_tokens)
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(self._request)
        for layer in self._runner.kv_caches:
            layer[blocks] = 0

    def view(self) -> CacheSpan:
        assert self._request is not None
        return adapter.live_span(_llm(), [self._request], fingerprint=FINGERPRINT)

    def decode(self, count: int, *, after: int) -> list[int]:
        if self._sampled is None:
            batch = self._runner.input_batch
            row = batch.req_id_to_index[self._request]
            batch.token_ids_cpu[row, self.lengths[0]] = after
        else:
            assert after == self._sampled
        tokens: list[int] = []
        for _ in range(count):
            (output,) = self._engine.step()
            tokens.append(output.outputs[0].token_ids[-1])
        self._sampled = tokens[-1]
        return tokens
