"""One store for a real vLLM and the mock of TensorRT-LLM: each loads what the other computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_core import PrefixStore, Section
from tests.fakes.tensorrt_llm_executor import Sizes
from tests.fakes.vllm import needs_cpu_op
from tests.tensorrt_llm_plugin.conftest import Factory
from tests.vllm_plugin import models
from tests.vllm_plugin.engine import Engine, EngineProcess, connector
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

SIZES = Sizes(num_layers=3, total_kv_heads=2, head_dim=64)  # of models.llama
NUM_NEW = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def vllm(
    llama: Path, store_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A vLLM with the same store, and blocks of 64 tokens."""
    process = EngineProcess(tmp_path_factory.mktemp("log") / "engine.log")
    # However fast the machine is: memory never answers for the disk, and lookups may take long.
    config = connector(store_dir, chunk_tokens=24, fresh_seconds=0, lookup_seconds=60)
    with process.engine(llama, block_size=64, kv_transfer_config=config) as engine:
        yield engine
    process.close()


@pytest.fixture
def reference(llama: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)


def computed(model: Any, tokens: list[int]) -> tuple[Tensor, list[int]]:
    """What transformers computes of a prompt, as the double has it, and how it goes on."""
    import transformers

    cache = transformers.DynamicCache(config=model.config)
    answer: list[int] = []
    new = tokens
    with torch.no_grad():
        for _ in range(NUM_NEW):
            logits = model(torch.tensor([new]), past_key_values=cache).logits
            new = [int(logits[0, -1].argmax())]
            answer += new
    return as_double(cache, len(tokens)), answer


def as_double(cache: Any, num_tokens: int) -> Tensor:
    layers = [torch.stack([x.keys[0], x.values[0]]) for x in cache.layers]
    return torch.stack(layers)[..., :num_tokens, :]


def test_a_prompt_that_vllm_has_computed(
    vllm: Engine, serve: Factory, llama: Path, store_dir: Path, reference: Any
) -> None:
    tokens = prompt(150, 50)
    (said,) = vllm.generate([tokens], max_tokens=NUM_NEW)
    values, answer = computed(reference, tokens)
    assert said.tokens == answer

    import transformers

    def from_store(ids: list[int]) -> Tensor:
        """By another adapter; the double compares every byte with it."""
        store: PrefixStore = engine.scheduler._store
        count = min(store.lookup(ids).num_tokens, len(ids) - 1)
        cache = transformers.DynamicCache(config=reference.config)
        hf.reserve(cache, reference, batch_size=1, num_tokens=count)
        facts = hf.cache_facts(reference, fingerprint=engine.scheduler._model.fingerprint)
        section = Section((0, 1, 2), hf.cache_view(cache, facts), None)
        store.load(store.lookup(ids), 0, count, [section])
        stored = as_double(cache, count)
        assert (stored - values[..., :count, :]).abs().max() < 1e-3  # float32, in another order
        return torch.cat([stored, values[..., count:, :]], dim=-2)

    serve.model, serve.store = llama, store_dir
    serve.set()
    engine = serve(32, sizes=SIZES, compute=from_store)
    assert engine.ask(tokens).computed == 150 - 128


def test_a_prompt_that_tensorrt_llm_has_computed(
    vllm: Engine, serve: Factory, llama: Path, store_dir: Path, reference: Any
) -> None:
    tokens = prompt(150, 51)
    values, answer = computed(reference, tokens)
    serve.model, serve.store = llama, store_dir
    serve.set()
    engine = serve(16, sizes=SIZES, compute=lambda ids: values)
    assert engine.ask(tokens).computed == 150
    engine.close()
    (said,) = vllm.generate([tokens], max_tokens=NUM_NEW)
    assert said.num_cached_tokens == 149
    assert said.tokens == answer
