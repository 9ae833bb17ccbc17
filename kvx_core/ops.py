"""write_kv and gather_kv: new tokens into a paged cache, cached tokens out of it.

A call describes its tensors, hands them to libkvx and returns. A plan keeps the descriptions of the
cache and reads the call's tensors in C. Spec: 6.8 to 6.10, 7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from kvx_core import _abi, _bound
from kvx_core.descriptors import (
    BlockTable,
    CacheDesc,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    TensorDesc,
    check_index_memory,
    describe,
    require_writable,
    same_memory,
)
from kvx_core.errors import InvalidArgumentError
from kvx_core.tensors import (
    TensorLike,
    current_stream,
    current_stream_here,
    empty_like_owner,
    is_torch,
)
from kvx_core.types import DType, Layout, Memory, Transfer

Scale = ScaleDesc | TensorLike | float  # a number or a tensor of one element is per tensor


def write_kv(
    cache: CacheDesc,
    key: TensorLike | TensorDesc,
    value: TensorLike | TensorDesc | None,
    slots: SlotMapping | TensorLike | Sequence[int],
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    find_scales: bool = False,
    transfer: Transfer = Transfer.KERNEL,
    stream: int | None = None,
) -> None:
    """Writes new tokens into a paged cache, converting dtype and scale on the way.

    key, value: (>= num_tokens, num_kv_heads, head_dim), any strides and any dtype that converts to
                the cache's; rows past num_tokens are padding; value is None if there is no V
    slots:      (num_tokens,), int32 or int64, or a list of int; negative slots are skipped
    k_scale, v_scale: of an FP8 cache
    find_scales: find the scales on the way and store them in k_scale and v_scale, which are then
                per token and head
    transfer:   how a device moves the bytes
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
        and not find_scales
        and transfer is Transfer.KERNEL
        and stream is None
        and is_torch(key)
    ):
        status = _plain_write(cache)(key, value, slots)
        if not (status and _was_left(status)):
            return
    options = _WriteOptions(_scale(k_scale), _scale(v_scale), find_scales, transfer)
    _write(cache, _io(key), _io(value), SlotMapping.of(slots), options, stream)


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
    secondary_num_blocks: int = 0,
    transfer: Transfer = Transfer.KERNEL,
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
    transfer:    how a device moves the bytes
    stream:      CUDA stream; None: torch's current one if a tensor is torch's, else the
                 default stream. Ignored for HOST memory
    Mutates those rows of `out`, nothing else. Returns (key, value). With `out` a CUDA graph can
    capture it; blocks that are out of range are skipped on a device, and device_status tells.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: 6.10, 7, E.2
    """
    if (
        out is not None
        and max_seq_len is None
        and dtype is None
        and k_scale is None
        and v_scale is None
        and null_block_id == _abi.NO_NULL_BLOCK
        and not zero_fill
        and not secondary_num_blocks
        and transfer is Transfer.KERNEL
        and stream is None
        and is_torch(out[0])
    ):
        status = _plain_gather(cache)(*out, block_table, seq_lens)
        if not (status and _was_left(status)):
            return out[0], out[1]
    table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
    if out is None:
        scaled = k_scale is not None or v_scale is not None
        if max_seq_len is None:
            max_seq_len = int(lens.to_numpy().max(initial=0))
        _abi.check_uint32("max_seq_len", max_seq_len)
        out = _new_outputs(cache, table, max_seq_len, dtype, stream, scaled=scaled)
        zero_fill = True
    elif dtype is not None:
        raise InvalidArgumentError(
            f"dtype is {dtype!r}, expected None with out, whose tensors have dtypes of their own"
        )
    key, value = out
    options = _GatherOptions(
        _scale(k_scale), _scale(v_scale), null_block_id, zero_fill, secondary_num_blocks, transfer
    )
    _gather(cache, _io(key), _io(value), table, lens, max_seq_len, options, stream)
    return key, value


def device_status(stream: int | None = None) -> None:
    """Waits for `stream` and raises what device calls could not say before.

    stream: CUDA stream; None: torch's current one, or the default stream where torch uses none

    Calls on DEVICE memory skip tokens whose slot, block, length or scale is out of range, and
    remember. Returns if none has been skipped on the current device since it was last asked.
    Raises OutOfRangeError, InvalidArgumentError.
    """
    stream = current_stream_here() if stream is None else stream
    _abi.check(_abi.library().kvx_device_status(stream))


class WritePlan:
    """write_kv with all but its tensors kept: less than a microsecond per call.

    That is for torch tensors, read through DLPack (torch >= 2.10, or the package
    torch-c-dlpack-ext). Whatever else write_kv takes is described as write_kv does. Threads may
    share a plan.
    """

    __slots__ = ("__weakref__", "_cache", "_call", "_options", "_stream")

    def __init__(
        self,
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        find_scales: bool = False,
        transfer: Transfer = Transfer.KERNEL,
        stream: _abi.Stream = None,
    ) -> None:
        """Checks that tokens like these can be written; writes nothing.

        cache and the options: as for write_kv; the plan keeps them alive. `stream` may be a
        function, which each call asks
        key_like, value_like: (any, num_kv_heads, head_dim), such as calls will pass
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = cache
        self._options = _WriteOptions(_scale(k_scale), _scale(v_scale), find_scales, transfer)
        key, value = _io(key_like), _io(value_like)
        self._stream = _stream(stream, cache.k, key)
        _write(cache, key, value, SlotMapping.of(()), self._options, self._stream)
        self._call = _bound_write(cache, self._options, self._stream)

    def __call__(self, key: Any, value: Any, slots: Any) -> None:
        """write_kv(cache, key, value, slots). Raises as write_kv."""
        status = self._call(key, value, slots)
        if status and _was_left(status):
            mapping, stream = SlotMapping.of(slots), self._stream
            _write(self._cache, _io(key), _io(value), mapping, self._options, stream)


