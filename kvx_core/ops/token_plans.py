"""WritePlan and GatherPlan: write_kv and gather_kv, bound once to all but their tensors.

Spec: 6.8 to 6.10, 7, E.13
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Unpack, overload

from kvx_core._c import abi, abi_plan, bound
from kvx_core.argument_checks import instance
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.memory_checks import check_host_memory
from kvx_core.desc.placing import where_read
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import TensorLike
from kvx_core.ops.calls import (
    A_CACHE,
    bound_gather,
    bound_write,
    gather_like,
    gather_sizes,
    require_cache,
    run_described_gather,
    run_described_write,
    token_desc,
    write_like,
)
from kvx_core.ops.kept_plan import KeptPlan, Ranges, closed_call
from kvx_core.ops.options import GatherKeywords, GatherOptions, WriteKeywords, WriteOptions
from kvx_core.ops.plan_info import PlanInfo
from kvx_core.ops.plan_lookups import Indices
from kvx_core.ops.streams import call_stream

_Tokens = tuple[TensorDesc, TensorDesc | None]


class _TokenPlan(KeptPlan):
    """What plans of a write and of a gather share: a cache, and tensors of tokens."""

    __slots__ = ("_cache", "_handle", "_like", "_options", "_stream")

    _cache: CacheDesc
    _handle: abi_plan.Handle | None
    _like: _Tokens
    _options: WriteOptions | GatherOptions

    def _where_read(self, tokens: _Tokens, indices: Indices) -> dict[str, Any]:
        tensors = {"cache.k": self._cache.k, "key": tokens[0]}
        return where_read(indices, tensors, self._options.transfer)

    def _open_handle(self) -> abi_plan.Handle:
        if self._call is closed_call:
            closed_call()
        require_cache(self._cache, self._options)
        if self._handle is None:
            self._handle = self._new_handle()
        return self._handle

    @abstractmethod
    def _new_handle(self) -> abi_plan.Handle:
        """A kvx_plan_t of tokens like those that the plan was made with."""


class WritePlan(_TokenPlan):
    """write_kv, bound to all but its tensors: less than a microsecond per call.

    That holds for torch tensors, read through DLPack (torch >= 2.10, or the package
    torch-c-dlpack-ext), for numpy arrays and for lists of int; others take some tens of
    microseconds. Threads may share a plan. It refuses a cache or scale whose storage was resized or
    replaced since.
    """

    __slots__ = ()

    _options: WriteOptions

    def __init__(
        self,
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        stream: abi.Stream = None,
        **options: Unpack[WriteKeywords],
    ) -> None:
        """Checks that tokens like these can be written; writes nothing.

        cache and the options: as for write_kv; the plan keeps them alive. `stream` may be a
        function, which each call asks
        key_like, value_like: (any, num_kv_heads, head_dim), such as calls will pass
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = instance("cache", cache, CacheDesc, A_CACHE)
        self._options = WriteOptions.of(options)
        key, value = token_desc("key_like", key_like), token_desc("value_like", value_like)
        self._stream = call_stream(stream, cache.k.owner, key.owner)
        self._call = bound_write(cache, self._options, self._stream)
        self._like, self._handle = (key, value), None
        run_described_write(
            _ALL_LEFT, self._call, cache, self._options, self._stream, key, value, slots=()
        )

    def __call__(self, key: Any, value: Any, slots: Any) -> None:
        """write_kv(cache, key, value, slots). Raises as write_kv."""
        status = self._call(key, value, slots)
        if status:
            run_described_write(
                status, self._call, self._cache, self._options, self._stream, key, value, slots
            )

    run = __call__

    def describe(self, key: Any, value: Any, slots: Any) -> PlanInfo:
        """Describes what a call with the same tensors would do.

        The first call in a process measures this machine's copy speed, for some milliseconds.
        Raises what a call would raise. Spec: E.13
        """
        tokens, found = self._tokens(key, value), SlotMapping.of(slots)
        found = self._where_read(tokens, {"slots": found})["slots"]
        return self._describe(self._lookups(tokens, found))

    def ranges(self, key: Any, value: Any, slots: Any) -> Ranges:
        """Lists the copies that a call with the same tensors would make: an array of RANGE.

        plane: 0: K, 1: V; src, dst: addresses; bytes: how many. Ranges are in the order of planes
        and tokens; those that follow each other at both ends are one. The slots must be in memory
        that the host can read, on a device too.
        Raises UnsupportedError for a plan that converts, else what a call would raise. Spec: E.13
        """
        tokens, found = self._tokens(key, value), SlotMapping.of(slots)
        check_host_memory({"slots": found})
        return self._ranges(self._lookups(tokens, found))

    def _tokens(self, key: Any, value: Any) -> _Tokens:
        return token_desc("key", key), token_desc("value", value)

    def _lookups(self, tokens: _Tokens, slots: SlotMapping) -> abi_plan.kvx_plan_lookups_t:
        io = _io_of(write_like(self._cache, self._options).io, tokens, slots.token_count)
        lookups = abi_plan.lookups_of_tokens(
            io, dst=abi_plan.kvx_end_lookup_t(slots=abi.pointer_to(slots))
        )
        lookups.kept = tokens, slots
        return lookups

    def _new_handle(self) -> abi_plan.Handle:
        like = write_like(self._cache, self._options)
        like.io = _io_of(like.io, self._like, 0)
        structs = self._cache.to_c(), like, self._options.to_c()
        return abi_plan.Handle("kvx_plan_create_write", *structs)


