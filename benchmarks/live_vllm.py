"""Live migration between two real vLLMs in two processes, blocks of 32 and of 64 tokens.

Tokens go through files in /dev/shm: KVXConnector stores full chunks of 32 while the first engine
goes on, and the second one loads what fills a block of 64. `hand_over` stores the rest, in the
pause, and the second engine looks it up, loads it and goes on. The pause is the time from the first
engine's last token to the second's first one, both by the machine's clock, less a step of the
second; calls to both processes are part of it. Two models: a tiny one, whose steps are all
overhead, and one of the width of a small real model.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.engines.vllm_pair import Pair, Process, pair, start
from tests.vllm_plugin import models

_AFTER = 8
_MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "wide": {
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "initializer_range": 0.1,
    },
}


def run(count: int) -> list[dict[str, Any]]:
    """Moves `count` conversations with each model; prints and returns the results.

    Raises AssertionError if a token was lost, doubled or changed, or the control does not differ.
    """
    return [_measured(name, sizes, count) for name, sizes in _MODELS.items()]


def _measured(name: str, sizes: dict[str, Any], count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        models.llama(model, **sizes)
        prompts = [models.prompt(_lengths(i)[0], seed=500 + i) for i in range(count)]
        wanted = _alone(model, Path(folder), prompts)
        with pair(model, Path(folder)) as both:
            return _moved(name, both, prompts, wanted)


def _moved(
    name: str, both: Pair, prompts: list[list[int]], wanted: list[list[int]]
) -> dict[str, Any]:
    for i in range(3):  # loads and warms both
        both.converse(models.prompt(60 + i, seed=900 + i), 12, _AFTER)
    found = []
    for i, (ids, want) in enumerate(zip(prompts, wanted, strict=True)):
        before = _lengths(i)[1]
        moved = both.converse(ids, before, _AFTER)
        assert moved.said == want[: before + _AFTER], (name, i, moved.said, want)
        found.append(moved)
    both.b.call("zero_loads", on=True)
    both.b.call("forget_all")
    before = _lengths(0)[1]
    assert both.converse(prompts[0], before, _AFTER).said != wanted[0][: before + _AFTER]
    pauses = sorted(one.pause for one in found)
    return {
        "case": f"vllm -> vllm, two processes, {name}",
        "migrations": len(found),
        "pause_p50_ms": 1e3 * statistics.median(pauses),
        "pause_p99_ms": 1e3 * pauses[-(-99 * len(found) // 100) - 1],
        "kvx_p50_ms": 1e3 * statistics.median(one.handover for one in found),
        "step_of_a_ms": 1e3 * statistics.median(one.step_a for one in found),
        "step_of_b_ms": 1e3 * statistics.median(one.step_b for one in found),
        "tokens_not_computed": sum(one.known for one in found),
        "tokens_moved": sum(len(p) + _lengths(i)[1] - 1 for i, p in enumerate(prompts)),
        "pauses_ms": [round(1e3 * one.pause, 3) for one in found],
    }


def _alone(model: Path, log: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one vLLM says that has all its tokens computed itself: its store is new and empty."""
    process = Process(log / "alone.log")
    try:
        with tempfile.TemporaryDirectory(prefix="kvx-", dir="/dev/shm") as store:
            start(process, model, Path(store), 32)
            said = []
            for i, ids in enumerate(prompts):
                process.call("forget_all")
                process.call("begin", ids=ids)
                tokens: list[int] = []
                while len(tokens) < _lengths(i)[1] + _AFTER:
                    tokens += process.call("step")["tokens"]
                process.call("hand_over")
                said.append(tokens)
            return said
    finally:
        process.kill()


def _lengths(i: int) -> tuple[int, int]:
    """Prompt and tokens before the move of migration `i`."""
    return 40 + 5 * (i % 13), 3 + i % 16
