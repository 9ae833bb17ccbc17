"""A whole model's cache from vLLM to TensorRT-LLM: KVX beside LMCache.

32 layers, 2048 tokens x 8 heads x 128, bf16, 268 MB, random blocks at both ends: from vLLM's NHD
blocks of 16, (2, num_blocks, 16, heads, dim) per layer, to TensorRT-LLM's pool of HND blocks of 32,
(num_blocks, layers, 2, heads, 32, dim). KVX does it in one pass. LMCache goes through its chunks of
256 tokens in CPU memory, one hop to store and one to load. torch indexes and permutes.
Run with `python -m benchmarks migrate_vs_lmcache` in the environment that README.md describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lmcache import device_ops
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
from torch import Tensor

import kvx_core
from benchmarks import native, report
from benchmarks.cases import check, cold, row
from benchmarks.pools import random_numbers, random_table
from benchmarks.rounds import Contestant, Goal, Timing, compete, once
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    Layout,
    PoolDesc,
    describe,
)

_HEADS, _DIM = 8, 128
_SRC_BLOCK, _DST_BLOCK, _CHUNK = 16, 32, 256
_GOALS = (Goal("lmcache", 10.0), Goal("torch", 3.0))


class Model:
    """Both caches of a model, and every way from one to the other."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self.num_layers, self.num_tokens = num_layers, num_tokens
        src_blocks, dst_blocks = num_tokens // _SRC_BLOCK, num_tokens // _DST_BLOCK
        shape = (2, src_blocks, _SRC_BLOCK, _HEADS, _DIM)
        numbers = random_numbers(2 * num_tokens * _HEADS * _DIM)
        # Different numbers in every layer, so that a layer in the wrong place shows.
        self.vllm = [numbers.roll(1009 * layer).view(shape) for layer in range(num_layers)]
        self.trtllm = torch.empty(
            dst_blocks, num_layers, 2, _HEADS, _DST_BLOCK, _DIM, dtype=torch.bfloat16
        )
        self.src_table, self.dst_table = random_table(src_blocks, 1), random_table(dst_blocks, 2)
        self._kvx_ends()
        self._lmcache_objects()
        self._torch_stages()

    # ---- KVX ----

    def _kvx_ends(self) -> None:
        src = [
            CacheDesc.from_kv(*[describe(half, Layout.BLOCK_NHD) for half in layer])
            for layer in self.vllm
        ]
        self._src_end = _view(src).at(self.src_table[None])
        # A plain view of the pool: (num_blocks, heads, 32, dim) per layer, with strides.
        plain, pooled = [], []
        for layer in range(self.num_layers):
            k, v = (describe(self.trtllm[:, layer, kv], Layout.BLOCK_HND) for kv in range(2))
            pool = PoolDesc.of(self.trtllm[0, layer, 0], self.trtllm[0, 0, 0].nbytes)
            plain.append(CacheDesc.from_kv(k, v))
            pooled.append(CacheDesc.from_kv(k, v, pool=pool))
        self._plain_end = _view(plain).at(self.dst_table[None])
        # TensorRT-LLM's own table: sub-blocks, of which a block has one for K and V of each layer.
        first = self.dst_table.to(torch.int32) * self.num_layers * 2
        self._offsets = torch.stack([first, first + 1])[None, None].contiguous()
        self._offsets_end = _view(pooled).at(BlockTable.kv_offsets(self._offsets))

    def kvx_offsets(self) -> None:
        self._migrate(self._offsets_end)

    def kvx_plain(self) -> None:
        self._migrate(self._plain_end)

    def _migrate(self, end: CacheSpan) -> None:
        kvx_core.migrate(self._src_end, end, [self.num_tokens], same_model=True)

    # ---- LMCache ----

    def _lmcache_objects(self) -> None:
        chunk = (2, self.num_layers, _CHUNK, _HEADS * _DIM)
        count = self.num_tokens // _CHUNK
        self._chunks = [torch.empty(chunk, dtype=torch.bfloat16) for _ in range(count)]
        self._src_shape = self._page_shape(len(self.src_table), _SRC_BLOCK)
        self._dst_shape = self._page_shape(len(self.dst_table), _DST_BLOCK)

    def _page_shape(self, num_blocks: int, block_size: int) -> Any:
        shape = PageBufferShapeDesc()
        shape.kv_size, shape.nl, shape.nb = 2, self.num_layers, num_blocks
        shape.bs, shape.nh, shape.hs = block_size, _HEADS, _DIM
        shape.element_size, shape.dtype = 2, torch.bfloat16
        return shape

    def lmcache(self) -> None:
        transfer = device_ops.multi_layer_block_kv_transfer
        transfer(
            self.vllm,
            self._chunks,
            self.src_table,
            "cpu",
            TransferDirection.D2H,
            self._src_shape,
            _CHUNK,
            EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
            0,
        )
        transfer(
            self.trtllm,
            self._chunks,
            self.dst_table,
            "cpu",
            TransferDirection.H2D,
            self._dst_shape,
            _CHUNK,
            EngineKVFormat.NB_NL_TWO_NH_BS_HS,
            0,
        )

    # ---- torch ----

    def _torch_stages(self) -> None:
        self._src_staged = torch.empty_like(self.vllm[0][0])
        self._dst_staged = torch.empty_like(
            self.trtllm[:, 0, 0], memory_format=torch.contiguous_format
        )

    def torch(self) -> None:
        for layer, kv in self._halves():
            half = self.vllm[layer][kv]
            torch.index_select(half, 0, self.src_table, out=self._src_staged)
            blocks = self._src_staged.view(-1, _DST_BLOCK, _HEADS, _DIM)
            self._dst_staged.copy_(blocks.permute(0, 2, 1, 3))
            self.trtllm[:, layer, kv].index_copy_(0, self.dst_table, self._dst_staged)

    def expect(self) -> None:
        """The definition: token by token."""
        for layer, kv in self._halves():
            for token in range(self.num_tokens):
                src, dst = divmod(token, _SRC_BLOCK), divmod(token, _DST_BLOCK)
                to = self.trtllm[self.dst_table[dst[0]], layer, kv, :, dst[1]]
                to.copy_(self.vllm[layer][kv, self.src_table[src[0]], src[1]])

    def _halves(self) -> list[tuple[int, int]]:
        return [(layer, kv) for layer in range(self.num_layers) for kv in range(2)]

    # ---- plain copies of as many bytes ----

    def plain(self) -> list[tuple[Tensor, Tensor]]:
        flat = self.trtllm.view(self.num_layers, -1)
        return [(flat[layer], self.vllm[layer].view(-1)) for layer in range(self.num_layers)]


