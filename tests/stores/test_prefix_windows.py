"""A store of a model with sliding windows: files of their own, and hits without the old ones."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from threading import Event, Thread, current_thread
from typing import Any, BinaryIO

import pytest

from kvx_core import BlockTable, InvalidArgumentError, PrefixStore, Section, StoreError
from kvx_core.snapshot import Precision
from kvx_core.stores.index import NotCached
from tests.snapshot.layered import BF16, STOP, Model, Rank
from tests.stores_memory import InMemory

CHUNK = 4
NULL = 3  # a block that no layer has
TOKENS = range(100, 100 + STOP)
MODEL = [Model(0, 2, 32, BF16), Model(1, 1, 64, BF16), Model(2, 2, 32, BF16), Model(3, 4, 32, BF16)]
WINDOWS = [0, 3, 10, 3]  # tokens of each layer's window; 0: full attention
GROUPS = [(0,), (2,), (1, 3)]


def store_of(blobs: InMemory, windows: list[int] | None, **options: Any) -> PrefixStore:
    usual: dict[str, Any] = {
        "fingerprint": "abc",
        "num_layers": len(MODEL),
        "total_kv_heads": [m.heads for m in MODEL],
        "precision": Precision.of("bfloat16"),
        "chunk_tokens": CHUNK,
        "windows": windows,
    }
    return PrefixStore(blobs, **usual | options)


def sections_of(rank: Rank, stop: int = 0) -> list[Section]:
    """A section of each layer; blocks that no window of `stop` tokens reaches are null."""
    found = []
    for section, window in zip(rank.sections(), WINDOWS, strict=True):
        gone = max(stop - window, 0) // rank.size if window else 0
        view = replace(section.view, null_block_id=NULL)
        table = BlockTable.packed([[NULL] * gone + rank.blocks[gone:]])
        found.append(replace(section, view=view, block_table=table))
    return found


def saved(seed: int, **options: Any) -> tuple[list[Model], InMemory, dict[tuple[int, int], str]]:
    """All tokens in a store, and the names of files by chunk and group of layers."""
    blobs, model = InMemory(), [m.filled(seed) for m in MODEL]
    store = store_of(blobs, WINDOWS, **options)
    assert store.windows.split(range(4)) == tuple(GROUPS)
    sections, names = sections_of(Rank(model, 4, "BLOCK_NHD").put(0, STOP)), {}
    for start, stop in store.spans(STOP):
        for group, layers in enumerate(GROUPS):
            snapshot = store.capture(TOKENS, start, stop, [sections[i] for i in layers])
            assert snapshot is not None
            assert store.commit(snapshot) > 0
            names[start // CHUNK, group] = store.name_of(snapshot)
    return model, blobs, names


def rule(there: set[tuple[int, int]], reach: list[int]) -> int:
    """The longest prefix of which all is there that is needed: layers without a window in every
    chunk of [0, p), those with one in the chunks of [p - reach, p).

    there: chunks and groups whose file is there; reach: of the groups with windows
    """

    def is_hit(p: int) -> bool:
        for chunk in range(-(-p // CHUNK)):
            stop = min((chunk + 1) * CHUNK, STOP)
            if (chunk, 0) not in there:
                return False
            for group, each in enumerate(reach, 1):
                if stop > p - each and (chunk, group) not in there:
                    return False
        return True

    return max(p for p in range(STOP + 1) if is_hit(p))


@pytest.mark.parametrize("options", [{}, {"encryption_key": b"e" * 32, "key": b"k" * 32}])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hits_and_loads_are_those_of_the_rule(seed: int, options: dict[str, Any]) -> None:
    choose = random.Random(seed)
    model, blobs, names = saved(seed, **options)
    everything, lengths = dict(blobs.files), set()
    for round_, size in product(range(12), (4, 7)):
        gone = {at for at in names if choose.random() < (0.02 if at[1] == 0 else 0.05 * round_)}
        blobs.files = {n: raw for n, raw in everything.items() if n not in {names[g] for g in gone}}
        # Blocks are loaded whole, so that the first one may begin before the window.
        store = store_of(blobs, [w and w + size for w in WINDOWS], **options)
        match = store.lookup(TOKENS)
        p = match.num_tokens
        assert p == rule(names.keys() - gone, [10 + size, 3 + size])
        lengths.add(p)
        dst, expected = (Rank(model, size, "BLOCK_HND") for _ in range(2))
        for i, window in enumerate(WINDOWS):
            one = Rank([model[i]], size, "BLOCK_HND")
            first = max(p - window, 0) // size * size if window else 0
            expected.held[i] = one.put(first, p).held[0]
        store.load(match, 0, p, sections_of(dst, p))
        dst.assert_same(expected)
    assert len(lengths) > 3


@pytest.mark.parametrize("chunk", [0, 2, 5])
def test_an_entry_that_lacks_windows_hides_no_shorter_one(chunk: int) -> None:
    """The prompt goes on behind the chunk, but not as far as its windows may lack."""
    model, blobs, names = saved(1)
    first, store = chunk * CHUNK, store_of(blobs, WINDOWS)
    sections = sections_of(Rank(model, 4, "BLOCK_NHD").put(0, STOP))
    shorter = [*TOKENS[: first + 3], 7]  # ends inside of the chunk, and has all layers
    for layers in GROUPS:
        part = store.capture(shorter[:-1], first, first + 3, [sections[i] for i in layers])
        assert part is not None
        assert store.commit(part) > 0
    for at, name in names.items():
        if (at[0] == chunk and at[1]) or at[0] > chunk + 1:
            blobs.delete(name)
    assert store_of(blobs, WINDOWS).lookup(shorter).num_tokens == first + 3
    match = store_of(blobs, WINDOWS).lookup(TOKENS)
    assert match.num_tokens == first + 3


class ListedMeanwhile(InMemory):
    """A thread that lists kinds has one of them while another asks for a file, and then all."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self.files = files
        self.lister = Thread(target=lambda: None)
        self._num_records, self._is_asked, self.has_one = 0, Event(), Event()

    def open(self, name: str) -> BinaryIO | None:
        if current_thread() is self.lister:
            self._num_records += "/kinds/" in name
            if self._num_records == 2:
                self.has_one.set()
                assert self._is_asked.wait(60)
        elif "/kinds/" not in name and name.endswith(".safetensors"):
            self._is_asked.set()
            self.lister.join(60)
        return super().open(name)


