"""HF transformers 5: its caches as KVX views. Imports no transformers.

`cache_view` describes a DynamicCache or StaticCache whose layers all hold every token,
`padded_span` the real tokens of a padded batch in it. `layer_groups` is for models whose layers
differ, in sliding windows or sizes. `paged_groups` describes the cache of continuous batching.
`use_packed` makes a model keep its tokens in `PackedKVCache`s.
Quantized and linear-attention layers are refused.
"""

import kvx_core.needs_torch  # noqa: F401
from kvx_adapters.transformers.cache import (
    block_table,
    cache_desc,
    cache_view,
    geometry,
    padded_span,
    reserve,
    seq_lens,
    slot_mapping,
    starts,
)
from kvx_adapters.transformers.facts import cache_facts
from kvx_adapters.transformers.groups import LayerGroup, layer_groups, shared_spans
from kvx_adapters.transformers.packed import use_packed
from kvx_adapters.transformers.paged import PagedGroup, paged_groups
from kvx_adapters.transformers.record import model_record

__all__ = [
    "LayerGroup",
    "PagedGroup",
    "block_table",
    "cache_desc",
    "cache_facts",
    "cache_view",
    "geometry",
    "layer_groups",
    "model_record",
    "padded_span",
    "paged_groups",
    "reserve",
    "seq_lens",
    "shared_spans",
    "slot_mapping",
    "starts",
    "use_packed",
]
