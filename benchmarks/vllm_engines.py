"""Engines for benchmarks: a real vLLM without KVXConnector and one with it, on CPU.

Each runs in a process of its own, with a model of random weights. One of them works at a time.
"""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvx_conformance.connectors.vllm import mend_llvmlite

MODEL = {
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
ENVIRONMENT = {  # of the engines
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Others:
    """Requests for one token that arrive while those that are measured run."""

    prompts: Sequence[Sequence[int]]
    every: int  # steps after which the next one arrives
    patience: int  # steps after which its client gives up
    flag: str | None = None  # a file that exists meanwhile: see kvx_conformance/faults.c


@dataclass(frozen=True)
class Run:
    """What became of some requests."""

    steps: list[float]  # seconds of each
    decode_steps: list[float]  # of these, which computed one token of each request and nothing else
    num_cached_tokens: int  # of the prompts: not computed
    tokens: list[list[int]]  # that came after each prompt
    inside: float  # seconds of those steps that were spent in KVXConnector
    counters: Mapping[str, float]  # what it counted: see vllm_plugin/stats.py


class Engine:
    """An engine in another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        others: Others | None = None,
        *,
        forgets: bool = True,
    ) -> Run:
        """Runs all prompts at once, until everything of them is stored.

        forgets: vLLM forgets its own cache first: what is not computed comes from the store
        """
        self._connection.send((prompts, max_tokens, others, forgets))
        answer: Run = self._connection.recv()
        return answer


def tokens(num_tokens: int, seed: int) -> list[int]:
    """A prompt that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(
        1, MODEL["vocab_size"], (num_tokens,), generator=generator
    ).tolist()
    return found


@dataclass(frozen=True)
class Engines:
    """Engines of the same random weights."""

    alone: Engine  # without a connector
    ours: Engine  # with a store in memory
    store: Path  # of `ours`
    on_disk: Engine | None  # with a store in the current directory's file system


@contextmanager
def engines(
    model: Mapping[str, Any],
    sequences: int,
    batched_tokens: int,
    *,
    with_disk: bool = False,
    **environment: str,
) -> Iterator[Engines]:
    """An engine without a connector, one with it and, if `with_disk`, another one.

    model: its config
    sequences: that run at once, at most
    batched_tokens: that a step computes, at most
    environment: variables of their processes
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvx-bench-")))
        (directory / "config.json").write_text(json.dumps(model))
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvx-bench-", dir=memory))
        store = Path(folder) / "store"
        options = {
            "model": str(directory),
            "max_model_len": model["max_position_embeddings"],
            "max_num_batched_tokens": batched_tokens,
            "max_num_seqs": sequences,
            "kv_cache_memory_bytes": 1 << 30,
        }
        with variables(**ENVIRONMENT | environment):
            alone = stack.enter_context(engine(options))
            ours = stack.enter_context(engine(options, _with_store(store)))
            on_disk = None
            if with_disk:
                disk = stack.enter_context(tempfile.TemporaryDirectory(prefix=".kvx-", dir="."))
                on_disk = stack.enter_context(engine(options, _with_store(Path(disk).absolute())))
        for each in filter(None, (alone, ours, ours, on_disk, on_disk)):  # first touches
            each.run([tokens(64, 0)], 2)
        yield Engines(alone, ours, store, on_disk)


@contextmanager
def variables(**environment: str) -> Iterator[None]:
    """Variables of processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _with_store(store: Path) -> dict[str, Any]:
    """KVTransferConfig of an engine of random weights with KVXConnector."""
    return {
        "kv_connector": "KVXConnector",
        "kv_connector_module_path": "kvx_adapters.vllm_plugin.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(store), "fingerprint": "random weights"},
    }


@contextmanager
def engine(
    options: Mapping[str, Any], transfer: Mapping[str, Any] | None = None
) -> Iterator[Engine]:
    """An engine in a new process.

    options:  of vllm.LLM; its weights are random unless they name a load_format
    transfer: of KVTransferConfig; None: without a connector
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, options, transfer))
    process.start()
    there.close()
    try:
        yield Engine(here)
    finally:
        here.close()
        process.join()


# ---- in the engine's process ----


def _serve(
    connection: Connection, options: Mapping[str, Any], transfer: Mapping[str, Any] | None
) -> None:
    """Answers each call of Engine.run until the other end is closed."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if find_spec("lmcache"):
        importlib.import_module("llvmlite.binding.ffi")  # LMCache does, after vLLM has looked
        mend_llvmlite()
    given: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None,
    }
    llm = LLM(**given | dict(options))
    scheduled = _Scheduled(llm)
    is_ours = transfer is not None and transfer["kv_connector"] == "KVXConnector"
    connector = _Connector(llm) if is_ours else None
    while True:
        try:
            prompts, max_tokens, others, forgets = connection.recv()
        except EOFError:
            return
        if forgets:
            llm.reset_prefix_cache()
        found = _steps(llm, scheduled, prompts, max_tokens, others)
        inside = connector.seconds if connector else 0.0
        while scheduled.scheduler.has_requests():  # whose last tokens are not copied yet
            llm.llm_engine.step()
        counters = connector.settle() if connector else {}
        connection.send(Run(*found, inside, counters))


def _steps(
    llm: Any,
    scheduled: _Scheduled,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    others: Others | None,
) -> tuple[list[float], list[float], int, list[list[int]]]:
    """Steps until all prompts are answered: the first four fields of Run."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    waiting = list(others.prompts) if others else []
    arrived: dict[str, int] = {}  # ids of others, and when they came
    answered_at_once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    steps, decode_steps, last = list[float](), list[float](), dict[str, Any]()
    while sum(output.finished for output in last.values()) < len(prompts):
        now = len(steps)
        if others and decode_steps:  # all prompts are computed
            if others.flag:
                Path(others.flag).touch()
            gone = [name for name, then in arrived.items() if now - then >= others.patience]
            engine.abort_request(gone, internal=True)
            for name in gone:
                del arrived[name]
            if waiting and not arrived and now % others.every == 0:
                prompt = waiting.pop(0)
                name = f"other {len(waiting)}"
                arrived[
                    engine.add_request(name, {"prompt_token_ids": prompt}, answered_at_once)
                ] = now
        begin = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - begin)
        if scheduled.now == [1] * len(prompts):
            decode_steps.append(steps[-1])
        last.update(
            (output.request_id, output) for output in outputs if output.request_id.isdecimal()
        )
    engine.abort_request(list(arrived), internal=True)
    if others and others.flag:
        Path(others.flag).unlink(missing_ok=True)
    answers = [last[str(i)] for i in range(len(prompts))]
    cached = sum(answer.num_cached_tokens for answer in answers)
    return steps, decode_steps, cached, [list(answer.outputs[0].token_ids) for answer in answers]


class _Scheduled:
    """What the last step of an engine computed."""

    def __init__(self, llm: Any) -> None:
        self.now: list[int] = []  # tokens of each request
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = self.scheduler.schedule

        def seen(*arguments: Any, **keywords: Any) -> Any:
            output = schedule(*arguments, **keywords)
            self.now = list(output.num_scheduled_tokens.values())
            return output

        self.scheduler.schedule = seen


class _Connector:
    """Both halves of the KVXConnector of an engine: how long they take, and what they count."""

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._worker = get_kv_transfer_group()
        self.seconds = 0.0
        self._counters: dict[str, float] = {}
        for half in (scheduler.connector, self._worker):
            for name in vars(type(half)):
                if not name.startswith("_") and inspect.ismethod(getattr(half, name)):
                    setattr(half, name, self._timed(getattr(half, name)))
        self._take = self._worker.get_kv_connector_stats
        self._worker.get_kv_connector_stats = self._count

    def settle(self) -> dict[str, float]:
        """Waits until everything is stored; counts since the last time. Seconds begin anew."""
        self._worker._worker._saver._writer.threads.wait()  # after all files
        self._count()
        counters, self._counters, self.seconds = self._counters, {}, 0.0
        return counters

    def _count(self) -> Any:
        from kvx_adapters.vllm_plugin.stats import COUNTERS

        stats = self._take()
        if stats is not None:
            for name in COUNTERS.keys() & stats.data.keys():
                self._counters[name] = self._counters.get(name, 0) + stats.data[name]
        return stats

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed
