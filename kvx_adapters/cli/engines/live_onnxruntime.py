"""A Llama in ONNX Runtime, past and present bound to one buffer per layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnxruntime

from kvx_adapters import onnxruntime as adapter
from kvx_adapters.cli.engines import Model, onnx_model
from kvx_core import CacheFacts, CacheSpan


@cache
def session(model: Model) -> Any:
    """An InferenceSession with the model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        onnx_model.model_bytes(model), options, providers=["CPUExecutionProvider"]
    )


def facts(model: Model) -> CacheFacts:
    return adapter.cache_facts(
        num_layers=model.config.num_hidden_layers,
        num_kv_heads=model.config.num_key_value_heads,
        do_rotary=True,
        rotary_interleaved=False,
        rotary_dim=model.config.head_dim,
        version=onnxruntime.__version__,
        fingerprint=model.fingerprint,
    )


class Live:
    """See LiveEngine."""

    def __init__(self, model: Model, num_tokens: int = 256) -> None:
        self._session = session(model)
        self.buffers = adapter.reserve(self._session, batch_size=1, num_tokens=num_tokens)
        self._view = adapter.cache_view(
            self._session, self.buffers, facts(model), holds=lambda: self._held
        )
        self._held = 0

    @property
    def lengths(self) -> list[int]:
        return [self._held]

    def prefill(self, tokens: Sequence[int]) -> None:
        self._run(tokens)

    def reserve(self, num_tokens: int) -> None:
        self._held = num_tokens

    def view(self) -> CacheSpan:
        return self._view.at()

    def decode(self, count: int, *, after: int) -> list[int]:
        tokens = [after]
        for _ in range(count):
            tokens.append(self._run(tokens[-1:]))
        return tokens[1:]

    def _run(self, tokens: Sequence[int]) -> int:
        self._held += len(tokens)
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((1, self._held), np.int64))
        binding.bind_output("logits")
        adapter.bind(binding, self._session, self.buffers)
        self._session.run_with_iobinding(binding)
        return int(binding.get_outputs()[0].numpy()[0, -1].argmax())
