"""Facts of transformers' decoders: how keys turn, and layers that differ in windows and sizes.

Each model is a tiny one of random weights, of the real class. Its own cache is the judge of how its
keys turn: two equal tokens have equal keys but for their rotation.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvx_adapters import transformers as hf
from kvx_adapters.transformers.sizes import kv_layers
from kvx_core import (
    CacheFacts,
    InvalidArgumentError,
    OutOfRangeError,
    Section,
    Snapshot,
    UnsupportedError,
    migrate,
    verify,
)
from kvx_core.model.rope import standard_rope
from tests.facts import SAME_MODEL

DIM, WINDOW = 16, 8
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PLE = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}


def make(name: str, **fields: Any) -> Any:
    """A model; a field that is ... is left to the config's default."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    given = {key: value for key, value in (SIZES | fields).items() if value is not ...}
    names = f"{name.removesuffix('Text')}Config", f"{name}Config"
    config = next(getattr(transformers, one) for one in names[::-1] if hasattr(transformers, one))
    model = transformers.AutoModelForCausalLM.from_config(config(**given))
    torch.random.set_rng_state(state)
    return model.eval().requires_grad_(False)


def gemma4(**fields: Any) -> Any:
    """Windows with 2 KV heads of 16, full attention with 1 of 32."""
    sizes = {"global_head_dim": 2 * DIM, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    return make("Gemma4Text", **MIXED, **PLE, **(sizes | fields))


def gemma3n(num_layers: int = 6, shared: int = 2) -> Any:
    kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
    return make(
        "Gemma3nText",
        **PLE,
        num_hidden_layers=num_layers,
        num_kv_shared_layers=shared,
        layer_types=kinds,
        sliding_window=WINDOW,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * num_layers,
        intermediate_size=[96] * num_layers,
    )


def empty(kind: str, model: Any, room: int = 40) -> Any:
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=room)


@torch.inference_mode()
def run(model: Any, cache: Any, *tokens: int) -> int:
    ids = torch.tensor([tokens])
    return int(model(input_ids=ids, past_key_values=cache).logits[0, -1].argmax())


def prompt(num_tokens: int) -> list[int]:
    return [(11 * i * i + 5 * i + 3) % 97 for i in range(num_tokens)]


# ---- how keys turn ----


def turns(model: Any, order: str, dim: int) -> list[bool]:
    """Of each layer, whether exactly its first `dim` dims turn, by pairs in this order, as its own
    cache shows it."""
    cache = transformers.DynamicCache()
    run(model, cache, *[5] * 40)
    found = []
    for layer in cache.layers:
        before, after = (
            layer.keys[0][:, 0],
            layer.keys[0][:, 39],
        )  # positions 0 and 39: (heads, dim)
        sizes = []
        for key in (before, after):
            first, second = (
                key[:, :dim].chunk(2, -1)
                if order == "half"
                else (
                    key[:, :dim:2],
                    key[:, 1:dim:2],
                )
            )
            sizes.append(first**2 + second**2)
        stay = torch.allclose(before[:, dim:], after[:, dim:], rtol=3e-5, atol=1e-6)
        moved = not torch.allclose(before[:, :1], after[:, :1], rtol=1e-2)
        found.append(bool(torch.allclose(*sizes, rtol=3e-5, atol=1e-6)) and stay and moved)
    return found


FAMILIES: list[tuple[str, dict[str, Any], str, int]] = [
    ("Llama", {}, "half", DIM),
    ("Qwen2", {}, "half", DIM),
    ("Qwen3", {}, "half", DIM),
    ("Mistral", {"sliding_window": WINDOW}, "half", DIM),
    ("Phi3", {"head_dim": ...}, "half", DIM),
    ("Phi", {"head_dim": ..., "partial_rotary_factor": 0.5}, "half", 8),
    ("GPTNeoX", {"head_dim": ..., "num_key_value_heads": ...}, "half", 4),
    ("Cohere", {}, "interleaved", DIM),
    ("Glm", {"partial_rotary_factor": 0.5}, "interleaved", DIM // 2),
    ("Gemma2", {"sliding_window": WINDOW}, "half", DIM),
    ("Gemma3Text", MIXED, "half", DIM),
    ("Olmo3", MIXED, "half", DIM),
    ("GptOss", MIXED | EXPERTS, "half", DIM),  # a cosine for each pair
    ("Llama4Text", EXPERTS | {"intermediate_size_mlp": 96}, "interleaved", DIM),  # complex angles
    (
        "GPTJ",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "hidden_size": ...}
        | dict.fromkeys(
            ("num_hidden_layers", "num_attention_heads", "max_position_embeddings"), ...
        )
        | dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size"), ...),
        "interleaved",
        8,
    ),
]


