"""What `python3 -m benchmarks.gpu` asks of a driver, and of torch on a GPU, with stand-ins."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import hybrid
from benchmarks.gpu import driver, families, peers
from benchmarks.gpu.cases import REHEARSAL, Case, Named, PlainCopy, run
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.places import Gpu, Place, Rehearsal
from benchmarks.gpu.tiers import cases
from benchmarks.gpu.write_combined import WriteCombinedHost
from benchmarks.rounds import compete, once
from kvx_core import Layout, Memory, describe
from tests.native import ROOT

GPU = cast(Place, SimpleNamespace(device="cuda", draws="cuda"))
WRITE_COMBINED = 4


class Driver:
    """libcuda, whose memory has an address on the GPU that is `shift` bytes further."""

    def __init__(self, version: int = 12040, shift: int = 0, error: int = 0) -> None:
        self.version, self.shift, self.error = version, shift, error
        self.held: dict[int, Any] = {}

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = self.version
        return self.error

    def cuMemHostAlloc(self, host: Any, num_bytes: Any, flags: int) -> int:
        if not self.error:
            assert flags & WRITE_COMBINED
            room = (ctypes.c_uint8 * num_bytes.value)()
            host._obj.value = ctypes.addressof(room)
            self.held[host._obj.value] = room
        return self.error

    def cuMemHostGetDevicePointer_v2(self, device: Any, host: Any, flags: int) -> int:
        device._obj.value = host.value + self.shift
        return 0

    def cuMemFreeHost(self, host: Any) -> int:
        del self.held[host.value]
        return 0


def installed(monkeypatch: pytest.MonkeyPatch, **options: int) -> Driver:
    found = Driver(**options)
    monkeypatch.setattr(driver, "load", lambda: found)
    return found


def test_the_cuda_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version=12080)
    assert driver.cuda_version() == (12, 8)
    installed(monkeypatch, error=3)
    assert driver.cuda_version() is None

    def absent() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "load", absent)
    assert driver.cuda_version() is None


@pytest.mark.parametrize("shift", [0, 1 << 40])
def test_write_combined_memory(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Described by its address on the GPU where that is another than on the host."""
    found = installed(monkeypatch, shift=shift)
    host = WriteCombinedHost(GPU)
    tokens = host.empty((3, 2, 4, 8), torch.bfloat16)
    assert tokens.shape == (3, 2, 4, 8)
    assert [*found.held] == [tokens.data_ptr()]
    tokens[2] = 1
    desc = describe(tokens[1:], Layout.BLOCK_NHD)
    located = host.located(desc)
    assert located.data == tokens[1:].data_ptr() + shift
    assert located.memory == (Memory.DEVICE if shift else Memory.HOST)
    assert (located.shape, located.stride) == (desc.shape, desc.stride)
    elsewhere = describe(torch.zeros(3, 2, 4, 8), Layout.BLOCK_NHD)
    assert host.located(elsewhere) == elsewhere
    del desc, located
    assert found.held
    del tokens
    gc.collect()
    assert not found.held


def test_write_combined_memory_that_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, error=2)
    with pytest.raises(RuntimeError, match="the driver's error 2: write-combined memory is not to"):
        WriteCombinedHost(GPU).empty((4,), torch.uint8)


def test_a_tier_that_is_read_is_measured_in_both_kinds_of_memory() -> None:
    names = [named.name for named in cases(Rehearsal(Memory.HOST), REHEARSAL, Peers())]
    for how in ("", ", copy engine"):
        assert f"pinned tier to pool{how}" in names
        assert f"write-combined tier to pool{how}" in names


# ---- Cases that a machine with engines would break ----


def test_what_waits_for_the_gpu_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises ahead of the capture, in torch's mode for that, which ends with it."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def capture() -> Any:
        raise AssertionError("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", capture)

    def waits() -> None:
        assert modes == ["error"]
        raise RuntimeError("called a synchronizing CUDA operation")

    place = Gpu.__new__(Gpu)
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        place.contestant([waits], 1)
    assert modes == ["error", "default"]
    with pytest.raises(AssertionError, match="captured"):
        place.contestant([lambda: None], 1)


