"""Work in several threads: results, errors, jobs within jobs, forks and exits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from weakref import ref

import pytest

from kvx_core import backend_info, set_num_threads
from kvx_core.snapshot import threaded
from kvx_core.snapshot.threaded import Job, in_threads

MANY = 1 << 40  # bytes, which are worth any thread


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded, "_num_threads", lambda: 4)


def test_results_are_in_the_order_of_the_items() -> None:
    for count in (0, 1, 2, 3, 7, 100):
        assert in_threads(lambda i: i * i, range(count), MANY) == [i * i for i in range(count)]
        assert Job(lambda i: i * i, range(count), MANY).results() == [i * i for i in range(count)]


def test_several_threads_work() -> None:
    """Four calls wait for one another: fewer threads would never pass."""
    together = threading.Barrier(4, timeout=60)
    assert (
        len(set(in_threads(lambda _: (together.wait(), threading.get_ident())[1], "abcd", MANY)))
        == 4
    )


def test_threads_are_as_many_as_copies_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    try:
        for count, helpers in ((1, 0), (2, 1), (5, 4), (64, 7)):
            set_num_threads(count)
            assert Job(lambda i: i, range(99), MANY).num_helpers == helpers
        assert Job(lambda i: i, range(3), MANY).num_helpers == 3
    finally:
        set_num_threads(0)
    assert Job(lambda i: i, range(99), MANY).num_helpers == min(8, backend_info().num_threads) - 1


def test_little_work_stays_in_this_thread() -> None:
    own = threading.get_ident()
    assert in_threads(lambda _: threading.get_ident(), range(9), (4 << 20) - 1) == [own] * 9
    assert Job(lambda _: threading.get_ident(), range(9), 0).num_helpers == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_error_is_that_of_the_first_item_that_fails(error: type[BaseException]) -> None:
    together = threading.Barrier(4, timeout=60)
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item < 4:
            together.wait()
        if item in (1, 3):
            raise error(f"item {item}")
        time.sleep(0.05)

    with pytest.raises(error, match="item 1"):
        in_threads(work, range(1000), MANY)
    assert len(begun) < 100  # the others are not begun


def test_an_error_leaves_nothing_behind() -> None:
    class Memory:
        pass

    def fail(item: Memory) -> None:
        raise ValueError("bad")

    items = [Memory() for _ in range(8)]
    first = ref(items[0])
    with pytest.raises(ValueError, match="bad"):
        in_threads(fail, items, MANY)
    del items
    gc.collect()
    assert first() is None


def test_jobs_in_jobs_never_wait_for_one_another() -> None:
    def inner(item: int) -> int:
        return sum(in_threads(lambda i: i, range(item), MANY))

    for _ in range(20):
        assert in_threads(inner, range(30), MANY) == [i * (i - 1) // 2 for i in range(30)]


def test_helpers_that_are_busy_for_ever_hold_nobody_up() -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def hang(_: int) -> None:
        begun.release()
        go.wait(60)

    stuck = Job(hang, range(3), MANY)
    assert stuck.num_helpers == 3
    for _ in range(3):
        assert begun.acquire(timeout=60)
    assert in_threads(lambda i: i, range(9), MANY) == list(range(9))
    kept = bytearray(1)  # what a job has is free when nobody waits for it any more
    memory = ref(job := Job(lambda _: kept, range(9), MANY))
    job.stop()
    del job
    gc.collect()
    assert memory() is None
    go.set()
    assert stuck.results() == [None] * 3


def test_a_job_that_is_stopped() -> None:
    """It begins nothing more, and what has begun is over when `stop` returns."""
    begun, over = [], []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.02)
        over.append(item)

    job = Job(work, range(1000), MANY)
    while not begun:
        time.sleep(0.001)
    job.stop()
    assert sorted(begun) == sorted(over)
    assert len(begun) < 1000
    count = len(begun)
    time.sleep(0.05)
    assert len(begun) == count


def test_a_forked_child_has_helpers_of_its_own() -> None:
    in_threads(lambda i: i, range(9), MANY)
    child = os.fork()
    if not child:
        code = 1
        try:
            together = threading.Barrier(4, timeout=30)
            in_threads(lambda _: together.wait(), range(4), MANY)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_AT_EXIT = """
import atexit, time
from kvx_core.snapshot import threaded
threaded._num_threads = lambda: 4
{first}
atexit.register(lambda: print(threaded.in_threads(lambda i: i, range(5), 1 << 40)))
"""


@pytest.mark.parametrize(
    "first",
    [
        "",  # no thread can be started at an exit, from Python 3.12 on
        "threaded.in_threads(lambda i: i, range(5), 1 << 40)",
        "stuck = threaded.Job(lambda _: time.sleep(600), range(3), 1 << 40); time.sleep(0.2)",
    ],
)
def test_at_the_exit_of_a_process(first: str) -> None:
    run = [sys.executable, "-c", _AT_EXIT.format(first=first)]
    found = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr, found.returncode) == ("[0, 1, 2, 3, 4]\n", "", 0)
