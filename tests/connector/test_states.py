"""A connector of a model with states: when they are saved, what is looked up, how a load fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvx_core import PlaneKind, Section
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.loader import Loader
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import BlockIds, Load, Save, Scope
from kvx_core.connector.policy import Policy
from kvx_core.connector.saver import Saver
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.settings import StoreSettings
from kvx_core.stores import PrefixStore
from kvx_core.stores.blob_store import Write
from tests.stores.machine import (
    PLANES,
    STATE_HEADS,
    Machine,
    check_load,
    save_state,
    save_tokens,
    store_of,
)
from tests.stores_memory import InMemory

TOKENS = [*range(1, 60)]


class Worker:
    """A rank whose states are those after `position` tokens."""

    def __init__(self, store: PrefixStore, path: Path, rank: int = 0, ranks: int = 1) -> None:
        self.store, self.machine, self.position = store, Machine(rank, ranks), 0
        settings = StoreSettings(path=path)
        self.log, counts = list[str](), Counts()
        boundary = Boundary(self.log.append)
        kv, states = self.machine.kv[0].shape[3], self.machine.heads
        self.saver = Saver(
            {Scope(): store},
            settings,
            boundary,
            counts,
            self._sections,
            range(4),
            (rank * kv, (rank + 1) * kv),
            state_heads=(rank * states, (rank + 1) * states),
        )
        self.loader = Loader({Scope(): store}, settings, boundary, counts, self._sections)

    def _sections(self, block_ids: BlockIds, num_tokens: int) -> list[Section]:
        return self.machine.sections(self.position)

    def compute(self, stop: int) -> None:
        self.machine.put(TOKENS[:stop])
        self.position = stop

    def save(self, start: int, stop: int, *, now: bool = False) -> bool:
        """Tokens of the prompt; whether all of them are stored afterwards, if `now`."""
        chain = self.store.chain_of(TOKENS)
        node, ids = chain.node(start // 16), chain.ids(start, stop)
        save = Save("r", Scope(), node, start, ids, ([],))
        if now:
            return self.saver.save_now(save)
        self.saver.save(save, [save])
        assert self.saver._writer.threads.wait(60)
        return True


def states_in(blobs: InMemory, store: PrefixStore) -> int:
    kinds = [kind.id for kind in store.kinds.states.all]
    return sum(name.split(".")[1] in kinds for name in blobs.files if "safetensors" in name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_are_saved_where_a_save_ends(ranks: int, tmp_path: Path) -> None:
    blobs = InMemory()
    store = store_of(blobs)
    workers = [Worker(store, tmp_path, i, ranks) for i in range(ranks)]

    def hits(num_tokens: int) -> int:
        found = store_of(blobs)
        match = found.lookup(TOKENS[:num_tokens])
        check_load(found, TOKENS, match)
        return match.num_tokens

    for each in workers:
        each.compute(20)
        assert hits(59) == 0
        each.save(0, 20)
    assert (hits(59), states_in(blobs, store)) == (20, ranks)
    files = dict(blobs.files)
    for each in workers:
        each.save(0, 20)  # all of it is stored
        each.compute(40)
        each.save(16, 32)  # the state has gone on, which belongs to 40 tokens
    assert (hits(59), states_in(blobs, store)) == (20, ranks)
    for each in workers:
        each.save(32, 40)
    assert (hits(59), hits(39), states_in(blobs, store)) == (40, 20, 2 * ranks)
    tokens = blobs.files.keys() - files.keys()
    kinds = [kind.id for kind in store.kinds.states.all]
    for name in [name for name in tokens if name.split(".")[1] in kinds]:
        blobs.delete(name)
        store.index.mark_absent(name)
    assert hits(59) == 20
    for each in workers:
        each.save(32, 40)  # its tokens are there
    assert hits(59) == 40
    assert not any(each.log for each in workers)


class OfOneHead(Machine):
    """Layer 1 has its replicated state alone, which is one head on every rank."""

    def sections(self, state_tokens: int | None = None) -> list[Section]:
        found = super().sections(state_tokens)
        i = next(i for i, section in enumerate(found) if section.layers == (1,))
        view = found[i].view
        facts = replace(view.facts, first_kv_head=0)
        found[i] = replace(found[i], view=replace(view, facts=facts, planes=view.planes[1:]))
        return found


def test_a_state_of_one_head_is_whole_on_every_rank(tmp_path: Path) -> None:
    blobs = InMemory()
    options = {"planes": PLANES[1:], "state_heads": [0, 1, 0, STATE_HEADS]}
    workers = [Worker(store_of(blobs, **options), tmp_path, rank, 2) for rank in range(2)]
    for rank, each in enumerate(workers):
        each.machine = OfOneHead(rank, 2)
        each.compute(20)
        each.save(0, 20)
        assert not each.log
    assert store_of(blobs, **options).lookup(TOKENS).num_tokens == 20


def test_all_is_stored_if_its_state_is(tmp_path: Path) -> None:
    store = store_of(InMemory())
    worker = Worker(store, tmp_path)
    worker.compute(40)
    assert worker.save(0, 40, now=True), worker.log
    worker.compute(50)
    assert not worker.save(32, 45, now=True)  # of which there is no state any more
    assert worker.save(32, 50, now=True)


class Asked(InMemory):
    """Names of the files of chunks that it was told to store."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        if name.endswith(".safetensors"):
            self.asked.append(name)
        return super().put(name, write, durable=durable)


