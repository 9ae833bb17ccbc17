"""Epochs: what keys call an engine's weights while they are replaced, and what its ranks say."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.epochs import Epochs
from kvx_core.connector.plan import Scope
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.weights import AsRanksSay, Files, Report, Unknown, Weights
from kvx_core.snapshot import Precision

OTHER = Files("/models/other", None, "as it was")


class Engine:
    """Ranks in processes of their own, and the scheduler's half."""

    def __init__(self, num_ranks: int = 2, **options: Any) -> None:
        self.here = Weights()
        self.ranks = [Weights() for _ in range(num_ranks)]
        self.lines: list[str] = []
        self.epochs = Epochs(
            self.here,
            num_ranks,
            log=self.lines.append,
            boundary=Boundary(self.lines.append),
            **options,
        )

    def call(self, origin: Any = None, *, ranks: Any = None) -> None:
        """A call of all ranks that replaces weights."""
        with self.here.change():
            self.here.came_from(AsRanksSay())
            for rank in self.ranks if ranks is None else ranks:
                with rank.change():
                    rank.came_from(origin or Unknown())

    def report(self, *ranks: int) -> None:
        self.epochs.take(
            {
                rank: Report(self.here.generation, w.generation, w.is_changing, w.origin)
                for rank, w in enumerate(self.ranks)
                if rank in ranks or not ranks
            }
        )

    @property
    def name(self) -> str | None:
        epoch = self.epochs.current()
        return None if epoch is None else epoch.name


def test_nothing_changes() -> None:
    engine = Engine()
    first = engine.epochs.current()
    assert first is engine.epochs.current()
    assert engine.name == ""
    assert engine.lines == []


def test_nothing_has_a_name_until_all_ranks_have_reported() -> None:
    engine = Engine()
    engine.call()
    assert engine.name is None
    engine.report(0)
    assert engine.name is None
    told = "the weights change: nothing is shared until all ranks have new ones"
    assert engine.lines == [told]  # however often somebody asks
    engine.report(1)
    name = engine.name
    assert name is not None
    assert name.startswith("random:")
    assert engine.lines[1:] == [f"prefixes are shared under new keys from now on: weights {name}"]
    assert engine.name == name  # until the next change
    engine.call()
    assert engine.name is None
    assert engine.lines[2:] == [told]
    engine.report()
    assert engine.name not in ("", name, None)


def test_a_rank_that_is_late_or_has_missed_a_change() -> None:
    engine = Engine()
    engine.call(ranks=engine.ranks[:1])
    engine.report()
    assert engine.name is None
    with engine.ranks[1].change():
        engine.report()
        assert engine.name is None
    engine.report()
    assert engine.name is not None


def test_a_report_of_before_the_change_counts_for_nothing() -> None:
    """Steps that were under way report afterwards."""
    engine = Engine()
    engine.call()
    engine.report()
    before = engine.name
    late = {rank: Report(1, 1, False, Unknown()) for rank in range(2)}
    engine.call()
    engine.epochs.take(late)
    assert engine.name is None
    engine.report()
    assert engine.name not in (None, before)


def test_a_change_that_only_ranks_have_seen() -> None:
    """A thread of a worker's extension, say."""
    engine = Engine()
    for rank in engine.ranks:
        with rank.change():
            rank.came_from(Unknown())
    assert engine.name == ""  # ranks refuse its plans
    engine.report()
    assert (engine.name or "").startswith("random:")


def test_an_update_in_several_calls_is_one_change() -> None:
    engine = Engine(1)
    engine.call()
    engine.ranks[0].hold(True)
    for _ in range(3):
        engine.call()
        engine.report()
        assert engine.name is None
    engine.ranks[0].hold(False)
    assert engine.ranks[0].generation == 1
    engine.report()
    assert engine.name is not None


@pytest.mark.parametrize("found", ["files:b", "", None, OSError("gone")])
def test_files_are_read_in_a_thread(found: Any) -> None:
    goes_on = threading.Event()

    def name_files(files: Files) -> str | None:
        assert files == OTHER
        assert goes_on.wait(60)
        if isinstance(found, OSError):
            raise found
        return found

    engine = Engine(name_files=name_files)
    engine.call(OTHER)
    engine.report()
    assert engine.name is None
    goes_on.set()
    assert engine.epochs._workers is not None
    assert engine.epochs._workers.wait(60)
    assert engine.name == found if isinstance(found, str) else "random:" in str(engine.name)
    assert any("gone" in line for line in engine.lines) == isinstance(found, OSError)


def test_the_same_files_loaded_again_are_said_again() -> None:
    """The name is the same; what was computed in between may not be shared."""
    engine = Engine(name_files=lambda files: "files:b")
    for count in (1, 2):
        engine.call(OTHER)
        engine.report()
        assert engine.name is None
        assert engine.epochs._workers is not None
        assert engine.epochs._workers.wait(60)
        assert engine.name == "files:b"
        said = [line for line in engine.lines if line.endswith("from now on: weights files:b")]
        assert len(said) == count
        assert engine.epochs.current() is engine.epochs.current()


