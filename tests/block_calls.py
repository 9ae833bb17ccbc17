"""Calls of kvx_blocks.h on a backend: tables of addresses, and what they lead to. Spec: E.15"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvx_core._c import abi, abi_blocks
from kvx_core.types import Memory
from tests.block_layouts import Dims, filled, filled_stack, stack
from tests.calls import Backend


@dataclass
class Blocks:
    """Block stacks, and blocks that have all chunks in one tensor each, in a backend's memory."""

    on: Backend
    dims: Dims
    stack: list[list[Tensor]]
    whole: list[Tensor]
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, on: Backend, dims: Dims, seed: int, *, universal: bool, from_stack: bool) -> Blocks:
        """One side of any bits, the other filled."""
        shape = dims.universal if universal else dims.operational
        if from_stack:
            return cls(on, dims, stack(dims, "NHD", U16, seed), filled(dims.nb, shape, U16))
        one = Dims(1, 1, 1, 1, dims.nh * dims.nl * dims.no * dims.nt * dims.hd, dims.nb)
        whole = [block[0].view(shape) for block in stack(one, "NHD", U16, seed)]
        return cls(on, dims, filled_stack(dims, "NHD", U16), whole)

    def table(self, tensors: list[Tensor], shift: int = 0) -> Tensor:
        addresses = [self.on.address(tensor) + shift for tensor in tensors]
        self.kept.append(torch.tensor(addresses, dtype=torch.int64))
        return self.kept[-1]

    @property
    def chunks(self) -> list[Tensor]:
        return [chunk for block in self.stack for chunk in block]

    def sizes(self, **changed: int) -> abi_blocks.kvx_blocks_t:
        d = self.dims
        usual = {"nb": d.nb, "nl": d.nl, "no": d.no, "nt": d.nt, "nh": d.nh, "hd": d.hd}
        usual |= {"memory": self.on.memory, "itemsize": 2, "alignment": 2}
        return abi_blocks.kvx_blocks_t(**(usual | changed))


U16 = torch.float16


def run(on: Backend, function: str, *arguments: Any, stream: int | None = None) -> None:
    """Makes the call and waits for it. Structs by reference, tensors by their address there."""
    library = abi_blocks.declare(on.library())
    given = [on.address(a) if isinstance(a, Tensor) else a for a in arguments]
    if on.mirror is not None:
        on.mirror.upload()
    stream = stream or (on.stream if on.mirror is None else on.mirror.stream)
    status = getattr(library, function)(*given, stream)
    if on.mirror is not None:
        on.mirror.download()
    abi.check(status, library)
    if on.memory != Memory.HOST:
        abi.check(library.kvx_device_status(ctypes.c_void_p(stream)), library)
