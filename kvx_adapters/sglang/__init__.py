"""SGLang: its device and host memory pools as KVX views. Imports nothing of SGLang.

A pool keeps K and V of each layer as rows of one token, (size + page_size, num_kv_heads, head_dim),
or as pages of heads with SGLANG_USE_HND_KVCACHE. A request is a row of ReqToTokenPool.req_to_token:
the slot of each of its tokens, which lie in pages of page_size. The page of slot 0 belongs to
nobody: padded tokens are written there. HiCache keeps pages on the host in one of five orders.

A KVX block is a page. Requests share pages of a common prefix (the radix cache): write only the
tokens behind the prefix of a request, see `request_slots`.
"""

import kvx_core.needs_torch  # noqa: F401
from kvx_adapters.sglang.groups import LayerGroup, layer_groups
from kvx_adapters.sglang.host import host_views
from kvx_adapters.sglang.pools import cache_desc, cache_facts, cache_view
from kvx_adapters.sglang.states import state_view
from kvx_adapters.sglang.tables import (
    PADDED_PAGE,
    block_table,
    committed,
    ragged,
    request_slots,
    seq_lens,
    slot_mapping,
    span,
)

__all__ = [
    "PADDED_PAGE",
    "LayerGroup",
    "block_table",
    "cache_desc",
    "cache_facts",
    "cache_view",
    "committed",
    "host_views",
    "layer_groups",
    "ragged",
    "request_slots",
    "seq_lens",
    "slot_mapping",
    "span",
    "state_view",
]