@pytest.mark.parametrize(
    ("name", "fields", "order", "dim"), FAMILIES, ids=[family[0] for family in FAMILIES]
)
def test_a_family(name: str, fields: dict[str, Any], order: str, dim: int) -> None:
    model = make(name, **fields)
    facts = hf.cache_facts(model)
    assert (facts.rotary, facts.rotary_dim, facts.rope_applied) == (order, dim, True)
    assert facts.num_layers == 2
    other = "interleaved" if order == "half" else "half"
    assert all(turns(model, order, dim)[:1])
    assert not any(turns(model, other, dim))
    assert not any(turns(model, order, dim - 2))


def test_gemma_3n_and_4() -> None:
    """Their rotary embeddings take a type of layer; Gemma 4's make angles of two widths."""
    facts = hf.cache_facts(gemma3n())
    assert (facts.rotary, facts.rotary_dim, facts.num_layers) == ("half", DIM, 4)
    model = gemma4()
    facts = hf.cache_facts(model)
    assert (facts.rotary, facts.rotary_dim, facts.total_kv_heads) == (None, None, None)
    assert facts.window is None
    cache = empty("dynamic", model)
    run(model, cache, *prompt(5))
    full, windows = hf.layer_groups(cache, facts, model)
    assert (full.layers, windows.layers) == ((1,), (0,))
    for group, dim, heads, window in ((full, 2 * DIM, 1, 0), (windows, DIM, 2, WINDOW)):
        own = group.view.facts
        assert (own.rotary, own.rotary_dim, own.rope_applied) == ("half", dim, True)
        assert (own.total_kv_heads, own.window, own.num_layers) == (heads, window, 1)
        layer = group.view.layers[0]
        assert (layer.num_kv_heads, layer.head_dim) == (heads, dim)


@pytest.mark.parametrize("name", ["Llava", "Qwen2VL"])
def test_a_decoder_in_a_model_of_several_modalities(name: str) -> None:
    """The vision tower turns other keys, by other functions."""
    text = {key: value for key, value in SIZES.items() if key != "head_dim"}
    if name == "Llava":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        config = transformers.LlavaConfig(
            text_config=transformers.CohereConfig(**text).to_dict(),
            vision_config=transformers.CLIPVisionConfig(**vision).to_dict(),
        )
        model, order = transformers.LlavaForConditionalGeneration(config), "interleaved"
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        config = transformers.Qwen2VLConfig(
            text_config=text | {"rope_parameters": rope},
            vision_config={"embed_dim": 32, "depth": 1, "num_heads": 2, "hidden_size": 64},
        )
        model, order = transformers.Qwen2VLForConditionalGeneration(config), "half"
    facts = hf.cache_facts(model.eval())
    assert (facts.rotary, facts.rotary_dim) == (order, DIM)
    assert turns(model, order, DIM)[0]


def test_models_that_do_not_turn() -> None:
    small = {"n_embd": 48, "n_head": 4, "n_layer": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, **small))
    falcon = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    config = transformers.FalconConfig(vocab_size=97, alibi=True, **falcon)
    for model in (gpt2, transformers.FalconForCausalLM(config)):
        facts = hf.cache_facts(model)
        assert (facts.rotary, facts.rotary_dim, facts.rope_applied) == ("none", 0, True)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("NanoChat", {}, "apply_rotary_pos_emb neither turns halves of a key nor neighbours by a"),
        (
            "DeepseekV2",
            {"n_routed_experts": 2, "num_experts_per_tok": 1, "head_dim": ...},
            "keys of latent attention (MLA) turn in their last dims",
        ),
        ("RoFormer", {"is_decoder": True}, "by no function that is known, expected one function"),
    ],
)
def test_what_is_not_known_has_a_reason(name: str, fields: dict[str, Any], reason: str) -> None:
    model = make(name, **fields)
    with pytest.raises(UnsupportedError) as raised:
        hf.cache_facts(model)
    said = str(raised.value)
    assert said.startswith(f"the rotation of {name}ForCausalLM is not known: ")
    assert reason in said
    assert said.endswith(
        "With cache_facts(model, allow_unknown=True) caches of transformers take its keys, and no "
        "other engine's"
    )
    facts = hf.cache_facts(model, allow_unknown=True)
    assert (facts.rotary, facts.rotary_dim, facts.rope_applied) == (None, None, None)


