"""Two real vLLMs, each in a process of its own, and conversations that move from one to the other.

They share nothing but a store's directory, in memory (/dev/shm). While the first one answers,
KVXConnector stores its full chunks and the second one loads them into its prefix cache; then
`hand_over` stores the rest, and the second one goes on. tests/vllm_plugin/engine.py has the
process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.vllm_plugin.engine import DEFAULTS, EngineProcess, connector
from tests.vllm_plugin.server import Server

BLOCK_A, BLOCK_B = 32, 64  # tokens of a block; chunks of the store are blocks of the first
_LIMIT = 400  # tokens of an answer: no conversation here comes so far


class Mover(Server):
    """The calls that a Pair makes, beside those of Server: one conversation at a time."""

    def begin(self, ids: list[int]) -> None:
        """A new conversation. What vLLM has cached of earlier ones is forgotten."""
        self._drain()
        self.reset_prefix_cache()
        self._request = self._add(ids, _LIMIT)
        self._seconds: list[float] = []

    def step(self) -> dict[str, Any]:
        """One step, and the token that it gave, if any."""
        begin = time.perf_counter()
        tokens = self._step(self._request)
        stamp = time.perf_counter()
        if tokens and self._seconds is not None:
            self._seconds.append(stamp - begin)
        return {"tokens": tokens, "stamps": [stamp] * len(tokens)}

    def step_seconds(self) -> list[float]:
        """Of the steps that computed one token."""
        return self._seconds[1:] or self._seconds

    def hand_over(self) -> dict[str, Any]:
        from kvx_adapters.vllm_plugin.handover import hand_over

        over = hand_over(self._llm, self._request)
        return {"tokens": over.tokens, "is_stored": over.is_stored}

    def warm(self, ids: list[int]) -> None:
        """Loads all but the last of these tokens, which are full blocks, into the prefix cache."""
        request = self._add(ids, 1)
        while not self._step(request):
            pass

    def go_on(self, ids: list[int], count: int) -> dict[str, Any]:
        """`count` tokens that follow these; how many of these were not computed; and when each
        token was there.
        """
        request = self._add(ids, count)
        tokens: list[int] = []
        stamps: list[float] = []
        while len(tokens) < count:
            tokens += self._step(request)
            stamps += [time.perf_counter()] * (len(tokens) - len(stamps))
        return {"tokens": tokens, "stamps": stamps, "known": self._known}

    def forget_all(self) -> None:
        """Forgets vLLM's own prefix cache, as an engine that starts."""
        self._drain()
        assert self.reset_prefix_cache()

    def zero_loads(self, on: bool) -> None:
        """Whether the keys and values of all tokens are zeros after a load: the control."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        loader = get_kv_transfer_group()._worker._loader
        layers = self._core.model_executor.driver_worker.worker.model_runner.kv_caches

        def load_zeros(work: Any) -> bool:
            good: bool = type(loader)._load(loader, work)
            for layer in layers:
                layer.zero_()
            return good

        loader._load = load_zeros if on else partial(type(loader)._load, loader)

    def refuse_writes(self, on: bool) -> None:
        """Whether nothing can be stored."""
        from kvx_core.snapshot import StoreError
        from kvx_core.stores.prefix import PrefixStore

        def commit_all(store: Any, snapshots: Any) -> list[Any]:
            return [StoreError("no space is left, as a test says") for _ in snapshots]

        self._commit_all = getattr(self, "_commit_all", PrefixStore.commit_all)
        PrefixStore.commit_all = commit_all if on else self._commit_all  # type: ignore[method-assign]

    def refused(self, request_id: str, *, connected: bool = True) -> str:
        """What hand_over says of a request, in an engine with KVXConnector or without."""
        from kvx_adapters.vllm_plugin.handover import hand_over
        from kvx_core import KvxError

        connector = self._scheduler.connector
        self._scheduler.connector = connector if connected else None
        try:
            hand_over(self._llm, request_id)
        except KvxError as error:
            return str(error)
        finally:
            self._scheduler.connector = connector
        return ""

    def _add(self, ids: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        self._count = getattr(self, "_count", 0) + 1
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        added: str = self._llm.llm_engine.add_request(
            f"kvx-{self._count}", {"prompt_token_ids": ids}, params
        )
        self._said = 0
        return added

    def _step(self, request: str) -> list[int]:
        """A step of the only request: the tokens that it gave."""
        tokens: list[int] = []
        for output in self._llm.llm_engine.step():
            said = list(output.outputs[0].token_ids)
            tokens += said[self._said :]
            self._said = len(said)
            self._known = output.num_cached_tokens
        return tokens


class Process(EngineProcess):
    """Runs a Mover."""

    server = Mover


@dataclass(frozen=True)
class Moved:
    """A conversation that has moved.

    said:       its tokens behind the prompt
    known:      tokens of prompt and answer that the second engine did not compute when it took over
    warmed:     those of them that were in its own blocks before the pause
    pause:      seconds from the first engine's last token to the second's first one, less a step of
                the second
    handover:   seconds of them that hand_over took
    step_a:     the median
    """

    said: list[int]
    known: int
    warmed: int
    is_stored: bool
    pause: float
    handover: float
    step_a: float
    step_b: float


@dataclass(frozen=True)
class Pair:
    """Two engines that run, `a` with blocks of 32 tokens and `b` with blocks of 64."""

    a: Process
    b: Process
    store: Path

    def converse(
        self,
        ids: Sequence[int],
        before: int,
        after: int,
        *,
        warms: bool = True,
        between: Callable[[], None] | None = None,
    ) -> Moved:
        """A conversation of a prompt, `before` tokens in `a` and `after` in `b`.

        warms:   `b` loads full blocks while `a` goes on
        between: is called when `a` has handed the conversation over
        """
        said, stamps = self.start(ids, before, warms=warms)
        begin = time.perf_counter()
        over = self.a.call("hand_over")
        handover = time.perf_counter() - begin
        assert over["tokens"] == [*ids, *said]
        if between is not None:
            between()
        found = self.b.call("go_on", ids=over["tokens"], count=after)
        times = found["stamps"]
        step_b = statistics.median(t - s for s, t in pairwise(times))
        return Moved(
            said + found["tokens"],
            found["known"],
            self.warmed(len(over["tokens"])) if warms else 0,
            over["is_stored"],
            times[0] - stamps[-1] - step_b,
            handover,
            statistics.median(self.a.call("step_seconds")),
            step_b,
        )

    def start(
        self, ids: Sequence[int], before: int, *, warms: bool = True
    ) -> tuple[list[int], list[float]]:
        """The prompt and `before` tokens in `a`: the tokens, and when each was there."""
        self.a.call("begin", ids=list(ids))
        said: list[int] = []
        stamps: list[float] = []
        warm = 0
        while len(said) < before:
            found = self.a.call("step")
            said += found["tokens"]
            stamps += found["stamps"]
            full = self.warmed(len(ids) + len(said))
            if warms and full > warm and len(said) < before:
                self.b.call("warm", ids=[*ids, *said][: full + 1])
                warm = full
        return said, stamps

    @staticmethod
    def warmed(num_tokens: int) -> int:
        """Tokens in full blocks of both engines, once all but the last one are computed."""
        return (num_tokens - 1) // BLOCK_B * BLOCK_B


@contextmanager
def pair(model: Path, log: Path) -> Iterator[Pair]:
    """A pair that runs, on a new store."""
    with TemporaryDirectory(prefix="kvx-", dir="/dev/shm") as folder:
        store = Path(folder)
        a, b = Process(log / "a.log"), Process(log / "b.log")
        try:
            start(a, model, store, BLOCK_A)
            start(b, model, store, BLOCK_B)
            yield Pair(a, b, store)
        finally:
            a.kill()
            b.kill()


def start(process: Process, model: Path, store: Path, block_size: int) -> None:
    """Starts an engine on the store."""
    settings = connector(
        store, policy="recompute", chunk_tokens=BLOCK_A, min_tokens=1, fresh_seconds=0.0
    )
    options = DEFAULTS | {
        "block_size": block_size,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "kv_transfer_config": settings,
    }
    process.call("start", model=str(model), **options)
