"""TensorRT-LLM: the pools of its paged KV cache as KVX views. Imports no tensorrt_llm.

A pool is one allocation, (num_blocks, num_layers, K and V, num_kv_heads, tokens_per_block,
head_dim), of the layers that share a window and a size. Its tables hold KVCacheIndex: the number of
a sub-block (the K or V of one block of one layer), counted for the first layer. For another layer
the kernels move the base address. So one table serves all layers of a pool, and a view is one pool.

A pool's tensor does not show how many heads, tokens and dims there are, nor their order: PoolSpec
says it under TensorRT-LLM's names. A tensor that disagrees is refused.

`cache_view` describes a pool from its tensor or address, `cache_views` all pools of a manager,
`buffer_view` one from get_buffers, `slot_view` one of KVCacheManagerV2 from its own addresses.
"""

import kvx_core.needs_torch  # noqa: F401
from kvx_adapters.tensorrt_llm.buffers import buffer_view, slot_view
from kvx_adapters.tensorrt_llm.describe import Pool, cache_desc, cache_view, cache_views
from kvx_adapters.tensorrt_llm.facts import cache_facts
from kvx_adapters.tensorrt_llm.index import NULL_INDEX, UNSET, PoolIndex, decode, encode
from kvx_adapters.tensorrt_llm.spec import PoolSpec, pool_specs
from kvx_adapters.tensorrt_llm.tables import (
    block_offsets,
    block_table,
    id_table,
    page_table,
    seq_lens,
    span,
    starts,
)

__all__ = [
    "NULL_INDEX",
    "UNSET",
    "Pool",
    "PoolIndex",
    "PoolSpec",
    "block_offsets",
    "block_table",
    "buffer_view",
    "cache_desc",
    "cache_facts",
    "cache_view",
    "cache_views",
    "decode",
    "encode",
    "id_table",
    "page_table",
    "pool_specs",
    "seq_lens",
    "slot_view",
    "span",
    "starts",
]
