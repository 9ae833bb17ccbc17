"""Fixtures: the mock in place of TensorRT-LLM, a small model on disk, engines that serve it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes import tensorrt_llm_executor as fake
from tests.fakes.tensorrt_llm_executor import Executor, KvCacheConfig, Sizes, TorchLlmArgs

SIZES = Sizes(num_layers=3, total_kv_heads=2, head_dim=10)  # of the model


@pytest.fixture(params=["main"])
def trtllm(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The double, installed as tensorrt_llm; parametrize it indirectly for another version."""
    yield fake.install(sys.modules, request.param)
    fake.remove(sys.modules)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=SIZES.num_layers,
        num_attention_heads=4,
        num_key_value_heads=SIZES.total_kv_heads,
        head_dim=SIZES.head_dim,
        hidden_size=40,
        intermediate_size=80,
        vocab_size=512,
        max_position_embeddings=512,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def fingerprint_of(directory: Path) -> str:
    """What another engine that serves these files has: here transformers."""
    from transformers import AutoModelForCausalLM

    from kvx_adapters import transformers as hf

    model = AutoModelForCausalLM.from_pretrained(directory)
    return hf.model_record(model, directory).fingerprint


class Factory:
    """Makes engines that serve one model with one store."""

    def __init__(self, model: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.store, self._monkeypatch = model, store, monkeypatch
        self._made: list[Executor] = []

    def set(self, **settings: Any) -> None:
        patient = {"lookup_seconds": 60, "chunk_seconds": 60}  # however slow the machine is
        settings = {"path": str(self.store), "chunk_tokens": 24} | patient | settings
        self._monkeypatch.setenv("TRTLLM_KVX", json.dumps(settings))

    def args(self, block_size: int = 16, **args: Any) -> TorchLlmArgs:
        kv_cache = args.pop("kv_cache_config", {})
        config = KvCacheConfig(tokens_per_block=block_size, **kv_cache)
        return TorchLlmArgs(self.model, config, **args)

    def __call__(
        self, block_size: int = 16, *, args: dict[str, Any] | None = None, **options: Any
    ) -> Executor:
        """An engine; options are the Executor's."""
        sizes = options.pop("sizes", SIZES)
        made = Executor(self.args(block_size, **(args or {})), sizes, **options)
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()


@pytest.fixture
def serve(
    trtllm: ModuleType, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Factory]:
    factory = Factory(model_dir, tmp_path / "store", monkeypatch)
    factory.set()
    yield factory
    factory.close()
