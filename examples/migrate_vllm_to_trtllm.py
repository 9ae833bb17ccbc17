"""Migrates vLLM's cache into a pool of TensorRT-LLM, and makes the pool's block table.

    python examples/migrate_vllm_to_trtllm.py

Neither engine runs: two caches on the CPU are laid out as theirs. On a GPU the tensors are vLLM's
kv_caches and TensorRT-LLM's get_unique_primary_pool(), and tables and lengths are there too.
"""

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_adapters import tensorrt_llm, vllm
from kvx_core import BlockTable, CacheFacts, migrate, verify

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 128
SEQ_LENS = [101, 37, 1]
FACTS = CacheFacts(fingerprint="a model", rotary="half", rotary_dim=HEAD_DIM, rope_applied=True)

# vLLM: a tensor per layer, blocks of 16 tokens, K and V side by side. Full of what it computed.
vllm_spec = vllm.LayerSpec(
    version="0.32.0",
    backend="FLASH_ATTN",
    layout="LBHNC",
    kv_cache_dtype="auto",
    dtype=torch.bfloat16,
    num_blocks=20,
    block_size=16,
    num_kv_heads=NUM_KV_HEADS,
    head_size=HEAD_DIM,
    page_size_bytes=NUM_KV_HEADS * 16 * 2 * HEAD_DIM * 2,
    num_layers=NUM_LAYERS,
)
kv_caches = torch.randn(NUM_LAYERS, 20, NUM_KV_HEADS, 16, 2 * HEAD_DIM).bfloat16()
vllm_blocks = [[4, 9, 2, 17, 5, 13, 8], [1, 19, 11], [6]]
src = vllm.cache_view(list(kv_caches), vllm_spec, FACTS).at(vllm.block_table(vllm_blocks))

# TensorRT-LLM: one pool for all layers, blocks of 64 tokens, K and V of a layer after each other.
spec = tensorrt_llm.PoolSpec(
    layers=tuple(range(NUM_LAYERS)),
    num_blocks=6,
    tokens_per_block=64,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    dtype="BF16",
)
pool = torch.zeros(spec.pool_shape, dtype=spec.torch_dtype)
blocks = [[3, 0], [5], [2]]
offsets = tensorrt_llm.block_offsets(blocks, spec, max_blocks_per_seq=4)
dst = tensorrt_llm.cache_view(spec, pool, FACTS).at(BlockTable.kv_offsets(offsets))

num_bytes = migrate(src, dst, SEQ_LENS)
print(f"{num_bytes} bytes migrated; {verify(src, dst, SEQ_LENS)}")
print(f"K offsets of sequence 0: {offsets[0, 0, 0].tolist()}")

# As each engine finds a token itself. TensorRT-LLM: an offset counts sub-blocks, and every layer
# reads the same table from a base of its own (kvCacheUtils.h, getBlockPtr and getKVLocalIdx).
sub_blocks = pool.view(-1, NUM_KV_HEADS, 64, HEAD_DIM)
for sequence, length in enumerate(SEQ_LENS):
    for t in range(length):
        ours = kv_caches[:, vllm_blocks[sequence][t // 16], :, t % 16]
        for kv, half in enumerate(ours.split(HEAD_DIM, dim=-1)):
            offset = int(offsets[sequence, 0, kv, t // 64])
            for layer in range(NUM_LAYERS):
                assert torch.equal(sub_blocks[layer * 2 + offset, :, t % 64], half[layer])
print("TensorRT-LLM's own indexing finds every token")
