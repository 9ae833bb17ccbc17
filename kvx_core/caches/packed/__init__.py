"""A cache that only appends: one layer's keys and values as (batch, seq, dim).

cache.py holds the tokens, attention.py attends to them in a transformer block with heads.py and
masks.py, view.py describes caches as an end of a migration. All of it needs torch.
"""

from kvx_core.caches.packed.attention import CachedAttention
from kvx_core.caches.packed.cache import PackedKVCache
from kvx_core.caches.packed.heads import expand_heads
from kvx_core.caches.packed.masks import alibi_mask, alibi_slopes, causal_mask
from kvx_core.caches.packed.view import packed_view
from kvx_core.ops.append_op import kvcache_append

__all__ = [
    "CachedAttention",
    "PackedKVCache",
    "alibi_mask",
    "alibi_slopes",
    "causal_mask",
    "expand_heads",
    "kvcache_append",
    "packed_view",
]
