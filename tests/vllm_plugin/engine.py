"""vLLM engines in a process of their own, driven by tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_plugin.server import Server, serve

ROOT = Path(__file__).parent.parent.parent
# As small as engines get; tests override what they are about.
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 128,
    "seed": 0,
}

_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # so small that more threads only wait for each other
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a NUMA node per rank
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
_AT_START = ("LD_", "OMP_", "GOMP_", "KMP_")  # read by libraries, when they are loaded


def connector(store: Path, role: str = "kv_both", policy: str = "fail", **extra: Any) -> Any:
    """kv_transfer_config for an engine with KVXConnector; extra: its own settings."""
    return {
        "kv_connector": "KVXConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"path": str(store), **extra},
    }


@dataclass(frozen=True)
class Output:
    """What became of one request."""

    tokens: list[int]
    finish_reason: str | None  # "length", "error", "abort"
    num_cached_tokens: int | None  # prompt tokens that vLLM did not compute
    num_scheduled_tokens: int  # tokens that it did compute; 0 if the engine core is elsewhere


def same_tokens(outputs: Sequence[Output], expected: Sequence[Sequence[int]]) -> None:
    """Asserts that every request went on as expected; names the first token that did not."""
    for i, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        assert output.finish_reason == "length", f"prompt {i} ended by {output.finish_reason}"
        if output.tokens != list(tokens):
            pairs = enumerate(zip(output.tokens, tokens, strict=True))
            at, (found, wanted) = next((j, pair) for j, pair in pairs if pair[0] != pair[1])
            raise AssertionError(f"prompt {i}, new token {at}: {found}, expected {wanted}")


def check_reuse(
    engine: Engine,
    prompt: Sequence[int],
    beside: Mapping[str, Any],
    expected: Sequence[int],
    num_cached: int,
) -> None:
    """Asserts the answer to a prompt, and how many of its tokens came from the store: vLLM's own
    cache is empty. Afterwards all of it is stored.
    """
    engine.call("reset_prefix_cache")
    output = engine.generate([prompt], besides=[beside])
    same_tokens(output, [expected])
    assert output[0].num_cached_tokens == num_cached
    assert engine.call("wait_until_saved")


class EngineError(Exception):
    """A call failed in the engine's process; the text is its traceback or the end of its log."""


class Engine:
    """The test's side of a running engine."""

    def __init__(self, process: EngineProcess) -> None:
        self.call = process.call

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int] = 16,
        abort_at: Mapping[int, int] | None = None,
        cache_salt: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        reset_at: Sequence[int] = (),
        besides: Sequence[Mapping[str, Any] | None] = (),
    ) -> list[Output]:
        """Runs all prompts at once, greedily, until the engine has nothing left to do.

        max_tokens: of all, or of each
        abort_at:   the step before which a prompt's request is aborted, by the prompt's index
        sampling:   more SamplingParams
        reset_at:   steps before which all requests lose their blocks, and caches are reset
        besides:    what each prompt has besides tokens, as `besides.request` takes it
        """
        outputs = self.call(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens if isinstance(max_tokens, int) else list(max_tokens),
            abort_at=[list(item) for item in (abort_at or {}).items()],
            cache_salt=cache_salt,
            sampling=dict(sampling or {}),
            reset_at=list(reset_at),
            besides=list(besides) or [None] * len(prompts),
        )
        return [Output(**output) for output in outputs]

    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        found: int = self.call("num_free_blocks")
        return found

    def metrics(self) -> dict[str, float]:
        """Metrics by name, as Prometheus has them. Needs disable_log_stats=False."""
        found: dict[str, float] = self.call("metrics")
        return found


class EngineProcess:
    """A process in which engines are started, one at a time."""

    server: type[Server] = Server

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        self._environment = environment
        self._process: Any = None

    @contextmanager
    def engine(self, model: Path, **options: Any) -> Iterator[Engine]:
        """A running vllm.LLM; options: see DEFAULTS, and LLM's own."""
        self.call("start", model=str(model), **DEFAULTS | options)
        try:
            yield Engine(self)
        finally:
            if self._process is not None:
                self.call("stop")

    def call(self, name: str, **arguments: Any) -> Any:
        """Calls a function of the engine's process. Raises EngineError."""
        if self._process is None:
            self._start()
        try:
            self._calls.send((name, arguments))
            answer = self._calls.recv()
        except (OSError, EOFError):
            self.kill()
            raise EngineError(
                f"the process ended in {name}:\n{self.log.read_text()[-6000:]}"
            ) from None
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Ends the process; the next call starts another."""
        if self._process is not None:
            self._calls.close()
            self._process.join(60)
            self.kill()

    def kill(self) -> None:
        """kill -9, from any thread; a call that is under way raises EngineError."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()

    def _start(self) -> None:
        self.log.touch()
        self._calls, there = multiprocessing.Pipe()
        environment = {**os.environ, **_ENVIRONMENT, **self._environment}
        is_forked = not any(name.startswith(_AT_START) for name in self._environment)
        context = multiprocessing.get_context("forkserver" if is_forked else "spawn")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (_ENVIRONMENT if is_forked else environment).items():
                patch.setenv(name, value)
            forkserver.set_forkserver_preload(["tests.vllm_plugin.imported_ahead"])
            self._process = context.Process(
                target=serve, args=(self.server, there, environment, self.log)
            )
            self._process.start()
        there.close()
