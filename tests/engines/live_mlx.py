"""The tiny model in mlx-lm on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvx_adapters import mlx as adapter
from kvx_core import CacheFacts, CacheSpan
from tests.engines import tiny_model as tiny
from tests.engines.engine import FINGERPRINT


@cache
def model() -> Any:
    mx.set_default_device(mx.cpu)
    made = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=tiny.HIDDEN_SIZE,
            num_hidden_layers=tiny.NUM_LAYERS,
            intermediate_size=tiny.INTERMEDIATE_SIZE,
            num_attention_heads=tiny.NUM_HEADS,
            rms_norm_eps=tiny.RMS_NORM_EPS,
            vocab_size=tiny.VOCAB_SIZE,
            head_dim=tiny.HEAD_DIM,
            num_key_value_heads=tiny.NUM_KV_HEADS,
            rope_theta=tiny.ROPE_THETA,
            tie_word_embeddings=False,
            max_position_embeddings=tiny.MAX_TOKENS,
        )
    )
    weights = tiny.model().state_dict()
    made.load_weights([(name, mx.array(weight.numpy())) for name, weight in weights.items()])
    mx.eval(made.parameters())
    return made


def facts(*, quantized: bool = False) -> CacheFacts:
    return adapter.cache_facts(
        rotary="half",
        rotary_dim=tiny.HEAD_DIM,
        num_layers=tiny.NUM_LAYERS,
        num_kv_heads=tiny.NUM_KV_HEADS,
        quantized=quantized,
        version=mlx_lm.__version__,
        fingerprint=FINGERPRINT,
    )


class Live:
    """See LiveEngine.

    kind: of each layer's cache
    """

    def __init__(self, num_tokens: int = 256, kind: Any = KVCache) -> None:
        del num_tokens  # the cache grows
        self.quantized = kind is not KVCache
        self.cache = [kind() for _ in make_prompt_cache(model())]

    @property
    def lengths(self) -> list[int]:
        return [int(self.cache[0].offset)]

    def prefill(self, tokens: Sequence[int]) -> None:
        self._run(tokens)

    def reserve(self, num_tokens: int) -> None:
        adapter.reserve(
            self.cache,
            batch_size=1,
            num_tokens=num_tokens,
            num_kv_heads=tiny.NUM_KV_HEADS,
            head_dim=tiny.HEAD_DIM,
        )

    def view(self) -> CacheSpan:
        return adapter.span(self.cache, facts(quantized=self.quantized))

    def decode(self, count: int, *, after: int) -> list[int]:
        tokens = [after]
        for _ in range(count):
            tokens.append(self._run(tokens[-1:]))
        return tokens[1:]

    def _run(self, tokens: Sequence[int]) -> int:
        logits = model()(mx.array([list(tokens)]), cache=self.cache)
        return int(mx.argmax(logits[0, -1]))
