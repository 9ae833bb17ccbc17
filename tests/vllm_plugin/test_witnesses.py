"""What counts as a change of weights, on a worker that a test has made: one process, no model."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvx_core.connector.weights import Files, Unknown, Weights

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
