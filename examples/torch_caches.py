"""Two paged caches of torch tensors: write into one, migrate to the other, read it back.

python examples/torch_caches.py
"""

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    Layout,
    describe,
    gather_kv,
    migrate,
    verify,
    write_kv,
)

NUM_KV_HEADS, HEAD_DIM = 2, 64

# One layer, bfloat16, pages [block, token, head, dim] of 16 tokens. K and V are the halves of one
# tensor's last axis: descriptors take any strides, so views are enough.
both = torch.zeros(10, 16, NUM_KV_HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16)
k, v = both[..., :HEAD_DIM], both[..., HEAD_DIM:]
ours = CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))

# Another, float32, pages [block, head, token, dim] of 4 tokens.
theirs = CacheDesc.from_kv(
    describe(torch.zeros(30, NUM_KV_HEADS, 4, HEAD_DIM), Layout.BLOCK_HND),
    describe(torch.zeros(30, NUM_KV_HEADS, 4, HEAD_DIM), Layout.BLOCK_HND),
)

# Write 21 tokens of a sequence that lives in blocks 7 and 2. slot = block * block_size + offset.
key, value = torch.randn(2, 21, NUM_KV_HEADS, HEAD_DIM)
slots = torch.cat([7 * 16 + torch.arange(16), 2 * 16 + torch.arange(5)])
write_kv(ours, key, value, slots)

# Migrate them: other layout, block size and dtype, all in one pass. The facts say that both caches
# mean the same; an adapter fills them in for its engine.
facts = CacheFacts(fingerprint="a model", rotary="half", rotary_dim=HEAD_DIM, rope_applied=True)
src = CacheView(layers=(ours,), facts=facts).at(block_table=[[7, 2]])
dst = CacheView(layers=(theirs,), facts=facts).at(block_table=[[3, 29, 0, 14, 8, 21]])
print(migrate(src, dst, [21]), "bytes migrated")
print(verify(src, dst, [21]))

# Read them back out of the other cache.
found_key, found_value = gather_kv(theirs, [[3, 29, 0, 14, 8, 21]], [21])
assert torch.equal(found_key[0], key.bfloat16().float())
assert torch.equal(found_value[0], value.bfloat16().float())
