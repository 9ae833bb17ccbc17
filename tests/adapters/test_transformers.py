"""transformers' caches through the adapter and back, with real models of random weights."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    FactsMismatchError,
    InvalidArgumentError,
    Layout,
    UnsupportedError,
    describe,
    gather_kv,
    migrate,
    model_files_digest,
    verify,
    write_kv,
)
from tests.adapters.transformers_model import (
    DIM,
    HEADS,
    KV_HEADS,
    NUM_LAYERS,
    make_model,
    transformers,
)
from tests.facts import SAME_MODEL
from tests.ways_out import WayOut, leads_out


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model()


def filled(cache: Any, batch: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(7)
    for layer_idx in range(NUM_LAYERS):
        shape = (batch, KV_HEADS, num_tokens, DIM)
        key = torch.randn(shape, generator=generator).to(dtype)
        cache.update(key, -key, layer_idx)
    return cache


def padded_mask(lengths: list[int], num_tokens: int) -> Tensor:
    return (torch.arange(num_tokens) >= num_tokens - torch.tensor(lengths)[:, None]).long()


# ---- the cache is described in place ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dynamic_cache_is_described_in_place(llama: Any, dtype: torch.dtype) -> None:
    cache = filled(transformers.DynamicCache(config=llama.config), 3, 11, dtype)
    view = hf.cache_view(cache, CacheFacts())
    for layer, desc in zip(cache.layers, view.layers, strict=True):
        assert desc.v is not None
        assert (desc.k.data, desc.v.data) == (layer.keys.data_ptr(), layer.values.data_ptr())
        assert (desc.num_blocks, desc.block_size) == (3, 11)
        assert (desc.num_kv_heads, desc.head_dim) == (KV_HEADS, DIM)
        assert desc.k.stride == layer.keys.stride()
        desc.validate()


def test_static_cache_is_described_in_place(llama: Any) -> None:
    cache = transformers.StaticCache(config=llama.config, max_cache_len=32)
    filled(cache, 2, 11)
    desc = hf.cache_view(cache, CacheFacts()).layers[2]
    assert desc.k.data == cache.layers[2].keys.data_ptr()
    assert (desc.num_blocks, desc.block_size) == (2, 32)


def test_a_cropped_cache_keeps_its_strides(llama: Any) -> None:
    cache = filled(transformers.DynamicCache(config=llama.config), 2, 11)
    cache.crop(-4)
    desc = hf.cache_desc(cache.layers[0])
    assert desc.block_size == 7
    key, _ = gather_kv(desc, hf.block_table([1]), [7])
    assert torch.equal(key[0], cache.layers[0].keys[1].transpose(0, 1))


@torch.inference_mode()
def test_a_view_is_refused_after_another_forward_pass(llama: Any) -> None:
    """Each pass concatenates: what was described is then an old copy that the model never reads."""
    cache = transformers.DynamicCache(config=llama.config)
    llama(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    view = hf.cache_view(cache, SAME_MODEL)
    copy_of = filled(transformers.DynamicCache(config=llama.config), 1, 9)
    other = hf.cache_view(copy_of, SAME_MODEL)
    assert migrate(view, other, [3])
    assert verify(view, other, [3])
    llama(torch.tensor([[4]]), past_key_values=cache)
    before = copy.deepcopy(copy_of)
    for call in (
        lambda: migrate(view, other, [3]),
        lambda: migrate(other, view, [3]),
        lambda: verify(view, other, [3]),
        lambda: migrate(view.at(hf.block_table([0])), other, [3]),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            call()
        assert str(raised.value).endswith(
            "is out of date: cache.layers[0] has new tensors, expected those described. A "
            "DynamicCache replaces them in every forward pass: call cache_view again after it"
        )
    assert torch.equal(copy_of.layers[0].keys, before.layers[0].keys)
    assert migrate(hf.cache_view(cache, SAME_MODEL), other, [4])


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_view_is_refused_after_one_new_tensor(llama: Any, name: str) -> None:
    src, dst = (filled(transformers.DynamicCache(config=llama.config), 1, 5) for _ in "ab")
    view, other = (hf.cache_view(cache, SAME_MODEL) for cache in (src, dst))
    migrate(view, other, [5])
    setattr(src.layers[2], name, getattr(src.layers[2], name).clone())
    with pytest.raises(InvalidArgumentError, match=r"cache\.layers\[2\] has new tensors, expected"):
        migrate(view, other, [5])


@torch.inference_mode()
def test_a_static_cache_stays_where_it_is(llama: Any) -> None:
    cache = transformers.StaticCache(config=llama.config, max_cache_len=16)
    llama(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    view = hf.cache_view(cache, SAME_MODEL)
    llama(torch.tensor([[4]]), past_key_values=cache)
    other = hf.cache_view(filled(transformers.DynamicCache(), 1, 16), SAME_MODEL)
    assert migrate(view, other, [4])
    assert verify(hf.cache_view(cache, SAME_MODEL), other, [4])


def test_kvx_writes_what_transformers_reads(llama: Any) -> None:
    cache = filled(transformers.DynamicCache(config=llama.config), 3, 9)
    before = copy.deepcopy(cache)
    mask = padded_mask([4, 0, 9], 9)
    tokens = torch.randn(13, KV_HEADS, DIM)
    write_kv(hf.cache_desc(cache.layers[1]), tokens, -tokens, hf.slot_mapping(mask))
    keys, values = cache.layers[1].keys, cache.layers[1].values
    assert torch.equal(keys[0, :, 5:], tokens[:4].transpose(0, 1))
    assert torch.equal(values[2], -tokens[4:].transpose(0, 1))
    assert torch.equal(keys[0, :, :5], before.layers[1].keys[0, :, :5])
    assert torch.equal(keys[1], before.layers[1].keys[1])
    for i in (0, 2):
        assert torch.equal(cache.layers[i].keys, before.layers[i].keys)
        assert torch.equal(cache.layers[i].values, before.layers[i].values)


# ---- a cache to migrate into ----


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reserve(llama: Any, kind: str) -> None:
    if kind == "dynamic":
        cache = transformers.DynamicCache(config=llama.config)
    else:
        cache = transformers.StaticCache(config=llama.config, max_cache_len=20)
    hf.reserve(cache, llama, batch_size=3, num_tokens=13)
    assert int(cache.get_seq_length()) == 13
    assert len(cache.layers) == NUM_LAYERS
    for layer in cache.layers:
        length = 13 if kind == "dynamic" else 20
        assert layer.keys.shape == layer.values.shape == (3, KV_HEADS, length, DIM)
        assert layer.keys.dtype == torch.float32
        assert not layer.keys.any()
        assert not layer.values.any()
        assert layer.keys.data_ptr() != layer.values.data_ptr()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reserve_in_the_dtype_of_the_model(kind: str) -> None:
    model = make_model().bfloat16()
    cache = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=5)
    hf.reserve(cache, model, batch_size=1, num_tokens=5)
    assert {layer.values.dtype for layer in cache.layers} == {torch.bfloat16}


def test_reserve_without_head_dim() -> None:
    model = make_model("GPTNeoX", num_key_value_heads=..., head_dim=..., hidden_size=40)
    cache = transformers.DynamicCache(config=model.config)
    hf.reserve(cache, model, batch_size=1, num_tokens=2)
    assert cache.layers[0].keys.shape == (1, HEADS, 2, 10)


def test_reserve_refuses_a_cache_with_tokens(llama: Any) -> None:
    cache = filled(transformers.DynamicCache(config=llama.config), 1, 5)
    with pytest.raises(InvalidArgumentError, match=r"cache holds 5 tokens, expected none\. Pass a"):
        hf.reserve(cache, llama, batch_size=1, num_tokens=3)


def test_reserve_names_the_wrong_number(llama: Any) -> None:
    cache = transformers.DynamicCache(config=llama.config)
    with pytest.raises(InvalidArgumentError, match=r"geometry\.block_size is 0: "):
        hf.reserve(cache, llama, batch_size=1, num_tokens=0)
    assert cache.get_seq_length() == 0


# ---- prefill here, continue there ----

BLOCK_SIZE = 4
PROMPTS = [[5, 17, 3, 96, 41, 8, 8, 20, 77], [60], [31, 2, 90, 14, 55, 6]]
NUM_NEW = 12


def paged_pool(num_blocks: int, facts: CacheFacts) -> tuple[CacheView, list[Tensor]]:
    """A pool of NHD pages full of NaN, as another engine might own it."""
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, DIM)
    tensors = [torch.full(shape, torch.nan) for _ in range(2 * NUM_LAYERS)]
    layers = tuple(
        CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
        for k, v in zip(tensors[::2], tensors[1::2], strict=True)
    )
    return CacheView(layers=layers, facts=facts), tensors


@torch.inference_mode()
def decode(model: Any, cache: Any, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, logits) of a greedy continuation, one token per pass."""
    all_tokens, all_logits = [], []
    for _ in range(NUM_NEW):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        logits = model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
        ).logits[:, -1]
        tokens = logits.argmax(-1)
        all_tokens.append(tokens)
        all_logits.append(logits)
    return torch.stack(all_tokens, 1), torch.stack(all_logits, 1)


