"""Loads beside an engine's steps: which end is reported for a request whose id is used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvx_core import Section
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.loader import Loader, Results
from kvx_core.connector.lookups import NOTHING
from kvx_core.connector.plan import BlockIds, Load, Scope
from kvx_core.connector.settings import StoreSettings
from tests.connector.serving import Frozen
from tests.stores.engine import Engine, save, store_in

TOKENS = [i * 7 % 1009 for i in range(40)]


class Loading:
    """A Loader of one thread over two engines' caches: a load's block ids say into which."""

    def __init__(self, path: Path, shutdown_seconds: float = 60) -> None:
        self.blobs = Frozen(path)
        self.store = store_in(self.blobs)
        save(self.store, TOKENS)
        self.match = self.store.lookup(TOKENS)
        assert self.match.num_tokens == len(TOKENS)
        self.engines, self.log, self.counts = [Engine(), Engine(seed=1)], list[str](), Counts()
        settings = StoreSettings(path=path, loader_threads=1, shutdown_seconds=shutdown_seconds)
        self.era = 0
        self.loader = Loader(
            {Scope(): self.store},
            settings,
            Boundary(self.log.append),
            self.counts,
            self._sections,
            era=lambda load: self.era,
        )

    def _sections(self, block_ids: BlockIds, num_tokens: int) -> list[Section]:
        return self.engines[block_ids[0][0]].sections()

    def start(self, engine: int, seconds: float | None = None) -> Load:
        """A load of request "r" into the cache of an engine, which is given up after `seconds`."""
        load = Load("r", Scope(), self.match, 0, len(TOKENS), ([engine],), False, seconds)
        self.loader.start(load)
        return load

    def end(self) -> Results:
        """What is reported when all that runs has ended."""
        self.blobs.answers.set()
        assert self.loader._workers.wait(60)
        return self.loader.take_results()


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Loading]:
    found = Loading(tmp_path)
    yield found
    found.blobs.answers.set()
    found.loader.shutdown()


def run_until_it_reads(loading: Loading) -> None:
    """Until the thread waits for the disk."""
    calls = loading.blobs.num_calls
    loading.blobs.answers.clear()
    loading.start(0)
    while loading.blobs.num_calls == calls:
        time.sleep(0.001)


def test_an_idle_step_waits_only_for_loads_that_run(loading: Loading) -> None:
    waits: list[float] = []
    loading.loader._load_is_over = SimpleNamespace(  # type: ignore[assignment]
        wait=waits.append, notify_all=lambda: None
    )
    loading.loader.wait(1)
    assert waits == []
    run_until_it_reads(loading)
    loading.loader.wait(2)
    assert waits == [2]
    loading.blobs.answers.set()
    assert loading.loader._workers.wait(60)
    loading.loader.wait(3)  # there is something to report
    assert waits == [2]


def test_an_idle_step_goes_on_as_soon_as_a_load_is_over(loading: Loading) -> None:
    run_until_it_reads(loading)
    threading.Timer(0.1, loading.blobs.answers.set).start()
    begin = time.monotonic()
    loading.loader.wait(60)
    assert time.monotonic() - begin < 30
    assert loading.loader.take_results().loaded == {"r"}


def test_the_end_of_a_cancelled_load_is_not_that_of_the_next_one(loading: Loading) -> None:
    run_until_it_reads(loading)
    loading.loader.cancel(["r"])
    loading.start(1)
    assert loading.loader.num_loading == 1
    assert loading.loader.take_results() == Results()
    assert loading.end() == Results(loaded={"r"})  # once, and not as failed
    loading.engines[1].check(TOKENS, 0, len(TOKENS))
    assert loading.log == []
    assert loading.counts.take()["loaded_tokens"] == len(TOKENS)


def test_both_loads_of_an_id_are_cancelled(loading: Loading) -> None:
    run_until_it_reads(loading)
    loading.loader.cancel(["r"])
    second = loading.start(1)
    loading.loader.cancel(["r"])  # drops the one that has not begun
    assert loading.loader.take_results() == Results({"r"}, [(second, 0)])
    assert loading.end() == Results()
    loading.engines[1].check(TOKENS, 0, 0)
    assert loading.log == []


def test_a_load_that_is_cancelled_ends_after_its_chunk(loading: Loading) -> None:
    run_until_it_reads(loading)
    loading.loader.cancel(["r"])
    results = loading.end()
    assert results.loaded == {"r"}
    ((load, first),) = results.failed
    assert (load.request_id, first < len(TOKENS)) == ("r", True)
    loading.engines[0].check(TOKENS, 0, first)
    assert loading.log == []  # nobody waits for it: nothing has failed


def test_a_shutdown_cancels_all_loads(loading: Loading) -> None:
    run_until_it_reads(loading)
    waiting = Load("s", Scope(), loading.match, 0, len(TOKENS), ([1],), wait=False)
    loading.loader.start(waiting)
    threading.Timer(0.1, loading.blobs.answers.set).start()
    loading.loader.shutdown()  # waits for the one that runs, which ends after its chunk
    results = loading.loader.take_results()
    assert results.loaded == {"r", "s"}
    (waited, (load, first)) = results.failed
    assert waited == (waiting, 0)
    assert (load.request_id, first < len(TOKENS)) == ("r", True)
    loading.engines[0].check(TOKENS, 0, first)
    loading.engines[1].check(TOKENS, 0, 0)
    assert loading.log == []


def test_a_shutdown_waits_no_longer_than_the_settings_say(tmp_path: Path) -> None:
    loading = Loading(tmp_path, shutdown_seconds=0.1)
    run_until_it_reads(loading)
    begin = time.monotonic()
    loading.loader.shutdown()
    assert time.monotonic() - begin < 30
    assert loading.loader.num_loading == 1
    assert loading.end().loaded == {"r"}


def test_nothing_counts_of_a_load_during_which_the_weights_change(loading: Loading) -> None:
    """Not the tokens that it has loaded either: they are those of the weights before."""
    load = loading.start(0)
    loading.blobs.answers.set()
    assert loading.loader._workers.wait(60)
    loading.engines[0].check(TOKENS, 0, len(TOKENS))
    loading.era += 1
    assert loading.loader.take_results() == Results({"r"}, [(load, 0)])
    (line,) = loading.log
    assert line.endswith(
        "could not load request r: the model's weights or its adapter changed while it ran"
    )


def test_a_load_that_a_step_waits_for_is_over_when_it_returns(loading: Loading) -> None:
    """It is reported only if it has failed: the engine waits for no other end of it."""
    loading.blobs.answers.set()
    load = Load("r", Scope(), loading.match, 0, len(TOKENS), ([0],), wait=True)
    assert loading.loader.load(load) is True
    assert loading.loader.take_results() == Results()
    loading.engines[0].check(TOKENS, 0, len(TOKENS))
    for path in loading.blobs.root.rglob("*.safetensors"):
        path.unlink()
    assert loading.loader.load(load) is False
    assert loading.loader.take_results() == Results(set(), [(load, 0)])


def test_a_load_that_cannot_be_started_has_failed(loading: Loading) -> None:
    loading.loader.shutdown()
    load = loading.start(0)
    assert loading.loader.num_loading == 0
    assert loading.loader.take_results() == Results({"r"}, [(load, 0)])
    loading.engines[0].check(TOKENS, 0, 0)
    (line,) = loading.log
    assert line.startswith("KVX could not load request r: the threads have been shut down")


@pytest.mark.parametrize("wait", [False, True])
def test_a_load_that_is_refused_has_failed(wait: bool, loading: Loading) -> None:
    """An engine treats as good what is not reported, and reads blocks that nobody has filled."""
    load = Load("r", Scope(), loading.match, 16, len(TOKENS), ([0],), wait=wait)
    loading.loader.refuse(load, "as a test says")
    assert loading.loader.take_results() == Results(set() if wait else {"r"}, [(load, 16)])
    (line,) = loading.log
    assert line.endswith("could not load request r: as a test says")


def test_a_load_that_is_planned_to_fail_touches_no_block(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may prepare its blocks when it describes them."""
    monkeypatch.setattr(loading.loader, "_sections", lambda *_: pytest.fail("it was prepared"))
    load = Load("r", Scope(), NOTHING, 0, len(TOKENS), ([0],), wait=False)
    loading.loader.start(load)
    assert loading.end() == Results(loaded={"r"}, failed=[(load, 0)])
    assert "tokens 0 to 40 are to be loaded, expected at most 0" in loading.log[0]


