"""write_kv and gather_kv: new tokens into a paged cache, cached tokens out of it.

A call describes its tensors, hands them to libkvx and returns. A plan keeps the descriptions and
refreshes what changes from call to call. Spec: 6.8 to 6.10, 7
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

from kvx_core import _abi
from kvx_core.descriptors import (
    BlockTable,
    CacheDesc,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    TensorDesc,
    describe,
    require_writable,
    same_memory,
)
from kvx_core.errors import InvalidArgumentError
from kvx_core.tensors import TensorLike, empty_like_owner, is_torch
from kvx_core.types import DType, Layout

Scale = ScaleDesc | TensorLike | float  # a number or a tensor of one element is per tensor


def write_kv(
    cache: CacheDesc,
    key: TensorLike | TensorDesc,
    value: TensorLike | TensorDesc | None,
    slots: SlotMapping | TensorLike | Sequence[int],
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    stream: int | None = None,
) -> None:
    """Writes new tokens into a paged cache, converting dtype and scale on the way.

    key, value: (>= num_tokens, num_kv_heads, head_dim), any strides and any dtype that converts to
                the cache's; rows past num_tokens are padding; value is None if there is no V
    slots:      (num_tokens,), int32 or int64, or a list of int; negative slots are skipped
    k_scale, v_scale: of an FP8 cache
    stream:     CUDA stream; None: the default stream. Ignored for HOST memory
    Mutates the slots named, nothing else.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: 6.9, 7
    """
    scales = _scale(k_scale), _scale(v_scale)
    _write(cache, _io(key), _io(value), SlotMapping.of(slots), scales, stream)


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
    stream:      CUDA stream; None: the default stream. Ignored for HOST memory
    Mutates those rows of `out`, nothing else. Returns (key, value).
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: 6.10, 7, E.2
    """
    table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
    if out is None:
        scaled = k_scale is not None or v_scale is not None
        if max_seq_len is None:
            max_seq_len = int(lens.to_numpy().max(initial=0))
        _abi.check_uint32("max_seq_len", max_seq_len)
        out = _new_outputs(cache, table, max_seq_len, dtype, scaled=scaled)
        zero_fill = True
    elif dtype is not None:
        raise InvalidArgumentError(
            f"dtype is {dtype!r}, expected None with out, whose tensors have dtypes of their own"
        )
    key, value = out
    options = _GatherOptions(
        _scale(k_scale), _scale(v_scale), null_block_id, zero_fill, secondary_num_blocks
    )
    _gather(cache, _io(key), _io(value), table, lens, max_seq_len, options, stream)
    return key, value


