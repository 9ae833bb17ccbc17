"""FlashInfer: pages of K and V, and tables in compressed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from kvx_adapters import flashinfer
from kvx_core import CacheSpan, ScaleDesc
from tests.engines.engine import Sizes, bytes_of, facts_of, filled


class Pages:
    """A paged_kv_cache per layer, as a wrapper's `run` takes it."""

    def __init__(self, sizes: Sizes, kv_layout: str) -> None:
        self.kv_layout = kv_layout
        self.block_size = sizes.block_size
        self.blocks = range(sizes.num_blocks)
        page = (sizes.block_size, sizes.num_kv_heads)
        axes = page if kv_layout == "NHD" else page[::-1]
        shape = (sizes.num_blocks, 2, *axes, sizes.head_dim)
        self.layers = [filled(shape, sizes.dtype) for _ in range(sizes.num_layers)]
        self.raw = [bytes_of(layer) for layer in self.layers]
        facts = facts_of(sizes, "flashinfer")
        view = flashinfer.cache_view(self.layers, facts, kv_layout)
        scales = {
            name: tuple(map(ScaleDesc.of, given))
            for name, given in (("k_scales", sizes.k_scales), ("v_scales", sizes.v_scales))
            if given is not None
        }
        self.view = replace(view, **scales)

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        indptr, indices, _ = flashinfer.page_table(sequences, seq_lens, self.block_size)
        return self.view.at(flashinfer.block_table(indptr, indices), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Source: flashinfer 0.7 page.py, append_paged_kv_cache"""
        for kv, tokens in enumerate((key, value)):
            pages = self.layers[layer][:, kv]
            if self.kv_layout == "NHD":
                pages[blocks, offsets] = tokens
            else:
                pages[blocks, :, offsets] = tokens


nhd = partial(Pages, kv_layout="NHD")
hnd = partial(Pages, kv_layout="HND")
