"""migrate: sequences from one engine's cache into another's, in one pass. Spec: E.3

All that is the same from call to call is bound once for two views and options, and kept
(bound_migration.py). Each call checks that no memory has moved, reads its tables and lengths, and
calls libkvx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from kvx_core._c.bound import SIZES
from kvx_core.argument_checks import flag
from kvx_core.desc.placing import places_of
from kvx_core.desc.positions import require_same_positions
from kvx_core.desc.state_pieces import require_state_tokens
from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.tensors import Numbers, TensorLike
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.ops.bound_migration import (
    BoundMigration,
    ends_of,
    keep,
    kept,
    of_no_tokens,
)
from kvx_core.ops.holds import require_both_hold
from kvx_core.ops.left_out import bytes_left_out, may_skip
from kvx_core.ops.options import MoveKeywords, MoveOptions
from kvx_core.ops.streams import stream_number
from kvx_core.types import Memory

BlockIds = npt.NDArray[np.integer[Any]]
_USUAL = MoveOptions()
_ROWS = ("copy_rows",)  # the key of what copy_rows keeps


def migrate(
    src: CacheView | CacheSpan,
    dst: CacheView | CacheSpan,
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    same_model: bool = False,
    new_positions: bool = False,
    stream: int | None = None,
    **options: Unpack[MoveKeywords],
) -> int:
    """Moves sequences from one cache into another: all layers and planes, in one call and one pass.

    Token src.starts[s] + i of sequence s goes to dst.starts[s] + i, for i < seq_lens[s], heads
    src.head_start + h to dst.head_start + h, for h < num_heads. Layout, strides, block size, dtype,
    scales and table of the two ends may differ, and so may the order of K's rotary dims, if the
    facts of both ends give it: K is then reordered.

    src, dst:  CacheView.at(block_table=...) or .at(slots=...), or a dense CacheView, in which
               sequence s is block s
    seq_lens:  (seq_count,), int32 or int64, or a list of int: the tokens to move; lengths on a
               device are read back
    num_heads: None: all heads; both ends then hold the same number
    zero_fill: zero the destination tokens whose source block is null; otherwise they keep what they
               held
    find_scales: into FP8 or S8: compute the scales and store them in those of `dst`, which are per
               token and head
    requantize: into units that cover all tokens of a block (PER_CHANNEL): tokens may begin anywhere
               in a block, and the tokens before them are quantized anew; otherwise they must begin
               at the start of a block. Tokens of a block behind the last that moves hold nothing
               afterwards: their scales are those of the tokens that moved
    hadamard_k, hadamard_v: rotate groups of so many numbers of each vector of K, or V, by
               Hadamard's matrix: a power of two from 2 to 4096 that divides head_dim; 0: none. The
               same rotation undoes it, but for the rounding of float32 and of the destination's
               dtype. One end, and only one, stores K, or V, so (CacheFacts.hadamard)
    new_positions: the tokens may go to other positions than those that the source has them at
               (starts + first_positions of CacheView.at). Their K stays rotated for the old ones:
               rotate it by the difference afterwards, see kvx_core.rotate_keys
    convert_states: states may be rounded to another dtype at the other end
    same_model: both ends serve the same model and store it alike, even if facts do not say so
    transfer:  how a device moves the bytes: a Transfer or its name
    stream:    CUDA stream; None: torch's current one if a tensor is torch's, else the
               default stream. Ignored for HOST memory
    Mutates these tokens of the destination, nothing else.
    Returns the bytes of the tokens that moved, as the destination stores them: without those that
    have no place at one end (slots below 0, tables with holes), unless a device reads the tables.
    Raises FactsMismatchError if a copy would not mean the same, else InvalidArgumentError,
    UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: E.3
    """
    if type(src) is not CacheSpan:
        src = CacheSpan.of(src, name="src")
    if type(dst) is not CacheSpan:
        dst = CacheSpan.of(dst, name="dst")
    chosen = MoveOptions.of(options) if options else _USUAL
    if same_model is not True and same_model is not False:
        same_model = flag("same_model", same_model)
    key = src.kind, dst.kind, chosen.key, same_model
    bound = kept(src.view, dst.view, key)
    ends = (src, dst) if bound else ends_of(src, dst, chosen, same_model=same_model)
    _require_current(src, dst, seq_lens)
    if src.view.planes:
        require_state_tokens(src, dst, seq_lens)
    if new_positions is not True:
        if new_positions is not False:
            flag("new_positions", new_positions)
        if src.kind[-1] or dst.kind[-1]:
            require_same_positions(src, dst, seq_lens)
    if stream is not None:
        stream = stream_number(stream)
    if bound is None:
        bound = _bind(src, dst, chosen, key, ends, seq_lens)
    if bound.leaves_out:
        lens = SeqLens.of(seq_lens)
        if isinstance(lens.owner, Numbers):
            seq_lens = lens
        elif lens.memory is Memory.HOST:  # read once: who shares its memory may write it meanwhile
            seq_lens = SeqLens.of(lens.to_numpy())
    moved = bound.call(
        seq_lens,
        src.block_table,
        src.slots,
        src.starts,
        dst.block_table,
        dst.slots,
        dst.starts,
        stream,
    )
    if moved < 0:
        bound.check(moved)
        lens = SeqLens.of(seq_lens)
        lengths = lens.to_numpy()

        def rebind() -> BoundMigration:
            again = ends_of(src, dst, chosen, same_model=same_model)
            return _bind(src, dst, chosen, key, again, lens)

        _move_described(bound, rebind, src, dst, lens, int(lengths.max(initial=0)), stream)
        moved = int(lengths.sum()) * rows_per_sequence(src, dst, lens)
    if bound.leaves_out and (bound.may_have_holes or may_skip(src) or may_skip(dst)):
        left_out = bytes_left_out(src, dst, SeqLens.of(seq_lens), chosen.num_heads or None)
        return moved * bound.token_bytes - left_out
    return moved * bound.token_bytes


def copy_tokens(
    src: CacheSpan,
    dst: CacheSpan,
    lens: SeqLens,
    *,
    max_seq_len: int = 0,
    stream: int | None = None,
    **options: Unpack[MoveKeywords],
) -> None:
    """Migrates without comparing facts. Waits for no device, but where CacheView.holds is asked.

    max_seq_len: the most tokens of a sequence that move; 0: all
    """
    chosen = MoveOptions.of(options) if options else _USUAL
    stream = stream_number(stream)
    _require_current(src, dst, lens)
    key = src.kind, dst.kind, chosen.key, "copy_tokens"
    bind = partial(_bind, src, dst, chosen, key, (src, dst), lens)
    bound = kept(src.view, dst.view, key) or bind()
    moved = -SIZES
    if not max_seq_len:
        places = src.block_table, src.slots, src.starts, dst.block_table, dst.slots, dst.starts
        moved = bound.call(lens, *places, stream)
        bound.check(moved)
    if moved < 0:
        _move_described(bound, bind, src, dst, lens, max_seq_len, stream)


def copy_rows(
    src: CacheView,
    src_blocks: BlockIds,
    src_start: int,
    dst: CacheView,
    dst_blocks: BlockIds,
    dst_start: int,
    num_tokens: int,
) -> None:
    """copy_tokens of one sequence between caches on the host, without a description of its place.

    Tokens from src_start on go to dst_start on.
    src_blocks, dst_blocks: (blocks of the sequence,); null ones of dst_blocks are skipped
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
    """
    if src.holds is None and dst.holds is None:
        src.require_current("src")
        dst.require_current("dst")
        bound = kept(src, dst, _ROWS)
        if bound is None:
            ends = src.at([]), dst.at(BlockTable.packed([]).with_holes())
            bound = _bind(*ends, _USUAL, _ROWS, ends, ())
        here, there = (src_blocks[None], None, [src_start]), (dst_blocks[None], None, [dst_start])
        moved = bound.call([num_tokens], *here, *there, None)
        if moved >= 0:
            return
        bound.check(moved)
    copy_tokens(
        src.at(block_table=src_blocks[None], starts=[src_start]),
        dst.at(block_table=BlockTable.packed(dst_blocks[None]).with_holes(), starts=[dst_start]),
        SeqLens.of([num_tokens]),
    )


def _require_current(src: CacheSpan, dst: CacheSpan, seq_lens: Any) -> None:
    """Asks the engines of both ends whether these tokens are there, and the caches the same."""
    if src.view.outdated is not None:
        src.view.require_current("src")
    if dst.view.outdated is not None:
        dst.view.require_current("dst")
    if src.view.holds is not None or dst.view.holds is not None:
        require_both_hold(src, dst, seq_lens)


def _bind(
    src: CacheSpan,
    dst: CacheSpan,
    options: MoveOptions,
    key: tuple[Any, ...],
    ends: tuple[CacheSpan, CacheSpan],
    seq_lens: Any,
) -> BoundMigration:
    """Binds migrations of such ends, and keeps them for the views by `key`.

    ends: src and dst as they are described to libkvx
    Raises InvalidArgumentError, UnsupportedError.
    """
    return keep(src.view, dst.view, key, of_no_tokens(src, dst, options, ends, seq_lens))


def _move_described(
    bound: BoundMigration,
    rebind: Callable[[], BoundMigration],
    src: CacheSpan,
    dst: CacheSpan,
    lens: SeqLens,
    max_seq_len: int,
    stream: int | None,
) -> None:
    """Moves tokens whose lookups Python describes.

    rebind: binds anew, for memory that is the same in another storage
    """
    src.require_in_place("src")
    dst.require_in_place("dst")
    if not all(held.are_in_place() for held in bound.held):
        bound = rebind()
    bound.run_described({"seq_lens": lens, **places_of(src, dst)}, max_seq_len, stream)


def _table_rows(src: CacheSpan, dst: CacheSpan) -> list[int]:
    return [end.block_table.num_rows for end in (src, dst) if end.block_table is not None]


def rows_per_sequence(src: CacheSpan, dst: CacheSpan, lens: SeqLens) -> int:
    """Rows that share one length: the beams of a KV_OFFSETS table, else 1."""
    rows = _table_rows(src, dst)
    return max(rows, default=lens.seq_count) // max(lens.seq_count, 1) or 1
