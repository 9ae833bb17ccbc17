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

        def drop(gone: ref[CacheView]) -> None:
            kept = dicts.get(number)
            if kept is not None and kept[0] is gone:  # else a new view has this id by now
                del dicts[number]

        return dicts.setdefault(number, (ref(view, drop), dict[K, V]()))[1]
