"""Saves over steps: none copies much more than it computes, and nothing is lost or saved twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvx_core import InvalidArgumentError
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import Save
from kvx_core.connector.policy import Policy
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.spread import SaveBudget
from tests.connector.serving import Serve, alone, prompt, store_in, written
from tests.connector.test_lookups import Frozen
from tests.connector.toy_engine import Request

CHUNK = 16


class Planned:
    """A policy whose requests are computed; what it plans to save of each."""

    def __init__(self, path: Path, *, window: int = 0) -> None:
        boundary = Boundary(pytest.fail)
        self.store = store_in(Frozen(path))
        self.policy = Policy(
            Scoped(self.store),
            boundary,
            Lookups(boundary),
            CHUNK,
            asynchronous=True,
            window=window,
            spread=SaveBudget(CHUNK),
        )
        self.requests: dict[str, Request] = {}
        self.saves: dict[str, list[Save]] = {}

    def add(self, name: str, num_tokens: int) -> None:
        request = Request(name, prompt(num_tokens, len(self.requests)), 1)
        request.block_ids = list(range(100))
        self.requests[name], self.saves[name] = request, []
        self.policy.allocated(request, (request.block_ids,), 0)

    def step(self, **computed: int) -> list[int]:
        """Computes tokens of requests; how many each save of the step has."""
        for name, count in computed.items():
            request = self.requests[name]
            start, stop = request.num_computed_tokens, request.num_computed_tokens + count
            if stop > len(request.all_token_ids):
                request.all_token_ids.append(7)
            self.policy.step(name, start, stop, (), are_new=False)
            request.num_computed_tokens = stop
        saves = self.policy.take_plan(is_idle=not computed).saves
        for save in saves:
            self.saves[str(save.request_id)].append(save)
        return [len(save.tokens) for save in saves]

    def go_on(self, num_tokens: int, *names: str) -> None:
        """Requests have so many tokens, all but the last computed by steps that saved nothing."""
        for name in names:
            request = self.requests[name]
            request.all_token_ids += [7] * (num_tokens - len(request.all_token_ids))
            request.num_computed_tokens = num_tokens - 1

    def finish(self, name: str) -> bool:
        request = self.requests[name]
        return self.policy.finished(request, (request.block_ids,), request.num_computed_tokens)

    def check(self, name: str, num_tokens: int) -> None:
        """Its saves have all of its tokens once, chunk by chunk, under the right keys."""
        ids = self.requests[name].all_token_ids
        chain, end = self.store.chain_of(ids), 0
        for save in self.saves[name]:
            assert save.start == end // CHUNK * CHUNK
            assert save.node == chain.node(save.start // CHUNK)
            assert save.tokens.tolist() == ids[save.start : save.stop]
            end = save.stop
        assert end == num_tokens


def test_sequences_that_complete_a_chunk_together_are_saved_one_by_one(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    for name in "abcd":
        planned.add(name, 15)
    assert planned.step(a=15, b=15, c=15, d=15) == [15, 15, 15, 15]  # as many as it computes
    assert [planned.step(a=1, b=1, c=1, d=1) for _ in range(5)] == [[16], [16], [16], [16], []]
    for name in "abcd":
        planned.check(name, 16)


def test_a_step_saves_as_many_tokens_as_it_computes(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    planned.add("long", 100)
    planned.add("short", 16)
    assert planned.step(long=64) == [64]
    assert planned.step(long=36, short=16) == [36, 16]
    planned.check("long", 100)
    planned.check("short", 16)


def test_what_is_less_than_a_chunk_is_left_for_the_next_step(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    planned.add("a", 90)
    assert [planned.step(a=n) for n in (24, 24, 24, 18)] == [[16], [32], [16], [26]]
    planned.check("a", 90)
    planned.add("b", 4)
    planned.add("c", 4)
    planned.step(b=4, c=4)
    assert [planned.step(b=1, c=1) for _ in range(12)] == [[]] * 11 + [[16]]
    assert planned.step(b=1, c=1) == [16]  # many decode steps leave no more than that


def test_a_step_that_computes_little_saves_one_chunk_of_many(tmp_path: Path) -> None:
    """Tokens that were not saved when they were computed, as their keys were not known."""
    planned = Planned(tmp_path)
    planned.add("a", 64)
    planned.requests["a"].num_computed_tokens = 63
    assert [planned.step(a=1) for _ in range(5)] == [[16], [16], [16], [16], []]
    planned.check("a", 64)


def test_the_last_tokens_of_requests_wait_while_others_compute(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    for name in "abc":
        planned.add(name, 8)
    planned.step(a=8, b=8, c=8)
    planned.go_on(40, "a", "b")
    assert planned.finish("a")
    assert planned.finish("b")
    assert [planned.step(c=1) for _ in range(6)] == [[16], [16], [7], [16], [16], [7]]
    assert [save.final for save in planned.saves["a"][1:]] == [False, False, True]
    planned.check("a", 39)
    planned.check("b", 39)


def test_a_step_without_work_saves_all_that_waits(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    for name in "ab":
        planned.add(name, 8)
    planned.step(a=8, b=8)
    planned.go_on(40, "a", "b")
    assert planned.finish("a")
    assert planned.finish("b")
    assert planned.step() == [16, 23, 39]
    assert [save.final for save in planned.saves["a"][1:]] == [False, True]
    planned.check("a", 39)
    planned.check("b", 39)
    assert planned.step() == []


def test_blocks_that_a_window_leaves_do_not_wait(tmp_path: Path) -> None:
    planned = Planned(tmp_path, window=16)
    for name in "ab":
        planned.add(name, 16)
    planned.step(a=15, b=15)
    assert planned.step(a=1, b=1) == [16, 16]


def test_nothing_waits_of_a_request_whose_keys_are_not_known(tmp_path: Path) -> None:
    """Its blocks are free at once, so nothing may be saved later."""
    planned = Planned(tmp_path)
    planned.add("a", 8)
    planned.add("b", 8)
    planned.step(a=8, b=8)
    request = planned.requests["a"]
    request.all_token_ids[3] = "x"  # type: ignore[call-overload]
    request.all_token_ids += [1] * 30
    planned.policy._chains.clear()
    request.num_computed_tokens = 38
    with pytest.raises(InvalidArgumentError, match="tokens"):
        planned.finish("a")
    assert planned.step() == []


def test_an_engine_that_saves_over_steps_stores_all(serve: Serve) -> None:
    """Five requests that begin and end together; another engine loads all of each."""
    prompts = [prompt(20, seed) for seed in range(5)]
    engine = serve()
    requests = [engine.add(tokens, 33) for tokens in prompts]
    engine.finish_all()
    written(engine)
    assert sorted(engine.free) == list(range(1, 200))
    other = serve()
    for request, tokens in zip(requests, prompts, strict=True):
        assert request.answer == alone(tokens, 33)
        again = other.ask([*request.all_token_ids, 5], 1)
        assert again.num_computed_here == 2  # the last token of the answer, and the new one


def test_steps_that_have_saved_nothing_do_not_add_up() -> None:
    """Less than a chunk is left of what they computed, not the work of many saves at once."""
    spread = SaveBudget(CHUNK)
    for _ in range(3):
        spread.computes(100)  # of prompts that may not be saved
        assert spread.next_step() == []
    assert spread.cut(0, 100) == CHUNK
    spread.saves(CHUNK)
    assert spread.cut(CHUNK, 100) == CHUNK
    spread.computes(CHUNK + 1)  # with the 15 that are left, two chunks
    assert spread.cut(CHUNK, 100) == 2 * CHUNK
