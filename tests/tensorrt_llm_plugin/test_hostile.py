"""The connector for TensorRT-LLM over hostile files: nothing is raised, nothing wrong is loaded.

The mock compares what counts as computed with what the model would have computed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tensorrt_llm_executor import Executor
from tests.hostile_entries import hostile_entries
from tests.store_files import entry_files, tokens_of
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
    serve.set(fingerprint="f", min_tokens=8)  # else each engine reads the model's files
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
    """As an entry that begins like the prompt: its mark leads there, and a lookup opens it."""
    path, first = filled
    beginning = TOKENS[:20]
    engine = serve(16)
    engine.ask([*beginning, *prompt(40, seed=51)])
    engine.close()
    alike = {file for file in entry_files(serve.store) if tokens_of(file)[:20] == beginning}
    (beside,) = alike - {path}
    good, marks = beside.read_bytes(), {f: f.read_bytes() for f in serve.store.rglob("*.mark")}
    for name, data in (*hostile_entries(good, mutations=5), ("good", good)):
        if name.startswith("forged"):
            continue
        path.unlink(missing_ok=True)
        beside.parent.mkdir(exist_ok=True)
        beside.write_bytes(data)
        for file, raw in marks.items():  # those that lead nowhere are deleted
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(raw)
        loaded = ask(serve)
        assert loaded in (0, 16), name
    assert loaded == 16
    path.write_bytes(first)
    assert ask(serve) == LOADABLE
