"""Stores: lookup against its definition, loads from the files of other ranks, and what goes wrong.

In these tests the vector of each token depends on all tokens up to it, so that a vector of another
prompt is detected.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx_core import (
    Directory,
    InvalidArgumentError,
    KvxError,
    Match,
    PrefixStore,
    Snapshot,
    StoredSpan,
    StoreError,
)
from kvx_core.snapshot import CorruptError, Precision
from kvx_core.stores.index import NotCached
from kvx_core.stores.names import RUNGS, parse_entry
from tests.caches import assert_same_bytes
from tests.snapshot.sections import section_of
from tests.store_files import entry_files as files_of
from tests.store_files import heads_of, layers_of
from tests.stores.engine import (
    DIM,
    HEADS,
    LAYERS,
    Engine,
    Tokens,
    damage,
    ranks,
    save,
    store_in,
)
from tests.stores_memory import InMemory

# --- Lookup ---------------------------------------------------------------------------------------


def common(one: Tokens, two: Tokens) -> int:
    """The length of the common prefix."""
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@settings(max_examples=60)
@given(
    stored=st.lists(PROMPTS, min_size=1, max_size=5),
    prompts=st.lists(PROMPTS, min_size=1, max_size=3),
    extended=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), PROMPTS), max_size=4),
    chunk_tokens=st.sampled_from((3, 8, 10, 16)),
)
def test_lookup_finds_the_longest_common_prefix_with_everything_stored(
    stored: list[Tokens],
    prompts: list[Tokens],
    extended: list[tuple[int, int, Tokens]],
    chunk_tokens: int,
) -> None:
    store = store_in(InMemory(), chunk_tokens=chunk_tokens)
    for tokens in stored:
        save(store, tokens)
    prompts += [[*stored[i % len(stored)][:cut], *more] for i, cut, more in extended]
    for prompt in prompts:
        match = store.lookup(prompt)
        best = max(common(prompt, tokens) for tokens in stored)
        assert best - -(-chunk_tokens // 8) <= match.num_tokens <= best
        check_match(store, match, prompt)


def check_match(store: PrefixStore, match: Match, prompt: Tokens) -> None:
    """Spans follow one another, and what they hold are the rows of the prompt."""
    at = 0
    for span in match.spans:
        assert span.start == at
        assert span.start < span.stop <= span.start + span.num_entry_tokens
        at = span.stop
    assert at == match.num_tokens
    engine = Engine(seed=5)
    store.load(match, 0, match.num_tokens, engine.sections())
    engine.check(prompt, 0, match.num_tokens)


@settings(max_examples=40)
@given(data=st.data())
def test_lookup_counts_entries_whose_files_hold_everything(
    data: st.DataObject,
) -> None:
    """Ranks store what they have; then files go missing."""
    remote = InMemory()
    store = store_in(remote, chunk_tokens=4)
    ranks = [
        Engine(layers=range(*layers), heads=range(*heads))
        for layers, heads in data.draw(
            st.sampled_from(
                (
                    [((0, 3), (0, 4))],
                    [((0, 3), (0, 2)), ((0, 3), (2, 4))],
                    [((0, 1), (0, 4)), ((1, 3), (0, 4))],
                    [((0, 1), (0, 4)), ((1, 3), (0, 2)), ((1, 3), (2, 4)), ((0, 3), (1, 3))],
                )
            )
        )
    ]
    stored = data.draw(st.lists(PROMPTS, min_size=1, max_size=3))
    for tokens in stored:
        for rank in ranks:
            save(store, tokens, rank)
    names = sorted(name for name in remote.files if parse_entry(name))
    deleted = data.draw(st.sets(st.sampled_from(names), max_size=4))
    for name in deleted:
        remote.delete(name)
    entries = {}  # (prefix, tokens) of an entry: what of it is there
    for tokens in stored:
        for start, stop in store.spans(len(tokens)):
            held = np.zeros((LAYERS, HEADS), bool)
            for rank in ranks:
                if not store.missing(
                    tokens, start, stop, rank.layers, (rank.heads[0], rank.heads[-1] + 1)
                ):
                    held[np.ix_(rank.layers, rank.heads)] = True
            entries[tuple(tokens[:start]), tuple(tokens[start:stop])] = held.all()
    for prompt in [*stored, *data.draw(st.lists(PROMPTS, max_size=2))]:
        at = 0
        while entries.get((tuple(prompt[:at]), tuple(prompt[at : at + 4]))) and at + 4 <= len(
            prompt
        ):
            at += 4
        below = [
            e for (before, e), whole in entries.items() if whole and before == tuple(prompt[:at])
        ]
        most = at + max((common(prompt[at:], entry) for entry in below), default=0)
        match = store.lookup(prompt)
        assert at <= match.num_tokens <= most  # the mark of one that has gone leads nowhere
        if not deleted:
            assert match.num_tokens == most
        check_match(store, match, prompt)


def test_another_model_shape_or_salt_is_another_space(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(20))
    others = [
        PrefixStore(
            Directory(tmp_path),
            fingerprint="other",
            num_layers=LAYERS,
            total_kv_heads=4,
            precision=Precision.of("float32"),
        ),
        store_in(tmp_path, num_layers=LAYERS + 1),
        store_in(tmp_path, total_kv_heads=HEADS + 1),
        store_in(tmp_path, salt="x"),
        store.salted("x"),
    ]
    assert [other.lookup(range(20)).num_tokens for other in others] == [0] * 5
    assert store.lookup(range(20)).num_tokens == 20
    save(others[3], range(20))
    assert store.salted("x").lookup(range(20)).num_tokens == 20
    assert store.salted("x").salted("").lookup(range(30)).num_tokens == 20


def test_what_other_weights_have_computed_is_loaded_by_an_engine_that_starts_with_them(
    tmp_path: Path,
) -> None:
    """Facts of a cache whose weights change have no fingerprint: its store says whose it is."""
    running, computed = store_in(tmp_path).of_weights("other"), Engine().compute(range(20))
    for start, stop in running.spans(20):
        chunk = running.capture(range(20), start, stop, computed.sections(fingerprint=None))
        assert chunk is not None
        running.commit(chunk)
    started = PrefixStore(
        Directory(tmp_path),
        fingerprint="other",
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        precision=Precision.of("float32"),
    )
    match, engine = started.lookup(range(20)), Engine(seed=1)
    started.load(match, 0, 20, engine.sections(fingerprint="other"))
    engine.check(range(20), 0, 20)


def test_keys_in_an_unknown_order_are_those_of_their_engine_alone(tmp_path: Path) -> None:
    """Of any version of it: as those of models with several rotary embeddings in vLLM."""
    unknown: dict[str, Any] = {"rotary": None, "rotary_dim": None, "rope_applied": None}
    store, computed = store_in(tmp_path), Engine().compute(range(20))
    for start, stop in store.spans(20):
        chunk = store.capture(
            range(20), start, stop, computed.sections(engine="here 1.0", **unknown)
        )
        assert chunk is not None
        store.commit(chunk)
    other = store_in(tmp_path)
    match, engine = other.lookup(range(20)), Engine(seed=1)
    with pytest.raises(StoreError, match=r"rotary is unknown at the source \(here\) and dest"):
        other.load(match, 0, 20, engine.sections(engine="there 1.0", **unknown))
    with pytest.raises(
        StoreError, match=r"rotary is 'half' at the destination \(here 1.0\) and unk"
    ):
        other.load(match, 0, 20, engine.sections(engine="here 1.0"))
    other.load(match, 0, 20, engine.sections(engine="here 2.0", **unknown))
    engine.check(range(20), 0, 20)


class Interrupted(InMemory):
    """Once, another thread runs while the folder of kinds is listed or one of them is opened."""

    meanwhile: dict[str, Callable[[], None]]

    def names(self, folder: str) -> list[str]:
        found = super().names(folder)
        self._run("names", folder)
        return found

    def open(self, name: str) -> Any:
        self._run("open", name)
        return super().open(name)

    def _run(self, what: str, name: str) -> None:
        if "/kinds" in name and what in self.meanwhile:
            self.meanwhile.pop(what)()


@pytest.mark.parametrize("when", ["names", "open"])
def test_two_threads_that_see_a_store_for_the_first_time(when: str) -> None:
    """None of them takes what the other one is about to know for what is not there."""
    blobs = Interrupted()
    blobs.meanwhile = {}
    save(store_in(blobs), range(20))
    store, done = store_in(blobs), []

    def from_memory() -> None:
        with pytest.raises(NotCached):  # else nothing would be there
            store.walk(store.chain_of(range(20)), 20).resume(store.known)
        done.append(when)

    def from_the_disk() -> None:
        from_memory()
        assert store.lookup(range(20)).num_tokens == 20

    blobs.meanwhile = {when: from_the_disk if when == "names" else from_memory}
    assert store.lookup(range(20)).num_tokens == 20
    assert done == [when]


def test_spans_are_chunks(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.spans(40) == [(0, 16), (16, 32), (32, 40)]
    assert store.spans(40, 31) == [(16, 32), (32, 40)]
    assert store.spans(32, 32) == store.spans(0) == []
    for start, stop in ((0, 17), (1, 3), (16, 16), (32, 41), (-16, 0)):
        with pytest.raises(InvalidArgumentError, match=f"start is {start} and stop is {stop} of"):
            store.capture(range(40), start, stop, Engine().sections())


def test_a_node_saves_hashing_what_comes_before(tmp_path: Path) -> None:
    store, engine = store_in(tmp_path), Engine().compute(range(40))
    nodes = store.nodes(range(40))
    assert len(nodes) == 3
    for node, (start, stop) in zip(nodes, store.spans(40), strict=True):
        arguments = range(40), start, stop, engine.sections()
        snapshot, other = store.capture(*arguments), store.capture(*arguments, node=node)
        assert snapshot is not None
        assert other is not None
        assert snapshot.header == other.header
        assert store.missing(range(40), start, stop, range(LAYERS), (0, 4), node=node)
        store.commit(other)
        assert not store.missing(range(40), start, stop, range(LAYERS), (0, 4))
    assert store.lookup(np.arange(40, dtype=np.int32)).num_tokens == 40


def test_what_is_missing_of_an_entry(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(10), Engine(heads=range(1, 3)))
    assert not store.missing(range(10), 0, 10, range(LAYERS), (1, 3))
    assert not store.missing(range(10), 0, 10, [2], (2, 3))
    assert store.missing(range(10), 0, 10, range(LAYERS), (1, 4))
    assert store.missing(range(10), 0, 9, range(LAYERS), (1, 3))
    assert store.missing(range(1, 11), 0, 10, range(LAYERS), (1, 3))


@pytest.mark.parametrize("split", ["tp", "uneven", "pp", "both"])
def test_what_ranks_have_stored_is_not_missing_elsewhere(split: str, tmp_path: Path) -> None:
    """An engine of one rank does not store again what several have stored."""
    store = store_in(tmp_path)
    shapes = SPLITS[split]
    for rank in ranks(*shapes):
        assert store.missing(range(10), 0, 10, range(LAYERS), (0, HEADS))
        save(store, range(10), rank)
    assert not store.missing(range(10), 0, 10, range(LAYERS), (0, HEADS))
    assert not store.missing(range(10), 0, 10, range(LAYERS), (0, HEADS), from_memory=True)


def test_lookup_opens_few_files_of_other_sequences(tmp_path: Path) -> None:
    """A thousand sequences begin with the same 10 tokens and go on differently."""
    remote = InMemory()
    store, engine = store_in(remote), Engine()
    for i in range(1000):
        save(store, [*range(10), 1000 + i, *range(5)], engine)
    reader = store_in(remote)
    assert reader.lookup([5]).num_tokens == 0
    for prompt, shared in (
        (range(10), 10),
        ([*range(10), 5, 5], 10),
        ([*range(10), 1050, *range(5), 7, 7], 16),
        ([1, 1, 1], 0),
    ):
        remote.num_opened = 0
        assert reader.lookup(prompt).num_tokens == shared
        assert remote.num_opened <= 1 + 2 * RUNGS  # of which some are not there


def test_tokens_of_any_size_and_nothing_else(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    tokens = [0, -1, 2**63 - 1, -(2**63)]
    store.commit(store.capture(tokens, 0, 4, Engine().sections()))  # type: ignore[arg-type]
    assert store.lookup(tokens).num_tokens == 4
    assert store.lookup([]).num_tokens == 0
    unsigned = np.array([0, 2**64 - 1, 2**63 - 1, 2**63], np.uint64)
    assert store.lookup(unsigned[:1]).num_tokens == 1
    for wrong in (["a"], [1.5], [2**63], np.zeros((2, 2), np.int64), unsigned, unsigned[3:]):
        with pytest.raises(InvalidArgumentError, match="tokens"):
            store.lookup(wrong)  # type: ignore[arg-type]
    for wrong in (None, 3, b"ab", "ab", {1}, iter([1]), np.array(3)):
        for call in (store.lookup, store.nodes):
            with pytest.raises(InvalidArgumentError, match="tokens"):
                call(wrong)  # type: ignore[arg-type]


def test_a_salt_is_a_string(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for wrong in (b"x", None, 3):
        with pytest.raises(InvalidArgumentError, match=r"salt is .*, expected a string"):
            store.salted(wrong)  # type: ignore[arg-type]


def test_what_keys_depend_on_has_one_form(tmp_path: Path) -> None:
    """1.0 layers are other JSON than 1, so that nothing of the store would ever be found."""
    store = store_in(tmp_path)
    for wrong in (b"x", None, 3, ["model"]):
        with pytest.raises(InvalidArgumentError, match=r"fingerprint is .*, expected a string"):
            store.of_weights(wrong)  # type: ignore[arg-type]
    for name in ("num_layers", "total_kv_heads", "chunk_tokens"):
        for number in (2.0, True, 0, "2"):
            with pytest.raises(InvalidArgumentError, match=f"{name} is .*, expected .*1 to"):
                store_in(tmp_path / "other", **{name: number})
    for start in (0.0, True, "0"):
        with pytest.raises(InvalidArgumentError, match=r"start is .*, expected an integer"):
            store.load(Match(0, ()), start, 0, [])  # type: ignore[arg-type]


def test_a_match_goes_to_another_process(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(20))
    match = store.lookup(range(18))
    assert match == Match(
        18,
        (
            StoredSpan(0, 16, 16, match.spans[0].names),
            StoredSpan(16, 18, 4, match.spans[1].names),
        ),
    )
    other, engine = store_in(tmp_path), Engine()
    assert other.load(pickle.loads(pickle.dumps(match)), 0, 18, engine.sections()) > 0
    engine.check(range(18), 0, 18)


# --- Ranks and engines ----------------------------------------------------------------------------


ALL = range(LAYERS), range(HEADS)
TENSOR_PARALLEL = (range(LAYERS), range(2)), (range(LAYERS), range(2, 4))
UNEVEN = (range(LAYERS), range(1)), (range(LAYERS), range(1, 4))
PIPELINE = (range(2), range(HEADS)), (range(2, 3), range(HEADS))
BOTH = tuple((layers, heads) for layers, _ in PIPELINE for _, heads in TENSOR_PARALLEL)
SPLITS = {"one": (ALL,), "tp": TENSOR_PARALLEL, "uneven": UNEVEN, "pp": PIPELINE, "both": BOTH}


@pytest.mark.parametrize("consumers", SPLITS)
@pytest.mark.parametrize("producers", SPLITS)
def test_any_ranks_store_and_any_ranks_load(producers: str, consumers: str, tmp_path: Path) -> None:
    store = store_in(tmp_path, accept="lossy")
    for rank in ranks(*SPLITS[producers], layout="vllm_BHLNC", block_size=8, dtype=torch.bfloat16):
        save(store, range(40), rank, parts=2)
    match = store.lookup(range(40))
    assert match.num_tokens == 40
    for rank in ranks(*SPLITS[consumers], layout="nhd", block_size=3, seed=1):
        num_bytes = store.load(match, 5, 37, rank.sections(parts=3))
        assert num_bytes == 32 * len(rank.layers) * 2 * len(rank.heads) * DIM * 4
        rank.check(range(40), 5, 37)


def test_ranks_in_one_process(tmp_path: Path) -> None:
    """Sections that hold other heads take from other files."""
    store = store_in(tmp_path)
    for rank in ranks(*BOTH):
        save(store, range(20), rank)
    consumers = ranks(*UNEVEN, seed=1)
    sections = [section for rank in consumers for section in rank.sections(parts=2)]
    store.load(store.lookup(range(20)), 0, 20, sections)
    for rank in consumers:
        rank.check(range(20), 0, 20)


def test_bytes_that_two_files_have_are_loaded_once(tmp_path: Path) -> None:
    """Engines with other ranks store the same prompt; none holds it alone."""
    store = store_in(tmp_path)
    for rank in ranks((range(LAYERS), range(3)), (range(LAYERS), range(1, 4))):
        save(store, range(16), rank)
    match, (reader,) = store.lookup(range(16)), ranks(ALL, seed=1)
    assert store.load(match, 3, 13, reader.sections()) == 10 * LAYERS * 2 * HEADS * DIM * 4
    reader.check(range(16), 3, 13)


def test_a_file_that_holds_everything_is_preferred_to_several(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for rank in ranks(*TENSOR_PARALLEL, ALL):
        save(store, range(16), rank)
    (span,) = store.lookup(range(16)).spans
    assert len(files_of(tmp_path)) == 3
    assert [heads_of(tmp_path / name) for name in span.names] == [(0, 4)]


def test_files_of_layers_that_are_not_here_are_not_read(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for rank in ranks(*PIPELINE):
        save(store, range(20), rank)
    match = store.lookup(range(20))
    for path in files_of(tmp_path):
        if layers_of(path) == [2]:
            path.unlink()
    first, second = ranks(*PIPELINE, seed=1)
    store.load(match, 0, 20, first.sections())
    first.check(range(20), 0, 20)
    with pytest.raises(StoreError, match=r"safetensors is not in the store \(any"):
        store.load(match, 0, 20, second.sections())


def test_layers_whose_blocks_are_all_null_are_not_read(tmp_path: Path) -> None:
    """The window of layers 0 and 1 has moved on; their file need not be there."""
    store = store_in(tmp_path)
    for rank in ranks(*PIPELINE):
        save(store, range(16), rank)
    match = store.lookup(range(16))
    (path,) = (path for path in files_of(tmp_path) if layers_of(path) == [0, 1])
    path.unlink()
    engine = Engine(seed=1)
    sections = [
        section_of(engine.cache, (0, 1), [0] * 4, at=(0, 1), null_block_id=0, fingerprint=None),
        section_of(engine.cache, (2,), engine.blocks, at=(2,), fingerprint=None),
    ]
    expected = replace(engine).cache
    assert store.load(match, 0, 16, sections) == 16 * 2 * HEADS * DIM * 4
    whole = replace(engine).compute(range(16)).cache
    for kv, half in enumerate(expected.layers[2].halves()):
        half.tensor.copy_(whole.layers[2].halves()[kv].tensor)
    assert_same_bytes(engine.cache, expected)


def test_layers_in_several_runs(tmp_path: Path) -> None:
    store, engine = store_in(tmp_path), Engine().compute(range(10))
    for layers in ((0, 2), (1,)):
        sections = [section_of(engine.cache, layers, engine.blocks, at=layers, fingerprint=None)]
        snapshot = store.capture(range(10), 0, 10, sections)
        assert snapshot is not None
        store.commit(snapshot)
    assert sorted(map(layers_of, files_of(tmp_path))) == [[0, 2], [1]]
    match, other = store.lookup(range(10)), Engine(seed=1)
    store.load(match, 0, 10, other.sections())
    other.check(range(10), 0, 10)


def test_sections_that_are_not_of_this_store(tmp_path: Path) -> None:
    store, engine = store_in(tmp_path), Engine()
    for section, message in (
        (section_of(engine.cache, (1, 2, 3)), "within the 3 layers of the store and their heads 4"),
        (section_of(engine.cache, range(3), heads=(1, 4)), "heads .1, 5., expected"),
        (section_of(engine.cache, range(3), fingerprint=None, heads=(0, 8)), "is 8, expected 4"),
        (
            section_of(engine.cache, range(3), fingerprint="x"),
            "fingerprint is 'x', expected 'model'",
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            store.capture(range(8), 0, 8, [section])
        with pytest.raises(InvalidArgumentError, match=message):
            store.load(Match(0, ()), 0, 0, [section])
    with pytest.raises(InvalidArgumentError, match="expected 0 <= start <= stop <= 0"):
        store.load(Match(0, ()), 0, 1, engine.sections())


# --- What goes wrong ------------------------------------------------------------------------------


def unchanged(
    engine: Engine, load: Callable[[], object], error: type[KvxError], match: str
) -> None:
    """The load raises and writes nothing."""
    before = engine.cache.clone()
    with pytest.raises(error, match=match):
        load()
    assert_same_bytes(engine.cache, before)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw + raw, lambda _: b""])
@pytest.mark.parametrize("record", ["*/space.json", "*/*.mac", "*/kinds/*.json", "*/kinds/*.mac"])
def test_a_damaged_record_is_written_again(
    record: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """By whoever stores something; else nobody would ever find what is stored."""
    key = bytes(32)
    save(store_in(tmp_path, key=key), range(40))
    (path,) = tmp_path.glob(record)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    save(store_in(tmp_path, key=key), range(100, 116))
    assert path.read_bytes() == good
    assert store_in(tmp_path, key=key).lookup(range(40)).num_tokens == 40


def test_nothing_of_a_span_is_written_unless_all_of_it_is_good(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for rank in ranks(*TENSOR_PARALLEL):
        save(store, range(16), rank)
    match, engine = store.lookup(range(16)), Engine(seed=1)
    path = files_of(tmp_path)[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    load = lambda: store.load(match, 0, 16, engine.sections())  # noqa: E731
    unchanged(engine, load, CorruptError, f"{path.name}: the bytes of .* have changed")
    assert not path.exists()  # so that it can be stored again
    assert store.lookup(range(16)).num_tokens == 0
    unchanged(engine, load, StoreError, f"{path.name} is not in the store")
    for rank in ranks(*TENSOR_PARALLEL):
        save(store, range(16), rank)
    assert store.load(store.lookup(range(16)), 0, 16, engine.sections()) > 0
    engine.check(range(16), 0, 16)


def test_spans_before_a_broken_one_are_whole(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(40))
    match, engine = store.lookup(range(40)), Engine(seed=1)
    (tmp_path / match.spans[1].names[0]).write_bytes(b"")
    with pytest.raises(CorruptError, match="has 0 bytes, expected"):
        store.load(match, 0, 40, engine.sections())
    engine.check(range(40), 0, 16)
    assert store.lookup(range(40)).num_tokens == 16


def test_facts_that_differ_stop_the_load_and_keep_the_file(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(16))
    match, engine = store.lookup(range(16)), Engine(seed=1)
    sections = [*engine.sections(parts=2)[:1], *engine.sections(parts=2, rotary="interleaved")[1:]]
    name = match.spans[0].names[0]
    load = lambda: store.load(match, 0, 16, sections)  # noqa: E731
    unchanged(engine, load, StoreError, f"{name}: rotary is 'half' at the source")
    assert store.lookup(range(16)).num_tokens == 16


@pytest.mark.parametrize("stop", [16, 40])
@pytest.mark.parametrize("kind", ["cut", "empty", "foreign", "header", "folder", "pipe", "loop"])
def test_lookup_does_not_count_broken_files(kind: str, stop: int, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(40))
    match = store.lookup(range(stop))
    assert match.num_tokens == stop
    name = match.spans[-1].names[0]
    damage(kind)(tmp_path / name)
    reader, engine = store_in(tmp_path), Engine(seed=1)
    last = match.spans[-1].start
    assert reader.lookup(range(stop)).num_tokens == last
    unchanged(engine, lambda: reader.load(match, last, stop, engine.sections()), StoreError, name)


def test_others_take_the_place_of_a_broken_file_where_they_hold_its_part(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for rank in ranks(*TENSOR_PARALLEL, *PIPELINE):
        save(store, range(16), rank)
    (broken,) = (path for path in files_of(tmp_path) if heads_of(path) == (0, 2))
    damage("cut")(broken)
    reader, engine = store_in(tmp_path), Engine(seed=1)
    match = reader.lookup(range(16))
    assert match.num_tokens == 16
    reader.load(match, 0, 16, engine.sections())
    engine.check(range(16), 0, 16)


def test_a_header_that_says_other_things_is_found(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(16))
    match, engine = store.lookup(range(16)), Engine(seed=1)
    path = tmp_path / match.spans[0].names[0]
    path.write_bytes(path.read_bytes().replace(b"layers.0.k", b"layers.9.k"))
    load = lambda: store.load(match, 0, 16, engine.sections())  # noqa: E731
    unchanged(engine, load, CorruptError, "does not begin as files of kind")
    assert store_in(tmp_path).lookup(range(16)).num_tokens == 0


def replace_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_a_file_under_the_name_of_another(tmp_path: Path) -> None:
    """Tokens, prefix, layers or heads that are not those of the name."""
    store = store_in(tmp_path)
    save(store, range(16))
    save(store, range(1, 17))
    save(store, [*range(1, 17), *range(16)])
    save(store, range(100, 116), Engine(heads=range(2)))
    whole = store.lookup(range(16)).spans[0].names[0]
    content = {
        "tokens": store.lookup(range(1, 17)).spans[0].names[0],
        "prefix": store.lookup([*range(1, 17), *range(16)]).spans[1].names[0],
        "heads": next(
            p.relative_to(tmp_path).as_posix() for p in files_of(tmp_path) if heads_of(p) == (0, 2)
        ),
    }
    match = store.lookup(range(16))
    for kind, name in content.items():
        data = (tmp_path / name).read_bytes()
        replace_file(tmp_path / whole, data)
        assert store_in(tmp_path).lookup(range(16)).num_tokens == 0, kind
        replace_file(tmp_path / whole, data)
        engine = Engine(seed=1)
        load = lambda engine=engine: store.load(match, 0, 16, engine.sections())  # noqa: E731
        unchanged(engine, load, CorruptError, whole)
        assert not (tmp_path / whole).exists()


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "a/../../b",
        "",
        "kvx-store.json",
        "{0}/../{0}",
        "{0}\0",
        "{0}\n",
        "{0}.safetensors",
        "{1}.safetensors",
        "{1}.00000000000000000000000000000000.safetensors",
        "{1}.mark",
        "{2}/kinds/x.json",
    ],
)
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    store, engine = store_in(tmp_path), Engine(seed=1)
    save(store, range(16))
    good = store.lookup(range(16)).spans[0].names[0]
    bad = name.format(good, good.partition(".")[0], good.partition("/")[0])
    match = Match(16, (StoredSpan(0, 16, 16, (bad,)),))
    load = lambda: store.load(match, 0, 16, engine.sections())  # noqa: E731
    unchanged(engine, load, StoreError, "is not the name of a file of this store")


def test_a_match_that_promises_too_much(tmp_path: Path) -> None:
    store, engine = store_in(tmp_path), Engine(seed=1)
    save(store, range(20))
    first, second = store.lookup(range(20)).spans
    for span, message in (
        (replace(second, stop=30), "hold 4 tokens, expected tokens 16 to 30"),
        (replace(first, start=3, stop=19), "holds tokens from 0, expected 3"),
        (replace(first, names=()), "do not hold all of layer 0"),
    ):
        match = Match(span.stop, (span,))
        load = lambda match=match, span=span: store.load(  # noqa: E731
            match, span.start, span.stop, engine.sections()
        )
        unchanged(engine, load, StoreError, message)


def test_entries_longer_than_a_chunk_are_none(tmp_path: Path) -> None:
    """A match may claim any number of tokens, and each takes memory."""
    save(store_in(tmp_path, chunk_tokens=32), range(20))
    (path,) = files_of(tmp_path)
    (tmp_path / "kvx-store.json").unlink()
    store = store_in(tmp_path, chunk_tokens=16)
    assert store.lookup(range(20)).num_tokens == 0
    name = str(path.relative_to(tmp_path))
    with pytest.raises(StoreError, match="hold 20 tokens, expected"):
        store.load(Match(16, (StoredSpan(0, 16, 20, (name,)),)), 0, 16, Engine().sections())
    (tmp_path / "kvx-store.json").unlink()
    assert store_in(tmp_path, chunk_tokens=32).lookup(range(20)).num_tokens == 20


def test_names_that_others_leave_in_the_folders(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, range(16))
    folder = files_of(tmp_path)[0].parent
    entry = files_of(tmp_path)[0].name.partition(".")[0]
    for name in ("x", "-", "16-", f"{entry}.txt", "9" * 200, f"{entry}.{'0' * 32}.safetensors"):
        (folder / name).write_bytes(b"?")
    (folder.parent / "kinds" / "x.json").write_bytes(b"?")
    (folder.parent / "kinds" / f"{'0' * 32}.json").write_bytes(b"{}")
    (folder.parent / "folder").mkdir()
    (folder.parent / "file").touch()
    assert store.lookup(range(30)).num_tokens == 16
    assert store_in(tmp_path).lookup([*range(15), 3]).num_tokens == 15
    assert store_in(tmp_path).lookup([0, 0, 0]).num_tokens == 1


# --- Where files lie ------------------------------------------------------------------------------


def test_the_store_says_how_it_is_cut(tmp_path: Path) -> None:
    assert store_in(tmp_path, chunk_tokens=None).chunk_tokens == 128
    assert store_in(tmp_path, chunk_tokens=None).chunk_tokens == 128
    assert store_in(tmp_path, chunk_tokens=128).chunk_tokens == 128
    with pytest.raises(StoreError, match=r"chunk_tokens is 64, expected 128 as .*json says"):
        store_in(tmp_path, chunk_tokens=64)
    with pytest.raises(InvalidArgumentError, match="chunk_tokens is 0, expected 1 to"):
        store_in(tmp_path, chunk_tokens=0)
    new = tmp_path / "new"
    assert store_in(new, chunk_tokens=None, new_chunk_tokens=32).chunk_tokens == 32
    assert store_in(new, chunk_tokens=None, new_chunk_tokens=64).chunk_tokens == 32
    with pytest.raises(InvalidArgumentError, match="new_chunk_tokens is 15, expected at least 16"):
        store_in(tmp_path / "few", chunk_tokens=None, new_chunk_tokens=15)
    assert not list(tmp_path.glob("few/*"))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "1", '{"format": 3, "chunk_tokens": "8"}', '{"format": 4, "chunk_tokens": 32}',
     '{"format": 3, "chunk_tokens": 0}', '{"format": 3, "chunk_tokens": true}', "[" * 4000,
     '{"format": 3, "format": 3, "chunk_tokens": 32}', '{"format": 3, "chunk_tokens": 1000000000}',
     '{"format": 3, "chunk_tokens": 32, "max_bytes": 0}',
     '{"format": 3, "chunk_tokens": 32, "max_bytes": "5GB"}',
     '{"format": 3, "chunk_tokens": 32, "max_bytes": true}',
     '{"format": 3, "chunk_tokens": NaN}', '{"format": 3, "chunk_tokens": 32}' + " " * 4096,
     '{"format": 3, "chunk_tokens": ' + "9" * 4000 + "}"],
)  # fmt: skip
def test_a_directory_that_is_another_thing(text: str, tmp_path: Path) -> None:
    (tmp_path / "kvx-store.json").write_text(text)
    with pytest.raises(StoreError, match=r"kvx-store\.json"):
        store_in(tmp_path, chunk_tokens=None)


@pytest.mark.parametrize("chunk_tokens", [1, 15])
def test_what_a_description_says_of_chunks_is_bounded(chunk_tokens: int, tmp_path: Path) -> None:
    """Whoever may write to a store can have written it; a caller may ask for the same."""
    text = json.dumps({"format": 3, "chunk_tokens": chunk_tokens})
    (tmp_path / "kvx-store.json").write_text(text)
    message = rf"kvx-store\.json has chunk_tokens {chunk_tokens}, expected 16 to 65536\. Set "
    with pytest.raises(StoreError, match=message):
        store_in(tmp_path, chunk_tokens=None)
    assert store_in(tmp_path, chunk_tokens=chunk_tokens).chunk_tokens == chunk_tokens
    for good in (16, 65536):
        (tmp_path / "kvx-store.json").write_text(text.replace(str(chunk_tokens), str(good)))
        assert store_in(tmp_path, chunk_tokens=None).chunk_tokens == good


@pytest.mark.parametrize("format", [1, 2])
def test_a_store_of_an_earlier_format_is_refused_with_the_way_out(
    format: int, tmp_path: Path
) -> None:
    (tmp_path / "kvx-store.json").write_text(f'{{"format": {format}, "chunk_tokens": 16}}')
    message = f"store of format {format}, .*expected format 3. Delete the dir"
    with pytest.raises(StoreError, match=message):
        store_in(tmp_path)


def failing(call: str, error: int) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(patcher: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **options: Any) -> None:
            raise OSError(error, os.strerror(error))

        patcher.setattr(os, call, fail)

    return patch


@pytest.mark.parametrize(
    ("call", "error"),
    [("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("open", errno.EMFILE), ("mkdir", errno.EROFS)],
)
def test_a_write_that_fails_leaves_nothing(
    call: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    snapshot = store.capture(range(16), 0, 16, Engine().sections())
    assert snapshot is not None
    with monkeypatch.context() as patcher:
        failing(call, error)(patcher)
        with pytest.raises(StoreError, match=f"cannot be (read|written): .*{os.strerror(error)}"):
            store.commit(snapshot)
    assert not files_of(tmp_path)
    assert store.lookup(range(16)).num_tokens == 0
    assert store.commit(snapshot) > 0
    assert store.lookup(range(16)).num_tokens == 16


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The limit of a file's size stops the write in its middle, as a full disk does."""
    store = store_in(tmp_path)
    snapshot = store.capture(range(16), 0, 16, Engine().sections())
    assert snapshot is not None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"cannot be written: .*File too large"):
            store.commit(snapshot)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not files_of(tmp_path)


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing("link", errno.EPERM)(monkeypatch)
    store = store_in(tmp_path)
    save(store, range(20))
    assert store.lookup(range(20)).num_tokens == 20
    assert not list(tmp_path.rglob(".*.tmp"))


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Makes a tree unwritable, for root too."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_directory_that_can_only_be_read(public: Path) -> None:
    save(store_in(public), range(20))
    with read_only(public):
        store, engine = store_in(public, chunk_tokens=None), Engine(seed=1)
        match = store.lookup(range(20))
        assert match.num_tokens == 20
        store.load(match, 0, 20, engine.sections())
        engine.check(range(20), 0, 20)
        snapshot = store.capture(range(1, 17), 0, 16, engine.sections())
        assert snapshot is not None
        with pytest.raises(StoreError, match=r"cannot be written: .*Permission denied"):
            store.commit(snapshot)


