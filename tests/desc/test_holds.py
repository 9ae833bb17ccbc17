"""CacheView.holds: what an engine counts is asked before each use, and more is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Layout,
    OutOfRangeError,
    Plan,
    describe,
    migrate,
    verify,
)
from kvx_core.ops.end_ranges import end_ranges
from kvx_core.ops.live import LiveMigration
from kvx_core.snapshot import Section, Snapshot

HEADS, ROOM, DIM, BATCH = 3, 12, 5, 3
FACTS = CacheFacts(engine="here 1.0", fingerprint="abc", first_kv_head=0)


def a_cache(start: int, holds: Any = None, *, dense: bool = True) -> tuple[torch.Tensor, CacheView]:
    """K and V of a layer with `ROOM` tokens per block, all of other values than other starts'."""
    shape = (2, BATCH, HEADS, ROOM, DIM)
    memory = torch.arange(start, start + np.prod(shape), dtype=torch.float32).view(shape)
    layer = CacheDesc.from_kv(*(describe(half, Layout.BLOCK_HND) for half in memory))
    return memory, CacheView((layer,), FACTS, dense=dense, holds=holds)


def says(end: str, held: str, sequence: int, last: int) -> str:
    return (
        f"{end} holds {held} of sequence {sequence} by its engine's own count, expected at least "
        f"{last}, as starts and seq_lens say. A token that was sampled last is not in a cache "
        "before the next forward pass; a destination is made to hold the tokens first (the "
        "adapter's reserve)"
    )


@pytest.mark.parametrize("counted", ["src", "dst"])
@pytest.mark.parametrize(
    "call", ["migrate", "plan", "plan_later", "ranges", "verify", "end_ranges"]
)
def test_more_than_an_end_holds_is_refused(call: str, counted: str) -> None:
    """Nothing is written; as many as it holds move, once the engine has gone on as well."""
    counts = [7, 12, 7]
    holds = lambda: counts  # noqa: E731
    source, src = a_cache(0, holds if counted == "src" else None)
    target, dst = a_cache(10_000, holds if counted == "dst" else None)
    before = target.clone()

    def run(lens: list[int]) -> Any:
        if call == "migrate":
            return migrate(src, dst, lens)
        if call == "plan":
            return Plan.migrate(src, dst, lens).run()
        if call == "plan_later":
            return Plan.migrate(src, dst).run(lens)
        if call == "ranges":
            return Plan.migrate(src, dst).ranges(lens)
        if call == "verify":
            return verify(src, dst, lens)
        return end_ranges(src if counted == "src" else dst, lens)

    for lens, row in ([8, 8, 7], 0), ([7, 12, 8], 2):
        with pytest.raises(OutOfRangeError) as raised:
            run(lens)
        assert str(raised.value).endswith(
            says("src" if call == "end_ranges" else counted, "7 tokens", row, 8)
        )
        assert torch.equal(target, before)
    run([7, 12, 7])
    counts[2] = 8
    run([7, 12, 8])
    if call.startswith("plan") or call == "migrate":
        wanted = before.clone()
        for row, count in enumerate([7, 12, 8]):
            wanted[:, row, :, :count] = source[:, row, :, :count]
        assert torch.equal(target, wanted)


def spans(view: CacheView, kind: str) -> CacheSpan:
    """Tokens 5 to 7 of row 2: 3 tokens."""
    if kind == "starts":
        return view.at(starts=[0, 0, 5], first_positions=-4)
    if kind == "table":
        return view.at(block_table=[[2]], starts=[5], first_positions=-4)
    return view.at(slots=[2 * ROOM + token for token in (5, 6, 7)])


@pytest.mark.parametrize("kind", ["starts", "table", "slots"])
def test_a_lookup_is_counted_from_the_beginning_of_its_row(kind: str) -> None:
    counts = [12, 12, 7]
    source, src = a_cache(0, lambda: counts)
    target, dst = a_cache(10_000)
    lens = [0, 0, 3] if kind == "starts" else [3]
    there = dst.at(starts=[0, 0, 1]) if kind == "starts" else dst.at(block_table=[[2]], starts=[1])
    with pytest.raises(OutOfRangeError) as raised:
        migrate(spans(src, kind), there, lens)
    assert str(raised.value) == says("src", "7 tokens", 2, 8)
    counts[:] = [0, 0, 8]
    wanted = target.clone()
    wanted[:, 2, :, 1:4] = source[:, 2, :, 5:8]
    migrate(spans(src, kind), there, lens)
    assert torch.equal(target, wanted)


def test_a_sequence_of_which_nothing_moves_may_start_anywhere() -> None:
    source, src = a_cache(0, lambda: [7, 7, 7])
    target, dst = a_cache(10_000)
    migrate(src.at(starts=[9, 0, 6]), dst.at(starts=[9, 0, 6]), [0, 1, 1])
    assert torch.equal(target[:, 2, :, 6], source[:, 2, :, 6])


