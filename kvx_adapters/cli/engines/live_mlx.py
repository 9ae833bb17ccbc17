"""A Llama in mlx-lm on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvx_adapters import mlx as adapter
from kvx_adapters.cli.engines import Model
from kvx_core import CacheFacts, CacheSpan


@cache
def mlx_model(model: Model) -> Any:
    config = model.config
    mx.set_default_device(mx.cpu)
    made = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            vocab_size=config.vocab_size,
            head_dim=config.head_dim,
            num_key_value_heads=config.num_key_value_heads,
            rope_theta=model.rope_theta,
            tie_word_embeddings=False,
            max_position_embeddings=config.max_position_embeddings,
        )
    )
    weights = model.llama.state_dict()
    made.load_weights([(name, mx.array(weight.numpy())) for name, weight in weights.items()])
    mx.eval(made.parameters())
    return made


def facts(model: Model, *, quantized: bool = False) -> CacheFacts:
    return adapter.cache_facts(
        rotary="half",
        rotary_dim=model.config.head_dim,
        num_layers=model.config.num_hidden_layers,
        num_kv_heads=model.config.num_key_value_heads,
        quantized=quantized,
        version=mlx_lm.__version__,
        fingerprint=model.fingerprint,
    )


class Live:
    """See LiveEngine.

    kind: of each layer's cache
    """

    def __init__(self, model: Model, num_tokens: int = 256, kind: Any = KVCache) -> None:
        del num_tokens  # the cache grows
        self._model = model
        self.quantized = kind is not KVCache
        self.cache = [kind() for _ in make_prompt_cache(mlx_model(model))]

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
            num_kv_heads=self._model.config.num_key_value_heads,
            head_dim=self._model.config.head_dim,
        )

    def view(self) -> CacheSpan:
        return adapter.span(self.cache, facts(self._model, quantized=self.quantized))

    def decode(self, count: int, *, after: int) -> list[int]:
        tokens = [after]
        for _ in range(count):
            tokens.append(self._run(tokens[-1:]))
        return tokens[1:]

    def _run(self, tokens: Sequence[int]) -> int:
        logits = mlx_model(self._model)(mx.array([list(tokens)]), cache=self.cache)
        return int(mx.argmax(logits[0, -1]))
