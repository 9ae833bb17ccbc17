"""llama.cpp on the CPU: three sequences in one cache, V transposed or not, Q8_0; states."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np

from kvx_adapters import llama_cpp as adapter
from kvx_adapters.cli.engines.live_llama_cpp import Context
from kvx_adapters.cli.engines.llama_cpp_abi import library
from kvx_conformance.engine import Floats, State, Table
from kvx_conformance.engines.tiny import llama
from kvx_core import CacheFacts, CacheSpan, CacheView


class Transposed:
    """float32 without flash attention: V is [head * dim, cell]."""

    computes, num_sequences, max_tokens = True, 3, 40
    dtype, flash = "F32", False

    def __init__(self) -> None:
        self.context = Context(
            llama(),
            256,
            k_dtype=self.dtype,
            v_dtype=self.dtype,
            flash_attention=self.flash,
            num_sequences=3,
            unified=True,
        )

    def describe(self) -> CacheView:
        return self.context.cache()

    def span(self, sequences: Sequence[int]) -> CacheSpan:
        return self.context.span(*sequences)

    def write(self, sequence: int, tokens: Sequence[int], keys: None, values: None) -> None:
        self.context.run(tokens, sequence)

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        cells = self.context.cells.get(sequence, [])
        if not 0 <= position < len(cells):
            raise LookupError(position)
        pairs = self.context.tensors()
        k = [self.row(k, cells[position], transposed=False) for k, _ in pairs]
        v = [self.row(v, cells[position], transposed=not self.flash) for _, v in pairs]
        return np.stack(k).reshape(3, 2, 32), np.stack(v).reshape(3, 2, 32)

    def row(self, tensor: Any, cell: int, *, transposed: bool) -> Floats:
        """The 64 numbers of a cell of a ggml_tensor with ne [64, cells]."""
        width, cells = tensor.ne[0], tensor.ne[1]
        count = tensor.nb[1] * cells
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(tensor.data))
        if transposed:
            return np.asarray(whole.view(np.float32).reshape(width, cells)[:, cell].copy())
        return self.numbers(whole.reshape(cells, -1)[cell].copy())

    def numbers(self, row: Any) -> Floats:
        return np.asarray(row.view(np.float16 if self.dtype == "F16" else np.float32), np.float32)

    def table(self, sequence: int) -> Table:
        cells = self.context.cells.get(sequence, [])
        return Table(len(cells), slots=[*cells])

    def facts(self) -> CacheFacts:
        found: CacheFacts = self.context.facts()
        return found

    def reserve(self, sequence: int, count: int) -> None:
        """Computes any tokens, and zeroes what they have stored."""
        self.context.run([0] * count, sequence)
        for layer in self.context.cache().layers:
            for tensor in layer.tensors.values():
                np.asarray(tensor.owner)[:] = 0

    def keep(self, sequence: int, count: int) -> None:
        self.context.keep(count, sequence)

    def free(self, sequence: int) -> None:
        self.context.remove(sequence)

    def positions(self, sequence: int) -> list[int]:
        """As a state has them."""
        found = adapter.State.read(self.context.state(sequence), num_kv_heads=2)
        return [int(one) for one in sorted(found.caches[0].positions)]

    def state(self, sequence: int) -> State:
        data = self.context.state(sequence)
        return State(len(self.positions(sequence)), [np.frombuffer(data, np.uint8)])

    def set_state(self, sequence: int, state: State) -> None:
        if not self.context.set_state(state.data[0].tobytes(), sequence):
            raise ValueError("llama_state_seq_set_data refuses the state")
        self.context.cells[sequence] = [*range(state.position)]  # of an empty cache
        self.context.full_cells[sequence] = [*range(state.position)]

    @contextmanager
    def operation(self) -> Iterator[None]:
        """A context shift: four tokens go, the others move up, keys turn at the next step."""
        memory = library().llama_get_memory(self.context.context)
        assert library().llama_memory_seq_rm(memory, 0, 0, 4)
        library().llama_memory_seq_add(memory, 0, 4, -1, -4)
        del self.context.cells[0][:4], self.context.full_cells[0][:4]
        yield
        self.context.run([1], 0)


class Flash(Transposed):
    """float16 with flash attention: V as K."""

    dtype, flash = "F16", True


class Q8(Transposed):
    """Q8_0, read by gguf-py. llama.cpp v0.5.0 crashes when it shifts one of heads of 32."""

    dtype, flash = "Q8_0", True
    operation: Any = None

    def numbers(self, row: Any) -> Floats:
        found = gguf.dequantize(row, gguf.GGMLQuantizationType.Q8_0)
        return np.asarray(found, np.float32)


ENGINES = (Transposed, Flash, Q8)
