"""What transformers' configurations say of caches, against what its models keep.

The oracle is the model: built without weights and run on the meta device, it fills a cache whose
tensors have shapes and no bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvx_adapters import transformers as hf
from kvx_adapters.transformers.sizes import kv_layers, sizes_in_words, unsaid
from kvx_core import CacheFacts, UnsupportedError
from tests.adapters.transformers_model import make_model

transformers = pytest.importorskip("transformers")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

CLASSES: dict[str, str] = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# What a default configuration lacks to make a model.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 64},
    "granitemoehybrid": {"layer_types": ["mamba"] * 30 + ["attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv"] * 16 + ["full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
MOST_LAYERS = 8  # a period of any pattern
WHOLE = {  # they have other fields for it
    *("bart", "bigbird_pegasus", "gpt_neo", "hrm_text", "mbart", "mvp", "pegasus", "prophetnet"),
    "zamba2",
}
# They make no model of a default configuration, or read numbers of a tensor while they run.
OTHERS = {
    *("big_bird", "blenderbot", "blt", "cohere_compass_text", "dbrx", "dots1", "gemma3n"),
    *("gemma3n_text", "gemma4_assistant", "gemma4_unified_assistant", "jetmoe", "longcat_flash"),
    *("marian", "megatron-bert", "moshi", "musicgen", "musicgen_melody", "qwen4_exp"),
    *("qwen4_exp_text", "reformer", "rembert", "roformer", "xlm", "xlnet", "xmod"),
}


@pytest.fixture
def bfloat16() -> Iterator[None]:
    """Experts compute in no other dtype on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def kept(name: str, config: Any) -> list[tuple[int, int, int, int]]:
    """(layer, KV heads, head_dim of keys, of values) of each layer that has keys and values."""
    with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config._attn_implementation = "eager"  # others ask whether a mask is all ones
        made_by = CLASSES.get(config.model_type, CLASSES[name])
        model = getattr(transformers, made_by)(config).eval()
        cache = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=True)
    cache = cache.get("past_key_values")
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    found = []
    for i, layer in enumerate(layers):
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.numel():
            found.append((i, keys.shape[1], keys.shape[3], layer.values.shape[3]))
    return found


def said(config: Any) -> list[tuple[int, int, int, int]]:
    return [
        (layer.layer, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
        for layer in kv_layers(config)
    ]


def of_text(name: str, **fields: Any) -> Any:
    return transformers.AutoConfig.for_model(name, **fields).get_text_config(decoder=True)


def configs(name: str) -> Any:
    """As they are by default, but for the number of layers."""
    config = of_text(name, **FIELDS.get(name, {}))
    if name not in {*FIELDS, *WHOLE} and getattr(config, "num_hidden_layers", 0) > MOST_LAYERS:
        fewer = {"num_hidden_layers": MOST_LAYERS}
        config = of_text(name, **fewer)
        if config.num_hidden_layers != MOST_LAYERS:  # that of a part of the model
            config = of_text(name, text_config=fewer)
        assert config.num_hidden_layers == MOST_LAYERS
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


@pytest.mark.slow
@pytest.mark.usefixtures("bfloat16")
def test_models_keep_what_their_configurations_say() -> None:
    names = sorted(set(CLASSES) - OTHERS)
    assert len(names) > 140
    wrong = {}
    for name in names:
        config = configs(name)
        if unsaid(config):
            with pytest.raises(UnsupportedError, match=f"of type {name}, which keeps "):
                kv_layers(config)
        elif said(config) != (found := kept(name, config)):
            wrong[name] = (said(config)[:2], found[:2])
    assert not wrong


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("falcon", {"multi_query": True}),
        ("falcon", {"multi_query": False}),
        (
            "falcon",
            {"new_decoder_architecture": True, "hidden_size": 512}
            | {"num_attention_heads": 8, "num_kv_heads": 2},
        ),
        ("nemotron_h", {}),
        ("deepseek_v3", {"num_hidden_layers": 2}),
        ("inkling_text", {"num_hidden_layers": 6}),
        ("mllama_text_model", {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]}),
    ],
)
def test_layers_that_differ(name: str, fields: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(name, **fields)
    if name == "mllama_text_model":
        config.pad_token_id = 0
        assert [layer[0] for layer in said(config)] == [0, 2, 4]
    else:
        assert said(config) == kept(name, config)


@pytest.mark.parametrize("name", ["openai-gpt", "recurrent_gemma", "rwkv", "xlstm"])
def test_models_with_caches_of_their_own(name: str) -> None:
    """Their class makes no cache of transformers."""
    config = transformers.AutoConfig.for_model(name)
    with pytest.raises(UnsupportedError) as raised:
        kv_layers(config)
    assert str(raised.value) == (
        f"config is of a model of type {name}, which keeps {unsaid(config)}: expected one that "
        "keeps what its configuration says. It makes no cache of transformers' classes: run the "
        "prompt in this model"
    )
    assert "xlstm" not in name or "state" in str(raised.value)


def test_a_model_whose_sizes_are_in_its_code_is_run_once() -> None:
    model = make_model(
        "MiMoV2Flash",
        num_hidden_layers=2,
        moe_intermediate_size=16,
        num_experts_per_tok=1,
        n_routed_experts=2,
        v_head_dim=8,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
        mlp_layer_types=["dense", "dense"],
    )
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(UnsupportedError, match=r"Run the model once instead, to make its cache$"):
        hf.reserve(cache, model, batch_size=1, num_tokens=3)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 3, dtype=torch.long), past_key_values=cache)
    found = [group.view.layers[0] for group in hf.layer_groups(cache, CacheFacts())]
    assert [(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in found] == [
        (2, 16, 8),
        (4, 16, 8),
    ]


@pytest.mark.parametrize("with_config", [True, False])
def test_a_model_of_which_some_layers_keep_an_image_has_no_room(with_config: bool) -> None:
    config = transformers.MllamaTextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[1],
        pad_token_id=None,
    )
    model = transformers.MllamaForCausalLM(config).eval()
    cache = transformers.DynamicCache(**({"config": config} if with_config else {}))
    with pytest.raises(UnsupportedError) as raised:
        hf.reserve(cache, model, batch_size=1, num_tokens=3)
    assert str(raised.value) == (
        "MllamaForCausalLM has keys and values of tokens in the layers [0, 2] alone, expected them "
        "or states in all: the others keep an image's, for which a cache has no room before a "
        "prompt. Run the prompt in this model"
    )
    assert cache.get_seq_length() == 0


def test_latents_have_room() -> None:
    """Latents (MLA) are the keys of one head, and their rotated key is its value."""
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    model = make_model("DeepseekV3", head_dim=..., num_key_value_heads=4, **experts)
    cache = transformers.DynamicCache(config=model.config)
    hf.reserve(cache, model, batch_size=2, num_tokens=3)
    once = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(2, 3, dtype=torch.long), past_key_values=once)
    for mine, theirs in zip(cache.layers, once.layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
        assert mine.values.shape == theirs.values.shape
        assert not mine.keys.any()
        assert not mine.values.any()
    facts = hf.cache_facts(model, allow_unknown=True)
    assert facts.total_kv_heads == 1
    words = sizes_in_words(kv_layers(model.config))
    assert words == "3 layers with 1 KV head of 512 and values of 64"
    with pytest.raises(UnsupportedError, match=words):
        hf.geometry(model, batch_size=2, num_tokens=3)
