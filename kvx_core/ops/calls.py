"""The one route of a write and of a gather, for functions and plans alike.

A call is bound to its cache and options once (bound.py) and takes tensors. Those that C cannot
read are described here, and the same call takes the descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from kvx_core._c import abi, bound
from kvx_core.argument_checks import bad_argument, instance
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.in_place import may_move
from kvx_core.desc.memory_checks import same_memory
from kvx_core.desc.placing import where_read
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tables import DESCRIPTORS, BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensor_desc import TensorDesc, describe
from kvx_core.desc.tensors import TensorLike, owning_device
from kvx_core.errors import InternalError
from kvx_core.ops.options import GatherOptions, WriteOptions
from kvx_core.ops.streams import call_stream
from kvx_core.types import Layout, Memory, Transfer

A_CACHE = "a CacheDesc: CacheDesc.from_kv(describe(k, layout), describe(v, layout))"
_MOST_CALLS = 16  # that a cache keeps: one for each set of options without scales

_Options = TypeVar("_Options", WriteOptions, GatherOptions)


def cached_call(
    bind: Callable[[CacheDesc, _Options], bound.Call], cache: CacheDesc, options: _Options
) -> bound.Call:
    """The bound call of a cache and options. Without scales it is kept for the next time.

    Raises InvalidArgumentError.
    """
    try:
        kept = cache.bound_calls
    except AttributeError:
        raise bad_argument("cache", cache, A_CACHE) from None
    call = None if kept is None else kept.calls.get(options.key)
    if call is None:
        call = bind(cache, options)
        if options.key and cache.bound_calls is not None:
            calls = cache.bound_calls.calls
            if len(calls) >= _MOST_CALLS:
                calls.clear()
            calls[options.key] = call
    return call


def bound_write(cache: CacheDesc, options: WriteOptions, stream: abi.Stream = None) -> bound.Call:
    """Binds write_kv to all but its tensors: (key, value, slots) -> 0, a status, or less than 0.

    A caller passes a result other than 0 to `run_described_write`.
    Raises InvalidArgumentError.
    """
    held = require_cache(cache, options)
    for name, tensor in cache.tensors.items():
        tensor.require_writable(f"cache.{name}")
    if options.find_scales:
        for name, scale in _scales(options).items():
            scale.require_writable(name)
    binding = _binding(cache, held, options, stream)
    return bound.write(binding, cache.to_c(), write_like(cache, options), options.to_c())


def write_like(cache: CacheDesc, options: WriteOptions) -> abi.kvx_write_desc_t:
    """A write of no tokens, whose key and value are to be filled in."""
    like = abi.kvx_write_desc_t(io=_io_desc(cache), slots=SlotMapping.of(()).to_c())
    for name, scale in _scales(options).items():
        setattr(like, f"{name}_desc", scale.to_c())
    return like


def bound_gather(cache: CacheDesc, options: GatherOptions, stream: abi.Stream = None) -> bound.Call:
    """Binds gather_kv to all but its tensors: (key, value, table, lens) -> 0, a status, or less
    than 0.

    A caller passes a result other than 0 to `run_described_gather`.
    Raises InvalidArgumentError.
    """
    held = require_cache(cache, options)
    binding = _binding(cache, held, options, stream)
    return bound.gather(binding, cache.to_c(), gather_like(cache), options.to_c())


def gather_like(cache: CacheDesc) -> abi.kvx_gather_desc_t:
    """A gather of no tokens, whose key and value are to be filled in."""
    return abi.kvx_gather_desc_t(
        io=_io_desc(cache), block_table=BlockTable.packed([]).to_c(), seq_lens=SeqLens.of(()).to_c()
    )


def run_described_write(
    status: int,
    call: bound.Call,
    cache: CacheDesc,
    options: WriteOptions,
    stream: abi.Stream,
    key: Any,
    value: Any,
    slots: Any,
) -> None:
    """Finishes a write whose bound call returned `status`. Raises as write_kv."""
    if status < 0:
        left = -status
        found_key = token_desc("key", key) if left & bound.KEY else None
        found_value = token_desc("value", value) if left & bound.VALUE else None
        if _is_elsewhere(found_key, cache):
            left |= bound.INDICES
        found_slots = SlotMapping.of(slots) if left & bound.INDICES else None
        require_cache(cache, options)
        now = abi.stream_now(call_stream(stream, cache.k.owner, _owner(key)))
        if found_slots is not None and found_slots.token_count:
            tensors = {"cache.k": cache.k} | ({"key": found_key} if found_key else {})
            given = {"slots": found_slots}
            found_slots = where_read(given, tensors, options.transfer, now)["slots"]
        structs = _structs(found_key, found_value, found_slots)
        status = call(key, value, slots, now, *map(abi.address_of, structs))
    _check(status)


def run_described_gather(
    status: int,
    call: bound.Call,
    cache: CacheDesc,
    options: GatherOptions,
    stream: abi.Stream,
    key: Any,
    value: Any,
    block_table: Any,
    seq_lens: Any,
    max_seq_len: int | None = None,
) -> None:
    """Finishes a gather whose bound call returned `status`. Raises as gather_kv.

    max_seq_len: None: as many tokens as a sequence has in `key`
    """
    if status < 0:
        left = -status
        found_key = token_desc("key", key) if left & bound.KEY else None
        found_value = token_desc("value", value) if left & bound.VALUE else None
        if _is_elsewhere(found_key, cache):
            left |= bound.INDICES | bound.LENS
        table = BlockTable.of(block_table) if left & bound.INDICES else None
        lens = SeqLens.of(seq_lens) if left & bound.LENS else None
        require_cache(cache, options)
        for name, tensor in (("key", found_key), ("value", found_value)):
            if tensor is not None:
                tensor.require_writable(name)
        now = abi.stream_now(call_stream(stream, cache.k.owner, _owner(key)))
        if table is None or table.num_rows:
            tensors = {"cache.k": cache.k} | ({"key": found_key} if found_key else {})
            indices: dict[str, Any] = {"block_table": table, "seq_lens": lens}
            indices = where_read(indices, tensors, options.transfer, now)
            table, lens = indices["block_table"], indices["seq_lens"]
        structs = _structs(found_key, found_value, table, lens)
        addresses = map(abi.address_of, structs)
        status = call(key, value, block_table, seq_lens, now, *addresses, max_seq_len)
        if status == -bound.SIZES:
            _check_counts(key, block_table, max_seq_len)
        elif status < 0 and left | -status != left:
            return run_described_gather(
                -(left | -status),
                call,
                cache,
                options,
                stream,
                key,
                value,
                block_table,
                seq_lens,
                max_seq_len,
            )
    _check(status)


def _check(status: int) -> None:
    if status < 0:
        raise InternalError(f"a bound call has left {-status:#b} of tensors that it had read")
    abi.check(status)


def _check_counts(key: Any, block_table: Any, max_seq_len: int | None) -> None:
    """Raises for a number of tokens that does not fit 32 bits."""
    table = BlockTable.of(block_table)
    gather_sizes(token_desc("key", key) if max_seq_len is None else None, table, max_seq_len)


def gather_sizes(
    key: TensorDesc | None, table: BlockTable, max_seq_len: int | None = None
) -> tuple[int, int]:
    """num_tokens and max_seq_len of a gather, by default the rows of `key`.

    Raises InvalidArgumentError.
    """
    if max_seq_len is None:
        shape = key.shape if key is not None else ()
        max_seq_len = shape[1] if len(shape) == 4 else sum(shape[:1]) // max(table.num_rows, 1)
    abi.check_uint32("max_seq_len", max_seq_len)
    abi.check_uint32("num_tokens", table.num_rows * max_seq_len)
    return table.num_rows * max_seq_len, max_seq_len


def _is_elsewhere(key: TensorDesc | None, cache: CacheDesc) -> bool:
    """Whether the indices may have to be in the key's memory, while C would expect the cache's."""
    return key is not None and key.memory is not cache.k.memory


def _structs(*descs: abi.Described | None) -> list[Any]:
    """C structs of descriptors, which the caller keeps until the call is over."""
    return [None if desc is None else desc.to_c() for desc in descs]


def _scales(options: WriteOptions | GatherOptions) -> dict[str, ScaleDesc]:
    scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    return {name: scale for name, scale in scales.items() if scale is not None}


def require_cache(cache: CacheDesc, options: WriteOptions | GatherOptions) -> bound.Held:
    """Raises InvalidArgumentError for what is no cache, and for memory that has moved."""
    held = instance("cache", cache, CacheDesc, A_CACHE).held("cache")
    for name, scale in _scales(options).items():
        scale.require_in_place(name)
        same_memory(name, scale.memory, "cache.k is", cache.k.memory)
    return held


def _binding(
    cache: CacheDesc,
    held: bound.Held,
    options: WriteOptions | GatherOptions,
    stream: abi.Stream,
) -> bound.Binding:
    scales = [s.owner for s in _scales(options).values() if may_move(s.owner)]
    owners = [
        *(t.owner for t in cache.tensors.values()),
        *(s.owner for s in _scales(options).values()),
    ]
    stream = call_stream(stream, cache.k.owner)
    reads_indices_on_host = options.transfer is Transfer.COPY_ENGINE
    return bound.Binding(
        held=(held, bound.Held(scales)) if scales else (held,),
        memory=cache.k.memory,
        index_memory=Memory.HOST if reads_indices_on_host else cache.k.memory,
        stream=stream,
        reads_tensors=stream is not None or cache.k.memory is Memory.HOST,
        owner=-1 if cache.pool else owning_device(owners),
        descriptors=DESCRIPTORS,
    )


def _io_desc(cache: CacheDesc) -> abi.kvx_kv_io_desc_t:
    return abi.kvx_kv_io_desc_t(
        key=abi.kvx_tensor_desc_t(),
        value=abi.kvx_tensor_desc_t(),
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
    )


def _owner(tensor: Any) -> object:
    return tensor.owner if isinstance(tensor, TensorDesc) else tensor


@overload
def token_desc(name: str, tensor: TensorLike | TensorDesc) -> TensorDesc: ...
@overload
def token_desc(name: str, tensor: TensorLike | TensorDesc | None) -> TensorDesc | None: ...
def token_desc(name: str, tensor: TensorLike | TensorDesc | None) -> TensorDesc | None:
    """A key or value tensor of a call."""
    if isinstance(tensor, TensorDesc):
        tensor.require_in_place(name)
        return tensor
    if tensor is None and name.startswith("value"):
        return None
    return describe(tensor, Layout.BLOCK_CUSTOM, name=name)  # type: ignore[arg-type]
