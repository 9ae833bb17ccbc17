"""Checks of the torch tensors of a call, whose addresses C gets, and of lists of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx_core._c import abi, bound
from kvx_core.argument_checks import bad_argument, instance, integer
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tensors import require_resolved, require_whole
from kvx_core.errors import InvalidArgumentError
from kvx_core.ops.streams import current_stream
from kvx_core.types import DType, Memory

FLOATS = ("float32", "bfloat16")
CODES = ("uint8", "float8_e4m3fn")
MASKS = ("bool", "uint8")
POSITIONS = ("int32", "int64")
_DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16}
_LARGEST_F32 = (2 - 2**-23) * 2.0**127
_are_whole = bound.are_whole()


@cache
def _kinds(names: tuple[str, ...]) -> frozenset[torch.dtype]:
    return frozenset(getattr(torch, name) for name in names)


class Arrays:
    """The tensors of one call: contiguous, on one device, that of the first, and whole."""

    def __init__(self, name: str, tensor: Any) -> None:
        if not is_torch(tensor):
            raise bad_argument(name, tensor, "a torch.Tensor")
        self._name, self._first = name, tensor
        self._taken: dict[str, Any] = {}
        self.device = tensor.device
        if self.device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                f"{name}.device is {self.device}, expected cpu or cuda (spec E.22)"
            )
        self.memory = memory_of(self.device)

    def take(
        self,
        name: str,
        tensor: Any,
        dtypes: tuple[str, ...],
        *shape: int | None,
        strided_rows: bool = False,
    ) -> int:
        """The address of a tensor of one of these dtypes; None in `shape` is any extent.

        strided_rows: elements of the first axis may lie apart
        Raises InvalidArgumentError.
        """
        self._taken[name] = tensor
        if (  # all is well, seen in little time: a decode step makes several calls for each layer
            isinstance(tensor, torch.Tensor)
            and tensor.shape == shape
            and tensor.dtype in _kinds(dtypes)
            and tensor.device == self.device
            and tensor.is_contiguous()
        ):
            return tensor.data_ptr()
        if not is_torch(tensor):
            raise bad_argument(name, tensor, "a torch.Tensor")
        if dtype_name(tensor) not in dtypes:
            raise InvalidArgumentError(
                f"{name}.dtype is {dtype_name(tensor)}, expected {' or '.join(dtypes)} (spec E.22)"
            )
        found = tuple(tensor.shape)
        if len(found) != len(shape):
            raise InvalidArgumentError(
                f"{name}.ndim is {len(found)}, expected {len(shape)} (spec E.22)"
            )
        for axis, expected in enumerate(shape):
            if expected is not None and found[axis] != expected:
                raise InvalidArgumentError(
                    f"{name}.shape[{axis}] is {found[axis]}, expected {expected} (spec E.22)"
                )
        rows = tensor[0] if strided_rows and found[0] else tensor
        if not rows.is_contiguous():
            raise InvalidArgumentError(
                f"{name}.stride is {tuple(tensor.stride())}, expected contiguous. Pass a "
                "contiguous tensor (spec E.22)"
            )
        if tensor.device != self.device:
            raise InvalidArgumentError(
                f"{name}.device is {tensor.device}, expected {self.device}, where {self._name} "
                "is (spec E.22)"
            )
        return int(tensor.data_ptr())

    def take_if_given(
        self, name: str, tensor: Any, dtypes: tuple[str, ...], *shape: int | None
    ) -> int | None:
        """The same; None for None."""
        return None if tensor is None else self.take(name, tensor, dtypes, *shape)

    def call(self, function: Any, desc: Any) -> None:
        """Calls a function of kvx_hybrid.h on torch's current stream.

        Raises InvalidArgumentError, UnsupportedError for tensors whose memory is not what they say.
        """
        if not _are_whole(*self._taken.values()):
            for name, tensor in self._taken.items():
                if tensor is not None:
                    require_resolved(name, tensor)
                    require_whole(name, tensor)
        if self.device.type == "cuda":
            stream = abi.stream_now(current_stream(self._first))
            with torch.cuda.device(self.device):
                abi.check(function(abi.reference(desc), stream))
        else:
            abi.check(function(abi.reference(desc), None))


def memory_of(device: Any) -> Memory:
    """Where tensors of a torch device lie."""
    return Memory.HOST if device.type == "cpu" else Memory.DEVICE


def dtype_name(tensor: Any) -> str:
    """`bfloat16` of torch.bfloat16."""
    return name_of(tensor.dtype)


def like(tensor: Any) -> tuple[str]:
    """The dtypes of a tensor that has the dtype of another."""
    return (dtype_name(tensor),)


@cache
def name_of(dtype: torch.dtype) -> str:
    """The same, of the dtype."""
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor: Any) -> DType:
    """The DType of a tensor that `take` has found to be float32 or bfloat16."""
    return _DTYPES[tensor.dtype]


def extents(name: str, tensor: Any, ndim: int) -> tuple[int, ...]:
    """The shape of a tensor of `ndim` axes of less than 2^31 elements.

    Raises InvalidArgumentError.
    """
    if not is_torch(tensor):
        raise bad_argument(name, tensor, "a torch.Tensor")
    if tensor.ndim != ndim:
        raise InvalidArgumentError(f"{name}.ndim is {tensor.ndim}, expected {ndim} (spec E.22)")
    shape = tuple(tensor.shape)
    if max(shape) >= 2**31:
        raise InvalidArgumentError(
            f"{name}.shape is {shape}, expected extents below 2^31 (spec E.22)"
        )
    return shape


def integers(name: str, numbers: Sequence[Any], lowest: int, highest: int) -> NDArray[np.int64]:
    """A list or tuple of any integer types as an array. Raises InvalidArgumentError."""
    checked = [integer(f"{name}[{i}]", number, lowest, highest) for i, number in enumerate(numbers)]
    return np.array(checked, dtype=np.int64)


def integer_rows(
    named: Mapping[str, Sequence[Any]], highest: Sequence[int]
) -> Sequence[NDArray[np.int64]]:
    """Lists or tuples of as many integers, 0 or more, as arrays. Raises InvalidArgumentError.

    highest: of each list
    """
    lists = list(named.values())
    if set(map(type, chain(*lists))) == {int}:  # a decode step has hundreds
        try:
            rows = np.array(lists, dtype=np.int64)
        except OverflowError:
            pass
        else:
            # Numbers below 0 are the largest without a sign.
            if (rows.view(np.uint64).max(1) <= np.array(highest, np.uint64)).all():
                return list(rows)
    pairs = zip(named.items(), highest, strict=True)
    return [integers(name, numbers, 0, most) for (name, numbers), most in pairs]


class Spans(NamedTuple):
    """Where the tokens of each slot stand in a call: in spans, one after the other, each of one
    slot, no two of one slot. A span may be empty.
    """

    of: Tensor  # (tokens,) int32, the span of each token
    starts: Tensor  # (spans + 1,) int32, the first token of each span; the number of tokens


def set_spans(desc: Any, arrays: Arrays, spans: Spans | None, tokens: int) -> None:
    """Sets the fields of a C struct that say where `tokens` tokens stand; None: nothing says so."""
    if spans is None:
        return
    instance("spans", spans, Spans, "Spans")
    numbers = extents("spans.starts", spans.starts, 1)[0]
    if numbers < 2:
        raise InvalidArgumentError(
            f"spans.starts.shape[0] is {numbers}, expected at least 2: the first token of each "
            "span, and the number of tokens (spec E.22)"
        )
    desc.num_spans = numbers - 1
    desc.span_of = arrays.take("spans.of", spans.of, ("int32",), tokens)
    desc.span_starts = arrays.take("spans.starts", spans.starts, ("int32",), numbers)


def check_float32(name: str, number: Any) -> None:
    """Raises InvalidArgumentError for what is no number that float32 holds."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or abs(number) > _LARGEST_F32:
        raise bad_argument(name, number, "a number that float32 holds")
