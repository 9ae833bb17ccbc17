"""HF transformers 5: its caches as KVX views. Imports no transformers.

`cache_view` describes a DynamicCache or StaticCache whose layers all hold every token,
`padded_span` the real tokens of a padded batch in it. `layer_groups` is for models whose layers
differ, in sliding windows or sizes. `paged_groups` describes the cache of continuous batching.
`use_packed` makes a model keep its tokens in `PackedKVCache`s. `hybrid_view` describes the cache of
a model of which some layers keep states. Quantized layers are refused.
"""

import kvx_core.needs_torch  # noqa: F401
from kvx_adapters.transformers.cache import (
    block_table,
    cache_desc,
    cache_view,
    padded_span,
    seq_lens,
    slot_mapping,
    starts,
)
from kvx_adapters.transformers.facts import cache_facts
from kvx_adapters.transformers.groups import LayerGroup, layer_groups, shared_spans
from kvx_adapters.transformers.packed import use_packed
from kvx_adapters.transformers.paged import PagedGroup, paged_groups
from kvx_adapters.transformers.record import model_record
from kvx_adapters.transformers.reserve import geometry, reserve
from kvx_adapters.transformers.states import hybrid_view, state_view

__all__ = [
    "LayerGroup",
    "PagedGroup",
    "block_table",
    "cache_desc",
    "cache_facts",
    "cache_view",
    "geometry",
    "hybrid_view",
    "layer_groups",
    "model_record",
    "padded_span",
    "paged_groups",
    "reserve",
    "seq_lens",
    "shared_spans",
    "slot_mapping",
    "starts",
    "state_view",
    "use_packed",
]
