"""One store for TensorRT-LLM and other engines: exact bytes, and nothing else written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_adapters import vllm
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    Directory,
    Layout,
    Precision,
    PrefixStore,
    Section,
    describe,
)
from tests.fakes.tensorrt_llm_executor import SENTINEL, Executor
from tests.fakes.vllm import SENTINEL as VLLM_SENTINEL
from tests.fakes.vllm import by_permutation, make_spec
from tests.tensorrt_llm_plugin.conftest import SIZES, Factory, fingerprint_of
from tests.vllm_plugin.models import prompt

transformers = pytest.importorskip("transformers")

LAYERS = tuple(range(SIZES.num_layers))
VLLM_BLOCKS = [5, 2, 6, 3]  # of 48 tokens


def store_for(serve: Factory) -> PrefixStore:
    """The store as a program opens it that has the model's files and nothing of TensorRT-LLM."""
    return PrefixStore(
        Directory(serve.store),
        fingerprint=fingerprint_of(serve.model),
        num_layers=SIZES.num_layers,
        total_kv_heads=SIZES.total_kv_heads,
        precision=Precision.of(torch.float32),
        chunk_tokens=24,
    )


def save(store: PrefixStore, tokens: list[int], section: Section) -> None:
    for start, stop in store.spans(len(tokens)):
        snapshot = store.capture(tokens, start, stop, [section])
        assert snapshot is not None
        store.commit(snapshot)


def prefilled(directory: Path, tokens: list[int]) -> tuple[Any, Any, Tensor]:
    """A transformers model, its cache of the tokens, and what is in it as the double has it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache)
    values = torch.stack([torch.stack([x.keys[0], x.values[0]]) for x in cache.layers])
    return model, cache, values


def assert_holds(engine: Executor, block_ids: list[int], values: Tensor) -> None:
    """These tokens in these blocks, and the sentinel in every other byte of the pool."""
    (rank,) = engine.ranks
    found = rank.raw.clone()
    rank.raw.fill_(SENTINEL)
    rank.write(block_ids, 0, values)
    assert torch.equal(rank.raw, found)


@pytest.mark.parametrize("block_size", [8, 32])
def test_a_prompt_that_transformers_has_computed(serve: Factory, block_size: int) -> None:
    tokens = prompt(100, 40)
    model, cache, values = prefilled(serve.model, tokens)
    facts = hf.cache_facts(model, fingerprint=fingerprint_of(serve.model))
    save(store_for(serve), tokens, Section(LAYERS, hf.cache_view(cache, facts), None))
    engine = serve(block_size, compute=lambda ids: values)
    request = engine.ask(tokens)
    assert request.computed == 4
    assert_holds(engine, request.block_ids, values)


def vllm_cache() -> tuple[Tensor, list[Tensor], Any]:
    """Blocks of 48 tokens in vLLM's HND order."""
    spec = make_spec(
        "LBHNC",
        num_kv_heads=SIZES.total_kv_heads,
        head_size=SIZES.head_dim,
        block_size=48,
        dtype=torch.float32,
    )
    return *by_permutation(spec), spec


def vllm_tokens(kv_caches: list[Tensor], num_tokens: int) -> Tensor:
    """What FlashAttention reads, as the double has it: K and V are halves of the last axis."""
    rows = [cache[VLLM_BLOCKS].transpose(0, 1).flatten(1, 2)[:, :num_tokens] for cache in kv_caches]
    return torch.stack(rows).unflatten(-1, (2, SIZES.head_dim)).movedim(-2, 1)


def vllm_section(kv_caches: list[Tensor], spec: Any, fingerprint: str) -> Section:
    facts = CacheFacts(
        engine="vllm 0.32.0",
        fingerprint=fingerprint,
        rotary="half",
        rotary_dim=SIZES.head_dim,
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=SIZES.num_layers,
        first_layer=0,
        window=0,
        total_kv_heads=SIZES.total_kv_heads,
        first_kv_head=0,
        negative_slots="skip",
    )
    view: CacheView = vllm.cache_view(kv_caches, spec, facts)
    return Section(LAYERS, view, BlockTable.packed([VLLM_BLOCKS]))


