"""MLX: the caches of mlx-lm as KVX views. Imports no mlx.

`cache_view` describes keys and values, `state_view` the states of recurrent layers, `hybrid_view`
both of a model that has both.
"""

from kvx_adapters.mlx.cache import (
    cache_desc,
    cache_facts,
    cache_view,
    num_kept,
    positions,
    reserve,
    ring_slots,
    seq_lens,
    span,
)
from kvx_adapters.mlx.states import hybrid_view, reserve_states, state_view

__all__ = [
    "cache_desc",
    "cache_facts",
    "cache_view",
    "hybrid_view",
    "num_kept",
    "positions",
    "reserve",
    "reserve_states",
    "ring_slots",
    "seq_lens",
    "span",
    "state_view",
]
