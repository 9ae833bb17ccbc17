"""Zero-copy access to the memory of any tensor: torch, numpy, or any object with DLPack.

layouts.py, tensor_desc.py and scales.py say what its axes mean.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi, dlpack
from kvx_core.argument_checks import (
    address,
    are_sizes,
    bad_argument,
    coerce_fields,
    flag,
    format_repr,
    product,
    same_length,
    sizes,
)
from kvx_core.desc.in_place import is_in_place, is_torch, moved
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.formats import INDICES, OF_DLPACK, labels
from kvx_core.types import DType, Memory


class TensorLike(Protocol):
    """A tensor in memory: torch.Tensor, numpy.ndarray, or any object with the DLPack methods."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Borrowed:
    """A tensor's memory, without a copy: what a TensorDesc and a ScaleDesc have in common.

    Raises InvalidArgumentError for fields of other types.
    """

    takes: ClassVar[Collection[DType] | None] = None  # dtypes that errors list; None: all

    data: int  # address of element [0, 0, ...]; 0 if the tensor is empty
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: DType
    memory: Memory
    writable: bool = True
    owner: object = field(default=None, compare=False)  # keeps the memory alive
    # Address of the owner's first element when it was described; 0: unknown. A storage that is
    # resized may lie elsewhere, and still cover a part of where it was.
    home: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        kinds = type(self.dtype), type(self.memory), type(self.data), type(self.writable)
        if kinds == _KINDS and 0 <= self.data < 2**64 and are_sizes(self.shape, self.stride):
            return  # the usual case of every call, checked quickly
        coerce_fields(
            self,
            dtype=lambda name, given: DType.of(given, name, takes=self.takes),
            memory=Memory.called,
            shape=sizes,
            stride=sizes,
            data=address,
            writable=flag,
        )
        same_length(self.shape, self.stride)

    def __repr__(self) -> str:
        is_usual = self.stride == row_major(self.shape)
        return format_repr(
            type(self).__name__,
            product(self.shape),
            dtype_name(self.dtype),
            self.kind(),
            None if is_usual else f"stride {product(self.stride)}",
            None if self.memory is Memory.HOST else self.memory.name,
            None if self.writable else "read-only",
        )

    def kind(self) -> str | None:
        """The part of the repr between the dtype and what is unusual."""
        return None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps; the strides of axes of extent 1 do not count."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return 0 in self.shape
            expected *= extent
        return True

    @property
    def byte_range(self) -> tuple[int, int]:
        """The address of the first byte, and that after the last."""
        if 0 in self.shape:
            return self.data, self.data
        itemsize = self.dtype.itemsize
        steps = [(extent - 1) * step for extent, step in zip(self.shape, self.stride, strict=True)]
        first = self.data + itemsize * sum(step for step in steps if step < 0)
        last = self.data + itemsize * sum(step for step in steps if step > 0)
        return first, last + itemsize

    def require_writable(self, name: str) -> None:
        """Raises for read-only memory, which C cannot tell from an address."""
        if not self.writable:
            raise InvalidArgumentError(
                f"{name} is read-only memory, expected writable. Pass a writable copy"
            )

    def require_in_place(self, name: str) -> None:
        """Refuses memory that has been freed or belongs to others by now."""
        if not is_in_place(self.owner, *self.byte_range, self.home):
            raise moved(name)

    def c_fields(self, name: str) -> dict[str, Any]:
        """The fields that kvx_tensor_desc_t and kvx_scale_desc_t share."""
        if len(self.shape) > abi.MAX_TENSOR_DIMS:
            raise InvalidArgumentError(
                f"{name}.ndim is {len(self.shape)}, expected at most {abi.MAX_TENSOR_DIMS} "
                "(spec 6.2)"
            )
        return {
            "dtype": self.dtype,
            "ndim": len(self.shape),
            "shape": abi.dims(self.shape),
            "stride": abi.dims(self.stride),
            "data": self.data,
        }


_KINDS = DType, Memory, int, bool


def owning_device(owners: Sequence[object]) -> int:
    """The CUDA device that torch has allocated all of these on; -1: there is none, or who knows."""
    devices = {owner.device if is_torch(owner) else None for owner in owners}
    device = devices.pop() if len(devices) == 1 else None
    return device.index if device is not None and device.type == "cuda" else -1


def borrow(
    tensor: TensorLike, *, name: str = "tensor", takes: Collection[DType] | None = None
) -> Borrowed:
    """The memory of `tensor`, without copying it.

    tensor: torch.Tensor, numpy.ndarray (ml_dtypes included), or an object with __dlpack__; any
            shape and strides. Memory is HOST, or for other devices DEVICE (UNIFIED if DLPack
            calls it managed).
    name:   what errors call it
    takes:  what errors list: the dtypes that the caller takes; None: all. It refuses others itself
    Does not wait for a device.
    Raises InvalidArgumentError; UnsupportedError, also for a torch tensor with the negative bit
    set. DLPack does not report this bit: do not wrap such a tensor in an object with __dlpack__.
    """
    return Borrowed(**borrowed_fields(name, tensor, takes))


