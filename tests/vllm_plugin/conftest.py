"""Engines, models and stock vLLM's answers, made once for all tests of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.vllm_plugin import models
from tests.vllm_plugin.engine import EngineProcess

Stock = Callable[..., list[list[int]]]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Engines that run in one process, one after the other, core and worker included."""
    process = EngineProcess(tmp_path_factory.mktemp("log") / "engines.log")
    yield process
    process.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="session")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.gemma4(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="session")
def stock(engines: EngineProcess) -> Stock:
    """Greedy tokens of a vLLM without the connector; prompts that are asked for again are known."""
    known: dict[tuple[object, ...], list[int]] = {}

    def tokens(
        model: Path,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        dtype: str = "float32",
    ) -> list[list[int]]:
        keys = [(model, dtype, max_tokens, *prompt) for prompt in prompts]
        missing = {
            key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in known
        }
        if missing:
            with engines.engine(model, dtype=dtype, block_size=32) as engine:
                outputs = engine.generate(list(missing.values()), max_tokens=max_tokens)
            known.update((key, o.tokens) for key, o in zip(missing, outputs, strict=True))
        return [known[key] for key in keys]

    return tokens
