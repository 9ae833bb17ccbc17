"""Units that span heads, in snapshots, in prefix stores and in KvCacheStore.

ggml's own functions say what the row of a token is, and gguf-py what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvx_adapters.vllm import amx_planes
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    KvCacheStore,
    PrefixStore,
    ScaleDesc,
    ScaleGranularity,
    Section,
    Snapshot,
    StoreError,
    UnsupportedError,
    describe,
)
from kvx_core.snapshot import CorruptError, Precision
from tests.ggml import K_QUANTS, dequantize, quantize
from tests.snapshot.formatted import numbers
from tests.snapshot.sections import FACTS
from tests.snapshot.with_planes import filled, reopened, section
from tests.snapshot_files import kind_in, rewritten
from tests.stores.engine import Engine as StoreEngine
from tests.stores.engine import rows_of, save, store_in

SEEDS = [1, 2, 3]
# heads and head_dim: rows of 256, 512 and 1024 numbers
SHAPES = [(4, 64), (8, 64), (16, 64), (2, 128), (4, 128), (8, 128)]
ORDER = [6, 2, 9, 4, 0, 7, 1, 3, 8, 5]
of_formats = pytest.mark.parametrize("dtype", K_QUANTS, ids=lambda dtype: dtype.name)
of_shapes = pytest.mark.parametrize(("heads", "dim"), SHAPES)


class Engine:
    """One layer of K and V, in blocks whose tokens, or whose heads, follow each other."""

    def __init__(
        self, layout: str, heads: int, dim: int, seed: int | None, dtype: Any = torch.bfloat16
    ) -> None:
        self.size, self.heads, self.layout = 7, heads, layout
        shape = (len(ORDER), self.size, heads, dim)
        self.kv: list[Tensor] = []  # [block, token, head, dim]
        for i in range(2):
            made = filled(shape, dtype, None) if seed is None else numbers(shape, 2 * seed + i)
            made = made.to(dtype)
            if layout == "BLOCK_HND":
                made = made.transpose(1, 2).contiguous().transpose(1, 2)
            self.kv.append(made)

    def section(self, first: int = 0, total: int | None = None, **facts: Any) -> Section:
        stored = [t.transpose(1, 2) if self.layout == "BLOCK_HND" else t for t in self.kv]
        facts = {"first_kv_head": first, "total_kv_heads": total or self.heads} | facts
        cache = CacheDesc.from_kv(*(describe(t, self.layout) for t in stored))
        return section(CacheView((cache,), replace(FACTS, **facts)), ORDER)

    def tokens(self, kv: int, start: int, stop: int) -> Tensor:
        """[token, head, dim]"""
        at = range(start, stop)
        return torch.stack([self.kv[kv][ORDER[t // self.size], t % self.size] for t in at])

    def expect(self, kv: int, start: int, values: Tensor) -> None:
        """The tokens from `start` on are these, and all others hold the sentinel."""
        wanted = filled(tuple(self.kv[kv].shape), self.kv[kv].dtype, None)
        for t, value in enumerate(values, start):
            wanted[ORDER[t // self.size], t % self.size] = value.to(wanted.dtype)
        found = self.kv[kv].contiguous()
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def units_of(tokens: Tensor, dtype: DType) -> np.ndarray:
    """[token, head, dim] as ggml's reference encodes rows of all heads: [token, bytes]"""
    return quantize(tokens.float().flatten(1).numpy(), dtype)


def decoded(units: np.ndarray, dtype: DType, heads: int) -> Tensor:
    found = torch.from_numpy(dequantize(units, dtype))
    return found.view(len(found), heads, -1)


# --- snapshots ------------------------------------------------------------------------------------


