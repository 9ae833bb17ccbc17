"""llama.cpp without flash attention: V is transposed. A stream is a block, a row of it a cell.

tests/adapters/test_llama_cpp.py has llama.cpp itself; here is only its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvx_adapters import llama_cpp
from kvx_core import CacheSpan, DType
from tests.engines.engine import FINGERPRINT, Sizes, bytes_of, filled


class Cells:
    """`num_blocks` streams of `block_size` cells."""

    def __init__(self, sizes: Sizes) -> None:
        self.block_size = sizes.block_size
        self.blocks = range(sizes.num_blocks)
        streams, cells = sizes.num_blocks, sizes.block_size
        heads, dim = sizes.num_kv_heads, sizes.head_dim
        self.k = [
            filled((streams, cells, heads, dim), sizes.dtype) for _ in range(sizes.num_layers)
        ]
        self.v = [
            filled((streams, heads, dim, cells), sizes.dtype) for _ in range(sizes.num_layers)
        ]
        self.raw = [bytes_of(tensor) for tensor in (*self.k, *self.v)]
        dtype = DType.of(sizes.dtype)
        self.view = llama_cpp.cache_view(
            [(self._ggml(k), self._ggml(v)) for k, v in zip(self.k, self.v, strict=True)],
            llama_cpp.cache_facts(
                rope_type=2,
                rotary_dim=dim,
                num_layers=sizes.num_layers,
                num_kv_heads=heads,
                k_dtype=dtype,
                v_dtype=dtype,
                rotation=llama_cpp.Rotation(0, 0),
                fingerprint=FINGERPRINT,
            ),
            num_kv_heads=heads,
            v_transposed=True,
            memory=None,
            owner=self,
        )

    def _ggml(self, tensor: Tensor) -> Any:
        """ggml_tensor: `ne` does not show that V is transposed."""
        numbers = tensor[0].numel() // self.block_size
        row = numbers * tensor.itemsize
        return SimpleNamespace(
            type=llama_cpp.ggml_type(DType.of(tensor.dtype)),
            ne=[numbers, self.block_size, len(tensor), 1],
            nb=[tensor.itemsize, row, row * self.block_size, tensor.nbytes],
            data=tensor.data_ptr(),
        )

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        cells = [
            stream * self.block_size + cell
            for blocks, length in zip(sequences, seq_lens, strict=True)
            for stream in blocks
            for cell in range(length)
        ]
        slots = llama_cpp.slot_mapping(torch.tensor(cells, dtype=torch.int64))
        return self.view.at(slots=slots, head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Source: llama.cpp v0.5.0 src/llama-kv-cache.cpp, set_input_k_idxs, set_input_v_idxs"""
        self.k[layer][blocks, offsets] = key
        self.v[layer][blocks, :, :, offsets] = value
