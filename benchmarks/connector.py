"""What a connector's scheduler half costs the engine's thread, in a large store and a frozen one.

A policy as plugins have it, without an engine: prompts of 131,072 tokens, some of them stored, in a
directory of 100,000 files. A call's time is the CPU time of the calling thread. A stretch is the
CPU time that a lookup's thread takes between two pauses, without collections of garbage, which the
interpreter begins in any thread and which are told apart: it holds the GIL no longer than both. A
miss is a prompt of 400 tokens of which nothing is stored, and takes the time until its answer: one
in 0.3 s, for which a thread asks the file system, and one after another, for which memory answers.
Run with `python -m benchmarks connector`.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from kvx_core import CacheDesc, CacheFacts, CacheView, Directory, Layout, PrefixStore, describe
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.policy import Policy
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.threads import Workers
from kvx_core.snapshot import Precision, Section
from kvx_core.stores import pace

TOKENS, FILES, BLOCK, CHUNK, STEP = 131_072, 100_000, 16, 128, 8192
GOALS = {
    "call_p99_ms": 0.5,  # of the engine's thread
    "stretch_max_ms": 1.0,  # of a lookup's thread, without collections of garbage
    "frozen_step_p99_ms": 0.5,  # of the calls of a step while the store does not answer
    "miss_p50_ms": 0.3,  # of time, from the first question to the answer
    "quick_miss_p50_ms": 0.3,
}
MISSES, SHORT = 60, 400  # prompts, their tokens
APART = 0.3  # seconds: what memory knows is too old then


@dataclass(eq=False)
class _Request:
    request_id: str
    all_token_ids: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return min(TOKENS, len(self.all_token_ids))


class _Directory(Directory):
    """A directory whose file system can be frozen."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = threading.Event()
        self.answers.set()

    def open(self, name: str) -> BinaryIO | None:
        self.answers.wait()
        return super().open(name)

    def names(self, folder: str) -> list[str]:
        self.answers.wait()
        return super().names(folder)


