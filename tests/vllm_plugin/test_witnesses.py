"""What counts as a change of weights, on a worker that a test has made: one process, no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvx_core.connector.weights import AsRanksSay, Files, Unknown, Weights

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


class Engine:
    """A worker whose methods do what the test says, and the weights that KVX sees of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvx_adapters.vllm_plugin import witnesses

        class Worker:
            def __init__(worker, vllm_config: Any) -> None:
                worker.vllm_config = vllm_config

            def run(worker, *arguments: Any, **keywords: Any) -> None:
                self.does()

        class Model:
            def load_weights(self) -> None:
                pass

        for name in witnesses._WORKER_METHODS:
            setattr(Worker, name, lambda worker, *a, **k: worker.run(*a, **k))
        monkeypatch.setattr(witnesses, "resolve_obj_by_qualname", lambda name: Worker)
        monkeypatch.setattr(
            "vllm.model_executor.model_loader.utils.get_model_architecture",
            lambda config: (Model, "Model"),
        )
        config = SimpleNamespace(
            cache_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(worker_cls="a worker"),
            model_config=SimpleNamespace(model="none", revision=None, model_weights=""),
        )
        self.weights: Weights = witnesses.weights_of(config, in_worker=True)
        self.worker: Any = Worker(config)
        self.model = Model()
        self.does: Callable[[], object] = lambda: None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


@contextmanager
def propagating(name: str) -> Iterator[None]:
    """vLLM's logger keeps its records to itself."""
    logger = logging.getLogger(name)
    before, logger.propagate = logger.propagate, True
    yield
    logger.propagate = before


def fail() -> None:
    raise RuntimeError("as a test says")


@pytest.mark.parametrize("name", ["update_weights", "finish_weight_update"])
def test_an_update_in_several_calls_that_fails_is_over(name: str, engine: Engine) -> None:
    engine.worker.start_weight_update()
    assert engine.weights.is_changing
    engine.worker.update_weights()
    assert engine.weights.is_changing
    engine.does = fail
    with pytest.raises(RuntimeError, match="as a test says"):
        getattr(engine.worker, name)()
    assert not engine.weights.is_changing
    assert (engine.weights.generation, engine.weights.origin) == (1, Unknown())
    assert not engine.weights.is_lost


def test_an_update_in_several_calls_is_one_change(engine: Engine) -> None:
    for name in ("start_weight_update", "update_weights", "update_weights"):
        getattr(engine.worker, name)()
        assert engine.weights.is_changing
    engine.worker.finish_weight_update()
    assert (engine.weights.is_changing, engine.weights.generation) == (False, 1)


def test_a_model_that_a_user_loads_by_hand_has_changed(engine: Engine) -> None:
    engine.model.load_weights()
    assert (engine.weights.generation, engine.weights.origin) == (1, Unknown())


@pytest.mark.parametrize("by_hand", [False, True])
def test_weights_come_from_what_was_loaded_last(
    by_hand: bool, engine: Engine, tmp_path: Path
) -> None:
    """What a user loads into the model by hand is in no files, though what was before it is."""
    engine.worker.start_weight_update()
    engine.worker.reload_weights(weights_path=str(tmp_path))
    if by_hand:
        engine.model.load_weights()
    assert isinstance(engine.weights.origin, Unknown if by_hand else Files)


@pytest.mark.parametrize(
    ("streamed", "keywords", "are_known"),
    [
        ("", {}, True),
        ("s3://elsewhere", {}, False),
        ("", {"weights_iterator": iter([])}, False),
        ("", {"is_checkpoint_format": False}, False),
    ],
)
def test_weights_that_are_loaded_again_from_where_they_came(
    streamed: str, keywords: dict[str, Any], are_known: bool, engine: Engine, tmp_path: Path
) -> None:
    config = engine.worker.vllm_config.model_config
    config.model, config.revision, config.model_weights = str(tmp_path), "main", streamed
    engine.worker.reload_weights(**keywords)
    found = engine.weights.origin
    if are_known:
        assert isinstance(found, Files)
        assert (found.model, found.revision) == (str(tmp_path), "main")
    else:
        assert found == Unknown()


@pytest.mark.parametrize(
    ("name", "arguments", "keywords", "counts"),
    [
        ("sleep", (), {}, False),
        ("sleep", (1,), {}, False),
        ("sleep", (), {"level": 1}, False),
        ("sleep", (2,), {}, True),
        ("sleep", (), {"level": 2}, True),
        ("discard", (), {}, True),
        ("discard", (["kv_cache"],), {}, False),
        ("discard", (["kv_cache", "weights"],), {}, True),
        ("discard", (), {"tags": ["kv_cache"]}, False),
    ],
)
def test_what_drops_weights(
    name: str, arguments: Any, keywords: dict[str, Any], counts: bool, engine: Engine
) -> None:
    getattr(engine.worker, name)(*arguments, **keywords)
    assert engine.weights.generation == counts


