"""How often calls ask the CUDA runtime, on the host grid: a question costs the host a microsecond.

Calls are counted once they have been made before: a device's status and its multiprocessors are
asked once. Also, that what is not asked again is still refused on a device that does not reach it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kvx_core import UnsupportedError
from kvx_core._c import abi, bound
from kvx_core.desc import tensors
from kvx_core.types import Memory
from tests.caches import LAYOUTS, Cache, Geometry, assert_same_bytes
from tests.calls import CPU, HOSTGRID, View
from tests.layer_calls import Write, tokens_of
from tests.plans import planned
from tests.reference import Packed
from tests.test_two_gpus import on_device

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS = torch.tensor([7, 3])
TABLE = torch.tensor([[1, 2], [0, 3]], dtype=torch.int32)
DL_CUDA = 2  # DLPack's kDLCUDA
OF_DEVICE_0, OF_DEVICE_1 = 1 << 24, 2 << 24  # KVX_FLAG_OWNED_BY(0) and (1)


class Asked(NamedTuple):
    """Calls of cudaGetDevice, cudaPointerGetAttributes, cudaGetSymbolAddress and
    cudaDeviceGetAttribute.
    """

    device: int
    pointers: int
    symbols: int = 0
    attributes: int = 0


def asked_so_far() -> Asked:
    counts = (ctypes.c_uint * 4)()
    HOSTGRID.library().kvx_hostgrid_calls(counts)
    return Asked(*counts)


def asked(call: Callable[[], object]) -> Asked:
    """What the second of two calls asks."""
    call()
    before = asked_so_far()
    call()
    return Asked(*(now - then for now, then in zip(asked_so_far(), before, strict=True)))


def filled(layout: str, num_layers: int = 1, seed: int = 1, dtype: torch.dtype = BF16) -> Cache:
    sizes = Geometry(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=16, num_layers=num_layers)
    return LAYOUTS[layout](sizes, dtype, seed).fill(seed)


class OneLayer:
    """The structs of a write and of a gather of one layer."""

    def __init__(self, layout: str = "nhd") -> None:
        self.cache = filled(layout)
        layer = self.cache.layers[0]
        (tokens,) = tokens_of(self.cache.layers, 14, BF16, 1)
        slots = torch.randperm(16)[:14]
        self.desc = HOSTGRID.layer(layer)
        self.write = abi.kvx_write_desc_t(io=HOSTGRID.io(*tokens, 14), slots=HOSTGRID.slots(slots))
        self.gather = abi.kvx_gather_desc_t(
            io=HOSTGRID.io(*tokens, 14),
            block_table=HOSTGRID.block_table(Packed(TABLE, 4)),
            seq_lens=HOSTGRID.seq_lens(LENGTHS),
            max_seq_len=7,
        )
        self.kept = tokens, slots


class Migration:
    """The struct of a migration of all layers."""

    def __init__(self, src: Cache, dst: Cache) -> None:
        self.ends = [
            View(HOSTGRID, cache, Packed(TABLE.clone(), 4), None, 0) for cache in (src, dst)
        ]
        self.lens = HOSTGRID.seq_lens(LENGTHS)
        src_desc, dst_desc = (ctypes.pointer(end.desc) for end in self.ends)
        self.desc = abi.kvx_migrate_desc_t(
            seq_lens=ctypes.pointer(self.lens), src=src_desc, dst=dst_desc
        )


def test_a_write_and_a_gather_ask_for_each_tensor() -> None:
    one = OneLayer()
    write = asked(lambda: HOSTGRID.launch("kvx_write_kv", one.desc, one.write))
    assert write == Asked(1, 5)  # K, V, key, value, slots
    gather = asked(lambda: HOSTGRID.launch("kvx_gather_kv", one.desc, one.gather))
    assert gather == Asked(1, 6)  # a table and lengths in place of slots


def test_v_among_the_elements_of_k_is_not_asked_for() -> None:
    """[block, K or V, token, head, dim] in one allocation."""
    one, whole = OneLayer(), torch.zeros(4, 2, 4, 2, 16, dtype=BF16)
    for tensor, half in zip((one.desc.k, one.desc.v), whole.unbind(1), strict=True):
        tensor.data, tensor.stride = HOSTGRID.address(half), abi.dims(half.stride())
    assert asked(lambda: HOSTGRID.launch("kvx_write_kv", one.desc, one.write)) == Asked(1, 4)


def test_a_migration_asks_for_each_tensor() -> None:
    migration = Migration(filled("nhd", 3), filled("hnd", 3, 2))
    found = asked(lambda: HOSTGRID.launch("kvx_migrate_kv", migration.desc))
    assert found == Asked(1, 4 * 3 + 3)  # and the lengths and the table of both ends


@pytest.mark.parametrize("num_layers", [32, 80])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_a_write_of_layers(num_layers: int, dtype: torch.dtype) -> None:
    cache = filled("nhd", num_layers, 1, dtype)
    tokens = tokens_of(cache.layers, 1, BF16, 1)
    write = Write(HOSTGRID, cache.layers, tokens, torch.tensor([3]))
    options = abi.kvx_write_options_t()
    structs = (
        abi.pointer_array(write.caches, abi.kvx_cache_desc_t),
        abi.pointer_array(write.writes, abi.kvx_write_desc_t),
        num_layers,
        options,
    )
    assert asked(lambda: HOSTGRID.launch("kvx_write_layers", *structs)) == Asked(
        1, 4 * num_layers + 1
    )
    options.flags = OF_DEVICE_0
    assert asked(lambda: HOSTGRID.launch("kvx_write_layers", *structs)) == Asked(1, 0)


def test_a_kept_plan_asks_for_its_tensors_once() -> None:
    """Each run asks for its slots, lengths and tables."""
    migration, one = Migration(filled("nhd", 3), filled("hnd", 3, 2)), OneLayer()
    kept: list[tuple[str, Sequence[Any], int]] = [
        ("kvx_plan_create", (migration.desc,), 3),
        ("kvx_plan_create_write", (one.desc, one.write, None), 1),
        ("kvx_plan_create_gather", (one.desc, one.gather, None), 2),
    ]
    for create, structs, of_indices in kept:
        with planned(HOSTGRID, *structs, create=create) as plan:
            found = asked(lambda: plan.library.kvx_plan_run(plan.handle, None, HOSTGRID.stream))
        assert found == Asked(1, of_indices)


def test_a_kept_plan_is_checked_on_each_device(machine: ctypes.CDLL) -> None:
    src, dst = filled("nhd", 2), filled("nhd", 2, 2)
    machine.kvx_hostgrid_machine(2, False)
    src, dst = on_device(machine, src, 0), on_device(machine, dst, 0)
    migration = Migration(src, dst)
    with planned(HOSTGRID, migration.desc) as plan:
        plan.run()
        machine.kvx_hostgrid_use(1)
        before = dst.clone()
        for _ in range(2):  # a refusal is no check
            with pytest.raises(
                UnsupportedError, match="is on device 0, which the current device 1"
            ):
                plan.run()
        assert_same_bytes(dst, before)
        machine.kvx_hostgrid_use(0)
        plan.run()


def test_an_owner_that_is_not_current_is_asked_for(machine: ctypes.CDLL) -> None:
    cache = filled("nhd", 2)
    machine.kvx_hostgrid_machine(2, False)
    cache = on_device(machine, cache, 1)
    before = cache.clone()
    tokens = tokens_of(cache.layers, 1, BF16, 1)
    with pytest.raises(UnsupportedError, match=r"^caches\[\]\.k\.data is on device 1, which the"):
        Write(HOSTGRID, cache.layers, tokens, torch.tensor([3]), OF_DEVICE_1).run()
    assert_same_bytes(cache, before)


def test_pageable_memory_is_refused_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneLayer()
    monkeypatch.setenv("HOSTGRID_PAGEABLE", "1")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"^cache\.k\.data is 0x\w+, which the device"):
            HOSTGRID.launch("kvx_write_kv", one.desc, one.write)


# --- Python: tensors that torch has allocated on one device -----------------------------------


@pytest.fixture
def cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Bound calls of the host grid that read torch's CPU tensors as those of CUDA device `id`."""
    found = bound._torch_type()
    if found is None:
        pytest.skip("C reads no tensors of this torch")
    reader = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    of_torch = reader(found.to_dlpack)
    device = SimpleNamespace(id=0)

    @reader
    def read(tensor: int, to: int) -> int:
        status: int = of_torch(tensor, to)
        ctypes.c_int32.from_address(to + 8).value = DL_CUDA
        ctypes.c_int32.from_address(to + 12).value = device.id
        return status

    device.kept = read  # whose address C has
    address = ctypes.cast(read, ctypes.c_void_p).value
    changed = bound._TensorType(*(getattr(found, name) for name, _ in found._fields_))
    changed.to_dlpack = address
    monkeypatch.setattr(bound, "_torch_type", lambda: changed)
    monkeypatch.setattr(abi, "library", HOSTGRID.library)
    return device


