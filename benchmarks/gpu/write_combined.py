"""Pinned memory of the host that the CPU writes past its caches."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import driver
from benchmarks.gpu.places import PinnedHost, Place
from kvx_core import Memory

_PORTABLE, _MAPPED, _WRITE_COMBINED = 1, 2, 4  # CU_MEMHOSTALLOC_


class WriteCombinedHost(PinnedHost):
    """Write-combined memory (cudaHostAllocWriteCombined), for a tier that the GPU reads.

    The GPU reads it without asking the CPU's caches. The CPU writes it in order at full speed, and
    reads it many times slower than other memory. In a rehearsal it is memory as any other.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._on_gpu = place.device != "cpu"
        self._mapped: list[tuple[int, int, int]] = []  # address of the host, bytes, of the GPU

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not self._on_gpu:
            return super().empty(sizes, dtype)
        num_bytes = prod(sizes) * dtype.itemsize
        library, host, device = driver.load(), ctypes.c_void_p(), ctypes.c_uint64()
        flags = _PORTABLE | _MAPPED | _WRITE_COMBINED
        _check(library.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(num_bytes), flags))
        assert host.value
        _check(library.cuMemHostGetDevicePointer_v2(ctypes.byref(device), host, 0))
        room = (ctypes.c_uint8 * num_bytes).from_address(host.value)
        weakref.finalize(room, library.cuMemFreeHost, host).atexit = False
        self._mapped.append((host.value, num_bytes, device.value))
        return torch.frombuffer(room, dtype=dtype).view(tuple(sizes))

    def located(self, desc: Any) -> Any:
        """Such memory may have another address on the GPU than on the host. By that one it is
        described as the GPU's, for kernels reach it there alone."""
        for host, num_bytes, device in self._mapped:
            if host != device and 0 <= desc.data - host < num_bytes:
                return replace(desc, data=desc.data - host + device, memory=Memory.DEVICE)
        return desc


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the driver's error {error}: write-combined memory is not to be had")
