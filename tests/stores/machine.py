"""A machine with states beside keys and values, both of which follow from its tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from kvx_core import (
    BlobStore,
    BlockTable,
    CacheDesc,
    CacheView,
    Plane,
    PlaneKind,
    PrefixStore,
    Role,
    Section,
    Snapshot,
    describe,
)
from kvx_core.snapshot import Precision
from kvx_core.stores.match import Match
from tests.snapshot.sections import FACTS

# Layer 0 is attention, 1 has states alone, 2 a sliding window, 3 attention and a state. Ranks split
# 2 KV heads and 4 heads of states; CONV is whole on every rank.
KV, CONV = (0, 2, 3), 40


KV_HEADS, STATE_HEADS, WINDOW = 2, 4, 5


PLANES = [
    PlaneKind(1, Role.STATE, 0),
    PlaneKind(1, CONV, 0, replicated=True),
    PlaneKind(3, Role.STATE, 0),
]


BLOCKS, SIZE, NULL = 60, 4, 59


SENTINEL = -5.0


Tokens = Sequence[int]


def numbers(tokens: Tokens) -> torch.Tensor:
    """A number of the tokens up to each."""
    found, last = [], 0
    for token in tokens:
        last = zlib.crc32(token.to_bytes(8, "little"), last)
        found.append(last % 2000)
    return torch.tensor(found, dtype=torch.float32)


class Machine:
    """One rank of an engine. What it does not hold is the sentinel."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        kv, self.heads = KV_HEADS // ranks, STATE_HEADS // ranks
        full = torch.full
        self.kv = {i: full((2, BLOCKS, SIZE, kv, 4), SENTINEL) for i in KV}
        self.states = {i: full((3, self.heads, 3), SENTINEL) for i in (1, 3)}
        self.conv = full((3, 5), SENTINEL, dtype=torch.float16)
        self.tables = {i: list(range(50, -1, -1)) for i in KV}

    def put(self, tokens: Tokens, *, stop: int | None = None) -> Machine:
        """All that it has after so many tokens."""
        stop = len(tokens) if stop is None else stop
        found = numbers(tokens[:stop])
        for layer, memory in self.kv.items():
            blocks = torch.tensor([self.tables[layer][t // SIZE] for t in range(stop)])
            held = torch.tensor([t for t in range(stop) if blocks[t] != NULL], dtype=torch.int64)
            for kind, i in product((0, 1), range(memory.shape[3])):
                more = 1000 * layer + 100 * kind + 10 * (self.rank * memory.shape[3] + i)
                if len(held):
                    memory[kind, blocks[held], held % SIZE, i] = (found[held] + more)[:, None]
        return self.put_states(tokens[:stop]) if stop else self

    def put_states(self, tokens: Tokens) -> Machine:
        number = float(numbers(tokens)[-1])
        for layer, memory in self.states.items():
            for i in range(self.heads):
                memory[1, i] = number + 50 * layer + self.rank * self.heads + i
        self.conv[1] = number
        return self

    def leave_window(self, stop: int) -> Machine:
        """The blocks of layer 2 that no window of `stop` tokens reaches are null."""
        gone = max(stop - WINDOW, 0) // SIZE
        self.tables[2] = [NULL] * gone + self.tables[2][gone:]
        return self

    def sections(self, state_tokens: int | None = None) -> list[Section]:
        facts = replace(FACTS, first_kv_head=self.rank * KV_HEADS // self.ranks)
        found = []
        for layer, (k, v) in self.kv.items():
            cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
            view = CacheView((cache,), facts, null_block_id=NULL)
            found.append(Section((layer,), view, BlockTable.packed([self.tables[layer]])))
        facts = replace(facts, first_kv_head=self.rank * self.heads)
        axes, options = ("block", "head", "dim"), {"tokens_per_entry": 0, "slots": [1]}
        for layer, memory in self.states.items():
            planes = [Plane.of(memory, axes, Role.STATE, layer, **options)]
            if layer == 1:
                conv = Plane.of(self.conv, axes[::2], CONV, 1, replicated=True, **options)
                planes.append(conv)
            view = CacheView((), facts, planes=tuple(planes))
            table = BlockTable.packed([[1]])
            found.append(Section((layer,), view, table, state_tokens=state_tokens))
        return found

    def assert_same(self, other: Machine) -> None:
        for one, two in (
            *((self.kv[i], other.kv[i]) for i in KV),
            *((self.states[i], other.states[i]) for i in (1, 3)),
            (self.conv, other.conv),
        ):
            assert torch.equal(one, two)


def store_of(blobs: BlobStore, chunk: int = 16, **options: Any) -> PrefixStore:
    usual: dict[str, Any] = {
        "fingerprint": "abc",
        "num_layers": 4,
        "total_kv_heads": [KV_HEADS, 0, KV_HEADS, KV_HEADS],
        "state_heads": STATE_HEADS,
        "precision": Precision.of("float32"),
        "chunk_tokens": chunk,
        "planes": PLANES,
        "windows": [0, 0, WINDOW + SIZE, 0],
    }
    return PrefixStore(blobs, **usual | options)


def save_tokens(store: PrefixStore, tokens: Tokens) -> dict[tuple[int, int], str]:
    """All chunks, the window's layer in files of its own; names by chunk and group of layers."""
    sections, names = Machine().put(tokens).sections(), dict[tuple[int, int], str]()
    for (start, stop), (group, part) in product(
        store.spans(len(tokens)), enumerate(store.windows.split(KV))
    ):
        held = [section for section in sections if section.layers[0] in part]
        snapshot = store.capture(tokens, start, stop, held)
        assert snapshot is not None
        store.commit(snapshot)
        names[start // store.chunk_tokens, group] = store.name_of(snapshot)
    return names


def captured_state(store: PrefixStore, tokens: Tokens, of: Machine | None = None) -> Snapshot:
    of = of or Machine().put_states(tokens)
    start = (len(tokens) - 1) // store.chunk_tokens * store.chunk_tokens
    held = of.sections(len(tokens))
    snapshot = store.capture(tokens, start, len(tokens), held, states=True)
    assert snapshot is not None
    return snapshot


def save_state(store: PrefixStore, tokens: Tokens, of: Machine | None = None) -> str:
    """The state after all of these tokens; the name of its file."""
    snapshot = captured_state(store, tokens, of)
    store.commit(snapshot)
    return store.name_of(snapshot)


def check_load(store: PrefixStore, prompt: Tokens, match: Match) -> None:
    """What is loaded is what the prompt's own tokens have, to the byte."""
    p = match.num_tokens
    dst, expected = (Machine().leave_window(p) for _ in range(2))
    store.load(match, 0, p, dst.sections())
    dst.assert_same(expected.put(prompt, stop=p))
