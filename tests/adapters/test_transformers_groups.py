"""Sliding windows and the paged cache of continuous batching, with transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicLayer, QuantizedLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

from kvx_adapters import transformers as hf
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    OutOfRangeError,
    Section,
    Snapshot,
    UnsupportedError,
    describe,
    migrate,
    verify,
)

NUM_LAYERS, HEADS, DIM, WINDOW, COUNT = 3, 2, 16, 8, 10
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = ("dynamic", "static")


def model(name: str, **fields: Any) -> Any:
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=128,
        initializer_range=0.2,
        **fields,
    )
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    torch.random.set_rng_state(state)
    return made


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    mixed = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}
    return {
        "windows": model("Mistral", sliding_window=WINDOW),
        "mixed": model("Qwen2", **mixed),
        "full": model("Llama"),
        "part of a page": model("Mistral", sliding_window=WINDOW - 2),
    }


def empty(kind: str, like: Any) -> Any:
    if kind == "dynamic":
        return transformers.DynamicCache(config=like.config)
    return transformers.StaticCache(config=like.config, max_cache_len=48)


def prompt(num_tokens: int) -> Tensor:
    return torch.tensor([[(11 * i * i + 5 * i + 3) % 97 for i in range(num_tokens)]])


@torch.inference_mode()
def run(like: Any, cache: Any, ids: Tensor) -> int:
    return int(like(input_ids=ids, past_key_values=cache).logits[0, -1].argmax())


def decode(like: Any, cache: Any, after: int) -> list[int]:
    tokens = [after]
    for _ in range(COUNT):
        tokens.append(run(like, cache, torch.tensor([tokens[-1:]])))
    return tokens


def facts(like: Any) -> CacheFacts:
    return hf.cache_facts(like, fingerprint="of one model")


# ---- sliding windows ----


@pytest.mark.parametrize("num_tokens", [5, 8, 21])
@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS], ids="-".join)
@pytest.mark.parametrize("name", ["windows", "mixed"])
def test_a_prompt_goes_on(
    models: dict[str, Any], name: str, kinds: tuple[str, str], num_tokens: int
) -> None:
    like = models[name]
    src, dst, zeros = (empty(kind, like) for kind in (*kinds, kinds[1]))
    first = run(like, src, prompt(num_tokens))
    for cache in (dst, zeros):
        hf.reserve(cache, like, batch_size=1, num_tokens=num_tokens)
    there = hf.layer_groups(dst, facts(like))
    here = hf.layer_groups(src, facts(like))
    assert [group.layers for group in here] == [group.layers for group in there]
    for group, other in zip(here, there, strict=True):
        assert group.end == num_tokens
        migrate(*hf.shared_spans(group, other))
    for layer, moved in zip(src.layers, dst.layers, strict=True):
        held = min(num_tokens, WINDOW - 1) if layer.is_sliding else num_tokens
        for name in ("keys", "values"):
            here, there = (
                getattr(one, name)[:, :, : min(num_tokens, getattr(one, name).shape[2])]
                for one in (layer, moved)
            )
            assert torch.equal(there[:, :, -held:], here[:, :, -held:])
    wanted = decode(like, src, first)
    assert decode(like, dst, first) == wanted
    assert decode(like, zeros, first) != wanted


@pytest.mark.parametrize("num_tokens", [5, 8, 21])
@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS], ids="-".join)
def test_a_file_goes_to_a_cache_that_holds_more_or_fewer(
    models: dict[str, Any], kinds: tuple[str, str], num_tokens: int, tmp_path: Path
) -> None:
    """A static window holds a token more than a dynamic one. Row 1 of two sequences moves."""
    like, ids = models["mixed"], torch.cat([prompt(num_tokens) + 1, prompt(num_tokens)])
    src, dst = (empty(kind, like) for kind in kinds)
    run(like, src, ids)
    hf.reserve(dst, like, batch_size=2, num_tokens=num_tokens)
    for i, group in enumerate(hf.layer_groups(src, facts(like))):
        start = group.first_token
        captured = Snapshot.capture(ids[1, start:], [group.section(1)], start=start)
        assert captured is not None
        captured.save(tmp_path / str(i))
    for i, group in enumerate(hf.layer_groups(dst, facts(like))):
        with Snapshot.open(tmp_path / str(i)) as file:
            first = max(group.first_token, file.header.start)
            file.read(group.layers).restore(group.section(1), first, group.end)
    groups = (hf.layer_groups(cache, facts(like)) for cache in (src, dst))
    for a, b in zip(*groups, strict=True):
        first = max(a.first_token, b.first_token)
        for i in a.layers:
            for name in ("keys", "values"):
                wanted = getattr(src.layers[i], name)[1, :, first - a.first_token : a.num_tokens]
                found = getattr(dst.layers[i], name)
                at = first - b.first_token
                assert torch.equal(found[1, :, at : b.num_tokens], wanted)
                assert not found[0].any()
                assert not found[1, :, :at].any()
    with pytest.raises(InvalidArgumentError, match="row is 2, expected 0 to 1"):
        group.section(2)


def test_what_groups_say(models: dict[str, Any]) -> None:
    like = models["mixed"]
    cache = empty("dynamic", like)
    run(like, cache, prompt(21))
    full, windows = hf.layer_groups(cache, facts(like))
    assert (full.layers, full.window, full.first_token, full.num_tokens) == ((1,), 0, 0, 21)
    assert (windows.layers, windows.window) == ((0, 2), WINDOW)
    assert (windows.first_token, windows.num_tokens) == (21 - WINDOW + 1, WINDOW - 1)
    own = windows.view.facts
    assert (own.num_layers, own.first_layer, own.window) == (2, None, WINDOW)
    assert (full.view.facts.first_layer, full.view.facts.window) == (1, 0)
    for layer, desc in zip((0, 2), windows.view.layers, strict=True):
        assert desc.k.data == cache.layers[layer].keys.data_ptr()
    ids = prompt(21)[0]
    assert Snapshot.capture(ids, [Section(full.layers, full.view, None)]) is not None
    with pytest.raises(InvalidArgumentError, match="neither block_table nor slots"):
        Snapshot.capture(ids, [Section(windows.layers, windows.view, None)])
    with pytest.raises(InvalidArgumentError, match="neither block_table nor slots"):
        migrate(windows.view, windows.view, [WINDOW - 1])
    static = empty("static", like)
    run(like, static, prompt(21))
    group = hf.layer_groups(static, facts(like))[1]
    assert (group.first_token, group.num_tokens) == (21 - WINDOW, WINDOW)


def test_tokens_that_a_window_has_left_are_refused(models: dict[str, Any]) -> None:
    like = models["windows"]
    cache, shorter = empty("dynamic", like), empty("dynamic", like)
    run(like, cache, prompt(12))
    run(like, shorter, prompt(11))
    (group,), (other,) = (hf.layer_groups(one, facts(like)) for one in (cache, shorter))
    with pytest.raises(InvalidArgumentError, match="first_token is 4, expected 5 to 12: the layer"):
        group.span(4)
    with pytest.raises(InvalidArgumentError, match="dst holds a sequence of 11 tokens, expected 1"):
        hf.shared_spans(group, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_windows_that_went_on_is_refused(models: dict[str, Any], kind: str) -> None:
    """A static cache moves its tokens inside its memory, a dynamic one makes new tensors."""
    like = models["windows"]
    cache, other = empty(kind, like), empty(kind, like)
    run(like, cache, prompt(12))
    run(like, other, prompt(12))
    (src,), (dst,) = (hf.layer_groups(one, facts(like)) for one in (cache, other))
    ends = hf.shared_spans(src, dst)
    migrate(*ends)
    run(like, other, torch.tensor([[5]]))
    before = other.layers[0].keys.clone()
    with pytest.raises(InvalidArgumentError, match="dst is out of date: "):
        migrate(*ends)
    assert torch.equal(other.layers[0].keys, before)


# ---- padded batches ----


def test_rows_that_are_padded_on_the_left(models: dict[str, Any]) -> None:
    like = models["full"]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    cache, alone = empty("dynamic", like), empty("dynamic", like)
    ids = torch.cat([torch.cat([torch.zeros(1, 2).long(), prompt(3)], 1), prompt(5)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        like(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    span, lengths = hf.padded_span(hf.cache_view(cache, facts(like)), mask)
    assert lengths.to_numpy().tolist() == [3, 5]
    hf.reserve(alone, like, batch_size=2, num_tokens=5)
    migrate(span, hf.cache_view(alone, facts(like)), lengths)
    for layer, there in zip(cache.layers, alone.layers, strict=True):
        assert torch.equal(there.keys[0, :, :3], layer.keys[0, :, 2:])
        assert torch.equal(there.keys[1], layer.keys[1])
    own = empty("dynamic", like)
    run(like, own, prompt(3))
    torch.testing.assert_close(alone.layers[1].keys[:1, :, :3], own.layers[1].keys)


@pytest.mark.parametrize("shape", [(1, 5), (2, 6), (2, 4), (2, 0), (5,)])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_mask_of_another_batch_is_refused(models: dict[str, Any], kind: str, shape: Any) -> None:
    """Or of an earlier pass, which lacks a token."""
    cache = empty(kind, models["full"])
    hf.reserve(cache, models["full"], batch_size=2, num_tokens=5)
    view = hf.cache_view(cache, CacheFacts())
    with pytest.raises(InvalidArgumentError, match=r"attention_mask has the shape .*\(2, 5\)"):
        hf.padded_span(view, torch.ones(shape))


# ---- quantized ----


class Rounded(QuantizedLayer):
    """A quantized layer whose numbers are rounded to integers."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        del axis
        return tensor.round().to(torch.int8)

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor.float()


