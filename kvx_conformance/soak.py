"""Everything at once, for a while: two engines on a store whose files are damaged and whose file
system fails. No answer may be wrong, no block may leak, memory stays flat.

One engine serves from the beginning to the end; the other is stopped or killed and started again as
another one. Requests begin alike, have adapters, images or embeddings, are aborted and preempted;
engines replace their weights, sleep and forget.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kvx_conformance import damage, faults
from kvx_conformance.case import NotApplicable, summary
from kvx_conformance.connector import Answer, Request, Setup, Weights
from kvx_conformance.connector_probe import LENGTH, Probe, prompts
from kvx_conformance.served import EngineEnded, Served

_HYBRID = ("convolutions", "states")
_NEW = 12  # tokens of an answer
_TOLD = 20  # problems that are printed
_ROUND_SECONDS = 300.0  # one that takes longer hangs
_WEIGHTS: tuple[Weights, ...] = ("first", "layer")
_BASE = Setup(longest=256, step_tokens=128, num_blocks=40)  # too few blocks for all requests
_BESIDE: tuple[Literal["before", "behind", "apart"] | None, ...] = (
    *("before", "behind", "apart"),
    *(None,) * 9,
)
# What the file system does while the file of that name is there.
_PHASES = {
    "errors": (
        "call=read,error=EIO,chance=0.05,seed=1",
        "call=open,error=ESTALE,chance=0.05,seed=2",
        "call=stat,error=ESTALE,chance=0.05,seed=3",
        "call=write,error=ENOSPC,chance=0.1,seed=4",
        "call=sync+link+rename+mkdir,error=EIO,chance=0.1,seed=5",
        "call=list+unlink+utime,error=EIO,chance=0.05,seed=6",
        "call=open,error=EMFILE,chance=0.02,seed=7",
        "call=close,error=EIO,chance=0.1,seed=8",
    ),
    "full": ("call=write+mkdir,error=ENOSPC",),
    "short": ("call=read+write,short=1,chance=0.3,seed=9",),
    "slow": ("call=read+write+open+list+sync,delay=20,chance=0.3,seed=10",),
    "stale": ("call=open+read+list,error=ESTALE",),
}
# Memory and descriptors are compared behind this part of the time: caches fill meanwhile.
_WARM_UP, _WARM_UP_SECONDS, _MIN_SAMPLES = 0.25, 180.0, 8
_MORE_MEMORY, _MORE_DESCRIPTORS = 16 << 20, 2


@dataclass
class Found:
    """What a soak has shown."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    usage: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, bytes, descriptors
    is_bad: threading.Event = field(default_factory=threading.Event)  # there is a problem

    def problem(self, kind: str, text: str) -> None:
        self.is_bad.set()
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}")
        if len(self.problems) <= _TOLD:
            print(self.problems[-1], flush=True)

    def judge(self, seconds: float) -> str:
        """Adds problems that show at the end of so many seconds; what is to be said of memory."""
        if not self.counts["tokens reused"]:
            self.problem("lost", "no token was reused: a store that is never hit is never wrong")
        begin = max(_WARM_UP_SECONDS, _WARM_UP * seconds)
        warm = [used for at, *used in self.usage if at >= begin]
        if seconds < 2 * _WARM_UP_SECONDS:
            return "memory: not judged in so short a time"
        if len(warm) < _MIN_SAMPLES:
            self.problem("lost", f"the steady engine has ended: {len(warm)} samples of its memory")
            return "memory: not known"
        quarter = len(warm) // 4
        parts = [warm[i * quarter : (i + 1) * quarter] for i in range(4)]
        medians = [[sorted(used)[quarter // 2] for used in zip(*p, strict=True)] for p in parts]
        added = [[b - a for a, b in pairwise(used)] for used in zip(*medians, strict=True)]
        memory, descriptors = map(sum, added)
        said = f"memory {memory / 2**20:+.0f} MiB, descriptors {descriptors:+}"
        # A buffer that is kept for the next load adds once; what grows does so in each part.
        steady = len(added[0]) * min(added[0])
        is_more = steady > max(_MORE_MEMORY, 0.02 * medians[0][0])
        if is_more or descriptors > _MORE_DESCRIPTORS:
            self.problem("growth", said)
        return said


@dataclass(frozen=True)
class _Batches:
    """Requests that run together, and the setup of engines that take them."""

    setup: Setup
    batches: Sequence[Sequence[Request]]


def _work() -> list[_Batches]:
    """Requests with an adapter run apart from others: mixed, vLLM's LoRA on CPU is wrong alone."""
    chance = random.Random(0)
    beginnings, ends = prompts(12, LENGTH // 3, seed=1), prompts(30, LENGTH // 4, seed=2)
    plain = [
        Request(
            chance.choice(beginnings).tokens[: chance.randrange(1, LENGTH // 3)]
            + chance.choice(ends).tokens[: chance.randrange(LENGTH // 4)]
        )
        for _ in range(100)
    ]
    adapted = [replace(one, adapter="one") for one in plain[:25]]
    embedded = [replace(one, embeddings=1.0) for one in plain[:12]]
    # A state is found where a prompt ended: others go on behind it, some by a few tokens, while a
    # convolution still has its last ones.
    talks = [
        one
        for first in plain[:30]
        for more in (0, chance.randrange(1, 4), chance.randrange(4, 60))
        for one in [Request(first.tokens + chance.choice(ends).tokens[:more])]
    ]
    images = [replace(one, image=chance.choice([None, 1, 2, 3])) for one in plain[:50]]
    return [
        _Batches(replace(_BASE, adapters=True), [plain, adapted]),
        _Batches(replace(_BASE, embeddings=True), [plain[:50] + embedded]),
        _Batches(replace(_BASE, family="images"), [images]),
        _Batches(replace(_BASE, family="convolutions"), [talks]),
        _Batches(replace(_BASE, family="states", prefix_caching=False), [talks]),
    ]


class _Driver:
    """Engines of one process name, one after the other, in a thread of its own."""

    def __init__(self, soak: Soak, name: str, seed: int) -> None:
        self._soak, self._name, self._chance = soak, name, random.Random(seed)
        self._found = soak.found

    def run_steadily(self) -> None:
        self._live(self._soak.work[0], self._soak.work[0].setup, self._soak.ended, whole=True)

    def run_with_restarts(self) -> None:
        chance = self._chance
        while not self._soak.ended.is_set():
            (work,) = chance.choices(self._soak.work, [4, 1, 1, 2, 2])
            beside = chance.choice(_BESIDE)
            # Whatever is beside the second connector: vLLM 0.32 goes on sharing blocks whose load
            # within a step has failed, so that others are answered wrong where a request ends
            # before it has computed them (v1/core/sched/scheduler.py, _handle_invalid_blocks); it
            # ends itself ("Encoder cache miss") where such a block holds a part of an image; and it
            # stands still where requests whose loads beside steps have ended hold all blocks.
            if work.setup.family == "images" and beside in ("before", "behind"):
                beside = None
            if work.setup.family in _HYBRID:  # KVX refuses to be beside another there
                beside = None
            may_share = beside not in ("before", "behind")
            setup = replace(
                work.setup,
                block_size=chance.choice([32, 64, 128]),
                prefix_caching=may_share and work.setup.prefix_caching and chance.random() < 0.5,
                beside=beside,
                num_blocks=128 if beside == "apart" else work.setup.num_blocks,
                weights=chance.choice(_WEIGHTS) if work.setup.family == "llama" else "first",
                place=self._name,
                dtype="bfloat16" if chance.random() < 0.15 else "float32",
            )
            life = threading.Event()
            timer = threading.Timer(chance.uniform(5, 40), life.set)
            timer.start()
            self._live(work, setup, life)
            timer.cancel()

    def _live(
        self, work: _Batches, setup: Setup, life: threading.Event, *, whole: bool = False
    ) -> None:
        """Rounds of one engine until its life, or the soak, ends.

        whole: its memory is watched
        """
        found, begun = self._found, time.monotonic()
        is_killed = not whole and self._chance.random() < 0.5
        found.counts["engines"] += 1
        try:
            with self._soak.engine(setup, self._name) as engine:
                if is_killed:
                    threading.Thread(target=self._kill, args=(engine, life)).start()
                rounds = _Rounds(engine, work, setup, found, self._chance, self._soak.expected)
                while not (life.is_set() or self._soak.ended.is_set()):
                    with self._limit(engine, _said(setup)):
                        rounds.run()
                    if whole:
                        found.usage.append((time.monotonic() - begun, *engine.usage()))
        except NotApplicable as why:
            found.counts[f"n/a: {why}"] += 1
        except EngineEnded as ended:
            if is_killed and (life.is_set() or self._soak.ended.is_set()):
                found.counts["kills"] += 1
            else:
                found.problem("crashes", f"{_said(setup)}: {ended}")
        except Exception as error:
            found.problem("crashes", f"{_said(setup)}: {summary(error)}")

    def _kill(self, engine: Served, life: threading.Event) -> None:
        while not (life.wait(0.2) or self._soak.ended.is_set()):
            pass
        engine.kill()

    @contextmanager
    def _limit(self, engine: Served, said: str) -> Iterator[None]:
        def hangs() -> None:
            self._found.problem("hangs", f"{said}: a round took {_ROUND_SECONDS:g} s")
            engine.kill()

        timer = threading.Timer(_ROUND_SECONDS, hangs)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class _Rounds:
    """Rounds of requests of one engine."""

    def __init__(
        self,
        engine: Served,
        work: _Batches,
        setup: Setup,
        found: Found,
        chance: random.Random,
        expected: dict[tuple[str, Weights, Request], tuple[int, ...]],
    ) -> None:
        self._engine, self._work, self._setup = engine, work, setup
        self._found, self._chance, self._expected = found, chance, expected
        self._weights = setup.weights
        self._free_blocks = self._if_it_can(engine.free_blocks)

    def run(self) -> None:
        chance = self._chance
        self._change_engine()
        sizes = [len(batch) for batch in self._work.batches]
        (batch,) = chance.choices(self._work.batches, sizes)
        salt = chance.choice([None, None, "one", "two"])
        chosen = chance.choices(batch, k=chance.randrange(4, 33))
        requests = [replace(one, salt=salt) for one in chosen]
        aborted = chance.sample(range(len(requests)), len(requests) // 5)
        aborts = {i: chance.randrange(len(requests[i].tokens) + _NEW) for i in aborted}
        resets = [chance.randrange(30)] if chance.random() < 0.1 else []
        try:
            answers = self._engine.ask(requests, _NEW, aborts, resets)
        except NotApplicable:
            answers = self._engine.ask(requests, _NEW)
        for request, answer in zip(requests, answers, strict=True):
            self._compare(request, answer)
        free = self._if_it_can(self._engine.free_blocks)
        if free != self._free_blocks:
            self._found.problem("leaks", f"{self._free_blocks} blocks were free, now {free}")
            self._free_blocks = free
        if chance.random() < 0.4:
            self._engine.forget()

    def _change_engine(self) -> None:
        what = self._chance.random()
        if what < 0.15 and self._setup.family == "llama" and not self._setup.embeddings:
            self._found.counts["new weights"] += 1
            self._weights = self._chance.choice(_WEIGHTS)
            self._engine.replace_weights(self._weights, "files")
        elif what < 0.2:
            self._found.counts["sleeps"] += 1
            self._if_it_can(self._engine.sleep)

    def _if_it_can(self, call: Any) -> Any:
        try:
            return call()
        except NotApplicable:
            return None

    def _compare(self, request: Request, answer: Answer) -> None:
        counts = self._found.counts
        counts["requests"] += 1
        counts["tokens reused"] += answer.reused
        if self._setup.family in _HYBRID:
            counts["of hybrid models"] += 1
            counts["tokens reused by hybrid models"] += answer.reused
        for name in ("adapter", "image", "embeddings"):
            counts[f"with {name}"] += getattr(request, name) is not None
        if self._setup.dtype != "float32":  # rounding depends on what runs together
            counts["of bfloat16"] += 1
            return
        plain = replace(request, salt=None)
        expected = self._expected[self._setup.family, self._weights, plain]
        if answer.ended == "abort":
            counts["aborted"] += 1
            expected = expected[: len(answer.tokens)]
        if answer.ended == "error" or answer.tokens != expected:
            self._found.problem(
                "wrong answers",
                f"{_said(self._setup)}; now weights {self._weights!r}; {len(request.tokens)} "
                f"tokens, salt {request.salt}, adapter {request.adapter}, {answer.reused} reused, "
                f"ended by {answer.ended}: {answer.tokens}, expected {expected}",
            )


class Soak:
    """Engines of a subject on one store, for some minutes."""

    def __init__(self, kind: str, subject: str) -> None:
        self._probe = Probe(kind, subject)
        self.found, self.ended, self.work = Found(), threading.Event(), _work()
        self.expected: dict[tuple[str, Weights, Request], tuple[int, ...]] = {}
        self._store = self._probe.folder() / "store"
        self._flags = self._probe.folder()
        rules = [
            f"{rule},path={self._store}/,if={self._flags / phase}"
            for phase, rules in _PHASES.items()
            for rule in rules
        ]
        self._environment = faults.environment(faults.build(self._probe.work), *rules)
        self._phase = "calm"

    def run(self, seconds: float, *, until_first: bool = False) -> Found:
        """Prints how it goes, and what it has found.

        until_first: ends with the first problem
        """
        print("asking engines without a store ...", flush=True)
        self._ask_alone()
        steady, restarted = _Driver(self, "steady", 1), _Driver(self, "restarted", 2)
        fail = partial(self._fail, min(20.0, seconds / 12))
        runs = (steady.run_steadily, restarted.run_with_restarts, self._damage, fail)
        threads = [threading.Thread(target=run, daemon=True) for run in runs]
        enough = self.found.is_bad if until_first else threading.Event()
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            while (left := begun + seconds - time.monotonic()) > 0 and threads[0].is_alive():
                if enough.wait(min(15.0, left)):
                    seconds = time.monotonic() - begun
                print(self._progress(time.monotonic() - begun), flush=True)
        finally:  # processes that are left would keep this one
            self.ended.set()
            for thread in threads:
                thread.join(_ROUND_SECONDS)
        memory = self.found.judge(seconds)
        for name, count in sorted(self.found.counts.items()):
            print(f"{count:10,} {name}")
        print(memory)
        return self.found

    def close(self) -> None:
        self._probe.close()

    def engine(self, setup: Setup, name: str) -> AbstractContextManager[Served]:
        """On the store, in a process of its own, whose file system fails now and then."""
        return self._probe.engine(setup, self._store, process=name, environment=self._environment)

    def _ask_alone(self) -> None:
        for work in self.work:
            names = _WEIGHTS if work.setup.family == "llama" else _WEIGHTS[:1]
            for weights in names:
                setup = replace(work.setup, weights=weights, num_blocks=128)
                for batch in work.batches:
                    with suppress(NotApplicable):
                        answers = self._probe.alone(batch, setup, _NEW)
                        for request, tokens in zip(batch, answers, strict=True):
                            self.expected[setup.family, weights, request] = tokens

    def _damage(self) -> None:
        chance = random.Random(3)
        while not self.ended.wait(chance.uniform(0.1, 1.5)):
            with suppress(OSError, ValueError, IndexError):  # an engine was faster
                self._repair()
                act = chance.choice(damage.ACTS)
                act(chance.choice(damage.files(self._store)), chance)
                self.found.counts[f"damage: {act.__name__}"] += 1

    def _repair(self) -> None:
        """Takes away what is no file where there is too much of it, so that files can be stored."""
        for path in [path for path in self._store.rglob("*") if _is_no_file(path)][8:]:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def _fail(self, seconds: float) -> None:
        """Phases of a failing file system, and calm ones, each of so many seconds."""
        chance = random.Random(5)
        while not self.ended.wait(seconds):
            self._phase = chance.choice(sorted(_PHASES))
            (self._flags / self._phase).touch()
            self.ended.wait(seconds)
            (self._flags / self._phase).unlink()
            self._phase = "calm"

    def _progress(self, seconds: float) -> str:
        counts = self.found.counts
        names = ("requests", "tokens reused", "wrong answers", "leaks", "crashes", "engines")
        said = "; ".join(f"{counts[name]} {name}" for name in names)
        return f"[{int(seconds) // 60:2}:{int(seconds) % 60:02}] {self._phase:6} {said}"


def _said(setup: Setup) -> str:
    """What an engine has that others have not."""
    given = {each.name: getattr(setup, each.name) for each in fields(setup)}
    return ", ".join(
        f"{name}={value!r}" for name, value in given.items() if value != getattr(_BASE, name)
    )


def _is_no_file(path: Path) -> bool:
    """True for a link, a pipe or an empty folder."""
    if path.is_symlink():
        return True
    return not any(path.iterdir()) if path.is_dir() else not path.is_file()


def soak(kind: str, subject: str, minutes: float, *, until_first: bool = False) -> bool:
    """Returns whether nothing was wrong.

    minutes: the most, if it runs `until_first` problem
    """
    with closing(Soak(kind, subject)) as one:
        return not one.run(minutes * 60, until_first=until_first).problems