class GatherPlan:
    """gather_kv with all but its tensors kept: less than a microsecond per call.

    That is for torch tensors, read through DLPack (torch >= 2.10, or the package
    torch-c-dlpack-ext). Whatever else gather_kv takes is described as gather_kv does. Threads may
    share a plan.
    """

    __slots__ = ("__weakref__", "_cache", "_call", "_options", "_stream")

    def __init__(
        self,
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        null_block_id: int = _abi.NO_NULL_BLOCK,
        zero_fill: bool = False,
        secondary_num_blocks: int = 0,
        transfer: Transfer = Transfer.KERNEL,
        stream: _abi.Stream = None,
    ) -> None:
        """Checks that tokens can be gathered into outputs like these; writes nothing.

        cache and the options: as for gather_kv; the plan keeps them alive
        key_like, value_like: outputs as gather_kv takes them, with any number of rows
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = cache
        self._options = _GatherOptions(
            _scale(k_scale),
            _scale(v_scale),
            null_block_id,
            zero_fill,
            secondary_num_blocks,
            transfer,
        )
        key, value = _no_rows(_io(key_like)), _no_rows(_io(value_like))
        self._stream = _stream(stream, cache.k, key)
        table, lens = BlockTable.packed([]), SeqLens.of([])
        _gather(cache, key, value, table, lens, None, self._options, self._stream)
        self._call = _bound_gather(cache, self._options, self._stream)

    def __call__(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> None:
        """gather_kv(cache, block_table, seq_lens, out=(key, value)). Raises as gather_kv."""
        status = self._call(key, value, block_table, seq_lens)
        if status and _was_left(status):
            table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
            cache, options, stream = self._cache, self._options, self._stream
            _gather(cache, _io(key), _io(value), table, lens, None, options, stream)


def _was_left(status: int) -> bool:
    """Whether a bound call has left its tensors to Python; raises the exception of a failed one."""
    if status == _bound.NOT_TAKEN:
        return True
    _abi.check(status)
    return False


def _plain_write(cache: CacheDesc) -> _bound.Call:
    """The cache's bound write without options: made once, and kept with the cache."""
    call = cache.bound_calls.get("write")
    if call is None:
        options = _WriteOptions(None, None, False, Transfer.KERNEL)
        is_writable = all(tensor.writable for tensor in cache.tensors.values())
        call = _bound_plain(_bound_write, cache, options) if is_writable else _bound.take_nothing
        cache.bound_calls["write"] = call
    return call


