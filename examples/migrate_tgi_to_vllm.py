"""Migrates TGI's paged cache, K packed and V transposed, into vLLM's, K and V side by side.

    python examples/migrate_tgi_to_vllm.py

Neither engine runs: two caches on the CPU are laid out as theirs. On a GPU the tensors are TGI's
KVCache.key and .value and vLLM's kv_caches, and tables and lengths are there too.
"""

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_adapters import tgi, vllm
from kvx_core import CacheFacts, migrate, verify

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 128
SEQ_LENS = [101, 37, 1]
FACTS = CacheFacts(fingerprint="a model", rotary="half", rotary_dim=HEAD_DIM, rope_applied=True)

# TGI: two tensors per layer, blocks of 16 tokens. Full of what it computed.
spec = tgi.CacheSpec(
    attention="paged",
    system="cuda",
    num_blocks=20,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    dtype=torch.float16,
)
kv_cache = [
    (torch.randn(spec.k_shape).half(), torch.randn(spec.v_shape).half()) for _ in range(NUM_LAYERS)
]
# The columns after a request's blocks are memory that nobody has initialised.
tgi_blocks = torch.randint(-(2**31), 2**31, (3, 8), dtype=torch.int32)
for row, blocks in zip(tgi_blocks, ([4, 9, 2, 17, 5, 13, 8], [1, 19, 11], [6]), strict=True):
    row[: len(blocks)] = torch.tensor(blocks)
src = tgi.cache_view(kv_cache, spec, FACTS).at(tgi.block_table(tgi_blocks))

# vLLM: a tensor per layer, here in blocks of 32 tokens.
vllm_spec = vllm.LayerSpec(
    version="0.32.0",
    backend="FLASH_ATTN",
    layout="LBNHC",
    kv_cache_dtype="auto",
    dtype=torch.float16,
    num_blocks=10,
    block_size=32,
    num_kv_heads=NUM_KV_HEADS,
    head_size=HEAD_DIM,
    page_size_bytes=NUM_KV_HEADS * 32 * 2 * HEAD_DIM * 2,
    num_layers=NUM_LAYERS,
)
memory = torch.zeros(NUM_LAYERS, 10, 32, NUM_KV_HEADS, 2 * HEAD_DIM, dtype=torch.float16)
kv_caches = memory.transpose(2, 3)  # always (block, head, token, K and V), in any order in memory
vllm_blocks = [[7, 3, 9, 1], [4, 8], [2]]
dst = vllm.cache_view(list(kv_caches), vllm_spec, FACTS).at(vllm.block_table(vllm_blocks))

num_bytes = migrate(src, dst, SEQ_LENS)
print(f"{num_bytes} bytes migrated; {verify(src, dst, SEQ_LENS)}")

# As each engine finds a token itself.
for sequence, length in enumerate(SEQ_LENS):
    for t in range(length):
        for (key_cache, value_cache), ours in zip(kv_cache, kv_caches, strict=True):
            block = tgi_blocks[sequence, t // 16]
            key = key_cache[block, :, :, t % 16].flatten(1)  # (head, dim / x, x)
            value = value_cache[block, :, :, t % 16]
            found = ours[vllm_blocks[sequence][t // 32], :, t % 32]
            assert torch.equal(found, torch.cat([key, value], dim=-1))
print("vLLM's own indexing finds every token")
