"""Lookups: what memory answers at once, what a thread asks the disk, and what both count."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvx_core import BlockTable, PrefixStore, Section
from kvx_core._c.os_files import OpenFile
from kvx_core.connector import lookups
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.lookups import NOTHING, Lookups
from kvx_core.connector.policy import Policy
from kvx_core.connector.scoped import Scoped
from kvx_core.stores.pace import Pace
from kvx_core.stores.walk import Walk
from tests.connector.serving import Frozen, prompt, store_in
from tests.connector.toy_connector import view_of
from tests.connector.toy_engine import BLOCK_SIZE, HEADS, LAYERS, Engine, Request


def fill(path: Path, tokens: list[int]) -> PrefixStore:
    engine, store = Engine(), store_in(Frozen(path))
    engine.decoder.caches.zero_()
    blocks = list(range(1, 1 + -(-len(tokens) // BLOCK_SIZE)))
    section = Section(tuple(range(LAYERS)), view_of(engine), BlockTable.packed([blocks]))
    for start, stop in store.spans(len(tokens)):
        snapshot = store.capture(tokens, start, stop, [section])
        assert snapshot is not None
        store.commit(snapshot)
    return store


class Asked:
    """A policy that looks prompts up; `answer` waits for it."""

    def __init__(self, path: Path, fresh_seconds: float = 60.0) -> None:
        self.blobs = Frozen(path)
        self.store = store_in(self.blobs)
        self.store.index.fresh_seconds = fresh_seconds
        boundary = Boundary(print)
        self.lookups = Lookups(boundary, seconds=60)
        self.policy = Policy(Scoped(self.store), boundary, self.lookups, 16, asynchronous=True)
        self.num_requests = 0

    def at_once(self, tokens: list[int]) -> int | None:
        self.num_requests += 1
        return self.policy.lookup(Request(f"r{self.num_requests}", tokens, 1), 0)

    def answer(self, tokens: list[int]) -> int:
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", tokens, 1)
        while (found := self.policy.lookup(request, 0)) is None:
            self.lookups.wait(0.01)
        return found


def test_memory_answers_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits, misses, and matches that are exact to the token, without the disk."""
    monkeypatch.setattr(lookups, "_OWN_SECONDS", 60)  # however slow the machine is
    monkeypatch.setattr(lookups, "_LOOKUP_WAIT_SECONDS", 0)
    tokens = prompt(70, 1)
    fill(tmp_path, tokens)
    asked = Asked(tmp_path)
    assert asked.at_once(tokens) is None
    assert asked.answer(tokens) == 69
    others = [tokens[:61] + prompt(9, 2), tokens[:33], tokens[:20] + prompt(30, 3)]
    found = [asked.answer(other) for other in others]
    assert found[:2] == [61, 32]
    assert found[2] in (20, 21)  # the next token may be the same
    assert asked.answer(prompt(40, 13)) == 0
    assert asked.lookups._workers.wait(60)
    calls = asked.blobs.num_calls
    for other, expected in zip([tokens, *others], [69, *found], strict=True):
        assert asked.at_once(other) == expected
    assert asked.at_once(prompt(40, 13)) == 0
    assert asked.blobs.num_calls == calls


def test_short_prompts_that_memory_knows_need_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of longer ones are computed in one, for what is saved."""
    monkeypatch.setattr(lookups, "_OWN_SECONDS", 60)  # however slow the machine is
    monkeypatch.setattr(lookups, "_MOST_WALKED_TOKENS", 40)
    asked, jobs = Asked(tmp_path), list[str]()
    for count in (40, 41):
        assert asked.answer(prompt(count, count)) == 0
    assert asked.lookups._workers.wait(60)
    monkeypatch.setattr(asked.lookups._workers, "submit", lambda job, name: jobs.append(name))
    for count, num_jobs in ((40, 0), (41, 1)):
        assert asked.at_once(prompt(count, count)) == 0
        assert len(jobs) == num_jobs


def test_memory_answers_while_threads_are_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_OWN_SECONDS", 60)  # however slow the machine is
    fill(tmp_path, prompt(70, 1))
    asked = Asked(tmp_path)
    assert asked.answer(prompt(70, 1)) == 69
    asked.lookups.seconds = -1  # as if they had been, for longer than that
    assert asked.at_once(prompt(70, 1)) == 69
    assert asked.at_once(prompt(70, 2)) == 0


@pytest.mark.parametrize("busy", ["nothing", "other requests", "all threads"])
def test_only_a_lookup_that_is_alone_is_waited_for(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step would wait for each of its requests."""
    asked, waits, goes_on = Asked(tmp_path), list[float](), threading.Event()

    def wait_for(is_over: Any, seconds: float) -> bool:
        waits.append(seconds)
        return False

    monkeypatch.setattr(lookups, "_OWN_SECONDS", -1)  # the threads look
    asked.blobs.answers.clear()
    if busy == "other requests":
        assert asked.at_once(prompt(70, 1)) is None
    for i in range(8 if busy == "all threads" else 0):
        asked.lookups._workers.submit(lambda: goes_on.wait(60), f"job {i}")
    monkeypatch.setattr(asked.lookups._lookup_is_over, "wait_for", wait_for)
    assert asked.at_once(prompt(70, 2)) is None
    assert len(waits) == (busy == "nothing")
    goes_on.set()
    asked.blobs.answers.set()
    asked.lookups.shutdown()


