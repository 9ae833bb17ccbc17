"""reprs describe a descriptor in one line, without addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    KvCacheStore,
    Memory,
    PoolDesc,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    borrow,
    describe,
)
from kvx_core.snapshot import Section

K = torch.zeros(8, 16, 2, 64, dtype=torch.float16)
V = torch.zeros(8, 2, 16, 32)
K_DESC, V_DESC = describe(K, "BLOCK_NHD"), describe(V, "BLOCK_HND")
SAME = CacheDesc.from_kv(K_DESC, describe(K.clone(), "BLOCK_NHD"))
APART = CacheDesc.from_kv(K_DESC, V_DESC)
SIZES = "8 blocks x 16 tokens x 2 heads x 64, float16, NHD"
VIEW = CacheView(
    (APART,) * 3,
    CacheFacts(engine="vllm 0.32.0", first_kv_head=0, total_kv_heads=2),
    k_scales=(None,) * 3,
    null_block_id=0,
)
VIEW_WORDS = (
    f"CacheView(3 layers, {SIZES}, V: 32 float32 HND, paged, k_scales, null block 0, vllm 0.32.0)"
)


def _store() -> KvCacheStore:
    store = KvCacheStore(2, 3, 64, 9, key_encoding="Q8_0")
    store.append_zeros(1)
    store.append(0, *torch.zeros(2, 2, 3, 64))
    return store


@pytest.mark.parametrize(
    ("desc", "expected"),
    [
        (SAME, f"CacheDesc({SIZES})"),
        (APART, f"CacheDesc({SIZES}, V: 32 float32 HND)"),
        (CacheDesc.from_kv(K_DESC), f"CacheDesc({SIZES}, no V)"),
        (
            CacheDesc.from_kv(replace(K_DESC, memory=Memory.DEVICE), pool=PoolDesc.of(K, 64)),
            f"CacheDesc({SIZES}, no V, DEVICE, with a pool)",
        ),
        (K_DESC, "TensorDesc(8 x 16 x 2 x 64, float16, BLOCK_NHD)"),
        (
            replace(describe(K[..., :32], "BLOCK_NHD"), writable=False),
            "TensorDesc(8 x 16 x 2 x 32, float16, BLOCK_NHD, stride 2048 x 128 x 64 x 1, "
            "read-only)",
        ),
        (borrow(V), "Borrowed(8 x 2 x 16 x 32, float32)"),
        (PoolDesc.of(K, 4096, V), "PoolDesc(4096 bytes per block, with a secondary pool)"),
        (BlockTable.packed([[1, 2], [3]]), "BlockTable(2 sequences x 2 blocks, PACKED, int64)"),
        (
            BlockTable.ragged([1, 2, 2], torch.tensor([0, 3])),
            "BlockTable(1 sequence, 3 tokens, RAGGED, int64)",
        ),
        (
            BlockTable.kv_offsets(torch.zeros(1, 4, 2, 3, dtype=torch.int32)),
            "BlockTable(1 sequence x 4 beams x 3 blocks, KV_OFFSETS, int32)",
        ),
        (SlotMapping.of([1, 2, 3]), "SlotMapping(3 tokens, int64)"),
        (SlotMapping.of([1], invalid_slot=7), "SlotMapping(1 token, int64, invalid_slot 7)"),
        (SeqLens.of(torch.tensor([5], dtype=torch.int32)), "SeqLens(1 sequence, int32)"),
        (ScaleDesc.of(0.5), "ScaleDesc(one element, float32, PER_TENSOR)"),
        (
            ScaleDesc.of(torch.ones(8, 2), "PER_BLOCK_HEAD"),
            "ScaleDesc(8 x 2, float32, PER_BLOCK_HEAD)",
        ),
        (VIEW, VIEW_WORDS),
        (CacheView((SAME,), CacheFacts(), dense=True), f"CacheView(1 layer, {SIZES}, dense)"),
        (CacheView((), CacheFacts()), "CacheView(0 layers, paged)"),
        (
            CacheView((SAME, APART), CacheFacts()),
            f"CacheView(2 layers, the first of {SIZES}, paged)",
        ),
        (
            VIEW.at([[1]], starts=[3], head_start=1),
            f"CacheSpan({VIEW_WORDS}, block_table=BlockTable(1 sequence x 1 block, PACKED, int64), "
            "starts=SeqLens(1 sequence, int64), head_start=1)",
        ),
        (
            _store(),
            "KvCacheStore(2 layers x 3 heads x 64, 1 of 9 tokens, 2 more in 1 layer, K Q8_0, "
            "V BF16)",
        ),
        (
            _store().memory_report(),
            "KvMemoryReport(2352 of 10584 bytes, 1 of 9 tokens, K Q8_0, V BF16, 2.61 times smaller "
            "than float32)",
        ),
        (_store().read_key_storage(0), "KvStorage(3 x 1 x 68, Q8_0)"),
        (
            KvCacheStore(1, 1, 8, 2, value_encoding="F8_E5M2").read_value_storage(0),
            "KvStorage(1 x 0 x 8, F8_E5M2, with scales)",
        ),
        (
            Section((0, 1, 2), VIEW, BlockTable.packed([[1]])),
            f"Section(layers=(0, 1, 2), view={VIEW_WORDS}, "
            "block_table=BlockTable(1 sequence x 1 block, PACKED, int64), encoding='values', "
            "state_tokens=None)",
        ),
    ],
)
def test_repr(desc: Any, expected: str) -> None:
    assert repr(desc) == expected