def test_quantized_layers_are_refused() -> None:
    layer = Rounded()
    layer.update(torch.zeros(1, HEADS, 3, DIM), torch.zeros(1, HEADS, 3, DIM))
    with pytest.raises(UnsupportedError, match=r"is a Rounded, .*quanto, HQQ.*with a DynamicCache"):
        hf.cache_desc(layer)


def test_a_prompt_is_quantized_after_it_has_moved(models: dict[str, Any]) -> None:
    src, dst = (empty("dynamic", models["full"]) for _ in range(2))
    run(models["full"], src, prompt(5))
    hf.reserve(dst, models["full"], batch_size=1, num_tokens=5)
    views = [hf.cache_view(cache, facts(models["full"])) for cache in (src, dst)]
    migrate(*views, [5])
    layer = Rounded()
    layer.update(dst.layers[1].keys, dst.layers[1].values)
    assert torch.equal(layer._quantized_keys, src.layers[1].keys.round().to(torch.int8))


@pytest.mark.parametrize("describe_all", [hf.cache_view, hf.layer_groups])
def test_what_is_no_cache_of_one_decoder(models: dict[str, Any], describe_all: Any) -> None:
    like = models["full"]
    own, cross = empty("dynamic", like), empty("dynamic", like)
    both = transformers.EncoderDecoderCache(own, cross)
    for given, name in ((both, "EncoderDecoderCache"), (None, "NoneType"), ((), "tuple")):
        with pytest.raises(UnsupportedError, match=f"cache is a {name}, .*self_attention_cache"):
            describe_all(given, facts(like))
    with pytest.raises(InvalidArgumentError, match="cache has no layers, expected those of the"):
        describe_all(transformers.DynamicCache(), facts(like))
    run(like, both.self_attention_cache, prompt(5))
    assert describe_all(both.self_attention_cache, facts(like))


