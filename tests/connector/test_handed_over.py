"""Running requests of the toy engine that are stored to the token, for another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import StoreError
from kvx_core.stores.prefix import PrefixStore
from tests.connector.serving import alone, prompt
from tests.connector.toy_connector import ToyConnector
from tests.connector.toy_engine import Engine, Request

Serve = Callable[[], Engine]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def serve(store: Path) -> Iterator[Serve]:
    """Starts engines on one store."""
    connectors: list[ToyConnector] = []

    def start() -> Engine:
        engine = Engine()
        settings = StoreSettings(path=store, min_tokens=1, fresh_seconds=0)
        engine.connector = ToyConnector(engine, settings)
        connectors.append(engine.connector)
        return engine

    yield start
    for connector in connectors:
        connector.shutdown()


def hand_over(engine: Engine, request: Request) -> bool:
    """Whether all was stored; the request ends."""
    connector = engine.connector
    save = connector.policy.handed_over(request.request_id, request.num_computed_tokens)
    stored = save is not None and connector.saver.save_now(save)
    engine.abort(request)
    return stored


@pytest.mark.parametrize("num_tokens", [5, 16, 33, 70])
@pytest.mark.parametrize("said", [1, 2, 12])
def test_the_other_engine_computes_one_token(serve: Serve, num_tokens: int, said: int) -> None:
    tokens, first, second = prompt(num_tokens, 40), serve(), serve()
    request = first.add(tokens, 20)
    while len(request.answer) < said:
        first.step()
    assert hand_over(first, request)
    assert first.connector.saver._writer.threads.wait(0)  # nothing waits to be written
    assert sorted(first.free) == list(range(1, 200))
    after = second.ask(request.all_token_ids, 20 - said)
    assert request.answer + after.answer == alone(tokens, 20)
    assert after.num_computed_here == 1 + 20 - said - 1


def test_what_others_have_deleted_is_saved_again(serve: Serve, store: Path) -> None:
    """An engine that never looks up takes it for stored once, and asks the disk afterwards."""
    engine, found = serve(), []
    engine.connector.policy.consumes = False
    for _ in range(3):
        engine.ask(prompt(32, 46), 2)
        assert engine.connector.saver._writer.threads.wait(60)
        found.append(len(list(store.rglob("*.safetensors"))))
        for path in store.rglob("*.safetensors"):
            path.unlink()
    assert found == [3, 0, 3]


def test_several_chunks_are_handed_over_at_once(serve: Serve) -> None:
    engine = serve()
    saver = engine.connector.saver
    saver.save = lambda *_: None  # steps store nothing
    request = engine.add(prompt(70, 45), 20)
    while not request.answer:
        engine.step()
    policy = engine.connector.policy
    policy.reported((), (), blocks=True)  # as if another connector had filled some
    save = policy.handed_over(request.request_id, request.num_computed_tokens)
    assert save is not None
    assert (save.start, save.stop) == (0, 70)
    assert not saver._has(save)
    engine.connector.counts.take()
    assert saver.save_now(save)
    counts = engine.connector.counts.take()
    assert counts["saved_tokens"] == 70
    assert 0 < counts["save_seconds"] < 60
    assert saver._has(save)
    assert not saver._has(replace(save, tokens=save.tokens + 1))


def test_what_is_stored_already_is_not_stored_again(serve: Serve, store: Path) -> None:
    tokens, engine = prompt(33, 41), serve()
    request = engine.add(tokens, 20)
    while not request.answer:
        engine.step()
    assert engine.connector.saver._writer.threads.wait(60)
    files = sorted(store.rglob("*.safetensors"))
    assert hand_over(engine, request)
    assert sorted(store.rglob("*.safetensors")) == files


def test_blocks_that_are_being_loaded_are_not_stored(serve: Serve) -> None:
    """The engine counts their tokens as computed, and nobody has written them."""
    tokens, first, second = prompt(70, 42), serve(), serve()
    first.ask(tokens, 8)
    assert first.connector.saver._writer.threads.wait(60)
    loader = second.connector.loader
    loader.start = lambda load: None  # it never begins
    request = second.add(tokens, 8)
    while request.request_id not in second.loading:
        second.step()
    assert request.num_computed_tokens == 69
    policy = second.connector.policy
    assert policy.handed_over(request.request_id, request.num_computed_tokens) is None


def test_an_unknown_request_and_one_that_older_weights_have_computed(serve: Serve) -> None:
    engine = serve()
    request = engine.add(prompt(33, 43), 20)
    assert not hand_over(engine, request)  # not begun: there is nothing
    request = engine.add(prompt(33, 43), 20)
    while not request.answer:
        engine.step()
    with engine.connector.weights.change():
        pass
    engine.connector.policy.look_at_weights()
    assert not hand_over(engine, request)


def test_a_store_that_takes_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, first, second = prompt(70, 44), serve(), serve()
    request = first.add(tokens, 20)
    while len(request.answer) < 3:
        first.step()

    def commit(store: PrefixStore, snapshots: list[object]) -> list[StoreError]:
        return [StoreError("no space is left, as a test says")] * len(snapshots)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "commit_all", commit)
        assert not hand_over(first, request)
    after = second.ask(request.all_token_ids, 17)
    assert request.answer + after.answer == alone(tokens, 20)
