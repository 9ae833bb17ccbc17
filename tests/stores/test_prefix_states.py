"""A store of a model with states: files of their own, found by the key of exactly their tokens.

What a token has, and what a state is, follow from all tokens up to there: a wrong byte is seen by
looking.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    InvalidArgumentError,
    Plane,
    PlaneKind,
    PrefixStore,
    Role,
    Section,
    Snapshot,
    StoreError,
    describe,
)
from kvx_core.snapshot import CorruptError, Precision
from kvx_core.snapshot.kind import Kind
from kvx_core.stores.index import NotCached
from kvx_core.stores.loads import Progress
from kvx_core.stores.match import Match
from kvx_core.stores.names import RUNGS, kind_name
from kvx_core.stores.space import SpaceRecord
from tests.snapshot import store_reader
from tests.snapshot.sections import FACTS
from tests.stores.machine import (
    KV,
    KV_HEADS,
    PLANES,
    SIZE,
    STATE_HEADS,
    WINDOW,
    Machine,
    check_load,
    save_state,
    save_tokens,
    store_of,
)
from tests.stores_memory import InMemory


def prompts(seed: int) -> Iterator[list[int]]:
    """Random ones, and edits of earlier ones: late, early, longer and cut."""
    choose = random.Random(seed)
    known = [[choose.randrange(5) for _ in range(choose.randrange(20, 90))] for _ in range(3)]
    yield from known
    while True:
        new = list(choose.choice(known))
        if choose.random() < 0.5:
            new[choose.randrange(len(new))] = choose.randrange(5)
        if choose.random() < 0.5:
            new = new[: choose.randrange(1, len(new) + 1)]
        new += [choose.randrange(5) for _ in range(choose.randrange(40))]
        known.append(new[:120])
        yield known[-1]


@pytest.mark.parametrize(("seed", "chunk"), [(1, 16), (2, 21), (3, 37)])
def test_hits_are_those_of_a_dict(seed: int, chunk: int) -> None:
    """Of random prompts and edits, with states at ends of prompts and chunks and at rungs."""
    choose, blobs = random.Random(seed), InMemory()
    writer = store_of(blobs, chunk, windows=None)
    states: set[tuple[int, ...]] = set()  # all tokens before each
    exact, asked = 0, 0
    for prompt, _ in zip(prompts(seed), range(35), strict=False):
        reader = store_of(blobs, chunk, windows=None)
        walk = reader.walk(reader.chain_of(prompt), len(prompt))
        walk.resume(reader.finder)
        match, stop = walk.match, walk.num_found
        has = [p for p in range(1, stop + 1) if tuple(prompt[:p]) in states]
        rungs = {i * chunk // RUNGS for i in range(RUNGS)}
        by_name = [p for p in has if p % chunk in rungs or p == stop]
        assert match.num_tokens in (0, *has)
        assert max(by_name, default=0) <= match.num_tokens <= max(has, default=0)
        asked, exact = asked + bool(has), exact + (match.num_tokens == max(has, default=-1))
        check_load(reader, prompt, match)
        save_tokens(writer, prompt)
        ends = [*range(chunk, len(prompt), chunk)]
        ends = [p for p in ends if choose.random() < 0.3]
        if choose.random() < 0.5:
            ends.append(len(prompt))
        if choose.random() < 0.3:  # tokens have been stored, by this longer prompt
            ends.append(len(prompt) // chunk * chunk - chunk + choose.choice([*rungs]))
        for p in {p for p in ends if 0 < p <= len(prompt)}:
            save_state(writer, prompt[:p])
            states.add(tuple(prompt[:p]))
    assert asked > 8
    assert exact == asked


def rule(there: set[Any], num_tokens: int, chunk: int, reach: int) -> int:
    """The longest p of which all is there: full layers in every chunk of [0, p), the window's in
    the chunks of [p - reach, p), and a state at exactly p.

    there: (chunk, group) and p of the files
    """

    def is_hit(p: int) -> bool:
        for i in range(-(-p // chunk)):
            stop = min((i + 1) * chunk, num_tokens)
            if (i, 0) not in there or (stop > p - reach and (i, 1) not in there):
                return False
        return p in there

    return max((p for p in range(1, num_tokens + 1) if is_hit(p)), default=0)


@pytest.mark.parametrize(
    ("seed", "options"), [(1, {}), (2, {}), (3, {"encryption_key": b"e" * 32, "key": b"k" * 32})]
)
def test_hits_and_loads_are_those_of_the_rule(seed: int, options: dict[str, Any]) -> None:
    """Files of tokens, of a window and of states are deleted at random."""
    choose, blobs, chunk = random.Random(seed), InMemory(), 12
    writer, prompt = store_of(blobs, chunk, **options), [choose.randrange(9) for _ in range(67)]
    names: dict[Any, str] = {**save_tokens(writer, prompt)}
    for p in (3, 12, 21, 24, 36, 45, 48, 60, 64, 67):  # ends of chunks, rungs, that of the prompt
        names[p] = save_state(writer, prompt[:p])
    everything, found = dict(blobs.files), set()
    for round_ in range(30):
        gone = {at for at in names if choose.random() < (0.01, 0.15, 0.4)[round_ % 3]}
        gone -= {at for at in gone if isinstance(at, tuple) and choose.random() < 0.7}
        blobs.files = {n: raw for n, raw in everything.items() if n not in {names[g] for g in gone}}
        store = store_of(blobs, chunk, **options)
        match = store.lookup(prompt)
        expected = rule(set(names) - gone, len(prompt), chunk, WINDOW + SIZE)
        assert match.num_tokens == expected
        assert set(match.names) <= set(blobs.files)
        check_load(store, prompt, match)
        found.add(expected)
    assert len(found) > 4


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_answers_as_the_disk(seed: int) -> None:
    choose, blobs = random.Random(seed), InMemory()
    prompt = [choose.randrange(9) for _ in range(50)]
    writer = store_of(blobs)
    save_tokens(writer, prompt)
    save_state(writer, prompt[: choose.choice([16, 22, 32])])
    store = store_of(blobs)
    walk = store.walk(chain := store.chain_of(prompt), len(prompt))
    with pytest.raises(NotCached):
        walk.resume(store.known)
    walk.resume(store.finder)
    store.index.fresh_seconds = 3600.0
    assert (match := store.lookup(prompt)) == walk.match
    opened = blobs.num_opened
    again = store.walk(chain, len(prompt))
    again.resume(store.known)
    assert again.is_over
    assert (again.match, blobs.num_opened) == (match, opened)
    assert match.states


def test_a_walk_stops_and_goes_on_between_states() -> None:
    """As engines' threads do it: nothing is asked twice."""
    blobs, prompt = InMemory(), [*range(100)]
    writer = store_of(blobs)
    save_tokens(writer, prompt)
    save_state(writer, prompt[:16])
    store = store_of(blobs)
    walk = store.walk(store.chain_of(prompt), len(prompt))
    steps = 0
    while not walk.is_over:
        assert walk.match == Match(0, ())  # of which nothing is known yet
        walk.resume(store.finder, lambda: True)
        steps += 1
    assert (walk.match.num_tokens, steps) == (16, 7 + 7)
    at_least = store.walk(store.chain_of(prompt), len(prompt), 17)
    at_least.resume(store.finder)
    assert at_least.match.num_tokens == 0


