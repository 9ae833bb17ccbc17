"""The tiny model in ONNX Runtime, past and present bound to one buffer per layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnxruntime

from kvx_adapters import onnxruntime as adapter
from kvx_core import CacheSpan
from tests.engines import onnx_model, tiny_model
from tests.engines.engine import FINGERPRINT


@cache
def session() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        onnx_model.model_bytes(), options, providers=["CPUExecutionProvider"]
    )


FACTS = adapter.cache_facts(
    num_layers=tiny_model.NUM_LAYERS,
    num_kv_heads=tiny_model.NUM_KV_HEADS,
    do_rotary=True,
    rotary_interleaved=False,
    rotary_dim=tiny_model.HEAD_DIM,
    version=onnxruntime.__version__,
    fingerprint=FINGERPRINT,
)


class Live:
    """See LiveEngine."""

    def __init__(self, num_tokens: int = 256) -> None:
        self.buffers = adapter.reserve(session(), batch_size=1, num_tokens=num_tokens)
        self._held = 0

    @property
    def lengths(self) -> list[int]:
        return [self._held]

    def prefill(self, tokens: Sequence[int]) -> None:
        self._run(tokens)

    def reserve(self, num_tokens: int) -> None:
        self._held = num_tokens

    def view(self) -> CacheSpan:
        return adapter.cache_view(session(), self.buffers, FACTS).at()

    def decode(self, count: int, *, after: int) -> list[int]:
        tokens = [after]
        for _ in range(count):
            tokens.append(self._run(tokens[-1:]))
        return tokens[1:]

    def _run(self, tokens: Sequence[int]) -> int:
        self._held += len(tokens)
        binding = session().io_binding()
        binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((1, self._held), np.int64))
        binding.bind_output("logits")
        adapter.bind(binding, session(), self.buffers)
        session().run_with_iobinding(binding)
        return int(binding.get_outputs()[0].numpy()[0, -1].argmax())