def test_a_reset_counts_if_it_has_succeeded(engine: Engine) -> None:
    """While requests have blocks vLLM drops none, and says so."""
    from kvx_adapters.vllm_plugin import witnesses

    class Scheduler:
        vllm_config = engine.worker.vllm_config

        def reset_prefix_cache(self, succeeds: bool) -> bool:
            return succeeds

    witnesses._wrap(Scheduler, "reset_prefix_cache", witnesses._reset_prefix_cache)
    for succeeds, num_resets in ((False, 0), (True, 1), (False, 1)):
        assert Scheduler().reset_prefix_cache(succeeds) is succeeds
        assert engine.weights.num_resets == num_resets


# ---- the engine's process ----


class Core:
    """An engine core and its executor, whose calls do what the test says."""

    def __init__(self, engine: Engine) -> None:
        from kvx_adapters.vllm_plugin import witnesses

        class Executor:
            vllm_config = engine.worker.vllm_config

            def collective_rpc(called, method: Any, *arguments: Any) -> None:
                self.during.append(engine.weights.is_changing)
                self.then()

        class EngineCore:
            vllm_config = engine.worker.vllm_config

            def collective_rpc(called, method: Any, *arguments: Any) -> None:
                self.executor.collective_rpc(method, *arguments)

            def set_weight_version(called, weight_version: Any) -> None:
                self.then()

        witnesses._wrap(EngineCore, "collective_rpc", witnesses._collective_rpc)
        witnesses._wrap(EngineCore, "set_weight_version", witnesses._set_weight_version)
        witnesses._wrap(Executor, "collective_rpc", witnesses._executor_rpc)
        self.core, self.executor = EngineCore(), Executor()
        self.during: list[Any] = []
        self.then: Callable[[], object] = lambda: None


def reset_all(worker: Any) -> None:
    """What a user may send to all workers."""


@pytest.mark.parametrize(
    ("method", "origin", "name"),
    [
        ("check_health", None, ""),
        ("reload_weights", AsRanksSay(), ""),
        ("reset_all", Unknown(), "reset_all"),
        (reset_all, Unknown(), "reset_all"),
        (partial(reset_all, None), Unknown(), "a callable"),
    ],
)
def test_what_users_send_to_all_workers(
    method: Any, origin: Any, name: str, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Core(engine)
    with caplog.at_level("INFO", logger="vllm.kvx"), propagating("vllm"):
        calls.core.collective_rpc(method)
    counts = origin is not None
    assert calls.during == [counts]
    assert (engine.weights.is_changing, engine.weights.generation) == (False, counts)
    assert engine.weights.origin == (origin or AsRanksSay())
    said = {f"KVX: collective_rpc of {name} counts as a change of weights"} if name else set()
    assert {record.getMessage() for record in caplog.records} == said  # by one handler or two


@pytest.mark.parametrize(("method", "counts"), [("reset_all", 0), (reset_all, 1)])
def test_what_users_send_by_the_executor(method: Any, counts: int, engine: Engine) -> None:
    """vLLM itself sends names of methods only, and what it sends within a change belongs to it."""
    calls = Core(engine)
    calls.executor.collective_rpc(method)
    assert engine.weights.generation == counts
    assert engine.weights.origin == (Unknown() if counts else AsRanksSay())
    engine.does = lambda: calls.executor.collective_rpc(method)
    engine.worker.update_weights()
    assert engine.weights.generation == counts + 1


def test_calls_of_an_engine_that_nobody_watches(engine: Engine) -> None:
    calls = Core(engine)
    for one in (calls.core, calls.executor):
        one.vllm_config = SimpleNamespace(cache_config=SimpleNamespace())
    calls.core.collective_rpc(reset_all)
    calls.core.set_weight_version("two")
    assert (engine.weights.generation, engine.weights.said) == (0, None)


def test_a_name_is_that_of_the_weights_that_are_there_then(engine: Engine) -> None:
    calls = Core(engine)
    engine.worker.update_weights()
    calls.then = lambda: calls.during.append(engine.weights.said)
    calls.core.set_weight_version(7)
    assert calls.during == [None]  # not before vLLM has taken it
    assert engine.weights.said == ("7", 1)


def test_nothing_is_shared_after_a_call_that_could_not_be_watched(engine: Engine) -> None:
    from kvx_adapters.vllm_plugin import witnesses

    assert not engine.weights.is_lost
    witnesses._give_up(ValueError("as a test says"))
    assert engine.weights.is_lost


@pytest.mark.parametrize("when", ["before", "while they are loaded"])
def test_files_that_change(when: str, engine: Engine, tmp_path: Path) -> None:
    """Nobody knows which of their weights the engine has, if they change while it loads them."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    change = lambda: file.write_bytes(b"other")  # noqa: E731
    if when == "before":
        change()
    else:
        engine.does = change
    engine.worker.reload_weights(weights_path=str(tmp_path))
    found = engine.weights.origin
    if when == "before":
        assert isinstance(found, Files)
        assert (found.model, found.revision) == (str(tmp_path), None)
    else:
        assert found == Unknown()