def _plain_gather(cache: CacheDesc) -> _bound.Call:
    """The cache's bound gather without options: made once, and kept with the cache."""
    call = cache.bound_calls.get("gather")
    if call is None:
        options = _GatherOptions(None, None, _abi.NO_NULL_BLOCK, False, 0, Transfer.KERNEL)
        call = cache.bound_calls["gather"] = _bound_plain(_bound_gather, cache, options)
    return call


def _bound_plain(bind: Callable[..., _bound.Call], cache: CacheDesc, options: Any) -> _bound.Call:
    stream = current_stream(cache.k.owner)
    if stream is None and cache.k.memory is not Memory.HOST:
        return _bound.take_nothing  # each call's tensors tell
    return bind(cache, options, stream)


def _bound_write(cache: CacheDesc, options: _WriteOptions, stream: _abi.Stream) -> _bound.Call:
    like = _write_desc(cache, None, None, SlotMapping.of(()), options)
    memory = _index_memory(cache, options.transfer)
    return _bound.write(cache.to_c(), like, options.to_c(), memory, stream)


def _bound_gather(cache: CacheDesc, options: _GatherOptions, stream: _abi.Stream) -> _bound.Call:
    table, lens = BlockTable.packed([]), SeqLens.of([])
    like = _gather_desc(cache, None, None, table, lens, 0, options)
    memory = _index_memory(cache, options.transfer)
    return _bound.gather(cache.to_c(), like, options.to_c(), memory, stream)


def _index_memory(cache: CacheDesc, transfer: Transfer) -> Memory:
    """Where a call reads slots, tables and lengths."""
    return Memory.HOST if transfer is Transfer.COPY_ENGINE else cache.k.memory


# From here on only descriptors, which the callers hold until C is done: the structs made of them
# hold bare addresses.


@dataclass(frozen=True, slots=True)
class _WriteOptions:
    k_scale: ScaleDesc | None
    v_scale: ScaleDesc | None
    find_scales: bool
    transfer: Transfer

    def to_c(self) -> _abi.kvx_write_options_t:
        return _abi.kvx_write_options_t(
            flags=_abi.flags(find_scales=self.find_scales) | self.transfer
        )


@dataclass(frozen=True, slots=True)
class _GatherOptions:
    k_scale: ScaleDesc | None
    v_scale: ScaleDesc | None
    null_block_id: int
    zero_fill: bool
    secondary_num_blocks: int
    transfer: Transfer

    def to_c(self) -> _abi.kvx_gather_options_t:
        return _abi.kvx_gather_options_t(
            flags=_abi.flags(self.zero_fill) | self.transfer,
            null_block_plus_1=_abi.null_block_plus_1(self.null_block_id),
            secondary_num_blocks=self.secondary_num_blocks,
            k_scale=_abi.pointer_to(self.k_scale),
            v_scale=_abi.pointer_to(self.v_scale),
        )


def _write(
    cache: CacheDesc,
    key: TensorDesc,
    value: TensorDesc | None,
    slots: SlotMapping,
    options: _WriteOptions,
    stream: _abi.Stream,
) -> None:
    for name, tensor in cache.tensors.items():
        require_writable(f"cache.{name}", tensor)
    if options.find_scales:
        for name, scale in (("k_scale", options.k_scale), ("v_scale", options.v_scale)):
            if scale is not None:
                require_writable(name, scale)
    if slots.token_count:
        tensors = {"cache.k": cache.k, "key": key}
        check_index_memory({"slots": slots}, tensors, options.transfer)
    write = _write_desc(cache, key, value, slots, options)
    now = _abi.stream_now(_stream(stream, cache.k, key))
    _abi.check(_abi.library().kvx_write_kv_ext(cache.to_c(), write, options.to_c(), now))


