"""OpenVINO's paged attention on the CPU: pools of float32, float16 and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import openvino as ov

from kvx_adapters import openvino as adapter
from kvx_adapters.cli.engines.live_openvino import run_inputs
from kvx_adapters.cli.engines.openvino_model import compiled
from kvx_conformance.engine import Floats, Table
from kvx_conformance.engines.tiny import llama
from kvx_core import CacheFacts, CacheSpan, CacheView

BLOCK_SIZE = 32


class Float32:
    """Pools of 9 blocks of 32 tokens, handed out in no order."""

    computes, num_sequences, max_tokens = True, 3, 45
    precision = "f32"

    def __init__(self) -> None:
        self.compiled = compiled(llama(), self.precision)
        self.request = self.compiled.create_infer_request()
        self.pools = adapter.reserve(self.compiled, 10)
        self.tensors = {
            name: ov.Tensor(pool, shared_memory=True) for name, pool in self.pools.items()
        }
        for name, tensor in self.tensors.items():
            self.request.set_tensor(name, tensor)
        self.unused = [7, 0, 4, 9, 2, 6, 1, 8, 3]
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def describe(self) -> CacheView:
        return adapter.cache_view(self.compiled, self.pools, self.facts(), requests=[self.request])

    def span(self, sequences: Sequence[int]) -> CacheSpan:
        chosen = [*sequences]
        begins = np.cumsum([0, *(len(self.blocks[one]) for one in chosen)])
        ids = [block for one in chosen for block in self.blocks[one]]
        view = replace(self.describe(), holds=lambda: [self.lengths.get(s, 0) for s in chosen])
        return view.at(adapter.block_table(ids, begins))

    def reserve(self, sequence: int, count: int) -> None:
        blocks = self.blocks.setdefault(sequence, [])
        self.lengths[sequence] = count
        while len(blocks) * BLOCK_SIZE < count:
            blocks.append(self.unused.pop())

    def write(self, sequence: int, tokens: Sequence[int], keys: None, values: None) -> None:
        self.request.infer(self.inputs(sequence, tokens))

    def inputs(self, sequence: int, tokens: Sequence[int]) -> dict[str, Any]:
        past = self.lengths.get(sequence, 0)
        self.reserve(sequence, past + len(tokens))
        return run_inputs(tokens, past, self.blocks[sequence])

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        if not 0 <= position < self.lengths.get(sequence, 0):
            raise LookupError(position)
        block, at = self.blocks[sequence][position // BLOCK_SIZE], position % BLOCK_SIZE
        k = [self.key(self.pools[f"key_cache.{i}"][block], at) for i in range(3)]
        v = [self.value(self.pools[f"value_cache.{i}"][block], at) for i in range(3)]
        return np.stack(k), np.stack(v)

    def key(self, block: Any, at: int) -> Floats:
        """(heads, dim) of a block (heads, tokens, dim)."""
        return np.asarray(block[:, at], np.float32)

    value = key

    def table(self, sequence: int) -> Table:
        return Table(self.lengths.get(sequence, 0), blocks=[*self.blocks.get(sequence, [])])

    def facts(self) -> CacheFacts:
        return adapter.cache_facts(
            self.compiled,
            rotary="half",
            rotary_dim=32,
            version=ov.__version__,
            fingerprint=llama().fingerprint,
        )

    def keep(self, sequence: int, count: int) -> None:
        needed = -(-count // BLOCK_SIZE)
        self.unused += self.blocks[sequence][needed:]
        del self.blocks[sequence][needed:]
        self.lengths[sequence] = count

    def free(self, sequence: int) -> None:
        self.unused += self.blocks.pop(sequence)
        del self.lengths[sequence]

    def memory(self) -> list[Any]:
        return [pool.view(np.uint8) for pool in self.pools.values()]

    @contextmanager
    def operation(self) -> Iterator[None]:
        """A run that has been started and not waited for."""
        self.request.start_async(self.inputs(0, [3, 1, 4]))
        yield
        self.request.wait()


class Float16(Float32):
    precision = "f16"


class Bytes(Float32):
    """u8: K has a scale and a zero point for each channel of a block, V for each token."""

    precision = "u8"

    def key(self, block: Any, at: int) -> Floats:
        beside = np.ascontiguousarray(block[:, :8]).view(np.float32).reshape(2, 2, 32)
        return np.asarray((block[:, 8 + at].astype(np.float32) - beside[:, 1]) * beside[:, 0])

    def value(self, block: Any, at: int) -> Floats:
        beside = np.ascontiguousarray(block[:, at, :8]).view(np.float32)
        return np.asarray((block[:, at, 8:].astype(np.float32) - beside[:, 1:]) * beside[:, :1])


ENGINES = (Float32, Float16, Bytes)
