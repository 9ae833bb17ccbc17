"""Lists of numbers that a call reads beside a tensor on a device: they are copied there."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensors import Numbers
from kvx_core.types import Memory

Index: TypeAlias = SlotMapping | BlockTable | SeqLens
_Index = TypeVar("_Index", bound=Index)

# The addresses in each kind.
_ADDRESSES = {SlotMapping: ("slots",), BlockTable: ("indices", "indptr"), SeqLens: ("lengths",)}


def owners_of(index: Index | None) -> tuple[Any, ...]:
    owner = None if index is None else index.owner
    return owner if isinstance(owner, tuple) else (owner,)


def put_beside(index: _Index, beside: object, stream: int | None = None) -> _Index:
    """The index with its lists on the device of a torch tensor; as it is if it has none, if there
    is no such tensor, or while the device's stream is captured."""
    owners = owners_of(index)
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
