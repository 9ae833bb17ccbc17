"""Whether memory that was described still belongs to its tensor."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

from kvx_core._c import dlpack
from kvx_core.errors import InvalidArgumentError


def is_torch(tensor: object) -> TypeGuard[Any]:
    """Whether `tensor` is a torch.Tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def may_move(owner: object) -> bool:
    """Whether the memory of an owner may be other memory later, while it is kept."""
    return is_torch(owner) or isinstance(owner, dlpack.Exported)


def moving_owners(owner: object) -> list[Any]:
    """Those that may move among what keeps memory alive: an owner, or a tuple or list of such."""
    if isinstance(owner, (tuple, list)):
        return [one for part in owner for one in moving_owners(part)]
    return [owner] if may_move(owner) else []


def is_in_place(owner: object, begin: int, end: int, home: int = 0) -> bool:
    """Whether the bytes `begin` to `end` are in the current storage of a torch tensor, or of an
    object with __dlpack__.

    home: where a torch tensor's first element was when the bytes were described; 0: unknown
    True for numpy's arrays, whose memory does not move while they are kept.
    """
    if isinstance(owner, dlpack.Exported):
        return owner.is_in_place()
    if begin == end or not is_torch(owner):
        return True
    if home and owner.data_ptr() != home:
        return False
    storage = owner.untyped_storage()
    first = storage.data_ptr()
    return bool(first <= begin and end <= first + storage.nbytes())


def require_array_in_place(name: str, owner: object, begin: int, num_bytes: int) -> None:
    """Refuses an array whose memory has been freed or belongs to others by now.

    owner: keeps it alive, and perhaps other arrays too; of torch's it is one if all are torch's
    """
    parts = owner if isinstance(owner, (tuple, list)) else (owner,)
    if not all(part.is_in_place() for part in parts if isinstance(part, dlpack.Exported)):
        raise moved(name)
    if not all(is_torch(part) for part in parts):
        return
    if not any(_holds(part, begin, begin + num_bytes) for part in parts):
        raise moved(name)


def _holds(array: Any, begin: int, end: int) -> bool:
    """Whether the bytes are in the current storage of a torch tensor and, if that has no gaps, its
    own."""
    if not is_in_place(array, begin, end):
        return False
    first = array.data_ptr()
    is_its_own = first <= begin and end <= first + array.numel() * array.element_size()
    return begin == end or is_its_own or not array.is_contiguous()


def moved(name: str) -> InvalidArgumentError:
    """The exception for a description whose memory has moved."""
    return InvalidArgumentError(
        f"{name} describes memory that its tensor no longer has: its storage was resized or "
        "replaced since describe(). Describe the tensor again"
    )
