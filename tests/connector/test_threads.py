"""Jobs in threads, and who waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvx_core.connector import threads
from kvx_core.connector.threads import Workers


def test_threads_do_not_go_with_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(1, "test")
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        workers._at_exit()  # waits for nothing, and ends no thread of the other process
        with pytest.raises(RuntimeError, match="forked off"):
            workers.submit(print)
    done = threading.Event()
    workers.submit(done.set)
    assert done.wait(60)
    assert workers.shutdown(60)


def test_jobs_run_in_the_order_of_their_age() -> None:
    workers, done, go = Workers(1, "test"), list[int](), threading.Event()
    workers.submit(lambda: go.wait(60))
    for i in range(5):
        workers.submit(lambda i=i: done.append(i), key=i % 2)
    assert workers.cancel(1) == 2
    assert workers.stuck_seconds() >= 0
    go.set()
    assert workers.wait(60)
    assert done == [0, 2, 4]
    assert workers.stuck_seconds() == 0
    assert workers.shutdown(60)
    with pytest.raises(RuntimeError):
        workers.submit(go.wait)


def test_a_shutdown_waits_no_longer_than_it_is_told() -> None:
    workers, done, go = Workers(1, "test"), list[int](), threading.Event()
    workers.submit(lambda: go.wait(60))
    workers.submit(lambda: done.append(1))
    begin = time.monotonic()
    assert not workers.shutdown(0.1)
    assert time.monotonic() - begin < 10
    go.set()
    assert workers.wait(60)
    assert done == []


def test_threads_are_stuck_since_the_last_of_them_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has been at its job for long does not keep the other from answering."""
    now, go = [100.0], threading.Event()
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    workers = Workers(2, "test")
    for begun in (0.0, 7.0):
        now[0] = 100 + begun
        workers.submit(lambda: go.wait(60))
        while workers._jobs:
            time.sleep(0.001)
        assert workers.stuck_seconds() == 0
    now[0] = 110.0
    assert workers.stuck_seconds() == 3
    go.set()
    assert workers.wait(60)
    assert workers.stuck_seconds() == 0


def test_whether_a_job_begins_at_once() -> None:
    workers, goes_on = Workers(2, "free"), threading.Event()
    begun = [threading.Event() for _ in range(3)]

    def job(i: int) -> None:
        begun[i].set()
        goes_on.wait(60)

    for i, has_free in enumerate((True, True, False)):
        assert workers.has_free_thread is has_free
        workers.submit(lambda i=i: job(i))
        assert i == 2 or begun[i].wait(60)
    assert not workers.has_free_thread
    goes_on.set()
    assert workers.wait(60)
    assert workers.has_free_thread
    assert workers.shutdown(60)


@pytest.mark.parametrize("end", ["job", "cancel", "shutdown"])
def test_who_waits_goes_on_as_soon_as_no_job_is_left(end: str) -> None:
    """Only a thread that runs ends a job; without threads all others are dropped."""
    workers, go = Workers(1 if end == "job" else 0, "test"), threading.Event()
    workers.submit(lambda: go.wait(60), key=1)
    ends: dict[str, Callable[[], object]] = {
        "job": go.set,
        "cancel": lambda: workers.cancel(1),
        "shutdown": lambda: workers.shutdown(0),
    }
    soon = threading.Timer(0.1, ends[end])
    begin = time.monotonic()
    soon.start()
    assert workers.wait(60)
    assert time.monotonic() - begin < 30
    soon.join()


def test_a_shutdown_waits_for_jobs_that_have_not_begun() -> None:
    workers, done, go = Workers(1, "test"), list[int](), threading.Event()
    workers.submit(lambda: go.wait(60))
    workers.submit(lambda: done.append(1))
    threading.Timer(0.1, go.set).start()
    assert workers.shutdown(60)
    assert done == [1]
