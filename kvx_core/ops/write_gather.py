"""write_kv and gather_kv: new tokens into a paged cache, cached tokens out of it.

A call without scales is bound to its cache once; C then reads its torch tensors. All other calls
take the same route (calls.py). Spec: 6.8 to 6.10, 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi, bound
from kvx_core.argument_checks import bad_argument, instance, integer
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import TensorLike, empty_like_owner
from kvx_core.errors import InvalidArgumentError, OutOfRangeError
from kvx_core.formats import Formats
from kvx_core.ops.calls import (
    A_CACHE,
    bound_gather,
    bound_write,
    cached_call,
    run_described_gather,
    run_described_write,
)
from kvx_core.ops.options import GatherKeywords, GatherOptions, WriteKeywords, WriteOptions
from kvx_core.ops.streams import current_stream_here, stream_number
from kvx_core.types import BlockTableFormat, DType, Memory

_USUAL_WRITE = WriteOptions()
_USUAL_GATHER = GatherOptions()
_ANY_LENGTH = 2**63 - 1
# What a gather allocates outputs of.
_OUTPUTS = Formats(lambda: (dtype for dtype in DType if dtype.format.rounding))
_Key = TypeVar("_Key", bound=TensorLike | TensorDesc)
_Value = TypeVar("_Value", bound=TensorLike | TensorDesc | None)


def write_kv(
    cache: CacheDesc,
    key: TensorLike | TensorDesc,
    value: TensorLike | TensorDesc | None,
    slots: SlotMapping | TensorLike | Sequence[int],
    *,
    stream: int | None = None,
    **options: Unpack[WriteKeywords],
) -> None:
    """Writes new tokens into a paged cache, converting dtype and scale on the way.

    key, value: (>= num_tokens, num_kv_heads, head_dim), any strides and any dtype that converts to
                the cache's; rows past num_tokens are padding; value is None if there is no V
    slots:      (num_tokens,), int32 or int64, or a list of int; negative slots are skipped
    k_scale, v_scale: of an FP8 or S8 cache
    find_scales: find the scales on the way and store them in k_scale and v_scale, which are then
                per token and head
    transfer:   how a device moves the bytes: a Transfer or its name
    stream:     CUDA stream; None: torch's current one if a tensor is torch's, else the
                default stream. Ignored for HOST memory
    Mutates these slots, with find_scales their scales too, nothing else. On a device it allocates
    nothing and waits for nothing: a CUDA graph can capture it. Slots that are out of range are
    skipped there, and device_status reports them.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: 6.9, 7
    """
    chosen = WriteOptions.of(options) if options else _USUAL_WRITE
    call = cached_call(bound_write, cache, chosen)
    if stream is None:
        status = call(key, value, slots)
    else:
        status = call(key, value, slots, stream_number(stream))
    if status:
        run_described_write(status, call, cache, chosen, stream, key, value, slots)


@overload
def gather_kv(
    cache: CacheDesc,
    block_table: BlockTable | TensorLike | Sequence[Sequence[int]],
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    max_seq_len: int | None = None,
    out: tuple[_Key, _Value],
    dtype: None = None,
    stream: int | None = None,
    **options: Unpack[GatherKeywords],
) -> tuple[_Key, _Value]: ...
@overload
def gather_kv(
    cache: CacheDesc,
    block_table: BlockTable | TensorLike | Sequence[Sequence[int]],
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    max_seq_len: int | None = None,
    out: None = None,
    dtype: DType | str | None = None,
    stream: int | None = None,
    **options: Unpack[GatherKeywords],
) -> tuple[Any, Any]: ...
def gather_kv(
    cache: CacheDesc,
    block_table: BlockTable | TensorLike | Sequence[Sequence[int]],
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    max_seq_len: int | None = None,
    out: tuple[Any, Any] | None = None,
    dtype: DType | str | None = None,
    stream: int | None = None,
    **options: Unpack[GatherKeywords],
) -> tuple[Any, Any]:
    """Gathers the first min(length, max_seq_len) cached tokens of every sequence.

    block_table: a BlockTable, or block ids (seq_count, max_blocks_per_seq), int32 or int64; entries
                 past a sequence's blocks are never read, negative ones are null, and refused where
                 a token is unless BlockTable.with_holes or zero_fill allows it
    seq_lens:    (seq_count,), int32 or int64, or a list of int
    max_seq_len: tokens per sequence; None: those of `out`, or the longest sequence, for which
                 lengths on a device are read back
    out:         (key, value) to fill: (seq_count * beam_width, max_seq_len, num_kv_heads, head_dim)
                 or the same as 3-D, any strides and any dtype that the cache's converts to; value
                 is None if there is no V. None: new tensors of torch or numpy, as the cache's are
    dtype:       of new tensors; None: the cache's
    k_scale, v_scale: of an FP8 or S8 cache
    null_block_id: a block id that holds nothing (vLLM: 0)
    zero_fill:   any table may have null blocks where tokens are. Zeroes these tokens and those past
                 a sequence's length, which otherwise keep what they held: new tensors hold zeros
    secondary_num_blocks: blocks in the secondary pool; 0: as many as num_blocks
    transfer:    how a device moves the bytes: a Transfer or its name
    stream:      CUDA stream; None: torch's current one if a tensor is torch's, else the
                 default stream. Ignored for HOST memory
    Mutates those tokens of `out`, nothing else. Returns (key, value): those of `out`, or new ones.
    With `out` a CUDA graph can capture it. Blocks that are out of range are skipped on a device,
    and device_status reports them.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: 6.10, 7, E.2
    """
    chosen = GatherOptions.of(options) if options else _USUAL_GATHER
    if out is None:
        return _gather_into_new(cache, block_table, seq_lens, max_seq_len, dtype, stream, chosen)
    try:
        key, value = out
    except (TypeError, ValueError):
        raise bad_argument(
            "out", out, "(key, value) or, where there is no V, (key, None)"
        ) from None
    if dtype is not None:
        raise InvalidArgumentError(
            f"dtype is {dtype!r}, expected None with out, whose tensors have dtypes of their own"
        )
    _gather(cache, key, value, block_table, seq_lens, max_seq_len, stream, chosen)
    return key, value


def _gather(
    cache: CacheDesc,
    key: Any,
    value: Any,
    block_table: Any,
    seq_lens: Any,
    max_seq_len: int | None,
    stream: int | None,
    options: GatherOptions,
) -> None:
    call = cached_call(bound_gather, cache, options)
    if stream is not None:
        stream = stream_number(stream)
    if max_seq_len is not None:
        max_seq_len = integer("max_seq_len", max_seq_len)
        status = -bound.SIZES
    elif stream is None:
        status = call(key, value, block_table, seq_lens)
    else:
        status = call(key, value, block_table, seq_lens, stream)
    if status:
        tensors = key, value, block_table, seq_lens
        run_described_gather(status, call, cache, options, stream, *tensors, max_seq_len)


def _gather_into_new(
    cache: CacheDesc,
    block_table: Any,
    seq_lens: Any,
    max_seq_len: int | None,
    dtype: DType | str | None,
    stream: int | None,
    options: GatherOptions,
) -> tuple[Any, Any]:
    instance("cache", cache, CacheDesc, A_CACHE)
    table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
    lengths = lens.to_numpy() if max_seq_len is None or lens.memory is Memory.HOST else None
    if max_seq_len is None:
        assert lengths is not None
        _check_lengths(lengths, table, cache.block_size)
        max_seq_len = int(lengths.max(initial=0))
    max_seq_len = integer("max_seq_len", max_seq_len)
    # Tokens without a source are zero: C zeroes them only where the table may have holes.
    zero_fill = options.zero_fill or table.has_holes
    zeros = not zero_fill and (lengths is None or bool((lengths < max_seq_len).any()))
    if dtype is None and (options.k_scale or options.v_scale):
        raise InvalidArgumentError(
            "dtype is None, expected the dtype to convert to, since scales are given and the "
            "outputs have none"
        )

    def new(tensor: TensorDesc, head_dim: int) -> Any:
        shape = (table.num_rows, max_seq_len, cache.num_kv_heads, head_dim)
        stored = tensor.dtype if dtype is None else DType.of(dtype, takes=_OUTPUTS)
        return empty_like_owner(tensor.owner, shape, stored, stream, zeros=zeros)

    key = new(cache.k, cache.head_dim)
    value = None if cache.v is None else new(cache.v, cache.v_head_dim)
    if zero_fill and not options.zero_fill:
        options = replace(options, zero_fill=True)
    _gather(cache, key, value, table, lens, max_seq_len, stream, options)
    return key, value


def _check_lengths(lengths: npt.NDArray[Any], table: BlockTable, block_size: int) -> None:
    """Refuses lengths for which no memory should be taken, in the words of the call itself."""
    room = _ANY_LENGTH
    if table.format is BlockTableFormat.PACKED:
        room = table.max_blocks_per_seq * block_size
    for row in np.flatnonzero((lengths < 0) | (lengths > room))[:1]:
        if lengths[row] < 0:
            raise OutOfRangeError(
                f"gather.seq_lens.lengths[{row}] is {lengths[row]}, expected at least 0 (spec 5.3)"
            )
        raise OutOfRangeError(
            f"row {row} needs tokens [0, 0 + {lengths[row]}), but gather.block_table holds {room} "
            "per row (spec 5.3)"
        )


def device_status(stream: int | None = None) -> None:
    """Waits for `stream` and raises if calls on DEVICE memory have skipped tokens.

    stream: CUDA stream; None: torch's current one, or the default stream where torch uses none

    Such a call skips tokens whose slot, block, length or scale is out of range, and counts them.
    Returns if the current device has skipped none since the last call of device_status.
    Raises OutOfRangeError, InvalidArgumentError; UnsupportedError if the stream is being captured.
    """
    stream = current_stream_here() if stream is None else stream
    abi.check(abi.library().kvx_device_status(stream_number(stream)))