@of_formats
@of_shapes
def test_rows_are_those_of_ggml(heads: int, dim: int, dtype: DType, tmp_path: Path) -> None:
    for seed in SEEDS:
        for layout, other in (("BLOCK_NHD", "BLOCK_HND"), ("BLOCK_HND", "BLOCK_NHD")):
            src, dst = Engine(layout, heads, dim, seed), Engine(other, heads, dim, None)
            captured = Snapshot.capture(range(19), [src.section()], start=3, format=dtype)
            read = reopened(captured, tmp_path / "file")
            assert read.restore(dst.section(), 5, 20) == 15 * 2 * heads * dim * 2
            for kv, name in enumerate(("layers.3.k", "layers.3.v")):
                units = units_of(src.tokens(kv, 3, 22), dtype)
                np.testing.assert_array_equal(read.array(name), units[:, None])
                assert read.tensors[name].shape == (19, 1, heads * dim // 256)
                dst.expect(kv, 5, decoded(units[2:17], dtype, heads))
            assert read.header.parts[0].facts.lossy == dtype.name.lower()
            assert read.cache_bytes == 19 * 2 * heads * dim * 2


@pytest.mark.parametrize("cache", [torch.float16, torch.float32])
def test_other_dtypes_are_rounded_once(cache: torch.dtype) -> None:
    src, dst = Engine("BLOCK_HND", 4, 64, 1, cache), Engine("BLOCK_HND", 4, 64, None, cache)
    captured = Snapshot.capture(range(19), [src.section()], format="q6_k")
    assert captured is not None
    captured.restore(dst.section(), 0, 19)
    for kv in range(2):
        units = units_of(src.tokens(kv, 0, 19), DType.Q6_K)
        dst.expect(kv, 0, decoded(units, DType.Q6_K, 4))


def test_more_tokens_than_the_buffer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    src = Engine("BLOCK_HND", 4, 64, 1)
    whole = Snapshot.capture(range(60), [src.section()], format="q4_k")
    assert whole is not None
    for num_tokens in (1, 7, 59, 60):
        monkeypatch.setattr(
            "kvx_core.snapshot.rows._BUFFER_BYTES", num_tokens * 2 * 4 * 64 * 4 + 1000
        )
        parts = Snapshot.capture(range(60), [src.section()], format="q4_k")
        assert parts is not None
        assert parts.digest() == whole.digest()
        dst = Engine("BLOCK_NHD", 4, 64, None)
        parts.restore(dst.section(), 2, 58)
        for kv in range(2):
            units = units_of(src.tokens(kv, 2, 58), DType.Q4_K)
            dst.expect(kv, 2, decoded(units, DType.Q4_K, 4))


def test_layer_by_layer() -> None:
    """As connectors capture: the same bytes as in one call."""
    engine = StoreEngine(dim=64, dtype=torch.bfloat16).compute(range(19))
    (held,) = engine.sections()
    whole = Snapshot.capture(range(19), [held], format="q4_k")
    parts = Snapshot.reserve(range(19), [held], format="q4_k")
    assert whole is not None
    assert parts is not None
    for layer in reversed(held.layers):
        parts.fill(held.of([layer]))
    parts.settle([held])
    assert parts.digest() == whole.digest()


@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_takes_its_heads_of_rows(first: int) -> None:
    """And a snapshot of fewer heads goes into its heads of a cache of more."""
    src, part = Engine("BLOCK_NHD", 4, 128, 1), Engine("BLOCK_HND", 2, 128, None)
    captured = Snapshot.capture(range(19), [src.section()], format="q5_k")
    assert captured is not None
    captured.restore(part.section(first, 4), 0, 19)
    for kv in range(2):
        values = decoded(units_of(src.tokens(kv, 0, 19), DType.Q5_K), DType.Q5_K, 4)
        part.expect(kv, 0, values[:, first : first + 2])
    again = Snapshot.capture(range(19), [part.section(first, 4)], format="q5_k")
    assert again is not None
    whole = Engine("BLOCK_HND", 4, 128, None)
    again.restore(whole.section(), 0, 19)
    for kv in range(2):
        own = decoded(units_of(part.tokens(kv, 0, 19), DType.Q5_K), DType.Q5_K, 2)
        found = whole.tokens(kv, 0, 19)
        assert torch.equal(found[:, first : first + 2], own.to(found.dtype))
        untouched = found[:, 2 - first : 4 - first].contiguous().view(torch.uint8)
        assert (untouched == 0x5A).all()


def test_heads_of_whole_units_beside_rows() -> None:
    """K of 256 numbers a head stays apart by heads; V of 128 is a row."""
    k, v = numbers((4, 5, 2, 256), 1).bfloat16(), numbers((4, 5, 2, 128), 2).bfloat16()
    view = CacheView((CacheDesc.from_kv(*(describe(t, "BLOCK_NHD") for t in (k, v))),), FACTS)
    captured = Snapshot.capture(range(11), [section(view, [2, 0, 3])], format="q4_k")
    assert captured is not None
    for name, tensor, shape in (("k", k, (11, 2, 1)), ("v", v, (11, 1, 1))):
        tokens = tensor[[2, 0, 3]].flatten(0, 1)[:11]
        units = units_of(tokens, DType.Q4_K)
        assert captured.tensors[f"layers.3.{name}"].shape == shape
        np.testing.assert_array_equal(captured.array(f"layers.3.{name}").reshape(11, -1), units)


def test_a_cache_of_fp8_with_a_scale_for_each_token_and_head() -> None:
    k = numbers((5, 4, 4, 64), 1).clamp(-400, 400).to(torch.float8_e4m3fn)
    scale = torch.rand((5, 4, 4), generator=torch.Generator().manual_seed(2)) + 0.5
    scales = (ScaleDesc.of(scale, ScaleGranularity.PER_TOKEN_HEAD),)
    view = CacheView((CacheDesc.from_kv(describe(k, "BLOCK_NHD")),), FACTS, k_scales=scales)
    facts = replace(FACTS, first_kv_head=0, total_kv_heads=4)
    held = section(replace(view, facts=facts), [4, 0, 2])
    captured = Snapshot.capture(range(11), [held], format="q6_k")
    assert captured is not None
    values = (k.float() * scale[..., None])[[4, 0, 2]].flatten(0, 1)[:11]
    units = units_of(values, DType.Q6_K)
    np.testing.assert_array_equal(captured.array("layers.3.k"), units[:, None])
    k.view(torch.uint8).fill_(0)
    captured.restore(held, 0, 11)
    back = (k.float() * scale[..., None])[[4, 0, 2]].flatten(0, 1)[:11]
    wanted = decoded(units, DType.Q6_K, 4)
    new = wanted.abs().amax(-1) / 448
    new[new == 0] = 1
    assert torch.equal(scale[[4, 0, 2]].flatten(0, 1)[:11], new)
    assert torch.equal(
        back, (wanted / new[..., None]).to(torch.float8_e4m3fn).float() * new[..., None]
    )


def test_tiles() -> None:
    page = numbers((4, 4, 32, 128), 1).to(torch.bfloat16)  # 4 heads of 64, K and V
    back = torch.zeros_like(page)
    held, there = (
        section(CacheView((), FACTS, planes=amx_planes(t, 0)), [3, 0, 2], [0]) for t in (page, back)
    )
    plain = Snapshot.capture(range(75), [held])
    captured = Snapshot.capture(range(75), [held], format="q4_k")
    assert plain is not None
    assert captured is not None
    captured.restore(there, 0, 75)
    again = Snapshot.capture(range(75), [there])
    assert again is not None
    for name in ("layers.0.k", "layers.0.v"):
        exact, found = (
            torch.from_numpy(s.array(name).view(np.int16)).view(torch.bfloat16)
            for s in (plain, again)
        )
        units = units_of(exact, DType.Q4_K)
        np.testing.assert_array_equal(captured.array(name), units[:, None])
        assert torch.equal(found, decoded(units, DType.Q4_K, exact.shape[1]).to(found.dtype))


@of_formats
def test_two_heads_of_64_are_refused(dtype: DType) -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"k of layer 3 has head_dim 64, in 2 heads 128 numbers, expected one of them to be a "
        r"multiple of 256, .*Choose a format with smaller units, or none",
    ):
        Snapshot.capture(range(9), [Engine("BLOCK_NHD", 2, 64, 1).section()], format=dtype)


