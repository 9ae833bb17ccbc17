"""MemoryPool: memory that snapshots take in turn, while nothing refers to an earlier one."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

from kvx_core import CacheDesc, CacheFacts, CacheView, OutOfRangeError, Snapshot, describe
from kvx_core.desc.tables import BlockTable
from kvx_core.ops.migrate import copy_rows
from kvx_core.snapshot import Chunks, MemoryPool, Section
from kvx_core.snapshot.pool import Lease

CHUNK = 24
FACTS = CacheFacts(fingerprint="m", rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0)
LAYOUTS = {"BLOCK_NHD": (11, 4, 3, 8), "BLOCK_HND": (11, 3, 4, 8), "UNITS": (11, 4, 8, 32)}


def section(
    seed: int, dtype: torch.dtype = torch.float32, layout: str = "BLOCK_NHD", layers: int = 3
) -> Section:
    """11 blocks of 4 tokens, 3 heads of 8 numbers, and a sequence of 10 of them.

    UNITS: 8 heads of 32
    """
    generator = torch.Generator().manual_seed(seed)
    caches = [
        torch.randn(2, *LAYOUTS[layout], generator=generator).to(dtype) for _ in range(layers)
    ]
    layout = layout.replace("UNITS", "BLOCK_NHD")
    view = CacheView(
        tuple(CacheDesc.from_kv(describe(k, layout), describe(v, layout)) for k, v in caches),
        FACTS,
    )
    blocks = torch.randperm(11, generator=generator)[:10].tolist()
    return Section(tuple(range(layers)), view, BlockTable.packed([blocks]))


def capture(
    held: Section, start: int, stop: int, pool: MemoryPool | None, **options: Any
) -> Snapshot:
    found = Snapshot.reserve(range(start, stop), [held], start=start, pool=pool, **options)
    assert found is not None
    found.fill(held)
    found.settle([held])
    return found


def address(snapshot: Snapshot) -> int:
    assert snapshot.memory is not None
    return snapshot.memory.ctypes.data


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("layout", ["BLOCK_NHD", "BLOCK_HND"])
@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "lossless_bf16"),
        (torch.float32, "f16"),
    ],
)
def test_a_capture_is_that_of_new_memory(
    seed: int, layout: str, dtype: torch.dtype, format: str | None, tmp_path: Path
) -> None:
    held, pool = section(seed, dtype, layout), MemoryPool(CHUNK)
    for start, stop in [(0, CHUNK), (CHUNK, 40), (5, 6), (0, CHUNK)]:
        expected = capture(held, start, stop, None, format=format)
        found = capture(held, start, stop, pool, format=format)
        assert found.lease is not None
        assert expected.lease is None
        assert found.digest() == expected.digest()
        assert found.header == expected.header
        assert found.num_bytes == expected.num_bytes
        found.save(tmp_path / "found")
        expected.save(tmp_path / "expected")
        assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()


def test_layer_by_layer() -> None:
    held, pool = section(0), MemoryPool(CHUNK)
    expected = capture(held, 3, 20, None)
    for _ in range(2):
        found = Snapshot.reserve(range(3, 20), [held], start=3, pool=pool)
        assert found is not None
        for layer in (2, 0, 1):
            found.fill(held.of([layer]))
        assert found.digest() == expected.digest()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("format", [None, "f16", "q8_0", "f8_e4m3"])
def test_chunks_together_are_the_chunks_one_by_one(seed: int, format: str | None) -> None:
    """With and without a pool, by layers, the last chunk cut, some left out."""
    held = section(seed, layout="UNITS")
    spans = [(3, 3 + CHUNK), (3 + CHUNK, 40)]
    expected = [capture(held, start, stop, None, format=format) for start, stop in spans]
    ids = np.arange(40)
    for pool in (None, MemoryPool(CHUNK), MemoryPool(CHUNK, free_bytes=0)):
        for chosen in ([0, 1], [1], [0]) * 2:
            run = Chunks([held], 3, 40, format=format, pool=pool)
            found = [
                Snapshot.reserve_of(run, ids[start:stop], start=start)
                for start, stop in (spans[i] for i in chosen)
            ]
            chunks = [chunk for chunk in found if chunk is not None]
            for layers in ([1], [0, 2]):
                Snapshot.fill_all(chunks, held.of(layers))
            assert [c.digest() for c in chunks] == [expected[i].digest() for i in chosen]
            assert [c.header for c in chunks] == [expected[i].header for i in chosen]


def test_chunks_together_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    held, pool, copies = section(0), MemoryPool(4), []

    def counted(*arguments: Any) -> None:
        copies.append(arguments)
        copy_rows(*arguments)

    monkeypatch.setattr("kvx_core.snapshot.pool.copy_rows", counted)
    for _ in range(3):
        run = Chunks([held], 0, 40, pool=pool)
        found = [
            Snapshot.reserve_of(run, np.arange(at, at + 4), start=at) for at in range(0, 40, 4)
        ]
        Snapshot.fill_all([chunk for chunk in found if chunk is not None], held)
        assert len(copies) == 1
        copies.clear()
        del found
        gc.collect()


def test_null_blocks_cost_their_chunks_alone() -> None:
    held = section(0)
    blocks = np.array([[0, 1, 2, -1, 4, 5, 6, 7, 8, 9]])
    held = replace(held, block_table=BlockTable.packed(blocks))
    run = Chunks([held], 0, 40, pool=MemoryPool(8))
    found = [Snapshot.reserve_of(run, np.arange(at, at + 8), start=at) for at in range(0, 40, 8)]
    assert [chunk is None for chunk in found] == [False, True, False, False, False]


def test_memory_is_taken_again_when_nothing_refers_to_it() -> None:
    held, pool = section(0), MemoryPool(CHUNK)
    first = capture(held, 0, CHUNK, pool)
    at = address(first)
    second = capture(held, 0, CHUNK, pool)
    assert address(second) != at
    values = first.array("layers.1.v")[3:]
    expected = values.copy()
    del first
    other = capture(held, 8, 8 + CHUNK, pool)  # the array of the first still refers to its memory
    assert address(other) != at
    np.testing.assert_array_equal(values, expected)
    del values
    gc.collect()
    assert address(capture(held, 0, CHUNK, pool)) == at


def test_a_snapshot_that_is_too_long_has_new_memory() -> None:
    held, pool = section(0), MemoryPool(CHUNK)
    assert capture(held, 0, CHUNK + 1, pool).lease is None


def test_other_caches_and_formats_do_not_share_memory() -> None:
    one, other, pool = section(0), section(1, layers=2), MemoryPool(CHUNK)
    for held, format in [(one, None), (other, None), (one, "f16"), (one, None), (other, "f16")]:
        found = capture(held, 0, CHUNK, pool, format=format)
        assert found.digest() == capture(held, 0, CHUNK, None, format=format).digest()


@pytest.mark.parametrize(
    ("format", "is_pooled"),
    [("q8_0", True), ("q4_k", False), ("nvfp4", False), ("f8_e4m3", False), ("tq4", False)],
)
def test_units_rows_and_scales(format: str, is_pooled: bool) -> None:
    """What has more than units of K and V has new memory."""
    held = section(0, layout="UNITS")
    expected = capture(held, 0, CHUNK, None, format=format)
    found = capture(held, 0, CHUNK, MemoryPool(CHUNK), format=format)
    assert (found.lease is not None) is is_pooled
    assert found.digest() == expected.digest()


def test_free_memory_is_bounded() -> None:
    held = section(0)
    pool = MemoryPool(CHUNK, free_bytes=2 * capture(held, 0, CHUNK, None).num_bytes + 1024)
    snapshots = [capture(held, 0, CHUNK, pool) for _ in range(5)]
    ((_, kind),) = pool._kinds.values()
    assert kind is not None
    del snapshots
    gc.collect()
    assert len(kind.free) == 2


def test_a_capture_that_fails_costs_nothing() -> None:
    held, pool = section(0), MemoryPool(CHUNK)
    with pytest.raises(OutOfRangeError):
        capture(held, 30, 41, pool)
    expected = capture(held, 0, CHUNK, None)
    assert capture(held, 0, CHUNK, pool).digest() == expected.digest()


def test_threads_share_a_pool() -> None:
    held, pool = section(0), MemoryPool(CHUNK)
    starts = list(range(17))
    expected = {start: capture(held, start, start + CHUNK - 1, None).digest() for start in starts}
    wrong: list[int] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(starts)
        kept: list[tuple[int, Snapshot]] = []
        for start in map(int, order):
            kept.append((start, capture(held, start, start + CHUNK - 1, pool)))
            if len(kept) > 3:
                at, found = kept.pop(0)
                wrong.extend([at] * (found.digest() != expected[at]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("is_settled", [True, False])
def test_memory_that_a_device_may_still_write_is_not_taken_again(is_settled: bool) -> None:
    free: list[Any] = []
    lease = Lease(SimpleNamespace(free=free), "slab", 3)  # type: ignore[arg-type]
    lease.is_settled = False
    if is_settled:
        lease.settled()
    assert free == []
    del lease
    gc.collect()
    assert free == [("slab", 3)] * is_settled


@pytest.mark.parametrize(("format", "is_pooled"), [(None, True), ("q4_k", False)])
def test_a_pool_keeps_no_view_alive(format: str | None, is_pooled: bool) -> None:
    """What it has for a view goes with the view, but for the memory of snapshots."""
    pool, held = MemoryPool(CHUNK), section(0, layout="UNITS")
    found = Snapshot.reserve(range(CHUNK), [held], pool=pool, format=format)
    assert found is not None
    assert (found.lease is not None) is is_pooled
    assert len(pool._kinds) == 1
    memory, view = found.memory, ref(held.view)
    assert memory is not None
    memory[:] = 7
    del held, found
    gc.collect()
    assert view() is None
    assert not pool._kinds
    assert (memory == 7).all()
