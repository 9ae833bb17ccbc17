"""kvx_migrate_kv against the reference, byte for byte, all layers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from kvx_core.errors import InvalidArgumentError, OutOfRangeError
from kvx_core.types import Layout
from tests import reference, tables
from tests.caches import (
    DTYPES,
    LAYOUTS,
    SAME_HEAD_DIM,
    Allocation,
    Cache,
    Geometry,
    assert_same_bytes,
)
from tests.calls import Backend
from tests.migrations import check_migrate
from tests.reference import Dense, End, Half, KvOffsets, Layer, Packed, Ragged, Slots

LENGTHS = (9, 0, 1, 6)


def refused_migrate(
    backend: Backend,
    message: str,
    error: type[Exception],
    src: Cache,
    src_end: End,
    dst: Cache,
    dst_end: End,
    lengths: Sequence[int],
    kept: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """The migration is refused with `message`. The host writes nothing; a device moves what is
    left when the tokens that are out of range are nowhere: `kept` are the arguments that say so.
    None: the descriptors show what is wrong, and nobody moves anything.
    """
    expected, source = dst.clone(), src.clone()
    for zero_fill in (False, True):
        if kept is not None and not backend.looks_first:
            arguments = {"src_end": src_end, "dst_end": dst_end, "row_lens": lengths, **options}
            reference.migrate(
                source.layers, dst=expected.layers, zero_fill=zero_fill, **(arguments | dict(kept))
            )
        with pytest.raises(error, match=message):
            backend.migrate(
                src,
                src_end,
                dst,
                dst_end,
                torch.tensor(lengths),
                zero_fill=zero_fill,
                **{k: torch.tensor(v) for k, v in options.items()},
            )
    assert_same_bytes(dst, expected)
    assert_same_bytes(src, source)


def overlap_is_refused(backend: Backend, message: str, *args: Any) -> None:
    """A block at both ends of one pool: only who looks at all places before it writes can tell."""
    if backend.looks_first:
        refused_migrate(backend, message, InvalidArgumentError, *args)


@dataclass(frozen=True)
class Without:
    """An end where some tokens are nowhere."""

    end: End
    is_missing: Callable[[int, int], bool]  # (row, token)

    def place(self, row: int, token: int, kv: int) -> reference.Place | None:
        return None if self.is_missing(row, token) else self.end.place(row, token, kv)


def differs(a: End, b: End) -> Callable[[int, int], bool]:
    """Whether the two ends place a token's K differently."""
    return lambda row, token: a.place(row, token, 0) != b.place(row, token, 0)


def ends(kind: str, cache: Cache, seq_ends: Sequence[int], seed: int, *, target: bool) -> End:
    """An end of each kind for these sequences, each block used once if it is written."""
    shared = not target
    match kind:
        case "packed":
            return tables.packed(cache, seq_ends, seed, shared=shared, nulls=0.1)
        case "packed64":
            return tables.packed(
                cache, seq_ends, seed, shared=shared, nulls=0.2, null_block_id=0, dtype=torch.int64
            )
        case "ragged":
            return tables.ragged(cache, seq_ends, seed, shared=shared, nulls=0.1)
        case "slots":
            slots = tables.slots(cache, sum(seq_ends), seed, skipped=0.1, invalid_slot=3)
            return Slots(slots, list(seq_ends), cache.block_size, 3)
        case "dense":
            return Dense()
        case "kv_offsets":
            return tables.kv_offsets(cache, seq_ends, seed, shared=shared, nulls=0.1)
    raise AssertionError(kind)


KINDS = ("packed", "packed64", "ragged", "slots", "dense", "kv_offsets")


