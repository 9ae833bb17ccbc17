"""Dense views the tensors of a snapshot in memory as caches of one block, for copies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import bad_argument
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.planes import Plane
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import row_major
from kvx_core.desc.view import CacheView
from kvx_core.snapshot.contents import NOTHING, SCALE_KINDS, Stored, scale_name
from kvx_core.snapshot.memory import Bytes, host_memory
from kvx_core.snapshot.planes import dense_view
from kvx_core.snapshot.scales import scales_of
from kvx_core.types import DType, Layout, Memory, ScaleGranularity

Views = dict[Any, CacheView]

_MAX_VIEWS = 16
_NUMPY = {1: "u1", 2: "f2", 4: "f4", 8: "i8"}  # by size


@dataclass(frozen=True, slots=True)
class Dense:
    """The tensors of a snapshot, and the memory that holds them.

    views: keeps the results of `view` for later snapshots in the same memory; None: keeps nothing
    """

    tensors: dict[str, Stored]
    memory: Bytes
    views: Views | None = None

    def reachable_from(self, device: Any) -> Dense:
        """Returns these tensors in memory that a torch device can reach: self, or a pinned copy.

        device: None: the host
        Raises StoreError if there is not enough memory.
        """
        if device is None or device.type != "cuda":
            return self
        if sys.modules["torch"].from_numpy(self.memory).is_pinned():
            return self
        pinned = host_memory(len(self.memory), pinned=True)
        pinned[:] = self.memory
        return Dense(self.tensors, pinned)

    def bytes_of(self, name: str) -> Bytes:
        """Returns the bytes of a tensor."""
        tensor = self.tensors[name]
        return self.memory[tensor.offset : tensor.offset + tensor.num_bytes]

    def array(self, name: str) -> npt.NDArray[Any]:
        """Returns a tensor. numpy lacks BF16 and FP8: such a tensor has another dtype of its size.

        Units of several numbers are bytes, along the last axis.
        """
        if name not in self.tensors:
            raise bad_argument("name", name, f"a tensor of the snapshot: {', '.join(self.tensors)}")
        tensor = self.tensors[name]
        if tensor.dtype.numbers > 1:
            return self.bytes_of(name).reshape(*tensor.shape[:-1], -1)
        return self.bytes_of(name).view(_NUMPY[tensor.dtype.itemsize]).reshape(tensor.shape)

    def view(self, layers: Sequence[int], *, scales: bool = True) -> CacheView:
        """Returns K and V of layers as a cache of one block."""
        if self.views is None:
            return self._view(layers, scales)
        types = tuple((name, t.dtype, t.shape, t.offset) for name, t in self.tensors.items())
        key = self.memory.ctypes.data, tuple(layers), scales, types
        found = self.views.get(key)
        if found is None:
            if len(self.views) >= _MAX_VIEWS:
                self.views.clear()
            found = self.views[key] = self._view(layers, scales)
        return found

    def _view(self, layers: Sequence[int], scales: bool) -> CacheView:
        def cache(layer: int) -> CacheDesc:
            v = f"layers.{layer}.v"
            k = self._tensor(f"layers.{layer}.k")
            return CacheDesc.from_kv(k, self._tensor(v) if v in self.tensors else None)

        def beside(kind: str) -> tuple[ScaleDesc | None, ...] | None:
            return tuple(self._scale(f"layers.{i}.{kind}") for i in layers) if scales else None

        return CacheView(
            layers=tuple(map(cache, layers)),
            facts=CacheFacts(),
            k_scales=beside("k_scale"),
            v_scales=beside("v_scale"),
            dense=True,
        )

    def blocks(self, layers: Sequence[int], num_blocks: int, block_bytes: int) -> CacheView:
        """Returns K and V of num_blocks snapshots that lie side by side, as a paged cache.

        A block is a snapshot. `tensors` describes the first snapshot. Each snapshot begins
        block_bytes after the one before it; block_bytes is a multiple of each element's bytes.
        """

        def paged(block: TensorDesc) -> TensorDesc:
            stride = block_bytes // block.dtype.itemsize, *block.stride[1:]
            return replace(block, shape=(num_blocks, *block.shape[1:]), stride=stride)

        def cache(one: CacheDesc) -> CacheDesc:
            tensors = {name: paged(tensor) for name, tensor in one.tensors.items()}
            return CacheDesc.from_kv(tensors["k"], tensors.get("v"))

        layers_of_one = self._view(layers, scales=False).layers
        return CacheView(layers=tuple(map(cache, layers_of_one)), facts=CacheFacts())

    def planes(self, planes: Sequence[Plane], *, scales: bool = True) -> CacheView:
        """Returns the stored tensors of these planes as a dense cache.

        scales: False: without scales, except those of K and V in NVFP4
        """

        def scale(name: str) -> ScaleDesc | None:
            grouped = self.tensors[name].dtype.format.grouped
            return self._scale(scale_name(name)) if scales or grouped else None

        return dense_view(planes, self.tensors, self._address, self.memory, scale)

    def has_vector_scales(self, layers: Sequence[int], view: CacheView) -> bool:
        """True if vectors and scales of these layers can be copied to `view` byte for byte."""
        return all(
            self.tensors[f"layers.{layer}.{kind}"].dtype is tensor.dtype
            and len(self.tensors.get(f"layers.{layer}.{kind}_scale", NOTHING).shape) == 2
            for layer, cache in zip(layers, view.layers, strict=True)
            for kind, tensor in cache.tensors.items()
        ) and all(
            scale is None or scale.dtype is DType.F32
            for kind in SCALE_KINDS
            for scale in scales_of(view, kind)
        )

    def _address(self, name: str) -> int:
        address: int = self.memory.ctypes.data
        return address + self.tensors[name].offset

    def _tensor(self, name: str) -> TensorDesc:
        tensor = self.tensors[name]
        shape = (1, *tensor.shape)
        return TensorDesc(
            dtype=tensor.dtype,
            layout=Layout.BLOCK_NHD,
            memory=Memory.HOST,
            shape=shape,
            stride=row_major(shape),
            data=self._address(name),
            owner=self.memory,
        )

    def _scale(self, name: str) -> ScaleDesc | None:
        if name not in self.tensors:
            return None
        stored = self.tensors[name]
        if len(stored.shape) == 3:
            shape = (1, *stored.shape)
            return ScaleDesc(
                granularity=ScaleGranularity.PER_GROUP,
                dtype=stored.dtype,
                shape=shape,
                stride=row_major(shape),
                data=self._address(name),
                owner=self.memory,
            )  # numpy has no FP8
        scale: npt.NDArray[np.float32] = self.array(name)
        if scale.ndim == 2:
            return ScaleDesc.of(scale[None], ScaleGranularity.PER_TOKEN_HEAD)
        per_head = len(scale) > 1
        return ScaleDesc.of(
            scale, ScaleGranularity.PER_HEAD if per_head else ScaleGranularity.PER_TENSOR
        )