def test_torchs_warning_of_that_mode_is_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Synchronization debug mode is a prototype feature and does not yet detect all"
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn(said, stacklevel=1)
    )

    def waits() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            Gpu.__new__(Gpu).contestant([waits], 1)


def test_a_share_is_of_the_better_plain_copy() -> None:
    """Of the runtime's and a kernel's; 5 bytes are no whole words."""
    place, numbers = Rehearsal(Memory.HOST), [torch.arange(8), torch.zeros(8).long()]
    copy = PlainCopy(place)
    for num_bytes in (64, 5):
        for calls in copy.ways(num_bytes, 3).values():
            copy._room[0].zero_()
            for call in calls:
                call()
            assert (copy._room[0][: 3 * num_bytes] == 1).all()
            assert not copy._room[0][3 * num_bytes :].any()
    calls = [lambda: numbers[1].copy_(numbers[0])]
    case = Case({"kvx": calls, "torch": calls}, [numbers[1]], 64, families.ROWS)
    row = run(place, Named("some", lambda: case), copy, 3)
    assert row["failed"] == {}
    medians = row["median_us"]
    assert medians["copy"] == min(medians["memcpy"], medians["kernel copy"])
    assert row["rounds"] == 3


def test_slow_contestants_have_fewer_rounds() -> None:
    slow, quick = once(lambda: time.sleep(0.01)), once(lambda: None)
    timing = compete({"slow": slow, "quick": quick}, 21, seconds=0.02)
    assert {len(samples) for samples in timing.samples.values()} == {5}
    timing = compete({"quick": quick}, 21, seconds=60)
    assert len(timing.samples["quick"]) == 21


def test_lmcache_without_its_kernels_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on by torch, where its extension cannot be imported."""
    for name in ("lmcache", "lmcache.lmcache_native"):
        stand_in = ModuleType(name)
        vars(stand_in).update(device_ops=None, EngineKVFormat=None, TransferDirection=None)
        monkeypatch.setitem(sys.modules, name, stand_in)
    assert list(peers.find(Rehearsal(Memory.HOST), "migrate").migrators) == ["lmcache"]
    found = peers.find(GPU, "migrate")
    assert not found.migrators
    assert "lmcache.cuda_ops" in found.absent["lmcache"]


def test_vllms_cpu_ops_are_not_asked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CUDA build, on a processor that its CPU ops would run on, does not have them."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(hybrid, "find_spec", lambda name: object())
    imported: list[str] = []
    module = SimpleNamespace(
        CpuPlatform=SimpleNamespace(import_kernels=lambda: imported.append("kernels"))
    )
    monkeypatch.setitem(sys.modules, "vllm.platforms.cpu", module)
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(), raising=False)
    with torch.device("meta"):
        assert not hybrid._has_vllms_ops()
    assert not imported
    assert not hybrid._has_vllms_ops()
    assert imported == ["kernels"]
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(save_partial_states_cpu=None))
    assert hybrid._has_vllms_ops()


@pytest.mark.parametrize(
    ("benchmark", "names"),
    [("write", ["vllm", "flashinfer"]), ("migrate", ["lmcache"]), ("tiers", [])],
)
def test_a_benchmark_imports_its_own_peers_alone(
    monkeypatch: pytest.MonkeyPatch, benchmark: str, names: list[str]
) -> None:
    def fail(*_: object) -> None:
        raise ImportError("not here")

    for name in ("_vllm", "_flashinfer", "_lmcache"):
        monkeypatch.setattr(peers, name, fail)
    found = peers.find(Rehearsal(Memory.HOST), benchmark)
    assert found.absent == dict.fromkeys(names, "ImportError: not here")


def test_the_smallest_kernels_write_where_they_read() -> None:
    """In Triton's interpreter, which a process has from its start on."""
    pytest.importorskip("triton")
    script = """
from benchmarks.gpu.chain import chains

for name, calls in chains(3, 2, "cpu").items():
    for call in calls:
        call()
        _, numbers, rows, rings, *_ = call.args
        written = rings.any(1).nonzero().flatten().tolist()
        assert written == [0, 129, 258], (name, written)
        assert (rings[written] == rows).all(), name
        assert numbers.tolist() == ([1, 2, 3] if "addition" in name else [0, 1, 2])
"""
    environment = {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", script], env=os.environ | environment, check=True)
