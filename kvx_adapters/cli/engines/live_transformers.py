"""A Llama in transformers, with a DynamicCache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import transformers

from kvx_adapters import transformers as adapter
from kvx_adapters.cli.engines import Model
from kvx_core import CacheFacts, CacheSpan


@cache
def facts(model: Model) -> CacheFacts:
    """Of every cache of a model."""
    return adapter.cache_facts(model.llama, fingerprint=model.fingerprint)


class Live:
    """See LiveEngine."""

    def __init__(self, model: Model, num_tokens: int = 256) -> None:
        del num_tokens  # a DynamicCache grows
        self._model = model
        self.cache = transformers.DynamicCache(config=model.config)

    @property
    def lengths(self) -> list[int]:
        return [int(self.cache.get_seq_length())]

    def prefill(self, tokens: Sequence[int]) -> None:
        self._forward(tokens)

    def reserve(self, num_tokens: int) -> None:
        adapter.reserve(self.cache, self._model.llama, batch_size=1, num_tokens=num_tokens)

    def keep(self, num_tokens: int) -> None:
        """Drops all tokens held but the first `num_tokens`."""
        surplus = self.lengths[0] - num_tokens
        if surplus:
            self.cache.crop(-surplus)

    def view(self) -> CacheSpan:
        return adapter.cache_view(self.cache, facts(self._model)).at()

    def decode(self, count: int, *, after: int) -> list[int]:
        tokens = [after]
        for _ in range(count):
            tokens.append(self._forward(tokens[-1:]))
        return tokens[1:]

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> int:
        ids = torch.tensor([list(tokens)])
        logits = self._model.llama(input_ids=ids, past_key_values=self.cache).logits
        return int(logits[0, -1].argmax())