def borrowed_fields(
    name: str, tensor: TensorLike, takes: Collection[DType] | None = None
) -> dict[str, Any]:
    """The fields of a Borrowed, or of a descriptor that adds fields. Raises as `borrow`."""
    if is_torch(tensor):
        return _borrow_torch(name, tensor, takes)
    if isinstance(tensor, np.ndarray):
        return _borrow_numpy(name, tensor, takes)
    if hasattr(tensor, "__dlpack__") and not isinstance(tensor, type):
        return _borrow_dlpack(name, tensor, takes)
    raise bad_argument(name, tensor, "a torch.Tensor, a numpy.ndarray or an object with __dlpack__")


class Numbers(np.ndarray[Any, Any]):
    """Integers that nobody but KVX has, as those of a list: a call may read a copy of them, made
    where it runs (placing.py)."""


def own(numbers: npt.NDArray[Any]) -> Numbers:
    """The same memory, as Numbers."""
    return numbers.view(Numbers)


def borrow_ints(name: str, numbers: TensorLike | Sequence[int]) -> Borrowed:
    """Borrows a tensor, or makes a list of integers a new int64 array.

    Raises InvalidArgumentError, which calls the numbers `name`, or UnsupportedError.
    """
    if isinstance(numbers, (str, bytes)) or not isinstance(numbers, Sequence):
        if is_tensor(numbers):
            return borrow(numbers, name=name, takes=INDICES)
        raise bad_argument(name, numbers, "a tensor of int32 or int64, or a list of int")
    found = own(int64_array(name, numbers))
    return Borrowed(
        data=found.__array_interface__["data"][0],
        shape=found.shape,
        stride=(1,),
        dtype=DType.S64,
        memory=Memory.HOST,
        writable=True,
        owner=found,
    )


def int64_array(name: str, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """A list as an array. Raises InvalidArgumentError for what is not an integer of 64 bits."""
    # An array takes the bytes of such for the memory of its numbers.
    # A set has no order. A tensor of bools is a mask.
    unlisted = (bytes, bytearray, dict, set, frozenset)
    is_mask = str(getattr(numbers, "dtype", "")).endswith("bool")
    if isinstance(numbers, unlisted) or is_mask or not hasattr(numbers, "__iter__"):
        raise bad_argument(name, numbers, "a list of integers of 64 bits")
    try:
        return np.array(array("q", numbers), np.int64)
    except (TypeError, OverflowError):
        pass
    with suppress(TypeError):  # a tensor without axes
        for i, number in enumerate(numbers):
            try:
                array("q", [number])
            except (TypeError, OverflowError):
                raise bad_argument(f"{name}[{i}]", number, "an integer of 64 bits") from None
    raise bad_argument(name, numbers, "a list of integers of 64 bits")


def is_tensor(value: object) -> TypeGuard[TensorLike]:
    """Whether `borrow` takes a value of this kind."""
    return is_torch(value) or (hasattr(value, "__dlpack__") and not isinstance(value, type))


def empty_like_owner(
    owner: object,
    shape: Sequence[int],
    dtype: DType,
    stream: int | None = None,
    *,
    zeros: bool = False,
) -> Any:
    """A new tensor of `shape`, of the library and on the device of `owner`.

    stream: the stream that uses a device's memory; None: torch's current one
    zeros:  whether it holds zeros, or anything

    Raises UnsupportedError if that is not torch or numpy, or does not know the dtype.
    """
    if is_torch(owner):
        torch = sys.modules["torch"]
        options = {"dtype": getattr(torch, dtype.array_name), "device": owner.device}
        make = torch.zeros if zeros else torch.empty
        if owner.device.type != "cuda" or stream is None:
            return make(shape, **options)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, owner.device)):
            return make(shape, **options)
    if isinstance(owner, np.ndarray):
        return (np.zeros if zeros else np.empty)(shape, _numpy_dtype(dtype))
    raise UnsupportedError(
        f"the cache's memory belongs to a {type(tensor_of(owner)).__name__}, expected a "
        "torch.Tensor or a numpy.ndarray to allocate beside it. Pass out=(key, value)"
    )


def tensor_of(owner: object) -> object:
    return owner.tensor if isinstance(owner, dlpack.Exported) else owner


