"""Hybrid models in mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models import lfm2, qwen3_next

from kvx_adapters import mlx as adapter
from kvx_conformance.engines.hybrid import DECAYS, DELTA_NET, Hybrid, slow
from kvx_conformance.engines.tiny import SIZES
from kvx_core import CacheView


class _OfEngine(Hybrid):
    """KVCache and ArraysCache."""

    version = f"mlx-lm {mlx_lm.__version__}"

    module: ClassVar[Any]
    config: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.model().make_cache()

    @classmethod
    @cache
    def model(cls) -> Any:
        mx.set_default_device(mx.cpu)
        mx.random.seed(1)
        model = cls.module.Model(cls.module.ModelArgs.from_dict(SIZES | cls.config))
        decays = [
            (name, mx.array(slow(name, weight.size)))
            for name, weight in tree_flatten(model.parameters())
            if name.endswith(DECAYS)
        ]
        model.load_weights(decays, strict=False)
        mx.eval(model.parameters())
        return model

    def run(self, tokens: Sequence[int]) -> None:
        mx.eval(self.model()(mx.array([list(tokens)]), cache=self.cache))
        mx.eval([layer.state for layer in self.cache])

    def describe(self) -> CacheView:
        return adapter.cache_view([self.cache[self.attention]], self.facts())

    def state_view(self) -> CacheView:
        given = self.cache, self.model().args, self.facts()
        return adapter.state_view(*given, num_tokens=len(self.ids))


class DeltaNet(_OfEngine):
    """Qwen3-Next, whose first layer is a gated delta net."""

    attention, recurrent, rotary_dim = 1, (0, 2), 8
    module = qwen3_next
    config: ClassVar[dict[str, Any]] = DELTA_NET | {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    }


class ShortConvolution(_OfEngine):
    """LFM2."""

    rotary_dim, module = 24, lfm2
    config: ClassVar[dict[str, Any]] = {
        "model_type": "lfm2",
        "full_attn_idxs": [0],
        "norm_eps": 1e-6,
        "block_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_bias": False,
        "conv_L_cache": 3,
    }


ENGINES = (DeltaNet, ShortConvolution)
