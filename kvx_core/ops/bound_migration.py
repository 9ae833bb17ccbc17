"""BoundMigration: all of a migration that is the same from call to call, and those kept for views.

It has C structs, compared facts and writability. A call takes tables, slots, starts and lengths,
and checks that no memory has moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

from kvx_core._c import abi, abi_plan, bound
from kvx_core.desc import facts
from kvx_core.desc.in_place import moving_owners
from kvx_core.desc.placing import places_of, used_on, where_read, with_places
from kvx_core.desc.state_pieces import matched_states
from kvx_core.desc.tables import DESCRIPTORS, SeqLens
from kvx_core.desc.tensors import Borrowed
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import FactsMismatchError
from kvx_core.ops.left_out import has_slots, may_have_holes
from kvx_core.ops.options import MoveOptions
from kvx_core.ops.plan_lookups import invalid_slot
from kvx_core.ops.reorder import reordered
from kvx_core.ops.streams import current_stream
from kvx_core.types import Memory, Transfer

_MOST_KEPT = 64
_BRIEF_LAYERS = 8  # whose checks take no time


def ends_of(
    src: CacheSpan, dst: CacheSpan, options: MoveOptions, *, same_model: bool
) -> tuple[CacheSpan, CacheSpan]:
    """The ends as they are described to libkvx: dims of K may be in another order, and states are
    in pieces.

    Raises FactsMismatchError if a copy would not mean the same.
    """
    found = facts.compare(
        src.view.facts,
        dst.view.facts,
        src_head_start=src.head_start,
        dst_head_start=dst.head_start,
        same_model=same_model,
        hadamard_k=options.hadamard_k,
        hadamard_v=options.hadamard_v,
    )
    if found.reasons:
        raise FactsMismatchError(found.reasons)
    ends = src, dst
    for transform in found.transforms:
        ends = reordered(*ends, transform, find_scales=options.find_scales)
    return matched_states(*ends, convert=options.convert_states)


class BoundMigration:
    """A migration between two ends, bound to all but what a call gives. Keeps memory, no views.

    call: (seq_lens, then block_table, slots and starts of each end, stream), see bound.run_plan
    """

    __slots__ = (
        "call",
        "handle",
        "held",
        "layers",
        "leaves_out",
        "may_have_holes",
        "placed",
        "stream",
        "tensors",
        "token_bytes",
        "transfer",
    )

    def __init__(
        self,
        src: CacheSpan,
        dst: CacheSpan,
        options: MoveOptions,
        ends: tuple[CacheSpan, CacheSpan],
        lens: SeqLens | None = None,
        *,
        counts: bool = True,
    ) -> None:
        """Reads no index and no length.

        src, dst, lens: of a call that gives none of its own
        ends:   src and dst as `ends_of` gives them
        counts: calls give all lookups, and count tokens: lengths on a device are left to Python.
                The ends are those of `of_no_tokens`
        Raises InvalidArgumentError, UnsupportedError.
        """
        self.held = src.held("src"), dst.held("dst")
        for name, tensor in dst.view.read_only.items():
            tensor.require_writable(f"dst.{name}")
        if options.find_scales:
            for name, scales in (("k_scales", dst.view.k_scales), ("v_scales", dst.view.v_scales)):
                for i, scale in enumerate(scales or ()):
                    if scale is not None:
                        scale.require_writable(f"dst.{name}[{i}]")
        # When K moves in two parts, the second parts are appended as extra layers.
        pairs = enumerate(zip(src.view.layers, ends[0].view.layers, strict=False))
        parted = (i for i, (whole, part) in pairs if whole.head_dim != part.head_dim)
        self.layers = [*range(len(src.view.layers)), *parted]
        self.transfer = options.transfer
        self.tensors = _first_tensors(src, dst)
        planned = lens or SeqLens.of([0] * _num_rows(*ends))
        given: dict[str, Any] = {**places_of(src, dst), "seq_lens": planned}
        read = given if counts else self.where_read(given)  # ends without tokens read nothing
        ends = with_places(ends, read)
        self.placed = {name: one for name, one in read.items() if one is not given[name]}
        planned = self.placed.pop("seq_lens", planned)
        struct = abi.kvx_migrate_desc_t(
            flags=options.flags,
            num_heads=options.num_heads or 0,
            seq_lens=abi.pointer_to(planned),
            src=abi.pointer_to(ends[0]),
            dst=abi.pointer_to(ends[1]),
        )
        self.handle = handle = abi_plan.Handle("kvx_plan_create", struct)
        memory = {tensor.memory for tensor in self.tensors.values()} - {Memory.HOST}
        where = next(iter(memory or {Memory.HOST}))
        self.stream = current_stream(*(tensor.owner for tensor in self.tensors.values()))
        of_lens = [] if lens is None else moving_owners(planned.owner)
        of_dst = bound.Held([*self.held[1].owners, *of_lens]) if of_lens else self.held[1]
        binding = bound.Binding(
            held=(self.held[0], of_dst),
            memory=where,
            index_memory=Memory.HOST if options.transfer is Transfer.COPY_ENGINE else where,
            stream=self.stream,
            kept=(handle, planned, read),
            descriptors=DESCRIPTORS,
        )
        self.may_have_holes = may_have_holes(src, zero_fill=options.zero_fill)
        self.may_have_holes |= may_have_holes(dst)
        self.leaves_out = self.may_have_holes or has_slots(src) or has_slots(dst)
        self.token_bytes = dst.view.bytes_per_token(options.num_heads)
        brief = len(dst.view.layers) <= _BRIEF_LAYERS
        self.call = bound.run_plan(
            binding,
            handle.value,
            self.token_bytes * brief,
            [(invalid_slot(end), _table_flags(end)) for end in (src, dst)],
            counts=counts,
        )

    def where_read(self, indices: Mapping[str, Any], stream: int | None = None) -> dict[str, Any]:
        """The indices in the memory where a call reads them, see placing.where_read."""
        if not self.tensors:
            return dict(indices)
        return where_read(indices, self.tensors, self.transfer, stream)

    def run_described(
        self, indices: Mapping[str, Any], max_seq_len: int = 0, stream: int | None = None
    ) -> None:
        """A call whose lookups Python describes. Raises as `check` does.

        indices:     seq_lens, then those of `places_of`, by name, in place
        max_seq_len: the longest of the lengths, or more; 0: not known
        """
        if stream is None:
            stream = abi.stream_now(self.stream)
        read = self.where_read(indices, stream)
        structs = [None if index is None else index.to_c() for index in read.values()]
        nothing = (None,) * len(structs)
        # A bound that does not fit the struct is left out: libkvx refuses such lengths.
        max_seq_len = max_seq_len if 0 <= max_seq_len < 2**32 else 0
        self.check(self.call(*nothing, stream, *map(abi.address_of, structs), max_seq_len))
        used_on(stream, {name: one for name, one in read.items() if one is not indices[name]})

    @staticmethod
    def check(moved: int) -> None:
        """Raises the exception of a call that failed."""
        if moved <= -(1 << bound.FAILED):
            abi.check(-moved >> bound.FAILED)


# By ids of views and a key, with the views, as long as both exist.
_Kept = tuple["ref[CacheView]", "ref[CacheView]", BoundMigration]
_kept: dict[tuple[Any, ...], _Kept] = {}


def kept(src: CacheView, dst: CacheView, key: tuple[Any, ...]) -> BoundMigration | None:
    """What `keep` has kept for these views and `key`; None if there is nothing."""
    found = _kept.get((id(src), id(dst), key))
    if found is None or found[0]() is not src or found[1]() is not dst:
        return None
    return found[2]


def keep(
    src: CacheView, dst: CacheView, key: tuple[Any, ...], bound: BoundMigration
) -> BoundMigration:
    """Keeps a migration until one of the views is gone, or many others have been kept since."""
    whole = id(src), id(dst), key

    def forget(_: object) -> None:
        _kept.pop(whole, None)

    for oldest in list(_kept)[: max(0, len(_kept) + 1 - _MOST_KEPT)]:
        _kept.pop(oldest, None)
    _kept[whole] = ref(src, forget), ref(dst, forget), bound
    return bound


def of_no_tokens(
    src: CacheSpan,
    dst: CacheSpan,
    options: MoveOptions,
    ends: tuple[CacheSpan, CacheSpan],
    seq_lens: Any,
) -> BoundMigration:
    """Binds migrations between such ends, to no array of the caller's.

    ends:     as they are described to libkvx
    seq_lens: of the first call
    Tables and slots that planes have of their own name so many sequences: then the migration is of
    as many, without tokens, and keeps their tables.
    Raises InvalidArgumentError, UnsupportedError.
    """
    planes = [*src.view.planes, *dst.view.planes]
    named = any(plane.block_table is not None or plane.slots is not None for plane in planes)
    count = SeqLens.of(seq_lens).seq_count if named else 0
    lens = SeqLens.of([0] * count) if count else None
    here, there, *described = (_without_tokens(end, keeps=count > 0) for end in (src, dst, *ends))
    return BoundMigration(here, there, options, (described[0], described[1]), lens)


def _num_rows(*ends: CacheSpan) -> int:
    """The sequences of tables and starts that ends have of their own."""
    own = [end.block_table for end in ends] + [end.starts for end in ends]
    return max((each.seq_count for each in own if each is not None), default=0)


def _without_tokens(span: CacheSpan, *, keeps: bool) -> CacheSpan:
    """The same kind of end with no token in it; keeps: its table stays."""
    table, slots = span.block_table, span.slots
    if table is not None and not keeps:
        table = replace(
            table,
            seq_count=0,
            indices=0,
            indices_count=0,
            indptr_count=min(table.indptr_count, 1),
            owner=None,
            blocks=(),
        )
    if slots is not None:
        slots = replace(slots, token_count=0, slots=0, owner=None)
    return replace(span, block_table=table, slots=slots, starts=None, first_positions=None)


def _table_flags(span: CacheSpan) -> int:
    """The flags of tables that a run passes as numbers."""
    return abi.FLAG_HOLES if span.block_table is not None and span.block_table.has_holes else 0


def _first_tensors(src: CacheSpan, dst: CacheSpan) -> dict[str, Borrowed]:
    """The first tensor of each end, by name: their memory decides where the call runs."""
    found: dict[str, Borrowed] = {}
    for name, span in (("src", src), ("dst", dst)):
        if span.view.layers:
            found[f"{name}.layers[0].k"] = span.view.layers[0].k
        elif span.view.planes:
            found[f"{name}.planes[0]"] = span.view.planes[0]
    return found
