"""Where a call reads slots, tables and lengths: they are there, or are refused, or are put there.

Numbers that were given as a list have no place of their own: a call on a device gets a copy there.
C sees addresses alone and can check none of this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvx_core.desc.in_place import is_torch
from kvx_core.desc.memory_checks import same_memory
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensors import Borrowed, Numbers
from kvx_core.desc.view import CacheSpan
from kvx_core.types import Memory, Transfer

Index = SlotMapping | BlockTable | SeqLens
Indices = Mapping[str, Index | None]

_PLACES = ("block_table", "slots", "starts")
# The addresses in each kind.
_ADDRESSES = {SlotMapping: ("slots",), BlockTable: ("indices", "indptr"), SeqLens: ("lengths",)}


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
            index = _put_beside(index, beside, stream)
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
        for owner in _owners(index):
            if torch is None or not isinstance(owner, torch.Tensor) or not owner.is_cuda:
                continue
            if stream is None:
                owner.record_stream(torch.cuda.current_stream(owner.device))
            else:
                owner.record_stream(torch.cuda.ExternalStream(stream, owner.device))


def _owners(index: Index | None) -> tuple[Any, ...]:
    owner = None if index is None else index.owner
    return owner if isinstance(owner, tuple) else (owner,)


def _put_beside(index: Index, beside: object, stream: int | None) -> Index:
    """The index with its lists on the device of a torch tensor; as it is if it has none, if there
    is no such tensor, or while the device's stream is captured."""
    owners = _owners(index)
    ours = [owner for owner in owners if isinstance(owner, Numbers)]
    if not ours or not is_torch(beside):
        return index
    torch = sys.modules["torch"]
    if beside.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return index
    moved: dict[str, int] = {}
    kept: list[object] = []
    for owner in owners:
        if not isinstance(owner, Numbers):
            kept.append(owner)
            continue
        copy = _copied(torch, owner, beside.device, stream)
        begin = owner.ctypes.data
        for field in _ADDRESSES[type(index)]:
            if 0 <= (offset := getattr(index, field) - begin) < max(owner.nbytes, 1):
                moved[field] = copy.data_ptr() + offset
        kept.append(copy)
    owner = tuple(kept) if isinstance(index.owner, tuple) else kept[0]
    fields: dict[str, Any] = {"memory": Memory.DEVICE, "owner": owner, **moved}
    return replace(index, **fields)


def _copied(torch: Any, numbers: Numbers, device: Any, stream: int | None) -> Any:
    """A copy of numbers on a device, complete when this returns."""
    host = torch.from_numpy(numbers)
    if device.type != "cuda" or stream is None:
        return host.to(device)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        return host.to(device)