def _view(layers: Sequence[CacheDesc]) -> CacheView:
    return CacheView(tuple(layers), CacheFacts())


def run(
    threads: Sequence[int], rounds: int, *, num_layers: int = 32, num_tokens: int = 2048
) -> list[dict[str, Any]]:
    """Measures; prints and returns the results."""
    model, tiny = Model(num_layers, num_tokens), Model(1, _CHUNK)
    ways = {
        "kvx_offsets": Model.kvx_offsets,
        "kvx_plain": Model.kvx_plain,
        "lmcache": Model.lmcache,
        "torch": Model.torch,
    }
    for name, way in ways.items():
        check(name, lambda way=way: way(model), model.expect, [model.trtllm])  # type: ignore[misc]
    print("KVX, LMCache and torch leave the same bytes.")
    before = cold({name: lambda way=way: way(tiny) for name, way in ways.items()})  # type: ignore[misc]
    methods = ["memcpy", *(["stream"] if native.stream_isa() else [])]
    columns = ["lmcache", "torch", *methods]
    report.print_head(columns)
    rows = []
    for count in threads:
        kvx_core.set_num_threads(count)
        torch.set_num_threads(count)
        contestants: dict[str, Contestant] = {
            **{name: once(lambda way=way: way(model)) for name, way in ways.items()},  # type: ignore[misc]
            **{m: native.PlainCopy(model.plain(), m, count) for m in methods},
        }
        timing = compete(contestants, rounds, before=before)
        for name, words in (("kvx_offsets", "KV_OFFSETS"), ("kvx_plain", "HND view")):
            peers = {c: timing.samples[c] for c in columns if c in timing.samples}
            samples = {"kvx": timing.samples[name], **peers}
            case = f"vLLM to TRT-LLM, {words}"
            rows.append(row(case, count, model.trtllm.nbytes, Timing(samples), _GOALS))
            report.print_row(rows[-1], columns)
    kvx_core.set_num_threads(0)
    return rows
