"""Calls of libkvx made of descriptors: what write_kv, gather_kv and the plans have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

from kvx_core import _abi, _bound
from kvx_core.cache import CacheDesc
from kvx_core.memory_checks import check_index_memory, same_memory
from kvx_core.scales import ScaleDesc
from kvx_core.streams import call_stream
from kvx_core.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.tensor_desc import TensorDesc, describe
from kvx_core.tensors import TensorLike, is_torch
from kvx_core.types import Layout, Memory, Transfer
from kvx_core.words import fix, flag, instance, int64, integer

A_CACHE = "a CacheDesc: CacheDesc.from_kv(describe(k, layout), describe(v, layout))"
Scale = ScaleDesc | TensorLike | float  # a number or a tensor of one element is per tensor


def was_left(status: int) -> bool:
    """Whether a bound call has left its tensors to Python; raises the exception of a failed one."""
    if status == _bound.NOT_TAKEN:
        return True
    _abi.check(status)
    return False


def bound_write(cache: CacheDesc, options: WriteOptions, stream: _abi.Stream) -> _bound.Call:
    """write_kv with all but its tensors bound."""
    _require_cache_in_place(cache, options)
    like = _write_desc(cache, None, None, SlotMapping.of(()), options)
    memory = _index_memory(cache, options.transfer)
    owners = _torch_owners(cache, options)
    return _bound.write(cache.to_c(), like, options.to_c(), memory, stream, owners)


def bound_gather(cache: CacheDesc, options: GatherOptions, stream: _abi.Stream) -> _bound.Call:
    """gather_kv with all but its tensors bound."""
    _require_cache_in_place(cache, options)
    table, lens = BlockTable.packed([]), SeqLens.of([])
    like = _gather_desc(cache, None, None, table, lens, 0, options)
    memory = _index_memory(cache, options.transfer)
    owners = _torch_owners(cache, options)
    return _bound.gather(cache.to_c(), like, options.to_c(), memory, stream, owners)


def _scales(options: WriteOptions | GatherOptions) -> dict[str, ScaleDesc]:
    scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    return {name: scale for name, scale in scales.items() if scale is not None}


def _torch_owners(cache: CacheDesc, options: WriteOptions | GatherOptions) -> list[Any]:
    """The torch tensors that a cache and the scales of a call describe."""
    scales = (scale.owner for scale in _scales(options).values())
    return [*cache.torch_owners, *filter(is_torch, scales)]


def _require_cache_in_place(cache: CacheDesc, options: WriteOptions | GatherOptions) -> None:
    instance("cache", cache, CacheDesc, A_CACHE)
    cache.require_in_place("cache")
    for name, scale in _scales(options).items():
        scale.require_in_place(name)


def _index_memory(cache: CacheDesc, transfer: Transfer) -> Memory:
    """Where a call reads slots, tables and lengths."""
    return Memory.HOST if transfer is Transfer.COPY_ENGINE else cache.k.memory


# From here on only descriptors, which the callers hold until C is done: the structs made of them
# hold bare addresses.


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of write_kv."""

    k_scale: ScaleDesc | None
    v_scale: ScaleDesc | None
    find_scales: bool
    transfer: Transfer

    def __post_init__(self) -> None:
        fix(self, find_scales=flag)

    def to_c(self) -> _abi.kvx_write_options_t:
        return _abi.kvx_write_options_t(
            flags=_abi.flags(find_scales=self.find_scales) | self.transfer
        )


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of gather_kv."""

    k_scale: ScaleDesc | None
    v_scale: ScaleDesc | None
    null_block_id: int
    zero_fill: bool
    secondary_num_blocks: int
    transfer: Transfer

    def __post_init__(self) -> None:
        fix(
            self,
            null_block_id=int64,
            zero_fill=flag,
            secondary_num_blocks=integer,
        )

    def to_c(self) -> _abi.kvx_gather_options_t:
        return _abi.kvx_gather_options_t(
            flags=_abi.flags(self.zero_fill) | self.transfer,
            null_block_plus_1=_abi.null_block_plus_1(self.null_block_id),
            secondary_num_blocks=self.secondary_num_blocks,
            k_scale=_abi.pointer_to(self.k_scale),
            v_scale=_abi.pointer_to(self.v_scale),
        )


def write(
    cache: CacheDesc,
    key: TensorDesc,
    value: TensorDesc | None,
    slots: SlotMapping,
    options: WriteOptions,
    stream: _abi.Stream,
) -> None:
    """write_kv of descriptors."""
    _require_cache_in_place(cache, options)
    for name, tensor in cache.tensors.items():
        tensor.require_writable(f"cache.{name}")
    if options.find_scales:
        for name, scale in (("k_scale", options.k_scale), ("v_scale", options.v_scale)):
            if scale is not None:
                scale.require_writable(name)
    if slots.token_count:
        tensors = {"cache.k": cache.k, "key": key}
        check_index_memory({"slots": slots}, tensors, options.transfer)
    write = _write_desc(cache, key, value, slots, options)
    now = _abi.stream_now(call_stream(stream, cache.k.owner, key.owner))
    _abi.check(_abi.library().kvx_write_kv_ext(cache.to_c(), write, options.to_c(), now))


def gather(
    cache: CacheDesc,
    key: TensorDesc,
    value: TensorDesc | None,
    table: BlockTable,
    lens: SeqLens,
    max_seq_len: int | None,
    options: GatherOptions,
    stream: _abi.Stream,
) -> None:
    """gather_kv of descriptors; max_seq_len None: the rows of `key`."""
    _require_cache_in_place(cache, options)
    for name, tensor in (("key", key), ("value", value)):
        if tensor is not None:
            tensor.require_writable(name)
    if table.num_rows:
        tensors = {"cache.k": cache.k, "key": key}
        check_index_memory({"block_table": table, "seq_lens": lens}, tensors, options.transfer)
    if max_seq_len is None:
        rows = max(table.num_rows, 1)
        max_seq_len = key.shape[1] if key.ndim == 4 else sum(key.shape[:1]) // rows
    gather = _gather_desc(cache, key, value, table, lens, max_seq_len, options)
    now = _abi.stream_now(call_stream(stream, cache.k.owner, key.owner))
    _abi.check(_abi.library().kvx_gather_kv_ext(cache.to_c(), gather, options.to_c(), now))


def _write_desc(
    cache: CacheDesc,
    key: TensorDesc | None,
    value: TensorDesc | None,
    slots: SlotMapping,
    options: WriteOptions,
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
    options: GatherOptions,
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
def token_desc(name: str, tensor: TensorLike | TensorDesc) -> TensorDesc: ...
@overload
def token_desc(name: str, tensor: TensorLike | TensorDesc | None) -> TensorDesc | None: ...
def token_desc(name: str, tensor: TensorLike | TensorDesc | None) -> TensorDesc | None:
    """A key or value tensor of a call."""
    if isinstance(tensor, TensorDesc) or (tensor is None and name.startswith("value")):
        return tensor
    return describe(tensor, Layout.BLOCK_CUSTOM, name=name)  # type: ignore[arg-type]


def scale_desc(name: str, scale: Scale | None) -> ScaleDesc | None:
    """The scales of a call."""
    return None if scale is None else ScaleDesc.of(scale, name=name)
