"""Plan: a write, gather or migration that is validated once, described, run many times, or listed.

Spec: E.13
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Self, Unpack

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi, abi_plan
from kvx_core.errors import InvalidArgumentError
from kvx_core.ops.options import GatherKeywords, MoveKeywords, WriteKeywords
from kvx_core.ops.plan_info import RANGE, PlanInfo, info_of

if TYPE_CHECKING:
    from kvx_core.desc.cache import CacheDesc
    from kvx_core.desc.tensor_desc import TensorDesc
    from kvx_core.desc.tensors import TensorLike
    from kvx_core.desc.view import CacheSpan, CacheView
    from kvx_core.ops.migrate_plan import MigratePlan
    from kvx_core.ops.plan_lookups import Lens
    from kvx_core.ops.token_plans import GatherPlan, WritePlan

Ranges = npt.NDArray[np.void]


class Plan(ABC):
    """A kept call; Plan.write, Plan.gather and Plan.migrate make one.

    A plan has `run`, `describe` and `ranges`, which take the arguments that change from call to
    call, `info`, and `close`, which the end of a `with` block calls. It keeps the memory that it
    was made with alive until it is closed, and refuses to run if that has been resized or replaced.
    Threads may share it. Spec: E.13
    """

    __slots__ = ("__weakref__", "_call")

    _call: Callable[..., int]  # its bound call

    @staticmethod
    def write(
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        stream: abi.Stream = None,
        **options: Unpack[WriteKeywords],
    ) -> WritePlan:
        """A plan of write_kv: WritePlan(cache, key_like, value_like, ...)."""
        from kvx_core.ops.token_plans import WritePlan

        return WritePlan(cache, key_like, value_like, stream=stream, **options)

    @staticmethod
    def gather(
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        stream: abi.Stream = None,
        **options: Unpack[GatherKeywords],
    ) -> GatherPlan:
        """A plan of gather_kv: GatherPlan(cache, key_like, value_like, ...)."""
        from kvx_core.ops.token_plans import GatherPlan

        return GatherPlan(cache, key_like, value_like, stream=stream, **options)

    @staticmethod
    def migrate(
        src: CacheView | CacheSpan,
        dst: CacheView | CacheSpan,
        seq_lens: Lens | None = None,
        *,
        same_model: bool = False,
        new_positions: bool = False,
        **options: Unpack[MoveKeywords],
    ) -> MigratePlan:
        """A plan of kvx_core.migrate, which reads no index and no length and moves nothing.

        src, dst, same_model, new_positions, options: as for kvx_core.migrate. Each run may pass
                  other tables or slots of the same kind: view.at(block_table=[]) is an empty table
                  to begin with
        seq_lens: (seq_count,), as for migrate; None: each run passes its own
        Raises FactsMismatchError, InvalidArgumentError, UnsupportedError as migrate does.
        Spec: E.13
        """
        from kvx_core.ops.migrate_plan import plan_migrate

        return plan_migrate(src, dst, seq_lens, same_model, new_positions, options)

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
