"""vLLM: its paged caches as KVX views. Imports no vllm.

Since 0.26 a layer's cache is one tensor, logically [num_blocks, num_kv_heads, block_size,
2 * head_size] in one of six physical orders; K and V share its last axis. Version, backend, spec,
resolved layout, cache dtype and ISA decide which bytes are K; the shape does not: with two KV heads
a packed cache and the split caches of older versions can have the same shape. So a descriptor is
derived from what vLLM says (LayerSpec), then checked against the tensor's sizes, strides and
storage. A tensor that disagrees, or an unknown cache, is refused. `self_test` proves a description.

`cache_desc` describes one layer of vLLM 0.20 to 0.33, `layer_groups` and `group_view` all layers
of a worker since 0.26; `live_*` do that for an engine that runs in this process. `nvfp4_view`
describes pages of NVFP4 data and scales.
"""

import kvx_core.needs_torch  # noqa: F401
from kvx_adapters.vllm.amx import amx_planes
from kvx_adapters.vllm.describe import cache_desc, cache_view, inline_scales
from kvx_adapters.vllm.facts import cache_facts, kv_heads_of, num_kv_layers, total_kv_heads
from kvx_adapters.vllm.groups import LayerGroup, group_view, layer_groups, layout_before_29
from kvx_adapters.vllm.live import live_block_table, live_span, live_view
from kvx_adapters.vllm.model_record import loads_files, model_record
from kvx_adapters.vllm.nvfp4 import nvfp4_view
from kvx_adapters.vllm.refusals import model_refusal, refusal
from kvx_adapters.vllm.self_test import engine_write, self_test, self_test_group
from kvx_adapters.vllm.spec import LayerSpec
from kvx_adapters.vllm.state_self_test import self_test_states
from kvx_adapters.vllm.states import live_hybrid_span, state_view
from kvx_adapters.vllm.tables import NULL_BLOCK_ID, block_table, seq_lens, slot_mapping

__all__ = [
    "NULL_BLOCK_ID",
    "LayerGroup",
    "LayerSpec",
    "amx_planes",
    "block_table",
    "cache_desc",
    "cache_facts",
    "cache_view",
    "engine_write",
    "group_view",
    "inline_scales",
    "kv_heads_of",
    "layer_groups",
    "layout_before_29",
    "live_block_table",
    "live_hybrid_span",
    "live_span",
    "live_view",
    "loads_files",
    "model_record",
    "model_refusal",
    "num_kv_layers",
    "nvfp4_view",
    "refusal",
    "self_test",
    "self_test_group",
    "self_test_states",
    "seq_lens",
    "slot_mapping",
    "state_view",
    "total_kv_heads",
]
