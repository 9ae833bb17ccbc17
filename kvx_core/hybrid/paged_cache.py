"""The compressed entries of one layer in blocks: FP8 numbers, BF16 RoPE dims and a scale each.

CSA layers have indexer keys beside them, in FP4 with a scale for 16 or 32 numbers or in FP8 with a
scale for a key. A block has one id for both.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvx_core.argument_checks import instance, integer, one_of
from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid.schema import LayerCacheSchema

IndexKeys = Literal["nvfp4", "mxfp4", "fp8"]
IndexRounding = Literal["nearest_even", "thresholds"]

# Numbers of an indexer key in a byte, and numbers that share a scale in a byte; 0: a float a key.
_FORMS: dict[str, tuple[int, int]] = {"nvfp4": (2, 16), "mxfp4": (2, 32), "fp8": (1, 0)}


class PagedCache:
    """The pool of one CSA or HCA layer; nb blocks of epb entries. All of it is zero at first, but
    inverse scales are one.

    entries_fp8:    (nb, epb, nope_dim) uint8, E4M3 codes; number = code * inv_scale
    entries_rope:   (nb, epb, rope_dim) bfloat16
    inv_scale:      (nb, epb) float32; None if the schema needs none: all are 1
    indexer_keys:   (nb, epb, indexer_head_dim / 2) uint8, E2M1 codes, an even number in the lower
                    half of a byte; None for HCA
    indexer_scales: (nb, epb, indexer_head_dim / 16) uint8, E4M3 codes; None for HCA
    index_keys:     "nvfp4", as above; "mxfp4": scales of 32 numbers, uint8 E8M0 codes in
                    (nb, epb, indexer_head_dim / 32); "fp8": keys are (nb, epb, indexer_head_dim)
                    uint8, E4M3 codes, and scales (nb, epb) float32, as vLLM's and SGLang's
    index_rounding: of E2M1 codes, see ops.flush_write_csa: "nearest_even", as vLLM; "thresholds",
                    as SGLang
    Raises InvalidArgumentError for a layer without entries, keys that no scale divides, and FP8
    keys by thresholds.
    """

    def __init__(
        self,
        schema: LayerCacheSchema,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        index_keys: IndexKeys = "nvfp4",
        index_rounding: IndexRounding = "nearest_even",
    ) -> None:
        instance("schema", schema, LayerCacheSchema, "a LayerCacheSchema")
        if not schema.entries_per_block:
            raise InvalidArgumentError(
                f"layer {schema.layer_idx} is of type {schema.attn_type.name}, which has no "
                "compressed entries"
            )
        num_blocks = integer("num_blocks", num_blocks, 0, 2**31 - 1)
        one_of("index_keys", index_keys, *_FORMS)
        one_of("index_rounding", index_rounding, "nearest_even", "thresholds")
        if index_rounding == "thresholds" and index_keys == "fp8":
            raise InvalidArgumentError(
                "index_rounding is 'thresholds' and index_keys 'fp8', expected 'nearest_even': "
                "thresholds are those of E2M1"
            )
        self.schema = schema
        self.num_blocks = num_blocks
        self.index_keys: IndexKeys = index_keys
        self.index_rounding: IndexRounding = index_rounding
        rows = num_blocks, schema.entries_per_block
        self.entries_fp8 = torch.zeros(*rows, schema.nope_dim, dtype=torch.uint8, device=device)
        self.entries_rope = torch.zeros(*rows, schema.rope_dim, dtype=torch.bfloat16, device=device)
        scaled = schema.needs_inv_scale
        self.inv_scale = torch.ones(*rows, dtype=torch.float32, device=device) if scaled else None
        self.indexer_keys: Tensor | None = None
        self.indexer_scales: Tensor | None = None
        if schema.indexer_entries_per_block:
            size, (halves, group) = schema.indexer_head_dim, _FORMS[index_keys]
            if group and size % group:
                raise InvalidArgumentError(
                    f"indexer_head_dim is {size}, expected a multiple of {group}: {index_keys} "
                    f"keys have a scale for {group} numbers"
                )
            self.indexer_keys = torch.zeros(*rows, size // halves, dtype=torch.uint8, device=device)
            of_key = (size // group,) if group else ()
            kind = torch.uint8 if group else torch.float32
            self.indexer_scales = torch.zeros(*rows, *of_key, dtype=kind, device=device)

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
            "indexer_keys": self.indexer_keys,
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
