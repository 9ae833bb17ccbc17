"""SGLang: a mock of its device pools, with their memory and their own indexing.

tests/adapters/test_sglang*.py has the pools of the wheel itself, which is not for every Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvx_adapters import sglang
from kvx_core import CacheSpan
from tests.engines.engine import FINGERPRINT, FP8, Sizes, bytes_of, filled, poisoned_table


class MHATokenToKVPool(SimpleNamespace):
    """Source: sglang 0.5.23 mem_cache/memory_pool.py, the class of this name"""


class MLATokenToKVPool(SimpleNamespace):
    """The same"""


class SglangCache:
    """K and V as halves of an allocation per layer, or latents."""

    def __init__(self, sizes: Sizes, kv_cache_layout: str = "nhd", mla: bool = False) -> None:
        self.page, self.hnd = sizes.block_size, kv_cache_layout == "hnd"
        self.block_size, self.blocks = self.page, range(1, sizes.num_blocks)
        stored = torch.uint8 if sizes.dtype in FP8 else sizes.dtype
        rows = sizes.num_blocks * self.page
        row = (sizes.num_kv_heads, sizes.head_dim)
        shape = (sizes.num_blocks, row[0], self.page, row[1]) if self.hnd else (rows, *row)
        halves = 1 if mla else 2
        made = [filled((halves, *shape), stored) for _ in range(sizes.num_layers)]
        self.layers = [layer.unbind(0) for layer in made]
        self.raw = [bytes_of(layer) for layer in made]
        common: dict[str, Any] = {
            "size": rows - self.page,
            "page_size": self.page,
            "dtype": sizes.dtype,
            "store_dtype": stored,
            "layer_num": sizes.num_layers,
            "start_layer": 0,
        }
        self.pool: Any
        if mla:
            latents = [layer[0] for layer in self.layers]
            self.pool = MLATokenToKVPool(kv_buffer=latents, kv_cache_dim=sizes.head_dim, **common)
        else:
            k, v = zip(*self.layers, strict=True)
            self.pool = MHATokenToKVPool(
                k_buffer=list(k),
                v_buffer=list(v),
                head_num=row[0],
                head_dim=row[1],
                v_head_dim=row[1],
                kv_cache_layout=kv_cache_layout,
                **common,
            )
        facts = sglang.cache_facts(
            self.pool,
            fingerprint=FINGERPRINT,
            rotary="half",
            rotary_dim=sizes.head_dim,
            window=0,
            total_kv_heads=sizes.heads_of_model,
            first_kv_head=sizes.first_kv_head,
        )
        scales = {} if mla else {"k_scales": sizes.k_scales, "v_scales": sizes.v_scales}
        self.view = sglang.cache_view(self.pool, facts, **scales)

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        """Rows of req_to_token, from row 1 on: a table of pages, or with HND of tokens."""
        blocks = poisoned_table(sequences)
        tokens = blocks[:, :, None] * self.page + torch.arange(self.page)
        req_to_token = torch.nn.functional.pad(tokens.flatten(1), (0, 0, 1, 0)).int()
        make = sglang.ragged if self.hnd else sglang.block_table
        rows = range(1, len(sequences) + 1)
        table = make(req_to_token, rows, list(seq_lens), page_size=self.page)
        return self.view.at(table, head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor | None
    ) -> None:
        """Source: the same file, MHATokenToKVPool.set_kv_buffer, MLATokenToKVPool.set_kv_buffer"""
        for half, tokens in zip(self.layers[layer], (key, value), strict=False):
            assert tokens is not None
            stored = tokens.view(half.dtype)
            if self.hnd:
                half[blocks, :, offsets] = stored
            else:
                half[blocks * self.page + offsets] = stored


nhd = SglangCache
hnd = partial(SglangCache, kv_cache_layout="hnd")
latent = partial(SglangCache, mla=True)
