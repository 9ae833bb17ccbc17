"""TGI (text-generation-inference): its paged caches as KVX views. Imports nothing of TGI.

KVCache.__init__ chooses axes and sizes by two globals, ATTENTION and SYSTEM, and by the kind of
device; one shape can have several meanings. So a descriptor is derived from TGI's settings
(CacheSpec) and then checked against the tensors. Tensors that disagree, and settings that are not
in the table _FLAVOURS of caches.py, are refused. A host copy of a cache in XPU or HPU memory is
described like the cache itself.

Block tables serve to read whole sequences. With shared prefixes or cyclic windows, use slots: see
`request_slots` and `slot_mapping`.
"""

import kvx_core.needs_torch  # noqa: F401
from kvx_adapters.tgi.caches import (
    RESERVED_BLOCK_ID,
    CacheSpec,
    KVScales,
    cache_desc,
    cache_facts,
    cache_view,
)
from kvx_adapters.tgi.tables import (
    block_table,
    ragged,
    request_slots,
    seq_lens,
    slot_mapping,
    span,
    without_negative_slots,
)

__all__ = [
    "RESERVED_BLOCK_ID",
    "CacheSpec",
    "KVScales",
    "block_table",
    "cache_desc",
    "cache_facts",
    "cache_view",
    "ragged",
    "request_slots",
    "seq_lens",
    "slot_mapping",
    "span",
    "without_negative_slots",
]