def test_a_batch_prefilled_one_by_one_goes_on_as_if_never_moved(llama: Any) -> None:
    """Prompts alone -> pages of another engine, scattered -> one batch padded on the left."""
    facts = hf.cache_facts(llama, fingerprint="the same weights")
    pool, tensors = paged_pool(9, facts)
    tables = [[7, 0, 4], [2], [5, 1]]
    first_tokens, wanted, alone = [], [], []
    for prompt, table in zip(PROMPTS, tables, strict=True):
        cache = transformers.DynamicCache(config=llama.config)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = llama(input_ids=ids, past_key_values=cache).logits
        first_tokens.append(int(logits[0, -1].argmax()))
        migrate(hf.cache_view(cache, facts), pool.at([table]), [len(prompt)])
        alone.append(cache)
        rest = decode(
            llama, copy.deepcopy(cache), torch.ones_like(ids), torch.tensor(first_tokens[-1:])
        )
        wanted.append(rest)

    lengths = [len(prompt) for prompt in PROMPTS]
    mask = padded_mask(lengths, max(lengths))
    cache = transformers.DynamicCache(config=llama.config)
    hf.reserve(cache, llama, batch_size=3, num_tokens=max(lengths))
    src = pool.at([row + [-1] * (3 - len(row)) for row in tables])
    dst, real = hf.padded_span(hf.cache_view(cache, facts), mask)
    unpadded = hf.cache_view(cache, facts).at(starts=hf.starts(mask))
    with pytest.raises(FactsMismatchError, match="from position 0 at the source to position"):
        migrate(src, unpadded, hf.seq_lens(mask))
    moved = migrate(src, dst, real)
    assert moved == sum(lengths) * NUM_LAYERS * 2 * KV_HEADS * DIM * 4
    assert verify(src, dst, lengths).ok

    for row, length in enumerate(lengths):
        for layer, there in zip(alone[row].layers, cache.layers, strict=True):
            pad = max(lengths) - length
            assert torch.equal(there.keys[row, :, pad:], layer.keys[0])
            assert torch.equal(there.values[row, :, pad:], layer.values[0])
            assert not there.keys[row, :, :pad].any()
    tokens, logits = decode(llama, cache, mask, torch.tensor(first_tokens))
    for row in range(3):
        assert torch.equal(tokens[row], wanted[row][0][0])
        torch.testing.assert_close(logits[row], wanted[row][1][0], rtol=1e-4, atol=1e-4)
    assert torch.isnan(torch.stack(tensors)[:, [3, 6, 8]]).all()  # blocks of nobody


