"""The tiny model in transformers, with a DynamicCache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

from kvx_adapters import transformers as adapter
from kvx_core import CacheSpan
from tests.engines import tiny_model
from tests.engines.engine import FINGERPRINT


class Live:
    """See LiveEngine."""

    def __init__(self, num_tokens: int = 256) -> None:
        del num_tokens  # a DynamicCache grows
        self._model = tiny_model.model()
        self.cache = transformers.DynamicCache(config=self._model.config)

    @property
    def lengths(self) -> list[int]:
        return [int(self.cache.get_seq_length())]

    def prefill(self, tokens: Sequence[int]) -> None:
        self._forward(tokens)

    def reserve(self, num_tokens: int) -> None:
        adapter.reserve(self.cache, self._model, batch_size=1, num_tokens=num_tokens)

    def view(self) -> CacheSpan:
        facts = adapter.cache_facts(self._model, fingerprint=FINGERPRINT)
        return adapter.cache_view(self.cache, facts).at()

    def decode(self, count: int, *, after: int) -> list[int]:
        tokens = [after]
        for _ in range(count):
            tokens.append(self._forward(tokens[-1:]))
        return tokens[1:]

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> int:
        ids = torch.tensor([list(tokens)])
        return int(self._model(input_ids=ids, past_key_values=self.cache).logits[0, -1].argmax())