@pytest.mark.parametrize(("src_kind", "dst_kind"), list(product(KINDS, KINDS)))
def test_migrate_every_pair_of_ends(backend: Backend, src_kind: str, dst_kind: str) -> None:
    """Different block sizes, layouts and index dtypes; both pools where there are two."""
    caches = []
    for i, kind in enumerate((src_kind, dst_kind)):
        layout = "tensorrt_llm" if kind == "kv_offsets" else ("vllm_LBNHC", "tgi")[i]
        block_size = 16 if kind == "dense" else (4, 8)[i]
        caches.append(
            LAYOUTS[layout](Geometry(num_blocks=9, block_size=block_size), torch.bfloat16, i)
        )
    src, dst = caches
    src_end = ends(src_kind, src, LENGTHS, 11, target=False)
    dst_end = ends(dst_kind, dst, LENGTHS, 12, target=True)
    for zero_fill in (False, True):
        check_migrate(backend, src, src_end, dst, dst_end, LENGTHS, zero_fill=zero_fill)


@pytest.mark.parametrize("dst_layout", LAYOUTS)
@pytest.mark.parametrize("src_layout", LAYOUTS)
def test_migrate_every_pair_of_layouts(backend: Backend, src_layout: str, dst_layout: str) -> None:
    if (src_layout == "mla") != (dst_layout == "mla"):
        src = LAYOUTS[src_layout](Geometry(), torch.float16, seed=1)
        dst = LAYOUTS[dst_layout](Geometry(), torch.float16, seed=2)
        args = (src, tables.packed(src, [3], 3), dst, tables.packed(dst, [3], 4), [3])
        refused_migrate(backend, r"has (no|a) V, expected as .*E\.1", InvalidArgumentError, *args)
        return
    for seed, g in enumerate((Geometry(), Geometry(num_kv_heads=3, head_dim=20, num_layers=3))):
        src = LAYOUTS[src_layout](g, torch.bfloat16, seed)
        dst = LAYOUTS[dst_layout](replace(g, block_size=6, num_blocks=8), torch.bfloat16, seed + 9)
        src_end = tables.packed(src, LENGTHS, seed)
        dst_end = tables.packed(dst, LENGTHS, seed + 1, shared=False)
        check_migrate(backend, src, src_end, dst, dst_end, LENGTHS)


