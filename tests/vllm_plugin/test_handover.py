"""A running conversation moves from one vLLM to another, in another process, with other blocks.

hand_over is called as docs/live_migration.md shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm_pair import BLOCK_A, BLOCK_B, Pair, pair, start
from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

NUM_NEW = 48
AFTER = 8
# Prompts and tokens said before the move: its end in the first block, at the end of a block, behind
# one, after a block that was filled by the answer, and after several of the second engine's.
MOVES = ((5, 1), (32, 1), (33, 1), (60, 5), (60, 6), (40, 40), (128, 2), (200, 30))


@pytest.fixture(scope="module")
def engines_of_two(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(llama, tmp_path_factory.mktemp("log")) as found:
        yield found


@pytest.fixture
def two(engines_of_two: Pair) -> Pair:
    """Both engines, without what vLLM itself has cached."""
    engines_of_two.a.call("forget_all")
    engines_of_two.b.call("forget_all")
    return engines_of_two


def ids_of(num_tokens: int, seed: int) -> list[int]:
    return prompt(num_tokens, seed=300 + seed)


def alone(stock: Stock, llama: Path, ids: list[int]) -> list[int]:
    """What one vLLM without KVX says."""
    return stock(llama, [ids], NUM_NEW)[0]


def test_no_token_is_lost_doubled_or_changed(two: Pair, llama: Path, stock: Stock) -> None:
    prompts = [ids_of(num_tokens, seed) for seed, (num_tokens, _) in enumerate(MOVES)]
    wanted = stock(llama, prompts, NUM_NEW)
    for ids, want, (num_tokens, before) in zip(prompts, wanted, MOVES, strict=True):
        moved = two.converse(ids, before, AFTER)
        assert moved.said == want[: before + AFTER]
        assert moved.is_stored
        assert moved.known == num_tokens + before - 1  # all but the token that was said last
        assert moved.warmed == moved.known // BLOCK_B * BLOCK_B


def test_without_copies_meanwhile_the_pause_loads_all(two: Pair, llama: Path, stock: Stock) -> None:
    ids = ids_of(90, 20)
    moved = two.converse(ids, 20, AFTER, warms=False)
    assert moved.said == alone(stock, llama, ids)[: 20 + AFTER]
    assert moved.known == 90 + 20 - 1


def test_zeros_say_something_else(two: Pair, llama: Path, stock: Stock) -> None:
    ids = ids_of(90, 21)
    two.b.call("zero_loads", on=True)
    try:
        said = two.converse(ids, 20, AFTER).said
    finally:
        two.b.call("zero_loads", on=False)
    want = alone(stock, llama, ids)
    assert said[:20] == want[:20]
    assert said != want[: 20 + AFTER]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_computed_again(
    damage: str, two: Pair, llama: Path, stock: Stock
) -> None:
    """The last file to be written is what `hand_over` has stored."""
    ids = ids_of(90, 22 + len(damage))
    spoiled: dict[Path, bytes] = {}

    def spoil() -> None:
        last = max(two.store.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        content = bytearray(last.read_bytes())
        content[-100] ^= 1
        if damage == "gone":
            return last.unlink()
        spoiled[last] = bytes(content if damage == "flipped" else content[:-8])
        last.write_bytes(spoiled[last])

    moved = two.converse(ids, 20, AFTER, between=spoil)
    assert moved.said == alone(stock, llama, ids)[: 20 + AFTER]
    if damage != "flipped":  # a lookup sees no flipped bit, so vLLM counts what it then computes
        assert moved.known <= (90 + 20 - 1) // BLOCK_A * BLOCK_A
    for path, content in spoiled.items():
        assert not path.exists() or path.read_bytes() != content  # it was found and deleted


def test_what_cannot_be_stored_is_computed_again(two: Pair, llama: Path, stock: Stock) -> None:
    ids = ids_of(90, 30)
    two.a.call("refuse_writes", on=True)
    try:
        moved = two.converse(ids, 20, AFTER)
    finally:
        two.a.call("refuse_writes", on=False)
    assert moved.said == alone(stock, llama, ids)[: 20 + AFTER]
    assert not moved.is_stored


def test_refusals_leave_the_request_running(two: Pair, llama: Path, stock: Stock) -> None:
    ids = ids_of(40, 31)
    said, _ = two.start(ids, 3)
    assert two.a.call("refused", request_id="7") == (
        "request_id is '7', which is not an unfinished request. Pass the id that add_request "
        "returned, before the request finishes"
    )
    assert two.a.call("refused", request_id="7", connected=False) == (
        "the engine's connector is NoneType, expected KVXConnector. Start it with "
        "kv_connector='KVXConnector' in its kv_transfer_config"
    )
    while len(said) < 10:
        said += two.a.call("step")["tokens"]
    assert said == alone(stock, llama, ids)[:10]
    two.a.call("hand_over")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_that_has_only_begun(steps: int, two: Pair, llama: Path, stock: Stock) -> None:
    """Its prompt is in the store: before the first step nobody has looked, after it blocks are
    being loaded, and what they hold is not stored.
    """
    ids = ids_of(200, 50 + steps)
    want = alone(stock, llama, ids)
    two.start(ids, 1)
    two.a.call("hand_over")
    two.a.call("begin", ids=ids)
    said = [token for _ in range(steps) for token in two.a.call("step")["tokens"]]
    over = two.a.call("hand_over")
    assert over["tokens"] == ids + said
    two.b.call("forget_all")
    assert (
        said + two.b.call("go_on", ids=over["tokens"], count=AFTER)["tokens"]
        == (want[: len(said) + AFTER])
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["before", "after"])
def test_the_first_engine_is_killed(stage: str, two: Pair, llama: Path, stock: Stock) -> None:
    """Before or after it has handed over: the second one goes on with what was said."""
    ids = ids_of(90, 32 + len(stage))
    said, _ = two.start(ids, 20)
    if stage == "after":
        two.a.call("hand_over")
    two.a.kill()
    found = two.b.call("go_on", ids=ids + said, count=AFTER)
    start(two.a, llama, two.store, BLOCK_A)
    assert said + found["tokens"] == alone(stock, llama, ids)[: 20 + AFTER]
    if stage == "after":
        assert found["known"] == 90 + 20 - 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["before", "after"])
def test_the_second_engine_is_killed(stage: str, two: Pair, llama: Path, stock: Stock) -> None:
    """Before the conversation is handed over the first one just goes on; after it, the first one
    takes it back, and so can a second engine that starts again.
    """
    ids = ids_of(90, 40 + len(stage))
    want = alone(stock, llama, ids)[: 20 + AFTER]
    said, _ = two.start(ids, 20)
    if stage == "before":
        two.b.kill()
        while len(said) < 20 + AFTER:
            said += two.a.call("step")["tokens"]
        start(two.b, llama, two.store, BLOCK_B)
        assert said == want
        two.a.call("hand_over")
        return
    two.a.call("hand_over")
    two.b.kill()
    back = two.a.call("go_on", ids=ids + said, count=AFTER)
    start(two.b, llama, two.store, BLOCK_B)
    again = two.b.call("go_on", ids=ids + said, count=AFTER)
    assert said + back["tokens"] == said + again["tokens"] == want
    assert again["known"] >= (90 + 20 - 1) // BLOCK_A * BLOCK_A
