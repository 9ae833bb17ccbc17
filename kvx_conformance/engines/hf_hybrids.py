"""Hybrid models in HF transformers, on a GPU if torch sees one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
import transformers

from kvx_adapters import transformers as adapter
from kvx_adapters.transformers.cache import num_held, outdated
from kvx_conformance.engine import Floats
from kvx_conformance.engines.hybrid import DECAYS, DELTA_NET, Hybrid, slow
from kvx_conformance.engines.tiny import DEVICE, SIZES, made
from kvx_core import CacheView

_MAMBA = {
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


class _OfEngine(Hybrid):
    """DynamicCache with LinearAttentionLayers."""

    version = f"transformers {transformers.__version__}"
    kind: ClassVar[str]  # prefix of the model's classes
    config: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.dynamic = transformers.DynamicCache(config=self.model().config)
        self.cache = self.dynamic.layers

    @classmethod
    @cache
    def model(cls) -> Any:
        config = getattr(transformers, f"{cls.kind}Config")(**SIZES | cls.config)
        model = made(getattr(transformers, f"{cls.kind}ForCausalLM"), config)
        for name, weight in model.state_dict().items():
            if name.endswith(DECAYS):
                weight.copy_(torch.from_numpy(slow(name, weight.numel())))
        return model.to(DEVICE)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> None:
        self.model()(
            input_ids=torch.tensor([list(tokens)], device=DEVICE), past_key_values=self.dynamic
        )

    @staticmethod
    def in_host_memory(array: torch.Tensor) -> Floats:
        return np.array(array.cpu())

    def describe(self) -> CacheView:
        layers = [self.cache[self.attention]]
        described = [adapter.cache_desc(layer) for layer in layers]
        return CacheView(
            layers=tuple(described),
            facts=self.facts(),
            dense=True,
            outdated=partial(outdated, layers, described),
            holds=partial(num_held, layers),
        )

    def state_view(self) -> CacheView:
        given = self.dynamic, self.model(), self.facts()
        return adapter.state_view(*given, num_tokens=len(self.ids))


class DeltaNet(_OfEngine):
    """Qwen3-Next: gated delta nets."""

    kind, rotary_dim = "Qwen3Next", 8
    config: ClassVar[dict[str, Any]] = DELTA_NET | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"]
    }


class Mamba(_OfEngine):
    """Granite 4: Mamba 2, no rotation."""

    kind, rotary_dim = "GraniteMoeHybrid", 0
    config: ClassVar[dict[str, Any]] = _MAMBA | {"layer_types": ["attention", "mamba", "mamba"]}


class ShortConvolution(_OfEngine):
    """LFM2: the last inputs of a convolution alone."""

    kind, rotary_dim = "Lfm2", 32
    config: ClassVar[dict[str, Any]] = {
        "conv_L_cache": 3,
        "layer_types": ["full_attention", "conv", "conv"],
    }


ENGINES = (DeltaNet, Mamba, ShortConvolution)
