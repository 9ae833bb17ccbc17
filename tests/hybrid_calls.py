"""Valid calls of kvx_hybrid.h for test_validation.py: a struct each, with the tensors behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvx_core._c import abi_hybrid
from kvx_core.types import DType
from tests.calls import Backend

F32, BF16 = DType.F32, DType.BF16


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def described(
    on: Backend, name: str, struct: type[Any], tensors: dict[str, Tensor], **fields: int | float
) -> dict[str, Any]:
    """The struct, under its name in sentences, and the tensors, under their fields'."""
    addresses = {field: on.address(tensor) for field, tensor in tensors.items()}
    return {name: struct(memory=on.memory, **addresses, **fields), **tensors}


def append(on: Backend) -> dict[str, Any]:
    """3 tokens into 2 rings of 4 rows of 8 and 4 numbers."""
    tensors = {
        "x": torch.ones(3, 12, dtype=torch.bfloat16),
        "positions": torch.tensor([5, 6, 7]),
        "slots": i32(0, -1, 1),
        "fp8": torch.zeros(2, 4, 8, dtype=torch.uint8),
        "rope": torch.zeros(2, 4, 4, dtype=torch.bfloat16),
        "inv_scale": torch.zeros(2, 4),
        "pos": torch.zeros(2, 4, dtype=torch.int32),
        "head": i32(0, 0),
        "span_of": i32(0, 1, 2),
        "span_starts": i32(0, 1, 2, 3),
    }
    sizes = {"num_tokens": 3, "num_slots": 2, "window": 4, "nope_dim": 8, "rope_dim": 4}
    sizes |= {"num_spans": 3}
    struct = abi_hybrid.kvx_hybrid_append_t
    return described(on, "append", struct, tensors, **sizes, position_bytes=8)


def tail(on: Backend) -> dict[str, Any]:
    """3 rows of 8 numbers into 2 tails of 4 rows."""
    tensors = {
        "k": torch.ones(3, 8),
        "z": torch.ones(3, 8),
        "slots": i32(0, -1, 1),
        "ka": torch.zeros(2, 4, 8),
        "za": torch.zeros(2, 4, 8),
        "tail_len": i32(3, 0),
        "span_of": i32(0, 1, 2),
        "span_starts": i32(0, 1, 2, 3),
    }
    sizes = {"num_tokens": 3, "num_slots": 2, "ratio": 4, "row": 8, "num_spans": 3}
    struct = abi_hybrid.kvx_hybrid_tail_t
    return described(on, "tail", struct, tensors, **sizes, dtype=F32, state=F32)


def compress(on: Backend) -> dict[str, Any]:
    """2 entries of 8 numbers, 4 of them rotated, from wide tails of 4 tokens."""
    tensors = {name: torch.ones(2, 4, 16) for name in ("ka", "za", "kb", "zb")}
    tensors |= {
        "norm_weight": torch.ones(8),
        "cos_sin": torch.ones(6, 4),
        "positions": torch.tensor([0, 4]),
        "slots": i32(1, 0),
        "out": torch.zeros(2, 8),
    }
    sizes = {"num_rows": 2, "num_slots": 2, "ratio": 4, "head_dim": 8, "rope_dim": 4}
    sizes |= {"position_bytes": 8, "num_positions": 6, "state": F32, "out_dtype": F32}
    return described(on, "compress", abi_hybrid.kvx_hybrid_compress_t, tensors, **sizes, eps=1e-6)


def flush(on: Backend) -> dict[str, Any]:
    """2 entries and keys of 32 numbers into 3 blocks of 2 entries."""
    tensors = {
        "entry": torch.ones(2, 12),
        "index_key": torch.ones(2, 32),
        "slots": i32(0, 1),
        "entry_ids": i32(0, 3),
        "block_table": torch.tensor([[2, -1], [-1, 0]], dtype=torch.int32),
        "fp8": torch.zeros(3, 2, 8, dtype=torch.uint8),
        "rope": torch.zeros(3, 2, 4, dtype=torch.bfloat16),
        "inv_scale": torch.zeros(3, 2),
        "key_codes": torch.zeros(3, 2, 16, dtype=torch.uint8),
        "key_scales": torch.zeros(3, 2, 2, dtype=torch.uint8),
    }
    sizes = {"num_rows": 2, "num_blocks": 3, "entries_per_block": 2, "nope_dim": 8, "rope_dim": 4}
    sizes |= {"max_blocks": 2, "key_dim": 32, "keys": abi_hybrid.NVFP4, "dtype": F32}
    return described(on, "flush", abi_hybrid.kvx_hybrid_flush_t, tensors, **sizes)


def state(on: Backend) -> dict[str, Any]:
    """2 of 3 tails of 4 rows."""
    tensors = {name: torch.ones(3, 4, 8) for name in ("ka", "za", "kb", "zb")}
    tensors |= {"slots": i32(2, 0), "tail_len": i32(4, 4, 4)}
    sizes = {"num_rows": 2, "num_slots": 3, "ratio": 4, "row": 8, "state": F32}
    return described(on, "state", abi_hybrid.kvx_hybrid_state_t, tensors, **sizes)


def pages(on: Backend) -> dict[str, Any]:
    """2 rows into 2 pages of 2 entries."""
    tensors = {
        "slots": torch.tensor([3, 0]),
        "rows": torch.ones(2, 512),
        "pages": torch.zeros(2, 1728, dtype=torch.uint8),
    }
    sizes = {"num_rows": 2, "num_pages": 2, "entries_per_page": 2, "dtype": F32}
    struct = abi_hybrid.kvx_hybrid_pages_t
    given = described(on, "call", struct, tensors, **sizes, page_stride=1728)
    # The struct and one of its fields have the same name.
    return given | {"pages": given["call"], "bytes_of_pages": tensors["pages"]}


FUNCTIONS = {
    "hybrid_append": ("kvx_hybrid_append_swa", append, "append"),
    "hybrid_tail": ("kvx_hybrid_append_tail", tail, "tail"),
    "hybrid_compress": ("kvx_hybrid_compress", compress, "compress"),
    "hybrid_flush": ("kvx_hybrid_flush_write", flush, "flush"),
    "hybrid_state": ("kvx_hybrid_rotate_state", state, "state"),
    "hybrid_pages": ("kvx_hybrid_write_pages", pages, "pages"),
}
