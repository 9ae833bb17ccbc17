"""A third engine on the connector's engine-free half: the same tokens, whatever the store does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvx_core import Directory
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import Precision
from tests.connector import toy_connector
from tests.connector.serving import F32, Frozen, Serve, alone, prompt, store_in, written
from tests.connector.toy_engine import Engine, Request
from tests.store_files import entry_files, tokens_of


def test_the_connector_is_short() -> None:
    assert len(Path(toy_connector.__file__).read_text().splitlines()) < 150


def test_the_same_tokens_with_and_without() -> None:
    tokens = prompt(50, 0)
    assert len(set(map(tuple, (alone(tokens), alone(tokens[1:]), alone(prompt(50, 1)))))) == 3


@pytest.mark.parametrize("num_tokens", [5, 16, 33, 70])
def test_what_one_engine_stores_another_loads(serve: Serve, num_tokens: int) -> None:
    tokens = prompt(num_tokens, 2)
    expected = alone(tokens, 20)
    first = serve()
    assert first.ask(tokens, 20).answer == expected
    written(first)
    request = serve().ask(tokens, 20)
    assert request.answer == expected
    assert request.num_computed_here == 1 + 19  # the last of the prompt, and the answer
    other = tokens[: num_tokens - 2] + prompt(30, 3)  # exact to the token
    request = serve().ask(other)
    assert request.answer == alone(other)
    loaded = num_tokens - 2 if num_tokens > 5 else 0
    assert request.num_computed_here == len(other) - loaded + 7


def test_requests_beside_each_other(serve: Serve) -> None:
    """And a conversation that goes on from what was generated."""
    prompts = [prompt(40, 4), prompt(40, 4)[:30] + prompt(20, 5), prompt(9, 6)]
    engine = serve()
    requests = [engine.add(tokens, 14) for tokens in prompts]
    engine.finish_all()
    for request, tokens in zip(requests, prompts, strict=True):
        assert request.answer == alone(tokens, 14)
    written(engine)
    longer = requests[0].all_token_ids + prompt(5, 7)
    request = engine.ask(longer)
    assert request.answer == alone(longer)
    assert request.num_computed_here == 5 + 1 + 7  # the last of the answer was never computed
    assert sorted(engine.free) == list(range(1, 200))
    assert engine.connector.policy._tracked == engine.connector.policy._chains == {}


@pytest.mark.parametrize("is_planned", [False, True])
def test_weights_change_between_a_lookup_and_its_load(serve: Serve, is_planned: bool) -> None:
    """What the old weights have computed is neither found nor, once it is planned, loaded."""
    tokens = prompt(40, 17)
    engine = serve()
    engine.ask(tokens)
    written(engine)
    request = engine.add(tokens)
    while engine.connector.policy.lookup(request, 0) is None:
        time.sleep(0.001)
    if is_planned:
        engine._admit(engine.waiting.popleft())
        assert engine.connector.policy._next.loads
    other = Engine()
    for decoder in (engine.decoder, other.decoder):
        with engine.connector.weights.change():
            decoder.weights[0] = decoder.weights[0].flip(1)
    assert other.ask(tokens).answer != alone(tokens)
    engine.finish_all()
    assert request.answer == other.ask(tokens).answer
    assert request.num_computed_here == 40 + 7


def test_what_a_lookup_has_found_is_not_saved_again(serve: Serve) -> None:
    """Not even copied: loaded, or too little to be loaded."""
    tokens = prompt(37, 13)
    first = serve()
    first.ask(tokens)
    written(first)
    for min_tokens in (4, 40):
        engine = serve(fresh_seconds=0, min_tokens=min_tokens)
        assert engine.ask(tokens, 1).answer == alone(tokens, 1)
        assert engine.connector.counts.take().get("saved_tokens", 0) == 0


def test_precise_values_are_saved_beside_coarser_ones(serve: Serve, tmp_path: Path) -> None:
    """Where a lookup has found coarser ones, too few to be loaded."""
    tokens = prompt(37, 16)
    blobs = Directory(tmp_path / "store")
    coarse = serve(store_in(blobs, precision=Precision.of("bfloat16")))
    coarse.ask(tokens, 1)
    written(coarse)
    assert store_in(blobs).lookup(tokens).num_tokens == 0
    engine = serve(accept="lossy", min_tokens=40)
    assert engine.ask(tokens, 1).num_computed_here == 37
    written(engine)
    assert store_in(blobs).lookup(tokens).num_tokens == 37


def test_what_waits_to_be_written_is_not_copied_again(serve: Serve, tmp_path: Path) -> None:
    blobs = Frozen(tmp_path / "store")
    engine = serve(store_in(blobs), lookup_seconds=0)
    blobs.answers.clear()
    for expected in (32, 0, 0):
        engine.ask(prompt(32, 14), 1)
        assert engine.connector.counts.take().get("saved_tokens", 0) == expected
    blobs.answers.set()
    written(engine)
    assert len(list((tmp_path / "store").rglob("*.safetensors"))) == 2


def test_what_could_not_be_written_is_copied_again(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = Frozen(tmp_path / "store")
    engine = serve(store_in(blobs))
    with monkeypatch.context() as full:
        full.setattr(blobs, "put", lambda *_: 1 // 0)
        engine.ask(prompt(32, 16), 1)
        written(engine)
    engine.connector.counts.take()
    engine.ask(prompt(32, 16), 1)
    assert engine.connector.counts.take()["saved_tokens"] == 32


def chunks_of(store: Path, tokens: list[int]) -> list[Path]:
    """The files of a prompt, in the order of its tokens."""
    found = {}
    for path in entry_files(store):
        held = tokens_of(path)
        for start in range(0, len(tokens), 16):
            if held == tokens[start : start + 16]:
                found[start] = path
    return [path for _, path in sorted(found.items())]


def test_all_bad_chunks_are_found_and_stored_again_at_once(serve: Serve, tmp_path: Path) -> None:
    tokens = prompt(80, 8)
    expected = alone(tokens)
    first = serve()
    first.ask(tokens)
    written(first)
    files = chunks_of(tmp_path / "store", tokens)
    assert len(files) == 5
    good = [path.read_bytes() for path in files]
    for path in (files[1], files[3], files[4]):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    engine = serve()
    request = engine.ask(tokens)
    assert request.answer == expected
    assert request.num_computed_here == 80 - 16 + 7  # the chunk before the first bad one is used
    written(engine)
    assert [path.read_bytes() for path in files] == good
    assert engine.ask(tokens).num_computed_here == 1 + 7
    assert serve().ask(tokens).num_computed_here == 1 + 7


@pytest.mark.parametrize(("first", "own", "limit"), [(9000, None, 9000), (9000, 5000, 5000)])
def test_the_limit_of_a_store_is_that_of_the_engine_that_made_it(
    first: int, own: int | None, limit: int, tmp_path: Path
) -> None:
    """Unless an engine has one of its own."""
    model = {"fingerprint": "m", "num_layers": 1, "total_kv_heads": 1, "precision": F32}
    for max_bytes in (first, own):
        store = StoreSettings(path=tmp_path / "store", max_bytes=max_bytes).store(**model)
        directory: Any = store._blobs
    assert directory.max_bytes == limit


def run_until(engine: Engine, request: Request) -> float:
    """Steps until a request has ended; the longest step in seconds of this thread."""
    longest = 0.0
    while len(request.answer) < request.max_tokens:
        begin = time.monotonic()
        engine.step()
        longest = max(longest, time.monotonic() - begin)
    return longest


def test_a_frozen_store_costs_a_running_request_nothing(serve: Serve, tmp_path: Path) -> None:
    """Nor does it keep others from being computed, nor the engine from ending."""
    blobs = Frozen(tmp_path / "store")
    engine = serve(store_in(blobs), lookup_seconds=0.2, shutdown_seconds=0.2)
    stored = prompt(40, 9)
    engine.ask(stored)
    written(engine)
    running = engine.add(prompt(20, 10), 60)
    for _ in range(5):
        engine.step()
    blobs.answers.clear()
    unknown = engine.add(prompt(40, 11))
    assert run_until(engine, running) < 10  # and not for ever
    assert run_until(engine, unknown) < 10  # and not for ever
    later = engine.add(prompt(40, 12))  # nothing is asked any more
    begin = time.monotonic()
    run_until(engine, later)
    assert time.monotonic() - begin < 10  # and not for ever
    assert [running.answer, unknown.answer, later.answer] == [
        alone(prompt(20, 10), 60),
        alone(prompt(40, 11)),
        alone(prompt(40, 12)),
    ]
    begin = time.monotonic()
    engine.connector.shutdown()
    assert time.monotonic() - begin < 2
    blobs.answers.set()


def test_aborted_loads_make_way(serve: Serve, tmp_path: Path) -> None:
    """A live request does not wait behind the loads of requests that are gone."""
    prompts = [prompt(40, 20 + i) for i in range(6)]
    first = serve()
    for tokens in prompts:
        first.ask(tokens)
    written(first)
    blobs = Frozen(tmp_path / "store")
    engine = serve(store_in(blobs), loader_threads=1)
    requests = [engine.add(tokens) for tokens in prompts]
    while any(engine.connector.policy.lookup(r, 0) is None for r in requests):
        time.sleep(0.001)
    blobs.answers.clear()
    engine.step()  # all loads begin
    assert len(engine.loading) == 6
    for request in requests[:5]:
        engine.abort(request)
    engine.step()
    assert len(engine.loading) <= 2  # one may have been under way
    calls = blobs.num_calls
    blobs.answers.set()
    run_until(engine, requests[5])
    assert requests[5].answer == alone(prompts[5])
    assert blobs.num_calls - calls <= 3 + 3  # files of a cancelled load and of the live one
    engine.finish_all()
    assert sorted(engine.free) == list(range(1, 200))
