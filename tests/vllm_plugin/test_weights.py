"""Weights that are replaced while an engine runs: no token of other weights is loaded, and nothing
that other weights have computed is found under the name of these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin import models
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens

pytestmark = needs_cpu_op

LENGTH = 150
PROMPTS = [models.prompt(LENGTH, seed=seed) for seed in (700, 701, 702)]


@pytest.fixture(scope="module")
def other(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.with_another_layer(llama, tmp_path_factory.mktemp("other") / "model")


def cached(outputs: list[Any]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


ALL, NONE = [LENGTH - 1] * 3, [0] * 3


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["beside", "in-step"])
def test_files_are_replaced_and_come_back(
    prefix_caching: bool,
    llama: Path,
    other: Path,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
) -> None:
    of_first, of_other = stock(llama, PROMPTS), stock(other, PROMPTS)
    assert all(a != b for a, b in zip(of_first, of_other, strict=True))
    config = connector(tmp_path, "kv_both", save_generated=False, fresh_seconds=0)
    options = {
        "block_size": 32,
        "kv_transfer_config": config,
        "enable_prefix_caching": prefix_caching,
    }
    with engines.engine(llama, **options) as engine:
        same_tokens(engine.generate(PROMPTS), of_first)
        engine.call("wait_until_saved")
        engine.call("change_weights", how="reload", path=str(other))
        engine.call("reset_prefix_cache")
        found = engine.generate(PROMPTS)
        same_tokens(found, of_other)
        assert cached(found) == NONE
        engine.call("wait_until_saved")
        engine.call("reset_prefix_cache")
        found = engine.generate(PROMPTS)
        same_tokens(found, of_other)
        assert cached(found) == ALL
        engine.call("change_weights", how="reload", path=str(llama))
        engine.call("reset_prefix_cache")
        found = engine.generate(PROMPTS)
        same_tokens(found, of_first)
        assert cached(found) == ALL
    # Engines that start from these files share with it.
    for model, expected in ((other, of_other), (llama, of_first)):
        with engines.engine(model, **options) as engine:
            found = engine.generate(PROMPTS)
            same_tokens(found, expected)
            assert cached(found) == ALL


def test_blocks_that_vllm_keeps_are_not_stored_for_others(
    llama: Path, other: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    """Who replaces weights and does not reset vLLM's own cache gets wrong tokens, alone."""
    longer = [prompt + models.prompt(200, seed=99)[:40] for prompt in PROMPTS]
    expected = stock(other, longer)
    config = connector(tmp_path, "kv_both", save_generated=False, chunk_tokens=32, fresh_seconds=0)
    options = {"block_size": 32, "kv_transfer_config": config}
    with engines.engine(llama, **options) as engine:
        engine.generate(PROMPTS)
        engine.call("change_weights", how="reload", path=str(other))
        engine.generate(longer)  # begins with blocks of the earlier weights
        engine.call("wait_until_saved")
    with engines.engine(other, **options) as engine:
        found = engine.generate(longer)
        same_tokens(found, expected)
        assert cached(found) == NONE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("multiprocessing", "ranks"), [("1", 1), ("0", 2)], ids=["core-and-worker", "two-ranks"]
)
def test_weights_in_processes_of_their_own(
    multiprocessing: str,
    ranks: int,
    llama: Path,
    other: Path,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
) -> None:
    """The scheduler hears from all ranks what they have loaded, before it looks anything up."""
    of_first, of_other = stock(llama, PROMPTS), stock(other, PROMPTS)
    store = tmp_path / "store"
    config = connector(store, "kv_both", save_generated=False, fresh_seconds=0)
    options = {"block_size": 32, "kv_transfer_config": config}
    processes = EngineProcess(tmp_path / "log", VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing)
    try:
        with processes.engine(llama, tensor_parallel_size=ranks, **options) as engine:
            same_tokens(engine.generate(PROMPTS), of_first)
            engine.call("change_weights", how="reload", path=str(other))
            engine.call("reset_prefix_cache")
            found = engine.generate(PROMPTS)
            same_tokens(found, of_other)
            assert cached(found) == NONE
            engine.call("change_weights", how="reload", path=str(llama))
            engine.call("reset_prefix_cache")
            found = engine.generate(PROMPTS)
            same_tokens(found, of_first)
            assert cached(found) == ALL
    finally:
        processes.close()
    for model, expected in ((other, of_other), (llama, of_first)):
        with engines.engine(model, **options) as engine:
            found = engine.generate(PROMPTS)
            same_tokens(found, expected)
            assert cached(found) == ALL
