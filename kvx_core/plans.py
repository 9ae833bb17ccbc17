"""Plans: write_kv and gather_kv with all but their tensors described once. Spec: 6.8 to 6.10, 7"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack, overload

from kvx_core import _abi, _bound
from kvx_core.cache import CacheDesc
from kvx_core.calls import (
    A_CACHE,
    bound_gather,
    bound_write,
    rest_of_gather,
    rest_of_write,
    token_desc,
)
from kvx_core.options import GatherKeywords, GatherOptions, WriteKeywords, WriteOptions
from kvx_core.streams import call_stream
from kvx_core.tensor_desc import TensorDesc
from kvx_core.tensors import TensorLike
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
        stream: _abi.Stream = None,
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
        rest_of_write(
            _ALL_LEFT, self._call, cache, self._options, self._stream, key, value, slots=()
        )

    def __call__(self, key: Any, value: Any, slots: Any) -> None:
        """write_kv(cache, key, value, slots). Raises as write_kv."""
        status = self._call(key, value, slots)
        if status:
            rest_of_write(
                status, self._call, self._cache, self._options, self._stream, key, value, slots
            )


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
        stream: _abi.Stream = None,
        **options: Unpack[GatherKeywords],
    ) -> None:
        """Checks that tokens can be gathered into outputs like these; writes nothing.

        cache and the options: as for gather_kv; the plan keeps them alive. `stream` may be a
        function, which each call asks
        key_like, value_like: outputs as gather_kv takes them, with any number of rows
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._cache = instance("cache", cache, CacheDesc, A_CACHE)
        self._options = GatherOptions.of(options)
        key = _no_rows(token_desc("key_like", key_like))
        value = _no_rows(token_desc("value_like", value_like))
        self._stream = call_stream(stream, cache.k.owner, key.owner)
        self._call = bound_gather(cache, self._options, self._stream)
        nothing = key, value, (), ()
        rest_of_gather(_ALL_LEFT, self._call, cache, self._options, self._stream, *nothing)

    def __call__(self, key: Any, value: Any, block_table: Any, seq_lens: Any) -> None:
        """gather_kv(cache, block_table, seq_lens, out=(key, value)). Raises as gather_kv."""
        status = self._call(key, value, block_table, seq_lens)
        if status:
            rest_of_gather(
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


_ALL_LEFT = -(_bound.KEY | _bound.VALUE | _bound.INDICES | _bound.LENS)


@overload
def _no_rows(desc: TensorDesc) -> TensorDesc: ...
@overload
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None: ...
def _no_rows(desc: TensorDesc | None) -> TensorDesc | None:
    return None if desc is None else replace(desc, shape=(0, *desc.shape[1:]))
