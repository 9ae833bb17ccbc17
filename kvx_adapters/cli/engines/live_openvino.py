"""A Llama in OpenVINO's paged attention, on pools and a block table of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openvino as ov

from kvx_adapters import openvino as adapter
from kvx_adapters.cli.engines import Model
from kvx_adapters.cli.engines.openvino_model import compiled
from kvx_core import CacheSpan, DType

BLOCK_SIZE = 32


def run_inputs(tokens: Sequence[int], past: int, blocks: Sequence[int]) -> dict[str, Any]:
    """The inputs of a run of one sequence.

    tokens: ids to compute, behind the `past` tokens that the cache holds
    blocks: of the sequence, with room for all of them
    """
    return {
        "input_ids": np.array(tokens, np.int64),
        "position_ids": np.arange(past, past + len(tokens)),
        "past_lens": np.array([past], np.int32),
        "subsequence_begins": np.array([0, len(tokens)], np.int32),
        "block_indices": np.array(blocks, np.int32),
        "block_indices_begins": np.array([0, len(blocks)], np.int32),
        "max_context_len": np.array(past + len(tokens), np.int32),
    }


class Live:
    """See LiveEngine.

    precision: KV_CACHE_PRECISION, or "default"
    """

    def __init__(self, model: Model, num_tokens: int = 256, precision: str = "f32") -> None:
        self._model = model
        self.compiled = compiled(model, precision)
        self._request = self.compiled.create_infer_request()
        used = -(-num_tokens // BLOCK_SIZE)
        self.blocks = [2 * i + 1 for i in reversed(range(used))]  # neither in order nor adjacent
        self.pools = adapter.reserve(self.compiled, 2 * used)
        self._tensors = []
        for name, found in adapter.cache_inputs(self.compiled).items():
            pool = self.pools[name]
            tensor = ov.Tensor(pool, shared_memory=True)
            if found.dtype is DType.BF16:
                tensor = ov.Tensor(pool, ov.Shape(pool.shape), ov.Type.bf16)
            self._tensors.append(tensor)
            self._request.set_tensor(name, tensor)
        self._held = 0
        facts = adapter.cache_facts(
            self.compiled,
            rotary="half",
            rotary_dim=model.config.head_dim,
            version=ov.__version__,
            fingerprint=model.fingerprint,
        )
        # The pools do not move.
        view = adapter.cache_view(self.compiled, self.pools, facts, requests=[self._request])
        self._view = replace(view, holds=lambda: self._held)

    @property
    def lengths(self) -> list[int]:
        return [self._held]

    def prefill(self, tokens: Sequence[int]) -> None:
        self._run(tokens)

    def reserve(self, num_tokens: int) -> None:
        self._held = num_tokens

    def view(self) -> CacheSpan:
        return self._view.at([self.blocks])

    def decode(self, count: int, *, after: int) -> list[int]:
        tokens = [after]
        for _ in range(count):
            tokens.append(self._run(tokens[-1:]))
        return tokens[1:]

    def _run(self, tokens: Sequence[int]) -> int:
        past, self._held = self._held, self._held + len(tokens)
        blocks = self.blocks[: -(-self._held // BLOCK_SIZE)]
        inputs = run_inputs(tokens, past, blocks)
        logits = self._request.infer(inputs)[0].reshape(-1, self._model.config.vocab_size)
        return int(logits[-1].argmax())
