"""The least and the most of every number that a call takes.

One less than the least, and one more than the most, is refused with both in the sentence. The least
is taken, or refused for another reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import pytest
import torch

import kvx_core as kvx
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    KvxError,
    Layout,
    Memory,
    Precision,
    SeqLens,
    SlotMapping,
    TensorDesc,
    describe,
)
from kvx_core.blocks import layouts
from kvx_core.caches.kv.store import KvCacheStore
from kvx_core.caches.packed import (
    CachedAttention,
    PackedKVCache,
    alibi_slopes,
    causal_mask,
    expand_heads,
    packed_view,
)
from kvx_core.desc.layouts import shape
from kvx_core.encodings import lossless
from kvx_core.encodings.hadamard import hadamard
from kvx_core.hybrid import (
    AttentionType,
    BlockAllocator,
    DSV4Config,
    KVCacheManager,
    LayerSpec,
    PagedCache,
    StateCache,
    build_schema,
    compute_block_budget,
    page_records,
    pending_rows,
    schedule_of,
    sizes,
)
from kvx_core.hybrid import engine_pages as pages
from kvx_core.ops.live import LiveMigration
from kvx_core.stores import Directory, PrefixStore

M32, M31 = 2**32 - 1, 2**31 - 1
CONFIG = DSV4Config(head_dim=2, rope_dim=1, indexer_head_dim=16, sliding_window=1)
SPEC = LayerSpec(0, AttentionType.CSA)
ENCODED = lossless.encode(torch.zeros(3, dtype=torch.bfloat16))
SCHEMA = build_schema(CONFIG, SPEC)


def view() -> CacheView:
    k, v = torch.zeros(2, 2, 4, 2, 8)
    cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    return CacheView((cache,), CacheFacts(first_kv_head=0))


def kv_store(**given: int) -> KvCacheStore:
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "max_seq_len": 3}
    return KvCacheStore(**(sizes | given))


def filled() -> KvCacheStore:
    store = kv_store()
    for layer in range(2):
        store.append_token(layer, [0.0] * 16, [0.0] * 16)
    return store


def manager(**given: int) -> KVCacheManager:
    sizes = {"max_concurrent_requests": 2, "max_context_tokens": 128}
    return KVCacheManager(CONFIG, [SPEC], **(sizes | given))


def prefix_store(path: Path, **given: int) -> PrefixStore:
    sizes = {"num_layers": 1, "total_kv_heads": 2, "chunk_tokens": 128}
    of_model = {"fingerprint": "a", "precision": Precision.of("bfloat16")}
    return PrefixStore(Directory(path), **of_model, **(sizes | given))


def packed() -> PackedKVCache:
    attention = CachedAttention(2, 8, kv_cache=PackedKVCache())
    attention(*(torch.zeros(1, 2, 16) for _ in range(3)))
    assert attention.kv_cache is not None
    return attention.kv_cache


def packed_shape(pack: int) -> tuple[int, ...]:
    sizes = {"num_blocks": 1, "block_size": 2, "num_kv_heads": 2, "head_dim": 8}
    return shape("BLOCK_HND_PACKED", **sizes, pack=pack)


Row = tuple[Callable[[int], Any], str, int, int]

LIMITS: list[Row] = [
    (alibi_slopes, "num_heads", 1, M32),
    (lambda n: causal_mask(n, 4), "q_len", 0, M32),
    (lambda n: causal_mask(0, n), "kv_len", 0, M32),
    (lambda n: CachedAttention(n, 8), "num_heads", 1, M32),
    (lambda n: CachedAttention(2, n), "head_dim", 1, M32),
    (lambda n: CachedAttention(2, 8, num_kv_heads=n), "num_kv_heads", 1, M32),
    (PackedKVCache, "capacity", 0, M32),
    (lambda n: packed().truncate(n), "num_tokens", 0, M32),
    (lambda n: packed_view([packed()], CacheFacts(), n), "num_kv_heads", 1, M32),
    (lambda n: packed_view([packed()], CacheFacts(), 1, num_heads=n), "num_heads", 1, M32),
    (lambda n: expand_heads(torch.zeros(1, 2, 16), n, 2), "num_kv_heads", 1, M32),
    (lambda n: expand_heads(torch.zeros(1, 2, 16), 1, n), "num_heads", 1, M32),
    (lambda n: kv_store(num_layers=n), "num_layers", 1, M32),
    (lambda n: kv_store(num_heads=n), "num_heads", 1, M32),
    (lambda n: kv_store(head_dim=n), "head_dim", 1, M32),
    (lambda n: kv_store(max_seq_len=n), "max_seq_len", 1, M32),
    (lambda n: kv_store().append_token(n, [0.0] * 16, [0.0] * 16), "layer", 0, 1),
    (lambda n: filled().read_keys(0, 0, 1, head=n), "head", 0, 1),
    (lambda n: filled().read_keys(0, n, 1), "start", 0, 1),
    (lambda n: filled().read_keys(0, 0, n), "end", 0, M32),
    (lambda n: filled().cache_view(CacheFacts(), block_size=n), "block_size", 1, M32),
    (lambda n: Directory(Path("nowhere"), n), "max_bytes", 0, 2**63 - 1),
    (lambda n: prefix_store(Path("nowhere"), num_layers=n), "num_layers", 1, M32),
    (lambda n: prefix_store(Path("nowhere"), total_kv_heads=n), "total_kv_heads", 1, M32),
    (lambda n: prefix_store(Path("nowhere"), chunk_tokens=n), "chunk_tokens", 1, M32),
    (lambda n: packed_shape(n), "pack", 0, M32),
    (kvx.set_num_threads, "num_threads", 0, M32),
    (lambda n: LiveMigration(view().at([[0]]), block_tokens=n), "block_tokens", 1, M32),
    (lambda n: LiveMigration(view().at([[0]])).rewind(n), "written", 0, M32),
    (lambda n: LiveMigration(view().at([[0]])).finish(view().at([[1]]), n), "written", 0, M32),
    (lambda n: CacheFacts(rotary_dim=n), "facts.rotary_dim", 0, M32),
    (lambda n: CacheFacts(hadamard_k=n), "facts.hadamard_k", 0, M32),
    (lambda n: CacheFacts(hadamard_v=n), "facts.hadamard_v", 0, M32),
    (lambda n: CacheFacts(first_layer=n), "facts.first_layer", 0, M32),
    (lambda n: CacheFacts(window=n), "facts.window", 0, M32),
    (lambda n: CacheFacts(num_layers=n), "facts.num_layers", 1, M32),
    (lambda n: CacheFacts(total_kv_heads=n), "facts.total_kv_heads", 1, M32),
    (lambda n: CacheFacts(first_kv_head=n), "facts.first_kv_head", 0, M32),
    (lambda n: hadamard(torch.zeros(8), n), "order", 1, M32),
    (lambda n: lossless.decode(b"", first=n), "first", 0, 2**64 - 1),
    (lambda n: lossless.decode(ENCODED, count=n), "count", 0, 2**64 - 1),
    (lambda n: DSV4Config(head_dim=n), "head_dim", 1, 2**20),
    (lambda n: manager(max_concurrent_requests=n), "max_concurrent_requests", 1, 2**20),
    (lambda n: manager(max_context_tokens=n), "max_context_tokens", 1, 2**30),
    (lambda n: manager().admit_request(n), "num_tokens", 0, 128),
    (lambda n: manager().release_request(n), "request_slot", 0, 1),
    (lambda n: manager(num_blocks_per_csa_layer=n), "num_blocks_per_csa_layer", 0, M31),
    (lambda n: BlockAllocator(n), "num_blocks", 0, M31),
    (lambda n: BlockAllocator(2).acquire(n), "count", 0, M31),
    (lambda n: BlockAllocator(2).holds(n), "block_id", 0, 1),
    (lambda n: PagedCache(SCHEMA, n), "num_blocks", 0, M31),
    (lambda n: StateCache(SCHEMA, n), "max_requests", 1, M31),
    (lambda n: StateCache(SCHEMA, 2).reset_slot(n), "slot", 0, 1),
    (lambda n: pages.page_bytes(n), "entries", 1, M32),
    (lambda n: pages.page_bytes(1, n), "entry_bytes", 1, M32),
    (lambda n: pages.page_bytes(1, 1, n), "alignment", 1, M32),
    (lambda n: pages.byte_pages(torch.zeros(2, 8), n), "num_bytes", 1, M32),
    (page_records.v4_page_bytes, "entries_per_page", 1, 2**20),
    (lambda n: compute_block_budget(CONFIG, [SPEC], n, 1), "max_context_tokens", 0, 2**40),
    (lambda n: compute_block_budget(CONFIG, [SPEC], 1, n), "max_concurrent_requests", 0, M32),
    (lambda n: schedule_of([], n), "num_layers", 0, M32),
    (lambda n: schedule_of([n], 1), "compress_ratios[0]", 0, M32),
    (lambda n: sizes.bytes_per_token([SPEC], entry_bytes=n), "entry_bytes", 0, M32),
    (lambda n: sizes.bytes_per_token([SPEC], indexer_bytes=n), "indexer_bytes", 0, M32),
    (lambda n: sizes.bytes_per_request([SPEC], tail_bytes=n), "tail_bytes", 0, M32),
    (lambda n: sizes.gqa_bytes_per_token(n), "num_layers", 0, M32),
    (lambda n: sizes.gqa_bytes_per_token(1, n), "num_kv_heads", 0, M32),
    (lambda n: sizes.gqa_bytes_per_token(1, 1, n), "head_dim", 0, M32),
    (lambda n: pending_rows.pending_tokens(n, 4, overlap=False), "num_tokens", 0, 2**40),
    (lambda n: pending_rows.pending_tokens(1, n, overlap=False), "ratio", 1, M32),
]


def sentence(call: Callable[[int], Any], number: int) -> str:
    """What the call says to a number, or nothing if it takes it."""
    try:
        call(number)
    except KvxError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("call", "name", "least", "most"), LIMITS, ids=[f"{r[1]}" for r in LIMITS])
def test_the_least_and_the_most(
    call: Callable[[int], Any],
    name: str,
    least: int,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (least - 1, most + 1):
        said = sentence(call, number)
        assert said.startswith(f"{name} is {number}, expected {least} to {most}"), said
    assert not sentence(call, least).startswith(f"{name} is {least}, expected {least} to")


# Descriptors see the usual types of their fields in little time, and judge others one by one.
SLOTS = SlotMapping(DType.S64, 0, 4096, Memory.DEVICE)
LENS = SeqLens(DType.S64, 0, 4096, Memory.DEVICE)
TABLE = BlockTable.packed([[0]])
TENSOR = TensorDesc(
    data=4096,
    shape=(1, 1, 1, 1),
    stride=(1, 1, 1, 1),
    dtype=DType.F32,
    memory=Memory.DEVICE,
    layout=Layout.BLOCK_NHD,
)

FIELDS: list[tuple[Any, str, int, int]] = [
    (SLOTS, "slots", 0, 2**64 - 1),
    (SLOTS, "token_count", 0, M32),
    (SLOTS, "invalid_slot", -(2**63), 2**63 - 1),
    (LENS, "lengths", 0, 2**64 - 1),
    (LENS, "seq_count", 0, M32),
    (TABLE, "indices", 0, 2**64 - 1),
    (TABLE, "seq_count", 0, M32),
    (TABLE, "max_blocks_per_seq", 0, M32),
    (TABLE, "beam_width", 0, M32),
    (TENSOR, "data", 0, 2**64 - 1),
]


@pytest.mark.parametrize(("desc", "name", "least", "most"), FIELDS)
def test_fields_of_descriptors(desc: Any, name: str, least: int, most: int) -> None:
    fields = {one.name: getattr(desc, one.name) for one in fields_of(desc) if one.init}
    for number in (least, most):
        assert getattr(type(desc)(**(fields | {name: number})), name) == number
    for number in (least - 1, most + 1):
        with pytest.raises(InvalidArgumentError, match=rf"{name}(\[0\])? is {number}, expected"):
            type(desc)(**(fields | {name: number}))


@pytest.mark.parametrize("field", ["shape", "stride"])
def test_sizes_of_tensors(field: str) -> None:
    fields = {one.name: getattr(TENSOR, one.name) for one in fields_of(TENSOR) if one.init}
    for number in (2**63 - 1, -(2**63)):
        found = TensorDesc(**(fields | {field: (1, number, 1, 1)}))
        assert getattr(found, field)[1] == number
    for number in (2**63, -(2**63) - 1):
        with pytest.raises(InvalidArgumentError, match=rf"{field}\[1\] is {number}, expected"):
            TensorDesc(**(fields | {field: (1, number, 1, 1)}))


def test_blocks_count_planes_from_one() -> None:
    with pytest.raises(InvalidArgumentError, match="no is 0, expected 1 to"):
        layouts.block_stack([[torch.zeros(2, 4, 8)]], no=0)
