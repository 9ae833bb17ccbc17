"""Methods that are watched: what their watcher is told, and that their callers notice nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import pytest

from kvx_core.connector.watched import watch


class Watcher:
    """Notes how each call begins and ends; raises and suppresses what it is told to."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.given_up: list[Exception] = []
        self.results: list[Any] | None = []
        self.at_begin: Exception | None = None
        self.at_end: Exception | None = None
        self.suppresses = False

    def judge(self, *arguments: Any, **keywords: Any) -> AbstractContextManager[list[Any] | None]:
        self.begun.append((arguments, keywords))
        if self.at_begin is not None:
            raise self.at_begin
        return self

    def __enter__(self) -> list[Any] | None:
        return self.results

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        is_its_own = trace is (None if error is None else error.__traceback__)
        self.ended.append((kind, error, is_its_own))
        if self.at_end is not None:
            raise self.at_end
        return self.suppresses


def engine(watcher: Watcher) -> Any:
    """An object whose `load` returns the doubled number, or raises it if it is an error."""

    class Engine:
        def load(self, number: Any, *, times: int = 2) -> Any:
            """Loads."""
            if isinstance(number, BaseException):
                raise number
            return number * times

    for _ in range(2):  # the second time does nothing
        watch(Engine, "load", watcher.judge, watcher.given_up.append)
    return Engine()


def test_a_call_and_its_result_are_told() -> None:
    watcher = Watcher()
    watched = engine(watcher)
    assert watched.load.__doc__ == "Loads."
    assert [watched.load(3), watched.load(4, times=3)] == [6, 12]
    assert watcher.begun == [((watched, 3), {}), ((watched, 4), {"times": 3})]
    assert watcher.results == [6, 12]
    assert watcher.ended == [(None, None, True)] * 2
    assert watcher.given_up == []


def test_a_watcher_need_not_take_results() -> None:
    watcher = Watcher()
    watcher.results = None
    assert engine(watcher).load(3) == 6
    assert watcher.ended == [(None, None, True)]
    assert watcher.given_up == []


@pytest.mark.parametrize("suppresses", [False, True])
@pytest.mark.parametrize("error", [ValueError("full"), KeyboardInterrupt()])
def test_an_error_of_the_call_is_told_and_goes_on(error: BaseException, suppresses: bool) -> None:
    watcher = Watcher()
    watcher.suppresses = suppresses
    with pytest.raises(type(error)) as caught:
        engine(watcher).load(error)
    assert caught.value is error
    assert watcher.ended == [(type(error), error, True)]
    assert watcher.given_up == []


def test_an_error_that_passes_through_the_watcher_is_the_calls_own() -> None:
    """A generator's context raises again what it was told."""
    given_up: list[Exception] = []

    class Engine:
        def load(self) -> None:
            raise ValueError("full")

    @contextmanager
    def judge(owner: Any) -> Iterator[None]:
        yield

    watch(Engine, "load", judge, given_up.append)
    with pytest.raises(ValueError, match="full"):
        Engine().load()
    assert given_up == []


def test_an_error_at_the_beginning_is_given_up_and_costs_the_caller_nothing() -> None:
    watcher = Watcher()
    watcher.at_begin = error = OSError("gone")
    assert engine(watcher).load(3) == 6
    assert watcher.given_up == [error]
    assert (watcher.results, watcher.ended) == ([], [])


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_at_the_end_is_given_up_and_costs_the_caller_nothing(fails: bool) -> None:
    watcher = Watcher()
    watcher.at_end = error = OSError("gone")
    if fails:
        with pytest.raises(ValueError, match="full"):
            engine(watcher).load(ValueError("full"))
    else:
        assert engine(watcher).load(3) == 6
    assert watcher.given_up == [error]


def test_a_method_that_is_not_there_is_not_made() -> None:
    watcher = Watcher()
    watch(Watcher, "load", watcher.judge, watcher.given_up.append)
    assert not hasattr(Watcher, "load")