def test_units_of_the_cache_are_never_decoded_to_be_stored_in_the_same_format() -> None:
    k = torch.from_numpy(quantize(numbers((4, 5, 2, 256), 1).numpy(), DType.Q4_K))
    v = numbers((4, 5, 2, 128), 2).bfloat16()
    caches = describe(k, "BLOCK_NHD", dtype="Q4_K"), describe(v, "BLOCK_NHD")
    mixed = section(CacheView((CacheDesc.from_kv(*caches),), FACTS), [2, 0, 3])
    with pytest.raises(UnsupportedError, match=r"units span heads in v of layer 3, expected no K"):
        Snapshot.capture(range(11), [mixed], format="q4_k")
    exact = numbers((4, 5, 2, 256), 1).bfloat16()
    view = CacheView((CacheDesc.from_kv(describe(exact, "BLOCK_NHD"), caches[1]),), FACTS)
    captured = Snapshot.capture(range(11), [section(view, [2, 0, 3])], format="q4_k")
    assert captured is not None
    before = k.clone()
    with pytest.raises(StoreError, match=r"layers\.3\.k is Q4_K as in the cache, and units"):
        captured.restore(mixed, 0, 11)
    assert torch.equal(k, before)


@pytest.mark.parametrize("heads", [[0, 3], [0, 2]])
def test_rows_that_cannot_be(heads: list[int], tmp_path: Path) -> None:
    """512 numbers of 4 heads, said to be of 3, or of 2 that have whole units of their own."""
    captured = Snapshot.capture(range(9), [Engine("BLOCK_NHD", 4, 128, 1).section()], format="q4_k")
    reopened(captured, tmp_path / "file")
    kind = kind_in(tmp_path / "file")
    kind["groups"][0]["heads"] = heads
    with pytest.raises(CorruptError, match=r"layers\.3\.k has rows of 512 numbers for \d heads"):
        Snapshot.open(rewritten(tmp_path / "file", kind))


