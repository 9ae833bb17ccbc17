"""Plan: makes plans of writes, gathers and migrations.

Spec: E.13
"""

from __future__ import annotations

from typing import Unpack

from kvx_core._c.abi import Stream
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import TensorLike
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.ops.kept_plan import KeptPlan
from kvx_core.ops.migrate_plan import MigratePlan, plan_migrate
from kvx_core.ops.options import GatherKeywords, MoveKeywords, WriteKeywords
from kvx_core.ops.plan_lookups import Lens
from kvx_core.ops.token_plans import GatherPlan, WritePlan


class Plan(KeptPlan):
    """A kept call; Plan.write, Plan.gather and Plan.migrate make one, which is a Plan, too.

    A plan has `run`, `describe` and `ranges`, which take the arguments that change from call to
    call, `info`, and `close`, which the end of a `with` block calls. It keeps the memory that it
    was made with alive until it is closed, and refuses to run if that has been resized or replaced.
    Threads may share it. Spec: E.13
    """

    __slots__ = ()

    @staticmethod
    def write(
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        stream: Stream = None,
        **options: Unpack[WriteKeywords],
    ) -> WritePlan:
        """A plan of write_kv: WritePlan(cache, key_like, value_like, ...)."""
        return WritePlan(cache, key_like, value_like, stream=stream, **options)

    @staticmethod
    def gather(
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        stream: Stream = None,
        **options: Unpack[GatherKeywords],
    ) -> GatherPlan:
        """A plan of gather_kv: GatherPlan(cache, key_like, value_like, ...)."""
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
        return plan_migrate(src, dst, seq_lens, same_model, new_positions, options)


for _made in (WritePlan, GatherPlan, MigratePlan):
    Plan.register(_made)
