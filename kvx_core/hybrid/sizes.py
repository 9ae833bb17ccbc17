"""Bytes that a token of context takes in the compressed entries of all layers, and what a request
takes beside them: windows and tails, of a fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvx_core.argument_checks import integer
from kvx_core.hybrid.config import DSV4Config, field
from kvx_core.hybrid.schema import AttentionType, LayerSpec, build_schema, specs


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


def bytes_per_request(
    schedule: Sequence[LayerSpec], *, config: DSV4Config | None = None, tail_bytes: int = 4
) -> int:
    """Bytes of a request's slot in the state caches of all layers: its window and tails.

    tail_bytes: of a number of a tail; 4: float32
    A row of a window has the bytes of an entry with a float32 scale, and a position. Rows of CSA
    tails are two projections wide; see StateCache.
    """
    config = DSV4Config() if config is None else config
    tail_bytes = integer("tail_bytes", tail_bytes)
    total = 0
    for schema in (build_schema(config, spec) for spec in specs("schedule", schedule)):
        window_row = schema.nope_dim + 2 * schema.rope_dim + 4 + 4
        dims = schema.entry_head_dim + schema.indexer_head_dim  # the indexer has tails of its own
        halves = 2 if schema.tail_buffer_size_b else 1
        tails = 2 * schema.tail_buffer_size * halves * dims * tail_bytes  # values and scores
        lengths = bool(schema.tail_buffer_size) + bool(schema.indexer_head_dim)
        total += schema.swa_window_size * window_row + 4 + tails + 4 * lengths
    return total


def gqa_bytes_per_token(num_layers: int, num_kv_heads: int = 8, head_dim: int = 128) -> int:
    """Bytes per token of K and V of every token in BF16."""
    heads = integer("num_kv_heads", num_kv_heads) * integer("head_dim", head_dim)
    return 2 * heads * 2 * integer("num_layers", num_layers)
