"""Engines under load: rounds of requests, each answer compared, restarts and kills between them."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.report import Sample
from tests.soak.work import Family
from tests.vllm_plugin.engine import Engine, EngineError, EngineProcess, Output, connector

CHUNK_TOKENS = 32
ROUND_SECONDS = 300  # a round that takes longer hangs


class SoakProcess(EngineProcess):
    """A process whose connector's raises are counted."""

    module = "tests.soak.server"


@dataclass
class Found:
    """What the rounds of one or several engines have shown. Written by one thread."""

    counts: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)  # KVXConnector's and vLLM's
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # the first few, in words

    def problem(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.problems) < 20:
            self.problems.append(f"{kind}: {text}")


class Rounds:
    """An engine that answers rounds of requests, and what it had at its start."""

    def __init__(
        self,
        engine: Engine,
        family: Family,
        found: Found,
        chance: random.Random,
        policy: str,
        model: Path,
        *,
        is_exact: bool,
    ) -> None:
        """is_exact: answers are those of `family`: not with a cache that is less precise"""
        self._engine, self._family, self._found = engine, family, found
        self._chance, self._policy = chance, policy
        self._model, self._is_exact = model, is_exact
        self._free_blocks = engine.num_free_blocks()
        self._raises = self._engine.call("usage")["raises"]
        self._stats: dict[str, float] = {}

    def run(self) -> None:
        """One round. Raises EngineError if the engine ends."""
        chance, family = self._chance, self._family
        self._change_engine()
        batch = chance.choices(family.batches, [len(part) for part in family.batches])[0]
        which = chance.choices(batch, k=chance.randrange(4, 33))
        aborted = chance.sample(range(len(which)), len(which) // 5)
        outputs = self._engine.generate(
            [family.requests[i].prompt for i in which],
            max_tokens=len(family.answers[self._model][0]),
            abort_at={i: chance.randrange(40) for i in aborted},
            cache_salt=chance.choice([None, None, "one", "two"]),
            reset_at=[chance.randrange(30)] if chance.random() < 0.1 else (),
            besides=[family.requests[i].beside for i in which],
        )
        for i, output in zip(which, outputs, strict=True):
            self._compare(i, output)
        leaked = self._free_blocks - self._engine.num_free_blocks()
        if leaked:
            self._found.problem("leaked blocks", f"{leaked} of {self._free_blocks} after a round")
            self._free_blocks -= leaked
        if chance.random() < 0.4:  # what vLLM has not cached itself comes from the store
            self._engine.call("reset_prefix_cache")
        self._add_stats()

    def _change_engine(self) -> None:
        """Replaces the weights, or puts the engine to sleep, now and then."""
        chance = self._chance.random()
        if chance < 0.15:
            self._found.counts["new weights"] += 1
            self._model = self._chance.choice(self._family.models)
            self._engine.call("change_weights", how="reload", path=str(self._model))
            self._engine.call("reset_prefix_cache")
        elif chance < 0.2:
            self._found.counts["sleeps"] += 1
            self._engine.call("sleep_and_wake")

    def sample(self, seconds: float) -> None:
        """Memory and descriptors of the idle process."""
        usage = self._engine.call("usage")
        self._found.samples.append(Sample(seconds, usage["memory"], usage["descriptors"]))
        for _ in range(usage["raises"] - self._raises):
            self._found.problem("raises", "out of a hook of the connector; see the engine's log")
        self._raises = usage["raises"]

    def _compare(self, i: int, output: Output) -> None:
        counts = self._found.counts
        counts["requests"] += 1
        for kind in self._family.requests[i].beside or ():
            counts[f"with {kind}"] += 1
        if output.finish_reason == "error":
            counts["failed by policy"] += 1
            if self._policy != "fail":
                self._found.problem("wrong tokens", f"prompt {i} ended by an error")
            return
        if not self._is_exact:
            counts["of less precise caches"] += 1
            return
        expected = self._family.answers[self._model][i]
        if output.finish_reason == "abort":
            counts["aborted"] += 1
            expected = expected[: len(output.tokens)]
        if output.tokens != expected:
            self._found.problem("wrong tokens", f"prompt {i}: {output.tokens}, not {expected}")

    def _add_stats(self) -> None:
        now = self._engine.metrics()
        for name, value in now.items():
            self._found.stats[name] += value - self._stats.get(name, 0)  # type: ignore[assignment]
        self._stats = now


def config(store: Path, policy: str, **settings: Any) -> Any:
    return connector(store, "kv_both", policy, chunk_tokens=CHUNK_TOKENS, **settings)


def beside_one_that_fails(own: Any, policy: str, *, comes_first: bool) -> Any:
    """KVX and a connector whose loads all fail, in vLLM's MultiConnector."""
    failing = {
        "kv_connector": "FailingConnector",
        "kv_connector_module_path": "kvx_conformance.connectors.failing",
        "kv_role": "kv_both",
    }
    both = [failing, own] if comes_first else [own, failing]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": both},
    }