def test_functions_that_turn_keys_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama")
    kind = type(model.model.layers[0].self_attn)
    module = sys.modules[kind.__module__]
    monkeypatch.setattr(module, "apply_rope_too", lambda q, k: (q, k), raising=False)

    def other(self: Any, q: Any, k: Any) -> Any:
        return apply_rope_too(q, k)  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setattr(kind, "other", other, raising=False)
    reason = "turns keys by apply_rope_too, apply_rotary_pos_emb, expected one function"
    with pytest.raises(UnsupportedError, match=reason):
        hf.cache_facts(model)


def test_rotary_embeddings_of_two_widths_are_not_known() -> None:
    """Nothing says which layers use which."""
    model, narrow = make("Llama"), make("Llama", head_dim=DIM // 2)
    model.model.rotary_emb_local = narrow.model.rotary_emb
    with pytest.raises(UnsupportedError, match="several, whose angles have different shapes"):
        hf.cache_facts(model)


@pytest.mark.parametrize("rotary", [None, "half"])
def test_groups_keep_a_rotation_that_only_the_caller_knows(rotary: Any) -> None:
    model = make("NanoChat")
    cache = empty("dynamic", model)
    hf.reserve(cache, model, batch_size=1, num_tokens=3)
    facts = replace(hf.cache_facts(model, allow_unknown=True), rotary=rotary)
    (group,) = hf.layer_groups(cache, facts, model)
    assert group.view.facts.rotary == rotary


@pytest.mark.parametrize("in_config", [7, None])
@pytest.mark.parametrize("in_parameters", [8, None])
def test_lengths_of_rotations_are_those_that_transformers_takes(
    in_config: int | None, in_parameters: int | None
) -> None:
    length = "original_max_position_embeddings"
    given = {} if in_config is None else {length: in_config}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    rope |= {} if in_parameters is None else {length: in_parameters}
    raw = {"max_position_embeddings": 9, "rope_parameters": rope} | given

    def taken(config: Any) -> Any:
        config.standardize_rope_params()  # as a rotary embedding does
        return config.rope_parameters

    alone = taken(transformers.LlamaConfig(**copy.deepcopy(raw)))
    assert standard_rope(raw)[""][length] == alone[length]
    default = {"rope_type": "default", "rope_theta": 1.0}
    raw["rope_parameters"] = {"full_attention": rope, "sliding_attention": default}
    nested = taken(transformers.Gemma3TextConfig(**copy.deepcopy(raw)))["full_attention"]
    assert standard_rope(raw)["full_attention"][length] == nested[length]


def test_a_chunk_is_no_window() -> None:
    kinds = ["chunked_attention", "full_attention"]
    chunks = {"attention_chunk_size": 8, "layer_types": kinds, "intermediate_size_mlp": 96}
    model = make("Llama4Text", **EXPERTS, **chunks)
    facts = hf.cache_facts(model)
    assert facts.window is None
    cache = transformers.DynamicCache()
    run(model, cache, *prompt(5))
    groups = {group.layers: group.view.facts for group in hf.layer_groups(cache, facts, model)}
    assert {layers: own.window for layers, own in groups.items()} == {(0,): None, (1,): 0}


def test_layers_whose_kinds_have_no_names() -> None:
    """transformers takes a window before a chunk, as its caches do."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    for fields, window in (
        ({}, 0),
        ({"sliding_window": 8}, 8),
        ({"attention_chunk_size": 8}, None),
        ({"sliding_window": 4, "attention_chunk_size": 8}, 4),
    ):
        config = transformers.LlamaConfig(**sizes, **fields)
        assert [layer.window for layer in kv_layers(config)] == [window] * 2


def test_a_record_says_whether_llama_4_tunes_its_attention(tmp_path: Path) -> None:
    """Which engines leave out or do, whatever the file says."""
    model = make("Llama4Text", **EXPERTS, intermediate_size_mlp=96, attn_temperature_tuning=False)
    model.save_pretrained(tmp_path)
    assert hf.model_record(model, tmp_path).overrides == {"attn_temperature_tuning": False}
    model.config.attn_temperature_tuning = True
    assert hf.model_record(model, tmp_path).overrides == {"attn_temperature_tuning": True}


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq"])
def test_frequencies_of_one_type_that_are_changed_by_hand(
    kind: str, name: str, tmp_path: Path
) -> None:
    model = make("Gemma3Text", **MIXED)
    model.save_pretrained(tmp_path)
    hf.model_record(model, tmp_path)
    dict(model.model.rotary_emb.named_buffers())[f"{kind}_{name}"].mul_(0.5)
    with pytest.raises(UnsupportedError, match=r"rotary_emb is not what model\.config says"):
        hf.model_record(model, tmp_path)


def test_frequencies_that_a_long_prompt_has_changed(tmp_path: Path) -> None:
    """Those of a dynamic embedding grow with the longest prompt so far, and shrink again."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = make("Llama", rope_parameters=rope, max_position_embeddings=8)
    model.save_pretrained(tmp_path)
    before = hf.model_record(model, tmp_path, num_tokens=8)
    run(model, empty("dynamic", model), *prompt(12))
    assert not torch.equal(*dict(model.model.rotary_emb.named_buffers()).values())
    assert hf.model_record(model, tmp_path, num_tokens=8) == before


# ---- layers that differ ----


@pytest.mark.parametrize("kinds", [("dynamic", "static"), ("static", "dynamic")], ids="-".join)
@pytest.mark.parametrize("num_tokens", [5, 21])
@pytest.mark.parametrize("make_model", [gemma4, gemma3n])
def test_a_prompt_of_unequal_layers_goes_on(
    make_model: Any, num_tokens: int, kinds: tuple[str, str]
) -> None:
    model = make_model()
    facts = hf.cache_facts(model, fingerprint="f")
    src, dst = (empty(kind, model) for kind in kinds)
    first = run(model, src, *prompt(num_tokens))
    hf.reserve(dst, model, batch_size=1, num_tokens=num_tokens)
    assert len(dst.layers) == len(src.layers)
    pairs = [hf.layer_groups(cache, facts, model) for cache in (src, dst)]
    assert len(pairs[0]) == len(pairs[1])
    for here, there in zip(*pairs, strict=True):
        migrate(*hf.shared_spans(here, there))
    for layer, moved in zip(src.layers, dst.layers, strict=True):
        held = min(num_tokens, WINDOW - 1) if layer.is_sliding else num_tokens
        for name in ("keys", "values"):
            here, there = (
                getattr(one, name)[:, :, : min(num_tokens, getattr(one, name).shape[2])]
                for one in (layer, moved)
            )
            assert torch.equal(there[:, :, -held:], here[:, :, -held:])
    wanted, found = [first], [first]
    for _ in range(6):
        wanted.append(run(model, src, wanted[-1]))
        found.append(run(model, dst, found[-1]))
    assert found == wanted


def test_groups_of_unequal_layers_without_their_model() -> None:
    cache = transformers.DynamicCache()
    for i, shape in enumerate([(1, 2, 5, DIM), (1, 1, 5, 2 * DIM), (1, 2, 5, DIM), (1, 2, 5, 4)]):
        cache.update(torch.zeros(shape), torch.zeros(shape), i)
    groups = hf.layer_groups(cache, CacheFacts(window=0))
    assert [group.layers for group in groups] == [(0, 2), (1,), (3,)]


def test_geometry_of_unequal_layers() -> None:
    with pytest.raises(UnsupportedError) as raised:
        hf.geometry(gemma4(), batch_size=1, num_tokens=3)
    assert str(raised.value) == (
        "Gemma4ForCausalLM has 1 layer with 2 KV heads of 16, 1 layer with 1 KV head of 32, "
        "expected the same in all. reserve makes room of each layer's own size"
    )
    assert hf.geometry(gemma3n(), batch_size=1, num_tokens=3).num_layers == 4


def test_nothing_is_reserved_before_all_is_checked() -> None:
    model = gemma3n()
    short = empty("static", model, room=10)
    with pytest.raises(InvalidArgumentError) as raised:
        hf.reserve(short, model, batch_size=1, num_tokens=11)
    assert str(raised.value) == (
        "cache.layers[1] has room for 10 tokens, expected it for 11. Make it with max_cache_len=11 "
        "or more"
    )
    other = empty("dynamic", gemma3n(num_layers=4, shared=0))
    other.layers.pop()
    with pytest.raises(InvalidArgumentError, match=r"cache has 3 layers and .* \[0, 1, 2, 3\] of"):
        hf.reserve(other, model, batch_size=1, num_tokens=11)
    later = empty("dynamic", model)
    later.layers[3].update(torch.zeros(1, 2, 4, DIM), torch.zeros(1, 2, 4, DIM))
    with pytest.raises(InvalidArgumentError, match="cache holds 4 tokens, expected none"):
        hf.reserve(later, model, batch_size=1, num_tokens=11)
    linear = empty("dynamic", model)
    linear.layers[2] = transformers.cache_utils.LinearAttentionLayer()
    linear.layers[2].get_seq_length = lambda: 0
    with pytest.raises(UnsupportedError, match="layer is a LinearAttentionLayer, expected Dynamic"):
        hf.reserve(linear, model, batch_size=1, num_tokens=11)
    for cache in (short, other, linear):
        assert all(layer.get_seq_length() == 0 for layer in cache.layers)


def test_windows_of_a_cache_that_keeps_all_tokens() -> None:
    """A DynamicCache() without config: the model says which layers have windows."""
    model = make("Gemma3Text", **MIXED)
    cache = transformers.DynamicCache()
    run(model, cache, *prompt(21))
    facts = hf.cache_facts(model, fingerprint="f")
    with pytest.raises(InvalidArgumentError) as raised:
        hf.layer_groups(cache, facts)
    assert str(raised.value) == (
        "facts.window is None and all layers of the cache hold all tokens, expected to know which "
        "layers have windows. Call layer_groups(cache, facts, model)"
    )
    full, windows = hf.layer_groups(cache, facts, model)
    for group, layers, window in ((full, (1,), 0), (windows, (0,), WINDOW)):
        assert (group.layers, group.window, group.view.facts.window) == (layers, window, window)
        assert (group.first_token, group.num_tokens) == (0, 21)
    every = make("Mistral", sliding_window=WINDOW)
    (group,) = hf.layer_groups(cache, hf.cache_facts(every))
    assert group.view.facts.window == WINDOW
    with pytest.raises(
        InvalidArgumentError, match=r"cache.layers\[1\] has keys .* layers \[0\] of"
    ):
        hf.layer_groups(cache, facts, make("Llama", num_hidden_layers=1))


# ---- what a cache counts ----


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_holds_one_token_less_than_generate_returns(kind: str) -> None:
    """The last one was sampled, and has no keys yet."""
    model = make("Llama")
    cache = empty(kind, model, room=64)
    ids = model.generate(
        torch.tensor([prompt(10)]), past_key_values=cache, max_new_tokens=20, do_sample=False,
        eos_token_id=None,
    )  # fmt: skip
    assert ids.shape[1] == 30
    facts = hf.cache_facts(model, fingerprint="f")
    view = hf.cache_view(cache, facts)
    section = Section((0, 1), view, None)
    says = "holds 29 tokens of sequence 0 by its engine's own count, expected at least 30"
    if kind == "static":
        with pytest.raises(OutOfRangeError, match=says):
            Snapshot.capture(ids[0], [section])
        other = empty("dynamic", model)
        hf.reserve(other, model, batch_size=1, num_tokens=30)
        with pytest.raises(OutOfRangeError, match=says):
            migrate(view, hf.cache_view(other, facts), [30])
        assert not other.layers[0].keys.any()
        (group,) = hf.layer_groups(cache, facts)
        assert (group.first_token, group.num_tokens) == (0, 29)
        with pytest.raises(OutOfRangeError, match=says):
            migrate(group.view, hf.cache_view(other, facts), [30])
    assert Snapshot.capture(ids[0, :29], [section]) is not None


@torch.inference_mode()
def test_a_cache_that_was_reset_holds_its_new_tokens() -> None:
    model = make("Llama")
    cache = empty("static", model)
    run(model, cache, *prompt(20))
    facts = hf.cache_facts(model, fingerprint="f")
    view, section = hf.cache_view(cache, facts), None
    section = Section((0, 1), view, None)
    assert Snapshot.capture(prompt(20), [section]) is not None
    cache.reset()
    run(model, cache, *prompt(10))
    other = empty("static", model)
    hf.reserve(other, model, batch_size=1, num_tokens=20)
    there = hf.cache_view(other, facts)
    says = "holds 10 tokens of sequence 0 by its engine's own count, expected at least"
    with pytest.raises(OutOfRangeError, match=f"src {says} 20"):
        migrate(view, there, [20])
    with pytest.raises(OutOfRangeError, match=f"section.view {says} 20"):
        Snapshot.capture(prompt(20), [section])
    with pytest.raises(OutOfRangeError, match=f"dst {says} 11"):
        migrate(there, view, [11])
    with pytest.raises(
        OutOfRangeError, match=f"verify reads src as src: .*src {says} 11|src {says}"
    ):
        verify(view, there, [11])
    for layer in other.layers:
        assert not layer.keys.any()
    migrate(view, there, [10])
    assert torch.equal(other.layers[1].values[:, :, :10], cache.layers[1].values[:, :, :10])


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_layer_that_is_behind_the_others(kind: str) -> None:
    """As after a forward pass that failed half-way."""
    cache = empty(kind, make("Llama"))
    for i, count in enumerate((6, 5)):
        cache.update(torch.ones(1, 2, count, DIM), torch.ones(1, 2, count, DIM), i)
    view = hf.cache_view(cache, SAME_MODEL)
    other = empty("static", make("Llama"))
    hf.reserve(other, make("Llama"), batch_size=1, num_tokens=6)
    with pytest.raises(OutOfRangeError, match=r"src holds 5 tokens of sequence 0 .* at least 6"):
        migrate(view, hf.cache_view(other, SAME_MODEL), [6])


def test_slots_of_a_mask_that_is_shorter_than_the_cache() -> None:
    """Its columns are not the cache's: slots of row 1 would be tokens of row 0."""
    model = make("Llama")
    cache, other = (empty("static", model, room=16) for _ in "ab")
    for one in (cache, other):
        hf.reserve(one, model, batch_size=2, num_tokens=5)
    span = hf.cache_view(cache, SAME_MODEL).at(slots=hf.slot_mapping(torch.ones(2, 5)))
    with pytest.raises(OutOfRangeError, match=r"src holds 5 tokens of sequence 0 .* at least 10"):
        migrate(span, hf.cache_view(other, SAME_MODEL), [5, 5])


def test_a_model_of_states_alone_has_no_geometry() -> None:
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    with pytest.raises(UnsupportedError):
        hf.geometry(model, batch_size=1, num_tokens=3)


def test_an_offloaded_cache_is_refused() -> None:
    cache = empty("dynamic", make("Llama"))
    cache.offloading = True
    for call in (hf.cache_view, hf.layer_groups):
        with pytest.raises(
            UnsupportedError, match=r"cache.offloading is True, expected False: its"
        ):
            call(cache, CacheFacts())


def test_a_window_that_two_crops_have_cut_is_refused() -> None:
    """Each crop takes a token from both ends: attention would read zeros for them."""
    model = make("Mistral", sliding_window=WINDOW)
    facts = hf.cache_facts(model, fingerprint="f")
    cache, other = empty("dynamic", model), empty("dynamic", model)
    cache.activate_past_recording()
    run(model, cache, *prompt(12))
    cache.crop(-1)
    (group,) = hf.layer_groups(cache, facts)
    assert (group.first_token, group.num_tokens) == (4, 7)
    for held, tokens in ((6, 10), (5, 9)):
        cache.crop(-1)
        with pytest.raises(InvalidArgumentError) as raised:
            hf.layer_groups(cache, facts)
        assert str(raised.value) == (
            f"cache.layers[0] holds the last {held} of {tokens} tokens, expected 7 as its "
            "attention reads them: crops have dropped the others. Run the sequence anew"
        )
    hf.reserve(other, model, batch_size=1, num_tokens=9)
    assert hf.layer_groups(other, facts)[0].num_tokens == 7
