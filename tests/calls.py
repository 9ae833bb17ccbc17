"""libkvx called through its C structs, from the caches and tables of the tests.

The Python API has tests of its own; here every field of a call is in the test's hands.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvx_core import _abi
from kvx_core.types import BlockTableFormat, DType, Layout, Memory
from tests.caches import Cache
from tests.reference import Dense, End, Half, KvOffsets, Layer, Packed, Ragged, Slots

DTYPE = {
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float8_e4m3fn: DType.F8_E4M3,
    torch.float8_e5m2: DType.F8_E5M2,
    torch.int32: DType.S32,
    torch.int64: DType.S64,
    torch.uint8: DType.U8,
}


@dataclass(frozen=True)
class Backend:
    """Where calls run. Descriptors carry `memory`; the tensors of the tests already lie there."""

    name: str
    memory: Memory

    # Descriptors. They borrow: keep the tensors alive until the call has returned.

    def tensor(self, tensor: Tensor | None, layout: Layout = Layout.BLOCK_CUSTOM) -> Any:
        if tensor is None:
            return _abi.kvx_tensor_desc_t()
        return _abi.kvx_tensor_desc_t(
            dtype=DTYPE[tensor.dtype],
            layout=layout,
            memory=self.memory,
            ndim=tensor.ndim,
            shape=_abi.dims(tensor.shape),
            stride=_abi.dims(tensor.stride()),
            data=tensor.data_ptr(),
        )

    def layer(self, layer: Layer, bytes_per_block: int = 0) -> Any:
        k, v = layer.k, layer.v
        desc = _abi.kvx_cache_desc_t(
            num_blocks=k.num_blocks,
            block_size=k.block_size,
            num_kv_heads=k.num_kv_heads,
            head_dim=k.head_dim,
            k=self.tensor(k.tensor, k.layout),
            v=self.tensor(None) if v is None else self.tensor(v.tensor, v.layout),
        )
        if bytes_per_block:
            desc.pool = _abi.kvx_pool_desc_t(
                memory=self.memory,
                bytes_per_block=bytes_per_block,
                primary=k.tensor.data_ptr(),
                secondary=None if k.secondary is None else k.secondary.data_ptr(),
            )
        return desc

    def slots(self, slots: Tensor, invalid_slot: int = -1) -> Any:
        return _abi.kvx_slot_mapping_t(
            dtype=DTYPE[slots.dtype],
            token_count=slots.numel(),
            invalid_slot=invalid_slot,
            slots=slots.data_ptr(),
        )

    def seq_lens(self, lengths: Tensor) -> Any:
        return _abi.kvx_seq_lens_t(
            dtype=DTYPE[lengths.dtype],
            seq_count=lengths.numel(),
            lengths=lengths.data_ptr(),
        )

    def scale(self, half: Half | None) -> Any:
        """The half's scales; a descriptor without data if it has none."""
        if half is None or half.scale is None:
            return _abi.kvx_scale_desc_t()
        return _abi.kvx_scale_desc_t(
            dtype=DTYPE[half.scale.dtype],
            granularity=half.granularity,
            ndim=half.scale.ndim,
            shape=_abi.dims(half.scale.shape),
            stride=_abi.dims(half.scale.stride()),
            data=half.scale.data_ptr(),
        )

    def block_table(self, end: Packed | Ragged | KvOffsets) -> Any:
        desc = _abi.kvx_block_table_t(
            index_dtype=DTYPE[end.indices.dtype],
            seq_count=end.indices.shape[0],
            beam_width=1,
            indices=end.indices.data_ptr(),
            indices_count=end.indices.numel(),
        )
        if isinstance(end, Packed):
            desc.format = BlockTableFormat.PACKED
            desc.max_blocks_per_seq = end.indices.shape[1]
        elif isinstance(end, Ragged):
            desc.format = BlockTableFormat.RAGGED
            desc.seq_count = end.indptr.numel() - 1
            desc.indptr_dtype = DTYPE[end.indptr.dtype]
            desc.indptr = end.indptr.data_ptr()
            desc.indptr_count = end.indptr.numel()
        else:
            desc.format = BlockTableFormat.KV_OFFSETS
            desc.beam_width = end.indices.shape[1]
            desc.max_blocks_per_seq = end.indices.shape[3]
            desc.flags = _abi.FLAG_KVCACHEINDEX
        return desc

    def io(self, key: Tensor, value: Tensor | None, num_tokens: int) -> Any:
        return _abi.kvx_kv_io_desc_t(
            key=self.tensor(key),
            value=self.tensor(value),
            num_tokens=num_tokens,
            num_kv_heads=key.shape[-2],
            head_dim=key.shape[-1],
        )

    # Calls. They raise KvxError with libkvx's sentence.

    def write(
        self,
        layer: Layer,
        key: Tensor,
        value: Tensor | None,
        slots: Tensor,
        invalid_slot: int = -1,
    ) -> None:
        desc = _abi.kvx_write_desc_t(
            io=self.io(key, value, slots.numel()),
            slots=self.slots(slots, invalid_slot),
            k_scale_desc=self.scale(layer.k),
            v_scale_desc=self.scale(layer.v),
        )
        cache = self.layer(layer)
        _abi.check(_abi.library().kvx_write_kv(ctypes.byref(cache), ctypes.byref(desc), None))

    def gather(
        self,
        layer: Layer,
        end: Packed | Ragged | KvOffsets,
        seq_lens: Tensor,
        key: Tensor,
        value: Tensor | None,
        *,
        max_seq_len: int,
        zero_fill: bool = False,
        bytes_per_block: int = 0,
        secondary_num_blocks: int = 0,
        null_block_id: int = -1,
    ) -> None:
        table = self.block_table(end)
        desc = _abi.kvx_gather_desc_t(
            io=self.io(key, value, table.seq_count * table.beam_width * max_seq_len),
            block_table=table,
            seq_lens=self.seq_lens(seq_lens),
            max_seq_len=max_seq_len,
        )
        cache = self.layer(layer, bytes_per_block)
        k_scale, v_scale = self.scale(layer.k), self.scale(layer.v)
        options = _abi.kvx_gather_options_t(
            flags=_abi.FLAG_ZERO_FILL if zero_fill else 0,
            null_block_id=null_block_id,
            secondary_num_blocks=secondary_num_blocks,
            k_scale=ctypes.pointer(k_scale),
            v_scale=ctypes.pointer(v_scale),
        )
        _abi.check(
            _abi.library().kvx_gather_kv_ext(
                ctypes.byref(cache), ctypes.byref(desc), ctypes.byref(options), None
            )
        )

    def migrate(
        self,
        src: Cache,
        src_end: End,
        dst: Cache,
        dst_end: End,
        seq_lens: Tensor,
        *,
        src_starts: Tensor | None = None,
        dst_starts: Tensor | None = None,
        src_head: int = 0,
        dst_head: int = 0,
        num_heads: int = 0,
        zero_fill: bool = False,
    ) -> None:
        views = [
            View(self, cache, end, starts, head)
            for cache, end, starts, head in (
                (src, src_end, src_starts, src_head),
                (dst, dst_end, dst_starts, dst_head),
            )
        ]
        lens = self.seq_lens(seq_lens)
        desc = _abi.kvx_migrate_desc_t(
            flags=_abi.FLAG_ZERO_FILL if zero_fill else 0,
            num_heads=num_heads,
            seq_lens=ctypes.pointer(lens),
            src=ctypes.pointer(views[0].desc),
            dst=ctypes.pointer(views[1].desc),
        )
        _abi.check(_abi.library().kvx_migrate_kv(ctypes.byref(desc), None))


