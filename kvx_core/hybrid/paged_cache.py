"""The compressed entries of one layer in blocks: FP8 numbers, BF16 RoPE dims and a scale each.

CSA layers have indexer keys beside them, in FP4 with a scale for 16 numbers. A block has one id for
both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid.schema import LayerCacheSchema
from kvx_core.words import instance, integer

FP4_GROUP = 16  # numbers of an indexer key that share a scale


class PagedCache:
    """The pool of one CSA or HCA layer; nb blocks of epb entries. All of it is zero at first, but
    inverse scales are one.

    entries_fp8:      (nb, epb, nope_dim) uint8, E4M3 codes; number = code * inv_scale
    entries_rope:     (nb, epb, rope_dim) bfloat16
    inv_scale:        (nb, epb) float32
    indexer_keys_fp4: (nb, epb, indexer_head_dim / 2) uint8, E2M1 codes, an even number in the lower
                      half of a byte; None for HCA
    indexer_scales:   (nb, epb, indexer_head_dim / 16) uint8, E4M3 codes; None for HCA
    Raises InvalidArgumentError for a layer without entries.
    """

    def __init__(
        self, schema: LayerCacheSchema, num_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        instance("schema", schema, LayerCacheSchema, "a LayerCacheSchema")
        if not schema.entries_per_block:
            raise InvalidArgumentError(
                f"layer {schema.layer_idx} is of type {schema.attn_type.name}, which has no "
                "compressed entries"
            )
        num_blocks = integer("num_blocks", num_blocks, 0, 2**31 - 1)
        self.schema = schema
        self.num_blocks = num_blocks
        rows = num_blocks, schema.entries_per_block
        self.entries_fp8 = torch.zeros(*rows, schema.nope_dim, dtype=torch.uint8, device=device)
        self.entries_rope = torch.zeros(*rows, schema.rope_dim, dtype=torch.bfloat16, device=device)
        self.inv_scale = torch.ones(*rows, dtype=torch.float32, device=device)
        self.indexer_keys_fp4: Tensor | None = None
        self.indexer_scales: Tensor | None = None
        if schema.indexer_entries_per_block:
            size = schema.indexer_head_dim
            self.indexer_keys_fp4 = torch.zeros(*rows, size // 2, dtype=torch.uint8, device=device)
            self.indexer_scales = torch.zeros(
                *rows, size // FP4_GROUP, dtype=torch.uint8, device=device
            )

    def __repr__(self) -> str:
        return (
            f"PagedCache({self.schema.attn_type.name} layer {self.schema.layer_idx}, "
            f"{self.num_blocks} blocks of {self.schema.entries_per_block} entries, "
            f"{self.memory_bytes()} bytes)"
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        found = {
            "entries_fp8": self.entries_fp8,
            "entries_rope": self.entries_rope,
            "inv_scale": self.inv_scale,
            "indexer_keys_fp4": self.indexer_keys_fp4,
            "indexer_scales": self.indexer_scales,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors."""
        return sum(t.stride(0) * t.element_size() for t in self.tensors.values())

    def memory_bytes(self) -> int:
        """Bytes of the pool."""
        return sum(t.nbytes for t in self.tensors.values())
