"""Caches of plain torch tensors, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kvx_core import CacheDesc, CacheSpan, CacheView, Layout, ScaleDesc, describe
from tests.engines.engine import Sizes, bytes_of, facts_of, filled, poisoned_table


class TorchCache:
    """A K and a V tensor per layer; V is left out with MLA."""

    dense = False

    def __init__(self, sizes: Sizes, layout: Layout, *, has_v: bool = True) -> None:
        self.layout = layout
        self.block_size = sizes.block_size
        self.blocks = range(sizes.num_blocks)
        shape = {
            Layout.BLOCK_NHD: (sizes.block_size, sizes.num_kv_heads, sizes.head_dim),
            Layout.BLOCK_HND: (sizes.num_kv_heads, sizes.block_size, sizes.head_dim),
        }[layout]
        self.layers = [
            [filled((sizes.num_blocks, *shape), sizes.dtype) for _ in range(2 if has_v else 1)]
            for _ in range(sizes.num_layers)
        ]
        self.raw = [bytes_of(tensor) for layer in self.layers for tensor in layer]
        facts = facts_of(sizes, "torch")
        k_scales, v_scales = (
            None if scales is None else tuple(map(ScaleDesc.of, scales))
            for scales in (sizes.k_scales, sizes.v_scales)
        )
        self.view = CacheView(
            layers=tuple(
                CacheDesc.from_kv(*(describe(tensor, layout) for tensor in layer))
                for layer in self.layers
            ),
            facts=facts,
            k_scales=k_scales,
            v_scales=v_scales if has_v else None,
            dense=self.dense,
        )

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        return self.view.at(poisoned_table(sequences), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor | None
    ) -> None:
        for tensor, tokens in zip(self.layers[layer], (key, value), strict=False):
            if self.layout is Layout.BLOCK_NHD:
                tensor[blocks, offsets] = tokens
            else:
                tensor[blocks, :, offsets] = tokens


class DenseCache(TorchCache):
    """(sequence, token, head, dim): sequence s is block s, and there is no table."""

    dense = True

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, Layout.BLOCK_NHD)

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        assert sequences == [[row] for row in range(len(sequences))]
        return self.view.at(head_start=head_start)


dense = DenseCache
nhd = partial(TorchCache, layout=Layout.BLOCK_NHD)
hnd = partial(TorchCache, layout=Layout.BLOCK_HND)
latent = partial(TorchCache, layout=Layout.BLOCK_NHD, has_v=False)
