"""Moves rows of hybrid models from each of three engines to each other one, and tells the answers.

A script, since vLLM changes the process that it runs in: tests/engines/test_hybrid_pairs.py runs
it. Prints a line of JSON: of each family what every engine says alone, what it says behind each hop
after so many tokens, and what it says if all numbers are zero, or the states.

    python -m tests.engines.hybrid_pairs POSITION...
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import torch
import vllm

# isort: split
from kvx_adapters import vllm as adapter
from kvx_core import CacheSpan, migrate, verify
from tests.engines.hybrids import (
    ANSWER,
    FAMILIES,
    PROMPT,
    ROWS,
    InMlx,
    InTransformers,
    Rows,
    facts_of,
    in_mlx,
    trained,
    without_states,
)
from tests.vllm_plugin.hybrids import ENGINE


class InVllm:
    """Rows as requests of one engine. New ones end those before."""

    def __init__(self, llm: vllm.LLM, model: Any) -> None:
        self._llm, self._engine, self._model = llm, llm.llm_engine, model
        self._core = self._engine.engine_core.engine_core
        self._names: list[str] = []

    def _compute(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Adds requests, and computes so many tokens of each."""
        scheduler = self._core.scheduler
        self._engine.abort_request([*scheduler.requests], internal=True)
        params = vllm.SamplingParams(
            temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False
        )
        self._names = [
            self._engine.add_request(f"{id(self)}-{i}", {"prompt_token_ids": prompt}, params)
            for i, prompt in enumerate(prompts)
        ]
        scheduler.scheduler_config.long_prefill_token_threshold = num_tokens
        self._engine.step()
        scheduler.scheduler_config.long_prefill_token_threshold = 0
        found = [scheduler.requests[name].num_computed_tokens for name in self._names]
        assert found == [num_tokens] * len(ROWS)

    def prefill(self, num_tokens: int) -> None:
        self._compute([row[:PROMPT] for row in ROWS], num_tokens)

    def reserve(self, num_tokens: int, *, zero: bool = False) -> None:
        """vLLM hands out blocks when it computes, so it computes other tokens."""
        self._compute([[0] * num_tokens + row[num_tokens:PROMPT] for row in ROWS], num_tokens)
        config = self._core.scheduler.kv_cache_config
        layers = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        for name in self._names:
            blocks = self._core.scheduler.kv_cache_manager.get_block_ids(name)
            for group, ids in zip(config.kv_cache_groups, blocks, strict=True):
                is_state = type(group.kv_cache_spec).__name__ == "MambaSpec"
                fill = 0 if zero else float("nan") if is_state else 1e3
                for layer in group.layer_names:
                    caches = layers[layer].kv_cache
                    for tensor in caches if is_state else [caches]:
                        tensor[ids] = fill

    def view(self) -> CacheSpan:
        span = adapter.live_hybrid_span(self._llm, self._names, fingerprint="of one model")
        facts = span.view.facts.like(facts_of(self._model))
        facts = replace(facts, first_layer=span.view.facts.first_layer)
        return replace(span, view=replace(span.view, facts=facts))

    def go_on(self) -> list[list[int]]:
        found = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        return [found[f"{id(self)}-{i}"] for i in range(len(ROWS))]


def hop(src: Rows, dst: Rows, num_tokens: int) -> None:
    """Moves the rows into room full of wrong numbers, and checks that they are equal then."""
    dst.reserve(num_tokens)
    ends, lengths = (src.view(), dst.view()), [num_tokens] * len(ROWS)
    migrate(*ends, lengths, convert_states=True)
    found = verify(*ends, lengths, tolerance="codec")  # exact, but for what mlx keeps in float32
    assert found, found
    assert found.num_values


def answers(engines: dict[str, Callable[[], Rows]], positions: list[int]) -> dict[str, Any]:
    """By "NAME alone", "NAME, zeros", "SRC -> DST, POSITION" and "SRC -> DST, no states"."""
    said = {}
    for name, engine in engines.items():
        alone, zeros = engine(), engine()
        alone.prefill(PROMPT - 1)
        said[f"{name} alone"] = alone.go_on()
        zeros.reserve(PROMPT - 1, zero=True)
        said[f"{name}, zeros"] = zeros.go_on()
    for (src, dst), position in product(permutations(engines, 2), positions):
        source, there = engines[src](), engines[dst]()
        source.prefill(position)
        hop(source, there, position)
        said[f"{src} -> {dst}, {position}"] = there.go_on()
        if position == positions[-1]:
            there = engines[dst]()
            there.reserve(position, zero=True)
            ends = without_states(source.view()), without_states(there.view())
            migrate(*ends, [position] * len(ROWS))
            said[f"{src} -> {dst}, no states"] = there.go_on()
    return said


def of_family(family: str, positions: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as saved, tempfile.TemporaryDirectory() as other:
        model = trained(family, Path(saved))
        there = in_mlx(model, family, Path(saved), Path(other))
        llm = vllm.LLM(
            model=saved,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            mamba_ssm_cache_dtype="float32",  # as transformers has them
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=len(ROWS),
            max_num_batched_tokens=1024,
            async_scheduling=False,
            **ENGINE[family] | {"enable_prefix_caching": False},
        )
    engines = {
        "vllm": lambda: InVllm(llm, model),
        "transformers": lambda: InTransformers(model),
        "mlx": lambda: InMlx(model, there),
    }
    said = answers(engines, positions)
    llm.llm_engine.engine_core.shutdown()
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = [int(argument) for argument in sys.argv[1:]]
    print(f"\n{json.dumps({family: of_family(family, given) for family in FAMILIES})}", flush=True)