def test_who_waits_for_an_answer_goes_on_before_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()

    class Told(Pace):
        def rest(self) -> None:
            events.append("rest")

    monkeypatch.setattr(lookups, "Pace", Told)
    asked = Asked(tmp_path)
    check_rest = Walk.check_rest
    monkeypatch.setattr(
        Walk, "check_rest", lambda *given: (events.append("check"), check_rest(*given))[1]
    )
    monkeypatch.setattr(Told, "yield_gil", lambda self: None)
    assert asked.answer(prompt(70, 4)) == 0
    assert asked.lookups._workers.wait(60)
    assert events == ["rest", "check"]
    asked.lookups.shutdown()


def test_one_lookup_finds_all_corrupt_files(tmp_path: Path) -> None:
    """Those behind the first one too, up to the first chunk of which nothing is stored."""
    tokens = prompt(90, 1)
    store = fill(tmp_path, tokens)
    paths = [tmp_path / span.names[0] for span in store.lookup(tokens).spans]
    assert [path.stat().st_size > 100 for path in paths] == [True] * 6
    good = {path: path.read_bytes() for path in paths}

    def bad_files(numbers: tuple[int, ...]) -> list[Path]:
        bad = []
        for number in numbers:
            path = paths[number]
            path.write_bytes(good[path][:100])
            bad.append(path)
        return bad

    bad = bad_files((1, 2, 4, 5))
    asked = Asked(tmp_path)
    assert asked.answer(tokens) == 16
    assert asked.lookups._workers.wait(60)
    assert [path for path in bad if path.exists()] == []
    assert paths[0].exists()
    assert paths[3].exists()
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(good[path])

    bad = bad_files((0, 3))
    paths[1].unlink()  # nothing is stored here: what lies behind is not looked at
    assert store_in(Frozen(tmp_path)).lookup(tokens).num_tokens == 0
    assert [path.exists() for path in bad] == [False, True]


def test_corrupt_files_behind_a_chunk_of_which_a_part_is_found(tmp_path: Path) -> None:
    """Another entry begins as the corrupt one does, so that the match ends inside the chunk."""
    tokens = [*range(48)]
    fill(tmp_path, [*tokens[:21], *[63] * 11])
    store = fill(tmp_path, tokens)
    paths = [tmp_path / span.names[0] for span in store.lookup(tokens).spans]
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:100])
    assert store_in(Frozen(tmp_path)).lookup(tokens).num_tokens == 21
    assert [path.exists() for path in paths] == [True, False, False]


def test_a_request_that_grows_while_it_is_looked_up_is_looked_up_again(tmp_path: Path) -> None:
    tokens = prompt(60, 1)
    fill(tmp_path, tokens)
    asked = Asked(tmp_path)
    asked.blobs.answers.clear()
    request = Request("r", tokens[:20], 1)
    assert asked.policy.lookup(request, 0) is None
    request.all_token_ids += tokens[20:]
    asked.blobs.answers.set()
    while (found := asked.policy.lookup(request, 0)) is None:
        asked.lookups.wait(0.01)
    assert found == 59


def test_every_match_is_that_of_the_store(tmp_path: Path) -> None:
    """Whatever memory knows, its answer is the one of a lookup on the disk."""
    generator = np.random.default_rng(5)
    stored = [prompt(50, 10), prompt(50, 10)[:40] + prompt(30, 11), prompt(20, 12)]
    for tokens in stored:
        fill(tmp_path, tokens)
    asked = Asked(tmp_path)
    for _ in range(60):
        one, two = (stored[i] for i in generator.integers(0, 3, 2))
        cut = int(generator.integers(1, len(one) + 1))
        tokens = one[:cut] + two[cut:]
        match = store_in(Frozen(tmp_path)).lookup(tokens)
        expected = min(match.num_tokens, len(tokens) - 1)
        assert asked.answer(tokens) == (expected if expected >= 8 else 0)


