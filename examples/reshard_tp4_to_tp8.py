"""Migrates the cache of four tensor-parallel ranks to eight ranks, and back to four.

    python examples/reshard_tp4_to_tp8.py

A rank holds some of the KV heads of every layer. The caches are laid out as vLLM 0.32 lays out its
own, in blocks of 16 tokens on four ranks and of 32 on eight; no engine runs. Here all ranks are in
one process; between processes a store does the same, as in share_a_prefix.py.
"""

import time

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_adapters import vllm
from kvx_core import CacheFacts, migrate

NUM_LAYERS, TOTAL_KV_HEADS, HEAD_DIM = 4, 8, 128
NUM_BLOCKS = 80
SEQ_LENS = [1000, 37, 1]
FACTS = {"fingerprint": "a model", "rotary": "half", "rotary_dim": HEAD_DIM, "rope_applied": True}


class Ranks:
    """The caches of the ranks of one engine, and where its sequences lie in each of them."""

    def __init__(self, tp_size, block_size):
        heads = TOTAL_KV_HEADS // tp_size
        self.caches = torch.zeros(
            (tp_size, NUM_LAYERS, NUM_BLOCKS, heads, block_size, 2 * HEAD_DIM), dtype=torch.bfloat16
        )
        free = (torch.randperm(NUM_BLOCKS - 1) + 1).tolist()  # vLLM keeps block 0 for nothing
        self.table = [[free.pop() for _ in range(0, length, block_size)] for length in SEQ_LENS]
        spec = vllm.LayerSpec(
            version="0.32.0",
            backend="FLASH_ATTN",
            layout="LBHNC",
            kv_cache_dtype="auto",
            dtype=torch.bfloat16,
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
            num_kv_heads=heads,
            head_size=HEAD_DIM,
            page_size_bytes=heads * block_size * 2 * HEAD_DIM * 2,
            num_layers=NUM_LAYERS,
        )
        self.heads = [range(rank * heads, (rank + 1) * heads) for rank in range(tp_size)]
        self.views = []
        for cache, held in zip(self.caches, self.heads, strict=True):
            facts = CacheFacts(**FACTS, total_kv_heads=TOTAL_KV_HEADS, first_kv_head=held.start)
            self.views.append(vllm.cache_view(list(cache), spec, facts))

    def tokens(self):
        """What the ranks hold of each sequence, as (layer, head of the model, token, K and V)."""
        for blocks, length in zip(self.table, SEQ_LENS, strict=True):
            held = self.caches[:, :, blocks].transpose(2, 3).flatten(3, 4)[:, :, :, :length]
            yield held.transpose(0, 1).flatten(1, 2)


def reshard(src, dst):
    """Every rank of `src` sends the heads that a rank of `dst` holds too."""
    start, num_bytes, num_calls = time.perf_counter(), 0, 0
    for src_view, src_heads in zip(src.views, src.heads, strict=True):
        for dst_view, dst_heads in zip(dst.views, dst.heads, strict=True):
            both = range(max(src_heads.start, dst_heads.start), min(src_heads.stop, dst_heads.stop))
            if both:
                num_bytes += migrate(
                    src_view.at(src.table, head_start=both.start - src_heads.start),
                    dst_view.at(dst.table, head_start=both.start - dst_heads.start),
                    SEQ_LENS,
                    num_heads=len(both),
                )
                num_calls += 1
    ms = (time.perf_counter() - start) * 1e3
    exact = all(map(torch.equal, src.tokens(), dst.tokens()))
    print(
        f"{len(src.views)} ranks -> {len(dst.views)}: {num_bytes / 1e6:.1f} MB in {num_calls} "
        f"calls, {ms:.1f} ms, {'exact' if exact else 'not the same'}"
    )
    assert exact


four, eight, four_again = Ranks(4, 16), Ranks(8, 32), Ranks(4, 16)
four.caches.normal_()
reshard(four, eight)
reshard(eight, four_again)
