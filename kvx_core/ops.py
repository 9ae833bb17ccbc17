"""write_kv and gather_kv: new tokens into a paged cache, cached tokens out of it.

A call describes its tensors, hands them to libkvx and returns. Without options its torch tensors
are read in C. Spec: 6.8 to 6.10, 7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from kvx_core import _abi, _bound
from kvx_core.cache import CacheDesc
from kvx_core.calls import (
    A_CACHE,
    GatherOptions,
    Scale,
    WriteOptions,
    bound_gather,
    bound_write,
    gather,
    scale_desc,
    token_desc,
    was_left,
    write,
)
from kvx_core.errors import InvalidArgumentError
from kvx_core.streams import current_stream, current_stream_here, stream_number
from kvx_core.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.tensor_desc import TensorDesc
from kvx_core.tensors import TensorLike, empty_like_owner, is_torch
from kvx_core.types import DType, Memory, Transfer
from kvx_core.words import flag, instance, integer, wrong

_ALL_BLOCKS = 0
_Key = TypeVar("_Key", bound=TensorLike | TensorDesc)
_Value = TypeVar("_Value", bound=TensorLike | TensorDesc | None)


def write_kv(
    cache: CacheDesc,
    key: TensorLike | TensorDesc,
    value: TensorLike | TensorDesc | None,
    slots: SlotMapping | TensorLike | Sequence[int],
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    find_scales: bool = False,
    transfer: Transfer | str = Transfer.KERNEL,
    stream: int | None = None,
) -> None:
    """Writes new tokens into a paged cache, converting dtype and scale on the way.

    key, value: (>= num_tokens, num_kv_heads, head_dim), any strides and any dtype that converts to
                the cache's; rows past num_tokens are padding; value is None if there is no V
    slots:      (num_tokens,), int32 or int64, or a list of int; negative slots are skipped
    k_scale, v_scale: of an FP8 cache
    find_scales: find the scales on the way and store them in k_scale and v_scale, which are then
                per token and head
    transfer:   how a device moves the bytes: a Transfer or its name
    stream:     CUDA stream; None: torch's current one if a tensor is torch's, else the
                default stream. Ignored for HOST memory
    Mutates the slots named, with find_scales their scales too, nothing else. On a device it
    allocates nothing and waits for nothing: a CUDA graph can capture it. Slots that are out of
    range are skipped there; device_status tells.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: 6.9, 7
    """
    if (
        k_scale is None
        and v_scale is None
        and find_scales is False
        and transfer is Transfer.KERNEL
        and stream is None
        and is_torch(key)
    ):
        status = _plain_write(cache)(key, value, slots)
        if not (status and was_left(status)):
            return
    options = WriteOptions(
        scale_desc("k_scale", k_scale),
        scale_desc("v_scale", v_scale),
        find_scales,
        Transfer.of(transfer, "transfer"),
    )
    tokens = token_desc("key", key), token_desc("value", value)
    write(cache, *tokens, SlotMapping.of(slots), options, stream_number(stream))


@overload
def gather_kv(
    cache: CacheDesc,
    block_table: BlockTable | TensorLike | Sequence[Sequence[int]],
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    max_seq_len: int | None = None,
    out: tuple[_Key, _Value],
    dtype: None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    null_block_id: int = _abi.NO_NULL_BLOCK,
    zero_fill: bool = False,
    secondary_num_blocks: int = _ALL_BLOCKS,
    transfer: Transfer | str = Transfer.KERNEL,
    stream: int | None = None,
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
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    null_block_id: int = _abi.NO_NULL_BLOCK,
    zero_fill: bool = False,
    secondary_num_blocks: int = _ALL_BLOCKS,
    transfer: Transfer | str = Transfer.KERNEL,
    stream: int | None = None,
) -> tuple[Any, Any]: ...
def gather_kv(
    cache: CacheDesc,
    block_table: BlockTable | TensorLike | Sequence[Sequence[int]],
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    max_seq_len: int | None = None,
    out: tuple[Any, Any] | None = None,
    dtype: DType | str | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    null_block_id: int = _abi.NO_NULL_BLOCK,
    zero_fill: bool = False,
    secondary_num_blocks: int = _ALL_BLOCKS,
    transfer: Transfer | str = Transfer.KERNEL,
    stream: int | None = None,
) -> tuple[Any, Any]:
    """Gathers the first min(length, max_seq_len) cached tokens of every sequence.

    block_table: a BlockTable, or block ids (seq_count, max_blocks_per_seq), int32 or int64; entries
                 past a sequence's blocks are never read, negative ones are null
    seq_lens:    (seq_count,), int32 or int64, or a list of int
    max_seq_len: rows per sequence; None: those of `out`, or the longest sequence, for which lengths
                 on a device are read back
    out:         (key, value) to fill: (seq_count * beam_width, max_seq_len, num_kv_heads, head_dim)
                 or the same rows as 3-D, any strides and any dtype that the cache's converts to;
                 value is None if there is no V. None: new tensors of torch or numpy, whichever the
                 cache's memory belongs to
    dtype:       of new tensors; None: the cache's
    k_scale, v_scale: of an FP8 cache
    null_block_id: a block id that holds nothing (vLLM: 0)
    zero_fill:   zero the rows without a source, of null blocks and past a sequence's length; they
                 keep what they held otherwise. New tensors are always zero there
    secondary_num_blocks: blocks in the secondary pool; 0: as many as num_blocks
    transfer:    how a device moves the bytes: a Transfer or its name
    stream:      CUDA stream; None: torch's current one if a tensor is torch's, else the
                 default stream. Ignored for HOST memory
    Mutates those rows of `out`, nothing else. Returns (key, value): those of `out`, or new ones.
    With `out` a CUDA graph can capture it; blocks that are out of range are skipped on a device,
    and device_status tells.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: 6.10, 7, E.2
    """
    key: Any = None
    value: Any = None
    if out is not None:
        try:
            key, value = out
        except (TypeError, ValueError):
            raise wrong("out", out, "(key, value) or, where there is no V, (key, None)") from None
    if (
        key is not None
        and max_seq_len is None
        and dtype is None
        and k_scale is None
        and v_scale is None
        and null_block_id is _abi.NO_NULL_BLOCK  # the defaults: others may have no truth value
        and zero_fill is False
        and secondary_num_blocks is _ALL_BLOCKS
        and transfer is Transfer.KERNEL
        and stream is None
        and is_torch(key)
    ):
        status = _plain_gather(cache)(key, value, block_table, seq_lens)
        if not (status and was_left(status)):
            return key, value
    table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
    scales = scale_desc("k_scale", k_scale), scale_desc("v_scale", v_scale)
    if out is None:
        if max_seq_len is None:
            max_seq_len = int(lens.to_numpy().max(initial=0))
        max_seq_len = integer("max_seq_len", max_seq_len)
        instance("cache", cache, CacheDesc, A_CACHE)
        key, value = _new_outputs(cache, table, max_seq_len, dtype, stream, scaled=any(scales))
    elif dtype is not None:
        raise InvalidArgumentError(
            f"dtype is {dtype!r}, expected None with out, whose tensors have dtypes of their own"
        )
    elif max_seq_len is not None:
        max_seq_len = integer("max_seq_len", max_seq_len)
    options = GatherOptions(
        *scales,
        null_block_id,
        flag("zero_fill", zero_fill) or out is None,
        secondary_num_blocks,
        Transfer.of(transfer, "transfer"),
    )
    tokens = token_desc("key", key), token_desc("value", value)
    gather(cache, *tokens, table, lens, max_seq_len, options, stream_number(stream))
    return key, value


def device_status(stream: int | None = None) -> None:
    """Waits for `stream` and raises what device calls could not say before.

    stream: CUDA stream; None: torch's current one, or the default stream where torch uses none

    Calls on DEVICE memory skip tokens whose slot, block, length or scale is out of range, and
    remember. Returns if none has been skipped on the current device since it was last asked.
    Raises OutOfRangeError, InvalidArgumentError.
    """
    stream = current_stream_here() if stream is None else stream
    _abi.check(_abi.library().kvx_device_status(stream_number(stream)))


def _plain_write(cache: CacheDesc) -> _bound.Call:
    """The cache's bound write without options: made once, and kept with the cache."""
    try:
        call = cache.bound_calls.get("write")
    except AttributeError:
        raise wrong("cache", cache, A_CACHE) from None
    if call is None:
        options = WriteOptions(None, None, False, Transfer.KERNEL)
        is_writable = all(tensor.writable for tensor in cache.tensors.values())
        call = _bound_plain(bound_write, cache, options) if is_writable else _bound.take_nothing
        cache.bound_calls["write"] = call
    return call