def test_a_layer_of_an_unknown_class_has_its_reason() -> None:
    layer = type("OtherLayer", (DynamicLayer,), {})()
    with pytest.raises(
        UnsupportedError, match=r"layer is a OtherLayer, expected .*: others do not hold each tok"
    ):
        hf.cache_desc(layer)


# ---- the paged cache of continuous batching ----

PAGE = 4


def paged(like: Any) -> PagedAttentionCache:
    chosen = transformers.ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=40, max_batch_tokens=64, max_memory_percent=0.5
    )
    helper = DistributedHelper(None, None)
    return PagedAttentionCache(like.config, chosen, "cpu", helper, torch.float32)


def store(cache: PagedAttentionCache, request_id: str, past: int, key: Tensor) -> list[Tensor]:
    """Writes tokens of a request by the cache's own indices: keys, and their negatives as values.

    key: (num_layers, num_tokens, heads, dim). Returns what the cache gives back of each layer's
    keys: all tokens that attention sees
    """
    count = key.shape[1]
    groups = cache.cache_allocators.values()
    for group in groups:
        group.allocate_cache_to_request(request_id, past, count)
    read: list[list[int]] = [[] for _ in groups]
    write: list[list[int]] = [[] for _ in groups]
    cache.extend_read_and_write_indices(request_id, past, count, read, write)
    found = []
    for layer in range(NUM_LAYERS):
        index = {
            "read_index": [torch.tensor(one) for one in read],
            "write_index": [torch.tensor(one) for one in write],
            "cu_seq_lens_k": dict.fromkeys(cache.cache_allocators, torch.zeros(2)),
            "max_length_k": dict.fromkeys(cache.cache_allocators, 0),
        }
        new = key[layer].transpose(0, 1)[None]
        found.append(cache.update(new, -new, layer, index)[0][0].transpose(0, 1))
    return found