@pytest.mark.parametrize("is_deleted", [False, True], ids=["stored", "deleted"])
def test_what_other_processes_do_is_seen_soon(tmp_path: Path, is_deleted: bool) -> None:
    tokens = prompt(40, 6)
    fill(tmp_path, prompt(40, 7))
    if is_deleted:
        fill(tmp_path, tokens)
    asked = Asked(tmp_path, fresh_seconds=0.2)
    before = 39 if is_deleted else 0
    assert asked.answer(tokens) == before
    if is_deleted:
        for path in tmp_path.rglob("*.safetensors"):
            path.unlink()
    else:
        fill(tmp_path, tokens)
    time.sleep(0.25)
    assert asked.answer(tokens) == 39 - before


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "saved"])
def test_what_this_process_has_is_not_saved_again(tmp_path: Path, is_loaded: bool) -> None:
    """However long ago it was loaded or saved, until the disk says that others have deleted it."""
    tokens, blobs = prompt(16, 14), Frozen(tmp_path)
    store = fill(tmp_path, tokens)
    if is_loaded:
        engine, store = Engine(), store_in(blobs)
        section = Section(tuple(range(LAYERS)), view_of(engine), BlockTable.packed([[1, 2, 3, 4]]))
        store.load(store.lookup(tokens), 0, 16, [section])
    store.index.fresh_seconds = 0.0

    def is_missing() -> bool:
        layers = range(LAYERS)
        return store.missing(tokens, 0, 16, layers, (0, HEADS), from_memory=True)

    calls = blobs.num_calls
    assert not is_missing()
    assert blobs.num_calls == calls
    store.confirm()
    assert not is_missing()
    (path,) = tmp_path.rglob("*.safetensors")
    path.unlink()
    assert not is_missing()
    store.confirm()
    assert is_missing()


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """The prompt is computed after the deadline; others are not asked about while it lasts."""
    fill(tmp_path, prompt(40, 8))
    asked = Asked(tmp_path)
    asked.lookups.seconds = 0.1
    asked.blobs.answers.clear()
    begin = time.monotonic()
    for seed in range(2):
        assert asked.answer(prompt(40, seed)) == 0
    assert 0.1 <= time.monotonic() - begin < 10
    while asked.lookups._workers.stuck_seconds() <= 0.1:  # of the thread that began last
        time.sleep(0.01)
    calls = asked.blobs.num_calls
    assert asked.at_once(prompt(40, 8)) == 0
    assert asked.blobs.num_calls == calls
    asked.blobs.answers.set()


def test_a_lookup_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    fill(tmp_path, prompt(40, 9))
    asked = Asked(tmp_path)
    asked.blobs.answers.clear()
    assert asked.at_once(prompt(40, 9)) is None
    asked.policy.ended("r1")
    assert asked.lookups._pending == {}
    asked.blobs.answers.set()
    assert asked.answer(prompt(40, 9)) == 39
    asked.lookups.shutdown()
    assert NOTHING.num_tokens == 0


def test_a_lookup_that_has_not_begun_in_time_never_begins(tmp_path: Path) -> None:
    """So that those which come later are in time, once the store answers."""
    asked = Asked(tmp_path)
    asked.blobs.answers.clear()
    requests = [Request(f"r{seed}", prompt(40, seed), 1) for seed in range(3)]
    assert [asked.policy.lookup(request, 0) for request in requests] == [None] * 3
    workers = asked.lookups._workers
    while len(workers._running) < 2:
        time.sleep(0.001)
    assert len(workers._jobs) == 1
    asked.lookups.seconds = 0
    assert [asked.policy.lookup(request, 0) for request in requests] == [0] * 3
    assert not workers._jobs
    asked.blobs.answers.set()
    asked.lookups.shutdown()


def test_all_lookups_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_LOOKUP_WAIT_SECONDS", 0)
    asked = Asked(tmp_path)
    asked.blobs.answers.clear()
    assert [asked.at_once(prompt(40, seed)) for seed in (14, 15)] == [None, None]
    pending = list(asked.lookups._pending.values())
    asked.policy.reset()
    assert [lookup.is_forgotten for lookup in pending] == [True, True]
    asked.blobs.answers.set()
    asked.lookups.shutdown()