def test_lookups_of_a_run_are_counted() -> None:
    """Not those with which the plan was made."""
    source, src = a_cache(0, lambda: [7, 12, 7])
    target, dst = a_cache(10_000)
    plan = Plan.migrate(src.at(block_table=[[1]]), dst.at(block_table=[[0]]), [0])
    plan.run([12])
    with pytest.raises(OutOfRangeError, match=r"src holds 7 tokens of sequence 2 .* at least 12"):
        plan.run([12], src_block_table=[[2]])
    with pytest.raises(OutOfRangeError, match=r"src holds 7 tokens of sequence 2 .* at least 8"):
        plan.run([4], src_block_table=[[2]], src_starts=[4])
    assert torch.equal(target[:, 0], source[:, 1])


def test_a_wrong_table_is_named_by_its_end() -> None:
    _, src = a_cache(0)
    _, dst = a_cache(10_000, lambda: 7)
    with pytest.raises(OutOfRangeError, match=r"^dst.block_table.indices\[0\] is 3, expected"):
        migrate(src.at(block_table=[[0]]), dst.at(block_table=[[3]]), [1])


def test_a_paged_view_counts_per_sequence() -> None:
    """Its table may have several blocks per sequence."""
    _, src = a_cache(0, lambda: [20, 3], dense=False)
    target, dst = a_cache(10_000, dense=False)
    before = target.clone()
    table = [[0, 2], [1, -1]]
    with pytest.raises(OutOfRangeError) as raised:
        migrate(src.at(block_table=table), dst.at(block_table=table), [21, 3])
    assert str(raised.value) == says("src", "20 tokens", 0, 21)
    with pytest.raises(OutOfRangeError) as raised:
        migrate(src.at(slots=range(4)), dst.at(slots=range(4)), [0, 4])
    assert str(raised.value) == says("src", "3 tokens", 1, 4)
    assert torch.equal(target, before)
    migrate(src.at(block_table=table), dst.at(block_table=table), [20, 3])


def test_snapshots_take_and_give_what_is_held() -> None:
    held = 7
    source, view = a_cache(0, lambda: held)
    section = Section((0,), view, None)
    with pytest.raises(OutOfRangeError, match=r"^section.view holds 7 tokens .* at least 8"):
        Snapshot.capture(range(8), [section])
    snapshot = Snapshot.capture(range(7), [section])
    assert snapshot is not None
    reserved = Snapshot.reserve(range(7), [section])
    assert reserved is not None
    held = 6  # the engine drops a token between the two
    with pytest.raises(OutOfRangeError, match=r"src holds 6 tokens .* at least 7"):
        reserved.fill(section)
    source.zero_()
    with pytest.raises(OutOfRangeError, match=r"dst holds 6 tokens .* at least 7"):
        snapshot.restore(section, 0, 7)
    assert not source.any()
    snapshot.restore(section, 0, 6)
    assert source[:, 0, :, :6].all(dim=-1).flatten()[1:].all()
    assert not source[:, 0, :, 6:].any()


def test_a_live_migration_asks_each_time() -> None:
    held = 7
    source, src = a_cache(0, lambda: held)
    target, dst = a_cache(10_000)
    live = LiveMigration(dst.at(block_table=[[1]]), block_tokens=ROOM)
    with pytest.raises(OutOfRangeError, match=r"src holds 7 tokens of sequence 0 .* at least 8"):
        live.copy(src.at(block_table=[[0]]), 8)
    held = 9
    live.finish(src.at(block_table=[[0]]), 9)
    assert torch.equal(target[:, 1, :, :9], source[:, 0, :, :9])


def test_what_is_no_count() -> None:
    _, src = a_cache(0, lambda: [7, 7])
    _, dst = a_cache(10_000)
    with pytest.raises(InvalidArgumentError) as raised:
        migrate(src, dst, [1, 1, 1])
    assert str(raised.value) == (
        "src.view.holds() gives 2 numbers, expected 1 or at least 3, one per sequence"
    )
    with pytest.raises(InvalidArgumentError, match="holds is 7, expected a function or None"):
        a_cache(0, 7)


@pytest.mark.parametrize("count", ["32", None, 8.0, True, [[8]], ["8"]])
def test_what_is_no_count_is_refused(count: Any) -> None:
    _, src = a_cache(0, lambda: count)
    target, dst = a_cache(10_000)
    before = target.clone()
    with pytest.raises(InvalidArgumentError, match=r"^src\.view\.holds\(\) is .*expected an int"):
        migrate(src, dst, [1, 1, 1])
    assert torch.equal(target, before)