@dataclass
class Driver:
    """A process with engines, driven in a thread of this one until `ended`."""

    name: str
    process: SoakProcess
    families: list[Family]
    store: Path
    ended: threading.Event
    seed: int
    found: Found = field(default_factory=Found)
    _is_killed: bool = False

    def run_steadily(self) -> None:
        """One engine from the beginning to the end: what leaks shows in it."""
        settings = config(self.store, "recompute", max_bytes=24 << 20)
        self._engine(
            {
                "block_size": 32,
                "num_gpu_blocks_override": 20,  # too few for eight requests: some are preempted
                "enable_prefix_caching": True,
                "kv_transfer_config": settings,
            },
            "recompute",
            self.ended,
            self.families[0],
            self.families[0].models[0],
        )

    def run_with_restarts(self) -> None:
        """Engine after engine, half of them killed: each is another one with the same store."""
        chance = random.Random(self.seed)
        while not self.ended.is_set():
            policy = chance.choice(["recompute", "fail"])
            is_exact, has_other = chance.random() < 0.85, chance.random() < 0.25
            if has_other:
                policy = "recompute"
            options: dict[str, Any] = {
                "block_size": chance.choice([32, 64, 128]),
                "num_gpu_blocks_override": 24,
                "enable_prefix_caching": chance.random() < 0.4,
                "kv_transfer_config": config(
                    self.store,
                    policy,
                    max_bytes=24 << 20,
                    layerwise=chance.random() < 0.3,
                    async_load=chance.random() < 0.3,
                ),
            }
            if has_other:
                own = options["kv_transfer_config"]
                first = chance.random() < 0.5
                options["kv_transfer_config"] = beside_one_that_fails(
                    own, policy, comes_first=first
                )
            if not is_exact:  # what it stores is not precise enough for the others
                options |= {
                    "dtype": "bfloat16",
                    "kv_cache_dtype": "fp8",
                    "kv_cache_dtype_skip_layers": ["0"],
                }
            is_killed = chance.random() < 0.5
            life = threading.Event()
            self._is_killed = False
            timer = threading.Timer(chance.uniform(25, 60), self._end, [life, is_killed])
            timer.start()
            family = chance.choices(self.families, [4, 1, 1])[0]
            model = chance.choice(family.models)
            self._engine(options, policy, life, family, model, is_exact=is_exact)
            timer.cancel()

    def _end(self, life: threading.Event, is_killed: bool) -> None:
        self._is_killed = is_killed
        life.set()
        if is_killed:
            self.process.kill()

    def _engine(
        self,
        options: Mapping[str, Any],
        policy: str,
        life: threading.Event,
        family: Family,
        model: Path,
        *,
        is_exact: bool = True,
    ) -> None:
        """Rounds of one engine until its life, or the soak, ends."""
        start = time.monotonic()
        self.found.counts["engines"] += 1
        chance = random.Random(self.seed * 1000 + self.found.counts["engines"])
        try:
            with self.process.engine(
                model,
                max_model_len=192,
                max_num_batched_tokens=128,
                disable_log_stats=False,
                **family.options,
                **options,
            ) as engine:
                rounds = Rounds(
                    engine, family, self.found, chance, policy, model, is_exact=is_exact
                )
                while not (life.is_set() or self.ended.is_set()):
                    watch = threading.Timer(ROUND_SECONDS, self._hangs)
                    watch.start()
                    try:
                        rounds.run()
                        rounds.sample(time.monotonic() - start)
                    finally:
                        watch.cancel()
        except (EngineError, ValueError, OSError) as error:
            if self._is_killed:
                self.found.counts["kills"] += 1
            else:
                self.found.problem("raises", f"{self.name} ended: {str(error)[-3000:]}")
        except Exception:
            self.found.problem("raises", f"{self.name}'s driver: {traceback.format_exc()}")

    def _hangs(self) -> None:
        self.found.problem("raises", f"{self.name} hangs: a round took {ROUND_SECONDS} s")
        self.process.kill()
