"""LoRA adapters in real vLLM: requests share what their own adapter has computed, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin import models
from tests.vllm_plugin.engine import (
    Engine,
    EngineProcess,
    Output,
    check_reuse,
    connector,
    same_tokens,
)

pytestmark = needs_cpu_op

LENGTH = 150
PROMPT = models.prompt(LENGTH, seed=900)
ALL, NONE = LENGTH - 1, 0
OPTIONS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 4}

Lora = dict[str, Any] | None
Expected = Callable[[Path | None], list[int]]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.adapter(tmp_path_factory.mktemp("one"), "one")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.adapter(tmp_path_factory.mktemp("two"), "two")


@pytest.fixture(scope="module")
def alone(llama: Path, one: Path, two: Path, engines: EngineProcess) -> Expected:
    """The answers of a vLLM without the connector to PROMPT, with each adapter and with none."""
    found = {}
    with engines.engine(llama, block_size=32, enable_prefix_caching=False, **OPTIONS) as engine:
        for number, path in enumerate((None, one, two)):
            found[path] = ask(engine, lora(path, number)).tokens
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    return found.__getitem__


def lora(path: Path | None, number: int = 1, name: str = "adapter", **fields: Any) -> Lora:
    if path is None:
        return None
    return {"lora_path": str(path), "lora_int_id": number, "lora_name": name, **fields}


def ask(engine: Engine, adapter: Lora, prompt: Sequence[int] = PROMPT) -> Output:
    (output,) = engine.generate([prompt], besides=[{"adapter": adapter}])
    return output


def options(path: Path, **settings: Any) -> dict[str, Any]:
    config = connector(path, "kv_both", save_generated=False, fresh_seconds=0, **settings)
    return {"block_size": 32, "kv_transfer_config": config, **OPTIONS}


def check(engine: Engine, adapter: Lora, expected: list[int], num_cached: int) -> None:
    check_reuse(engine, PROMPT, {"adapter": adapter}, expected, num_cached)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["beside", "in-step"])
def test_two_adapters_and_none_in_one_store(
    prefix_caching: bool,
    llama: Path,
    one: Path,
    two: Path,
    engines: EngineProcess,
    alone: Expected,
    tmp_path: Path,
) -> None:
    """Whether an engine has loaded an adapter is known after the first step that uses it."""
    caching = {"enable_prefix_caching": prefix_caching}
    with engines.engine(llama, **options(tmp_path), **caching) as engine:
        for number, path in enumerate((None, one, two)):
            adapter = lora(path, number, f"adapter{number}")
            check(engine, adapter, alone(path), NONE)
            if path is not None:  # the first time it was not loaded
                check(engine, adapter, alone(path), NONE)
            check(engine, adapter, alone(path), ALL)
    with engines.engine(llama, **options(tmp_path) | {"block_size": 64}, **caching) as engine:
        check(engine, None, alone(None), ALL)
        for path, number in ((two, 1), (one, 2)):  # the numbers and names are this engine's own
            adapter = lora(path, number, f"other{number}")
            engine.call("add_adapter", **adapter or {})
            check(engine, adapter, alone(path), ALL)


def test_the_first_requests_of_an_adapter_wait_for_the_first_one(
    llama: Path, one: Path, engines: EngineProcess, tmp_path: Path
) -> None:
    """All come at once, and vLLM loads the adapter in the step that computes the first."""
    prompts = [models.prompt(LENGTH, seed=seed) for seed in range(910, 916)]
    besides = [{"adapter": lora(one)}] * len(prompts)
    with engines.engine(llama, **options(tmp_path)) as engine:
        expected = [output.tokens for output in engine.generate(prompts, besides=besides)]
        engine.call("wait_until_saved")
        engine.call("reset_prefix_cache")
        found = engine.generate(prompts, besides=besides)
        same_tokens(found, expected)
        assert [output.num_cached_tokens for output in found] == [NONE] + [ALL] * 5


def test_a_name_and_number_with_other_weights(
    llama: Path, engines: EngineProcess, alone: Expected, one: Path, two: Path, tmp_path: Path
) -> None:
    """vLLM's own blocks of the old weights are dropped only when its user says so. Until then
    nothing that follows such blocks is stored.
    """
    path = models.adapter(tmp_path / "adapter", "one")
    adapter = lora(path)
    with engines.engine(llama, **options(tmp_path / "store")) as engine:
        check(engine, adapter, alone(one), NONE)
        check(engine, adapter, alone(one), NONE)
        check(engine, adapter, alone(one), ALL)
        models.adapter(path, "two")
        check(engine, adapter, alone(one), NONE)  # vLLM might have loaded the new weights
        engine.call("add_adapter", **adapter or {}, load_inplace=True)
        longer = [*PROMPT[:128], *models.prompt(40, seed=901)]
        mixed = ask(engine, adapter, longer)
        assert mixed.num_cached_tokens == 128
        check(engine, adapter, alone(two), NONE)
        check(engine, adapter, alone(two), ALL)
        assert ask(engine, adapter, longer).num_cached_tokens == 128
        engine.call("remove_adapter", number=1)
        models.adapter(path, "one")
        adapter = lora(path, 7)  # of the same name, as vLLM's server numbers it
        engine.call("add_adapter", **adapter or {})
        check(engine, adapter, alone(one), ALL)


def test_an_adapter_that_is_loaded_in_place_in_every_step(
    llama: Path, engines: EngineProcess, alone: Expected, one: Path, two: Path, tmp_path: Path
) -> None:
    path = models.adapter(tmp_path / "adapter", "one")
    adapter = lora(path, load_inplace=True)
    with engines.engine(llama, **options(tmp_path / "store")) as engine:
        check(engine, adapter, alone(one), NONE)
        check(engine, adapter, alone(one), NONE)
        check(engine, adapter, alone(one), ALL)
        models.adapter(path, "two")
        check(engine, adapter, alone(two), NONE)
        check(engine, adapter, alone(two), NONE)
        check(engine, adapter, alone(two), ALL)


def test_an_adapter_that_vllm_drops_and_loads_again(
    llama: Path, engines: EngineProcess, alone: Expected, one: Path, two: Path, tmp_path: Path
) -> None:
    """vLLM keeps one adapter here. It is shared while its files are those that were loaded."""
    path = models.adapter(tmp_path / "adapter", "one")
    small = {"max_loras": 1, "max_cpu_loras": 1}
    with engines.engine(llama, **options(tmp_path / "store") | small) as engine:
        for _ in range(2):
            check(engine, lora(path, 1, "first"), alone(one), NONE)
        check(engine, lora(two, 2, "other"), alone(two), NONE)
        check(engine, lora(path, 1, "first"), alone(one), ALL)
        check(engine, lora(two, 2, "other"), alone(two), NONE)
        models.adapter(path, "two")
        check(engine, lora(path, 1, "first"), alone(two), NONE)
        check(engine, lora(path, 1, "first"), alone(two), ALL)
        check(engine, lora(one, 2, "other"), alone(one), NONE)  # its number had another path


@pytest.mark.slow
def test_ranks_in_processes_of_their_own(
    llama: Path, engines: EngineProcess, alone: Expected, one: Path, two: Path, tmp_path: Path
) -> None:
    """The first request waits for a step without a forward pass, in which ranks tell what they
    have loaded before.
    """
    with engines.engine(llama, **options(tmp_path)) as engine:
        for path, number in ((one, 1), (two, 2)):
            engine.call("add_adapter", **lora(path, number, f"adapter{number}") or {})
            check(engine, lora(path, number, f"adapter{number}"), alone(path), NONE)
    processes = EngineProcess(tmp_path / "log", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    try:
        there = options(tmp_path) | {"tensor_parallel_size": 2}
        with processes.engine(llama, **there) as engine:
            for path, number in ((two, 1), (one, 2)):
                adapter = lora(path, number, f"other{number}")
                engine.call("add_adapter", **adapter or {})
                output = ask(engine, adapter)
                same_tokens([output], [alone(path)])
                assert output.num_cached_tokens == ALL
    finally:
        processes.close()


def test_an_adapter_on_other_weights(
    llama: Path, one: Path, engines: EngineProcess, tmp_path: Path
) -> None:
    """An engine that has loaded other weights, and one that has started with them, share."""
    other = models.with_another_layer(llama, tmp_path / "other")
    adapter = lora(one)
    with engines.engine(other, **options(tmp_path / "store")) as engine:
        engine.call("add_adapter", **adapter or {})
        expected = ask(engine, adapter).tokens
        assert engine.call("wait_until_saved")
    with engines.engine(llama, **options(tmp_path / "store")) as engine:
        engine.call("add_adapter", **adapter or {})
        ask(engine, adapter)
        engine.call("change_weights", how="reload", path=str(other))
        check(engine, adapter, expected, ALL)
        engine.call("change_weights", how="callable")  # from now on they are in no files
        engine.call("reset_prefix_cache")
        for num_cached in (NONE, ALL):
            assert ask(engine, adapter).num_cached_tokens == num_cached
            engine.call("wait_until_saved")
            engine.call("reset_prefix_cache")
