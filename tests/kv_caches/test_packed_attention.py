"""CachedAttention, its masks and heads: a block that steps through a cache computes what it would
without one. A Llama and a Bloom of transformers are the oracles."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from kvx_core import CachedAttention, InvalidArgumentError, PackedKVCache
from kvx_core.caches.packed import alibi_mask, alibi_slopes, causal_mask, expand_heads
from kvx_core.caches.packed.heads import split_heads

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")

BATCH, HEADS, KV_HEADS, DIM = 2, 6, 3, 8
SEEDS = (0, 1, 2)


def random_tokens(seq_len: int, num_heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, seq_len, num_heads * DIM, generator=generator)


# ---- masks ----


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 0), (0, 4), (1, 1), (1, 5), (3, 3), (3, 7)])
def test_masks_are_those_of_the_last_tokens(q_len: int, kv_len: int) -> None:
    seen = causal_mask(q_len, kv_len)
    slopes = torch.tensor([0.5, 0.125])
    bias = alibi_mask(slopes, q_len, kv_len)
    assert seen.shape == (q_len, kv_len)
    assert bias.shape == (2, q_len, kv_len)
    assert seen.dtype is torch.bool
    for i in range(q_len):
        position = kv_len - q_len + i
        for j in range(kv_len):
            assert seen[i, j] == (j <= position)
            for head, slope in enumerate((0.5, 0.125)):
                wanted = -slope * (position - j) if j <= position else -float("inf")
                assert bias[head, i, j] == wanted


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 4), (1, 5), (5, 5), (3, 7)])
def test_masks_leave_padding_out(q_len: int, kv_len: int) -> None:
    """On both sides and in the midst; a query that is padding sees itself, whatever it computes."""
    padding = torch.tensor([[True, True, False, True, False, False, True]])[:, :kv_len]
    padding = torch.cat((padding, torch.zeros_like(padding)))
    seen = causal_mask(q_len, kv_len, key_padding_mask=padding)
    slopes = torch.tensor([0.5, 0.125])
    bias = alibi_mask(slopes, q_len, kv_len, key_padding_mask=padding)
    assert seen.shape == (2, q_len, kv_len)
    assert bias.shape == (2, 2, q_len, kv_len)
    for row in range(2):
        for i in range(q_len):
            position = kv_len - q_len + i
            for j in range(kv_len):
                wanted = j == position or (j < position and not padding[row, j])
                assert seen[row, i, j] == wanted
                between = int((~padding[row, j + 1 : position + 1]).sum())
                for head, slope in enumerate((0.5, 0.125)):
                    found = bias[row, head, i, j]
                    assert found == (-slope * between if wanted else -float("inf"))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 20, 32, 71, 112])
def test_slopes_are_those_of_bloom(num_heads: int) -> None:
    """Source: transformers 5.19 models/bloom/modeling_bloom.py, build_alibi_tensor"""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(num_heads), theirs, rtol=1e-6, atol=0)


def test_what_masks_refuse() -> None:
    for q_len, kv_len, says in (
        (3, 2, "q_len is 3, expected at most kv_len 2: queries are the last tokens"),
        (-1, 2, "q_len is -1, expected 0 to"),
        (1, 2.5, "kv_len is 2.5, expected an integer"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(says)):
            causal_mask(q_len, kv_len)
        with pytest.raises(InvalidArgumentError, match=re.escape(says)):
            alibi_mask(torch.ones(1), q_len, kv_len)
    with pytest.raises(InvalidArgumentError, match="num_heads is 0, expected 1 to"):
        alibi_slopes(0)
    with pytest.raises(InvalidArgumentError, match=r"slopes is \(2, 1\) torch.float32, expected"):
        alibi_mask(torch.ones(2, 1), 1, 1)
    with pytest.raises(InvalidArgumentError, match=r"slopes is \(2,\) torch.int64, expected"):
        alibi_mask(torch.ones(2, dtype=torch.int64), 1, 1)


# ---- heads ----


def test_heads_are_repeated_for_their_queries() -> None:
    packed = random_tokens(5, KV_HEADS, 0)
    expanded = expand_heads(packed, KV_HEADS, HEADS)
    assert expanded.shape == (BATCH, 5, HEADS * DIM)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        assert torch.equal(
            expanded[..., head * DIM : (head + 1) * DIM],
            packed[..., shared * DIM : (shared + 1) * DIM],
        )
    assert expand_heads(packed, KV_HEADS, KV_HEADS) is packed
    view = split_heads(packed, KV_HEADS)
    assert view.shape == (BATCH, KV_HEADS, 5, DIM)
    assert view.data_ptr() == packed.data_ptr()
    assert expand_heads(packed[:, :0], KV_HEADS, HEADS).shape == (BATCH, 0, HEADS * DIM)
    for call, says in (
        ((packed, 3, 7), "num_heads is 7, expected a multiple of num_kv_heads 3"),
        ((packed, 0, 7), "num_kv_heads is 0, expected 1 to"),
        ((packed[0], 3, 6), "packed.shape is (5, 24), expected (batch, seq, dim), dim a multiple"),
        ((packed, 5, 10), "packed.shape is (2, 5, 24), expected (batch, seq, dim), dim a multiple"),
        (([1], 3, 6), "packed is a list, expected a torch.Tensor"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(says)):
            expand_heads(*call)


# ---- attention ----


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, *, alibi: bool = False, scale: float | None = None
) -> Tensor:
    """A query at a time, a head at a time, in float64."""
    q_len, kv_len = query.shape[1], key.shape[1]
    repeats = query.shape[2] // key.shape[2]
    out = torch.zeros_like(query, dtype=torch.float64)
    slopes = alibi_slopes(HEADS).double()
    for head in range(HEADS):
        mine = slice(head * DIM, (head + 1) * DIM)
        shared = slice(head // repeats * DIM, (head // repeats + 1) * DIM)
        for i in range(q_len):
            position = kv_len - q_len + i
            keys, values = (t[:, : position + 1, shared].double() for t in (key, value))
            scores = (keys @ query[:, i, mine, None].double())[..., 0]
            scores = scores * (DIM**-0.5 if scale is None else scale)
            if alibi:
                scores += slopes[head] * (torch.arange(position + 1) - position)
            out[:, i, mine] = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return out.float()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(("alibi", "scale"), [(False, None), (True, None), (False, 0.7)])
def test_steps_through_the_cache_are_the_full_computation(
    alibi: bool, scale: float | None, expanded: bool, seed: int
) -> None:
    """A prompt, steps of one token, several at once, and fewer queries than new tokens."""
    total = 17
    query = random_tokens(total, HEADS, seed)
    key, value = (random_tokens(total, KV_HEADS, seed + 10 * i) for i in (1, 2))
    attend = CachedAttention(HEADS, DIM, num_kv_heads=KV_HEADS, alibi=alibi, scale=scale)
    wanted = by_hand(query, key, value, alibi=alibi, scale=scale)
    if expanded:  # dim is then that of the queries' heads
        key, value = (expand_heads(half, KV_HEADS, HEADS) for half in (key, value))
    full = attend(query, key, value)
    torch.testing.assert_close(full, wanted, rtol=0, atol=1e-5)

    attend.kv_cache = PackedKVCache()
    begin, found = 0, []
    for new in (7, 1, 1, 4, 1, 3):
        end = begin + new
        found.append(attend(query[:, begin:end], key[:, begin:end], value[:, begin:end]))
        begin = end
    assert attend.kv_cache.seq_len == total
    assert torch.equal(attend.kv_cache.packed_keys(), key)
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-5)

    cache = PackedKVCache()  # as an argument, and only the last query of a prompt
    attend(query[:, 9:10], key[:, :10], value[:, :10], kv_cache=cache)
    last = attend(query[:, 14:], key[:, 10:], value[:, 10:], kv_cache=cache)
    torch.testing.assert_close(last, wanted[:, 14:], rtol=0, atol=1e-5)
    assert cache.seq_len == total
    assert attend.kv_cache.seq_len == total
    attend.kv_cache = None
    assert torch.equal(attend(query, key, value), full)


def test_none_is_the_full_computation_while_the_block_has_a_cache() -> None:
    query = random_tokens(9, HEADS, 0)
    key, value = (random_tokens(9, KV_HEADS, seed) for seed in (1, 2))
    attend = CachedAttention(HEADS, DIM, num_kv_heads=KV_HEADS)
    full = attend(query, key, value)
    attend.kv_cache = cache = PackedKVCache()
    attend(query[:, :5], key[:, :5], value[:, :5])
    held = cache._held
    assert torch.equal(attend(query, key, value, kv_cache=None), full)
    assert cache._held is held
    found = attend(query[:, 5:], key[:, 5:], value[:, 5:], kv_cache="own")
    torch.testing.assert_close(found, full[:, 5:], rtol=0, atol=1e-5)
    assert cache.seq_len == 9


def test_the_field_takes_a_cache_or_none() -> None:
    cache = PackedKVCache()
    attend = CachedAttention(HEADS, DIM, kv_cache=cache)
    for wrong, found in (
        ([cache], "a list"),
        (torch.zeros(1), "a Tensor"),
        (torch.nn.Identity(), "an Identity"),  # torch would register it as a submodule
        ("own", "'own'"),
    ):
        says = f"^kv_cache is {found}, expected a PackedKVCache or None$"
        with pytest.raises(InvalidArgumentError, match=says):
            attend.kv_cache = wrong
        with pytest.raises(InvalidArgumentError, match=says):
            CachedAttention(HEADS, DIM, kv_cache=wrong)
        assert attend.kv_cache is cache
    attend.kv_cache = None
    assert attend.kv_cache is None
    assert not list(attend.children())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("alibi", [False, True])
def test_prompts_of_unequal_length_share_a_batch(alibi: bool, side: str) -> None:
    """Each sequence as it is alone, over its own tokens; the padding is as large as any token."""
    lens, prompt, total = (7, 4), 7, 12
    query = random_tokens(total, HEADS, 3)
    key, value = (random_tokens(total, KV_HEADS, seed) for seed in (4, 5))
    padding = torch.zeros(BATCH, total, dtype=torch.bool)
    for row, length in enumerate(lens):
        first = slice(0, prompt - length) if side == "left" else slice(length, prompt)
        padding[row, first] = True
    attend = CachedAttention(HEADS, DIM, num_kv_heads=KV_HEADS, alibi=alibi)
    full = attend(query, key, value, key_padding_mask=padding)
    attend.kv_cache = PackedKVCache()
    begin, found = 0, []
    for new in (prompt, 1, 1, 3):
        end = begin + new
        tokens = (half[:, begin:end] for half in (query, key, value))
        found.append(attend(*tokens, key_padding_mask=padding[:, :end]))
        begin = end
    steps = torch.cat(found, 1)
    for row in range(BATCH):
        own = ~padding[row]
        alone = by_hand(*(half[row : row + 1, own] for half in (query, key, value)), alibi=alibi)
        torch.testing.assert_close(full[row : row + 1, own], alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(steps[row : row + 1, own], alone, rtol=0, atol=1e-5)
    assert steps.isfinite().all()  # also of queries that are padding and see no token
    without = attend(query, key, value, kv_cache=None)
    assert (without[1, ~padding[1]] - full[1, ~padding[1]]).abs().max() > 1e-2


def test_what_a_padding_mask_has_to_be() -> None:
    cache = PackedKVCache()
    attend = CachedAttention(HEADS, DIM, num_kv_heads=KV_HEADS, kv_cache=cache)
    query, key = random_tokens(2, HEADS, 0), random_tokens(2, KV_HEADS, 1)
    attend(query, key, key)
    held = cache._held
    some = torch.zeros(BATCH, 4, dtype=torch.bool)
    for mask, says in (
        (some.long(), "dtype is torch.int64, expected torch.bool, True for padding. Of an atten"),
        (some[:, :2], "shape is (2, 2), expected (2, 4): of all keys, those of the cache too"),
        (some[:1], "shape is (1, 4), expected (2, 4): of all keys, those of the cache too"),
        (some[0], "shape is (4,), expected (2, 4): of all keys, those of the cache too"),
        (some.to("meta"), "device is meta, expected cpu as key has"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^key_padding_mask.{re.escape(says)}"):
            attend(query, key, key, key_padding_mask=mask)
        assert cache._held is held
    with pytest.raises(
        InvalidArgumentError, match=r"^key_padding_mask is a list, expected a torch"
    ):
        attend(query, key, key, key_padding_mask=[[False]])
    with pytest.raises(InvalidArgumentError, match=r"shape is \(2, 4\), expected \(batch, 5\)"):
        causal_mask(1, 5, key_padding_mask=some)


def test_gradients_of_steps_are_those_of_the_full_computation() -> None:
    query = random_tokens(6, HEADS, 0).requires_grad_()
    key, value = (random_tokens(6, KV_HEADS, seed).requires_grad_() for seed in (1, 2))
    attend = CachedAttention(HEADS, DIM, num_kv_heads=KV_HEADS)
    weight = random_tokens(6, HEADS, 9)
    wanted = torch.autograd.grad((attend(query, key, value) * weight).sum(), (query, key, value))
    attend.kv_cache = PackedKVCache()
    steps = [attend(query[:, i : i + 2], key[:, i : i + 2], value[:, i : i + 2]) for i in (0, 2, 4)]
    found = torch.autograd.grad((torch.cat(steps, 1) * weight).sum(), (query, key, value))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_attention_refuses_leaves_its_cache_as_it_was() -> None:
    cache = PackedKVCache()
    attend = CachedAttention(HEADS, DIM, num_kv_heads=KV_HEADS, kv_cache=cache)
    query, key = random_tokens(2, HEADS, 0), random_tokens(2, KV_HEADS, 1)
    attend(query, key, key)
    held = cache._held
    for call, says in (
        ((query, key[..., :8], key[..., :8]), "key.shape[2] is 8, expected 24, num_kv_heads 3 * "),
        ((query, key, key[:, :1]), "value.shape is (2, 1, 24), expected (2, 2, 24) as key has"),
        ((query[:1], key, key), "query.shape is (1, 2, 48), expected (2, q_len, 48): batch of key"),
        ((query[..., :24], key, key), "query.shape is (2, 2, 24), expected (2, q_len, 48)"),
        ((query[0], key, key), "query.shape is (2, 48), expected (2, q_len, 48)"),
        ((None, key, key), "query is None, expected a torch.Tensor"),
        ((query.half(), key, key), "query.dtype is torch.float16, expected torch.float32 as key"),
        ((query.to("meta"), key, key), "query.device is meta, expected cpu as key has"),
        (
            (torch.cat([query] * 3, 1), key, key),
            "query.shape[1] is 6, expected at most 4: 2 tokens of the cache and 2 of key",
        ),
        ((query, query, query), "new_keys.shape[2] is 48, expected dim 24 of the cache"),
        ((query, key, key, [cache]), "kv_cache is a list, expected a PackedKVCache, None or 'own'"),
        ((query, key, key, "mine"), "kv_cache is 'mine', expected a PackedKVCache, None or 'own'"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(says)}"):
            attend(*call)
        assert cache._held is held
    with pytest.raises(InvalidArgumentError, match="num_heads is 6, expected a multiple of num_kv"):
        CachedAttention(6, 8, num_kv_heads=4)


# ---- a model steps through it ----

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def attention_of_blocks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """What transformers calls in each block. Source: transformers 5.19 AttentionInterface"""
    packed = (tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value))
    mixed = module.attend(*packed)
    return mixed.unflatten(2, (HEADS, DIM)), None


transformers.AttentionInterface.register("kvx_packed", attention_of_blocks)


@pytest.fixture(scope="module")
def llama() -> Any:
    """Random weights; its blocks attend with CachedAttention."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    return with_packed_blocks(model)


