"""How many tokens an engine says it holds, compared with those that a caller wants to move.

A cache with room to spare looks the same in every byte: only the engine knows where its tokens end.
Asked anew for each move, since the engine goes on. Spec: E.3
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import plural
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.desc.said_counts import said_counts
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.view import CacheSpan
from kvx_core.errors import KvxError, OutOfRangeError

_Counts = npt.NDArray[np.int64]


def require_holds(name: str, span: CacheSpan, seq_lens: Any) -> None:
    """Raises OutOfRangeError if the engine holds fewer tokens than `seq_lens` of the span reach.

    name:     what errors call the end
    seq_lens: (seq_count,), the tokens of each sequence from its start on
    Reads lengths, tables and slots on a device back. Does nothing for a view without `holds`.
    """
    view = span.view
    if view.holds is None:
        return
    lens = SeqLens.of(seq_lens)
    lengths = np.maximum(lens.to_numpy(), 0)
    if view.dense and view.layers and (span.block_table is not None or span.slots is not None):
        rows, reached = _rows_of_blocks(span, lens)
        held = _counts(name, span, view.layers[0].num_blocks)
    else:
        starts = np.zeros_like(lengths) if span.starts is None else span.starts.to_numpy()
        rows = np.flatnonzero(lengths)
        if len(starts) != len(lengths):
            return  # the call itself says that they differ
        reached, held = (starts + lengths)[rows], _counts(name, span, len(lengths))
    short = np.flatnonzero(reached > held[rows])
    if not len(short):
        return
    row = int(rows[short[0]])
    last = int(reached[rows == row].max())
    raise OutOfRangeError(
        f"{name} holds {plural(int(held[row]), 'token')} of sequence {row} by its engine's own "
        f"count, expected at least {last}, as starts and seq_lens say. A token that was sampled "
        "last is not in a cache before the next forward pass; a destination is made to hold the "
        "tokens first (the adapter's reserve)"
    )


def require_both_hold(src: CacheSpan, dst: CacheSpan, seq_lens: Any) -> None:
    """`require_holds` of both ends of a move."""
    lens = SeqLens.of(seq_lens)
    require_holds("src", src, lens)
    require_holds("dst", dst, lens)


def _rows_of_blocks(span: CacheSpan, lens: SeqLens) -> tuple[_Counts, _Counts]:
    """The block of each token of a dense view, and one past its place there."""
    try:
        places = find_tokens(span, lens)
    except KvxError:  # the call itself says what is wrong, of the right end
        return np.empty(0, np.int64), np.empty(0, np.int64)
    stored = places[places["block"] >= 0]
    return stored["block"].astype(np.int64), stored["offset"].astype(np.int64) + 1


def _counts(name: str, span: CacheSpan, num_rows: int) -> _Counts:
    """What the engine says of each sequence."""
    assert span.view.holds is not None
    return said_counts(f"{name}.view.holds()", span.view.holds(), num_rows)