def test_a_load_that_takes_too_long_is_given_up(loading: Loading) -> None:
    """It is reported at once, and writes nothing any more, also when the store answers later."""
    loading.blobs.answers.clear()
    load = loading.start(1, seconds=0.1)
    begun = time.monotonic()
    while not (results := loading.loader.take_results()).failed:
        assert time.monotonic() - begun < 10
        time.sleep(0.01)
    assert time.monotonic() - begun >= 0.1
    assert results.failed == [(load, 0)]
    assert results.loaded == {"r"}
    before = [tensor.clone() for tensor in loading.engines[1].cache.storages]
    late = loading.end()
    assert not late.failed
    assert not late.loaded
    for tensor, held in zip(loading.engines[1].cache.storages, before, strict=True):
        assert tensor.equal(held)
    assert not loading.log
    loading.start(1, seconds=60)
    assert loading.end().loaded == {"r"}
    loading.engines[1].check(TOKENS, 0, len(TOKENS))


def test_a_load_that_waits_for_its_turn_is_given_up_too(loading: Loading) -> None:
    loading.blobs.answers.clear()
    loading.start(0)
    load = Load("s", Scope(), loading.match, 0, len(TOKENS), ([1],), False, 0.05)
    loading.loader.start(load)
    begun = time.monotonic()
    while not (results := loading.loader.take_results()).failed:
        assert time.monotonic() - begun < 10
        time.sleep(0.01)
    assert results.failed == [(load, 0)]
    assert loading.end().loaded == {"r"}
    loading.engines[0].check(TOKENS, 0, len(TOKENS))