class GatherPlan(_TokenPlan):
    """gather_kv, bound to all but its tensors: less than a microsecond per call.

    That holds for torch tensors, read through DLPack (torch >= 2.10, or the package
    torch-c-dlpack-ext), for numpy arrays and for lists of int; others take some tens of
    microseconds. Threads may share a plan. It refuses a cache or scale whose storage was resized or
    replaced since.
    """

    __slots__ = ()

    _options: GatherOptions

    def __init__(
        self,
        cache: CacheDesc,
        key_like: TensorLike | TensorDesc,
        value_like: TensorLike | TensorDesc | None,
        *,
        stream: abi.Stream = None,
        **options: Unpack[GatherKeywords],
    ) -> None:
        """Checks that tokens can be gathered into outputs like these; writes nothing.

        cache and the options: as for gather_kv; the plan keeps them alive. `stream` may be a
        function, which each call asks
        key_like, value_like: outputs as gather_kv takes them, with any number of tokens
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = instance("cache", cache, CacheDesc, A_CACHE)
        self._options = GatherOptions.of(options)
        key = _no_rows(token_desc("key_like", key_like))
        value = _no_rows(token_desc("value_like", value_like))
        self._stream = call_stream(stream, cache.k.owner, key.owner)
        self._call = bound_gather(cache, self._options, self._stream)
        self._like, self._handle = (key, value), None
        nothing = key, value, (), ()
        run_described_gather(_ALL_LEFT, self._call, cache, self._options, self._stream, *nothing)

    def __call__(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> None:
        """gather_kv(cache, block_table, seq_lens, out=(key, value)). Raises as gather_kv."""
        status = self._call(key, value, block_table, seq_lens)
        if status:
            run_described_gather(
                status,
                self._call,
                self._cache,
                self._options,
                self._stream,
                key,
                value,
                block_table,
                seq_lens,
            )

    run = __call__

    def describe(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> PlanInfo:
        """Describes what a call with the same tensors would do.

        The first call in a process measures this machine's copy speed, for some milliseconds.
        Raises what a call would raise. Spec: E.13
        """
        tokens = self._tokens(key, value)
        table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
        indices = self._where_read(tokens, {"block_table": table, "seq_lens": lens})
        return self._describe(self._lookups(tokens, **indices))

    def ranges(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> Ranges:
        """Lists the copies that a call with the same tensors would make: an array of RANGE.

        plane: 0: K, 1: V; src, dst: addresses, src 0 for zeros; bytes: how many. Ranges are in the
        order of planes, sequences and tokens; those that follow each other at both ends are one.
        Table and lengths must be in memory that the host can read, on a device too.
        Raises UnsupportedError for a plan that converts, else what a call would raise. Spec: E.13
        """
        tokens = self._tokens(key, value)
        table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
        check_host_memory({"block_table": table, "seq_lens": lens})
        return self._ranges(self._lookups(tokens, table, lens))

    def _tokens(self, key: Any, value: Any) -> _Tokens:
        tokens = token_desc("key", key), token_desc("value", value)
        for name, tensor in zip(("key", "value"), tokens, strict=True):
            if tensor is not None:
                tensor.require_writable(name)
        return tokens

    def _lookups(
        self, tokens: _Tokens, block_table: BlockTable, seq_lens: SeqLens
    ) -> abi_plan.kvx_plan_lookups_t:
        num_tokens, max_seq_len = gather_sizes(tokens[0], block_table)
        io = _io_of(gather_like(self._cache).io, tokens, num_tokens)
        lookups = abi_plan.lookups_of_tokens(
            io,
            max_seq_len=max_seq_len,
            seq_lens=abi.pointer_to(seq_lens),
            src=abi_plan.kvx_end_lookup_t(block_table=abi.pointer_to(block_table)),
        )
        lookups.kept = tokens, block_table, seq_lens
        return lookups

    def _new_handle(self) -> abi_plan.Handle:
        like = gather_like(self._cache)
        num_tokens, like.max_seq_len = gather_sizes(self._like[0], BlockTable.packed([]))
        like.io = _io_of(like.io, self._like, num_tokens)
        structs = self._cache.to_c(), like, self._options.to_c()
        return abi_plan.Handle("kvx_plan_create_gather", *structs)


_ALL_LEFT = -(bound.KEY | bound.VALUE | bound.INDICES | bound.LENS)


@overload
def _no_rows(desc: TensorDesc) -> TensorDesc: ...
@overload
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None: ...
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None:
    return None if desc is None else replace(desc, shape=(0, *desc.shape[1:]))


def _io_of(io: abi.kvx_kv_io_desc_t, tokens: _Tokens, num_tokens: int) -> abi.kvx_kv_io_desc_t:
    """`io` with these tokens."""
    key, value = tokens
    io.key, io.num_tokens = key.to_c(), num_tokens
    if value is not None:
        io.value = value.to_c()
    return io
