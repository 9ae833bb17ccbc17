"""migrate: sequences from one engine's cache into another's, in one pass. Spec: E.3

All that is the same from call to call is computed once for a source, a destination and options, and
kept with the source (CacheSpan.moves): C structs, compared facts, writability. Each call checks
that no memory has moved, reads its lengths, and calls libkvx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from kvx_core._c import abi, bound
from kvx_core.argument_checks import flag
from kvx_core.desc import facts
from kvx_core.desc.placing import places_of, used_on, where_read, with_places
from kvx_core.desc.positions import require_same_positions
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.tensors import Borrowed, TensorLike
from kvx_core.desc.view import CacheSpan, CacheView, Move
from kvx_core.errors import FactsMismatchError
from kvx_core.ops.holds import require_both_hold
from kvx_core.ops.left_out import bytes_left_out, may_leave_out
from kvx_core.ops.options import MoveKeywords, MoveOptions
from kvx_core.ops.reorder import reordered
from kvx_core.ops.streams import current_stream, stream_number
from kvx_core.types import Memory, Transfer

_USUAL = MoveOptions()


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
               at the start of a block
    hadamard_k, hadamard_v: rotate groups of so many numbers of each vector of K, or V, by
               Hadamard's matrix: a power of two from 2 to 4096 that divides head_dim; 0: none. The
               same rotation undoes it, but for the rounding of float32 and of the destination's
               dtype. One end, and only one, stores K, or V, so (CacheFacts.hadamard)
    new_positions: the tokens may go to other positions than those that the source has them at
               (starts + first_positions of CacheView.at). Their K stays rotated for the old ones:
               rotate it by the difference afterwards, see kvx_core.rotate_keys
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
    src, dst = CacheSpan.of(src, name="src"), CacheSpan.of(dst, name="dst")
    chosen = MoveOptions.of(options) if options else _USUAL
    key = id(dst), chosen.key, flag("same_model", same_model)
    move = src.moves.to(dst, key)
    ends = src, dst
    if move is None:
        found = facts.compare(
            src.view.facts,
            dst.view.facts,
            src_head_start=src.head_start,
            dst_head_start=dst.head_start,
            same_model=same_model,
            hadamard_k=chosen.hadamard_k,
            hadamard_v=chosen.hadamard_v,
        )
        if found.reasons:
            raise FactsMismatchError(found.reasons)
        for transform in found.transforms:
            ends = reordered(*ends, transform, find_scales=chosen.find_scales)
    src.view.require_current("src")
    dst.view.require_current("dst")
    if src.view.holds is not None or dst.view.holds is not None:
        require_both_hold(src, dst, seq_lens)
    if new_positions is not True:
        flag("new_positions", new_positions)
        starts, first = src.starts or dst.starts, src.first_positions or dst.first_positions
        if starts is not None or first is not None:
            require_same_positions(src, dst, seq_lens)
    if move is None:
        move = _bound_move(src, dst, chosen, key, ends)
    if stream is not None:
        stream = stream_number(stream)
    if move.leaves_out:
        lens = SeqLens.of(seq_lens)
        if lens.memory is Memory.HOST:  # read once: who shares its memory may write it meanwhile
            seq_lens = SeqLens.of(lens.to_numpy())
    moved = move.call(seq_lens, stream)
    if move.moved:
        used_on(stream, move.moved)
    if moved < 0:
        _check(moved)
        lens = SeqLens.of(seq_lens)
        lengths = lens.to_numpy()
        _move_described(move, src, dst, lens, int(lengths.max(initial=0)), stream)
        moved = int(lengths.sum()) * rows_per_sequence(src, dst, lens)
    if move.leaves_out:
        lens = SeqLens.of(seq_lens)
        return moved * move.token_bytes - bytes_left_out(src, dst, lens, chosen.num_heads or None)
    return moved * move.token_bytes


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
    src.view.require_current("src")
    dst.view.require_current("dst")
    if src.view.holds is not None or dst.view.holds is not None:
        require_both_hold(src, dst, lens)
    key = id(dst), chosen.key, "copy_tokens"
    move = src.moves.to(dst, key) or _bound_move(src, dst, chosen, key, (src, dst))
    _move_described(move, src, dst, lens, max_seq_len, stream)


def bound_copy(src: CacheSpan, dst: CacheSpan, lens: SeqLens) -> Callable[[], None]:
    """Binds copy_tokens between caches on the host: each call reads tables, starts and lengths anew
    from their arrays, which stay where they are.

    Raises InvalidArgumentError; the call what copy_tokens raises.
    """
    key = id(dst), _USUAL.key, "copy_tokens"
    move = _bound_move(src, dst, _USUAL, key, (src, dst))
    where_read({"seq_lens": lens}, _first_tensors(src, dst), move.transfer)
    struct = lens.to_c()
    address = abi.address_of(struct)

    def copy(struct: object = struct) -> None:  # which keeps the struct
        src.view.require_current("src")
        dst.view.require_current("dst")
        if src.view.holds is not None or dst.view.holds is not None:
            require_both_hold(src, dst, lens)
        if (src.held("src"), dst.held("dst")) == move.held:
            _check(move.call(None, None, address, 0))
        else:  # the memory is the same, in another storage
            copy_tokens(src, dst, lens)

    return copy


def _bound_move(
    src: CacheSpan,
    dst: CacheSpan,
    options: MoveOptions,
    key: tuple[Any, ...],
    ends: tuple[CacheSpan, CacheSpan],
) -> Move:
    """Binds the move of these ends and options, and keeps it with `src` by `key`.

    ends: the same ends as described to C: the dims of K may be in another order
    Raises InvalidArgumentError.
    """
    held = src.held("src"), dst.held("dst")
    for name, tensor in dst.view.read_only.items():
        tensor.require_writable(f"dst.{name}")
    if options.find_scales:
        for name, scales in (("k_scales", dst.view.k_scales), ("v_scales", dst.view.v_scales)):
            for i, scale in enumerate(scales or ()):
                if scale is not None:
                    scale.require_writable(f"dst.{name}[{i}]")
    tensors = _first_tensors(src, dst)
    memory = {tensor.memory for tensor in tensors.values()} - {Memory.HOST} or {Memory.HOST}
    given, moved = places_of(src, dst), {}
    if tensors:
        read = where_read(given, tensors, options.transfer)
        moved = {name: index for name, index in read.items() if index is not given[name]}
        ends = with_places(ends, read) if moved else ends
    where = next(iter(memory))
    binding = bound.Binding(
        held=held,
        memory=where,
        index_memory=Memory.HOST if options.transfer is Transfer.COPY_ENGINE else where,
        stream=current_stream(*(tensor.owner for tensor in tensors.values())),
    )
    struct = abi.kvx_migrate_desc_t(
        flags=options.flags,
        num_heads=options.num_heads or 0,
        src=abi.pointer_to(ends[0]),
        dst=abi.pointer_to(ends[1]),
    )
    token_bytes = dst.view.bytes_per_token(options.num_heads)
    rows = max(_table_rows(src, dst), default=0)
    call = bound.migrate(binding, struct, token_bytes, rows)
    leaves_out = may_leave_out(src, zero_fill=options.zero_fill) or may_leave_out(dst)
    move = Move(call, token_bytes, held, options.transfer, leaves_out, moved)
    src.moves.keep(dst, key, move)
    return move


def _move_described(
    move: Move, src: CacheSpan, dst: CacheSpan, lens: SeqLens, max_seq_len: int, stream: int | None
) -> None:
    """Moves tokens whose lengths Python describes."""
    held = src.held("src"), dst.held("dst")
    if held != move.held:
        src.moves.clear()  # the memory is the same, in another storage: bind anew
    tensors = _first_tensors(src, dst)
    if stream is None:
        stream = abi.stream_now(current_stream(*(t.owner for t in tensors.values())))
    if lens.seq_count and tensors:
        lens = where_read({"seq_lens": lens}, tensors, move.transfer, stream)["seq_lens"]
    struct = lens.to_c()
    # A bound that does not fit the struct is left out: libkvx refuses such lengths.
    max_seq_len = max_seq_len if 0 <= max_seq_len < 2**32 else 0
    _check(move.call(None, stream, abi.address_of(struct), max_seq_len))
    if move.moved:
        used_on(stream, move.moved)


def _check(moved: int) -> None:
    """Raises the exception of a migration that failed."""
    if moved <= -(1 << bound.FAILED):
        abi.check(-moved >> bound.FAILED)


def _first_tensors(src: CacheSpan, dst: CacheSpan) -> dict[str, Borrowed]:
    """A tensor of each end, by name: their memory decides where the call runs; none if an end is
    empty.
    """
    if src.view.layers and dst.view.layers:
        return {"src.layers[0].k": src.view.layers[0].k, "dst.layers[0].k": dst.view.layers[0].k}
    if src.view.planes and dst.view.planes:
        return {"src.planes[0]": src.view.planes[0], "dst.planes[0]": dst.view.planes[0]}
    return {}


def _table_rows(src: CacheSpan, dst: CacheSpan) -> list[int]:
    return [end.block_table.num_rows for end in (src, dst) if end.block_table is not None]


def rows_per_sequence(src: CacheSpan, dst: CacheSpan, lens: SeqLens) -> int:
    """Rows that share one length: the beams of a KV_OFFSETS table, else 1."""
    rows = _table_rows(src, dst)
    return max(rows, default=lens.seq_count) // max(lens.seq_count, 1) or 1
