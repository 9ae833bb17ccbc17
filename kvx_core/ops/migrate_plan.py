"""MigratePlan: a kept migration. Plan.migrate makes it. Spec: E.13"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from kvx_core._c import abi, abi_plan, bound
from kvx_core.argument_checks import flag
from kvx_core.desc import facts
from kvx_core.desc.memory_checks import check_host_memory
from kvx_core.desc.placing import places_of, used_on, where_read, with_places
from kvx_core.desc.positions import have_positions, require_same_positions
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.tensors import moving_owners
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import FactsMismatchError, InvalidArgumentError
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
    invalid_slot,
    lookups_to_c,
)
from kvx_core.ops.reorder import reordered
from kvx_core.ops.streams import current_stream, stream_number
from kvx_core.types import Memory, Transfer


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
    found = facts.compare(
        src.view.facts,
        dst.view.facts,
        src_head_start=src.head_start,
        dst_head_start=dst.head_start,
        same_model=flag("same_model", same_model),
        hadamard_k=chosen.hadamard_k,
        hadamard_v=chosen.hadamard_v,
    )
    if found.reasons:
        raise FactsMismatchError(found.reasons)
    ends = src, dst
    for transform in found.transforms:
        ends = reordered(*ends, transform, find_scales=chosen.find_scales)
    return MigratePlan(src, dst, ends, seq_lens, chosen, flag("new_positions", new_positions))


class MigratePlan(KeptPlan):
    """A kept migration: see Plan.migrate."""

    __slots__ = (
        "_compares",
        "_dst",
        "_handle",
        "_held",
        "_layers",
        "_lens",
        "_moved",
        "_new_positions",
        "_src",
        "_stream",
        "_transfer",
    )

    _handle: abi_plan.Handle | None

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
        for name, tensor in dst.view.read_only.items():
            tensor.require_writable(f"dst.{name}")
        if options.find_scales:
            for name, scales in (("k_scales", dst.view.k_scales), ("v_scales", dst.view.v_scales)):
                for i, scale in enumerate(scales or ()):
                    if scale is not None:
                        scale.require_writable(f"dst.{name}[{i}]")
        self._src, self._dst, self._transfer = src, dst, options.transfer
        self._new_positions = new_positions
        self._compares = not new_positions and have_positions(src, dst)
        # K that moves in two parts has its second ones in layers behind all layers.
        pairs = enumerate(zip(src.view.layers, ends[0].view.layers, strict=False))
        parted = (i for i, (whole, part) in pairs if whole.head_dim != part.head_dim)
        self._layers = [*range(len(src.view.layers)), *parted]
        self._held = src.held("src"), dst.held("dst")
        self._lens = None if seq_lens is None else SeqLens.of(seq_lens)
        given: dict[str, Any] = {**places_of(src, dst), "seq_lens": self._lens}
        placed = self._where_read(given)
        ends = with_places(ends, placed)
        lens = placed.pop("seq_lens")
        self._moved = {name: one for name, one in placed.items() if one is not given[name]}
        struct = abi.kvx_migrate_desc_t(
            flags=options.flags,
            num_heads=options.num_heads or 0,
            seq_lens=abi.pointer_to(SeqLens.of(()) if lens is None else lens),
            src=abi.pointer_to(ends[0]),
            dst=abi.pointer_to(ends[1]),
        )
        self._handle = handle = abi_plan.Handle("kvx_plan_create", struct)
        memory = self._memory()
        self._stream = current_stream(*(tensor.owner for tensor in self._tensors().values()))
        # C looks at the lengths as well, with the destination.
        of_lens = [] if lens is None else moving_owners(lens.owner)
        of_dst = self._held[1]
        if of_lens:
            of_dst = bound.Held([*of_dst.owners, *of_lens])
        binding = bound.Binding(
            held=(self._held[0], of_dst),
            memory=memory,
            index_memory=Memory.HOST if options.transfer is Transfer.COPY_ENGINE else memory,
            stream=self._stream,
            kept=(handle, lens, placed),
        )
        token_bytes = dst.view.bytes_per_token(options.num_heads)
        brief = len(dst.view.layers) <= 8
        self._call = bound.run_plan(
            binding, handle.value, token_bytes * brief, (invalid_slot(src), invalid_slot(dst))
        )

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
                  replaces one of the same format, slots replace slots; slots that are no
                  SlotMapping skip the plan's invalid_slot
        stream:   CUDA stream; None: torch's current one if a tensor is torch's, else the default
                  stream. Ignored for HOST memory
        Mutates what kvx_core.migrate would, nothing else.
        Raises InvalidArgumentError, OutOfRangeError; then nothing was written.
        Spec: E.13
        """
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
        if self._compares or src_starts is not None or dst_starts is not None:
            self._require_positions(seq_lens, src_starts, dst_starts)
        if stream is not None:
            stream = stream_number(stream)
        status = self._call(
            seq_lens,
            src_block_table,
            src_slots,
            src_starts,
            dst_block_table,
            dst_slots,
            dst_starts,
            stream,
        )
        if self._moved:
            used_on(stream, self._moved)
        if status:
            if status > 0:
                abi.check(status)
            src_end = src_block_table, src_slots, src_starts
            dst_end = dst_block_table, dst_slots, dst_starts
            lookups = dict(zip(NAMES, src_end + dst_end, strict=True))
            self._run_described(seq_lens, lookups, stream)

    def describe(self, seq_lens: Lens | None = None, **lookups: Unpack[Lookups]) -> PlanInfo:
        """Describes what `run` would do with the same arguments.

        The first call in a process measures this machine's copy speed, for some milliseconds.
        Raises what run would raise. Spec: E.13
        """
        indices = self._lookups(seq_lens, lookups)
        self._require_positions(seq_lens, lookups.get("src_starts"), lookups.get("dst_starts"))
        self._require_holds(indices)
        return self._describe(lookups_to_c(self._where_read(indices)))

    def ranges(self, seq_lens: Lens | None = None, **lookups: Unpack[Lookups]) -> Ranges:
        """Lists the copies that `run` would make with the same arguments: an array of RANGE.

        plane: index in info.planes; src, dst: addresses, src 0 for zeros; bytes: how many. Ranges
        are in the order of planes, sequences and tokens; those that follow each other at both ends
        are one. Tables and lengths must be in memory that the host can read, on a device too.
        Raises UnsupportedError for a plan that converts, else what run would raise. Spec: E.13
        """
        indices = self._lookups(seq_lens, lookups)
        self._require_positions(seq_lens, lookups.get("src_starts"), lookups.get("dst_starts"))
        check_host_memory(indices)
        self._require_holds(indices)
        return self._ranges(lookups_to_c(indices))

    def close(self) -> None:
        """Frees the plan; runs that have begun go on. Idempotent."""
        super().close()
        self._handle = None

    def _run_described(self, seq_lens: Any, lookups: Any, stream: int | None) -> None:
        if stream is None:
            stream = abi.stream_now(self._stream)
        indices = self._where_read(self._lookups(seq_lens, lookups), stream)
        handle, struct = self._open_handle(), lookups_to_c(indices)
        abi.check(handle.library.kvx_plan_run(handle.value, struct, stream))
        if self._moved:
            used_on(stream, self._moved)

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

    def _lookups(self, seq_lens: Any, lookups: Any) -> Indices:
        if seq_lens is None and self._lens is not None:
            self._lens.require_in_place("seq_lens")
        return describe_lookups(self._src, self._dst, seq_lens, lookups)

    def _require_holds(self, indices: Indices) -> None:
        """Refuses tokens that the engine of an end does not hold."""
        lens = indices["seq_lens"] or self._lens
        if lens is None:
            return  # the call itself says that they are missing
        for end, span in (("src", self._src), ("dst", self._dst)):
            places = ("block_table", "slots", "starts")
            given = {place: indices[f"{end}_{place}"] for place in places}
            now: dict[str, Any] = {place: one for place, one in given.items() if one is not None}
            require_holds(end, replace(span, **now) if now else span, lens)

    def _open_handle(self) -> abi_plan.Handle:
        handle = self._handle
        if handle is None:
            closed_call()
        self._src.view.require_current("src")
        self._dst.view.require_current("dst")
        if self._held != (self._src.held("src"), self._dst.held("dst")):
            raise InvalidArgumentError(
                "the memory of src or dst lies elsewhere than when the plan was made, expected it "
                "in place. Make a new plan"
            )
        return handle

    def _layer_of(self, layer: int) -> int:
        return self._layers[layer] if layer < len(self._layers) else layer

    def _tensors(self) -> dict[str, Any]:
        """The first tensor of each end, by name: their memory decides where the call runs."""
        found: dict[str, Any] = {}
        for name, span in (("src", self._src), ("dst", self._dst)):
            if span.view.layers:
                found[f"{name}.layers[0].k"] = span.view.layers[0].k
            elif span.view.planes:
                found[f"{name}.planes[0]"] = span.view.planes[0]
        return found

    def _memory(self) -> Memory:
        memory: set[Memory] = {tensor.memory for tensor in self._tensors().values()}
        memory -= {Memory.HOST}
        return next(iter(memory or {Memory.HOST}))

    def _where_read(self, indices: Indices, stream: int | None = None) -> dict[str, Any]:
        tensors = self._tensors()
        return where_read(indices, tensors, self._transfer, stream) if tensors else dict(indices)