@pytest.mark.parametrize("name", ["full", "windows", "mixed", "part of a page"])
@pytest.mark.parametrize("num_tokens", [6, 19])
def test_paged(models: dict[str, Any], name: str, num_tokens: int) -> None:
    """Tokens of two requests, written by the cache's own indices, come out; others go in, and its
    own indices read them."""
    like = models[name]
    cache = paged(like)
    for _ in range(12):
        for group in cache.cache_allocators.values():
            cache.pool.allocate_sector(group.index)
    keys = {request: torch.randn(NUM_LAYERS, num_tokens, HEADS, DIM) for request in "ab"}
    for part in (slice(0, 5), slice(5, num_tokens)):  # so that blocks of requests alternate
        for request, key in keys.items():
            store(cache, request, 0 if part.start == 0 else 5, key[:, part])
    for group in hf.paged_groups(cache, facts(like)):
        window = group.window or num_tokens
        first = max(num_tokens - window, 0)
        count = num_tokens - first
        shape = (2, count, HEADS, DIM)
        layers = [[torch.zeros(shape) for _ in "kv"] for _ in group.layers]
        dense = CacheView(
            tuple(CacheDesc.from_kv(*(describe(x, "BLOCK_NHD") for x in kv)) for kv in layers),
            group.view.facts,
            dense=True,
        )
        span = group.span("ba", [first] * 2, [count] * 2)
        migrate(span, dense, [count] * 2)
        for (k, v), i in zip(layers, group.layers, strict=True):
            wanted = torch.stack([keys[request][i, first:] for request in "ba"])
            assert torch.equal(k, wanted)
            assert torch.equal(v, -wanted)
            k += 1
        migrate(dense, span, [count] * 2)
        assert verify(dense, span, [count] * 2).ok
    new = torch.zeros(NUM_LAYERS, 1, HEADS, DIM)
    for request, key in keys.items():
        for layer, found in enumerate(store(cache, request, num_tokens, new)):
            held = len(found) - 1  # attention sees the window less the new token
            assert torch.equal(found[:held], key[layer, num_tokens - held :] + 1)


def test_a_request_is_asked_what_it_holds(models: dict[str, Any]) -> None:
    """Its blocks have room for more; a state counts, an id does not."""
    like = models["mixed"]
    cache = paged(like)
    state = RequestState("a", [1] * 14)
    assert cache.can_store_request_tokens(state, 14)
    state.position_offset = 13
    full, windows = sorted(hf.paged_groups(cache, facts(like)), key=lambda g: g.window)

    def layer() -> CacheDesc:
        return CacheDesc.from_kv(
            *(describe(half, "BLOCK_NHD") for half in torch.zeros(2, 1, 16, HEADS, DIM))
        )

    dsts = [
        CacheView(tuple(layer() for _ in group.layers), group.view.facts, dense=True)
        for group in (full, windows)
    ]
    for first in (0, 4):
        migrate(full.span([state], [first], [13 - first]), dsts[0], [13 - first])
        with pytest.raises(OutOfRangeError, match=f"src holds {13 - first} tokens of sequence 0"):
            migrate(full.span([state], [first], [14 - first]), dsts[0], [14 - first])
    migrate(full.span(["a"], [0], [14]), dsts[0], [14])
    both = full.span([state, "a"], [0, 0], [13, 14])
    assert both.view.holds is not None
    assert both.view.holds() == [13, 14]
    span = windows.span([state], [5], [8])
    migrate(span, dsts[1], [8])
    with pytest.raises(OutOfRangeError, match=r"src holds 7 tokens of sequence 0 .* at least 8"):
        migrate(windows.span([state], [6], [8]), dsts[1], [8])
    state.position_offset = 14  # whose token has taken the place of token 6
    with pytest.raises(InvalidArgumentError) as raised:
        migrate(span, dsts[1], [8])
    assert str(raised.value) == (
        "src is out of date: request 'a' holds 14 tokens, and a window the last 8 of them, "
        "expected those from token 5 on"
    )