def test_a_broken_file_that_cannot_be_deleted(public: Path) -> None:
    save(store_in(public), range(20))
    path = public / store_in(public).lookup(range(16)).spans[0].names[0]
    path.write_bytes(b"?")
    with read_only(public):
        assert store_in(public).lookup(range(16)).num_tokens == 0
    assert path.exists()


def test_a_reader_of_an_empty_directory_finds_what_comes(public: Path) -> None:
    with read_only(public):
        reader = store_in(public, chunk_tokens=None)
        assert reader.lookup(range(20)).num_tokens == 0
    save(store_in(public), range(20))
    assert reader.lookup(range(20)).num_tokens == 20
    assert reader.chunk_tokens == 16


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    stores = [store_in(tmp_path) for _ in range(8)]
    snapshots = [s.capture(range(16), 0, 16, Engine().sections()) for s in stores]
    barrier, written = threading.Barrier(8), []

    def write(store: PrefixStore, snapshot: Snapshot | None) -> None:
        assert snapshot is not None
        barrier.wait()
        written.append(store.commit(snapshot))

    threads = [
        threading.Thread(target=write, args=pair) for pair in zip(stores, snapshots, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(bool, written)) == [False] * 7 + [True]
    assert len(files_of(tmp_path)) == 1
    assert not list(tmp_path.rglob(".tmp/*"))


def test_a_store_that_is_trimmed_meanwhile(tmp_path: Path) -> None:
    """Writers, readers and a trimming one at once: what is found is right, or an error says no."""
    prompts = [[i % 3, *range(40)] for i in range(12)]
    stop, failures = threading.Event(), list[BaseException]()

    def work(action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not stop.is_set():
                    action()
            except BaseException as error:
                failures.append(error)

        return run

    def write() -> None:
        store = store_in(Directory(tmp_path, max_bytes=40000))
        for tokens in prompts:
            save(store, tokens)

    def read() -> None:
        store = store_in(tmp_path)
        for tokens in prompts:
            match, engine = store.lookup(tokens), Engine(seed=1)
            try:
                store.load(match, 0, match.num_tokens, engine.sections())
            except CorruptError:
                raise
            except StoreError:
                continue  # a file has gone
            engine.check(tokens, 0, match.num_tokens)

    threads = [threading.Thread(target=work(action)) for action in (write, write, read, read)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