# --- prefix stores --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@of_formats
def test_a_store(dtype: DType, seed: int, tmp_path: Path) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    options: dict[str, Any] = {"precision": Precision.of("bfloat16"), "format": dtype}
    store: PrefixStore = store_in(tmp_path, **options)
    save(store, prompt, StoreEngine(dim=64, dtype=torch.bfloat16, seed=seed))
    reader: PrefixStore = store_in(tmp_path, **options)
    match = reader.lookup(prompt)
    assert match.num_tokens == len(prompt)
    there = StoreEngine(dim=64, dtype=torch.bfloat16, seed=seed, block_size=8)
    reader.load(match, 5, 35, there.sections())
    rows = rows_of(prompt, 64).bfloat16()  # [token, layer, kv, head, dim]
    for i, layer in enumerate(there.cache.layers):
        for kv, half in enumerate(layer.halves()):
            values = decoded(units_of(rows[:, i, kv], dtype), dtype, rows.shape[3]).bfloat16()
            for t in range(5, 35):
                block, offset = there.place(t)
                assert torch.equal(half.tensor[block, :, offset], values[t])


# --- KvCacheStore ---------------------------------------------------------------------------------


def kv_store(heads: int, dim: int, key: DType, value: DType | str) -> KvCacheStore:
    return KvCacheStore(2, heads, dim, 40, key_encoding=key, value_encoding=value)


@of_formats
@of_shapes
def test_kv_cache_store(heads: int, dim: int, dtype: DType) -> None:
    """Any steps store the rows of ggml; ranges and heads are what these hold."""
    for seed in SEEDS:
        tokens = numbers((2, 2, 19, heads, dim), seed)  # [layer, kv, token, head, dim]
        rows = [[units_of(t, dtype) for t in layer] for layer in tokens]
        for counts in ([1, 11, 7], [19]):
            store, at = kv_store(heads, dim, dtype, dtype), 0
            for count in counts:
                for layer in range(2):
                    store.append(layer, *tokens[layer, :, at : at + count])
                at += count
            for layer in range(2):
                for kv, (read, raw) in enumerate(
                    (
                        (store.read_keys, store.read_key_storage),
                        (store.read_values, store.read_value_storage),
                    )
                ):
                    units = rows[layer][kv]
                    np.testing.assert_array_equal(raw(layer).data.numpy(), units[None])
                    wanted = decoded(units, dtype, heads).transpose(0, 1)
                    assert torch.equal(read(layer), wanted)
                    assert torch.equal(read(layer, 5, 17, head=1), wanted[1:2, 5:17])
        assert store.memory_report().key_bytes_per_token == heads * dim // 256 * dtype.itemsize


