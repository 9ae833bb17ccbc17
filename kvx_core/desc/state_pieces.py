"""States of two ends, section by section: what a migration moves where, and which are not alike.

Planes with StateFacts are taken apart into pieces that both ends have: the channels or heads that a
rank of either end holds of a section, and the columns of a convolution that mean something. A piece
is a plane of other extents, so the copy loops know nothing of states. Spec: E.24
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvx_core.desc.planes import Plane
from kvx_core.desc.positions import first_positions_of
from kvx_core.desc.said_counts import said_counts
from kvx_core.desc.states import HeldSection, StateFacts, StateSection
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.tensors import read_array
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import FactsMismatchError, InvalidArgumentError
from kvx_core.types import Axis

_FIRST_ROLE = 2**30  # roles of pieces, which are numbered: no role of an engine


class _End(NamedTuple):
    """One section of one end, and the plane that it is in."""

    plane: Plane
    state: StateFacts
    held: HeldSection


class _Shared(NamedTuple):
    """What both ends hold of a section."""

    ends: tuple[_End, _End]
    begin: int  # channel or head of the model's section
    end: int


_Sections = dict[tuple[int, bool, str], _End]


def matched_states(src: CacheSpan, dst: CacheSpan, *, convert: bool) -> tuple[CacheSpan, CacheSpan]:
    """The ends with pieces in place of planes that have StateFacts.

    convert: states may be of another dtype at the other end
    Sections that the ranks of the two ends do not share move in other calls.
    Copies nothing. Raises FactsMismatchError with every reason why a copy would not mean the same,
    InvalidArgumentError where the two ends share nothing that could move.
    """
    if not (src.view.has_states or dst.view.has_states):
        return src, dst
    for name, end in (("src", src), ("dst", dst)):
        _require_slots(name, end)
    pairs, reasons = _pairs(src.view, dst.view)
    reasons += [
        reason for a, b in pairs for reason in _unlike(a[0], a[1], b[0], b[1], convert=convert)
    ]
    if reasons:
        raise FactsMismatchError(list(dict.fromkeys(reasons)))
    pieces = list(_pieces(pairs))
    others = [[p for p in end.view.planes if p.state is None] for end in (src, dst)]
    if not pieces and not src.view.layers and not others[0]:
        a, b = pairs[0][0][1], pairs[0][1][1]
        raise InvalidArgumentError(
            f"rank {a.rank} of {a.num_ranks} at src and rank {b.rank} of {b.num_ranks} at dst hold "
            "no channel or head in common, expected some. Migrate between ranks that share some"
        )
    here, there = (
        replace(end, view=replace(end.view, planes=(*kept, *(pair[i] for pair in pieces))))
        for i, (end, kept) in enumerate(zip((src, dst), others, strict=True))
    )
    return here, there


def _require_slots(name: str, span: CacheSpan) -> None:
    """Raises InvalidArgumentError if a table finds tokens, and nothing finds their states."""
    if span.block_table is None and span.slots is None:
        return  # sequence s is block s of all
    for i, plane in enumerate(span.view.planes):
        if plane.state is not None and plane.slots is None:
            raise InvalidArgumentError(
                f"{name} has a block_table or slots and {name}.view.planes[{i}] "
                f"({plane.role_name}) has none, expected slots of its own: a table does not say "
                "where the state of a sequence is. Give slots to Plane.of_state, or rows to "
                "hybrid_view"
            )


def require_state_tokens(src: CacheSpan, dst: CacheSpan, seq_lens: Any) -> None:
    """Refuses states that do not stand for exactly the tokens that are there after a migration.

    A state of n tokens is never cut or extended. Reads lengths and starts on a device back.
    Raises FactsMismatchError, InvalidArgumentError.
    """
    has_facts = src.view.has_states
    if not has_facts and src.view.state_tokens is None and dst.view.state_tokens is None:
        return
    lengths = np.maximum(SeqLens.of(seq_lens).to_numpy(), 0)
    for name, span in (("source", src), ("destination", dst)):
        _require_places(name, span.view, lengths)
        given = span.view.state_tokens
        if given is None:
            if name == "source" and has_facts:
                raise FactsMismatchError(
                    [
                        "state_tokens is unknown at the source: how many tokens its states stand "
                        "for. Give CacheView.state_tokens, which is asked before each move"
                    ]
                )
            continue
        said = given() if callable(given) else given
        stood_for = said_counts(f"{name}.view.state_tokens", said, len(lengths))[: len(lengths)]
        first = first_positions_of(span, span.starts)
        if first is None:
            first = np.zeros(1, np.int64)
        if len(first) not in (1, len(lengths)):
            continue  # libkvx refuses starts of another number of sequences
        reached = np.broadcast_to(first, lengths.shape) + lengths
        unlike = np.flatnonzero((lengths > 0) & (reached != stood_for))
        if len(unlike):
            row = int(unlike[0])
            raise FactsMismatchError(
                [
                    f"the states of sequence {row} stand for {stood_for[row]} tokens at the "
                    f"{name}, and the tokens that move end at {reached[row]} (starts + "
                    "first_positions + seq_lens). A state belongs to a prefix of one length: move "
                    "all of its tokens"
                ]
            )


def _require_places(name: str, view: CacheView, lengths: npt.NDArray[np.int64]) -> None:
    """Refuses a sequence that moves without its state."""
    mappings = {id(plane.slots): plane.slots for plane in view.planes if plane.state is not None}
    for slots in mappings.values():
        if slots is None or slots.token_count != len(lengths):
            continue  # libkvx refuses another number of slots
        host = slots.on_host()
        found = read_array("slots", host.slots, lengths.shape, (1,), host.dtype, host.memory)
        is_null = (found < 0) | (found == slots.invalid_slot)
        absent = np.flatnonzero(is_null & (lengths > 0))
        if len(absent):
            raise InvalidArgumentError(
                f"sequence {absent[0]} has no slot for its state at the {name}, expected one of 0 "
                "or more: its tokens would move without their state"
            )


def _sections(view: CacheView) -> _Sections:
    """All sections of a view, by layer, whether it is of a convolution, and name."""
    found: _Sections = {}
    for plane in view.planes:
        state = plane.state
        if state is None:
            continue
        for held in state.held():
            key = plane.layer, state.is_conv, held.name
            if key in found:
                raise InvalidArgumentError(
                    f"section {held.name} of layer {plane.layer} is in two planes, expected in one"
                )
            found[key] = _End(plane, state, held)
    return found


def _pairs(src: CacheView, dst: CacheView) -> tuple[list[tuple[_End, _End]], list[str]]:
    """Each section at both ends, in the order of the source, and reasons for those of one end."""
    at_src, at_dst = _sections(src), _sections(dst)
    reasons = [
        f"layer {layer} has section {name} of its "
        f"{'convolution' if is_conv else 'recurrent state'} at one end alone, with what it means, "
        "expected it at both ends (Plane.of_state)"
        for layer, is_conv, name in sorted(at_src.keys() ^ at_dst.keys())
    ]
    pairs = [(end, at_dst[key]) for key, end in at_src.items() if key in at_dst]
    return pairs, reasons


def _unlike(
    a: Plane, of_a: StateFacts, b: Plane, of_b: StateFacts, *, convert: bool
) -> Iterator[str]:
    """Why these planes do not hold the same section of one model."""
    at = f"{a.role_name} of layer {a.layer}"
    for name in ("kind", "num_columns"):
        here, there = getattr(of_a, name), getattr(of_b, name)
        if here != there:
            yield f"{name} of {at} is {here!r} at the source and {there!r} at the destination"
    if len(of_a.axes) == len(of_b.axes) and not of_a.is_conv:
        dims = [
            [n for axis, n in zip(p.axes, p.shape, strict=True) if axis is Axis.DIM] for p in (a, b)
        ]
        if dims[0] != dims[1]:
            yield (
                f"{at} has {dims[0]} numbers in {of_a.axes[1:]} at the source and {dims[1]} at the "
                "destination"
            )
    widths = [{s.name: s.width for s in of.sections} for of in (of_a, of_b)]
    for name in widths[0].keys() & widths[1].keys():
        if widths[0][name] != widths[1][name]:
            yield (
                f"section {name} of {at} has {widths[0][name]} entries at the source and "
                f"{widths[1][name]} at the destination"
            )
    if a.dtype is not b.dtype and not convert:
        yield (
            f"{at} is {a.dtype.name} at the source and {b.dtype.name} at the destination. States "
            "go on being read and added to: give convert_states=True if they may be rounded"
        )


def _pieces(pairs: Sequence[tuple[_End, _End]]) -> Iterator[tuple[Plane, Plane]]:
    """The planes that move, as both ends have them."""
    runs: list[list[_Shared]] = []
    for a, b in pairs:
        begin, end = max(a.held.begin, b.held.begin), min(a.held.end, b.held.end)
        if begin >= end:
            continue
        shared = _Shared((a, b), begin, end)
        if runs and _continues(runs[-1][-1], shared):
            runs[-1].append(shared)
        else:
            runs.append([shared])
    role = _FIRST_ROLE
    for run in runs:
        (a, b), begin, _ = run[0]
        sections = tuple(StateSection(one.ends[0].held.name, one.end - one.begin) for one in run)
        for at_a, at_b, count in _columns(a.state, b.state):
            yield (
                _piece(a, begin, sections, at_a, count, role),
                _piece(b, begin, sections, at_b, count, role),
            )
            role += 1


def _continues(last: _Shared, this: _Shared) -> bool:
    """Whether two sections follow each other in the planes of both ends."""
    return all(
        a.plane is b.plane
        and a.held.offset + last.end - a.held.begin == b.held.offset + this.begin - b.held.begin
        for a, b in zip(last.ends, this.ends, strict=True)
    )


def _columns(a: StateFacts, b: StateFacts) -> list[tuple[int, int, int]]:
    """Columns that move together: the first of them at either end, and how many."""
    if a.num_columns is None:
        return [(0, 0, 0)]
    first, count = (a.first_column, b.first_column), a.num_columns
    if a.newest_first == b.newest_first or count == 1:
        return [(*first, count)]
    return [(first[0] + i, first[1] + count - 1 - i, 1) for i in range(count)]


def _piece(
    end: _End,
    begin: int,
    sections: tuple[StateSection, ...],
    column: int,
    num_columns: int,
    role: int,
) -> Plane:
    """Some channels or heads, and columns, of a plane."""
    plane, state, held = end
    head = plane.axes.index(Axis.HEAD)
    shape, data = list(plane.shape), plane.data
    shape[head] = sum(section.width for section in sections)
    data += (held.offset + begin - held.begin) * plane.stride[head] * plane.dtype.itemsize
    facts = StateFacts(kind=state.kind, sections=sections, num_columns=num_columns or None)
    if state.is_conv:
        time = plane.axes.index(Axis.DIM)
        shape[time] = num_columns
        data += column * plane.stride[time] * plane.dtype.itemsize
    return replace(plane, role=role, shape=tuple(shape), data=data, state=facts)