def _plain_gather(cache: CacheDesc) -> _bound.Call:
    """The cache's bound gather without options: made once, and kept with the cache."""
    try:
        call = cache.bound_calls.get("gather")
    except AttributeError:
        raise wrong("cache", cache, A_CACHE) from None
    if call is None:
        options = GatherOptions(None, None, _abi.NO_NULL_BLOCK, False, 0, Transfer.KERNEL)
        call = cache.bound_calls["gather"] = _bound_plain(bound_gather, cache, options)
    return call


def _bound_plain(bind: Callable[..., _bound.Call], cache: CacheDesc, options: Any) -> _bound.Call:
    stream = current_stream(cache.k.owner)
    if stream is None and cache.k.memory is not Memory.HOST:
        return _bound.take_nothing  # each call's tensors tell
    return bind(cache, options, stream)


def _new_outputs(
    cache: CacheDesc,
    table: BlockTable,
    max_seq_len: int,
    dtype: DType | str | None,
    stream: int | None,
    *,
    scaled: bool,
) -> tuple[Any, Any]:
    if dtype is None and scaled:
        raise InvalidArgumentError(
            "dtype is None, expected the dtype to convert to, since scales are given and the "
            "outputs have none"
        )

    def new(tensor: TensorDesc, head_dim: int) -> Any:
        shape = (table.num_rows, max_seq_len, cache.num_kv_heads, head_dim)
        stored = tensor.dtype if dtype is None else DType.of(dtype)
        return empty_like_owner(tensor.owner, shape, stored, stream)

    key = new(cache.k, cache.head_dim)
    return key, None if cache.v is None else new(cache.v, cache.v_head_dim)