class View:
    """A kvx_view_t and everything that it points to."""

    def __init__(
        self, backend: Backend, cache: Cache, end: End, starts: Tensor | None, head_start: int
    ) -> None:
        self.layers = [backend.layer(layer, cache.bytes_per_block) for layer in cache.layers]
        self.scales = [
            [backend.scale(half) for half in (layer.k, layer.v)] for layer in cache.layers
        ]
        self.desc = _abi.kvx_view_t(
            num_layers=len(self.layers),
            layers=_abi.pointer_array(self.layers, _abi.kvx_cache_desc_t),
            head_start=head_start,
            null_block_id=getattr(end, "null_block_id", -1),
            k_scales=_abi.pointer_array([k for k, _ in self.scales], _abi.kvx_scale_desc_t),
            v_scales=_abi.pointer_array([v for _, v in self.scales], _abi.kvx_scale_desc_t),
        )
        secondary = cache.layers[0].k.secondary
        if secondary is not None:
            self.desc.secondary_num_blocks = secondary.shape[0]
        if isinstance(end, Slots):
            self.slots = backend.slots(end.slots, end.invalid_slot)
            self.desc.slots = ctypes.pointer(self.slots)
        elif not isinstance(end, Dense):
            assert isinstance(end, Packed | Ragged | KvOffsets)
            self.block_table = backend.block_table(end)
            self.desc.block_table = ctypes.pointer(self.block_table)
        if starts is not None:
            self.starts = backend.seq_lens(starts)
            self.desc.starts = ctypes.pointer(self.starts)


CPU = Backend("cpu", Memory.HOST)

# Every backend of this build that this machine can run. hostgrid and cuda join here.
BACKENDS = (CPU,)
