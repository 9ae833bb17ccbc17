"""The launches of a call: how many, with how many bytes of parameters, and what several write."""

from __future__ import annotations

import ctypes
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvx_core.types import ScaleGranularity
from tests import tables
from tests.caches import LAYOUTS, Cache, Geometry, scaled
from tests.calls import HOSTGRID, Backend
from tests.layer_calls import Write, check, some_slots, tokens_of
from tests.migrations import check_migrate
from tests.sass.machine import Launched

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PER_HEAD = ScaleGranularity.PER_HEAD
MOST_CALLS = 14  # what the host does up to the launch of a layer's write, in calls of nothing
MOST_BYTES = 4096  # of parameters, which drivers took before CUDA 12.1


@pytest.fixture
def launched() -> Iterator[Callable[[Callable[[], object]], list[tuple[int, int]]]]:
    """Makes a call that writes nothing; (pairs, bytes of parameters) of each of its launches."""
    found: list[tuple[int, int]] = []
    library = HOSTGRID.library()
    take = ctypes.CFUNCTYPE(None, ctypes.POINTER(Launched))(
        lambda launch: found.append((launch.contents.grid_y, launch.contents.parameter_bytes))
    )

    def of(call: Callable[[], object]) -> list[tuple[int, int]]:
        library.kvx_hostgrid_run_with(take)
        call()
        return found[:-1]  # without that of kvx_device_status

    yield of
    library.kvx_hostgrid_run_with(None)
    HOSTGRID.forget()


def filled(layout: str, num_layers: int, seed: int, dtype: torch.dtype = BF16) -> Cache:
    """Small layers; those of E4M3 with scales."""
    sizes = Geometry(num_blocks=3, num_kv_heads=2, head_dim=16, num_layers=num_layers)
    cache = LAYOUTS[layout](sizes, dtype, seed).fill(seed)
    return scaled(cache, PER_HEAD, seed) if dtype == E4M3 else cache


@pytest.mark.parametrize(
    ("dtype", "num_layers", "pairs"),
    [
        (BF16, 1, [1]),  # both planes share threads
        (BF16, 32, [64]),
        (BF16, 80, [160]),
        (BF16, 126, [160, 92]),
        (E4M3, 32, [64]),
        (E4M3, 40, [80]),
        (E4M3, 80, [80, 80]),
    ],
)
def test_layers_that_differ_in_their_addresses_share_launches(
    launched: Any, dtype: torch.dtype, num_layers: int, pairs: list[int]
) -> None:
    cache = filled("nhd", num_layers, 1, dtype)
    tokens = tokens_of(cache.layers, 1, BF16, 1)
    found = launched(Write(HOSTGRID, cache.layers, tokens, torch.tensor([3])).run)
    assert [count for count, _ in found] == pairs
    assert max(num_bytes for _, num_bytes in found) <= MOST_BYTES


@pytest.mark.parametrize(("dtype", "num_layers"), [(BF16, 90), (E4M3, 45)])
def test_writes_of_several_launches(backend: Backend, dtype: torch.dtype, num_layers: int) -> None:
    cache = filled("nhd", num_layers, 5, dtype)
    check(backend, cache, tokens_of(cache.layers, 3, BF16, 5), some_slots(cache, 3, 5))


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"), [(BF16, BF16), (BF16, E4M3), (E4M3, BF16), (E4M3, E4M3)]
)
@pytest.mark.parametrize(
    ("src_layout", "dst_layout"), [("nhd", "tensorrt_llm"), ("tensorrt_llm",) * 2]
)
def test_migrations_with_secondary_pools_and_scales(
    backend: Backend,
    src_layout: str,
    dst_layout: str,
    src_dtype: torch.dtype,
    dst_dtype: torch.dtype,
) -> None:
    """Up to six addresses of a pair, of which 53 share a launch: there are 82."""
    src, dst = filled(src_layout, 41, 1, src_dtype), filled(dst_layout, 41, 2, dst_dtype)

    def end(cache: Cache, layout: str, seed: int) -> Any:
        make = tables.kv_offsets if layout == "tensorrt_llm" else tables.packed
        return make(cache, [5, 3], seed, shared=False)

    ends = end(src, src_layout, 3), end(dst, dst_layout, 4)
    check_migrate(backend, src, ends[0], dst, ends[1], [5, 3])


def host_calls(dtype: torch.dtype) -> float:
    """What a write of one token into one layer takes up to its launch, which does nothing, in calls
    of nothing from Python, of which one makes it: a slow machine slows both. Least of several
    batches that take turns. The host grid answers as the driver."""
    library, nothing = HOSTGRID.library(), ctypes.CDLL(None).labs  # of C: Python would take time
    cache = filled("nhd", 1, 3, dtype)
    tokens, slots = tokens_of(cache.layers, 1, BF16, 3), torch.tensor([3])
    write = Write(HOSTGRID, cache.layers, tokens, slots)
    write.run()
    arguments = ctypes.byref(write.caches[0]), ctypes.byref(write.writes[0]), HOSTGRID.stream
    library.kvx_hostgrid_run_with(ctypes.cast(nothing, ctypes.c_void_p))
    timers = [timeit.Timer(lambda of=of: of(*arguments)) for of in (library.kvx_write_kv, nothing)]
    try:
        batches = [[timer.timeit(500) for timer in timers] for _ in range(40)]
    finally:
        library.kvx_hostgrid_run_with(None)
    write_seconds, nothing_seconds = map(min, zip(*batches, strict=True))
    return write_seconds / nothing_seconds - 1


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_a_layers_write_takes_the_host_microseconds(dtype: torch.dtype) -> None:
    """Some 2 on a fast machine, of which a call of nothing takes 0.3."""
    found = host_calls(dtype)
    assert found < MOST_CALLS