class Calls:
    """CPU time of calls by name, in milliseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        begin = time.thread_time()
        found = function(*args, **keywords)
        self.times.setdefault(name, []).append((time.thread_time() - begin) * 1e3)
        return found

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: _summary(times) for name, times in self.times.items()}


def run() -> dict[str, Any]:
    """Figures by what was measured, and which goals are met."""
    results: dict[str, Any] = {"tokens": TOKENS, "files": FILES, "goals": GOALS}
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as path:
        blobs = _Directory(Path(path))
        store = _store(blobs)
        stored = _prompt(0)
        _fill(store, stored)
        fill_with_names(Path(path), store.nodes([])[0], FILES - TOKENS // CHUNK)
        gc.collect()
        gc.freeze()  # as vLLM does when it has started
        with _stretches() as stretches:
            calls = _serve(store, map(_prompt, [0, 1, 0, *range(2, 8)]))
        results["calls"] = calls.summary()
        results["stretches"] = _summary([s * 1e3 for s in stretches.work])
        results["collections"] = _summary([s * 1e3 for s in stretches.collections or [0.0]])
        results["miss"] = _summary(_misses(store, APART))
        results["quick_miss"] = _summary(_misses(store, 0))
        running, frozen = list[float](), list[float]()
        for _ in range(3):
            running += _steps(_store(blobs), blobs, frozen=False)
            frozen += _steps(_store(blobs), blobs, frozen=True)
        results["step"], results["frozen_step"] = _summary(running), _summary(frozen)
    gc.unfreeze()
    worst = max(found["p99"] for found in results["calls"].values())
    results["met"] = {
        "call_p99_ms": worst <= GOALS["call_p99_ms"],
        "stretch_max_ms": results["stretches"]["max"] <= GOALS["stretch_max_ms"],
        "frozen_step_p99_ms": results["frozen_step"]["p99"] <= GOALS["frozen_step_p99_ms"],
        "miss_p50_ms": results["miss"]["p50"] <= GOALS["miss_p50_ms"],
        "quick_miss_p50_ms": results["quick_miss"]["p50"] <= GOALS["quick_miss_p50_ms"],
    }
    _print(results)
    return results


def _serve(store: PrefixStore, prompts: Iterable[list[int]]) -> Calls:
    """Prompts from their first sight to their end: a hit, misses, and a hit that is known."""
    policy, calls = _policy(store), Calls()
    for i, tokens in enumerate(prompts):
        request = _Request(f"r{i}", list(tokens))
        name = "lookup"
        while (count := calls(name, policy.lookup, request, 0)) is None:
            policy.lookups.wait(60)
        blocks = (list(range(TOKENS // BLOCK)),)
        calls("allocated", policy.allocated, request, blocks, count)
        for start in range(count, TOKENS, STEP):
            stop = min(start + STEP, TOKENS)
            calls("plan", policy.step, request.request_id, start, stop, (), are_new=False)
            calls("take_plan", policy.take_plan, is_idle=False)
        for position in range(TOKENS, TOKENS + 300):  # a decode
            request.all_token_ids.append(position % 1000)
            calls(
                "plan of a decode",
                policy.step,
                request.request_id,
                position,
                position + 1,
                (),
                are_new=False,
            )
        policy.reported((), [request.request_id], blocks=False)
        calls("finished", policy.finished, request, blocks, TOKENS + 299)
        policy.take_plan(is_idle=False)
    policy.lookups.shutdown()
    return calls


def _misses(store: PrefixStore, apart: float) -> list[float]:
    """Milliseconds until unknown prompts are answered, as the connector counts them.

    apart: seconds between two
    """
    policy, times = _policy(store), []
    for i in range(MISSES):
        time.sleep(apart)
        request = _Request(f"miss {i}", _prompt(1000 + i, SHORT))
        while (count := policy.lookup(request, 0)) is None:
            policy.lookups.wait(60)
        assert count == 0
        policy.ended(request.request_id)
        seconds = policy.lookups.take_counts()["lookup_seconds"]
        assert isinstance(seconds, list)
        assert len(seconds) == 1
        times.append(seconds[0] * 1e3)
    policy.lookups.shutdown()
    return times


def _steps(store: PrefixStore, blobs: _Directory, *, frozen: bool) -> list[float]:
    """Milliseconds of CPU that the calls of a decode step take while new prompts are looked up."""
    policy = _policy(store, seconds=0.05)
    request = _Request("running", _prompt(9))
    policy.allocated(request, (list(range(TOKENS // BLOCK + 100)),), 0)
    policy.step("running", 0, 1, (), are_new=False)
    others = [_Request(f"other {i}", _prompt(20 + i)) for i in range(3)]
    if frozen:
        blobs.answers.clear()
    times = []
    try:
        for position in range(TOKENS, TOKENS + 400):
            request.all_token_ids.append(position % 1000)
            begin = time.thread_time()
            if others and policy.lookup(others[0], 0) is not None:
                policy.ended(others.pop(0).request_id)
            policy.step("running", position, position + 1, (), are_new=False)
            policy.take_plan(is_idle=False)
            times.append((time.thread_time() - begin) * 1e3)
            time.sleep(0.001)
    finally:
        blobs.answers.set()
    policy.lookups.shutdown()
    return times[5:]  # without the first save of the prompt


def _policy(store: PrefixStore, seconds: float = 10) -> Policy:
    boundary = Boundary(logging.getLogger("kvx").warning)
    lookups = Lookups(boundary, seconds=seconds)
    return Policy(Scoped(store), boundary, lookups, store.chunk_tokens, asynchronous=True)


def _store(blobs: Directory) -> PrefixStore:
    return PrefixStore(
        blobs,
        fingerprint="f",
        num_layers=1,
        total_kv_heads=1,
        precision=Precision.of("float32"),
        chunk_tokens=CHUNK,
    )


def _prompt(seed: int, num_tokens: int = TOKENS) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 128_000, num_tokens).tolist()
    return found


def _fill(store: PrefixStore, tokens: list[int]) -> None:
    """Stores a prompt as a model of one tiny layer has it."""
    k, v = torch.zeros(2, 1, 1, TOKENS, 8)
    layer = CacheDesc.from_kv(describe(k, Layout.BLOCK_HND), describe(v, Layout.BLOCK_HND))
    facts = CacheFacts(num_layers=1, total_kv_heads=1, first_kv_head=0)
    section = Section((0,), CacheView(layers=(layer,), facts=facts, dense=True), None)
    chain = store.chain_of(tokens)
    for start, stop in store.spans(len(tokens)):
        ids, node = chain.ids(start, stop), chain.node(start // CHUNK)
        part = store.capture(ids, start, stop, [section], node=node, base=start)
        assert part is not None
        store.commit(part)


def fill_with_names(root: Path, space: str, count: int) -> None:
    """Other entries of the same model: names as they are, of the first kind that the model has.

    space: the folder of the model's entries
    """
    (kind, *_) = sorted(os.listdir(f"{root}/{space}/kinds"))
    tail = f".{kind.removesuffix('.json')}.safetensors"
    for i in range(count):
        key = hashlib.sha256(str(i).encode()).hexdigest()
        folder = f"{root}/{space}/{key[:3]}"
        os.makedirs(folder, exist_ok=True)
        os.close(os.open(f"{folder}/{key}{tail}", os.O_CREAT | os.O_WRONLY))


@dataclass(slots=True)
class _Stretches:
    """CPU seconds of jobs beside the steps.

    work:        from a pause to the next, without collections
    collections: of garbage, that the interpreter begins in such a thread. It visits every id of the
                 prompts that the engine has made since the last one
    """

    work: list[float]
    collections: list[float]


@contextmanager
def _stretches() -> Iterator[_Stretches]:
    found = _Stretches([], [])
    last = threading.local()

    def begin() -> None:
        last.time = time.thread_time()

    def end() -> None:
        now = time.thread_time()
        found.work.append(now - last.time)
        last.time = now  # what follows a job in its thread is measured too, and nothing twice

    def measured_pause(seconds: float) -> None:
        is_a_job = hasattr(last, "time")
        if is_a_job:
            end()
        pause(seconds)
        if is_a_job:
            begin()

    def measured_submit(workers: Workers, job: Callable[[], object], key: Hashable = None) -> None:
        def measured() -> None:
            begin()
            job()
            end()

        submit(workers, measured, key)

    def collecting(phase: str, _: dict[str, int]) -> None:
        if not hasattr(last, "time"):
            return
        if phase == "start":
            last.collection = time.thread_time()
        else:
            seconds = time.thread_time() - last.collection
            found.collections.append(seconds)
            last.time += seconds

    pause, submit = pace.pause, Workers.submit
    pace.pause, Workers.submit = measured_pause, measured_submit  # type: ignore[method-assign]
    gc.callbacks.append(collecting)
    try:
        yield found
    finally:
        gc.callbacks.remove(collecting)
        pace.pause, Workers.submit = pause, submit  # type: ignore[method-assign]


def _summary(times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {"count": len(times), "p50": float(p50), "p99": float(p99), "max": max(times)}


def _print(results: dict[str, Any]) -> None:
    print(f"{TOKENS:,} tokens, {FILES:,} files; CPU time of a call in ms")
    rows = dict(results["calls"])
    for name in ("stretches", "collections", "step", "frozen_step", "miss", "quick_miss"):
        rows[name.replace("_", " ")] = results[name]
    for name, row in rows.items():
        print(f"  {name:18} p50 {row['p50']:.3f}  p99 {row['p99']:.3f}  max {row['max']:.3f}")
    for name, goal in GOALS.items():
        print(f"  goal {name} <= {goal}: {'met' if results['met'][name] else 'not met'}")
