"""use_packed: a model of transformers keeps its tokens in PackedKVCaches, and computes the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_core import PackedKVCache, UnsupportedError, packed_view, verify

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 3
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(**SIZES, **SLIDING)
        return transformers.Gemma3ForCausalLM(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def prompts() -> tuple[Tensor, Tensor]:
    """Two of 9 and of 6 tokens, padded on the left, and their mask."""
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = 0, 0
    return ids, mask


def generated(model: Any, **options: Any) -> Any:
    ids, mask = prompts()
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, return_dict_in_generate=True, **options
    )


def same_bytes(cache: Any, other: Any) -> bool:
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(cache.layers, other.layers, strict=True)
    )


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_model_generates_the_same_tokens(kind: str, options: dict[str, Any]) -> None:
    model = model_of(kind)
    wanted = generated(model, do_sample=False, **options)
    handle = hf.use_packed(model)
    found = generated(model, do_sample=False, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    assert same_bytes(found.past_key_values, wanted.past_key_values)
    packed = [hasattr(layer, "kv_cache") for layer in found.past_key_values.layers]
    assert packed == ([False, True, False] if kind == "gemma3" else [True] * LAYERS)
    cache = found.past_key_values.layers[1].kv_cache
    assert isinstance(cache, PackedKVCache)
    assert cache.packed_keys().shape == (2 * options.get("num_beams", 1), 20, KV_HEADS * DIM)
    handle.remove()
    again = generated(model, do_sample=False)
    assert not any(hasattr(layer, "kv_cache") for layer in again.past_key_values.layers)


def test_steps_append_in_place() -> None:
    model, (ids, mask) = model_of("llama"), prompts()
    hf.use_packed(model)
    with torch.inference_mode():
        past = model(ids, attention_mask=mask).past_key_values  # it made the cache itself
        caches = [layer.kv_cache for layer in past.layers]
        at = [cache.packed_keys().data_ptr() for cache in caches]
        for step in range(5):
            mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
            model(ids[:, step : step + 1], attention_mask=mask, past_key_values=past)
    assert [layer.kv_cache for layer in past.layers] == caches
    assert [layer.keys.data_ptr() for layer in past.layers] == at
    assert [cache.seq_len for cache in caches] == [14] * LAYERS
    with torch.inference_mode():
        assert model(ids, use_cache=False).past_key_values is None
        past = model(ids, None, None, None).past_key_values  # by position
    assert [layer.kv_cache.seq_len for layer in past.layers] == [9] * LAYERS
    model.config.use_cache = False
    with torch.inference_mode():
        assert model(ids).past_key_values is None  # nobody asks for one


def test_a_cache_of_the_caller_is_filled_and_keeps_its_tokens() -> None:
    model, (ids, _) = model_of("llama"), prompts()
    theirs, ours = (transformers.DynamicCache(config=model.config) for _ in range(2))
    with torch.inference_mode():
        model(ids, past_key_values=theirs)
        model(ids[:, :4], past_key_values=ours)  # before use_packed
        hf.use_packed(model)
        model(ids[:, 4:], past_key_values=ours)
        lazy = transformers.DynamicCache()
        model(ids, past_key_values=lazy)
    for cache in (ours, lazy):
        assert [layer.kv_cache.seq_len for layer in cache.layers] == [9] * LAYERS
        for layer, wanted in zip(cache.layers, theirs.layers, strict=True):
            torch.testing.assert_close(layer.keys, wanted.keys, rtol=0, atol=1e-5)
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.inference_mode():
        model(ids, past_key_values=static)
    assert not any(hasattr(layer, "kv_cache") for layer in static.layers)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-4),
        lambda cache: (cache.batch_repeat_interleave(3), cache.crop(-4)),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.reset(),
        lambda cache: None,
    ],
    ids=["crop", "crop six", "reorder", "repeat", "select", "reset", "nothing"],
)
def test_what_transformers_does_to_its_cache(change: Any) -> None:
    """The same as to its own, and the tokens that follow."""
    ids, _ = prompts()
    model = model_of("llama")
    found = []
    for use in (False, True):
        if use:
            hf.use_packed(model)
        with torch.inference_mode():
            past = model(ids).past_key_values
            change(past)
            held = past.get_seq_length()
            batch = past.layers[0].keys.shape[0] if held else 2
            model(ids[:1, :3].expand(batch, 3), past_key_values=past)
            past = copy.deepcopy(past)
            model(ids[:1, 4:6].expand(batch, 2), past_key_values=past)
        found.append((held, past))
    assert found[0][0] == found[1][0]
    assert same_bytes(found[0][1], found[1][1])
    for layer in found[1][1].layers:
        keys, values = layer.kv_cache.packed_keys(), layer.kv_cache.packed_values()
        assert torch.equal(keys, layer.keys.transpose(1, 2).flatten(2))
        assert torch.equal(values, layer.values.transpose(1, 2).flatten(2))


def test_a_cache_that_offloads_its_layers_keeps_them() -> None:
    past = transformers.DynamicCache(config=model_of("llama").config)
    past.offloading = True
    hf.packed.pack_layers(past)
    assert not any(hasattr(layer, "kv_cache") for layer in past.layers)


def test_a_cache_without_tokens_is_reordered() -> None:
    past = transformers.DynamicCache(config=model_of("llama").config)
    hf.packed.pack_layers(past)
    past.layers[0].lazy_initialization(*torch.zeros(2, 1, KV_HEADS, 1, DIM))
    past.reorder_cache(torch.tensor([0]))
    assert [layer.kv_cache.seq_len for layer in past.layers] == [0] * LAYERS


def test_such_a_cache_is_an_end_of_a_migration() -> None:
    model, (ids, _) = model_of("llama"), prompts()
    hf.use_packed(model)
    with torch.inference_mode():
        past = model(ids).past_key_values
    facts = hf.cache_facts(model, fingerprint="a model")
    caches = [layer.kv_cache for layer in past.layers]
    assert verify(hf.cache_view(past, facts), packed_view(caches, facts, KV_HEADS), [9, 9])


def test_gradients_flow() -> None:
    model, (ids, _) = model_of("llama"), prompts()
    model.train()
    model(ids, labels=ids).loss.backward()
    wanted = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    hf.use_packed(model)
    model(ids, labels=ids).loss.backward()
    for weight, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-4, atol=1e-6)
    model.gradient_checkpointing_enable()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for weight, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-4, atol=1e-6)


def test_models_that_it_refuses() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^model is a Linear, expected a PreTrainedModel of"
    ):
        hf.use_packed(torch.nn.Linear(1, 1))
    t5 = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedError, match="with an encoder or latent attention, expected a"):
        hf.use_packed(transformers.T5ForConditionalGeneration(t5))
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    deepseek = transformers.DeepseekV2Config(
        **(SIZES | latent | {"head_dim": 4, "q_lora_rank": None})
    )
    with pytest.raises(UnsupportedError, match=r"^model is a DeepseekV2ForCausalLM, with an enc"):
        hf.use_packed(transformers.DeepseekV2ForCausalLM(deepseek))
    vit = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises(UnsupportedError, match=r"^ViTModel\.forward takes no past_key_values, exp"):
        hf.use_packed(transformers.ViTModel(vit))
