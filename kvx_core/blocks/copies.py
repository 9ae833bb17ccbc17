"""Copies of blocks by the functions of kvx_blocks.h: contiguous tensors, no conversion. Spec: E.15

blocks.py handles strides and conversions, with spans.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi, abi_blocks
from kvx_core.argument_checks import bad_argument, integer
from kvx_core.blocks.layouts import Tensors
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tensors import TensorLike, row_major
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.ops.streams import current_stream, stream_number
from kvx_core.types import Memory

# KVBM's numbers, by their names and by the short ones of its Python functions.
BACKENDS = ("auto", "vectorized_kernel", "kernel_only", "memcpy_async", "memcpy_batch")
_BACKENDS = dict(zip(BACKENDS, range(5), strict=True)) | {
    "vectorized": 1,
    "kernel": 2,
    "async": 3,
    "batch": 4,
}
_MODES = {"auto": 0, "async": 1, "batch": 2}


def backend_number(backend: str | None) -> int:
    """The kvx_copy_backend_t of this name; None is "auto". Raises InvalidArgumentError."""
    if backend is None:
        return 0
    if not isinstance(backend, str) or backend.lower() not in _BACKENDS:
        raise bad_argument("backend", backend, f"one of {', '.join(_BACKENDS)}")
    return _BACKENDS[backend.lower()]


def is_contiguous(tensors: Tensors) -> bool:
    """Whether each of the tensors is contiguous."""
    pairs = zip(tensors.shape, tensors.stride, row_major(tensors.shape), strict=True)
    return all(extent == 1 or step == usual for extent, step, usual in pairs)


def copy_universal(
    stack: Tensors, whole: Tensors, layout: str, head_start: int, to_universal: bool, stream: Any
) -> None:
    """Calls kvx_universal_from_block or kvx_block_from_universal."""
    nh, nl, no, nt, _ = whole.shape
    held = stack.shape[0 if layout == "HND" else 1]
    sizes = _sizes(stack, whole, (nl, no, nt, held, stack.shape[2]))
    sizes.layout, sizes.universal_heads, sizes.head_start = int(layout == "HND"), nh, head_start
    lib = abi_blocks.functions()
    call = lib.kvx_universal_from_block if to_universal else lib.kvx_block_from_universal
    tables = _Tables(whole), _Tables(stack)
    abi.check(call(*(table.there for table in tables), sizes, _stream(stack, stream)))


def copy_operational(
    stack: Tensors, whole: Tensors, to_operational: bool, backend: int, stream: Any
) -> str:
    """Calls kvx_operational_copy; returns the name of the backend that did the copy."""
    nl, no, *chunk = whole.shape
    sizes = _sizes(stack, whole, (nl, no, *chunk))
    blocks, operationals = _Tables(stack), _Tables(whole)
    status, used = abi_blocks.operational_copy(
        abi_blocks.functions(),
        *(blocks.here, blocks.there, operationals.here, operationals.there),
        *(sizes, int(not to_operational), backend, _stream(stack, stream)),
    )
    abi.check(status)
    return BACKENDS[used]


def vectorized_copy(
    srcs: Sequence[TensorLike], dsts: Sequence[TensorLike], *, stream: int | None = None
) -> None:
    """Copies each tensor of a list into that of another, in one launch.

    srcs, dsts: contiguous tensors, as many of the same number of bytes; the widest accesses that
                every address is aligned for are used
    stream:     CUDA stream; None: torch's current one. Ignored on the CPU
    Mutates dsts. Raises InvalidArgumentError, UnsupportedError. Spec: E.15
    """
    if (found := _pairs(srcs, dsts)) is None:
        return
    first, second, num_bytes = found
    alignment = int(min(16, first.alignment.min(), second.alignment.min()))
    tables = _Tables(first), _Tables(second)
    abi.check(
        abi_blocks.functions().kvx_vectorized_copy(
            *(table.there for table in tables),
            *(num_bytes, len(first.tensors), first.memory, alignment, _stream(first, stream)),
        )
    )


def memcpy_batch(
    srcs: Sequence[TensorLike],
    dsts: Sequence[TensorLike],
    mode: str = "auto",
    *,
    stream: int | None = None,
) -> None:
    """Copies each tensor of a list into that of another by memcpy.

    srcs, dsts: as for vectorized_copy
    mode:   "auto": one cudaMemcpyBatchAsync where there is one, else copy by copy; "async": copy by
            copy; "batch": one batch, or UnsupportedError
    stream: as for vectorized_copy
    Mutates dsts. Raises InvalidArgumentError, UnsupportedError. Spec: E.15
    """
    if not isinstance(mode, str) or mode not in _MODES:
        raise bad_argument("mode", mode, "'auto', 'async' or 'batch'")
    if (found := _pairs(srcs, dsts)) is None:
        return
    first, second, num_bytes = found
    tables = _Tables(first), _Tables(second)
    abi.check(
        abi_blocks.functions().kvx_memcpy_batch(
            *(table.here for table in tables),
            *(num_bytes, len(first.tensors), first.memory, _MODES[mode], _stream(first, stream)),
        )
    )


def has_memcpy_batch_async() -> bool:
    """Whether this libkvx has cudaMemcpyBatchAsync."""
    return bool(abi_blocks.functions().kvx_has_memcpy_batch_async())


def is_stub_build() -> bool:
    """Whether this libkvx has no CUDA kernels. Calls on the CPU work all the same."""
    return bool(abi_blocks.functions().kvx_is_stub_build())


class _Tables:
    """The addresses of tensors: `here` for the host, `there` where the call runs. Kept alive."""

    def __init__(self, tensors: Tensors) -> None:
        self.on_host: npt.NDArray[np.uint64] = tensors.addresses
        self.on_device: Any = None
        if tensors.memory is Memory.HOST:
            return
        if not is_torch(tensors.tensors[0]):
            raise UnsupportedError(
                f"the blocks are in {tensors.memory.name} memory and a "
                f"{type(tensors.tensors[0]).__name__}, expected torch tensors there"
            )
        torch: Any = sys.modules["torch"]
        device = tensors.tensors[0].device
        self.on_device = torch.from_numpy(self.on_host.view(np.int64)).to(device)

    @property
    def here(self) -> int:
        return int(self.on_host.ctypes.data)

    @property
    def there(self) -> int:
        return self.here if self.on_device is None else int(self.on_device.data_ptr())


def _sizes(stack: Tensors, whole: Tensors, sizes: Sequence[int]) -> abi_blocks.kvx_blocks_t:
    nl, no, nt, nh, hd = sizes
    return abi_blocks.kvx_blocks_t(
        memory=stack.memory,
        nb=len(whole.tensors),
        nl=nl,
        no=no,
        nt=nt,
        nh=nh,
        hd=hd,
        itemsize=stack.dtype.itemsize,
        alignment=int(min(16, stack.alignment.min(), whole.alignment.min())),
    )


def _stream(tensors: Tensors, stream: Any) -> int | None:
    if stream is not None:
        return stream_number(stream)
    return abi.stream_now(current_stream(tensors.tensors[0]))


def _pairs(srcs: Any, dsts: Any) -> tuple[Tensors, Tensors, int] | None:
    """Both lists, checked, and the bytes of each tensor; None if there is nothing to do."""
    found = []
    for name, given in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(given, (list, tuple)):
            raise bad_argument(name, given, "a list of tensors")
    if len(srcs) != len(dsts):
        raise InvalidArgumentError(
            f"dsts has {len(dsts)} tensors, expected {len(srcs)} as srcs has (spec E.15)"
        )
    if not srcs:
        return None
    for name, given in (("srcs", srcs), ("dsts", dsts)):
        tensors = Tensors.of(list(given), f"{name}[{{}}]".format, None, "")
        if not is_contiguous(tensors):
            raise InvalidArgumentError(
                f"{name}[0].stride is {tensors.stride}, expected contiguous. Pass contiguous copies"
            )
        found.append(tensors)
    sizes = [prod(tensors.shape) * tensors.dtype.itemsize for tensors in found]
    if sizes[0] != sizes[1]:
        raise InvalidArgumentError(
            f"dsts[0] has {sizes[1]} bytes, expected {sizes[0]} as srcs[0] has (spec E.15)"
        )
    if found[0].memory is not found[1].memory:
        raise InvalidArgumentError(
            f"dsts[0] is in {found[1].memory.name} memory, expected {found[0].memory.name} as "
            "srcs[0] is (spec E.15)"
        )
    if not found[1].writable:
        raise InvalidArgumentError("dsts has read-only memory, expected writable")
    if not sizes[0]:
        return None
    return found[0], found[1], integer("bytes", sizes[0])
