"""Live migration between real engines: the pause of a conversation that moves while it runs.

One migration: the first engine computes a prompt and says some tokens, and after each the blocks
that are full are copied; then it stops, the rest is copied, and the second engine goes on. The
pause is the time from the first engine's last token to the second's first one, less a step of the
second (the median of those that follow). Describing the caches is part of it, and so is dropping
the room that was not needed. Every conversation is compared with that of transformers alone.
Run with `python -m benchmarks live`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from kvx_adapters.cli.engines import live
from kvx_core import migrate
from kvx_core.ops.live import LiveMigration, LiveReport
from tests.engines import tiny_model

PAIRS = (
    ("transformers", "llama_cpp"),
    ("transformers", "transformers"),
    ("llama_cpp", "transformers"),
)
_MIGRATIONS = 100
_AFTER = 8  # tokens that the second engine says
_ROOM = 160  # tokens reserved in the second engine


@dataclass(frozen=True)
class Conversation:
    """One that has moved.

    said:   its tokens behind the prompt
    step_a: seconds of each step of the first engine, copies left out
    """

    said: list[int]
    report: LiveReport
    pause: float
    step_a: list[float]
    step_b: float


def converse(
    src: str, dst: str, num_tokens: int, before: int, after: int = _AFTER, *, copies: bool = True
) -> Conversation:
    """A conversation of a prompt, `before` tokens in engine `src` and `after` in `dst`.

    num_tokens: of the prompt
    copies:     False: the control, whose second engine goes on from zeros
    """
    ids = tiny_model.prompt(num_tokens)
    a, b = (live(name, tiny_model.tiny(), _ROOM) for name in (src, dst))
    b.reserve(_ROOM)
    moving = LiveMigration(b.view())
    a.prefill(ids[:-1])
    said, steps, token = [], [], ids[-1]
    stopped = 0.0
    for _ in range(before):
        begin = time.perf_counter()
        (token,) = a.decode(1, after=token)
        stopped = time.perf_counter()
        said.append(token)
        steps.append(stopped - begin)
        if len(said) < before:  # the last token ends the run: what follows it is the pause
            moving.copy(a.view(), a.lengths[0])
    report = moving.finish(a.view(), a.lengths[0])
    b.keep(report.num_tokens)  # type: ignore[attr-defined]
    if not copies:
        _forget(b)
    times = [time.perf_counter()]
    for _ in range(after):
        (token,) = b.decode(1, after=token)
        times.append(time.perf_counter())
        said.append(token)
    step_b = statistics.median(t - s for s, t in pairwise(times[1:]))
    return Conversation(said, report, times[1] - stopped - step_b, steps, step_b)


def _forget(engine: Any) -> None:
    """Writes zeros over what an engine holds, from the zeros of a new DynamicCache."""
    zeros = live("transformers", tiny_model.tiny())
    zeros.reserve(engine.lengths[0])
    migrate(zeros.view(), engine.view(), engine.lengths)


@cache
def alone(num_tokens: int, count: int) -> tuple[int, ...]:
    """What transformers says by itself."""
    return tiny_model.greedy(num_tokens, count)


def lengths(i: int) -> tuple[int, int]:
    """Prompt and tokens before the move of migration `i`: all residues of a block of 16."""
    return 40 + 5 * (i % 13), 3 + i % 16


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measures every pair; prints and returns the results.

    Raises AssertionError if a token was lost, doubled or changed, or the control does not differ.
    """
    torch.set_num_threads(1)
    count = 10 if quick else _MIGRATIONS
    print(f"\n{'':34} {'pause p50':>10} {'p99':>8} {'in KVX':>8} {'step of A':>10}   goal, ms")
    results = [_printed(_measured(src, dst, count)) for src, dst in PAIRS]
    if find_spec("vllm") is None:
        print("vllm -> vllm is left out: vllm is not installed. Run `make setup`")
        return results
    from benchmarks import live_vllm

    return results + [_printed(result) for result in live_vllm.run(count)]


def _measured(src: str, dst: str, count: int) -> dict[str, Any]:
    found = []
    converse(src, dst, *lengths(0))  # loads and warms both
    for i in range(count):
        num_tokens, before = lengths(i)
        moved = converse(src, dst, num_tokens, before)
        want = alone(num_tokens, 18 + _AFTER)[: before + _AFTER]
        assert tuple(moved.said) == want, (src, dst, i, moved.said, want)
        found.append(moved)
    num_tokens, before = lengths(0)
    control = converse(src, dst, num_tokens, before, copies=False)
    assert tuple(control.said) != alone(num_tokens, 18 + _AFTER)[: before + _AFTER]
    pauses = sorted(one.pause for one in found)
    result = {
        "case": f"{src} -> {dst}",
        "migrations": count,
        "pause_p50_ms": 1e3 * statistics.median(pauses),
        "pause_p99_ms": 1e3 * pauses[-(-99 * count // 100) - 1],
        "kvx_p50_ms": 1e3 * statistics.median(one.report.paused.seconds for one in found),
        "step_of_a_ms": 1e3 * statistics.median(t for one in found for t in one.step_a),
        "step_of_b_ms": 1e3 * statistics.median(one.step_b for one in found),
        "pauses_ms": [round(1e3 * one.pause, 4) for one in found],
    }
    return result


def _printed(result: dict[str, Any]) -> dict[str, Any]:
    """A result with its goal, printed as a line."""
    met = result["pause_p50_ms"] < result["step_of_a_ms"]
    print(
        f"{result['case']:34} {result['pause_p50_ms']:>10.2f} {result['pause_p99_ms']:>8.2f} "
        f"{result['kvx_p50_ms']:>8.2f} {result['step_of_a_ms']:>10.2f}   "
        f"p50 below a step {'met' if met else 'NOT MET'}",
        flush=True,
    )
    return result | {"goal_met": met}
