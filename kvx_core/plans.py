"""Plans: write_kv and gather_kv with all but their tensors described once. Spec: 6.8 to 6.10, 7"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

from kvx_core import _abi
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
from kvx_core.streams import call_stream
from kvx_core.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.tensor_desc import TensorDesc
from kvx_core.tensors import TensorLike
from kvx_core.types import Transfer
from kvx_core.words import instance


class WritePlan:
    """write_kv with all but its tensors kept: less than a microsecond per call.

    That is for torch tensors, read through DLPack (torch >= 2.10, or the package
    torch-c-dlpack-ext). Whatever else write_kv takes is described as write_kv does. Threads may
    share a plan. A cache or scale whose storage was resized or replaced since is refused.
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
        transfer: Transfer | str = Transfer.KERNEL,
        stream: _abi.Stream = None,
    ) -> None:
        """Checks that tokens like these can be written; writes nothing.

        cache and the options: as for write_kv; the plan keeps them alive. `stream` may be a
        function, which each call asks
        key_like, value_like: (any, num_kv_heads, head_dim), such as calls will pass
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = instance("cache", cache, CacheDesc, A_CACHE)
        self._options = WriteOptions(
            scale_desc("k_scale", k_scale),
            scale_desc("v_scale", v_scale),
            find_scales,
            Transfer.of(transfer, "transfer"),
        )
        key, value = token_desc("key_like", key_like), token_desc("value_like", value_like)
        self._stream = call_stream(stream, cache.k.owner, key.owner)
        write(cache, key, value, SlotMapping.of(()), self._options, self._stream)
        self._call = bound_write(cache, self._options, self._stream)

    def __call__(self, key: Any, value: Any, slots: Any) -> None:
        """write_kv(cache, key, value, slots). Raises as write_kv."""
        status = self._call(key, value, slots)
        if status and was_left(status):
            key, value = token_desc("key", key), token_desc("value", value)
            write(self._cache, key, value, SlotMapping.of(slots), self._options, self._stream)


class GatherPlan:
    """gather_kv with all but its tensors kept: less than a microsecond per call.

    That is for torch tensors, read through DLPack (torch >= 2.10, or the package
    torch-c-dlpack-ext). Whatever else gather_kv takes is described as gather_kv does. Threads may
    share a plan. A cache or scale whose storage was resized or replaced since is refused.
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
        transfer: Transfer | str = Transfer.KERNEL,
        stream: _abi.Stream = None,
    ) -> None:
        """Checks that tokens can be gathered into outputs like these; writes nothing.

        cache and the options: as for gather_kv; the plan keeps them alive
        key_like, value_like: outputs as gather_kv takes them, with any number of rows
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = instance("cache", cache, CacheDesc, A_CACHE)
        self._options = GatherOptions(
            scale_desc("k_scale", k_scale),
            scale_desc("v_scale", v_scale),
            null_block_id,
            zero_fill,
            secondary_num_blocks,
            Transfer.of(transfer, "transfer"),
        )
        key = _no_rows(token_desc("key_like", key_like))
        value = _no_rows(token_desc("value_like", value_like))
        self._stream = call_stream(stream, cache.k.owner, key.owner)
        table, lens = BlockTable.packed([]), SeqLens.of([])
        gather(cache, key, value, table, lens, None, self._options, self._stream)
        self._call = bound_gather(cache, self._options, self._stream)

    def __call__(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> None:
        """gather_kv(cache, block_table, seq_lens, out=(key, value)). Raises as gather_kv."""
        status = self._call(key, value, block_table, seq_lens)
        if status and was_left(status):
            table, lens = BlockTable.of(block_table), SeqLens.of(seq_lens)
            key, value = token_desc("key", key), token_desc("value", value)
            gather(self._cache, key, value, table, lens, None, self._options, self._stream)


@overload
def _no_rows(desc: TensorDesc) -> TensorDesc: ...
@overload
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None: ...
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None:
    return None if desc is None else replace(desc, shape=(0, *desc.shape[1:]))
