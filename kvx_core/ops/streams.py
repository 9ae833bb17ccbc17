"""The CUDA stream of a call: the caller's, or torch's current one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from kvx_core._c import abi
from kvx_core.argument_checks import address
from kvx_core.desc.in_place import is_torch


def current_stream(*owners: object) -> Callable[[], int] | None:
    """Makes a function that returns torch's current CUDA stream on the device of the first CUDA
    tensor among `owners`; None if there is none.
    """
    for owner in owners:
        if is_torch(owner) and owner.device.type == "cuda":
            return partial(sys.modules["torch"]._C._cuda_getCurrentRawStream, owner.device.index)
    return None


def current_stream_here() -> int | None:
    """torch's current CUDA stream on the current device; None if torch does not use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_stream().cuda_stream)


def call_stream(stream: abi.Stream, *owners: object) -> abi.Stream:
    """The given stream of a call, else a function that returns torch's on the device of its
    tensors.
    """
    if stream is not None:
        return stream if callable(stream) else stream_number(stream)
    return current_stream(*owners)


def stream_number(stream: Any) -> int | None:
    """A stream that is given as a number. Raises InvalidArgumentError."""
    return None if stream is None else address("stream", stream)
