"""Where states of a request are stored: a policy's plans, and what Saver makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvx_core.connector.state_positions import StatePositions
from tests.connector.serving import prompt
from tests.connector.test_policy import asked
from tests.connector.toy_engine import Request

assert asked  # the fixture


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (None, [(0, 50)]),
        (None, [(32, 50)]),
        (100, [(0, 50), (50, 100), (99, 100), (50, 199), (150, 230)]),
        (1, [(0, 50), (50, 51), (51, 52)]),
    ],
)
def test_steps_whose_states_are_stored(every: int | None, steps: list[tuple[int, int]]) -> None:
    positions = StatePositions(every)
    assert all(positions.takes(start, stop, 50) for start, stop in steps)


@pytest.mark.parametrize(
    ("every", "steps"),
    [(None, [(0, 32), (50, 51), (50, 64)]), (100, [(0, 49), (51, 99), (100, 101), (100, 199)])],
)
def test_steps_whose_states_are_not_stored(every: int | None, steps: list[tuple[int, int]]) -> None:
    positions = StatePositions(every)
    assert not any(positions.takes(start, stop, 50) for start, stop in steps)


def running(asked: Any, count: int, **options: Any) -> tuple[Any, Request]:
    one = asked(states=StatePositions(**options))
    request = Request("r", prompt(count, 1), 1)
    assert one.lookup(request) == 0
    one.policy.allocated(request, ([1, 2], [3]), 0)
    return one, request


def saved(one: Any, request: Request, stop: int) -> list[tuple[int, int, bool]]:
    return [(save.start, save.stop, save.has_states) for save in one.step(request, stop)]


def test_a_prompts_end_is_saved_with_its_states(asked: Any) -> None:
    """Where the next step would change them; the chunks before and behind are saved without."""
    one, request = running(asked, 50)
    assert saved(one, request, 32) == [(0, 32, False)]
    assert saved(one, request, 50) == [(32, 50, True)]
    for stop in range(51, 65):
        request.all_token_ids.append(7)
        assert saved(one, request, stop) == ([(48, 64, False)] if stop == 64 else [])


def test_a_long_prompt_is_not_left_for_later_steps(asked: Any) -> None:
    """Though nobody has computed its keys."""
    one = asked(states=StatePositions(), consumes=False)
    request = Request("r", prompt(3000, 1), 1)
    one.policy.allocated(request, ([1],), 0)
    assert saved(one, request, 3000) == [(0, 3000, True)]


def test_states_every_so_many_tokens(asked: Any) -> None:
    one, request = running(asked, 50, every=20)
    assert saved(one, request, 22) == [(0, 22, True)]
    assert saved(one, request, 39) == [(16, 32, False)]
    assert saved(one, request, 50) == [(32, 50, True)]
    request.all_token_ids += [7] * 10
    assert saved(one, request, 60) == [(48, 60, True)]


def test_an_answer_that_is_not_saved_has_no_states(asked: Any) -> None:
    """Nor are its states saved as those of the prompt."""
    one = asked(states=StatePositions(1), save_generated=False)
    request = Request("r", prompt(50, 1), 1)
    one.policy.allocated(request, ([1, 2], [3]), 0)
    request.all_token_ids += [7] * 20
    assert saved(one, request, 52) == [(0, 50, False)]
    assert saved(one, request, 53) == []
    assert not one.policy.finished(request, ([1, 2], [3]), 69)


def test_a_short_rest_of_an_answer_is_saved_for_its_states(asked: Any) -> None:
    """Its tokens are fewer than one loads at a time, but without them the whole answer is lost."""
    one, request = running(asked, 50)
    saved(one, request, 50)
    request.all_token_ids += [7] * 17
    for stop in range(51, 67):
        one.step(request, stop)
    assert one.policy.finished(request, ([1, 2], [3]), 66)
    (save,) = one.policy.take_plan(is_idle=False).saves
    assert (save.start, save.stop, save.has_states) == (64, 66, True)


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_end_of_an_answer(beyond: int, asked: Any) -> None:
    """An engine that plans ahead may have computed a token more: then the states are another's."""
    one, request = running(asked, 50)
    saved(one, request, 50)
    request.all_token_ids += [7] * 11
    for stop in range(51, 61 + beyond):
        one.step(request, stop)
    assert one.policy.finished(request, ([1, 2], [3]), 60 + beyond)
    (save,) = one.policy.take_plan(is_idle=False).saves
    assert (save.stop, save.has_states, save.final) == (60, not beyond, True)


@pytest.mark.parametrize("stop", [16, 24, 32])
def test_states_that_an_engine_keeps_apart(stop: int, asked: Any) -> None:
    """In blocks of their own. A save that ends there gets them; else there is one more."""
    one, _ = running(asked, 50)
    one.policy.step("r", 0, 32, (), are_new=False)
    one.policy.save_states("r", stop, ([1, 2], [9]))
    saves = one.policy.take_plan(is_idle=False).saves
    found = [(save.start, save.stop, save.has_states, save.block_ids) for save in saves]
    own = (0 if stop == 32 else 16 * (stop > 16), stop, True, ([1, 2], [9]))
    others = [] if stop == 32 else [(0, 32, False, ([1, 2], [3]))]
    assert found == [*others, own]


@pytest.mark.parametrize(("request_id", "stop"), [("r", 33), ("another", 16)])
def test_states_of_tokens_that_no_step_computes(request_id: str, stop: int, asked: Any) -> None:
    one, _ = running(asked, 50)
    one.policy.step("r", 0, 32, (), are_new=False)
    one.policy.save_states(request_id, stop, ([1, 2], [9]))
    (save,) = one.policy.take_plan(is_idle=False).saves
    assert (save.stop, save.has_states) == (32, False)


def test_a_request_whose_tokens_are_taken_back(asked: Any) -> None:
    """As a session's are behind a stop token that was computed: its states are after that token,
    and after all that follow. Once it has no blocks it is as any other.
    """
    one, request = running(asked, 50)
    saved(one, request, 50)
    request.all_token_ids += [7] * 3
    assert saved(one, request, 53) == []
    request.num_computed_tokens = 52
    request.all_token_ids[52:] = prompt(28, 2)
    request.num_prompt_tokens = 80
    assert saved(one, request, 80) == []
    assert not one.policy.finished(request, ([1, 2], [3]), 79)
    again = Request("r", request.all_token_ids, 1)
    one.lookup(again)
    one.policy.allocated(again, ([1, 2], [3]), 0)
    assert saved(one, again, 80)[-1][1:] == (80, True)


def test_a_request_that_has_lost_its_blocks(asked: Any) -> None:
    """Its tokens are computed anew, and its states with them."""
    one, request = running(asked, 50)
    one.step(request, 32)
    request.num_computed_tokens = 0
    one.lookup(request)
    one.policy.allocated(request, ([1, 2], [3]), 0)
    assert saved(one, request, 50) == [(32, 50, True)]