def with_packed_blocks(model: Any) -> Any:
    model.set_attn_implementation("kvx_packed")
    for block in model.model.layers:
        block.self_attn.attend = CachedAttention(HEADS, DIM, num_kv_heads=KV_HEADS)
    return model


def set_caches(model: Any, caches: list[PackedKVCache] | None) -> None:
    for i, block in enumerate(model.model.layers):
        block.self_attn.attend.kv_cache = None if caches is None else caches[i]


def logits(model: Any, ids: Tensor, begin: int = 0) -> Tensor:
    """Of tokens that begin at a position; transformers keeps no cache of its own."""
    positions = begin + torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        return model(ids, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("seed", SEEDS)
def test_a_llama_steps_through_it(llama: Any, seed: int) -> None:
    """Logits of a prompt and of 20 steps are those of the whole sequence in one pass."""
    ids = torch.randint(0, 61, (BATCH, 31), generator=torch.Generator().manual_seed(seed))
    llama.set_attn_implementation("eager")
    set_caches(llama, None)
    wanted = logits(llama, ids)
    llama.set_attn_implementation("kvx_packed")
    torch.testing.assert_close(logits(llama, ids), wanted, rtol=0, atol=1e-5)  # without a cache

    caches = [PackedKVCache() for _ in range(3)]
    set_caches(llama, caches)
    found = [logits(llama, ids[:, :11])]
    found += [logits(llama, ids[:, i : i + 1], i) for i in range(11, 31)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-5)
    assert [cache.seq_len for cache in caches] == [31] * 3
    assert caches[2].packed_keys().shape == (BATCH, 31, KV_HEADS * DIM)

    with_one_less = copy.deepcopy(caches)
    for cache in with_one_less:
        cache.truncate(1)
    set_caches(llama, with_one_less)  # what a token too few makes of it
    assert (logits(llama, ids[:, -1:], 31) - wanted[:, -1:]).abs().max() > 1e-2
    set_caches(llama, caches)
    for cache in caches:  # a draft of 6 tokens that is rejected, and the same tokens at once
        cache.truncate(6)
    again = logits(llama, ids[:, 25:], 25)
    torch.testing.assert_close(again, wanted[:, 25:], rtol=0, atol=1e-5)

    set_caches(llama, None)
    torch.testing.assert_close(logits(llama, ids), wanted, rtol=0, atol=1e-5)


def test_one_token_from_a_safetensors_file(tmp_path: Path) -> None:
    """The file is written here; the token is the one that transformers generates itself."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES)
    weights = transformers.LlamaForCausalLM(config).state_dict()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))

    ids = torch.randint(0, 61, (1, 13), generator=torch.Generator().manual_seed(5))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    wanted = theirs.generate(ids, max_new_tokens=1, do_sample=False)[0, -1]

    model = with_packed_blocks(transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval())
    set_caches(model, [PackedKVCache() for _ in range(3)])
    logits(model, ids[:, :-1])  # the prompt but its last token
    assert logits(model, ids[:, -1:], 12)[0, -1].argmax() == wanted
    set_caches(model, [PackedKVCache() for _ in range(3)])
    wrong = logits(model, ids[:, -1:], 12)  # it sees one token: the logits are others
    set_caches(model, None)
    assert not torch.allclose(wrong[0, -1], logits(model, ids)[0, -1], atol=1e-2)