@pytest.mark.parametrize("other", [Unknown(), Files("/models/third", None, "as it was")])
def test_files_that_not_all_ranks_have_loaded(other: Any) -> None:
    engine = Engine(name_files=lambda files: "files:b")
    with engine.here.change():
        engine.here.came_from(AsRanksSay())
        for rank, origin in zip(engine.ranks, (OTHER, other), strict=True):
            with rank.change():
                rank.came_from(origin)
    engine.report()
    assert "random:" in str(engine.name)


def test_files_that_are_read_while_weights_change_again() -> None:
    name_files = threading.Event()
    engine = Engine(name_files=lambda files: "files:b" if name_files.wait(60) else None)
    engine.call(OTHER)
    engine.report()
    assert engine.name is None
    engine.call()
    engine.report()
    name_files.set()
    assert engine.epochs._workers is not None
    assert engine.epochs._workers.wait(60)
    assert "random:" in str(engine.name)


def test_an_update_that_fails_leaves_weights_that_nobody_knows() -> None:
    engine = Engine(1, name_files=lambda files: "files:b")

    def fail() -> None:
        with engine.here.change():
            engine.here.came_from(AsRanksSay())
            with engine.ranks[0].change():
                engine.ranks[0].came_from(OTHER)
                raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    engine.report()
    assert "random:" in str(engine.name)


def test_a_change_that_says_nothing_of_files_is_of_none() -> None:
    """Though the one before it came from files."""
    engine = Engine(1, name_files=lambda files: "files:b")
    engine.call(OTHER)
    with engine.here.change(), engine.ranks[0].change():
        engine.here.came_from(AsRanksSay())
    engine.report()
    assert "random:" in str(engine.name)


def test_names_that_the_user_gives() -> None:
    engine = Engine(trusts_said=True)
    engine.here.say("v0")
    assert engine.name == ""  # files name them
    engine.call()
    engine.report()
    assert "random:" in str(engine.name)  # v0 were others
    engine.here.say("v1")
    assert engine.name == "said:v1"
    engine.call()
    engine.here.say("v2")
    assert engine.name is None
    engine.report()
    assert engine.name == "said:v2"
    for rank in engine.ranks:  # and nobody has named them
        with rank.change():
            rank.came_from(Unknown())
    engine.report()
    assert "random:" in str(engine.name)


def test_a_name_of_before_the_change_is_not_that_of_what_follows() -> None:
    """Also if no step has asked for it in between."""
    engine = Engine(trusts_said=True)
    engine.here.say("v0")
    engine.call()
    engine.report()
    assert "random:" in str(engine.name)


def test_names_do_not_count_unless_the_user_promises_what_they_mean() -> None:
    engine = Engine()
    engine.call()
    engine.here.say("v1")
    engine.report()
    assert "random:" in str(engine.name)


def test_two_engines_give_the_same_names_by_chance_only() -> None:
    names = set()
    for _ in range(3):
        engine = Engine(1)
        engine.call()
        engine.report()
        names.add(engine.name)
    assert len(names) == 3


def test_blocks_that_the_engine_keeps() -> None:
    engine = Engine(1)
    assert engine.epochs.has_current_blocks()
    engine.epochs.step_computes()
    assert engine.epochs.has_current_blocks()
    engine.call()
    engine.report()
    assert not engine.epochs.has_current_blocks()
    engine.epochs.step_computes()  # more of them, beside those that are older
    assert not engine.epochs.has_current_blocks()
    engine.here.num_resets += 1
    assert engine.epochs.has_current_blocks()
    engine.epochs.step_computes()
    assert engine.epochs.has_current_blocks()
    engine.here.num_resets += 1
    engine.call()  # nothing was computed in between
    engine.report()
    assert engine.epochs.has_current_blocks()


@pytest.mark.parametrize("name", ["", "said:v1", "random:1"])
def test_models_share_nothing_though_their_weights_have_one_name(name: str, tmp_path: Path) -> None:
    spaces = set()
    for fingerprint in ("one", "other"):
        store = StoreSettings(path=tmp_path).store(
            fingerprint=fingerprint,
            num_layers=2,
            total_kv_heads=2,
            precision=Precision.of("float32"),
        )
        stores = Scoped(store)
        found = [stores[Scope(salt, name)] for salt in ("", "a")]
        spaces |= {each.nodes([])[0] for each in found}
        # Chunks of one store are written together.
        assert [stores[Scope(salt, name)] for salt in ("", "a")] == found
    assert len(spaces) == 4


def test_a_change_has_loaded_nothing_that_is_known_until_it_says_so() -> None:
    weights = Weights(origin=OTHER)
    with weights.change():
        assert (weights.generation, weights.is_changing, weights.origin) == (1, True, Unknown())
        weights.came_from(OTHER)
        with weights.change():  # a part of it
            assert (weights.generation, weights.origin) == (1, OTHER)
    assert (weights.is_changing, weights.origin) == (False, OTHER)

    def fail() -> None:
        with weights.change():
            weights.came_from(OTHER)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert (weights.generation, weights.is_changing, weights.origin) == (2, False, Unknown())