def test_into_a_static_cache(llama: Any) -> None:
    facts = hf.cache_facts(llama, fingerprint="f")
    ids = torch.tensor(PROMPTS[:1])
    src = transformers.DynamicCache(config=llama.config)
    with torch.inference_mode():
        first = llama(input_ids=ids, past_key_values=src).logits[:, -1].argmax(-1)
    dst = transformers.StaticCache(config=llama.config, max_cache_len=24)
    hf.reserve(dst, llama, batch_size=1, num_tokens=ids.shape[1])
    migrate(hf.cache_view(src, facts), hf.cache_view(dst, facts), [ids.shape[1]])
    for layer, there in zip(src.layers, dst.layers, strict=True):
        for name in ("keys", "values"):
            moved, rest = getattr(there, name).split([ids.shape[1], 24 - ids.shape[1]], dim=2)
            assert torch.equal(moved, getattr(layer, name))
            assert not rest.any()
    wanted, _ = decode(llama, src, torch.ones_like(ids), first)
    found, _ = decode(llama, dst, torch.ones_like(ids), first)
    assert torch.equal(found, wanted)


def test_without_the_cache_it_would_say_something_else(llama: Any) -> None:
    """The tests above would pass on anything if the continuation did not depend on the cache."""
    ids = torch.tensor(PROMPTS[:1])
    cache = transformers.DynamicCache(config=llama.config)
    with torch.inference_mode():
        first = llama(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(-1)
    zeros = transformers.DynamicCache(config=llama.config)
    hf.reserve(zeros, llama, batch_size=1, num_tokens=ids.shape[1])
    wanted, _ = decode(llama, cache, torch.ones_like(ids), first)
    found, _ = decode(llama, zeros, torch.ones_like(ids), first)
    assert not torch.equal(found, wanted)


# ---- padded batches ----


def test_lengths_and_starts_of_a_padded_batch() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert hf.seq_lens(mask).to_numpy().tolist() == [3, 5, 2, 0]
    assert hf.starts(mask).to_numpy().tolist() == [2, 0, 0, 0]
    slots = torch.as_tensor(hf.slot_mapping(mask).owner).tolist()
    assert slots == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("ask", [hf.seq_lens, hf.starts])
def test_a_torn_sequence_is_refused(ask: Any) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    with pytest.raises(
        InvalidArgumentError, match=r"attention_mask\[1\] has 2 ones between 0 and 2"
    ):
        ask(mask)


# ---- what the bytes mean ----


def test_facts_of_a_llama(llama: Any) -> None:
    facts = hf.cache_facts(llama, fingerprint="f")
    assert facts == CacheFacts(
        engine=f"transformers {transformers.__version__}",
        fingerprint="f",
        rotary="half",
        rotary_dim=DIM,
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=NUM_LAYERS,
        first_layer=0,
        window=0,
        total_kv_heads=KV_HEADS,
        first_kv_head=0,
        compute_dtype=DType.F32,
        negative_slots="wrap",
    )


def test_neighbours_go_into_halves_if_the_models_are_one(llama: Any) -> None:
    """Cohere's keys, whose neighbouring dims pair up, become those that a Llama would compute."""
    neighbours, halves = hf.cache_facts(make_model("Cohere")), hf.cache_facts(llama)
    src = filled(transformers.DynamicCache(config=llama.config), 1, 3)
    dst = filled(transformers.DynamicCache(config=llama.config), 1, 3)
    before = copy.deepcopy(dst)
    with pytest.raises(FactsMismatchError, match="fingerprint is unknown at the source"):
        migrate(hf.cache_view(src, neighbours), hf.cache_view(dst, halves), [3])
    assert torch.equal(dst.layers[0].keys, before.layers[0].keys)
    migrate(hf.cache_view(src, neighbours), hf.cache_view(dst, halves), [3], same_model=True)
    for held, wanted in zip(dst.layers, src.layers, strict=True):
        expected = torch.cat([wanted.keys[..., 0::2], wanted.keys[..., 1::2]], dim=-1)
        assert torch.equal(held.keys, expected)
        assert torch.equal(held.values, wanted.values)


# ---- what cannot be described ----


def test_sliding_windows_are_refused() -> None:
    model = make_model("Mistral", sliding_window=8)
    cache = filled(transformers.DynamicCache(config=model.config), 1, 11)
    assert hf.cache_facts(model).window == 8
    with pytest.raises(
        UnsupportedError, match=r"DynamicSlidingWindowLayer, expected .*Call layer_groups"
    ):
        hf.cache_view(cache, CacheFacts())


def test_mixed_windows_are_unknown() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = make_model("Qwen2", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert hf.cache_facts(model).window is None


def test_an_empty_cache_is_refused(llama: Any) -> None:
    cache = transformers.DynamicCache(config=llama.config)
    with pytest.raises(InvalidArgumentError, match=r"layer\.keys is empty, .*Call reserve\(cache"):
        hf.cache_view(cache, CacheFacts())
    cache.early_initialization(1, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    with pytest.raises(InvalidArgumentError, match=r"layer\.keys is empty"):
        hf.cache_view(cache, CacheFacts())


# ---- what a model computes ----


@pytest.fixture
def saved(llama: Any, tmp_path: Path) -> Path:
    llama.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(directory: Path, **changes: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **changes)


def test_a_record_is_of_the_config_as_it_was_loaded(saved: Path) -> None:
    plain = hf.model_record(load(saved), saved)
    assert (plain.files, plain.architecture) == (model_files_digest(saved), "llama")
    assert (plain.overrides, plain.quantization) == ({}, None)
    assert hf.model_record(load(saved, dtype=torch.bfloat16), saved) == plain
    assert hf.model_record(load(saved, use_cache=False), saved) == plain
    assert hf.model_record(load(saved), saved, files="f").files == "f"
    theta = {"rope_theta": 5e5, "rope_type": "default"}
    changed = hf.model_record(load(saved, rope_parameters=theta), saved)
    assert changed.files == plain.files
    assert changed.rope == {"": theta}
    louder = hf.model_record(load(saved, rms_norm_eps=1e-2), saved)
    assert louder.overrides == {"rms_norm_eps": 1e-2}
    assert len({found.fingerprint for found in (plain, changed, louder)}) == 3


def test_a_config_that_is_changed_after_its_model_was_made_is_refused(saved: Path) -> None:
    model = load(saved)
    model.config.rope_parameters["rope_theta"] = 5e5
    with pytest.raises(UnsupportedError, match=r"rotary_emb is not what model\.config says"):
        hf.model_record(model, saved)


def test_frequencies_that_are_changed_by_hand_are_refused(saved: Path) -> None:
    model = load(saved)
    for name, buffer in model.model.rotary_emb.named_buffers():
        assert name.endswith("inv_freq")
        buffer *= 0.5
    with pytest.raises(UnsupportedError, match="Load the model with the rope_parameters that"):
        hf.model_record(model, saved)


def test_adapters_are_refused(saved: Path) -> None:
    model = load(saved)
    model.peft_config = {"style": object()}
    with pytest.raises(UnsupportedError, match=r"has the adapters \['style'\], expected none"):
        hf.model_record(model, saved)


def test_weights_that_are_quantised_when_they_are_loaded(saved: Path) -> None:
    model, plain = load(saved), hf.model_record(load(saved), saved)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = hf.model_record(model, saved)
    assert found.quantization is not None
    assert found.quantization["config"]["load_in_4bit"] is True
    assert found.fingerprint != plain.fingerprint
    given = transformers.BitsAndBytesConfig(load_in_4bit=True)  # what transformers makes of it
    model.config.quantization_config = given
    assert hf.model_record(model, saved).quantization is not None
    model.config.save_pretrained(saved)  # the files say it themselves
    as_saved = hf.model_record(model, saved)
    assert as_saved.quantization is None
    model.config.quantization_config = given.to_dict()
    assert hf.model_record(model, saved) == as_saved
    model.config.quantization_config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16"
    )
    assert hf.model_record(model, saved).fingerprint != as_saved.fingerprint


@pytest.mark.parametrize("kind", ["Mxfp4Config", "FineGrainedFP8Config"])
def test_quantised_files_that_are_dequantised_when_they_are_loaded(saved: Path, kind: str) -> None:
    """Numbers that are computed from them differ: another fingerprint."""
    model, config = load(saved), getattr(transformers, kind)
    model.config.quantization_config = config()
    model.config.save_pretrained(saved)
    as_saved = hf.model_record(model, saved)
    assert as_saved.quantization is None
    model.config.quantization_config = config(dequantize=True)
    found = hf.model_record(model, saved)
    assert found.quantization is not None
    assert found.quantization["config"]["dequantize"] is True
    assert found.fingerprint != as_saved.fingerprint


def test_angles_that_do_not_depend_on_the_length(saved: Path) -> None:
    model = load(saved)
    assert hf.model_record(model, saved, num_tokens=10**6) == hf.model_record(model, saved)


def test_angles_that_depend_on_the_length(saved: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = load(saved, rope_parameters=dynamic)
    length = model.config.max_position_embeddings
    with pytest.raises(InvalidArgumentError, match="num_tokens is None and the rotary embedding"):
        hf.model_record(model, saved)
    hf.model_record(model, saved, num_tokens=length)
    with pytest.raises(
        UnsupportedError, match=f"expected at most max_position_embeddings, {length}"
    ):
        hf.model_record(model, saved, num_tokens=length + 1)


# ---- ways out ----


@functools.cache
def model_of(name: str) -> Any:
    fields: dict[str, Any] = {
        "Llama": {},
        "Mistral": {"sliding_window": 8},
        "Qwen2": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    }
    return make_model(name, **fields[name])


def made(name: str = "Llama", num_tokens: int = 0, *, static: int = 0, config: bool = True) -> Any:
    """A cache that holds so many tokens of a model.

    static: room of a StaticCache; 0: a DynamicCache, made with the model's config or without
    """
    like = model_of(name)
    if static:
        cache = transformers.StaticCache(config=like.config, max_cache_len=static)
    else:
        cache = transformers.DynamicCache(**({"config": like.config} if config else {}))
    if num_tokens:
        with torch.inference_mode():
            like(torch.arange(num_tokens)[None] % 97, past_key_values=cache)
    return cache


def reserved(cache: Any, num_tokens: int = 5, name: str = "Llama") -> Any:
    hf.reserve(cache, model_of(name), batch_size=1, num_tokens=num_tokens)
    return cache


def masked(view: CacheView, num_tokens: int) -> None:
    hf.padded_span(view, torch.ones(1, num_tokens, dtype=torch.long))


def groups(cache: Any, name: str, *models: Any) -> Any:
    return hf.layer_groups(cache, hf.cache_facts(model_of(name), fingerprint="f"), *models)


def to_a_windowed(num_tokens: int) -> None:
    """5 tokens of Mistral into another cache."""
    (src,) = groups(made("Mistral", 5), "Mistral")
    (dst,) = groups(reserved(made("Mistral"), num_tokens, "Mistral"), "Mistral")
    src_span, dst_span, lens = hf.shared_spans(src, dst)
    migrate(src_span, dst_span, lens)
    assert verify(src_span, dst_span, lens)


def after_a_pass(*, again: bool) -> None:
    cache = made(num_tokens=3)
    view, other = hf.cache_view(cache, SAME_MODEL), hf.cache_view(made(num_tokens=4), SAME_MODEL)
    with torch.inference_mode():
        model_of("Llama")(torch.tensor([[4]]), past_key_values=cache)
    migrate(hf.cache_view(cache, SAME_MODEL) if again else view, other, [3])


def after_crops(*, anew: bool) -> None:
    cache = made("Mistral")
    cache.activate_past_recording()
    with torch.inference_mode():
        model_of("Mistral")(torch.arange(12)[None], past_key_values=cache)
        cache.crop(-1)
        cache.crop(-1)
    groups(made("Mistral", 10) if anew else cache, "Mistral")


def encoder_decoder() -> Any:
    return transformers.EncoderDecoderCache(made(num_tokens=3), made(num_tokens=4))


def offloading(*, on: bool) -> None:
    cache = transformers.DynamicCache(config=model_of("Llama").config)
    cache.offloading = on
    hf.cache_view(reserved(cache), CacheFacts())


TORN = torch.tensor([[1, 0, 1]])
NO_LAYERS = (
    "cache has no layers, expected those of the model. Make it with config=model.config and call "
    "reserve(cache, model, ...), or run the model once"
)
WAYS_OUT = [
    WayOut(
        "it holds the last tokens of a sequence only. Call layer_groups",
        lambda: hf.cache_view(made("Mistral", 5), CacheFacts()),
        lambda: groups(made("Mistral", 5), "Mistral"),
    ),
    WayOut(
        "layer.keys is empty, ... Call reserve(cache, model, ...) or run the model once",
        lambda: hf.cache_view(made(), CacheFacts()),
        lambda: [
            hf.cache_view(cache, CacheFacts()) for cache in (reserved(made()), made(num_tokens=1))
        ],
    ),
    WayOut(
        "expected (1, 5): ... Pass that of the last forward pass",
        lambda: masked(hf.cache_view(made(num_tokens=5), CacheFacts()), 4),
        lambda: masked(hf.cache_view(made(num_tokens=5), CacheFacts()), 5),
    ),
    WayOut(
        "pass self_attention_cache, and cross_attention_cache apart",
        lambda: hf.cache_view(encoder_decoder(), CacheFacts()),
        lambda: [
            hf.cache_view(cache, CacheFacts())
            for cache in (
                encoder_decoder().self_attention_cache,
                encoder_decoder().cross_attention_cache,
            )
        ],
    ),
    WayOut(
        "no call says when a copy is complete. Make it without",
        lambda: offloading(on=True),
        lambda: offloading(on=False),
    ),
    WayOut(
        NO_LAYERS,
        lambda: hf.cache_view(made(config=False), CacheFacts()),
        lambda: [
            hf.cache_view(cache, CacheFacts())
            for cache in (reserved(made()), made(num_tokens=1, config=False))
        ],
    ),
    WayOut(
        "expected the same layers. Make it with config=model.config",
        lambda: reserved(transformers.DynamicCache(config=make_model(num_hidden_layers=2).config)),
        lambda: reserved(made()),
    ),
    WayOut(
        "cache holds 2 tokens, expected none. Pass a new one",
        lambda: reserved(made(num_tokens=2)),
        lambda: reserved(made()),
    ),
    WayOut(
        "has room for 4 tokens, expected it for 5. Make it with max_cache_len=5 or more",
        lambda: reserved(made(static=4)),
        lambda: reserved(made(static=5)),
    ),
    WayOut(
        "has 2 ones between 0 and 2, expected them in one piece. Use slot_mapping",
        lambda: hf.padded_span(hf.cache_view(made(num_tokens=3), SAME_MODEL), TORN),
        lambda: migrate(
            hf.cache_view(made(num_tokens=3), SAME_MODEL).at(slots=hf.slot_mapping(TORN)),
            hf.cache_view(reserved(made(), 2), SAME_MODEL),
            [2],
            new_positions=True,
        ),
    ),
    WayOut(
        "dst holds a sequence of 6 tokens, expected 5 as src: reserve(cache, model, num_tokens=5, "
        "...)",
        lambda: to_a_windowed(6),
        lambda: to_a_windowed(5),
    ),
    WayOut(
        "Call layer_groups(cache, facts, model)",
        lambda: groups(made("Qwen2", 5, config=False), "Qwen2"),
        lambda: groups(made("Qwen2", 5, config=False), "Qwen2", model_of("Qwen2")),
    ),
    WayOut(
        "Give its own model",
        lambda: groups(made(num_tokens=5), "Llama", make_model(num_hidden_layers=2)),
        lambda: groups(made(num_tokens=5), "Llama", model_of("Llama")),
    ),
    WayOut(
        "A DynamicCache replaces them in every forward pass: call cache_view again after it",
        lambda: after_a_pass(again=False),
        lambda: after_a_pass(again=True),
    ),
    WayOut(
        "crops have dropped the others. Run the sequence anew",
        lambda: after_crops(anew=False),
        lambda: after_crops(anew=True),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)


def test_a_record_is_of_the_rotary_parameters_that_a_model_was_loaded_with(saved: Path) -> None:
    def record(*, loaded: bool) -> None:
        theta = {"rope_theta": 5e5, "rope_type": "default"}
        model = load(saved, **({"rope_parameters": theta} if loaded else {}))
        model.config.rope_parameters["rope_theta"] = 5e5
        hf.model_record(model, saved)

    leads_out(
        WayOut(
            "that it should have: from_pretrained(directory, rope_parameters=...)",
            lambda: record(loaded=False),
            lambda: record(loaded=True),
        )
    )