@pytest.mark.parametrize("make", [torch.empty, np.empty], ids=["torch", "numpy"])
def test_reads_into_what_the_caller_has(make: Callable[..., Any]) -> None:
    store = kv_store(4, 64, DType.Q4_K, "bfloat16")
    tokens = numbers((2, 2, 37, 4, 64), 1)
    for t in range(37):
        for layer in range(2):
            key = tokens[layer, 0, t].numpy() if make is np.empty else tokens[layer, 0, t].flatten()
            store.append_token(layer, key, tokens[layer, 1, t])
    wanted = decoded(units_of(tokens[1, 0], DType.Q4_K), DType.Q4_K, 4).transpose(0, 1)[:, 3:30]
    half = np.float16 if make is np.empty else torch.float16
    out = make((27, 4, 64), dtype=half).swapaxes(0, 1)
    assert store.read_keys(1, 3, 30, out=out) is out
    assert torch.equal(torch.as_tensor(out), wanted.half())


def test_outputs_that_cannot_be_written() -> None:
    store = kv_store(4, 64, DType.Q4_K, "bfloat16")
    for layer in range(2):
        store.append(layer, *numbers((2, 8, 4, 64), layer))
    fixed = np.zeros((4, 8, 64), np.float32)
    fixed.flags.writeable = False
    for out, message in (
        (fixed, "out is read-only memory, expected writable"),
        (torch.zeros(1, 8, 64).expand(4, 8, 64), r"out\.stride\[1\] is 0, expected at least 1"),
        (np.zeros((4, 8, 64), np.int32), "out.dtype is"),
        (torch.zeros((4, 8, 64), dtype=torch.uint8), "out.dtype is U8"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            store.read_keys(0, out=out)
        assert not np.asarray(out).any()


def test_more_rows_than_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tokens = kv_store(4, 64, DType.Q6_K, DType.Q4_K), numbers((2, 2, 37, 4, 64), 1)
    for layer in range(2):
        store.append(layer, *tokens[layer])
    everything = store.read_keys(1)
    for num_tokens in (1, 5, 36):
        monkeypatch.setattr("kvx_core.caches.kv.half._ROWS_BYTES", num_tokens * 4 * 4 * 64)
        assert torch.equal(store.read_keys(1), everything)
        assert torch.equal(store.read_keys(1, 2, 37, head=3), everything[3:, 2:])


@pytest.mark.parametrize("value", [DType.Q5_K, DType.Q8_0], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_attention(seed: int, value: DType) -> None:
    store, tokens = kv_store(4, 64, DType.Q6_K, value), numbers((2, 2, 37, 4, 64), seed)
    for layer in range(2):
        store.append(layer, *tokens[layer])
    query = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    k, v = (
        read(1, 2, 33).double().repeat_interleave(2, 0)
        for read in (store.read_keys, store.read_values)
    )
    weights = torch.softmax(torch.einsum("hd,htd->ht", query.double(), k) / 8, -1)
    wanted = torch.einsum("ht,htd->hd", weights, v)
    torch.testing.assert_close(
        store.attend(1, query, start=2, end=33).double(), wanted, atol=1e-5, rtol=1e-5
    )


def test_kv_cache_store_refusals() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"^head_dim is 64 and num_heads \* head_dim 128, expected one of them to be a "
        r"multiple of 256: key_encoding is Q4_K, .*Choose a format with smaller units",
    ):
        kv_store(2, 64, DType.Q4_K, "bfloat16")
    store = kv_store(4, 64, DType.Q8_0, DType.Q4_K)
    store.append_zeros(3)
    assert not store.read_values(0).any()
    with pytest.raises(UnsupportedError, match=r"^value_encoding is Q4_K .*Read the numbers with"):
        store.cache_view(CacheFacts())
