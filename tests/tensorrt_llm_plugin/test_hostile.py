"""The connector for TensorRT-LLM over hostile files: nothing is raised, nothing wrong is loaded.

The mock compares what counts as computed with what the model would have computed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tensorrt_llm_executor import Executor
from tests.hostile_entries import hostile_entries
from tests.tensorrt_llm_plugin.conftest import Factory
from tests.vllm_plugin.models import prompt

TOKENS = prompt(60, seed=50)  # two full chunks of 24, and a part of one
LOADABLE = 48  # whole blocks of 16


def ask(serve: Factory) -> int:
    """A new engine serves the prompt. Returns how many tokens it took from the store."""
    engine = serve(16, num_blocks=8)
    computed = engine.ask(TOKENS).computed
    assert engine.scheduler._requests == {}
    engine.close()
    serve._made.remove(engine)
    return len(TOKENS) - computed


@pytest.fixture
def filled(serve: Factory) -> tuple[Path, bytes]:
    """The first file of the prompt, and what is in it."""
    serve.set(fingerprint="f")  # else each engine reads the model's files
    engine: Executor = serve(16)
    engine.ask(TOKENS)
    engine.close()
    match = engine.scheduler._store.lookup(TOKENS)
    path = serve.store / match.spans[0].names[0]
    assert ask(serve) == LOADABLE
    return path, path.read_bytes()


@pytest.mark.slow
def test_in_place_of_a_good_file(serve: Factory, filled: tuple[Path, bytes]) -> None:
    path, good = filled
    for name, data in hostile_entries(good, mutations=20):
        if name.startswith("forged"):  # right in every way but its values: a key tells
            continue
        path.write_bytes(data)
        assert ask(serve) in (0, LOADABLE), name
    path.write_bytes(good)
    assert ask(serve) == LOADABLE


@pytest.mark.slow
def test_beside_a_good_file(serve: Factory, filled: tuple[Path, bytes]) -> None:
    """As an entry that begins like the prompt: a lookup opens it to compare tokens."""
    path, good = filled
    number, _, rest = path.name.partition("-")
    beside = path.with_name(f"{number}-{'0' * 64}.{rest.partition('.')[2]}")
    for name, data in hostile_entries(good, mutations=5):
        beside.write_bytes(data)
        assert ask(serve) == LOADABLE, name
        beside.unlink(missing_ok=True)
