"""Where a call reads slots, tables and lengths: they are there, or are refused, or are put there.

C sees addresses alone and can check none of this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvx_core.desc.beside import Index, owners_of, put_beside
from kvx_core.desc.memory_checks import same_memory
from kvx_core.desc.tensors import Borrowed
from kvx_core.desc.view import CacheSpan
from kvx_core.types import Memory, Transfer

Indices = Mapping[str, Index | None]

_PLACES = ("block_table", "slots", "starts")


def where_read(
    indices: Indices,
    tensors: Mapping[str, Borrowed],
    transfer: Transfer,
    stream: int | None = None,
) -> dict[str, Any]:
    """Slots, tables and lengths of a call by name, in the memory where the call reads them.

    A call runs on the device if any of its tensors is there. With COPY_ENGINE the host reads the
    indices even then. What was given as a list is copied to the device, which the host waits for.

    stream: of the call; None: torch's current one. The copies are its memory
    Raises InvalidArgumentError for other indices that are elsewhere.
    """
    if transfer is Transfer.COPY_ENGINE:
        other, expected, beside = "COPY_ENGINE reads them", Memory.HOST, None
    else:
        on_device = (name for name, tensor in tensors.items() if tensor.memory is not Memory.HOST)
        name = next(on_device, next(iter(tensors)))
        other, expected, beside = f"{name} is", tensors[name].memory, tensors[name].owner
    found: dict[str, Any] = {}
    for name, index in indices.items():
        if index is not None and expected is Memory.DEVICE and index.memory is Memory.HOST:
            index = put_beside(index, beside, stream)
        if index is not None:
            same_memory(name, index.memory, other, expected)
        found[name] = index
    return found


def places_of(src: CacheSpan, dst: CacheSpan) -> dict[str, Any]:
    """The tables, slots and starts of both ends, by name."""
    return {
        f"{end}.{name}": getattr(span, name)
        for end, span in (("src", src), ("dst", dst))
        for name in _PLACES
    }


def with_places(
    ends: tuple[CacheSpan, CacheSpan], places: Mapping[str, Any]
) -> tuple[CacheSpan, CacheSpan]:
    """The ends with these tables, slots and starts: those that `places_of` has named."""
    src, dst = (
        replace(span, **{name: places[f"{end}.{name}"] for name in _PLACES})
        for end, span in zip(("src", "dst"), ends, strict=True)
    )
    return src, dst


def used_on(stream: int | None, places: Mapping[str, Any]) -> None:
    """Keeps the memory of these, where torch allocated it on a device, until what this stream has
    been given so far is done."""
    torch = sys.modules.get("torch")
    for index in places.values():
        for owner in owners_of(index):
            if torch is None or not isinstance(owner, torch.Tensor) or not owner.is_cuda:
                continue
            if stream is None:
                owner.record_stream(torch.cuda.current_stream(owner.device))
            else:
                owner.record_stream(torch.cuda.ExternalStream(stream, owner.device))
