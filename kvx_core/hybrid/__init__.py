"""DeepSeek-V4's cache: compressed entries in blocks, and a window and tails per request.

config.py reads a model's numbers, schema.py says what a layer keeps, allocator.py hands out blocks,
block_tables.py says who holds which, paged_cache.py and state_cache.py hold the tensors. manager.py
owns all of it, prepare_forward.py takes blocks between two captured
graphs, handle.py is a layer's cache as a forward pass uses it, flush.py turns tails into entries.
engine_pages.py and pending_rows.py describe what engines keep such a cache in. All of it needs
torch.
Source: arXiv 2606.19348
"""

from kvx_core.hybrid.allocator import BlockAllocator, OutOfBlocksError, capturing
from kvx_core.hybrid.compressor import Compressor
from kvx_core.hybrid.config import DSV4Config
from kvx_core.hybrid.engine_pages import (
    IndexerPages,
    RecordPages,
    byte_pages,
    migrate_pages,
    page_bytes,
    requantize_entries,
    requantize_keys,
)
from kvx_core.hybrid.flush import (
    compress_csa,
    compress_hca,
    maybe_flush_csa,
    maybe_flush_hca,
)
from kvx_core.hybrid.handle import ClassicalView, IndexerView, LayerCacheHandle, SWAView
from kvx_core.hybrid.manager import KVCacheManager
from kvx_core.hybrid.paged_cache import PagedCache
from kvx_core.hybrid.pending_rows import (
    migrate_pending,
    pending_to_tails,
    pending_tokens,
    tails_to_pending,
)
from kvx_core.hybrid.prepare_forward import PreparedForward, prepare_forward
from kvx_core.hybrid.schema import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    AttentionType,
    LayerCacheSchema,
    LayerSpec,
    build_schema,
    compute_block_budget,
    hf_config,
    schedule_of,
)
from kvx_core.hybrid.sizes import bytes_per_request, bytes_per_token, gqa_bytes_per_token
from kvx_core.hybrid.state_cache import StateCache

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "AttentionType",
    "BlockAllocator",
    "ClassicalView",
    "Compressor",
    "DSV4Config",
    "IndexerPages",
    "IndexerView",
    "KVCacheManager",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "OutOfBlocksError",
    "PagedCache",
    "PreparedForward",
    "RecordPages",
    "SWAView",
    "StateCache",
    "build_schema",
    "byte_pages",
    "bytes_per_request",
    "bytes_per_token",
    "capturing",
    "compress_csa",
    "compress_hca",
    "compute_block_budget",
    "gqa_bytes_per_token",
    "hf_config",
    "maybe_flush_csa",
    "maybe_flush_hca",
    "migrate_pages",
    "migrate_pending",
    "page_bytes",
    "pending_to_tails",
    "pending_tokens",
    "prepare_forward",
    "requantize_entries",
    "requantize_keys",
    "schedule_of",
    "tails_to_pending",
]
