"""A toy model of DeepSeek-V4's layers decodes 1,000 tokens through its cache; memory beside GQA-8.

Layers have the real sizes of entries, keys and windows, and random weights. Attention is computed
in torch from what the cache holds: the window, and entries that an indexer chooses.

python examples/deepseek_v4_decode.py
"""

from __future__ import annotations

import needed  # noqa: F401  says what to install if a package is missing
import torch
from torch import Tensor

from kvx_core.hybrid import (
    AttentionType,
    Compressor,
    DSV4Config,
    KVCacheManager,
    LayerCacheHandle,
    compress_csa,
    compress_hca,
    gqa_bytes_per_token,
    prepare_forward,
    schedule_of,
)

HIDDEN, TOKENS, TOP_K = 128, 1000, 64
config = DSV4Config()
schedule = schedule_of([0, 4, 128], 3)  # a window alone, CSA, HCA
random = torch.Generator().manual_seed(0)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat((FP4, -FP4))


def weight(size: int) -> Tensor:
    return torch.randn(HIDDEN, size, generator=random) / HIDDEN**0.5


def compressor(ratio: int, dim: int, overlap: bool) -> Compressor:
    angles = torch.arange(TOKENS)[:, None] * 160000.0 ** -torch.arange(0, 1, 2 / config.rope_dim)
    ape = torch.randn(2, ratio, dim, generator=random)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    return Compressor(ape[0], ape[1] if overlap else None, torch.ones(dim), cos_sin)


class Layer:
    """One layer: projections into the cache, attention over it."""

    def __init__(self, attn: AttentionType) -> None:
        self.attn = attn
        size, key = config.head_dim, config.indexer_head_dim
        self.q, self.swa = weight(size), weight(size)
        self.out = torch.randn(size, HIDDEN, generator=random) / size**0.5
        if attn is AttentionType.CSA:
            self.k, self.z = weight(2 * size), weight(2 * size)
            self.index_k, self.index_z = weight(2 * key), weight(2 * key)
            self.index_q = weight(key)
            self.compressor = compressor(config.csa_compression_ratio, size, True)
            self.indexer = compressor(config.csa_compression_ratio, key, True)
        if attn is AttentionType.HCA:
            self.k, self.z = weight(size), weight(size)
            self.compressor = compressor(config.hca_compression_ratio, size, False)

    def forward(self, x: Tensor, cache: LayerCacheHandle, slot: int) -> Tensor:
        """A token, (1, HIDDEN): what it adds to the cache, and attention over what is there."""
        cache.write_swa((x @ self.swa).bfloat16())
        if self.attn is AttentionType.CSA:
            parts = (x @ w for w in (self.k, self.z, self.index_k, self.index_z))
            compress_csa(cache, *parts, self.compressor, self.indexer)
        if self.attn is AttentionType.HCA:
            compress_hca(cache, x @ self.k, x @ self.z, self.compressor)
        window = cache.read_swa_view()
        kept = window.positions[slot] >= 0
        seen = numbers(window.fp8[slot], window.rope[slot], window.inv_scale[slot])[kept]
        if self.attn is not AttentionType.SWA:
            seen = torch.cat((seen, self.entries(x, cache, slot)))
        weights = torch.softmax(x @ self.q @ seen.T / config.head_dim**0.5, 1)
        return weights @ seen @ self.out

    def entries(self, x: Tensor, cache: LayerCacheHandle, slot: int) -> Tensor:
        """The entries of a sequence; in CSA those with the best indexer keys."""
        view = cache.read_classical_view()
        e = torch.arange(int(view.valid_lens[slot]))
        per_block = cache.schema.entries_per_block
        at = view.block_table[slot][e // per_block].long(), e % per_block
        if self.attn is AttentionType.CSA and len(e) > TOP_K:
            index = cache.read_indexer_view()
            codes, scales = index.keys[at], index.scales[at].view(torch.float8_e4m3fn)
            keys = FP4[torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()]
            keys = keys * scales.float().repeat_interleave(16, 1)
            best = (x @ self.index_q @ keys.T).relu()[0].topk(TOP_K).indices
            at = at[0][best], at[1][best]
        return numbers(view.entries_fp8[at], view.entries_rope[at], view.inv_scale[at])


def numbers(fp8: Tensor, rope: Tensor, inv_scale: Tensor) -> Tensor:
    values = fp8.view(torch.float8_e4m3fn).float() * inv_scale[:, None]
    return torch.cat((values, rope.float()), 1)


def main() -> None:
    torch.set_num_threads(1)  # tensors are small: threads would wait for each other
    layers = [Layer(spec.attn) for spec in schedule]
    caches = KVCacheManager(config, schedule, 1, max_context_tokens=1024)
    slot = caches.admit_request(num_tokens=TOKENS)
    x = torch.randn(1, HIDDEN, generator=random)
    for count in range(TOKENS):
        prepare_forward(caches, [slot], [count], [count + 1])
        for i, layer in enumerate(layers):
            x = x + layer.forward(x, caches.acquire(i), slot)
            x = torch.nn.functional.rms_norm(x, (HIDDEN,))
        if count + 1 in (250, 500, 1000):
            pools = [(caches.allocators[i], caches.paged[i]) for i in caches.schemas]
            held = sum(free.num_held * pool.block_bytes for free, pool in pools if free and pool)
            dense = gqa_bytes_per_token(len(layers)) * (count + 1)
            print(f"{count + 1} tokens: blocks {held} bytes, GQA-8 {dense}: {dense / held:.0f} x")
    assert bool(x.isfinite().all())
    fixed = sum(state.memory_bytes() for state in caches.states.values())
    print(f"windows and tails: {fixed} bytes, however long the sequence is")


if __name__ == "__main__":
    main()
