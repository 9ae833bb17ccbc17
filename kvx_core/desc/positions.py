"""Positions of the tokens that move: K is rotated for them, so both ends have to mean the same.

Token t of a sequence stands at position t or, where the end has `first_positions`, that many later.
Spec: E.3 (starts); a descriptor does not say what its tokens' positions are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.view import CacheSpan
from kvx_core.errors import FactsMismatchError
from kvx_core.types import Memory

Numbers = npt.NDArray[np.int64]


def have_positions(src: CacheSpan, dst: CacheSpan) -> bool:
    """Whether an end says more of its tokens' positions than that the first moves from 0."""
    said = src.starts, dst.starts, src.first_positions, dst.first_positions
    return any(one is not None for one in said)


def require_same_positions(
    src: CacheSpan,
    dst: CacheSpan,
    seq_lens: Any,
    src_starts: SeqLens | None = None,
    dst_starts: SeqLens | None = None,
) -> None:
    """Refuses to move tokens to other positions than those that they were computed for.

    seq_lens: the tokens to move, as for migrate
    src_starts, dst_starts: in place of those of the ends
    Where slots name the tokens of an end, their positions are not known without `first_positions`.
    K that is stored before its rotation (CacheFacts.rope_applied False at both ends) may move.
    Raises FactsMismatchError.
    """
    if src.view.facts.rope_applied is dst.view.facts.rope_applied is False:
        return
    from_, to = src_starts or src.starts, dst_starts or dst.starts
    if src.first_positions == dst.first_positions and _are_same(from_, to):
        return  # as engines ask for in every step
    here, there = first_positions_of(src, from_), first_positions_of(dst, to)
    lengths = _numbers(SeqLens.of(seq_lens))
    if lengths is None or here is None or there is None or not len(lengths):
        return
    rows = max(len(lengths), here.size, there.size)
    if rows % len(lengths):
        return  # libkvx refuses it
    lengths = np.repeat(lengths, rows // len(lengths))
    try:
        at_src, at_dst = (np.broadcast_to(begin, lengths.shape) for begin in (here, there))
    except ValueError:  # starts of another number of sequences: libkvx refuses them
        return
    differ = np.flatnonzero((at_src != at_dst) & (lengths > 0))
    if len(differ):
        row = int(differ[0])
        raise FactsMismatchError(
            [
                f"sequence {row} moves from position {at_src[row]} at the source to position "
                f"{at_dst[row]} at the destination (starts + first_positions), and K is rotated "
                "for its position: give first_positions of an end whose token 0 is not at position "
                "0 (CacheView.at), or new_positions=True if K is rotated afterwards "
                "(kvx_core.rotate_keys)"
            ]
        )


def _are_same(a: SeqLens | None, b: SeqLens | None) -> bool:
    """Whether these are the same bytes on the host."""
    if a is None or b is None or a.memory is not Memory.HOST or b.memory is not Memory.HOST:
        return False
    if a.dtype is not b.dtype or a.seq_count != b.seq_count:
        return False
    num_bytes = a.seq_count * a.dtype.itemsize
    return not num_bytes or abi.read(a.lengths, num_bytes) == abi.read(b.lengths, num_bytes)


def first_positions_of(span: CacheSpan, starts: SeqLens | None) -> Numbers | None:
    """The position of each sequence's first token that moves, or one for all; None: not known."""
    if span.slots is not None and span.first_positions is None:
        return None
    begin: Numbers = np.zeros(1, np.int64)
    if starts is not None:
        found = _numbers(starts)
        if found is None:
            return None
        begin = found
    if span.first_positions is not None:
        given = np.asarray(span.first_positions, np.int64)
        if min(len(given), len(begin)) != 1 and len(given) != len(begin):
            return None
        begin = begin + given
    return begin


def _numbers(given: SeqLens) -> Numbers | None:
    """The numbers; None where they are on a device and cannot be read back."""
    if given.memory is Memory.DEVICE and not is_torch(given.owner):
        return None
    return given.to_numpy()
