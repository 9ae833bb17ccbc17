"""KeptPlan: a call that is validated once, and then described, run many times, or listed.

Spec: E.13
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi, abi_plan
from kvx_core.errors import InvalidArgumentError
from kvx_core.ops.plan_info import RANGE, PlanInfo, info_of

Ranges = npt.NDArray[np.void]


class KeptPlan(ABC):
    """What all plans have.

    A plan has `run`, `describe` and `ranges`, which take the arguments that change from call to
    call, `info`, and `close`, which the end of a `with` block calls. It keeps the memory that it
    was made with alive until it is closed, and refuses to run if that has been resized or replaced.
    Threads may share it. Spec: E.13
    """

    __slots__ = ("__weakref__", "_call")

    _call: Callable[..., int]  # its bound call

    @property
    def info(self) -> PlanInfo:
        """Describes a call with the tokens that the plan was made with."""
        return self._describe(None)

    def close(self) -> None:
        """Frees the plan; calls that have begun go on. Idempotent."""
        self._call = closed_call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _open_handle(self) -> abi_plan.Handle:
        """The kvx_plan_t. Raises if the plan is closed or memory has moved."""

    def _layer_of(self, layer: int) -> int:
        """The caller's layer of a layer that libkvx sees."""
        return layer

    def _describe(self, lookups: abi_plan.kvx_plan_lookups_t | None) -> PlanInfo:
        handle, info = self._open_handle(), abi_plan.kvx_plan_info_t()
        describe = handle.library.kvx_plan_describe
        abi.check(describe(handle.value, lookups, info, None, 0))
        count = info.num_planes
        planes = (abi_plan.kvx_plane_info_t * count)(*[abi_plan.kvx_plane_info_t()] * count)
        abi.check(describe(handle.value, lookups, info, planes, count))
        for plane in planes:
            plane.layer = self._layer_of(plane.layer)
        return info_of(info, planes)

    def _ranges(self, lookups: abi_plan.kvx_plan_lookups_t | None) -> Ranges:
        handle = self._open_handle()
        pieces: list[Ranges] = []
        take = abi_plan.taker(lambda some: pieces.append(np.frombuffer(some, RANGE)))
        abi.check(handle.library.kvx_plan_ranges(handle.value, lookups, take, None))
        return np.concatenate(pieces) if pieces else np.zeros(0, RANGE)


def closed_call(*_: object, **__: object) -> NoReturn:
    """Raises InvalidArgumentError: the bound call of a closed plan."""
    raise InvalidArgumentError("the plan is closed, expected an open one. Make a new plan")