def _gather(
    cache: CacheDesc,
    key: TensorDesc,
    value: TensorDesc | None,
    table: BlockTable,
    lens: SeqLens,
    max_seq_len: int | None,
    options: _GatherOptions,
    stream: _abi.Stream,
) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor is not None:
            require_writable(name, tensor)
    if table.num_rows:
        tensors = {"cache.k": cache.k, "key": key}
        check_index_memory({"block_table": table, "seq_lens": lens}, tensors, options.transfer)
    if max_seq_len is None:
        rows = max(table.num_rows, 1)
        max_seq_len = key.shape[1] if key.ndim == 4 else key.shape[0] // rows
    gather = _gather_desc(cache, key, value, table, lens, max_seq_len, options)
    now = _abi.stream_now(_stream(stream, cache.k, key))
    _abi.check(_abi.library().kvx_gather_kv_ext(cache.to_c(), gather, options.to_c(), now))


def _stream(stream: _abi.Stream, *tensors: TensorDesc | None) -> _abi.Stream:
    if stream is not None:
        return stream
    return current_stream(*(tensor.owner for tensor in tensors if tensor is not None))


def _write_desc(
    cache: CacheDesc,
    key: TensorDesc | None,
    value: TensorDesc | None,
    slots: SlotMapping,
    options: _WriteOptions,
) -> _abi.kvx_write_desc_t:
    k_scale, v_scale = options.k_scale, options.v_scale
    _check_scales_memory(cache, (k_scale, v_scale))
    write = _abi.kvx_write_desc_t(
        io=_io_desc(cache, key, value, slots.token_count), slots=slots.to_c()
    )
    if k_scale is not None:
        write.k_scale_desc = k_scale.to_c()
    if v_scale is not None:
        write.v_scale_desc = v_scale.to_c()
    return write


def _gather_desc(
    cache: CacheDesc,
    key: TensorDesc | None,
    value: TensorDesc | None,
    table: BlockTable,
    lens: SeqLens,
    max_seq_len: int,
    options: _GatherOptions,
) -> _abi.kvx_gather_desc_t:
    _check_scales_memory(cache, (options.k_scale, options.v_scale))
    return _abi.kvx_gather_desc_t(
        io=_io_desc(cache, key, value, table.num_rows * max_seq_len),
        block_table=table.to_c(),
        seq_lens=lens.to_c(),
        max_seq_len=max_seq_len,
    )


def _io_desc(
    cache: CacheDesc, key: TensorDesc | None, value: TensorDesc | None, num_tokens: int
) -> _abi.kvx_kv_io_desc_t:
    return _abi.kvx_kv_io_desc_t(
        key=_abi.kvx_tensor_desc_t() if key is None else key.to_c(),
        value=_abi.kvx_tensor_desc_t() if value is None else value.to_c(),
        num_tokens=num_tokens,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
    )


def _check_scales_memory(
    cache: CacheDesc, scales: tuple[ScaleDesc | None, ScaleDesc | None]
) -> None:
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None:
            same_memory(name, scale.memory, "cache.k is", cache.k.memory)


@overload
def _io(tensor: TensorLike | TensorDesc) -> TensorDesc: ...
@overload
def _io(tensor: TensorLike | TensorDesc | None) -> TensorDesc | None: ...
def _io(tensor: TensorLike | TensorDesc | None) -> TensorDesc | None:
    if tensor is None or isinstance(tensor, TensorDesc):
        return tensor
    return describe(tensor, Layout.BLOCK_CUSTOM)


def _scale(scale: Scale | None) -> ScaleDesc | None:
    return None if scale is None else ScaleDesc.of(scale)


@overload
def _no_rows(desc: TensorDesc) -> TensorDesc: ...
@overload
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None: ...
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None:
    return None if desc is None else replace(desc, shape=(0, *desc.shape[1:]))


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
