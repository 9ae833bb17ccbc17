"""Boundary: it catches, counts and logs errors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvx_core import InvalidArgumentError, StoreError
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.threads import Workers

ERRORS = (RuntimeError, AttributeError, MemoryError, RecursionError, AssertionError, StopIteration)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.mark.parametrize("kind", ERRORS)
def test_what_is_raised_is_swallowed_logged_and_counted(
    kind: type[Exception], lines: list[str]
) -> None:
    boundary = Boundary(lines.append)
    with boundary.guard("could not load", "request 7", count="load_failures") as guard:
        assert not guard.failed
        raise kind("this")
    assert guard.failed
    assert lines[0].startswith("KVX could not load request 7: this")
    assert boundary.take_counts() == {"load_failures": 1}
    assert boundary.take_counts() == {}


def test_what_goes_well_leaves_no_trace(lines: list[str]) -> None:
    boundary = Boundary(lines.append)
    with boundary.guard("could not load") as guard:
        pass
    assert not guard.failed
    assert (lines, boundary.take_counts()) == ([], {})


def test_a_panic_of_an_extension_is_swallowed(lines: list[str]) -> None:
    """pyo3's PanicException, of safetensors, is no Exception."""

    class PanicException(BaseException):
        pass

    with Boundary(lines.append).guard("could not load") as guard:
        raise PanicException("called `Option::unwrap()` on a `None` value")
    assert guard.failed


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_passes(kind: type[BaseException], lines: list[str]) -> None:
    guard = Boundary(lines.append).guard("could not load")
    with pytest.raises(kind), guard:
        raise kind
    assert not guard.failed
    assert lines == []


def test_nothing_that_files_or_requests_say_controls_the_log(lines: list[str]) -> None:
    """Neither the name of a request nor a message, of KVX or not, nor its traceback."""
    boundary = Boundary(lines.append)
    hostile = "\x1b[2J\x07\u202e\x85\u2028"
    for error in (StoreError(f"a\nERROR {hostile}"), OSError(hostile), ValueError(hostile)):
        with boundary.guard("could not load", f"request {hostile}"):
            raise error
    shown = r"\x1b[2J\x07\u202e\x85\u2028"
    assert lines[0] == rf"KVX could not load request {shown}: a\nERROR {shown}"
    assert lines[1].startswith(rf"KVX could not load request {shown}: \x1b[2J\x07\u202e")
    assert lines[2].splitlines()[-1] == f"ValueError: {shown}"
    assert all(line.isprintable() for text in lines for line in text.split("\n"))


def test_a_traceback_is_logged_where_the_sentence_does_not_say_all(lines: list[str]) -> None:
    boundary = Boundary(lines.append)
    for error in (InvalidArgumentError("a is 1, expected 2"), OSError(5, "Input/output error")):
        with boundary.guard("could not load", "request 7"):
            raise error
    with boundary.guard("could not load", "request 7"):
        None.tokens  # type: ignore[attr-defined]  # noqa: B018
    assert lines[:2] == [
        "KVX could not load request 7: a is 1, expected 2",
        "KVX could not load request 7: [Errno 5] Input/output error",
    ]
    first, *trace = lines[2].split("\n")
    assert first.endswith("object has no attribute 'tokens'")
    assert trace[0] == "Traceback (most recent call last):"


def test_a_kind_is_logged_once_and_again_with_its_number(lines: list[str]) -> None:
    clock = Clock()
    boundary = Boundary(lines.append, quiet_seconds=60, clock=clock)

    def fail(request: int, text: str) -> None:
        with boundary.guard("could not load", f"request {request}"):
            raise OSError(text)

    for request in range(5):
        fail(request, f"/store/{request}.safetensors is cut")
    fail(5, "the disk is full")
    clock.now = 61
    fail(6, "/store/6.safetensors is cut")
    assert lines == [
        "KVX could not load request 0: /store/0.safetensors is cut",
        "KVX could not load request 5: the disk is full",
        "KVX could not load request 6: /store/6.safetensors is cut (5 of this kind since the last "
        "line)",
    ]
    assert boundary.take_counts() == {"errors": 7}


def test_a_store_cannot_fill_the_log(lines: list[str]) -> None:
    """Sentences may quote what files say."""
    boundary = Boundary(lines.append)
    letters = "abcdefghij"
    for number in range(3000):
        with boundary.guard("could not load"):
            raise OSError("".join(letters[int(digit)] for digit in str(number)) * 1000)
    assert len(lines) < 300
    assert max(map(len, lines)) < 3000
    with boundary.guard("could not load"):
        raise OSError("one\ntwo")
    assert all("\n" not in line for line in lines)
    assert boundary.take_counts() == {"errors": 3001}


def test_kinds_that_are_known_stay_apart_when_there_are_too_many(lines: list[str]) -> None:
    clock, words = Clock(), [f"{a}{b}" for a in "abcdefghijklmnop" for b in "abcdefghijklmnopqr"]
    boundary = Boundary(lines.append, quiet_seconds=60, clock=clock)

    def told(*words: str) -> list[str]:
        del lines[:]
        for word in words:
            with boundary.guard("could not load"):
                raise OSError(word)
        return [line.removeprefix("KVX could not load: ") for line in lines]

    assert told(*words) == words[:257]  # all that follow are of one kind
    clock.now = 61
    last = f"{words[287]} (32 of this kind since the last line)"
    assert told(*words[:2], words[287], words[286]) == [*words[:2], last]


def test_an_error_that_has_no_words_and_a_log_that_fails() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    def fails(line: str) -> None:
        raise MemoryError

    boundary = Boundary(fails)
    for error in (Mute(), OSError("cut")):
        with boundary.guard("could not load") as guard:
            raise error
        assert guard.failed
    assert boundary.take_counts() == {"errors": 2}


def test_threads_share_one(lines: list[str]) -> None:
    boundary = Boundary(lines.append)

    def fail(number: int) -> None:
        for _ in range(100):
            with boundary.guard("could not load", f"request {number}"):
                raise OSError("cut")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(8)))
    assert len(lines) == 1
    assert boundary.take_counts() == {"errors": 800}


def test_threads_run_before_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they run, no submit starts one, so none can fail to and leave its work behind."""
    workers = Workers(3, "some")

    def cannot(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    names: list[str] = []
    workers.submit(lambda: names.append(threading.current_thread().name))
    assert workers.shutdown(10)
    assert len(names) == 1
    assert names[0].startswith("some")


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[Any] = []

    def second_fails(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Workers(2, "some")
    started[0].join(10)
    assert not started[0].is_alive()


def test_a_thread_is_free_while_jobs_are_fewer_than_threads() -> None:
    workers, go = Workers(2, "some", exit_seconds=0), threading.Event()
    for expected in (True, True, False, False):
        assert workers.has_free_thread is expected
        workers.submit(lambda: go.wait(60))
    go.set()
    assert workers.wait(60)
    assert workers.has_free_thread
    assert workers.shutdown(60)