def read_array(
    name: str,
    address: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: DType,
    memory: Memory,
) -> npt.NDArray[Any]:
    """A copy, as numpy, of a tensor on the host; strides in elements, BF16 widened to float32.

    Raises UnsupportedError if `memory` cannot be read from the host; `name` says what it is.
    """
    if memory is Memory.DEVICE:
        raise UnsupportedError(
            f"{name}.memory is DEVICE, expected HOST, where it can be read. Pass a copy"
        )
    stored = np.dtype(np.uint16 if dtype is DType.BF16 else dtype.array_name)
    if 0 in shape:
        return np.empty(shape, stored)
    last = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    flat = np.frombuffer(abi.read(address, (last + 1) * stored.itemsize), stored)
    if tuple(stride) != (1,):  # as_strided takes ten times as long as a list of lengths
        steps = [step * stored.itemsize for step in stride]
        flat = np.lib.stride_tricks.as_strided(flat, shape, steps)
    values = flat.copy()
    if dtype is DType.BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    try:
        return np.dtype(dtype.array_name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(
            f"numpy has no {dtype.array_name}. Install ml_dtypes, or pass out=(key, value)"
        ) from None
    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.array_name))
    return extended


def require_resolved(name: str, tensor: Any) -> None:
    """Refuses a torch tensor with torch's negative bit. Raises UnsupportedError."""
    if tensor.is_neg():
        raise UnsupportedError(
            f"{name}.is_neg() is True, expected False: torch negates its numbers when it reads "
            f"them, and in memory they have the other sign. Pass {name}.resolve_neg()"
        )


def require_whole(name: str, tensor: Any) -> None:
    """Refuses a torch tensor whose storage has been shrunk. Raises InvalidArgumentError."""
    storage_bytes = tensor.untyped_storage().nbytes()
    if tensor.is_contiguous():
        num_elements = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = 1 + sum((extent - 1) * step for extent, step in steps)
    needed = num_elements and (tensor.storage_offset() + num_elements) * tensor.itemsize
    if needed > storage_bytes:
        raise InvalidArgumentError(
            f"{name} has a storage of {storage_bytes} bytes, expected at least {needed}: it has "
            "been resized since the tensor was made"
        )


def _borrow_torch(name: str, tensor: Any, takes: Collection[DType] | None) -> dict[str, Any]:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{name}.layout is {tensor.layout}, expected torch.strided")
    device = tensor.device.type
    if device == "meta":
        raise UnsupportedError(f"{name}.device is meta, expected a device that holds the data")
    require_resolved(name, tensor)
    require_whole(name, tensor)
    data = tensor.data_ptr()
    return {
        "data": data,
        "home": data,
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": _dtype_of(name, tensor.dtype, takes),
        "memory": Memory.HOST if device == "cpu" else Memory.DEVICE,
        "writable": True,
        "owner": tensor,
    }


def _borrow_numpy(
    name: str, tensor: npt.NDArray[Any], takes: Collection[DType] | None
) -> dict[str, Any]:
    itemsize = tensor.dtype.itemsize
    if not tensor.dtype.isnative:
        raise UnsupportedError(
            f"{name}.dtype is {tensor.dtype.str}, expected native byte order. Pass "
            f"{name}.astype({name}.dtype.newbyteorder('='))"
        )
    dtype = _dtype_of(name, tensor.dtype, takes)
    if any(stride % itemsize for stride in tensor.strides):
        raise UnsupportedError(
            f"{name}.strides is {tensor.strides} bytes, expected multiples of itemsize {itemsize}"
        )
    return {
        "data": tensor.__array_interface__["data"][0],
        "shape": tensor.shape,
        "stride": tuple(stride // itemsize for stride in tensor.strides),
        "dtype": dtype,
        "memory": Memory.HOST,
        "writable": tensor.flags.writeable,
        "owner": tensor,
    }


_DLPACK_MANAGED = 13  # DLDeviceType kDLCUDAManaged


def _borrow_dlpack(
    name: str, tensor: TensorLike, takes: Collection[DType] | None
) -> dict[str, Any]:
    owner = dlpack.Exported.of(name, tensor)
    found = owner.found
    dtype = OF_DLPACK.get((found.code, found.bits))
    if dtype is None or found.lanes != 1:
        raise UnsupportedError(
            f"{name} is a DLPack tensor of type code {found.code} with {found.bits} bits and "
            f"{found.lanes} lanes, expected one of {labels(takes)} (spec 4.3)"
        )
    return {
        "data": found.data,
        "shape": found.shape,
        "stride": found.strides if found.strides is not None else row_major(found.shape),
        "dtype": dtype,
        "memory": (
            Memory.HOST
            if found.device_type in dlpack.HOST_DEVICES
            else Memory.UNIFIED
            if found.device_type == _DLPACK_MANAGED
            else Memory.DEVICE
        ),
        "writable": found.writable,
        "owner": owner,
    }


def dtype_name(dtype: DType) -> str:
    """The name of a dtype in torch and numpy, or KVX's where they have no such type."""
    return dtype.label


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`: the canonical ones of spec 4.2."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _dtype_of(name: str, dtype: object, takes: Collection[DType] | None) -> DType:
    try:
        return DType.of(dtype, f"{name}.dtype", takes=takes)
    except InvalidArgumentError as error:
        raise UnsupportedError(str(error)) from None
