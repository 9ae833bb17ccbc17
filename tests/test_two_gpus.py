"""Migrations between two GPUs of one machine, on the host grid: by peer access, and through pinned
memory where there is none. A device that touches memory without access faults there.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvx_core import UnsupportedError
from tests.caches import LAYOUTS, Cache, Geometry
from tests.calls import CPU, HOSTGRID
from tests.reference import Half, Packed

GEOMETRY = Geometry(num_blocks=7)
LENGTHS = torch.tensor([9, 3])
# Layouts at both ends, for every kernel that copies: blocks, vectors, remap and tile.
WAYS = [("nhd", "nhd"), ("nhd", "hnd"), ("hnd", "packed8"), ("hnd", "tgi"), ("tgi", "nhd")]


def on_device(machine: ctypes.CDLL, cache: Cache, device: int, *, shared: bool = True) -> Cache:
    """The cache in pages of its own, which a device owns."""
    moved: dict[int, Tensor] = {}
    for storage in cache.storages:
        source = storage.untyped_storage()
        pages = -(-source.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
        room = torch.frombuffer(mmap.mmap(-1, pages), dtype=torch.uint8)
        room[: source.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(source)
        machine.kvx_hostgrid_give(room.data_ptr(), pages, device, shared)
        moved[source.data_ptr()] = room

    def move(tensor: Tensor) -> Tensor:
        room = moved[tensor.untyped_storage().data_ptr()]
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype).set_(room.untyped_storage(), *place)

    def half(of: Half) -> Half:
        return replace(of, tensor=move(of.tensor))

    layers = tuple(replace(layer, k=half(layer.k), v=half(layer.v)) for layer in cache.layers)
    return replace(cache, storages=tuple(map(move, cache.storages)), layers=layers)


def table(*blocks: tuple[int, ...]) -> Packed:
    return Packed(torch.tensor(blocks, dtype=torch.int32), GEOMETRY.block_size)


SRC_TABLE, DST_TABLE, TIER_TABLE = (
    table((3, 0, 6), (5, 1, 2)),
    table((1, 4, 2), (0, 6, 5)),
    table((0, 1, 2), (3, 4, 5)),
)


def ends(way: tuple[str, str]) -> tuple[Cache, Cache, Cache]:
    """A source, a destination, and what it is to be afterwards, as the CPU makes it."""
    src, dst = (
        LAYOUTS[layout](GEOMETRY, torch.bfloat16, seed=seed) for seed, layout in enumerate(way)
    )
    expected = dst.clone()
    CPU.migrate(src, SRC_TABLE, expected, DST_TABLE, LENGTHS)
    return src, dst, expected


def assert_bytes(found: Cache, expected: Cache) -> None:
    for ours, theirs in zip(found.storages, expected.storages, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_by_peer_access(machine: ctypes.CDLL, way: tuple[str, str], current: int) -> None:
    """The device of the source reads its own memory and writes the other's, or the reverse."""
    src, dst, expected = ends(way)
    machine.kvx_hostgrid_machine(2, True)
    src, dst = on_device(machine, src, 0), on_device(machine, dst, 1)
    machine.kvx_hostgrid_use(current)
    for _ in range(2):  # the first call gets access, the second has it
        HOSTGRID.migrate(src, SRC_TABLE, dst, DST_TABLE, LENGTHS)
    assert_bytes(dst, expected)


@pytest.mark.parametrize("way", WAYS)
def test_through_pinned_memory(machine: ctypes.CDLL, way: tuple[str, str]) -> None:
    """From a pool to a tier of pinned memory of the host, and from there to another GPU's pool."""
    src, dst, expected = ends(way)
    tier = LAYOUTS[way[0]](GEOMETRY, torch.bfloat16, seed=5)
    machine.kvx_hostgrid_machine(2, False)
    src, dst = on_device(machine, src, 0), on_device(machine, dst, 1)
    HOSTGRID.migrate(src, SRC_TABLE, tier, TIER_TABLE, LENGTHS)
    machine.kvx_hostgrid_use(1)
    HOSTGRID.migrate(tier, TIER_TABLE, dst, DST_TABLE, LENGTHS)
    assert_bytes(dst, expected)


def refused(src: Cache, dst: Cache, sentence: str) -> None:
    before = dst.clone()
    with pytest.raises(UnsupportedError, match=sentence):
        HOSTGRID.migrate(src, SRC_TABLE, dst, DST_TABLE, LENGTHS)
    assert_bytes(dst, before)


def test_without_peer_access(machine: ctypes.CDLL) -> None:
    src, dst, _ = ends(("nhd", "hnd"))
    machine.kvx_hostgrid_machine(2, False)
    src, dst = on_device(machine, src, 0), on_device(machine, dst, 1)
    refused(
        src,
        dst,
        r"^dst\.layers\[\]\.k\.data is on device 1, which the current device 0 has no peer access "
        r"to: copy it to pinned HOST memory with device 1 current, and from there with device 0 "
        r"current \(spec 7\)$",
    )


def test_with_neither_peer_access_nor_pinned_memory(
    machine: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, tier, _ = ends(("nhd", "hnd"))
    machine.kvx_hostgrid_machine(2, False)
    src = on_device(machine, src, 0)
    monkeypatch.setenv("HOSTGRID_PAGEABLE", "1")
    refused(
        src,
        tier,
        r"^dst\.layers\[\]\.k\.data is 0x\w+, which the device cannot reach, .* pin host memory ",
    )


def test_a_pool_that_gives_no_access(machine: ctypes.CDLL) -> None:
    src, dst, _ = ends(("nhd", "hnd"))
    machine.kvx_hostgrid_machine(2, True)
    src, dst = on_device(machine, src, 0), on_device(machine, dst, 1, shared=False)
    refused(
        src,
        dst,
        r"^dst\.layers\[\]\.k\.data is in a memory pool of device 1 that device 0 may not access: "
        r"allow it \(cudaMemPoolSetAccess, cuMemSetAccess\), or copy by way of pinned HOST memory",
    )


def test_when_all_is_on_the_other_device(machine: ctypes.CDLL) -> None:
    """Peer access would move it by way of a device that has nothing to do with it."""
    src, dst, _ = ends(("nhd", "hnd"))
    machine.kvx_hostgrid_machine(2, True)
    src, dst = on_device(machine, src, 1), on_device(machine, dst, 1)
    refused(src, dst, r"^src\..*\.data is on device 1, but the current device is 0: make that of ")
