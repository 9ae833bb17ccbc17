"""ONNX Runtime on the CPU: past and present of each layer in one buffer with room for 48 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvx_adapters.cli.engines.live_onnxruntime import Live, facts
from kvx_conformance.engine import Floats, Table
from kvx_conformance.engines.tiny import llama
from kvx_core import CacheFacts, CacheView


class Buffers:
    """GroupQueryAttention, which appends in place."""

    computes, num_sequences, max_tokens = True, 1, 40

    def __init__(self) -> None:
        self.live = Live(llama(), 48)

    def describe(self) -> CacheView:
        return self.live.view().view

    def write(self, sequence: int, tokens: Sequence[int], keys: None, values: None) -> None:
        self.live.prefill(tokens)

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        if not 0 <= position < self.live.lengths[0]:
            raise LookupError(position)
        k, v = (
            np.stack(
                [
                    np.asarray(self.live.buffers[f"past_key_values.{i}.{name}"])[0, :, position]
                    for i in range(3)
                ]
            )
            for name in ("key", "value")
        )
        return k, v

    def table(self, sequence: int) -> Table:
        return Table(self.live.lengths[0])

    def facts(self) -> CacheFacts:
        return facts(llama())

    def reserve(self, sequence: int, count: int) -> None:
        self.live.reserve(count)

    def keep(self, sequence: int, count: int) -> None:
        """The caller counts: the next attention mask is shorter."""
        self.live.reserve(count)

    def memory(self) -> list[Any]:
        return [np.asarray(buffer).view(np.uint8) for buffer in self.live.buffers.values()]


ENGINES = (Buffers,)
