"""ByView: what was computed of a view, for as long as the view exists."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

from kvx_core.desc.view import CacheView

K = TypeVar("K")
V = TypeVar("V")


class ByView(Generic[K, V]):
    """A dict for each view, empty at first and dropped with the view. Threads may share it.

    A value must not refer to the view, which would then exist as long as this.
    """

    __slots__ = ("_dicts",)

    def __init__(self) -> None:
        self._dicts: dict[int, tuple[ref[CacheView], dict[K, V]]] = {}

    def __len__(self) -> int:
        return len(self._dicts)

    def of(self, view: CacheView) -> dict[K, V]:
        found = self._dicts.get(id(view))
        if found is not None and found[0]() is view:
            return found[1]
        number, dicts = id(view), self._dicts  # the callback does not keep `self`
        of_view = ref(view, lambda gone: _drop(dicts, number, gone)), dict[K, V]()
        return dicts.setdefault(number, of_view)[1]


def _drop(
    dicts: dict[int, tuple[ref[CacheView], dict[K, V]]], number: int, gone: ref[CacheView]
) -> None:
    """Drops the dict of a view that is gone, unless a new view has its id and dict by now."""
    found = dicts.get(number)
    if found is not None and found[0] is gone:
        del dicts[number]
