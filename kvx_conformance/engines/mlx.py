"""mlx-lm on the CPU: KVCache, 8 bits, a ring, a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from kvx_adapters import mlx as adapter
from kvx_adapters.cli.engines.live_mlx import mlx_model
from kvx_conformance.engine import Floats, Table
from kvx_conformance.engines.tiny import WINDOW, llama
from kvx_core import CacheFacts, CacheSpan, CacheView


class Plain:
    """KVCache, which grows by 256 slots."""

    computes, num_sequences, max_tokens = True, 1, 40
    quantized, window = False, 0

    def __init__(self) -> None:
        self.cache = [self.layer() for _ in range(3)]

    def layer(self) -> Any:
        return KVCache()

    def describe(self) -> CacheView:
        return adapter.cache_view(self.cache, self.facts())

    def span(self, sequences: Sequence[int]) -> CacheSpan:
        return adapter.span(self.cache, self.facts())

    def write(self, sequence: int, tokens: Sequence[int], keys: None, values: None) -> None:
        mx.eval(mlx_model(llama())(mx.array([list(tokens)]), cache=self.cache))

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        if not 0 <= position < self.cache[0].offset:
            raise LookupError(position)
        found = [self.arrays(layer) for layer in self.cache]
        k, v = (np.stack([np.array(one[i][0, :, position]) for one in found]) for i in (0, 1))
        return k, v

    def arrays(self, layer: Any) -> Any:
        return layer.keys, layer.values

    def table(self, sequence: int) -> Table:
        return Table(int(self.cache[0].offset))

    def facts(self) -> CacheFacts:
        return adapter.cache_facts(
            rotary="half",
            rotary_dim=32,
            num_layers=3,
            num_kv_heads=2,
            window=self.window,
            quantized=self.quantized,
            version=mlx_lm.__version__,
            fingerprint=llama().fingerprint,
        )


class Keeping(Plain):
    """The same, with what only such a cache can do."""

    def keep(self, sequence: int, count: int) -> None:
        for layer in self.cache:
            layer.trim(layer.offset - count)

    def reserve(self, sequence: int, count: int) -> None:
        adapter.reserve(self.cache, batch_size=1, num_tokens=count, num_kv_heads=2, head_dim=32)


class EightBits(Keeping):
    """QuantizedKVCache, read by mx.dequantize."""

    quantized = True

    def layer(self) -> Any:
        return QuantizedKVCache(group_size=32, bits=8)

    def arrays(self, layer: Any) -> Any:
        return [
            mx.dequantize(codes, scales, biases, group_size=32, bits=8)
            for codes, scales, biases in (layer.keys, layer.values)
        ]


class Ring(Plain):
    """RotatingKVCache, read in MLX's own temporal order."""

    window = WINDOW

    def layer(self) -> Any:
        return RotatingKVCache(max_size=WINDOW)

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        layer = self.cache[0]
        ordered = [
            [one._temporal_order(half) for half in (one.keys, one.values)] for one in self.cache
        ]
        at = position - layer.offset + ordered[0][0].shape[2]
        if not 0 <= at < ordered[0][0].shape[2]:
            raise LookupError(position)
        k, v = (np.stack([np.array(one[i][0, :, at]) for one in ordered]) for i in (0, 1))
        return k, v

    def table(self, sequence: int) -> Table:
        if self.cache[0].keys is None:
            return Table(0)
        slots, held = adapter.ring_slots(self.cache[0]), adapter.positions(self.cache[0])
        return Table(len(held), slots=slots, first=held.start)


class Batch(Plain):
    """BatchKVCache, which counts padding as tokens between prepare and finalize."""

    def layer(self) -> Any:
        return BatchKVCache([0])

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        if not 0 <= position < self.table(0).length:
            raise LookupError(position)
        start = int(self.cache[0].left_padding[0])
        k, v = (
            np.stack([np.array(getattr(one, name)[0, :, start + position]) for one in self.cache])
            for name in ("keys", "values")
        )
        return k, v

    def table(self, sequence: int) -> Table:
        length, start = int(self.cache[0].offset[0]), int(self.cache[0].left_padding[0])
        return Table(length, slots=[*range(start, start + length)])

    @contextmanager
    def operation(self) -> Iterator[None]:
        for layer in self.cache:
            layer.prepare(lengths=[1], right_padding=[1])
        self.write(0, [5, 0], None, None)
        yield
        for layer in self.cache:
            layer.finalize()
        mx.eval([[layer.keys, layer.values] for layer in self.cache])


ENGINES = (Keeping, EightBits, Ring, Batch)