class WritePlan:
    """write_kv with its descriptions kept: one to two microseconds per call.

    A plan remembers the last call with each number of tokens. Torch tensors of the same dtypes,
    devices, shapes and strides then cost a refresh of their addresses; whatever else write_kv takes
    is described anew, as write_kv does. Threads may share a plan.
    """

    def __init__(
        self,
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        stream: int | None = None,
    ) -> None:
        """Checks that tokens like these can be written; writes nothing.

        cache, k_scale, v_scale, stream: as for write_kv; the plan keeps them alive
        key_like, value_like: (any, num_kv_heads, head_dim), such as calls will pass
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = cache
        self._scales = _scale(k_scale), _scale(v_scale)
        self._stream = stream
        self._bound = _BoundCalls()
        _write(cache, _io(key_like), _io(value_like), SlotMapping.of(()), self._scales, stream)

    def __call__(self, key: Any, value: Any, slots: Any) -> None:
        """write_kv(cache, key, value, slots). Raises as write_kv."""
        try:
            status = self._bound.calls[slots.numel()](key, value, slots)
        except (AttributeError, KeyError, TypeError):  # the first such call, or no torch tensors
            status = None
        if status is None:
            mapping = SlotMapping.of(slots)
            _write(self._cache, _io(key), _io(value), mapping, self._scales, self._stream)
            if _are_torch(key, value, slots):
                self._bound.add(slots.numel(), self._bind(key, value, slots))
        elif status:
            _abi.check(status)

    def _bind(self, key: Any, value: Any, slots: Any) -> _BoundCall:
        write = _write_desc(self._cache, _io(key), _io(value), SlotMapping.of(slots), self._scales)
        words = _abi.words(write)  # keeps `write` alive
        at = partial(_abi.word, _abi.kvx_write_desc_t)
        key_data, value_data = at("io", "key", "data"), at("io", "value", "data")
        slots_data = at("slots", "slots")
        cache_c, write_c = _abi.address_of(self._cache.to_c()), _abi.address_of(write)
        kvx_write_kv, stream = _abi.library().kvx_write_kv, self._stream
        like = _like(key, value, slots)

        def call(key: Any, value: Any, slots: Any) -> int | None:
            if not like(key, value, slots):
                return None
            words[key_data] = key.data_ptr()
            if value is not None:
                words[value_data] = value.data_ptr()
            words[slots_data] = slots.data_ptr()
            return kvx_write_kv(cache_c, write_c, stream)  # type: ignore[no-any-return]

        return call


class GatherPlan:
    """gather_kv with its descriptions kept.

    A plan remembers the last call with each number of sequences. Torch tensors of the same dtypes,
    devices, shapes and strides then cost a refresh of their addresses; whatever else gather_kv
    takes is described anew, as gather_kv does. Threads may share a plan.
    """

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
        stream: int | None = None,
    ) -> None:
        """Checks that tokens can be gathered into outputs like these; writes nothing.

        cache and the options: as for gather_kv; the plan keeps them alive
        key_like, value_like: outputs as gather_kv takes them, with any number of rows
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = cache
        self._options = _GatherOptions(
            _scale(k_scale), _scale(v_scale), null_block_id, zero_fill, secondary_num_blocks
        )
        self._options_c = self._options.to_c()
        self._stream = stream
        self._bound = _BoundCalls()
        key, value = _no_rows(_io(key_like)), _no_rows(_io(value_like))
        self._gather(key, value, BlockTable.packed([]), SeqLens.of([]))

    def __call__(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> None:
        """gather_kv(cache, block_table, seq_lens, out=(key, value)). Raises as gather_kv."""
        try:
            call = self._bound.calls[seq_lens.numel()]
            status = call(key, value, block_table, seq_lens)
        except (AttributeError, KeyError, TypeError):  # the first such call, or no torch tensors
            status = None
        if status is None:
            table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
            self._gather(_io(key), _io(value), table, lens)
            if _are_torch(key, value, block_table, seq_lens):
                self._bound.add(seq_lens.numel(), self._bind(key, value, block_table, seq_lens))
        elif status:
            _abi.check(status)

    def _gather(
        self, key: TensorDesc, value: TensorDesc | None, table: BlockTable, lens: SeqLens
    ) -> None:
        _gather(self._cache, key, value, table, lens, None, self._options, self._stream)

    def _bind(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> _BoundCall:
        table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
        gather = _gather_desc(self._cache, _io(key), _io(value), table, lens, None)
        words = _abi.words(gather)  # keeps `gather` alive
        at = partial(_abi.word, _abi.kvx_gather_desc_t)
        key_data, value_data = at("io", "key", "data"), at("io", "value", "data")
        indices, lengths = at("block_table", "indices"), at("seq_lens", "lengths")
        cache_c, gather_c = _abi.address_of(self._cache.to_c()), _abi.address_of(gather)
        options_c = _abi.address_of(self._options_c)
        kvx_gather_kv_ext, stream = _abi.library().kvx_gather_kv_ext, self._stream
        like = _like(key, value, block_table, seq_lens)

        def call(key: Any, value: Any, block_table: Any, seq_lens: Any) -> int | None:
            if not like(key, value, block_table, seq_lens):
                return None
            words[key_data] = key.data_ptr()
            if value is not None:
                words[value_data] = value.data_ptr()
            words[indices] = block_table.data_ptr()
            words[lengths] = seq_lens.data_ptr()
            return kvx_gather_kv_ext(cache_c, gather_c, options_c, stream)  # type: ignore[no-any-return]

        return call


# The status of the call, or None, nothing done, for tensors that are not like those it is bound to.
_BoundCall = Callable[..., int | None]


class _BoundCalls(threading.local):
    """A thread's own bound calls, each with a struct of its own: calls drop the GIL."""

    def __init__(self) -> None:
        self.calls: dict[int, _BoundCall] = {}

    def add(self, count: int, call: _BoundCall) -> None:
        if len(self.calls) >= 256:
            self.calls.clear()
        self.calls[count] = call


def _are_torch(*tensors: object) -> bool:
    return all(tensor is None or is_torch(tensor) for tensor in tensors)


def _like(*tensors: Any) -> Callable[..., bool]:
    """A test that tensors are like these torch tensors in dtype, device, shape and strides.

    Where one of these is None the other is None too.
    """
    absent = [tensor is None for tensor in tensors]
    present = [tensor for tensor in tensors if tensor is not None]
    check = _guard(present)
    if not any(absent):
        return check
    return lambda *others: (
        [other is None for other in others] == absent
        and check(*(other for other in others if other is not None))
    )


# Releases whose TensorGuards, made for torch.compile, compares all tensors in one call. It is no
# public interface, so others compare signatures, which costs half a microsecond more.
_TORCH_WITH_GUARDS = ("2.13.",)


def _guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    if sys.modules["torch"].__version__.startswith(_TORCH_WITH_GUARDS):
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check
    signatures = [_signature(tensor) for tensor in tensors]
    return lambda *others: [_signature(other) for other in others] == signatures


def _signature(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


# From here on only descriptors, which the callers hold until C is done: the structs made of them
# hold bare addresses.

_Scales = tuple[ScaleDesc | None, ScaleDesc | None]  # of K and of V


@dataclass(frozen=True, slots=True)
class _GatherOptions:
    k_scale: ScaleDesc | None
    v_scale: ScaleDesc | None
    null_block_id: int
    zero_fill: bool
    secondary_num_blocks: int

    def to_c(self) -> _abi.kvx_gather_options_t:
        return _abi.kvx_gather_options_t(
            flags=_abi.FLAG_ZERO_FILL if self.zero_fill else 0,
            null_block_id=self.null_block_id,
            secondary_num_blocks=self.secondary_num_blocks,
            k_scale=_abi.pointer_to(self.k_scale),
            v_scale=_abi.pointer_to(self.v_scale),
        )


def _write(
    cache: CacheDesc,
    key: TensorDesc,
    value: TensorDesc | None,
    slots: SlotMapping,
    scales: _Scales,
    stream: int | None,
) -> None:
    for name, tensor in cache.tensors.items():
        require_writable(f"cache.{name}", tensor)
    write = _write_desc(cache, key, value, slots, scales)
    kvx_write_kv, ref = _abi.library().kvx_write_kv, _abi.reference
    _abi.check(kvx_write_kv(ref(cache.to_c()), ref(write), stream))


def _gather(
    cache: CacheDesc,
    key: TensorDesc,
    value: TensorDesc | None,
    table: BlockTable,
    lens: SeqLens,
    max_seq_len: int | None,
    options: _GatherOptions,
    stream: int | None,
) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor is not None:
            require_writable(name, tensor)
    _check_scales_memory(cache, (options.k_scale, options.v_scale))
    gather = _gather_desc(cache, key, value, table, lens, max_seq_len)
    kvx_gather_kv_ext, ref = _abi.library().kvx_gather_kv_ext, _abi.reference
    _abi.check(kvx_gather_kv_ext(ref(cache.to_c()), ref(gather), ref(options.to_c()), stream))


def _write_desc(
    cache: CacheDesc,
    key: TensorDesc,
    value: TensorDesc | None,
    slots: SlotMapping,
    scales: _Scales,
) -> _abi.kvx_write_desc_t:
    if slots.token_count:
        same_memory("slots", slots.memory, "cache.k", cache.k.memory)
    _check_scales_memory(cache, scales)
    k_scale, v_scale = scales
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
    key: TensorDesc,
    value: TensorDesc | None,
    table: BlockTable,
    lens: SeqLens,
    max_seq_len: int | None,
) -> _abi.kvx_gather_desc_t:
    rows = table.num_rows
    if rows:
        same_memory("block_table", table.memory, "cache.k", cache.k.memory)
        same_memory("seq_lens", lens.memory, "cache.k", cache.k.memory)
    if max_seq_len is None:
        max_seq_len = key.shape[1] if key.ndim == 4 else key.shape[0] // max(rows, 1)
    return _abi.kvx_gather_desc_t(
        io=_io_desc(cache, key, value, rows * max_seq_len),
        block_table=table.to_c(),
        seq_lens=lens.to_c(),
        max_seq_len=max_seq_len,
    )


def _io_desc(
    cache: CacheDesc, key: TensorDesc, value: TensorDesc | None, num_tokens: int
) -> _abi.kvx_kv_io_desc_t:
    return _abi.kvx_kv_io_desc_t(
        key=key.to_c(),
        value=_abi.kvx_tensor_desc_t() if value is None else value.to_c(),
        num_tokens=num_tokens,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
    )


def _check_scales_memory(cache: CacheDesc, scales: _Scales) -> None:
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None:
            same_memory(name, scale.memory, "cache.k", cache.k.memory)


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
        return empty_like_owner(
            tensor.owner, shape, tensor.dtype if dtype is None else DType.of(dtype)
        )

    key = new(cache.k, cache.head_dim)
    return key, None if cache.v is None else new(cache.v, cache.v_head_dim)
