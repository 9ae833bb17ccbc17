"""HF transformers: the real DynamicCache and StaticCache. A row of the batch is a block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_core import CacheFacts, CacheSpan
from tests.engines.engine import FINGERPRINT, SENTINEL, Sizes, bytes_of


class HfCache:
    """Every row holds `block_size` tokens."""

    def __init__(self, sizes: Sizes, make: Any) -> None:
        config, facts = _model(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)
        self.cache = make(config, sizes.block_size)
        self.block_size = sizes.block_size
        self.blocks = range(sizes.num_blocks)
        shape = (sizes.num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
        for layer_idx in range(sizes.num_layers):
            zeros = torch.zeros(shape, dtype=sizes.dtype)
            self.cache.update(zeros, zeros, layer_idx)
        tensors = [half for layer in self.cache.layers for half in (layer.keys, layer.values)]
        self.raw = [bytes_of(tensor).fill_(SENTINEL) for tensor in tensors]
        self.view = hf.cache_view(self.cache, facts)

    def span(
        self, sequences: Sequence[Sequence[int]], seq_lens: Sequence[int], *, head_start: int = 0
    ) -> CacheSpan:
        rows = [row for (row,) in sequences]
        return self.view.at(hf.block_table(rows), head_start=head_start)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Source: transformers 5.19 cache_utils.py, StaticLayer.update"""
        self.cache.layers[layer].keys[blocks, :, offsets] = key
        self.cache.layers[layer].values[blocks, :, offsets] = value


def dynamic_cache(sizes: Sizes) -> HfCache:
    return HfCache(sizes, lambda config, _: transformers.DynamicCache(config=config))


def static_cache(sizes: Sizes) -> HfCache:
    return HfCache(sizes, lambda config, n: transformers.StaticCache(config, max_cache_len=n))


def sliding_window_cache(sizes: Sizes) -> HfCache:
    """A layer keeps the last tokens only, and where they begin is not in it."""
    layers = [transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=8)]
    return HfCache(sizes, lambda config, _: transformers.Cache(layers=layers * sizes.num_layers))


@cache
def _model(num_layers: int, num_kv_heads: int, head_dim: int) -> tuple[Any, CacheFacts]:
    """Config and facts of the smallest Llama with such a cache."""
    config = transformers.LlamaConfig(
        vocab_size=1,
        hidden_size=num_kv_heads * head_dim,
        intermediate_size=1,
        num_hidden_layers=num_layers,
        num_attention_heads=num_kv_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    return config, hf.cache_facts(model, fingerprint=FINGERPRINT)