def test_threads_of_lookups_end_with_them(tmp_path: Path) -> None:
    before, asked = set(threading.enumerate()), Asked(tmp_path)
    assert asked.answer(prompt(40, 14)) == 0
    begun = set(threading.enumerate()) - before
    assert begun
    asked.lookups.shutdown()
    for thread in begun:
        thread.join(60)
        assert not thread.is_alive()


def test_answers_are_counted(tmp_path: Path) -> None:
    tokens = prompt(70, 1)
    fill(tmp_path, tokens)
    asked = Asked(tmp_path)
    assert asked.lookups.take_counts() == {}
    assert asked.answer(tokens) == 69
    assert asked.answer(tokens[:33]) == 32
    assert asked.answer(prompt(40, 13)) == 0
    counts = asked.lookups.take_counts()
    assert (counts["lookup_hits"], counts["lookup_misses"]) == (2, 1)
    seconds = counts["lookup_seconds"]
    assert isinstance(seconds, list)
    assert len(seconds) == 3
    assert all(0 < one < 60 for one in seconds)
    assert asked.lookups.take_counts() == {}


def test_a_short_match_is_a_miss(tmp_path: Path) -> None:
    """`answer` needs 8 tokens at least."""
    tokens = prompt(70, 1)
    fill(tmp_path, tokens)
    asked = Asked(tmp_path)
    assert asked.answer(tokens[:4] + prompt(40, 14)) == 0
    assert asked.lookups.take_counts()["lookup_misses"] == 1


def test_lookups_that_could_have_hit_are_counted(tmp_path: Path) -> None:
    """Their first 8 tokens were asked for before: in the store or not, and under the same salt."""
    asked = Asked(tmp_path)
    stored, other = prompt(70, 1), prompt(40, 13)
    fill(tmp_path, stored)
    for tokens in (stored, other, stored[:8], other[:7] + [1] * 20, prompt(40, 15)):
        asked.answer(tokens)
    assert asked.lookups.take_counts()["lookup_repeats"] == 0
    for tokens in (stored, stored[:9] + other, other[:20]):
        asked.answer(tokens)
    assert asked.lookups.take_counts()["lookup_repeats"] == 3
    salted = asked.store.salted("another")
    chain = salted.chain_of(stored)
    while asked.lookups.ask("salted", salted, chain, len(stored), 8) is None:
        asked.lookups.wait(0.01)
    assert asked.lookups.take_counts()["lookup_repeats"] == 0


@pytest.mark.parametrize("has_hit", [False, True])
def test_a_store_in_which_nothing_is_ever_found_is_reported(has_hit: bool, tmp_path: Path) -> None:
    lines: list[str] = []
    asked = Asked(tmp_path)
    asked.lookups._boundary = Boundary(lines.append)
    if has_hit:
        fill(tmp_path, prompt(70, 1))
        assert asked.answer(prompt(70, 1)) == 69
    for _ in range(250):
        assert asked.answer(prompt(40, 13)) == 0
    assert [line.partition(":")[0] for line in lines] == ([] if has_hit else ["KVX"])
    assert has_hit or lines[0].startswith("KVX: none of 100 lookups found anything, whose prompts")


class Dying(Frozen):
    """A directory whose disk does not give its files."""

    is_dying = False

    def fetch(self, name: str, *rest: Any) -> OpenFile | None:
        if self.is_dying and name.endswith(".safetensors"):
            error = OSError(errno.EIO, "Input/output error")
            raise self._failure(name, "read", error) from error
        return super().fetch(name, *rest)


def test_a_disk_that_does_not_give_files_is_told(tmp_path: Path) -> None:
    """Not a file that has gone, nor one that is corrupt: these are misses."""
    tokens = prompt(40, 9)
    fill(tmp_path, tokens)
    blobs, log = Dying(tmp_path), list[str]()
    store, boundary = store_in(blobs), Boundary(log.append)
    store.index.fresh_seconds = 0
    looked = Lookups(boundary, seconds=60)

    def answer() -> int:
        chain = store.chain_of(tokens)
        while (match := looked.ask("a", store, chain, len(tokens))) is None:
            looked.wait(0.01)
        assert looked._workers.wait(60)
        return match.num_tokens

    blobs.is_dying = True
    assert answer() == 0
    assert boundary.take_counts()["lookup_failures"] > 0
    (line,) = log
    assert line.startswith("KVX did not read what a prompt may begin with: ")
    assert line.endswith("cannot be read: Input/output error")
    blobs.is_dying = False
    assert answer() == 40
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    store = store_in(blobs)
    assert answer() == 0
    assert store.index.num_corrupt
    assert boundary.take_counts() == {}