def rung_of(node: str) -> str:
    """The first one of entries below a node."""
    return hashlib.sha256(b"kvx rung" + bytes.fromhex(node)).hexdigest()


class Counted(InMemory):
    """Counts names that are asked for."""

    num_asked = 0

    def open(self, name: str) -> BinaryIO | None:
        self.num_asked += 1
        return super().open(name)


def test_what_a_lookup_asks_for_is_bounded() -> None:
    """Of a long prompt with one state far back: a name for each chunk, and more in the last 64."""
    blobs, num_chunks = Counted(), 200
    prompt = [*range(16 * num_chunks)]
    one = {"num_layers": 1, "total_kv_heads": 1, "state_heads": None, "windows": None}
    options: dict[str, Any] = one | {"planes": [PlaneKind(0, Role.STATE, 0)]}
    k, v = (describe(torch.zeros(len(prompt) // SIZE, SIZE, 1, 2), "BLOCK_NHD") for _ in "kv")
    plane = Plane.of(
        torch.zeros(1, 1, 2), ("block", "head", "dim"), Role.STATE, tokens_per_entry=0, slots=[0]
    )
    facts = replace(FACTS, first_kv_head=0, rotary_dim=2)
    view = CacheView((CacheDesc.from_kv(k, v),), facts, planes=(plane,))
    table = BlockTable.packed([range(len(prompt) // SIZE)])
    held = [Section((0,), view, table, state_tokens=16)]  # tokens and a state in one
    writer = store_of(blobs, **options)
    chunks = writer.chunks(held, 0, len(prompt))
    chain = writer.chain_of(prompt)
    snapshots = [
        Snapshot.reserve_of(chunks, chain.ids(at, at + 16), start=at, prefix=chain.node(at // 16))
        for at in range(0, len(prompt), 16)
    ]
    writer.commit_all([one for one in snapshots if one is not None])
    state = writer.capture(prompt, 0, 16, held, states=True)
    assert state is not None
    store = store_of(blobs, **options)
    store.kinds.refresh()
    assert store.lookup(prompt).num_tokens == 0
    blobs.num_asked = 0
    walk = store.walk(chain, len(prompt))
    walk.has_states = False
    walk.resume(store.finder)
    assert (walk.match.num_tokens, of_tokens := blobs.num_asked) == (len(prompt), num_chunks)
    writer.commit(state)
    store.kinds.refresh()
    blobs.num_asked = 0
    assert store.lookup(prompt).num_tokens == 16
    assert num_chunks <= blobs.num_asked - of_tokens < num_chunks + 64 * (RUNGS + 4)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)])
def test_states_of_ranks(ranks: tuple[int, int]) -> None:
    """Each has its heads; what is whole on every rank is the same file, and may be anyone's."""
    writers, readers = ranks
    blobs, prompt = InMemory(), [*range(30)]
    store = store_of(blobs, windows=None)
    machines = [Machine(i, writers).put(prompt) for i in range(writers)]
    for i, machine in enumerate(machines):
        assert store_of(blobs, windows=None).lookup(prompt).num_tokens == 0
        for start, stop in store.spans(len(prompt)):
            snapshot = store.capture(prompt, start, stop, machine.sections())
            assert snapshot is not None
            store.commit(snapshot)
        assert store_of(blobs, windows=None).lookup(prompt).num_tokens == 0  # there is no state
        first = i * STATE_HEADS // writers
        mine = first, first + STATE_HEADS // writers
        assert store.missing(prompt, 16, 30, (1, 3), mine, states=True)
        save_state(store, prompt, machine)
        assert not store.missing(prompt, 16, 30, (1, 3), mine, states=True)
    assert not store.missing(prompt, 16, 30, (1, 3), (0, STATE_HEADS), states=True)
    reader = store_of(blobs, windows=None)
    match = reader.lookup(prompt)
    assert (match.num_tokens, len(match.states)) == (30, writers)
    for i in range(readers):
        dst, expected = Machine(i, readers), Machine(i, readers)
        reader.load(match, 0, 30, dst.sections())
        dst.assert_same(expected.put(prompt))


def test_a_state_that_ranks_have_whole_is_one_file() -> None:
    """Whoever stores it: its heads are none of a rank's."""
    blobs, prompt = InMemory(), [*range(16)]
    options: dict[str, Any] = {"planes": [PLANES[1]], "windows": None}
    store = store_of(blobs, **options)
    names = set()
    for machine in (Machine(i, 2).put(prompt) for i in range(2)):
        held = machine.sections(16)
        planes = (held[3].view.planes[1],)
        conv = replace(held[3], view=replace(held[3].view, planes=planes))
        for sections, states in ((held[:3], False), ([conv], True)):
            snapshot = store.capture(prompt, 0, 16, sections, states=states)
            assert snapshot is not None
            store.commit(snapshot)
            names.add(store.name_of(snapshot))
    assert len(names) == 3
    assert not store.missing(prompt, 0, 16, (1,), (0, 1), states=True)
    match = store_of(blobs, **options).lookup(prompt)
    assert (match.num_tokens, len(match.states)) == (16, 1)


def test_what_lacks_is_asked_for_apart() -> None:
    blobs, prompt = InMemory(), [*range(40)]
    store = store_of(blobs)
    save_tokens(store, prompt)
    for from_memory in (False, True):
        part = {"layers": KV, "heads": (0, KV_HEADS), "from_memory": from_memory}
        state = {"layers": (1, 3), "heads": (0, STATE_HEADS), "from_memory": from_memory}
        assert not store.missing(prompt, 32, 40, **part)
        assert store.missing(prompt, 32, 40, states=True, **state)
    assert store_of(blobs).lookup(prompt).num_tokens == 0
    files = set(blobs.files)
    name = save_state(store, prompt)
    new = {n for n in blobs.files.keys() - files if "/kinds/" not in n}
    assert new == {name}  # the state alone
    assert not store.missing(prompt, 32, 40, states=True, **state)
    assert store_of(blobs).lookup([*prompt, 1]).num_tokens == 40
    with pytest.raises(InvalidArgumentError, match="heads end at 4, expected at most 0"):
        store.missing(prompt, 32, 40, (0,), (0, STATE_HEADS), states=True)


def test_a_longer_entry_takes_no_state_with_it() -> None:
    """Tokens of a shorter one are in the longer one; its state is nowhere else."""
    for has_state in (False, True):
        blobs, prompt = InMemory(), [*range(40)]
        store = store_of(blobs, windows=None)
        store._stale_entries._seconds = 0.0
        for stop in (21, 27, 31):  # a conversation that grows
            save_tokens(store, prompt[:stop])
            if has_state:
                save_state(store, prompt[:stop])
        save_tokens(store, prompt)
        found = [store_of(blobs, windows=None).lookup(prompt[:n]) for n in (21, 26, 27, 31, 40)]
        lengths = [match.num_tokens for match in found]
        assert lengths == ([21, 21, 27, 31, 31] if has_state else [0] * 5)
        for match in found:
            check_load(store_of(blobs, windows=None), prompt, match)
        key = found[0].spans[-1].names[0] if has_state else ""
        assert (key in blobs.files) is has_state


def test_a_state_without_tokens_of_its_own_has_a_name() -> None:
    """A rung's is found from everywhere, others from close by; those with tokens are marked."""
    blobs, prompt, chunk = InMemory(), [*range(60)], 64
    store = store_of(blobs, chunk, windows=None)
    save_tokens(store, prompt[:21])
    for stop in (21, 24, 27):
        save_state(store, prompt[:stop])
    save_tokens(store, prompt)
    found = store_of(blobs, chunk, windows=None)
    lengths = [found.lookup(prompt[:n]).num_tokens for n in (60, 43, 42, 27, 26, 23, 20)]
    assert lengths == [24, 24, 27, 27, 24, 21, 0]
    blobs.delete(found.lookup(prompt[:24]).states[0])
    assert store_of(blobs, chunk, windows=None).lookup(prompt).num_tokens == 21


def test_a_state_that_comes_late_is_marked() -> None:
    """A longer entry has its mark meanwhile, and its tokens are still there."""
    blobs, prompt, chunk = InMemory(), [*range(60)], 64
    store = store_of(blobs, chunk, windows=None)
    save_tokens(store, prompt[:21])
    save_tokens(store, prompt)
    save_state(store, prompt[:21])
    for _ in range(2):
        assert store_of(blobs, chunk, windows=None).lookup(prompt).num_tokens == 21
        store._stale_entries._clock = lambda: 1e12
        store._stale_entries.drop()


def test_a_state_holds_no_rung_without_its_tokens() -> None:
    """Which entries of tokens need: a mark that leads to none is free."""
    blobs, prompt = InMemory(), [*range(21)]
    for has_tokens in (True, False):
        store = store_of(blobs, windows=None)
        names = save_tokens(store, prompt)
        save_state(store, prompt)
        if not has_tokens:
            blobs.delete(names[1, 0])
            store._entries.marks._taken.forget(store._record.name, rung_of(store.nodes(prompt)[1]))
        other = [*prompt[:16], 99 + has_tokens]  # of a token, which has one rung
        save_tokens(store, other)
        found = store_of(blobs, windows=None)
        walk = found.walk(found.chain_of([*other, 5]), 18)
        walk.resume(found.finder)
        assert walk.num_found == (16 if has_tokens else 17)


@pytest.mark.parametrize("at", [40, -1])
def test_a_bad_state_is_deleted_and_a_shorter_one_found(at: int) -> None:
    """If it is bad where only a load looks, the load writes nothing at all."""
    blobs, prompt = InMemory(), [*range(40)]
    writer = store_of(blobs)
    save_tokens(writer, prompt)
    save_state(writer, prompt[:32])
    name = save_state(writer, prompt)
    raw = bytearray(blobs.files[name])
    raw[at] ^= 1
    blobs.files[name] = bytes(raw)
    store = store_of(blobs)
    match = store.lookup(prompt)
    if at < 0:
        assert match.num_tokens == 40
        dst, progress = Machine().leave_window(40), Progress()
        with pytest.raises(CorruptError):
            store.load(match, 0, 40, dst.sections(), progress=progress)
        dst.assert_same(Machine())
        assert progress.stop == 0
        match = store.lookup(prompt)
    assert name not in blobs.files
    assert match.num_tokens == 32
    check_load(store, prompt, match)


def test_a_state_is_as_precise_as_what_it_was_computed_from() -> None:
    """Of layers before it: its own dtype says nothing of them."""
    prompt = [*range(16)]
    coarse = {"precision": [Precision.of("float32")] * 3 + [Precision.of("bfloat16")]}
    for options, found in (({}, 0), ({"accept": "lossy"}, 16), (coarse, 16)):
        blobs = InMemory()
        store = store_of(blobs, windows=None)
        save_tokens(store, prompt)
        store.carry(Precision.of("bfloat16"))
        save_state(store, prompt)
        reader = store_of(blobs, windows=None, **options)
        match = reader.lookup(prompt)
        assert match.num_tokens == found
        if found:
            check_load(reader, prompt, match)
        assert bool(reader.carried.formats) is ("accept" in options)
        assert reader.missing(prompt, 0, 16, (1, 3), (0, 4), states=True) is (not found)


def test_files_of_states_as_the_page_says() -> None:
    """Read by the reader that shares nothing with KVX."""
    blobs, prompt = InMemory(), [*range(100, 140)]
    store = store_of(blobs)
    save_tokens(store, prompt)
    name = save_state(store, prompt)
    space, _, file = name.split("/")
    key, kind, _ = file.split(".")
    raw = blobs.files[f"{space}/kinds/{kind}.json"]
    chunk = store_reader.read(blobs.files[name], raw)
    assert store_reader.holds_states(raw)
    assert key == hashlib.sha256(chunk.parent + np.array(chunk.tokens, "<i8").tobytes()).hexdigest()
    assert (chunk.start, chunk.tokens) == (32, prompt[32:])
    machine = Machine().put_states(prompt)
    wanted = {
        "planes.1.state": machine.states[1][1],
        "planes.1.role_40": machine.conv[1],
        "planes.3.state": machine.states[3][1],
    }
    assert chunk.tensors.keys() == wanted.keys()
    for tensor, values in wanted.items():
        assert chunk.tensors[tensor].data == values.numpy().tobytes()
        assert chunk.tensors[tensor].shape[0] == 1
    for other in blobs.files.keys() - {name}:
        if other.endswith(".safetensors"):
            kind = other.split(".")[1]
            assert not store_reader.holds_states(blobs.files[f"{space}/kinds/{kind}.json"])
    record = SpaceRecord.parse(blobs.files[f"{space}/space.json"], space)
    assert record.state_heads == (0, STATE_HEADS, 0, STATE_HEADS)


def test_what_states_are_refused() -> None:
    prompt = [*range(16)]
    store = store_of(InMemory())
    held = Machine().put(prompt).sections(16)
    with pytest.raises(InvalidArgumentError, match=r"^section\.state_tokens is 16, expected 12"):
        store.capture(prompt, 0, 12, held, states=True)
    with pytest.raises(InvalidArgumentError, match=r"^sections have no states, expected some"):
        store.capture(prompt, 0, 16, held[:3], states=True)
    with pytest.raises(InvalidArgumentError, match=r"^sections have no keys and values of tokens"):
        store.capture(prompt, 0, 16, held[3:])
    part = replace(held[3], view=replace(held[3].view, planes=held[3].view.planes[:1]))
    with pytest.raises(InvalidArgumentError, match=r"^role 40 of layer 1 is a plane of the store"):
        store.capture(prompt, 0, 16, [part], states=True)
    for wrong in ([0, 0, 0, 4], [0, 4, 0, 0]):
        with pytest.raises(InvalidArgumentError, match=r"^state_heads of layer . is 0, expected"):
            store_of(InMemory(), state_heads=wrong)
    with pytest.raises(InvalidArgumentError, match=r"^state_heads of layer 1 is 0, expected"):
        store_of(InMemory(), state_heads=None)
    few = store_of(InMemory(), state_heads=2)
    with pytest.raises(InvalidArgumentError, match=r"^section has layers \(1,\) and heads \(0, 4"):
        few.capture(prompt, 0, 16, held, states=True)
    save_tokens(store, prompt)
    save_state(store, prompt)
    match = store.lookup(prompt)
    dst = Machine()
    with pytest.raises(InvalidArgumentError, match=r"^STATE of layer 3 is a plane of the store"):
        store.load(match, 0, 16, dst.sections()[:4])
    with pytest.raises(StoreError, match=r"^stop is 12, expected 16: the states"):
        store.load(match, 0, 12, dst.sections())
    for states, words in ((), "do not hold all of layer"), (match.spans[0].names, "not stored so"):
        with pytest.raises(StoreError, match=words):
            store.load(replace(match, states=states), 0, 16, dst.sections())
    dst.assert_same(Machine())


def test_kinds_that_are_none_of_the_model_are_ignored() -> None:
    """Of tokens and states together, of other planes, or of more heads than there are."""
    prompt = [*range(16)]
    held = Machine().put(prompt).sections(16)
    (k, *_), state = held, held[4].view.planes[0]
    narrow = replace(state, layer=0, shape=(3, KV_HEADS, 3))
    mixed = replace(k, view=replace(k.view, planes=(narrow,)), state_tokens=16)
    other = replace(held[4], view=replace(held[4].view, planes=(replace(state, role=50),)))
    for sections, is_taken in (([held[4]], True), ([mixed], False), ([other], False)):
        blobs = InMemory()
        snapshot = Snapshot.capture(prompt, sections)
        assert snapshot is not None
        kind = Kind.of(snapshot.header.parts, snapshot.tensors, 16)
        for state_heads in (STATE_HEADS, 2):
            store = store_of(blobs, state_heads=state_heads)
            name = kind_name(store._record.name, kind.id)
            blobs.put(name, lambda file, text=kind.text: file.write(text))
            store.kinds.refresh()
            assert [one.id for one in store.kinds.all] == (
                [kind.id] if is_taken and state_heads == STATE_HEADS else []
            )


@pytest.mark.parametrize(("gigabytes", "is_stored"), [(0.08, True), (5, False)])
def test_how_large_states_may_be(gigabytes: float, is_stored: bool) -> None:
    """Qwen3-Next 80B has 77 MB. What a file says must have a limit."""
    state = torch.empty(2, int(gigabytes * 1e9) // 4)  # never touched
    plane = Plane.of(state, ("block", "dim"), Role.STATE, 0, tokens_per_entry=0, replicated=True)
    facts = replace(FACTS, first_kv_head=0)
    section = Section((0,), CacheView((), facts, planes=(plane,)), None, state_tokens=1)
    store = PrefixStore(
        InMemory(),
        fingerprint="abc",
        num_layers=2,
        total_kv_heads=[0, 1],
        precision=Precision.of("float32"),
        planes=[plane],
    )
    if is_stored:
        assert store.would_write([section], states=True).is_states
    else:
        with pytest.raises(InvalidArgumentError, match="a state has more than 4294967296 bytes"):
            store.would_write([section], states=True)
