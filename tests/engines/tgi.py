"""TGI: a mock of each flavour's KVCache, with its memory layout, and of its store.

TGI is on no package index. Its tensors are those of tests/fakes/tgi.py; its store is
written out here for many tokens at once. Source: TGI 3.3.7 server/text_generation_server/layers/
attention/kv_cache.py, KVCache.store
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvx_adapters import tgi
from kvx_core import CacheSpan
from tests.engines.engine import FINGERPRINT, Sizes, poisoned_table
from tests.fakes.tgi import Cache, KVScales

# K and V of a layer, slot of each token, block_size, key and value (num_tokens, heads, dim)
Store = Callable[[Tensor, Tensor, Tensor, int, Tensor, Tensor], None]


def store_rows(k: Tensor, v: Tensor, slots: Tensor, n: int, key: Tensor, value: Tensor) -> None:
    """flashinfer, flashdecoding, gaudi: a slot is a row of all heads."""
    k.view(-1, *key.shape[1:])[slots], v.view(-1, *value.shape[1:])[slots] = key, value


def store_heads(k: Tensor, v: Tensor, slots: Tensor, n: int, key: Tensor, value: Tensor) -> None:
    """IPEX on CPU, PagedAttention.reshape_and_cache: (B, H, N, D)."""
    k[slots // n, :, slots % n], v[slots // n, :, slots % n] = key, value


def store_packed(k: Tensor, v: Tensor, slots: Tensor, n: int, key: Tensor, value: Tensor) -> None:
    """paged, reshape_and_cache: K is (B, H, D / x, N, x) and V is (B, H, D, N)."""
    k[slots // n, :, :, slots % n, :] = key.unflatten(-1, (-1, k.shape[-1]))
    v[slots // n, :, :, slots % n] = value


_STORES: dict[str, Store] = {
    "nhd": store_rows,
    "flat": store_rows,
    "hnd": store_heads,
    "paged": store_packed,
}


class TgiCache:
    """KVCache of every layer."""

    def __init__(self, sizes: Sizes, attention: str, system: str, device: str) -> None:
        sizes_of_layer = (sizes.num_blocks, sizes.num_kv_heads, sizes.head_dim, sizes.dtype)
        self.layers = [
            Cache(attention, system, device, *sizes_of_layer) for _ in range(sizes.num_layers)
        ]
        self.spec = self.layers[0].spec()
        self.raw = [half for layer in self.layers for half in layer.raw]
        self.block_size = self.layers[0].block_size
        self.blocks = range(tgi.RESERVED_BLOCK_ID + 1, sizes.num_blocks)
        facts = tgi.cache_facts(
            self.spec,
            fingerprint=FINGERPRINT,
            rotary="half",
            rotary_dim=sizes.head_dim,
            num_layers=sizes.num_layers,
            window=0,
            total_kv_heads=sizes.heads_of_model,
            first_kv_head=sizes.first_kv_head,
        )
        kv_scales = None
        if sizes.k_scales is not None:
            kv_scales = list(map(KVScales.of, sizes.k_scales, sizes.v_scales))
        pairs = [(layer.key, layer.value) for layer in self.layers]
        self.view = tgi.cache_view(pairs, self.spec, facts, kv_scales=kv_scales)

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        """By what the attention of this flavour is given: a table of tokens, of blocks, or slots.

        Source: TGI 3.3.7 models/metadata_kernels.py, block_tables_to_ragged
        """
        if self.spec.attention.startswith("flashdecoding"):
            return self.view.at(tgi.block_table(poisoned_table(sequences)), head_start=head_start)
        slots = self.slots(sequences, seq_lens)
        if self.spec.attention == "paged":
            return self.view.at(slots=tgi.slot_mapping(slots), head_start=head_start)
        cu_seqlen_k = torch.tensor([0, *seq_lens]).cumsum(0).int()
        table = tgi.ragged(slots.int(), cu_seqlen_k, self.spec)
        return self.view.at(table, head_start=head_start)

    def slots(self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> Tensor:
        """Source: TGI 3.3.7 backends/v3/src/block_allocator.rs, SimpleAllocator::allocate"""
        of_blocks = [
            torch.tensor(blocks)[:, None] * self.block_size + torch.arange(self.block_size)
            for blocks in sequences
        ]
        return torch.cat(
            [slots.flatten()[:n] for slots, n in zip(of_blocks, seq_lens, strict=True)]
        )

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        at, slots = self.layers[layer], blocks * self.block_size + offsets
        _STORES[at.order](at.key, at.value, slots, self.block_size, key, value)


flashinfer = partial(TgiCache, attention="flashinfer", system="cuda", device="cuda")
flashdecoding = partial(TgiCache, attention="flashdecoding", system="cuda", device="cuda")
flashdecoding_xpu = partial(TgiCache, attention="flashdecoding-ipex", system="ipex", device="xpu")
flashdecoding_cpu = partial(TgiCache, attention="flashdecoding-ipex", system="ipex", device="cpu")
paged_cuda = partial(TgiCache, attention="paged", system="cuda", device="cuda")
paged_rocm = partial(TgiCache, attention="paged", system="rocm", device="cuda")
paged_xpu = partial(TgiCache, attention="paged", system="ipex", device="xpu")
paged_cpu = partial(TgiCache, attention="paged", system="ipex", device="cpu")
gaudi = partial(TgiCache, attention="paged", system="hpu", device="hpu")
