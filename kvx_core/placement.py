"""Where the memory of a call has to lie: what C, which sees bare addresses, cannot check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvx_core.errors import InvalidArgumentError
from kvx_core.tensors import is_torch
from kvx_core.types import Memory, Transfer

if TYPE_CHECKING:
    from kvx_core.descriptors import BlockTable, ScaleDesc, SeqLens, SlotMapping, TensorDesc


def same_memory(name: str, memory: Memory, other: str, expected: Memory) -> None:
    """Refuses two buffers of one call of which only one is on the host: C sees bare addresses."""
    if (memory is Memory.HOST) != (expected is Memory.HOST) and Memory.UNIFIED not in (
        memory,
        expected,
    ):
        raise InvalidArgumentError(
            f"{name}.memory is {memory.name}, expected {expected.name}, where {other}. "
            "Move it there first"
        )


def check_index_memory(
    indices: Mapping[str, SlotMapping | BlockTable | SeqLens | None],
    tensors: Mapping[str, TensorDesc],
    transfer: Transfer,
) -> None:
    """Refuses slots, tables and lengths that lie where the call does not run.

    A call runs on the device if any of its tensors lies there; with COPY_ENGINE the host reads the
    indices all the same.
    """
    if transfer is Transfer.COPY_ENGINE:
        other, expected = "COPY_ENGINE reads them", Memory.HOST
    else:
        on_device = (name for name, tensor in tensors.items() if tensor.memory is not Memory.HOST)
        name = next(on_device, next(iter(tensors)))
        other, expected = f"{name} is", tensors[name].memory
    for name, index in indices.items():
        if index is not None:
            same_memory(name, index.memory, other, expected)


def require_writable(name: str, tensor: TensorDesc | ScaleDesc) -> None:
    """Refuses read-only memory as a destination: C sees bare addresses."""
    if not tensor.writable:
        raise InvalidArgumentError(
            f"{name} is read-only memory, expected writable. Pass a writable copy"
        )


def is_in_place(owner: object, begin: int, end: int) -> bool:
    """Whether the bytes `begin` to `end` are in the storage that a torch tensor has now.

    True for the tensors of other libraries, whose memory does not move while they are kept.
    """
    if begin == end or not is_torch(owner):
        return True
    storage = owner.untyped_storage()
    first = storage.data_ptr()
    return bool(first <= begin and end <= first + storage.nbytes())


def require_in_place(name: str, tensor: TensorDesc | ScaleDesc) -> None:
    """Refuses a TensorDesc or ScaleDesc whose memory has been freed or belongs to others by now."""
    if not is_in_place(tensor.owner, *byte_range(tensor)):
        raise moved(name)


def moved(name: str) -> InvalidArgumentError:
    """The exception of a description that is out of date."""
    return InvalidArgumentError(
        f"{name} describes memory that its tensor no longer has, expected it as it was described: "
        "the tensor's storage has been resized or replaced. Describe the tensor again"
    )


def byte_range(tensor: TensorDesc | ScaleDesc) -> tuple[int, int]:
    """The first byte of a TensorDesc or ScaleDesc, and the one after the last."""
    if 0 in tensor.shape:
        return tensor.data, tensor.data
    itemsize = tensor.dtype.itemsize
    steps = [(extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride, strict=True)]
    first = tensor.data + itemsize * sum(step for step in steps if step < 0)
    last = tensor.data + itemsize * sum(step for step in steps if step > 0)
    return first, last + itemsize
