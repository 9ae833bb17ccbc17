"""An engine on a device that is the CPU: its kernels are libkvx's of tests/hostgrid.

KVX_LIBRARY=.../hostgrid/libkvx.so python -m kvx_conformance engine tests.conformance.on_hostgrid
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch

from kvx_conformance import device
from kvx_conformance.engines import hf
from kvx_core import CacheView, Memory


def _memory_of(array: device.OnDevice) -> torch.Tensor:
    memory = (ctypes.c_uint8 * array.num_bytes).from_address(array.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


device.DEVICE, device.memory_of = "cpu", _memory_of


def on_device(view: CacheView) -> CacheView:
    """The view, with its tensors said to be on a device."""
    layers = [
        replace(layer, **{n: replace(t, memory=Memory.DEVICE) for n, t in layer.tensors.items()})
        for layer in view.layers
    ]
    return replace(view, layers=tuple(layers))


class Cropped(hf.Cropped):
    def describe(self) -> CacheView:
        return on_device(super().describe())


class Pages(hf.Pages):
    def group(self) -> Any:
        found = super().group()
        return replace(found, view=on_device(found.view))


ENGINES = (Cropped, Pages)