def test_what_is_in_a_cache_of_vllm(serve: Factory) -> None:
    tokens = prompt(150, 41)
    _, kv_caches, spec = vllm_cache()
    generator = torch.Generator().manual_seed(0)
    for cache in kv_caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    save(store_for(serve), tokens, vllm_section(kv_caches, spec, fingerprint_of(serve.model)))
    values = vllm_tokens(kv_caches, 150)
    engine = serve(32, compute=lambda ids: values)
    request = engine.ask(tokens)
    assert request.computed == 150 - 128
    assert_holds(engine, request.block_ids, values)


def test_what_tensorrt_llm_has_computed_in_a_cache_of_vllm(serve: Factory) -> None:
    tokens = prompt(150, 42)
    engine = serve(32)
    engine.ask(tokens)
    engine.close()
    store = store_for(serve)
    match = store.lookup(tokens)
    assert match.num_tokens == 150
    raw, kv_caches, spec = vllm_cache()
    store.load(match, 0, 150, [vllm_section(kv_caches, spec, fingerprint_of(serve.model))])
    values = engine.compute(tokens)
    assert torch.equal(vllm_tokens(kv_caches, 150), values)
    for layer in kv_caches:
        rows = layer[VLLM_BLOCKS].transpose(0, 1).flatten(1, 2)
        rows[:, :150].view(torch.int8).fill_(VLLM_SENTINEL)
        layer[VLLM_BLOCKS] = rows.unflatten(1, (len(VLLM_BLOCKS), 48)).transpose(0, 1)
    assert (raw == VLLM_SENTINEL).all()


def test_the_answer_goes_on_in_transformers(serve: Factory) -> None:
    """The next token after a prompt that TensorRT-LLM has computed, without computing it again."""
    tokens = prompt(100, 43)
    model, _, values = prefilled(serve.model, tokens)
    engine = serve(16, compute=lambda ids: values)
    engine.ask(tokens)
    engine.close()
    store = store_for(serve)
    match = store.lookup(tokens[:99])
    cache = transformers.DynamicCache(config=model.config)
    hf.reserve(cache, model, batch_size=1, num_tokens=99)
    facts = replace(hf.cache_facts(model), fingerprint=fingerprint_of(serve.model))
    store.load(match, 0, 99, [Section(LAYERS, hf.cache_view(cache, facts), None)])
    with torch.no_grad():
        found = model(torch.tensor([tokens[99:]]), past_key_values=cache).logits[0, -1]
        expected = model(torch.tensor([tokens])).logits[0, -1]
    assert found.argmax() == expected.argmax()
    for layer, rows in zip(cache.layers, values, strict=True):
        assert torch.equal(layer.keys[0, :, :99], rows[0, :, :99])
        assert torch.equal(layer.values[0, :, :99], rows[1, :, :99])


def test_the_migration_that_the_docs_show() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tensorrt_llm.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    pool = torch.randn(7, 3, 2, 2 * 32 * 64).bfloat16()
    offsets = torch.full((1, 3, 2, 4), 99, dtype=torch.int32)
    blocks = [[5, 2], [4]]
    for row, ids in enumerate(blocks):
        for kv in (0, 1):
            offsets[0, row, kv, : len(ids)] = torch.tensor(ids) * 3 * 2 + kv
    dense = torch.zeros(3, 2, 2, 40, 2, 64).bfloat16()  # layers, K and V, sequences
    layers = [
        CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
        for k, v in dense
    ]
    names: dict[str, Any] = {"pool": pool, "num_layers": 3, "fingerprint": "f"}
    names |= {"kv_cache_block_offsets": offsets, "num_cached_tokens": [40, 9]}
    facts = CacheFacts(
        fingerprint="f",
        rotary="half",
        rotary_dim=64,
        rope_applied=True,
        hadamard=False,
        num_layers=3,
        first_layer=0,
        window=0,
        total_kv_heads=2,
        first_kv_head=0,
    )
    names["theirs"] = CacheView(layers=tuple(layers), facts=facts, dense=True)
    exec(code, names)
    sub_blocks = pool.view(7, 3, 2, 2, 32, 64)
    for row, (ids, length) in enumerate(zip(blocks, (40, 9), strict=True)):
        for t in range(length):
            assert torch.equal(dense[:, :, row, t], sub_blocks[ids[t // 32], :, :, :, t % 32])
    assert not dense[:, :, 1, 9:].any()
