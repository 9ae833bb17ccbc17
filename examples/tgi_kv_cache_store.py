"""A drop-in for TGI's KVCache.store: the same arguments, the same bytes, written by KVX.

    python examples/tgi_kv_cache_store.py

In a TGI server call install(KVCache, ATTENTION, SYSTEM) before the model makes its caches. TGI is
not on PyPI, so here, on CPU, a class that allocates as TGI's does stands in for it. Keys and values
are slices of one projection, as in TGI's models: KVX takes their strides and copies nothing first.
"""

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_adapters import tgi
from kvx_core import CacheFacts, WritePlan

NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM, NUM_TOKENS = 64, 2, 64, 37


def install(kv_cache_class, attention, system):
    """Makes the instances of `kv_cache_class`, TGI's KVCache, store through KVX."""
    allocate = kv_cache_class.__init__

    def __init__(self, *, num_blocks, num_heads, head_size, dtype, device):
        allocate(
            self,
            num_blocks=num_blocks,
            num_heads=num_heads,
            head_size=head_size,
            dtype=dtype,
            device=device,
        )
        self.spec = tgi.CacheSpec(
            attention=attention,
            system=system,
            device=device.type if system == "ipex" else "",
            num_blocks=num_blocks,
            num_kv_heads=num_heads,
            head_dim=head_size,
            dtype=dtype,
        )
        self.plan = None

    def store(self, *, key, value, slots, kv_scales):
        if self.plan is None:
            view = tgi.cache_view(
                [(self.key, self.value)], self.spec, CacheFacts(), kv_scales=[kv_scales]
            )
            self.plan = WritePlan(
                view.layers[0],
                key,
                value,
                k_scale=None if view.k_scales is None else view.k_scales[0],
                v_scale=None if view.v_scales is None else view.v_scales[0],
            )
        self.plan(key, value, slots)  # negative slots are skipped

    kv_cache_class.__init__, kv_cache_class.store = __init__, store


def make_stand_in(attention):
    """A class with the constructor and the tensors of TGI's KVCache on CUDA, and no store."""

    class KVCache:
        def __init__(self, *, num_blocks, num_heads, head_size, dtype, device):
            block_size = {"flashinfer": 1, "flashdecoding": 256, "paged": 16}[attention]
            k_shape = v_shape = (num_blocks, block_size, num_heads, head_size)
            if attention == "paged":
                x = block_size // dtype.itemsize
                k_shape = (num_blocks, num_heads, head_size // x, block_size, x)
                v_shape = (num_blocks, num_heads, head_size, block_size)
            self.key = torch.zeros(k_shape, dtype=dtype, device=device)
            self.value = torch.zeros(v_shape, dtype=dtype, device=device)

    return KVCache


def read_as_tgi(cache, slots):
    """Keys and values at `slots` by the axes that TGI's kernels know, (num_tokens, head, dim)."""
    key, value = cache.key, cache.value
    if key.ndim == 5:
        key, value = key.permute(0, 3, 1, 2, 4), value.permute(0, 3, 1, 2)
    return (t.reshape(-1, NUM_KV_HEADS, HEAD_DIM)[slots] for t in (key, value))


for attention in ("flashinfer", "flashdecoding", "paged"):
    KVCache = make_stand_in(attention)
    install(KVCache, attention, "cuda")
    cache = KVCache(
        num_blocks=NUM_BLOCKS,
        num_heads=NUM_KV_HEADS,
        head_size=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    # As in TGI's models/custom_modeling: kv = qkv[..., split:].view(-1, 2, heads, dim)
    kv = torch.randn(NUM_TOKENS, 2, NUM_KV_HEADS, HEAD_DIM).bfloat16()
    block_size = cache.spec.block_size
    slots = block_size + torch.randperm((NUM_BLOCKS - 1) * block_size)[:NUM_TOKENS]  # not block 0
    cache.store(key=kv[:, 0], value=kv[:, 1], slots=slots, kv_scales=None)

    key, value = read_as_tgi(cache, slots)
    assert torch.equal(key, kv[:, 0])
    assert torch.equal(value, kv[:, 1])
    print(f"{attention}: {NUM_TOKENS} tokens of stride {kv[:, 0].stride()}, all bits as TGI's own")
