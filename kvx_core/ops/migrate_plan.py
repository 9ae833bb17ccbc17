"""MigratePlan: a kept migration. Plan.migrate makes it. Spec: E.13"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, Unpack

from kvx_core._c import abi_plan
from kvx_core.argument_checks import flag
from kvx_core.desc.memory_checks import check_host_memory
from kvx_core.desc.placing import used_on
from kvx_core.desc.positions import have_positions, require_same_positions
from kvx_core.desc.state_pieces import require_state_tokens
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import InvalidArgumentError
from kvx_core.ops.bound_migration import BoundMigration, ends_of
from kvx_core.ops.holds import require_holds
from kvx_core.ops.kept_plan import KeptPlan, Ranges, closed_call
from kvx_core.ops.options import MoveKeywords, MoveOptions
from kvx_core.ops.plan_info import PlanInfo
from kvx_core.ops.plan_lookups import (
    NAMES,
    Indices,
    Lens,
    Lookups,
    Slots,
    Table,
    describe_lookups,
    lookups_to_c,
)
from kvx_core.ops.streams import stream_number


def plan_migrate(
    src: CacheView | CacheSpan,
    dst: CacheView | CacheSpan,
    seq_lens: Lens | None,
    same_model: bool,
    new_positions: bool,
    options: MoveKeywords,
) -> MigratePlan:
    """Plan.migrate."""
    src, dst = CacheSpan.of(src, name="src"), CacheSpan.of(dst, name="dst")
    chosen = MoveOptions.of(options)
    ends = ends_of(src, dst, chosen, same_model=flag("same_model", same_model))
    return MigratePlan(src, dst, ends, seq_lens, chosen, flag("new_positions", new_positions))


class MigratePlan(KeptPlan):
    """A kept migration: see Plan.migrate."""

    __slots__ = ("_bound", "_compares", "_dst", "_lens", "_new_positions", "_src")

    _bound: BoundMigration | None

    def __init__(
        self,
        src: CacheSpan,
        dst: CacheSpan,
        ends: tuple[CacheSpan, CacheSpan],
        seq_lens: Lens | None,
        options: MoveOptions,
        new_positions: bool,
    ) -> None:
        """ends: src and dst as described to libkvx, where dims may be in another order."""
        src.view.require_current("src")
        dst.view.require_current("dst")
        self._src, self._dst = src, dst
        self._new_positions = new_positions
        self._compares = not new_positions and have_positions(src, dst)
        self._lens = None if seq_lens is None else SeqLens.of(seq_lens)
        self._bound = BoundMigration(src, dst, options, ends, self._lens, counts=False)
        self._call = self._bound.call

    # Its keywords are those of Lookups: a dict of them would cost a third of a short call.
    def run(
        self,
        seq_lens: Lens | None = None,
        *,
        src_block_table: Table | None = None,
        src_slots: Slots | None = None,
        src_starts: Lens | None = None,
        dst_block_table: Table | None = None,
        dst_slots: Slots | None = None,
        dst_starts: Lens | None = None,
        stream: int | None = None,
    ) -> None:
        """Moves the tokens.

        seq_lens: (seq_count,), the tokens to move of each sequence; None: the plan's
        src_..., dst_...: tables, slots and starts, as for CacheView.at; None: the plan's. A table
                  replaces one of the same format, slots replace slots. Slots that are no
                  SlotMapping skip the plan's invalid_slot; a table that is no BlockTable may have
                  holes if the plan's may
        stream:   CUDA stream; None: torch's current one if a tensor is torch's, else the default
                  stream. Ignored for HOST memory
        Mutates what kvx_core.migrate would, nothing else.
        Raises InvalidArgumentError, OutOfRangeError; then nothing was written.
        Spec: E.13
        """
        if seq_lens is None and self._lens is None:
            self._refuse_no_lens()
        src, dst = self._src.view, self._dst.view
        if src.outdated is not None:
            src.require_current("src")
        if dst.outdated is not None:
            dst.require_current("dst")
        if src.holds is not None or dst.holds is not None:
            src_end = src_block_table, src_slots, src_starts
            dst_end = dst_block_table, dst_slots, dst_starts
            given = dict(zip(NAMES, src_end + dst_end, strict=True))
            self._require_holds(self._lookups(seq_lens, given))
        if src.planes:
            self._require_state_tokens(seq_lens, src_starts, dst_starts)
        if self._compares or src_starts is not None or dst_starts is not None:
            self._require_positions(seq_lens, src_starts, dst_starts)
        if stream is not None:
            stream = stream_number(stream)
        moved = self._call(
            seq_lens,
            src_block_table,
            src_slots,
            src_starts,
            dst_block_table,
            dst_slots,
            dst_starts,
            stream,
        )
        bound = self._bound
        if bound is not None and bound.placed:
            used_on(stream, bound.placed)
        if moved < 0:
            BoundMigration.check(moved)
            src_end = src_block_table, src_slots, src_starts
            dst_end = dst_block_table, dst_slots, dst_starts
            lookups = dict(zip(NAMES, src_end + dst_end, strict=True))
            indices = self._lookups(seq_lens, lookups)
            bound = self._open_bound()
            bound.run_described(indices, stream=stream)
            if bound.placed:
                used_on(stream, bound.placed)

    def describe(self, seq_lens: Lens | None = None, **lookups: Unpack[Lookups]) -> PlanInfo:
        """Describes what `run` would do with the same arguments.

        The first call in a process measures this machine's copy speed, for some milliseconds.
        Raises what run would raise. Spec: E.13
        """
        indices = self._lookups(seq_lens, lookups)
        starts = lookups.get("src_starts"), lookups.get("dst_starts")
        self._require_positions(seq_lens, *starts)
        self._require_state_tokens(seq_lens, *starts)
        self._require_holds(indices)
        return self._describe(lookups_to_c(self._open_bound().where_read(indices)))

    def ranges(self, seq_lens: Lens | None = None, **lookups: Unpack[Lookups]) -> Ranges:
        """Lists the copies that `run` would make with the same arguments: an array of RANGE.

        plane: index in info.planes; src, dst: addresses, src 0 for zeros; bytes: how many. Ranges
        are in the order of planes, sequences and tokens; those that follow each other at both ends
        are one. Tables and lengths must be in memory that the host can read, on a device too.
        Raises UnsupportedError for a plan that converts, else what run would raise. Spec: E.13
        """
        indices = self._lookups(seq_lens, lookups)
        starts = lookups.get("src_starts"), lookups.get("dst_starts")
        self._require_positions(seq_lens, *starts)
        self._require_state_tokens(seq_lens, *starts)
        check_host_memory(indices)
        self._require_holds(indices)
        return self._ranges(lookups_to_c(indices))

    def close(self) -> None:
        """Frees the plan; runs that have begun go on. Idempotent."""
        super().close()
        self._bound = None

    def _require_positions(self, seq_lens: Any, src_starts: Any, dst_starts: Any) -> None:
        """Refuses tokens that would go to other positions, unless the plan is for that."""
        lens = self._lens if seq_lens is None else seq_lens
        if self._new_positions or lens is None:
            return
        starts = (
            None if given is None else SeqLens.of(given, name="starts")
            for given in (src_starts, dst_starts)
        )
        require_same_positions(self._src, self._dst, lens, *starts)

    def _require_state_tokens(self, seq_lens: Any, src_starts: Any, dst_starts: Any) -> None:
        """Refuses states that stand for other tokens."""
        src, dst = (
            span if starts is None else replace(span, starts=SeqLens.of(starts, name="starts"))
            for span, starts in ((self._src, src_starts), (self._dst, dst_starts))
        )
        require_state_tokens(src, dst, self._lens if seq_lens is None else seq_lens)

    def _lookups(self, seq_lens: Any, lookups: Any) -> Indices:
        if seq_lens is None:
            if self._lens is None:
                self._refuse_no_lens()
            self._lens.require_in_place("seq_lens")
        return describe_lookups(self._src, self._dst, seq_lens, lookups)

    def _refuse_no_lens(self) -> NoReturn:
        raise InvalidArgumentError(
            "seq_lens is None, expected lengths: the plan was made without. Give them here or to "
            "Plan.migrate"
        )

    def _require_holds(self, indices: Indices) -> None:
        """Refuses tokens that the engine of an end does not hold."""
        lens = indices["seq_lens"] or self._lens
        for end, span in (("src", self._src), ("dst", self._dst)):
            places = ("block_table", "slots", "starts")
            given = {place: indices[f"{end}_{place}"] for place in places}
            now: dict[str, Any] = {place: one for place, one in given.items() if one is not None}
            require_holds(end, replace(span, **now) if now else span, lens)

    def _open_handle(self) -> abi_plan.Handle:
        return self._open_bound().handle

    def _open_bound(self) -> BoundMigration:
        bound = self._bound
        if bound is None:
            closed_call()
        for end, span, held in zip(("src", "dst"), (self._src, self._dst), bound.held, strict=True):
            span.view.require_current(end)
            span.require_in_place(end)
            if not held.are_in_place():
                raise InvalidArgumentError(
                    "the memory of src or dst lies elsewhere than when the plan was made, expected "
                    "it in place. Make a new plan"
                )
        return bound

    def _layer_of(self, layer: int) -> int:
        layers = [] if self._bound is None else self._bound.layers
        return layers[layer] if layer < len(layers) else layer
