"""What ranks have loaded under the numbers of adapters, and what is known of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvx_core.connector.adapters import (
    NO_ADAPTER,
    Adapter,
    AdapterReport,
    Adapters,
    LoadedAdapters,
)

SECONDS = 5.0


def named(adapters: Adapters, *numbers: int) -> AdapterReport:
    """The report once all of these numbers have been named."""
    end = time.monotonic() + SECONDS
    while not (report := adapters.report(0)).known.keys() >= set(numbers):
        assert time.monotonic() < end
        time.sleep(0.001)
    return report


def test_an_adapter_is_known_once_a_thread_has_named_it() -> None:
    adapters, begin = Adapters(), threading.Event()

    def name() -> str:
        begin.wait(SECONDS)
        return "digest"

    adapters.loaded(3, "files", name)
    assert adapters.report(7) == AdapterReport(7, {}, {}, frozenset({3}))
    assert not adapters.has(Adapter(3, "digest"))
    begin.set()
    assert named(adapters, 3) == AdapterReport(0, {3: Adapter(3, "digest")}, {3: "files"})
    assert adapters.has(Adapter(3, "digest"))
    assert not adapters.has(Adapter(3, "digest", 1))
    assert adapters.has(NO_ADAPTER)


def test_the_same_files_are_the_same_adapter_and_others_are_a_change() -> None:
    adapters = Adapters()
    adapters.loaded(1, "files", lambda: "digest")
    first = named(adapters, 1)
    adapters.loaded(1, "files", pytest.fail)
    assert adapters.report(0) is first
    adapters.loaded(1, "others", lambda: "other")
    assert named(adapters, 1).known == {1: Adapter(1, "other", 1)}
    adapters.loaded(1, "files", lambda: "digest")
    assert named(adapters, 1).known == {1: Adapter(1, "digest", 2)}
    assert not adapters.has(first.known[1])


@pytest.mark.parametrize("source", [None, "files"])
def test_an_adapter_without_a_name(source: str | None) -> None:
    def fail() -> str:
        raise OSError("as a test says")

    adapters = Adapters()
    for name in (lambda: None, fail):
        adapters.loaded(1, "before", lambda: "digest")
        named(adapters, 1)
        adapters.loaded(1, source, name)
        end = time.monotonic() + SECONDS
        while adapters.report(0).pending and time.monotonic() < end:
            time.sleep(0.001)
        assert adapters.report(0) == AdapterReport()


# ---- the scheduler's half ----


def told(**known: str) -> AdapterReport:
    """known: names by number, "_1" and so on"""
    numbers = {int(number[1:]): name for number, name in known.items()}
    return AdapterReport(99, {number: Adapter(number, n) for number, n in numbers.items()})


def test_all_ranks_have_to_tell_the_same() -> None:
    loaded = LoadedAdapters(num_ranks=2)
    loaded.take({0: told(_1="a", _2="b")})
    assert loaded.get(1) is None
    loaded.take({1: told(_1="a", _2="c")})
    assert loaded.get(1) == Adapter(1, "a")
    assert loaded.get(2) is None
    assert loaded.get(3) is None
    loaded.take({1: told(_1="b")})
    assert loaded.get(1) is None


def test_requests_wait_until_ranks_have_answered() -> None:
    loaded = LoadedAdapters(num_ranks=2)
    assert loaded.may_be_told(1, SECONDS)
    loaded.take({0: AdapterReport(loaded.asks)})
    assert loaded.may_be_told(1, SECONDS)
    loaded.take({1: AdapterReport(loaded.asks)})
    assert not loaded.may_be_told(1, SECONDS)  # nobody has loaded it
    loaded.computes(1, "name", 0)
    assert loaded.may_be_told(1, SECONDS)  # this step may load it
    loaded.take({0: told(_1="a"), 1: AdapterReport(loaded.asks, pending=frozenset({1}))})
    assert loaded.may_be_told(1, SECONDS)  # it is being named
    assert not loaded.may_be_told(1, 0.0)
    loaded.take({1: AdapterReport(loaded.asks)})
    assert not loaded.may_be_told(1, SECONDS)


def test_requests_of_a_number_wait_for_so_many_seconds_in_all() -> None:
    """A rank that never answers costs the first ones a second, and not each of them."""
    loaded = LoadedAdapters()
    assert loaded.may_be_told(1, 0.05)
    time.sleep(0.06)
    for _ in range(3):
        loaded.computes(1, "name", 0)
        assert not loaded.may_be_told(1, 0.05)


Step = Callable[[LoadedAdapters], object]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([], True, id="no blocks"),
        pytest.param([lambda one: one.computes(1, "name", 0)], True, id="its own"),
        pytest.param([lambda one: one.computes(4, "name", 0)], True, id="the same content"),
        pytest.param([lambda one: one.computes(2, "name", 0)], False, id="another adapter"),
        pytest.param([lambda one: one.computes(2, "other", 0)], True, id="of another name"),
        pytest.param([lambda one: one.computes(9, "name", 0)], False, id="an unknown number"),
        pytest.param(
            [
                lambda one: one.computes(9, "name", 0),
                lambda one: one.take({0: told(_1="a", _9="a")}),
            ],
            True,
            id="which is known later",
        ),
        pytest.param(
            [
                lambda one: one.computes(9, "name", 0),
                lambda one: one.take({0: told(_1="a", _9="b")}),
            ],
            False,
            id="and is another",
        ),
        pytest.param(
            [
                lambda one: one.computes(4, "name", 0),
                lambda one: one.take(
                    {0: AdapterReport(99, {1: Adapter(1, "a"), 4: Adapter(4, "a", 2)})}
                ),
            ],
            False,
            id="which has changed twice",
        ),
        pytest.param(
            [
                lambda one: one.computes(2, "name", 0),
                lambda one: one.computes(1, "name", 0),
            ],
            False,
            id="mixed",
        ),
    ],
)
def test_who_may_have_computed_blocks(steps: list[Step], expected: bool) -> None:
    loaded = LoadedAdapters()
    loaded.take({0: told(_1="a", _2="b", _4="a")})
    for step in steps:
        step(loaded)
    adapter = loaded.get(1)
    assert adapter is not None
    assert loaded.has_computed(adapter, "name", 0) is expected
    assert loaded.has_computed(adapter, "name", 1)  # the engine has dropped its blocks