@pytest.mark.parametrize("num_layers", [32, 80])
def test_bound_layers_of_torch_ask_nothing(cuda_tensors: SimpleNamespace, num_layers: int) -> None:
    cache, expected = (filled("nhd", num_layers) for _ in range(2))
    tokens = tokens_of(cache.layers, 1, BF16, 1)
    slots = torch.tensor([3])
    for layer, (key, value) in zip(expected.layers, tokens, strict=True):
        CPU.write(layer, key, value, slots)
    empty = Write(HOSTGRID, cache.layers, tokens, slots)
    tensor = abi.kvx_tensor_desc_t
    for write in empty.writes:
        write.io.key, write.io.value = tensor(), tensor()

    def of_owner(owner: int) -> Callable[[], object]:
        held = bound.Held([half.tensor for layer in cache.layers for half in layer.halves()])
        device = Memory.DEVICE
        binding = bound.Binding((held,), device, device, HOSTGRID.stream, owner=owner)
        options = abi.kvx_write_options_t()
        call = bound.write_layers(binding, empty.caches, empty.writes, options)
        keys, values = zip(*tokens, strict=True)
        return lambda: abi.check(call(slots, *keys, *values), HOSTGRID.library())

    all_of_them = Asked(1, 4 * num_layers + 1)
    assert asked(of_owner(0)) == Asked(1, 0)
    assert_same_bytes(cache, expected)
    assert asked(of_owner(-1)) == all_of_them  # the caches may be anyone's
    cuda_tensors.id = 1
    assert asked(of_owner(0)) == all_of_them  # the tokens are of another device


def test_the_device_of_all_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensors.owning_device([torch.zeros(1), torch.zeros(1)]) == -1
    assert tensors.owning_device([]) == -1
    monkeypatch.setattr(tensors, "is_torch", lambda owner: owner is not None)
    cuda = [SimpleNamespace(device=torch.device("cuda", i)) for i in (0, 1)]
    assert tensors.owning_device([cuda[1], cuda[1]]) == 1
    assert tensors.owning_device(cuda) == -1
    assert tensors.owning_device([cuda[1], None]) == -1
    assert tensors.owning_device([cuda[1], torch.zeros(1)]) == -1
