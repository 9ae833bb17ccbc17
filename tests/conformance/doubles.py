"""Small engines in numpy that are sound, for tests that make one thing of them wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from kvx_conformance.engine import State, Table
from kvx_conformance.engine_probe import span_at
from kvx_core import CacheDesc, CacheFacts, CacheView, PoolDesc, ScaleDesc, describe

LAYERS, HEADS, DIM = 2, 3, 6

# The name of a case, and an engine that it has to find wrong.
FAULTS: list[tuple[str, Any]] = []


def fault(case: str) -> Any:
    """Of the case that has to find it."""

    def add(engine: Any) -> Any:
        FAULTS.append((case, engine))
        return engine

    return add


class Paged:
    """Blocks of 4 tokens, block 0 null; K and V of a layer in a tensor each, (block, head, token,
    dim), between 5 floats that belong to nobody. Blocks are handed out in no order."""

    block_size, num_blocks, gap = 4, 48, 5
    dtype: Any = np.float32

    def __init__(self) -> None:
        shape = (self.num_blocks, HEADS, self.block_size, DIM)
        count = int(np.prod(shape))
        self.raw = np.zeros(2 * LAYERS * (count + self.gap), self.dtype)
        parts = self.raw.reshape(2 * LAYERS, count + self.gap)[:, :count]
        self.k, self.v = (
            [parts[2 * i + half].reshape(shape) for i in range(LAYERS)] for half in (0, 1)
        )
        rng = np.random.default_rng(0)
        self.unused = [*rng.permutation(np.arange(1, self.num_blocks)).tolist()]
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.pending = False

    def describe(self) -> Any:
        layers = [self.layer(i) for i in range(LAYERS)]
        return CacheView(
            tuple(layers),
            self.facts(),
            null_block_id=0,
            outdated=lambda: "a step is under way" if self.pending else None,
        )

    def layer(self, i: int) -> CacheDesc:
        return CacheDesc.from_kv(describe(self.k[i], "BLOCK_HND"), describe(self.v[i], "BLOCK_HND"))

    def span(self, sequences: Any) -> Any:
        tables = [self.table(one) for one in sequences]
        width = max(len(one.blocks or ()) for one in tables)
        rows = [[*(one.blocks or ()), *[-1] * (width - len(one.blocks or ()))] for one in tables]
        chosen = [*sequences]
        return replace(self.describe(), holds=lambda: [self.lengths.get(s, 0) for s in chosen]).at(
            rows
        )

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        blocks = self.blocks.setdefault(sequence, [])
        for i in range(len(tokens)):
            at = self.lengths.get(sequence, 0)
            if at // self.block_size >= len(blocks):
                blocks.append(self.unused.pop())
            self.store(
                blocks[at // self.block_size], at % self.block_size, keys[:, i], values[:, i]
            )
            self.lengths[sequence] = at + 1

    def store(self, block: int, offset: int, key: Any, value: Any) -> None:
        for i in range(LAYERS):
            self.k[i][block, :, offset] = key[i]
            self.v[i][block, :, offset] = value[i]

    def place(self, sequence: int, position: int) -> tuple[int, int]:
        if not 0 <= position < self.lengths.get(sequence, 0):
            raise LookupError(position)
        return self.blocks[sequence][position // self.block_size], position % self.block_size

    def read(self, sequence: int, position: int) -> Any:
        block, offset = self.place(sequence, position)
        return tuple(
            np.stack([np.array(half[block, :, offset], np.float32) for half in halves])
            for halves in (self.k, self.v)
        )

    def table(self, sequence: int) -> Table:
        return Table(self.lengths.get(sequence, 0), blocks=[*self.blocks.get(sequence, [])])

    def facts(self) -> CacheFacts:
        return CacheFacts(
            engine="double 1.0",
            fingerprint="a model",
            rotary="half",
            rotary_dim=DIM,
            rope_applied=True,
            num_layers=LAYERS,
            first_layer=0,
            window=0,
            total_kv_heads=HEADS,
            first_kv_head=0,
            hadamard=False,
        )

    def keep(self, sequence: int, count: int) -> None:
        self.lengths[sequence] = count
        needed = -(-count // self.block_size)
        self.unused += self.blocks[sequence][needed:]
        del self.blocks[sequence][needed:]

    def free(self, sequence: int) -> None:
        self.unused += self.blocks.pop(sequence)
        del self.lengths[sequence]

    def positions(self, sequence: int) -> list[int]:
        return [*range(self.lengths[sequence])]

    def memory(self) -> list[Any]:
        return [self.raw.view(np.uint8)]

    @contextmanager
    def operation(self) -> Iterator[None]:
        """A step that writes over the last token of sequence 0, as if it were computed anew."""
        self.pending = True
        block, offset = self.place(0, self.lengths[0] - 1)
        was = self.k[0][block, :, offset].copy()
        self.k[0][block, :, offset] = 7
        yield
        self.k[0][block, :, offset] = was
        self.pending = False


class Scaled(Paged):
    """E4M3 with a scale for each head, of K and of V."""

    dtype = np.uint8

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(1)
        self.scales = [rng.uniform(0.1, 0.9, (2, HEADS)).astype(np.float32) for _ in range(LAYERS)]

    def layer(self, i: int) -> CacheDesc:
        halves = (describe(one[i], "BLOCK_HND", dtype="float8_e4m3fn") for one in (self.k, self.v))
        return CacheDesc.from_kv(*halves)

    def describe(self) -> Any:
        k, v = (
            tuple(ScaleDesc.of(scale[half], "PER_HEAD") for scale in self.scales) for half in (0, 1)
        )
        return replace(super().describe(), k_scales=k, v_scales=v)

    def facts(self) -> CacheFacts:
        return replace(super().facts(), scale_convention="multiply")

    def store(self, block: int, offset: int, key: Any, value: Any) -> None:
        for i, scales in enumerate(self.scales):
            for half, given, scale in ((self.k, key, scales[0]), (self.v, value, scales[1])):
                stored = (given[i] / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)
                half[i][block, :, offset] = stored.view(np.uint8)

    def read(self, sequence: int, position: int) -> Any:
        block, offset = self.place(sequence, position)
        return tuple(
            np.stack(
                [
                    one[i][block, :, offset].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                    * self.scales[i][half][:, None]
                    for i in range(LAYERS)
                ]
            )
            for half, one in enumerate((self.k, self.v))
        )


class Pooled(Paged):
    """As TensorRT-LLM: one pool of blocks, each with K and V of all layers, that a table of entries
    for K and for V numbers. An entry is K or V of one layer; -1 is null."""

    def __init__(self) -> None:
        super().__init__()
        shape = (self.num_blocks, LAYERS, 2, HEADS, self.block_size, DIM)
        self.raw = np.zeros(int(np.prod(shape)), self.dtype)
        self.pool = self.raw.reshape(shape)
        self.k, self.v = ([self.pool[:, i, half] for i in range(LAYERS)] for half in (0, 1))

    def layer(self, i: int) -> CacheDesc:
        k, v = (describe(half[i], "BLOCK_HND") for half in (self.k, self.v))
        return CacheDesc.from_kv(k, v, pool=PoolDesc.of(self.k[i], self.k[i][0].nbytes))

    def span(self, sequences: Any) -> Any:
        chosen = [*sequences]
        view = replace(self.describe(), holds=lambda: [self.lengths.get(s, 0) for s in chosen])
        return span_at(view, [self.table(one) for one in chosen], chosen)

    def table(self, sequence: int) -> Table:
        k = [block * 2 * LAYERS for block in self.blocks.get(sequence, [])]
        return Table(self.lengths.get(sequence, 0), offsets=(k, [one + 1 for one in k]))


class Growing:
    """(sequence, head, token, dim): when it is full it moves, with room for 8 tokens more."""

    num_sequences = 2

    def __init__(self) -> None:
        self.tensors = [np.zeros((2, HEADS, 8, DIM), np.float32) for _ in range(2 * LAYERS)]
        self.lengths = [0, 0]

    def describe(self) -> Any:
        then = self.tensors
        layers = tuple(
            CacheDesc.from_kv(*(describe(one, "BLOCK_HND") for one in then[2 * i : 2 * i + 2]))
            for i in range(LAYERS)
        )
        return CacheView(
            layers,
            self.facts(),
            dense=True,
            outdated=lambda: None if self.tensors is then else "it has grown",
            holds=lambda: self.lengths,
        )

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        at, count = self.lengths[sequence], len(tokens)
        if at + count > self.tensors[0].shape[2]:
            more = [(0, 0), (0, 0), (0, at + count + 8 - self.tensors[0].shape[2]), (0, 0)]
            self.tensors = [np.pad(one, more) for one in self.tensors]
        for i in range(LAYERS):
            for half, given in enumerate((keys, values)):
                self.tensors[2 * i + half][sequence, :, at : at + count] = given[i].swapaxes(0, 1)
        self.lengths[sequence] += count

    def read(self, sequence: int, position: int) -> Any:
        if not 0 <= position < self.lengths[sequence]:
            raise LookupError(position)
        found = [one[sequence, :, position] for one in self.tensors]
        return np.stack(found[::2]), np.stack(found[1::2])

    def table(self, sequence: int) -> Table:
        return Table(self.lengths[sequence])

    def facts(self) -> CacheFacts:
        return Paged.facts(self)  # type: ignore[arg-type]


class Window:
    """A ring of 9 slots for a window of 9 tokens; positions count on."""

    num_sequences, window = 1, 9

    def __init__(self) -> None:
        self.k, self.v = (
            [np.zeros((1, self.window, HEADS, DIM), np.float32) for _ in range(LAYERS)]
            for _ in "kv"
        )
        self.count = 0

    def describe(self) -> Any:
        layers = tuple(
            CacheDesc.from_kv(*(describe(one, "BLOCK_NHD") for one in pair))
            for pair in zip(self.k, self.v, strict=True)
        )
        return CacheView(layers, self.facts(), holds=lambda: self.held())

    def held(self) -> int:
        return min(self.count, self.window)

    def slot(self, position: int) -> int:
        return position % self.window

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        for i in range(len(tokens)):
            for layer in range(LAYERS):
                self.k[layer][0, self.count % self.window] = keys[layer, i]
                self.v[layer][0, self.count % self.window] = values[layer, i]
            self.count += 1

    def read(self, sequence: int, position: int) -> Any:
        if not self.count - self.held() <= position < self.count:
            raise LookupError(position)
        slot = position % self.window
        return tuple(np.stack([one[0, slot] for one in half]) for half in (self.k, self.v))

    def table(self, sequence: int) -> Table:
        first = self.count - self.held()
        slots = [self.slot(position) for position in range(first, self.count)]
        return Table(self.held(), slots=slots, first=first)

    def facts(self) -> CacheFacts:
        return replace(Paged.facts(self), window=self.window)  # type: ignore[arg-type]


class Recurrent(Paged):
    """A state beside the tokens: the sum of their ids, each step by half."""

    def __init__(self) -> None:
        super().__init__()
        self.states = {s: (0, np.zeros(4)) for s in range(3)}

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        super().write(sequence, tokens, keys, values)
        count, sums = self.states[sequence]
        for token in tokens:
            sums = sums / 2 + token + np.arange(4)
        self.states[sequence] = count + len(tokens), sums

    def state(self, sequence: int) -> State:
        count, sums = self.states[sequence]
        return State(count, [sums.copy()])

    def set_state(self, sequence: int, state: State) -> None:
        if state.data[0].shape != (4,):
            raise ValueError("a state has 4 numbers")
        self.states[sequence] = state.position, np.array(state.data[0])
        self.lengths[sequence] = state.position
        blocks = -(-state.position // self.block_size)
        self.blocks[sequence] = [self.unused.pop() for _ in range(blocks)]


class Computing(Paged):
    """Two layers that compute: K of layer 0 is a vector of the token, turned for its position; what
    layer 1 stores depends on all keys and values of layer 0."""

    computes = True

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        for token in tokens:
            position = self.lengths.get(sequence, 0)
            own = np.random.default_rng(token).standard_normal((4, 1, HEADS, DIM))
            k0, v0 = self.turned(own[0], position), own[1]
            held = [self.read(sequence, p) for p in range(position)]
            seen = sum(float((k[0] * v[0]).mean()) for k, v in held) / max(position, 1)
            k1, v1 = self.turned(own[2] + 3 * seen, position), own[3] + 3 * seen
            pair = (np.stack([a, b]).astype(np.float32) for a, b in ((k0, k1), (v0, v1)))
            super().write(sequence, [token], *pair)

    def turned(self, key: Any, position: int) -> Any:
        half = DIM // 2
        angle = position / 100.0 ** (np.arange(half) / half)
        a, b = key[..., :half], key[..., half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    def reserve(self, sequence: int, count: int) -> None:
        zeros = np.zeros((LAYERS, count, HEADS, DIM), np.float32)
        super().write(sequence, [0] * count, zeros, zeros)


SOUND = (Paged, Scaled, Pooled, Growing, Window, Recurrent, Computing)