def test_kinds_that_another_thread_lists_meanwhile() -> None:
    _, saved_blobs, _ = saved(1)
    blobs = ListedMeanwhile(saved_blobs.files)
    store = store_of(blobs, WINDOWS)
    store.index.fresh_seconds = 3600.0
    blobs.lister = Thread(target=store.kinds.refresh)
    blobs.lister.start()
    assert blobs.has_one.wait(60)
    assert len(store.kinds.all) == 1
    prompt = TOKENS[: CHUNK + 2]  # which its windows reach as a whole
    assert store.lookup(prompt).num_tokens == len(prompt)
    assert len(store.kinds.all) == len(GROUPS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_answers_as_the_disk(seed: int) -> None:
    choose = random.Random(seed)
    _, blobs, names = saved(seed)
    for name in choose.sample([n for at, n in names.items() if at[1]], 6):
        blobs.delete(name)
    store = store_of(blobs, WINDOWS)
    walk = store.walk(chain := store.chain_of(TOKENS), STOP)
    with pytest.raises(NotCached):
        walk.resume(store.known)
    match = store.lookup(TOKENS)
    store.index.fresh_seconds = 3600.0
    store.lookup(TOKENS)
    opened = blobs.num_opened
    again = store.walk(chain, STOP)
    again.resume(store.known)
    assert (again.match, blobs.num_opened) == (match, opened)


def test_a_reader_without_windows_needs_all_of_every_layer() -> None:
    """An engine that keeps the blocks that a window has left shares them: they must be right."""
    model, blobs, names = saved(1)
    whole = store_of(blobs, None)
    assert whole.lookup(TOKENS).num_tokens == STOP
    blobs.delete(names[2, 2])
    assert store_of(blobs, None).lookup(TOKENS).num_tokens == 2 * CHUNK
    reader = store_of(blobs, WINDOWS)
    match = reader.lookup(TOKENS)
    assert match.num_tokens == STOP
    dst = Rank(model, 4, "BLOCK_NHD")
    blank = Rank(model, 4, "BLOCK_NHD")
    with pytest.raises(StoreError, match="do not hold all of layer 1"):
        reader.load(match, 2 * CHUNK, 3 * CHUNK, sections_of(dst))  # no block is null
    dst.assert_same(blank)


def test_files_of_layers_together_and_apart_are_one_entry() -> None:
    """Keys do not depend on windows: a writer without them serves a reader with them."""
    blobs, model = InMemory(), [m.filled(1) for m in MODEL]
    plain = store_of(blobs, None)
    sections = sections_of(Rank(model, 4, "BLOCK_NHD").put(0, STOP))
    for start, stop in plain.spans(STOP):
        snapshot = plain.capture(TOKENS, start, stop, sections)
        assert snapshot is not None
        plain.commit(snapshot)
    reader = store_of(blobs, WINDOWS)
    assert reader.lookup(TOKENS) == plain.lookup(TOKENS)
    assert not reader.missing(TOKENS, 0, CHUNK, (1, 3), [(0, 1), (0, 4)])


def test_an_entry_that_begins_alike_is_whole() -> None:
    """The last tokens of a hit lie in it, so that every window reaches it."""
    _, blobs, names = saved(1)
    other = [*TOKENS[:17], 1, 2, 3]
    assert store_of(blobs, WINDOWS).lookup(other).num_tokens == 17
    blobs.delete(names[4, 1])
    assert store_of(blobs, WINDOWS).lookup(other).num_tokens == 16
    assert store_of(blobs, WINDOWS).lookup(TOKENS[:18]).num_tokens == 16


@pytest.mark.parametrize("windows", [[0, 3, 10], [0, 3, 10, -1], [0, 3, 10, "a"], 3])
def test_wrong_windows_are_refused(windows: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="windows"):
        store_of(InMemory(), windows)
