"""copy_rows and what captures by it: requests, threads and block tables are never mixed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvx_core import CacheDesc, CacheFacts, CacheView, OutOfRangeError, Snapshot, describe
from kvx_core.desc.find_tokens import find_tokens, null_blocks
from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.ops.migrate import copy_rows
from kvx_core.snapshot import Chunks, MemoryPool, Nulls, Precision, Section
from kvx_core.snapshot.section import row_on_host
from kvx_core.stores.blobs import Directory
from kvx_core.stores.prefix import PrefixStore
from tests.ops.in_threads import run_in_threads

BLOCKS, BLOCK, CHUNK, LAYERS = 211, 4, 24, 3
FACTS = CacheFacts(rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0)


def nhd(tensor: torch.Tensor) -> TensorDesc:
    return describe(tensor, "BLOCK_NHD")


def view_of(null_block_id: int = 0) -> CacheView:
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(LAYERS, 2, BLOCKS, BLOCK, 2, 8, generator=generator)
    return CacheView(
        tuple(CacheDesc.from_kv(nhd(k), nhd(v)) for k, v in caches),
        FACTS,
        null_block_id=null_block_id,
    )


VIEW = view_of()
EMPTY = Section(tuple(range(LAYERS)), VIEW, None)


def of_request(seed: int, num_blocks: int) -> Section:
    """A request with its own blocks: none of them is block 0, which is null."""
    blocks = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS))[:num_blocks]
    return EMPTY.of_sequence(BlockTable.packed([blocks.tolist()]))


def row_of(held: Section) -> npt.NDArray[Any]:
    row = row_on_host(held.block_table)
    assert row is not None
    return row


def captured(held: Section, start: int, pool: MemoryPool | None, stop: int = 0) -> str | None:
    stop = stop or start + CHUNK
    run = Chunks([held], start, stop, pool=pool)
    found = Snapshot.reserve_of(run, np.arange(start, stop), start=start)
    if found is None:
        return None
    Snapshot.fill_all([found], held)
    assert (found.lease is not None) is (pool is not None)
    return found.digest()


def test_requests_take_turns() -> None:
    """Long ones, short ones and those with more blocks than there was room for."""
    pool = MemoryPool(CHUNK)
    requests = [of_request(seed, count) for seed, count in enumerate([6, 200, 20, 7, 210, 6])]
    for _ in range(2):
        for held in requests:
            assert held.block_table is not None
            most = held.block_table.max_blocks_per_seq * BLOCK - CHUNK
            for start in {0, most // 2, most}:
                assert captured(held, start, pool) == captured(held, start, None)


def test_null_blocks_are_those_of_the_request() -> None:
    pool, whole, gap = MemoryPool(CHUNK), of_request(0, 12), [1, 2, 3, 0, 5, 6, 7, 8, 9, 10, 11, 12]
    left = EMPTY.of_sequence(BlockTable.packed([gap]))  # its first blocks have left a window
    for _ in range(2):
        assert captured(whole, 0, pool) is not None
        assert captured(left, 0, pool) is None
        assert captured(left, 24, pool) == captured(left, 24, None) is not None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_table_that_changes_is_read_anew(dtype: Any) -> None:
    pool, blocks = MemoryPool(CHUNK), np.arange(1, 9, dtype=dtype)[None]
    held = EMPTY.of_sequence(BlockTable.packed(blocks))
    first = captured(held, 0, pool)
    for seed in range(3):
        blocks[0] = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS))[:8]
        found = captured(held, 0, pool)
        assert found == captured(held, 0, None) != first


def test_nothing_stays_of_a_longer_sequence() -> None:
    pool, short = MemoryPool(CHUNK), of_request(1, 5)
    assert captured(of_request(0, 50), 0, pool) is not None
    with pytest.raises(OutOfRangeError, match="holds 20 tokens, expected at least 24"):
        captured(short, 0, pool)
    # Nor does a copy find it that is not asked whether the table is long enough.
    dense = torch.zeros(LAYERS, 2, 1, 50 * BLOCK, 2, 8)
    to = CacheView(tuple(CacheDesc.from_kv(nhd(k), nhd(v)) for k, v in dense), FACTS)
    first = np.zeros(1, np.int64)
    copy_rows(VIEW, row_of(of_request(0, 50)), 0, to, first, 0, 50 * BLOCK)
    copy_rows(VIEW, row_of(short), 0, to, first, 0, 5 * BLOCK)
    dense.zero_()
    with pytest.raises(OutOfRangeError, match=r"needs tokens \[0, 0 \+ 21\)"):
        copy_rows(VIEW, row_of(short), 0, to, first, 0, 5 * BLOCK + 1)
    with pytest.raises(OutOfRangeError):
        copy_rows(VIEW, row_of(of_request(0, 50)), 50 * BLOCK - 1, to, first, 0, 2)
    assert not dense.any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int16])
def test_rows_are_copied_from_where_to_where_they_are_said_to_be(dtype: Any) -> None:
    """Rows that C reads, and those that Python describes: of other dtypes and with strides."""
    dense = torch.full((LAYERS, 2, 3, BLOCK, 2, 8), 7.5)
    to = CacheView(tuple(CacheDesc.from_kv(nhd(k), nhd(v)) for k, v in dense), FACTS)
    blocks, into = np.array([9, 4, 17, 30]), np.array([2, -1, 0])  # -1: is skipped
    for start, at, count in ((0, 0, 12), (3, 1, 9), (5, 2, 1), (15, 0, 1)):
        dense.fill_(7.5)
        expected = dense.clone()
        for i in range(count):
            (b, here), (c, there) = divmod(start + i, BLOCK), divmod(at + i, BLOCK)
            if into[c] >= 0:
                for layer, cache in enumerate(VIEW.layers):
                    for half, tensor in enumerate((cache.k, cache.v)):
                        assert tensor is not None
                        row = tensor.owner[blocks[b], here]  # type: ignore[index]
                        expected[layer, half, into[c], there] = row
        if dtype is not np.int16:
            copy_rows(VIEW, blocks.astype(dtype), start, to, into.astype(dtype), at, count)
            assert torch.equal(dense, expected)
            dense.fill_(7.5)
            strided = np.repeat(blocks.astype(dtype), 2)[::2]
            with pytest.raises(InvalidArgumentError, match="stride is"):
                copy_rows(VIEW, np.repeat(strided, 2)[::2], start, to, into, at, count)
        else:
            with pytest.raises(UnsupportedError, match="dtype is 'int16'"):
                copy_rows(VIEW, blocks.astype(dtype), start, to, into, at, count)
        assert (dense == 7.5).all()


def test_an_error_changes_nothing_for_the_next_copy() -> None:
    dense = torch.zeros(LAYERS, 2, 1, BLOCK, 2, 8)
    to = CacheView(tuple(CacheDesc.from_kv(nhd(k), nhd(v)) for k, v in dense), FACTS)
    blocks, first = np.arange(1, 3), np.zeros(1, np.int64)
    for _ in range(3):
        dense.zero_()
        with pytest.raises(OutOfRangeError):
            copy_rows(VIEW, np.array([BLOCKS]), 0, to, first, 0, BLOCK)
        assert not dense.any()
        copy_rows(VIEW, blocks, 0, to, first, 0, BLOCK)
        assert dense.all()


def test_memory_that_has_moved_is_refused_and_views_that_are_out_of_date() -> None:
    caches = torch.ones(LAYERS, 2, 3, BLOCK, 2, 8)
    dense = torch.zeros(LAYERS, 2, 1, BLOCK, 2, 8)
    reasons: list[str] = []
    cache, to = (
        CacheView(
            tuple(CacheDesc.from_kv(nhd(k), nhd(v)) for k, v in tensors),
            FACTS,
            outdated=lambda: reasons[0] if reasons else None,
        )
        for tensors in (caches, dense)
    )
    blocks, first = np.arange(1, 3), np.zeros(1, np.int64)
    copy_rows(cache, blocks, 0, to, first, 0, BLOCK)
    assert dense.all()
    dense.zero_()
    reasons.append("the engine sleeps")
    with pytest.raises(InvalidArgumentError, match="src is out of date: the engine sleeps"):
        copy_rows(cache, blocks, 0, to, first, 0, BLOCK)
    reasons.clear()
    copy_rows(cache, blocks, 0, to, first, 0, BLOCK)
    assert dense.all()
    caches.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="storage was resized or replaced"):
        copy_rows(cache, blocks, 0, to, first, 0, BLOCK)


def test_threads_never_mix() -> None:
    pool, wrong = MemoryPool(CHUNK), list[int]()
    requests = [of_request(seed, 8 + 13 * seed) for seed in range(8)]
    expected = [captured(held, 4, None) for held in requests]

    def work(seed: int) -> None:
        for at in np.random.default_rng(seed).integers(len(requests), size=150):
            if captured(requests[at], 4, pool) != expected[at]:
                wrong.append(at)

    run_in_threads(work, 6)
    assert wrong == []


def test_a_process_that_is_forked_off_has_its_own() -> None:
    pool, held, other = MemoryPool(CHUNK), of_request(0, 9), of_request(1, 9)
    expected = captured(held, 0, pool), captured(other, 0, pool)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(captured(other, 0, pool) != expected[1])
        finally:
            os._exit(code)
    assert captured(held, 0, pool) == expected[0]
    assert os.waitpid(child, 0)[1] == 0


def test_tables_of_other_formats_and_some_layers_are_described_anew() -> None:
    ring = EMPTY.of_sequence(BlockTable.ring([[3, 5, 7, 9, 11, 13]]))
    assert captured(ring, 0, MemoryPool(CHUNK)) == captured(ring, 0, None) is not None
    held, pool = of_request(0, 9), MemoryPool(CHUNK)
    run = Chunks([held], 0, CHUNK, pool=pool)
    found = Snapshot.reserve_of(run, np.arange(CHUNK), start=0)
    assert found is not None
    for layer in (1, 0, 2):
        found.fill(held.of([layer]))
    assert found.digest() == captured(held, 0, None)


@pytest.mark.parametrize("null_block_id", [-1, 0, 7])
def test_null_blocks_are_those_that_a_migration_skips(null_block_id: int) -> None:
    view = replace(VIEW, null_block_id=null_block_id)
    blocks = np.array([[3, 0, -1, 7, 2, -5, 7, 0, 1]])
    for start, stop in [(0, 36), (5, 30), (7, 8), (12, 16)]:
        span = view.at(block_table=blocks, starts=[start])
        places = find_tokens(span, SeqLens.of([stop - start]))["block"] < 0
        null = null_blocks(view, blocks[0])
        assert null.repeat(BLOCK)[start:stop].tolist() == places.tolist()
        section = replace(EMPTY, view=view, block_table=BlockTable.packed(blocks))
        nulls = Nulls(section, start, stop)
        assert nulls.any(start, stop) == places.any()
        assert nulls.all(start, stop) == places.all()
        for lo in range(start, stop):  # that of its block decides for a token
            hi = min(lo + 3, stop)
            assert nulls.any(lo, hi) == places[lo - start : hi - start].any()
            assert nulls.all(lo, hi) == places[lo - start : hi - start].all()


def test_blocks_that_a_cache_does_not_have_are_refused() -> None:
    blocks = np.array([[3, 0, VIEW.layers[0].num_blocks, 7]])
    section = replace(EMPTY, block_table=BlockTable.packed(blocks))
    Nulls(section, 0, 2 * BLOCK)  # it is not among these
    with pytest.raises(OutOfRangeError, match=str(VIEW.layers[0].num_blocks)):
        Nulls(section, BLOCK, 3 * BLOCK)


def test_a_section_of_another_sequence() -> None:
    table = BlockTable.packed([[1, 2, 3]])
    assert EMPTY.of_sequence(table) == replace(EMPTY, block_table=table)
    with pytest.raises(InvalidArgumentError, match=r"block_table has 2 rows, expected the one"):
        EMPTY.of_sequence(BlockTable.packed([[1], [2]]))


def test_a_store_completes_a_view_once_and_refuses_it_each_time(tmp_path: Path) -> None:
    def store(fingerprint: str) -> PrefixStore:
        return PrefixStore(
            Directory(tmp_path / fingerprint),
            fingerprint=fingerprint,
            num_layers=LAYERS,
            total_kv_heads=2,
            precision=Precision.of("float32"),
            chunk_tokens=CHUNK,
        )

    pool, one, other = MemoryPool(CHUNK), store("one"), store("other")
    for seed in range(3):
        held = of_request(seed, 10)
        for salted in (one, one.salted("salt")):
            chunks = salted.chunks([held], 0, CHUNK, pool=pool)
            assert chunks.sections[0].view.facts.fingerprint == "one"
            assert chunks.sections[0].block_table is held.block_table
    assert len(pool._kinds) == 1
    completed = chunks.sections[0]
    assert other.chunks([held], 0, CHUNK).sections[0].view.facts.fingerprint == "other"
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="fingerprint is 'one', expected 'other'"):
            other.chunks([completed], 0, CHUNK)
