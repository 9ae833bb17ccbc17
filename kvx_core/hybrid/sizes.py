"""Bytes that a token of context takes in the compressed entries of all layers.

Windows and tails are not counted: they take a fixed size per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvx_core.hybrid.config import DSV4Config, field
from kvx_core.hybrid.schema import AttentionType, LayerSpec, specs
from kvx_core.words import integer


def bytes_per_token(
    schedule: Sequence[LayerSpec],
    *,
    entry_bytes: int = 584,
    indexer_bytes: int = 68,
    config: DSV4Config | None = None,
) -> float:
    """Bytes per token of a model: an entry stands for m or m' tokens.

    entry_bytes:   of a compressed entry; 584: 448 in FP8, 64 in BF16, 7 scales, a byte unused
    indexer_bytes: of an indexer key; 68: 128 numbers in MXFP4; 132: in FP8 with a float32 scale
    """
    config = DSV4Config() if config is None else config
    schedule = specs("schedule", schedule)
    entry_bytes = integer("entry_bytes", entry_bytes)
    indexer_bytes = integer("indexer_bytes", indexer_bytes)
    csa = sum(spec.attn is AttentionType.CSA for spec in schedule)
    hca = sum(spec.attn is AttentionType.HCA for spec in schedule)
    return csa * (entry_bytes + indexer_bytes) / field(
        config, "csa_compression_ratio"
    ) + hca * entry_bytes / field(config, "hca_compression_ratio")


def gqa_bytes_per_token(num_layers: int, num_kv_heads: int = 8, head_dim: int = 128) -> int:
    """Bytes per token of K and V of every token in BF16."""
    heads = integer("num_kv_heads", num_kv_heads) * integer("head_dim", head_dim)
    return 2 * heads * 2 * integer("num_layers", num_layers)
