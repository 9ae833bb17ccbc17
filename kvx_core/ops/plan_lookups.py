"""Which tokens a run of a migration's plan moves: the keywords of MigratePlan, listed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from kvx_core._c import abi, abi_plan
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensors import TensorLike
from kvx_core.desc.view import CacheSpan

Table = BlockTable | TensorLike | Sequence[Sequence[int]]
Slots = SlotMapping | TensorLike | Sequence[int]
Lens = SeqLens | TensorLike | Sequence[int]
Indices = dict[str, SlotMapping | BlockTable | SeqLens | None]


class Lookups(TypedDict, total=False):
    """Tables, slots and starts of each end, as for CacheView.at; None: the plan's.

    A table replaces one of the same format, slots replace slots. Slots that are no SlotMapping skip
    the plan's invalid_slot; a table that is no BlockTable may have holes if the plan's may.
    """

    src_block_table: Table | None
    src_slots: Slots | None
    src_starts: Lens | None
    dst_block_table: Table | None
    dst_slots: Slots | None
    dst_starts: Lens | None


NAMES = tuple(Lookups.__annotations__)  # in the order of kvx_end_lookup_t


def invalid_slot(span: CacheSpan) -> int:
    """The slot to skip in slots that a run passes as numbers."""
    return -1 if span.slots is None else span.slots.invalid_slot


def describe_lookups(
    src: CacheSpan, dst: CacheSpan, seq_lens: Any, given: Mapping[str, Any]
) -> Indices:
    """The lengths and lookups of a call, by name. Raises TypeError for an unknown name.

    src, dst: the ends of the plan
    """
    if unknown := given.keys() - set(NAMES):
        raise TypeError(f"unexpected keyword {min(unknown)!r}, expected {', '.join(NAMES)}")
    found: Indices = {"seq_lens": None if seq_lens is None else SeqLens.of(seq_lens)}
    for name in NAMES:
        index, span = given.get(name), src if name.startswith("src") else dst
        if index is None:
            found[name] = None
        elif name.endswith("block_table"):
            found[name] = table = span.view.table_of(index)
            if table is index:
                table.require_in_place(name)
            elif span.block_table is not None and span.block_table.has_holes:
                found[name] = table.with_holes()
        elif name.endswith("slots"):
            found[name] = SlotMapping.of(index, invalid_slot=invalid_slot(span))
        else:
            found[name] = SeqLens.of(index, name=name)
    return found


def lookups_to_c(indices: Indices) -> abi_plan.kvx_plan_lookups_t:
    """As C has them; the struct keeps them alive."""
    pointers = [abi.pointer_to(indices[name]) for name in ("seq_lens", *NAMES)]
    lookups = abi_plan.kvx_plan_lookups_t(
        seq_lens=pointers[0],
        src=abi_plan.kvx_end_lookup_t(*pointers[1:4]),
        dst=abi_plan.kvx_end_lookup_t(*pointers[4:7]),
    )
    lookups.kept = indices
    return lookups
