"""What cases of connectors do: start engines, ask them, compare with one without a store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvx_conformance.case import Lost, Wrong
from kvx_conformance.connector import Answer, Request, Setup
from kvx_conformance.served import Served, start_fork_server

PLAIN = Setup()
LENGTH = 300  # of prompts: no multiple of any usual block or chunk, and more than 256
SEEDS = (1, 2, 3)


class Probe:
    """Engines of one subject."""

    def __init__(self, kind: str, subject: str) -> None:
        self._of = kind, subject
        self.work = Path(tempfile.mkdtemp(prefix="kvx-conformance-"))
        start_fork_server(subject, self.work)
        self._kept = {"": Served(kind, subject, self.work)}
        self._alone: dict[tuple[Setup, Request, int], tuple[int, ...]] = {}

    def close(self) -> None:
        """Ends the processes that are kept, and deletes `work`."""
        for served in self._kept.values():
            served.kill()
        shutil.rmtree(self.work, ignore_errors=True)

    def folder(self) -> Path:
        """A new directory for a store."""
        return Path(tempfile.mkdtemp(prefix="store-", dir=self.work))

    @contextmanager
    def engine(
        self,
        setup: Setup,
        store: Path | None,
        *,
        process: str = "",
        environment: Mapping[str, str] | None = None,
        hash_seed: int | None = None,
    ) -> Iterator[Served]:
        """A running engine, which is stopped at the end.

        store: None: it runs without
        process: engines that run at one time are in processes of several names. A process is kept
            for the next engine, unless it has an environment or a seed of its own
        hash_seed: of a new Python, its PYTHONHASHSEED
        """
        is_kept = environment is None and hash_seed is None
        served = self._kept.pop(process, None) if is_kept else None
        if served is None or served.has_ended:
            served = Served(*self._of, self.work, environment or {}, hash_seed)
        try:
            served.start(setup, store)
            yield served
            if not served.has_ended:
                served.stop()
                if is_kept:
                    self._kept[process] = served
        finally:
            if self._kept.get(process) is not served:
                served.kill()

    def alone(
        self, requests: Sequence[Request], setup: Setup = PLAIN, new_tokens: int = 8
    ) -> list[tuple[int, ...]]:
        """What an engine without a store answers."""
        keys = [(setup, request, new_tokens) for request in requests]
        missing = [*dict.fromkeys(key for key in keys if key not in self._alone)]
        if missing:
            with self.engine(setup, None, process="alone") as engine:
                answers = engine.ask([request for _, request, _ in missing], new_tokens)
            self._alone.update(
                (key, answer.tokens) for key, answer in zip(missing, answers, strict=True)
            )
        return [self._alone[key] for key in keys]

    def check(
        self,
        answers: Sequence[Answer],
        requests: Sequence[Request],
        setup: Setup = PLAIN,
        new_tokens: int = 8,
        *,
        aborted: Collection[int] = (),
    ) -> None:
        """Raises Wrong if a request was not answered as without a store, Lost if it failed.

        aborted: indices of requests that may have been aborted before their last token
        """
        expected = self.alone(requests, setup, new_tokens)
        for i, (answer, tokens) in enumerate(zip(answers, expected, strict=True)):
            if answer.ended == "abort" and i in aborted:
                continue
            if answer.ended != "length":
                raise Lost(f"request {i} ended by {answer.ended}")
            if answer.tokens != tokens:
                raise Wrong(
                    f"request {i} of {len(requests[i].tokens)} tokens, of which {answer.reused} "
                    f"were reused, went on {answer.tokens}, expected {tokens}"
                )

    def write(self, store: Path, requests: Sequence[Request], setup: Setup = PLAIN) -> list[Answer]:
        """An engine computes and stores the requests, or takes what is stored. Its answers."""
        with self.engine(setup, store) as engine:
            answers = engine.ask(requests)
            engine.settle()
        self.check(answers, requests, setup)
        return answers

    read = write  # what is stored once more does no harm


def prompts(count: int, length: int = LENGTH, seed: int = 0) -> list[Request]:
    """Requests of random tokens, each unlike the others from its first token on."""
    random = np.random.default_rng(seed)
    found = random.integers(1, 511, (count, length))
    found[:, 0] = 1 + random.permutation(510)[:count]
    return [Request(tuple(tokens)) for tokens in found.tolist()]


def reused(answers: Sequence[Answer]) -> list[int]:
    """Tokens that were not computed, of each request."""
    return [answer.reused for answer in answers]


def some_are_reused(answers: Sequence[Answer], why: str) -> None:
    """Raises Lost unless each request has reused something."""
    if not all(reused(answers)):
        raise Lost(f"{reused(answers)} tokens were reused, though {why}")


def none_is_reused(answers: Sequence[Answer], whose: str) -> None:
    """Raises Wrong if a request has reused something."""
    if any(reused(answers)):
        raise Wrong(f"{reused(answers)} tokens were reused {whose}")


def share(
    probe: Probe,
    writer: Setup,
    reader: Setup,
    written: Sequence[Request] | None = None,
    read: Sequence[Request] | None = None,
) -> None:
    """The reader takes what the writer has stored of the same prompts. Raises Wrong or Lost."""
    written = written or prompts(2)
    store = probe.folder()
    probe.write(store, written, writer)
    answers = probe.read(store, read or written, reader)
    some_are_reused(answers, "the same numbers are stored")


def share_nothing(
    probe: Probe,
    writer: Setup,
    reader: Setup,
    written: Sequence[Request] | None = None,
    read: Sequence[Request] | None = None,
    *,
    alike: bool = False,
) -> None:
    """The reader takes nothing of what the writer has stored of the same tokens, nor the writer of
    what the reader has stored since. Raises Wrong.

    alike: both answer the same, and share nothing all the same
    """
    written = written or prompts(2)
    read = read or written
    if not alike and probe.alone(written, writer) == probe.alone(read, reader):
        raise AssertionError("both answer the same: tokens prove nothing here")
    store = probe.folder()
    probe.write(store, written, writer)
    none_is_reused(probe.read(store, read, reader), "of what others have stored")
    probe.read(store, written, writer)
    other = probe.folder()  # and the other way round, from the first token stored
    probe.write(other, read, reader)
    none_is_reused(probe.read(other, written, writer), "of what others have stored")