@pytest.mark.parametrize("planes", [PLANES, PLANES[2:]])
def test_only_the_file_that_is_missing_is_written(planes: list[PlaneKind], tmp_path: Path) -> None:
    """Layers 0 and 3, the window of layer 2, and the states have files of their own.

    planes: states of layers 1 and 3, or of layer 3 alone, whose tokens are in another file
    """
    blobs = Asked()
    worker = Worker(store_of(blobs, planes=planes), tmp_path)
    worker.compute(20)
    worker.save(0, 20)
    stored = list(blobs.asked)
    assert len(set(stored)) == 2 * 2 + 1
    for missing in stored:
        blobs.delete(missing)
        blobs.asked.clear()
        other = Worker(store_of(blobs, planes=planes), tmp_path)  # it has to ask for files
        other.compute(20)
        other.save(0, 20)
        assert blobs.asked == [missing]
        assert not other.log


def test_a_lookup_leaves_the_last_token_out(tmp_path: Path) -> None:
    """The engine computes it: a state behind it is no use."""
    store = store_of(InMemory())
    save_tokens(store, TOKENS[:40])
    for stop in (32, 40):
        save_state(store, TOKENS[:stop])
    boundary = Boundary([].append)
    policy = Policy(Scoped(store), boundary, Lookups(boundary), 16, asynchronous=True)
    for length, found in ((40, 32), (41, 40), (33, 32), (32, 0)):
        request = SimpleNamespace(
            request_id=length, all_token_ids=TOKENS[:length], num_prompt_tokens=length
        )
        count = None
        while count is None:
            count = policy.lookup(request, 0)
        assert count == found


def test_who_takes_a_request_over_asks_for_its_states(tmp_path: Path) -> None:
    """Even if all its tokens are stored."""
    request = SimpleNamespace(request_id="r", all_token_ids=TOKENS[:41], num_prompt_tokens=40)
    boundary = Boundary([].append)
    for planes, spans in ((PLANES, [(20, 16), (32, 16), (40, 32)]), ([], [(20, 20), (32, 32)])):
        store = store_of(InMemory(), planes=planes)
        policy = Policy(Scoped(store), boundary, Lookups(boundary), 16, asynchronous=True)
        policy.allocated(request, ([],), 0)
        for stop, start in spans:
            policy.has_loaded("r", stop)
            save = policy.handed_over("r", stop)
            assert save is not None
            assert (save.start, save.stop) == (start, stop)


def test_a_load_with_states_succeeds_or_fails_as_a_whole(tmp_path: Path) -> None:
    """Tokens before a bad file are no use: there is no state of theirs."""
    blobs = InMemory()
    store = store_of(blobs)
    save_tokens(store, TOKENS[:40])
    save_state(store, TOKENS[:40])
    match = store.lookup(TOKENS)
    name = match.spans[1].names[0]
    blobs.files[name] = blobs.files[name][:-1] + b"?"
    for start in (0, 8):
        worker = Worker(store, tmp_path)
        load = Load("r", Scope(), match, start, 40, ([],), wait=True)
        assert not worker.loader.load(load)
        ((_, first),) = worker.loader.take_results().failed
        assert first == start
        assert len(worker.log) == 1