@pytest.mark.parametrize("dst_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("src_dtype", DTYPES, ids=str)
def test_migrate_every_pair_of_dtypes(
    backend: Backend, src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    for src_layout, dst_layout in (("nhd", "hnd"), ("tgi", "vllm_LBNHC"), ("hnd", "packed16")):
        for g in (Geometry(), Geometry(num_kv_heads=1, head_dim=7)):
            src = LAYOUTS[src_layout](g, src_dtype, 1).fill(seed=2)
            dst = LAYOUTS[dst_layout](replace(g, block_size=16, num_blocks=7), dst_dtype, 3)
            src_end = tables.packed(src, LENGTHS, 4)
            dst_end = tables.packed(dst, LENGTHS, 5, shared=False)
            check_migrate(backend, src, src_end, dst, dst_end, LENGTHS)


def test_migrate_opaque_rows(backend: Backend) -> None:
    src = LAYOUTS["nhd"](Geometry(head_dim=34), torch.uint8, 1)
    dst = LAYOUTS["vllm_BHLNC"](Geometry(head_dim=34, block_size=16, num_blocks=7), torch.uint8, 2)
    src_end = tables.packed(src, LENGTHS, 3)
    dst_end = tables.packed(dst, LENGTHS, 4, shared=False)
    check_migrate(backend, src, src_end, dst, dst_end, LENGTHS)


def test_migrate_k_and_v_of_different_head_dims(backend: Backend) -> None:
    g = Geometry(head_dim=24, v_head_dim=16)
    for src_layout, dst_layout in product(LAYOUTS, ("nhd", "tgi", "vllm_LBHNC")):
        if src_layout in (*SAME_HEAD_DIM, "mla"):
            continue
        src = LAYOUTS[src_layout](g, torch.float16, 1)
        dst = LAYOUTS[dst_layout](replace(g, block_size=3, num_blocks=9), torch.float16, 2)
        src_end = tables.packed(src, LENGTHS, 3)
        dst_end = tables.packed(dst, LENGTHS, 4, shared=False)
        check_migrate(backend, src, src_end, dst, dst_end, LENGTHS)


@pytest.mark.parametrize("block_sizes", [(1, 1), (1, 7), (16, 1), (5, 3), (4, 32), (32, 4), (8, 8)])
@pytest.mark.parametrize("layouts", [("nhd", "nhd"), ("hnd", "tgi"), ("vllm_LBNHC", "vllm_BHLNC")])
def test_migrate_token_ranges(
    backend: Backend, layouts: tuple[str, str], block_sizes: tuple[int, int]
) -> None:
    """Any start at either end, in the middle of blocks; entries before the start are poison."""
    lengths, src_starts, dst_starts = [7, 12, 0, 1, 9], [3, 0, 5, 17, 4], [0, 6, 2, 3, 11]
    src_ends = [n + s for n, s in zip(lengths, src_starts, strict=True)]
    dst_ends = [n + s for n, s in zip(lengths, dst_starts, strict=True)]
    caches = []
    for i, (layout, block_size) in enumerate(zip(layouts, block_sizes, strict=True)):
        num_blocks = sum(-(-end // block_size) for end in (src_ends, dst_ends)[i])
        g = Geometry(num_blocks=num_blocks, block_size=block_size)
        caches.append(LAYOUTS[layout](g, torch.bfloat16, i))
    src, dst = caches
    for make in (tables.packed, tables.ragged):
        src_end = make(src, src_ends, 3, starts=src_starts)
        dst_end = make(dst, dst_ends, 4, starts=dst_starts, shared=False)
        check_migrate(
            backend,
            src,
            src_end,
            dst,
            dst_end,
            lengths,
            src_starts=src_starts,
            dst_starts=dst_starts,
            int_dtype=torch.int64,
        )


def test_migrate_into_the_middle_of_a_dense_cache(backend: Backend) -> None:
    """What a continued generation needs: paged tokens behind those that are already there."""
    src = LAYOUTS["tgi"](Geometry(num_blocks=6), torch.float16, 1)
    dst = LAYOUTS["hnd"](Geometry(num_blocks=4, block_size=20), torch.float16, 2)
    starts = [11, 0, 19, 3]
    check_migrate(
        backend, src, tables.packed(src, LENGTHS, 3), dst, Dense(), LENGTHS, dst_starts=starts
    )
    check_migrate(
        backend, dst, Dense(), src, tables.packed(src, LENGTHS, 4, shared=False), LENGTHS,
        src_starts=starts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("src_heads", "dst_heads", "src_head", "dst_head", "num_heads"),
    [
        (8, 2, 0, 0, 2),
        (8, 2, 6, 0, 2),
        (2, 8, 0, 4, 2),
        (4, 4, 1, 2, 1),
        (3, 3, 0, 0, 3),
        (5, 4, 2, 1, 3),
    ],
)
def test_migrate_head_ranges(
    backend: Backend, src_heads: int, dst_heads: int, src_head: int, dst_head: int, num_heads: int
) -> None:
    """Tensor-parallel resharding: the other heads stay as they were."""
    for src_layout, dst_layout, dtype in (
        ("vllm_LBNHC", "tgi", torch.bfloat16),
        ("hnd", "vllm_LBHNC", torch.float16),
        ("nhd", "nhd", torch.float8_e4m3fn),
    ):
        src = LAYOUTS[src_layout](Geometry(num_kv_heads=src_heads), torch.bfloat16, 1).fill(2)
        dst = LAYOUTS[dst_layout](Geometry(num_kv_heads=dst_heads, num_blocks=9), dtype, 3)
        src_end = tables.packed(src, LENGTHS, 4, nulls=0.2)
        dst_end = tables.packed(dst, LENGTHS, 5, shared=False)
        for zero_fill in (False, True):
            check_migrate(
                backend, src, src_end, dst, dst_end, LENGTHS,
                src_head=src_head, dst_head=dst_head, num_heads=num_heads, zero_fill=zero_fill,
            )  # fmt: skip


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_migrate_beams(backend: Backend, beams: int) -> None:
    """Beams of a sequence share its length; a dense end has a row per beam."""
    g = Geometry(num_blocks=30)
    pool = LAYOUTS["tensorrt_llm"](g, torch.bfloat16, 1)
    dense = LAYOUTS["nhd"](Geometry(num_blocks=13, block_size=9), torch.bfloat16, 2)
    end = tables.kv_offsets(pool, LENGTHS, 3, beams=beams, nulls=0.1)
    check_migrate(backend, pool, end, dense, Dense(), LENGTHS, rows_per_length=beams)
    end = tables.kv_offsets(pool, LENGTHS, 4, beams=beams, shared=False)
    check_migrate(backend, dense, Dense(), pool, end, LENGTHS, rows_per_length=beams)
    other = LAYOUTS["tensorrt_llm"](replace(g, block_size=2, num_blocks=40), torch.float16, 5)
    pool.fill(6)
    ends_ = [n + 1 for n in LENGTHS]
    src_end = tables.kv_offsets(pool, ends_, 7, beams=beams)
    dst_end = tables.kv_offsets(other, LENGTHS, 8, beams=beams, shared=False)
    check_migrate(
        backend, pool, src_end, other, dst_end, LENGTHS,
        rows_per_length=beams, src_starts=[1] * (4 * beams),
    )  # fmt: skip


def test_migrate_nothing(backend: Backend) -> None:
    src = LAYOUTS["nhd"](Geometry(), torch.float16, 1)
    dst = LAYOUTS["hnd"](Geometry(), torch.float16, 2)
    table = Packed(torch.zeros(3, 2, dtype=torch.int32), 4)
    check_migrate(backend, src, table, dst, table, [0, 0, 0], zero_fill=True)
    empty = Packed(torch.zeros(0, 2, dtype=torch.int32), 4)
    check_migrate(backend, src, empty, dst, empty, [])
    check_migrate(backend, src, Dense(), dst, Dense(), [])
    skipped = Slots(torch.full((5,), -1), [2, 3], 4)
    check_migrate(backend, src, skipped, dst, tables.packed(dst, [2, 3], 3, shared=False), [2, 3])
    check_migrate(backend, src, tables.packed(src, [2, 3], 4), dst, skipped, [2, 3])
    nulls = Packed(torch.full((2, 1), -1, dtype=torch.int32), 4)
    check_migrate(backend, src, nulls, dst, nulls, [2, 3], zero_fill=True)


def test_migrate_many_layers(backend: Backend) -> None:
    g = Geometry(num_blocks=6, num_layers=70)
    for src_layout, dst_layout in (("vllm_BLNHC", "tensorrt_llm"), ("hnd", "vllm_LHBNC")):
        src = LAYOUTS[src_layout](g, torch.bfloat16, 1)
        dst = LAYOUTS[dst_layout](g, torch.bfloat16, 2)
        make = tables.kv_offsets if dst_layout == "tensorrt_llm" else tables.packed
        src_end = tables.packed(src, [9, 3], 3)
        check_migrate(backend, src, src_end, dst, make(dst, [9, 3], 4, shared=False), [9, 3])


# --- one pool at both ends --------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nhd", "vllm_LBNHC", "vllm_BHLNC", "tgi", "custom_packed"])
def test_migrate_within_a_pool(backend: Backend, layout: str) -> None:
    cache = LAYOUTS[layout](Geometry(num_blocks=8), torch.bfloat16, 1)
    src_end = Packed(torch.tensor([[6, 2, 0], [2, tables.POISON, tables.POISON]]), 4)
    dst_end = Packed(torch.tensor([[1, 3, 7], [5, tables.POISON, tables.POISON]]), 4)
    expected = cache.clone()
    reference.migrate(expected.layers, src_end, expected.layers, dst_end, [11, 3])
    backend.migrate(cache, src_end, cache, dst_end, torch.tensor([11, 3]))
    assert_same_bytes(cache, expected)


def test_one_pool_under_two_names(backend: Backend) -> None:
    """NHD here, the same memory as 4-D CUSTOM there, in another format of the same size."""

    def renamed(cache: Cache) -> Cache:
        def half(other: Half) -> Half:
            tensor = other.tensor.view(torch.float16).transpose(1, 2)
            return Half(tensor, Layout.BLOCK_CUSTOM)

        layers = (Layer(*map(half, layer.halves())) for layer in cache.layers)
        return replace(cache, layers=tuple(layers))

    cache = LAYOUTS["nhd"](Geometry(num_blocks=8), torch.bfloat16, 1).fill(2)
    src_end, dst_end = Packed(torch.tensor([[6, 2]]), 4), Packed(torch.tensor([[1, 3]]), 4)
    expected = cache.clone()
    reference.migrate(expected.layers, src_end, renamed(expected).layers, dst_end, [7])
    backend.migrate(cache, src_end, renamed(cache), dst_end, torch.tensor([7]))
    assert_same_bytes(cache, expected)
    overlap_is_refused(
        backend, r"^block 6 is a destination .*E\.3", cache, src_end,
        renamed(cache), Packed(torch.tensor([[6, 3]]), 4), [7],
    )  # fmt: skip


def test_blocks_that_interleave_differently_are_not_one_pool(backend: Backend) -> None:
    """The same extent and block stride, yet block 0 here meets block 1 there."""
    memory = Allocation(200 * 2, seed=1)
    flat = memory.take((200,), torch.bfloat16)
    caches = []
    for token_stride, head_stride in ((50, 100), (45, 105)):
        k = flat.as_strided((5, 2, 2, 8), (8, token_stride, head_stride, 1), flat.storage_offset())
        layer = Layer(Half(k, Layout.BLOCK_NHD), None)
        caches.append(Cache((memory.storage,), (layer,)))
    src_end, dst_end = Packed(torch.tensor([[0]]), 2), Packed(torch.tensor([[1]]), 2)
    refused_migrate(
        backend, r"shares memory with .*E\.3", InvalidArgumentError,
        caches[0], src_end, caches[1], dst_end, [2],
    )  # fmt: skip


def test_blocks_that_are_not_moved_may_be_at_both_ends_of_a_pool(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(num_blocks=8), torch.bfloat16, 1)
    src_end = Packed(torch.tensor([[6, 2, 1]]), 4)  # block 1 holds tokens from 8 on
    dst_end = Packed(torch.tensor([[1, 3, 6]]), 4)
    expected = cache.clone()
    reference.migrate(expected.layers, src_end, expected.layers, dst_end, [8])
    backend.migrate(cache, src_end, cache, dst_end, torch.tensor([8]))
    assert_same_bytes(cache, expected)


@pytest.mark.parametrize(
    ("src_blocks", "dst_blocks"), [([6, 2], [3, 2]), ([6, 2], [6, 3]), ([6, 2], [2, 6])]
)
def test_a_block_at_both_ends_of_a_pool_is_refused(
    backend: Backend, src_blocks: list[int], dst_blocks: list[int]
) -> None:
    cache = LAYOUTS["nhd"](Geometry(num_blocks=8), torch.bfloat16, 1)
    block = next(b for b in dst_blocks if b in src_blocks)
    overlap_is_refused(
        backend, rf"\b({block}|{src_blocks[-1]})\b.*E\.3",
        cache, Packed(torch.tensor([src_blocks]), 4),
        cache, Packed(torch.tensor([dst_blocks]), 4), [7],
    )  # fmt: skip
    slots = Slots(torch.tensor([4 * dst_blocks[0], 4 * dst_blocks[1]]), [2], 4)
    overlap_is_refused(
        backend, r"E\.3",
        cache, Slots(torch.tensor([4 * b + 1 for b in src_blocks]), [2], 4), cache, slots, [2],
    )  # fmt: skip


def test_migrate_between_the_pools_of_one_cache(backend: Backend) -> None:
    """Offload: block 3 of the primary pool to block 3 of the secondary pool is no overlap."""
    cache = LAYOUTS["tensorrt_llm"](Geometry(), torch.bfloat16, 1)
    n = cache.sub_blocks
    here = torch.tensor([[3 * n, 1 * n], [3 * n + 1, 1 * n + 1]], dtype=torch.int32)
    there = here | -(1 << 31)
    src_end = KvOffsets(here.reshape(1, 1, 2, 2), 4, n)
    dst_end = KvOffsets(there.reshape(1, 1, 2, 2), 4, n)
    for a, b in ((src_end, dst_end), (dst_end, src_end)):
        expected = cache.clone()
        reference.migrate(expected.layers, a, expected.layers, b, [7])
        backend.migrate(cache, a, cache, b, torch.tensor([7]))
        assert_same_bytes(cache, expected)
    for end in (src_end, dst_end):
        overlap_is_refused(backend, r"E\.3", cache, end, cache, end, [7])


def test_memory_shared_by_different_caches_is_refused(backend: Backend) -> None:
    memory = Allocation(8 * 4 * 2 * 16 * 2 * 2, seed=1)
    k, v = memory.take((2, 8, 4, 2, 16), torch.bfloat16)
    layer = Layer(Half(k, Layout.BLOCK_NHD), Half(v, Layout.BLOCK_NHD))
    shifted = Layer(Half(k[1:], Layout.BLOCK_NHD), Half(v[1:], Layout.BLOCK_NHD))
    swapped = Layer(layer.v, layer.k)
    src = Cache((memory.storage,), (layer,))
    end = Packed(torch.tensor([[0]]), 4)
    for other in (shifted, swapped):
        dst = Cache((memory.storage,), (other,))
        message = r"dst\.layers\[0\]\.[kv] shares memory with src\.layers\[0\]\.[kv].*E\.3"
        refused_migrate(backend, message, InvalidArgumentError, src, end, dst, end, [3])


# --- out of range -----------------------------------------------------------------------------


def pair() -> tuple[Cache, Cache]:
    """5 blocks of 4 tokens on the way to 6 blocks of 8."""
    src = LAYOUTS["vllm_LBNHC"](Geometry(), torch.bfloat16, 1)
    return src, LAYOUTS["tgi"](Geometry(num_blocks=6, block_size=8), torch.bfloat16, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_blocks_out_of_range(backend: Backend, dtype: torch.dtype) -> None:
    src, dst = pair()
    src_end = tables.packed(src, [9, 7], 3, dtype=dtype)
    dst_end = tables.packed(dst, [9, 7], 4, dtype=dtype, shared=False)
    wide = [
        make(cache, [9, 7], 5, shared=False, dtype=torch.int64)
        for cache in (src, dst)
        for make in (tables.packed, tables.ragged)
    ]
    last = wide[1].indices.numel() - 3 - 1  # of the tokens that move
    for side, table, at, block, message in (
        (0, src_end, (1, 1), 5, r"src\.block_table.*\b5\b"),
        (1, dst_end, (1, 0), 6, r"dst\.block_table.*\b6\b"),
        (0, wide[0], (0, 0), 1 << 33, r"src\.block_table.*\b8589934592\b"),
        (0, wide[1], (last,), 1 << 33, r"src\.block_table.*\b8589934592\b"),
        (1, wide[2], (0, 0), 1 << 33, r"dst\.block_table.*\b8589934592\b"),
        (1, wide[3], (last,), 1 << 33, r"dst\.block_table.*\b8589934592\b"),
    ):
        broken = tables.with_entry(table, at, block)
        both = [src_end, dst_end]
        both[side] = broken
        kept = {"dst_end": Without(both[1], differs(table, broken))}
        args = (src, both[0], dst, both[1], [9, 7], kept)
        refused_migrate(backend, message, OutOfRangeError, *args)


def test_slots_out_of_range(backend: Backend) -> None:
    src, dst = pair()
    good = tables.slots(src, 16, 3), tables.slots(dst, 16, 4)
    for side in (0, 1):
        name, bad = ("src", "dst")[side], (20, 48)[side]
        both = [Slots(s.clone(), [9, 7], b) for s, b in zip(good, (4, 8), strict=True)]
        both[side].slots[11] = bad
        message = rf"{name}\.slots\.slots\[11\] is {bad}\b"
        kept = {"dst_end": Without(both[1], lambda row, token: (row, token) == (1, 2))}
        args = (src, both[0], dst, both[1], [9, 7], kept)
        refused_migrate(backend, message, OutOfRangeError, *args)


def test_ranges_out_of_range(backend: Backend) -> None:
    src, dst = pair()
    wide = Packed(torch.zeros(2, 3, dtype=torch.int64), 4)  # 12 tokens
    narrow = Packed(torch.tensor([[1, 2], [3, 4]]), 8)  # 16 tokens
    args = (src, wide, dst, narrow)
    none: dict[str, Any] = {}
    for lengths, starts, kept, message in (
        ([3, -1], none, {"row_lens": [3, 0]}, r"migrate\.seq_lens\.lengths\[1\] is -1\b"),
        (
            [13, 1],
            none,
            {
                "src_end": Without(wide, lambda row, token: token >= 12),
                "dst_end": Without(narrow, lambda row, token: token >= 12),
            },
            r"row 0 needs tokens \[0, .* 13\), but src\.block_table holds 12 ",
        ),
        (
            [5, 5],
            {"src_starts": [8, 0]},
            {
                "src_end": Without(wide, lambda row, token: token >= 12),
                "dst_end": Without(narrow, lambda row, token: row == 0 and token >= 12 - 8),
            },
            r"row 0 needs tokens \[8, .* 5\), but src\.block_table holds 12 ",
        ),
        (
            [5, 5],
            {"dst_starts": [0, 12]},
            {"dst_end": Without(narrow, lambda row, token: token >= 16)},
            r"row 1 needs tokens \[12, .* 5\), but dst\.block_table holds 16 ",
        ),
        (
            [5, 5],
            {"src_starts": [-1, 0]},
            {"dst_end": Without(narrow, lambda row, token: row == 0)},
            r"src\.starts\.lengths\[0\] is -1\b",
        ),
        (
            [5, 5],
            {"dst_starts": [0, (1 << 63) - 2]},
            {"dst_end": Without(narrow, lambda row, token: row == 1)},
            r"row 1 needs .*\[9223372036854775806, .*dst\.block_table holds 16 ",
        ),
    ):
        refused_migrate(backend, message, OutOfRangeError, *args, lengths, kept, **starts)
    dense = LAYOUTS["hnd"](Geometry(num_blocks=2, block_size=4), torch.bfloat16, 3)
    short = Without(Dense(), lambda row, token: token >= 4)
    for args, lengths, kept in (
        ((src, wide, dense, Dense()), [4, 5], {"dst_end": short}),
        (
            (dense, Dense(), dst, narrow),
            [5, 4],
            {"src_end": short, "dst_end": Without(narrow, lambda row, token: token >= 4)},
        ),
    ):
        refused_migrate(backend, r"5\b.*\b4\b", OutOfRangeError, *args, lengths, kept)


@pytest.mark.parametrize("count", [4, 6])
def test_slots_are_one_per_moved_token(backend: Backend, count: int) -> None:
    src, dst = pair()
    end = Slots(torch.arange(count), [2, 3], 8)
    table = tables.packed(src, [2, 3], 3)
    message = rf"dst\.slots\.slots has {count} entries .*expected (5|as many)"
    args = (src, table, dst, end, [2, 3])
    if count < 5:
        kept = {"dst_end": Without(end, lambda row, token: (row, token) == (1, 2))}
        refused_migrate(backend, message, InvalidArgumentError, *args, kept)
    elif backend.looks_first:  # no row of a device has a use for the others
        refused_migrate(backend, message, InvalidArgumentError, *args)
    else:
        check_migrate(backend, *args)


def test_indptr_out_of_order(backend: Backend) -> None:
    src, dst = pair()
    table = tables.packed(dst, [2, 3], 3, shared=False)
    for indptr, message in (
        ([0, 7, 5], r"src\.block_table\.indptr\[2\] is 5, expected at least indptr\[1\] 7"),
        ([0, 10, 9], r"src\.block_table\.indptr\[2\] is 9, expected at least indptr\[1\] 10"),
    ):
        end = Ragged(torch.zeros(9, dtype=torch.int32), torch.tensor(indptr), 4)
        is_wrong = [indptr[1] > 9, True]
        kept = {
            name: Without(of, lambda row, token, is_wrong=is_wrong: is_wrong[row])
            for name, of in (("src_end", end), ("dst_end", table))
        }
        if all(is_wrong) and not backend.looks_first:  # either row is seen first
            message += r"|src\.block_table\.indptr\[1\] is 10, expected indices_count 9"
        args = (src, end, dst, table, [2, 2], kept)
        refused_migrate(backend, message, InvalidArgumentError, *args)
