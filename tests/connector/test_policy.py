"""A Policy asked in orders that are rare in engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvx_core import Directory, PrefixStore
from kvx_core.connector import lookups
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.epochs import Epoch, Epochs
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import Save
from kvx_core.connector.policy import Policy
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.weights import Report, Stamp, Unknown
from kvx_core.stores import token_chain
from tests.connector.serving import prompt, store_in
from tests.connector.test_writer import chunks_of
from tests.connector.toy_engine import Request

CHUNK = 16


class Salted(Policy):
    """A Policy of an engine whose requests have a salt, which may change."""

    __slots__ = ()

    def salt_of(self, request: Any) -> str | None:
        return getattr(request, "salt", "")


class Asked:
    """A policy of a store; options: of the policy."""

    def __init__(self, path: Path, **options: Any) -> None:
        boundary = Boundary(pytest.fail)
        self.root, self.store = path, store_in(Directory(path))
        self.lookups = Lookups(boundary, seconds=60)
        options = {"asynchronous": True} | options
        self.policy = Salted(Scoped(self.store), boundary, self.lookups, CHUNK, **options)

    def lookup(self, request: Request, num_computed_tokens: int = 0) -> int:
        while (found := self.policy.lookup(request, num_computed_tokens)) is None:
            self.lookups.wait(0.01)
        return found

    def step(self, request: Request, stop: int) -> list[Save]:
        """What a step saves that computes the request's tokens up to `stop`."""
        start, request.num_computed_tokens = request.num_computed_tokens, stop
        self.policy.step(request.request_id, start, stop, (), are_new=False)
        return self.policy.take_plan(is_idle=False).saves


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Any]:
    made: list[Asked] = []

    def make(**options: Any) -> Asked:
        made.append(Asked(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.lookups.shutdown()


def fill(store: PrefixStore, tokens: list[int]) -> None:
    for chunk in chunks_of(store, tokens):
        store.commit(chunk)


def test_a_request_whose_salt_changes_is_looked_up_again(asked: Any) -> None:
    """What others have stored with its new salt is found, and what it saves is found by them."""
    one, tokens = asked(), prompt(48, 1)
    fill(one.store.salted("a"), tokens)
    fill(one.store.salted("b"), tokens[:32])
    request = Request("r", tokens, 1)
    found = []
    for salt in "abca":
        request.salt = salt  # type: ignore[attr-defined]
        found.append(one.lookup(request))
    assert found == [47, 32, 0, 47]
    request.salt = "c"  # type: ignore[attr-defined]
    one.policy.allocated(request, (list(range(12)),), 0)
    (save,) = one.step(request, 48)
    assert save.scope.salt == "c"
    assert save.node == one.store.salted("c").nodes(tokens)[0]


def test_a_request_that_gets_blocks_again_is_held_again(asked: Any) -> None:
    """Others may have filled its new blocks, too: it is saved when it has one more token."""
    one, tokens = asked(others_fill=True), prompt(20, 2)
    request = Request("r", tokens, 8)
    for _ in range(2):  # the second time after a preemption
        one.policy.allocated(request, (list(range(9)),), 0)
        request.num_computed_tokens = 0
        assert one.step(request, len(request.all_token_ids)) == []
        request.all_token_ids.append(7)
    assert [(save.start, save.stop) for save in one.step(request, 22)] == [(0, 20)]


def test_blocks_of_a_failed_load_may_be_those_of_any_request(asked: Any) -> None:
    """What was saved from them is stored anew once it is computed."""
    one = asked(others_fill=True)
    request = Request("r", prompt(20, 13), 8)
    one.policy.allocated(request, (list(range(9)),), 0)
    assert one.step(request, 20) == []
    for failed in (False, True):
        request.all_token_ids.append(7)
        one.policy.reported((), (), blocks=failed)
        found = one.step(request, len(request.all_token_ids))
        assert [(save.start, save.stop) for save in found] == [(0, 20)]


def test_the_end_of_a_request_is_saved_from_the_blocks_that_it_has_then(asked: Any) -> None:
    """The engine has freed a block that a window has left: another request may have it."""
    one = asked()
    request = Request("r", prompt(40, 3), 8)
    one.policy.allocated(request, ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14],), 0)
    request.num_computed_tokens = 39
    request.all_token_ids += [7] * 9
    now = [0, 0, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert one.policy.finished(request, (now,), 48)
    (save,) = one.policy.take_plan(is_idle=False).saves
    assert (save.final, save.block_ids) == (True, (now,))


@pytest.mark.parametrize(("num_computed_tokens", "stop"), [(39, 39), (40, 40), (41, 40), (44, 40)])
def test_the_last_token_of_a_request_is_never_saved(
    num_computed_tokens: int, stop: int, asked: Any
) -> None:
    """It has no keys and values, nor have drafts that an engine counts."""
    one = asked()
    request = Request("r", prompt(33, 18), 8)
    one.policy.allocated(request, (list(range(20)),), 0)
    request.all_token_ids += [7] * 8
    assert one.policy.finished(request, (list(range(20)),), num_computed_tokens)
    (save,) = one.policy.take_plan(is_idle=False).saves
    assert (save.start, save.stop) == (0, stop)


def test_the_end_of_a_request_is_saved_with_the_keys_that_are_known(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits meanwhile: only what is new is hashed."""
    one, hashed = asked(), list[int]()
    real = token_chain.key_of

    def counted(node: str, ids: Any) -> str:
        hashed.append(len(ids))
        return real(node, ids)

    request, blocks = Request("r", prompt(100, 21), 30), (list(range(40)),)
    one.policy.allocated(request, blocks, 0)
    assert len(one.step(request, 100)) == 1
    request.all_token_ids += [7] * 20
    assert [(save.start, save.stop) for save in one.step(request, 119)] == [(96, 112)]
    with monkeypatch.context() as patch:
        patch.setattr(token_chain, "key_of", counted)
        request.all_token_ids += [7] * 2
        assert one.policy.finished(request, blocks, 121)
    (save,) = one.policy.take_plan(is_idle=False).saves
    assert (save.start, save.stop, hashed) == (112, 121, [CHUNK])
    assert save.node == one.store.nodes(request.all_token_ids)[7]


def test_the_end_of_a_request_has_the_keys_of_its_own_salt(asked: Any) -> None:
    """It was looked up with another one while its blocks were there."""
    one, tokens = asked(), prompt(40, 22)
    request, blocks = Request("r", tokens, 8), (list(range(20)),)
    for salt in "ab":
        request.salt = salt  # type: ignore[attr-defined]
        assert one.lookup(request) == 0
        if salt == "a":
            one.policy.allocated(request, blocks, 0)
    request.salt = "a"  # type: ignore[attr-defined]
    assert one.policy.finished(request, blocks, 39)
    (save,) = one.policy.take_plan(is_idle=False).saves
    assert (save.scope.salt, save.node) == ("a", one.store.salted("a").nodes(tokens)[0])


def test_files_of_a_load_that_was_not_awaited_are_looked_for_on_the_disk(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of an aborted request may have found that they have gone."""
    monkeypatch.setattr(lookups, "_OWN_SECONDS", 60)  # memory answers, however slow the machine is
    one, tokens = asked(), prompt(48, 4)
    one.store.index.fresh_seconds = 60
    fill(one.store, tokens)
    request = Request("r", tokens, 1)
    assert one.lookup(request) == 47
    one.policy.allocated(request, (list(range(12)),), 47)
    for path in one.root.rglob("*.safetensors"):
        path.unlink()
    assert one.lookup(Request("before", tokens, 1)) == 47  # as memory has it
    one.policy.ended("r")
    assert one.lookup(Request("after", tokens, 1)) == 0


def test_what_a_failed_load_has_not_brought_is_saved_when_it_is_computed(asked: Any) -> None:
    """Its files may have gone: the store lacks what the engine computes in their place."""
    one, tokens = asked(), prompt(48, 8)
    fill(one.store, tokens)
    request = Request("r", tokens, 1)
    assert one.lookup(request) == 47
    one.policy.allocated(request, (list(range(12)),), 47)
    assert len(one.policy.take_plan(is_idle=False).loads) == 1
    one.policy.reported(["r"], ["r"], blocks=False)
    request.num_computed_tokens = 0
    assert [(save.start, save.stop) for save in one.step(request, 48)] == [(0, 48)]


def test_a_lookup_computes_the_keys_of_what_it_has_not_found(asked: Any) -> None:
    """So that the steps which store these tokens need not."""
    one = asked()
    fill(one.store, prompt(16, 17))
    request = Request("r", prompt(16, 17) + prompt(1000, 18), 8)
    assert one.lookup(request) == 16
    assert one.lookups._workers.wait(60)
    *_, chain = one.policy._chains["r"]
    assert chain.num_ids == 1008  # of full chunks


def test_a_thread_computes_the_keys_of_a_prompt_that_nobody_looks_up(asked: Any) -> None:
    """A step computes some of them, and saves these tokens."""
    one = asked()
    request = Request("r", prompt(2000, 20), 8)
    one.policy.allocated(request, (list(range(500)),), 0)
    (save,) = one.step(request, 2000)
    assert (save.start, save.stop) == (0, 1024)
    assert one.lookups._workers.wait(60)
    *_, chain = one.policy._chains["r"]
    assert chain.num_ids == 2000


def test_a_request_that_grows_before_it_has_blocks_is_looked_up_again(asked: Any) -> None:
    one, tokens = asked(), prompt(48, 9)
    fill(one.store, tokens)
    request = Request("r", tokens[:20], 1)
    assert one.lookup(request) == 19
    request.all_token_ids.extend(tokens[20:])
    assert one.lookup(request) == 47


def test_a_load_that_is_given_up_names_no_blocks_that_the_engine_has_filled(asked: Any) -> None:
    one, tokens = asked(), prompt(48, 10)
    fill(one.store, tokens)
    assert one.lookup(Request("r", tokens, 1), 16) == 31
    one.policy.give_up("r", (list(range(12)),), 31)
    (load,) = one.policy.take_plan(is_idle=False).loads
    assert (load.start, load.stop) == (16, 47)


def test_an_id_that_is_used_again_is_that_of_another_request(asked: Any) -> None:
    """The first one had blocks of older weights; they have gone since."""
    one, tokens = asked(), prompt(48, 11)
    weights, epochs = one.policy.epochs.weights, one.policy.epochs
    epochs.step_computes()
    with weights.change():
        pass
    epochs.take({0: Report(weights.generation, 0, False, Unknown())})
    request = Request("r", tokens, 1)
    assert one.lookup(request, 16) == 0
    assert one.policy.scope_of(request) is None
    one.policy.ended("r")
    weights.num_resets += 1
    assert one.policy.scope_of(Request("r", tokens, 1)) is not None


def test_after_an_error_nothing_more_of_a_request_is_saved(asked: Any) -> None:
    """Its block ids may be out of date."""
    one, log = asked(), list[str]()
    one.policy.boundary = Boundary(log.append)
    request = Request("r", prompt(48, 12), 8)
    one.policy.allocated(request, (list(range(8)),), 0)
    one.policy.step("r", 0, 16, ([8], [9]), are_new=False)  # of two groups, where there is one
    assert "KVX did not save request r" in log[0]
    request.num_computed_tokens = 16
    assert one.step(request, 48) == []


def test_drafts_that_an_engine_counts_are_not_handed_over(asked: Any) -> None:
    """Nor the last token, which has no keys and values yet."""
    one = asked()
    request = Request("r", prompt(20, 5), 8)
    one.policy.allocated(request, (list(range(9)),), 0)
    for num_computed_tokens, stop in ((19, 19), (20, 19), (23, 19), (12, 12)):
        save = one.policy.handed_over("r", num_computed_tokens)
        assert (save.start, save.stop) == (0, stop)
        assert save.tokens.tolist() == request.all_token_ids[:stop]


def test_blocks_that_are_not_proven_are_not_handed_over(asked: Any) -> None:
    """Another connector may have filled them, and its load may have failed."""
    one = asked(others_fill=True)
    request = Request("r", prompt(20, 7), 8)
    one.policy.allocated(request, (list(range(9)),), 0)
    assert one.policy.handed_over("r", 20) is None
    request.all_token_ids.append(7)  # the engine has accepted a token that was computed from them
    save = one.policy.handed_over("r", 20)
    assert (save.start, save.stop) == (0, 20)


@pytest.mark.parametrize(("num_tokens", "saved"), [(15, [(0, 16)]), (16, []), (17, [(16, 17)])])
def test_a_chunk_whose_first_token_has_left_the_window(
    num_tokens: int, saved: list[tuple[int, int]], asked: Any
) -> None:
    """The next token sees the last 15 before it: the engine may have freed the block of others."""
    one = asked(others_fill=True, window=16)
    request = Request("r", prompt(num_tokens, 6), 8)
    one.policy.allocated(request, (list(range(9)),), 0)
    assert one.step(request, num_tokens) == []  # not before the engine accepts a token
    request.all_token_ids.append(7)
    found = one.step(request, num_tokens + 1)
    assert [(save.start, save.stop) for save in found] == saved


@pytest.mark.parametrize(
    ("saved", "num_computed_tokens", "stop"),
    [(0, 16, 16), (0, 17, None), (16, 32, 32), (16, 33, None)],
)
def test_what_a_window_has_left_is_not_handed_over(
    saved: int, num_computed_tokens: int, stop: int | None, asked: Any
) -> None:
    """The next token sees the last 16 before it: the engine may have freed the blocks of others."""
    one = asked(window=17)
    request = Request("r", prompt(60, 14), 8)
    one.policy.allocated(request, (list(range(20)),), 0)
    if saved:
        assert [(save.start, save.stop) for save in one.step(request, 16)] == [(0, 16)]
    save = one.policy.handed_over("r", num_computed_tokens)
    assert (save if save is None else (save.start, save.stop)) == (stop and (saved, stop))


@pytest.mark.parametrize(("num_computed_tokens", "span"), [(32, (16, 32)), (33, None)])
def test_a_chunk_that_is_stored_in_part_is_handed_over_whole(
    num_computed_tokens: int, span: tuple[int, int] | None, asked: Any
) -> None:
    """So the window must reach its first token, and not just the first that is not stored."""
    one = asked(window=17)
    request = Request("r", prompt(20, 16), 8)
    one.policy.allocated(request, (list(range(20)),), 0)
    assert [(save.start, save.stop) for save in one.step(request, 20)] == [(0, 20)]
    request.all_token_ids += [7] * 20
    save = one.policy.handed_over("r", num_computed_tokens)
    assert (save if save is None else (save.start, save.stop)) == span


def test_what_follows_a_gap_is_not_handed_over(asked: Any) -> None:
    """Nobody would find it."""
    one = asked(window=17)
    request = Request("r", prompt(60, 15), 8)
    one.policy.allocated(request, (list(range(20)),), 0)
    assert [(save.start, save.stop) for save in one.step(request, 16)] == [(0, 16)]
    request.num_computed_tokens = 34  # as after steps that have saved nothing
    assert one.step(request, 40) == []
    assert one.policy.handed_over("r", 40) is None


def changed(one: Asked) -> None:
    """New weights, which all ranks have reported."""
    weights = one.policy.epochs.weights
    with weights.change():
        pass
    seen = weights.generation
    one.policy.epochs.take({0: Report(seen, seen, False, Unknown())})


@pytest.mark.parametrize("num_computed_tokens", [0, 16])
def test_weights_change_between_a_lookup_and_its_blocks(
    num_computed_tokens: int, asked: Any
) -> None:
    """The load fails where the engine's own tokens end. If the old weights have computed those,
    nothing of the request is stored, though it gets to know its blocks a second time.
    """
    one, tokens = asked(), prompt(48, 16)
    fill(one.store, tokens)
    one.policy.epochs.step_computes()
    request = Request("r", tokens, 1)
    count = one.lookup(request, num_computed_tokens)
    changed(one)
    for external in (count, 0):  # the second time after the load
        one.policy.allocated(request, (list(range(12)),), external)
    (load,) = one.policy.take_plan(is_idle=False).loads
    assert (load.start, load.stop, load.match.spans) == (num_computed_tokens, 47, ())
    request.num_computed_tokens = num_computed_tokens
    saves = one.step(request, 48)
    assert [(save.start, save.stop) for save in saves] == [(0, 48)] * (num_computed_tokens == 0)


def test_weights_that_come_back_are_looked_up_anew(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits while weights go and come back: others may have stored more meanwhile."""
    one, tokens = asked(), prompt(48, 18)
    one.store.index.fresh_seconds = 0
    fill(one.store, tokens[:16])
    request = Request("r", tokens, 1)
    assert one.lookup(request) == 16
    fill(one.store, tokens)
    first = one.policy.epochs.current()
    for epoch in (Epoch("random:0", Stamp(1, 1)), Epoch(first.name, Stamp(2, 2))):
        monkeypatch.setattr(Epochs, "current", lambda _, epoch=epoch: epoch)
        one.policy.look_at_weights()
    assert one.lookup(request) == 47


def test_a_request_that_begins_anew_has_no_older_blocks(asked: Any) -> None:
    """It was asked for when the engine still had some, and had to wait."""
    one, tokens = asked(), prompt(48, 17)
    one.policy.epochs.step_computes()
    changed(one)
    request = Request("r", tokens, 1)
    assert one.lookup(request, 16) == 0
    one.policy.epochs.weights.num_resets += 1
    assert one.lookup(request, 0) == 0
    one.policy.allocated(request, (list(range(12)),), 0)
    assert [(save.start, save.stop) for save in one.step(request, 48)] == [(0, 48)]


@pytest.mark.parametrize("has", ["nothing", "a save", "a load"])
@pytest.mark.parametrize("is_idle", [False, True])
def test_only_steps_with_nothing_to_do_wait_for_lookups(
    is_idle: bool, has: str, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, waits = asked(), list[float]()
    monkeypatch.setattr(one.lookups, "wait", waits.append)
    request = Request("r", prompt(16, 19), 1)
    if has == "a load":
        one.policy.give_up("r", ([0, 1, 2, 3],), 15)
    if has == "a save":
        one.policy.allocated(request, ([0, 1, 2, 3],), 0)
        one.policy.step("r", 0, 16, (), are_new=False)
    one.policy.take_plan(is_idle=is_idle)
    assert len(waits) == (is_idle and has == "nothing")