def test_a_memory_that_ends_within_a_block(models: dict[str, Any]) -> None:
    """A block has a page of each layer; the last ones here are no block."""
    cache = paged(models["full"])
    (allocator,) = cache.cache_allocators.values()
    (whole,) = hf.paged_groups(cache, facts(models["full"]))
    allocator.cache_tensor = allocator.cache_tensor[:-PAGE]
    (group,) = hf.paged_groups(cache, facts(models["full"]))
    assert group.view.layers[-1].v.shape[0] == whole.view.layers[-1].v.shape[0] - 1


def test_a_span_whose_request_has_other_blocks_is_refused(models: dict[str, Any]) -> None:
    like = models["full"]
    cache = paged(like)
    (group,) = hf.paged_groups(cache, facts(like))
    for _ in range(4):
        cache.pool.allocate_sector(group._allocator.index)
    store(cache, "a", 0, torch.ones(NUM_LAYERS, 5, HEADS, DIM))
    span = group.span("a", [0], [5])
    dst = empty("dynamic", like)
    hf.reserve(dst, like, batch_size=1, num_tokens=5)
    there = hf.cache_view(dst, facts(like))
    store(cache, "a", 5, torch.ones(NUM_LAYERS, 4, HEADS, DIM))  # one more block
    migrate(span, there, [5])
    assert dst.layers[2].keys.all()
    group._allocator.free_blocks("a")
    with pytest.raises(
        InvalidArgumentError, match=r"src is out of date: request 'a' has the blocks"
    ):
        migrate(span, there, [5])


def test_paged_refusals(models: dict[str, Any]) -> None:
    cache = paged(models["mixed"])
    state = RequestState("a", [1, 2, 3, 4, 5])
    assert cache.can_store_request_tokens(state, 5)
    full, windows = sorted(hf.paged_groups(cache, facts(models["mixed"])), key=lambda g: g.window)
    assert (full.window, windows.window) == (0, WINDOW)
    found = [(g.view.facts.first_layer, g.view.facts.num_layers) for g in (full, windows)]
    assert found == [(1, 1), (None, 2)]  # layers 0 and 2 are no range
    assert full.span("a", [0], [5]).slots.token_count == 5
    with pytest.raises(
        InvalidArgumentError,
        match=r"request 'b' has no blocks .*: PagedAttentionCache\.can_store_request_tokens$",
    ):
        full.span("b", [0], [5])
    assert cache.can_store_request_tokens(RequestState("b", [1, 2, 3, 4, 5]), 5)
    assert full.span("b", [0], [5]).slots.token_count == 5
    for group in (full, windows):
        with pytest.raises(InvalidArgumentError, match="room for 8 tokens, expected it for 9 from"):
            group.span("a", [0], [9])
    assert windows.span("a", [5], [8]).slots.token_count == 8  # a ring
    with pytest.raises(InvalidArgumentError, match="room for 8 tokens, expected it for 5 from tok"):
        full.span("a", [4], [5])
    state = RequestState("short", [1, 2, 3])
    assert cache.can_store_request_tokens(state, 3)
    with pytest.raises(InvalidArgumentError, match="room for 4 tokens, expected it for 3 from tok"):
        windows.span(["short"], [2], [3])  # a ring whose other half has no blocks yet
    with pytest.raises(InvalidArgumentError, match=r"have \(1, 1, 2\) entries, expected one per"):
        full.span("a", [0], [1, 2])
    cache.cache_allocators["other"] = object()
    with pytest.raises(UnsupportedError, match="cache has a object, expected FullAttentionCacheAl"):
        hf.paged_groups(cache, facts(models["mixed"]))
