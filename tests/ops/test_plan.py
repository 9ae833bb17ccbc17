"""Plan: kvx_plan.h from Python. Spec: E.13"""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

import kvx_core
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    OutOfRangeError,
    Plan,
    SlotMapping,
    UnsupportedError,
    describe,
    migrate,
)
from kvx_core.ops.plan_info import RANGE
from kvx_core.types import Layout
from tests.ops.planned import assert_equal, expect, two_caches

SEEDS = (1, 2, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["torch", "numpy", "list", "described"])
def test_runs_with_other_tables(seed: int, kind: str) -> None:
    src, dst, src_view, dst_view = two_caches(seed)
    generator = torch.Generator().manual_seed(seed)
    none = torch.zeros(0, 1, dtype=torch.int32)
    with Plan.migrate(src_view.at(none), dst_view.at(none), same_model=True) as plan:
        for number in range(4):
            lengths = torch.randint(0, 12, (1 + number % 2,), generator=generator)
            tables = [
                torch.randperm(count, generator=generator)[: columns * len(lengths)].view(
                    len(lengths), columns
                )
                for count, columns in ((9, 3), (7, 2))
            ]
            expected = expect(src, dst, *(t.tolist() for t in tables), lengths.tolist())
            given = {
                "torch": (lengths, *tables),
                "numpy": (lengths.numpy(), *(t.numpy() for t in tables)),
                "list": (lengths.tolist(), *(t.tolist() for t in tables)),
                "described": (lengths, *map(BlockTable.of, tables)),
            }[kind]
            plan.run(given[0], src_block_table=given[1], dst_block_table=given[2])
            assert_equal(dst, expected)


def test_runs_as_it_was_made() -> None:
    src, dst, src_view, dst_view = two_caches(1)
    lengths = torch.tensor([5, 9])
    src_table, dst_table = [[3, 1, -1], [0, 8, 2]], [[6, -1], [4, 5]]
    plan = Plan.migrate(src_view.at(src_table), dst_view.at(dst_table), lengths, same_model=True)
    expected = expect(src, dst, src_table, dst_table, [5, 9])
    plan.run()
    assert_equal(dst, expected)
    lengths[0] = 2
    src[0].fill_(3.0)
    expected = expect(src, dst, src_table, dst_table, [2, 9])
    plan.run()
    assert_equal(dst, expected)


def test_tables_of_the_plan_and_lengths_of_a_run() -> None:
    """The usual case of a sequence that grows. Without lengths nothing runs."""
    src, dst, src_view, dst_view = two_caches(5)
    tables = [[3, 1, 8], [2, 5, 7]], [[4, 6], [0, 2]]
    plan = Plan.migrate(src_view.at(tables[0]), dst_view.at(tables[1]), same_model=True)
    before = [tensor.clone() for tensor in dst]
    for call in (plan.run, plan.describe, plan.ranges):
        with pytest.raises(InvalidArgumentError, match="seq_lens is None, expected lengths"):
            call()
    assert_equal(dst, before)
    for lengths in ([0, 0], [5, 1], [12, 9]):
        expected = expect(src, dst, *tables, lengths)
        plan.run(lengths)
        assert_equal(dst, expected)
    with pytest.raises(InvalidArgumentError, match="has 2 rows, expected 3"):
        plan.run([1, 1, 1])


def test_slots_and_starts() -> None:
    src, dst, src_view, dst_view = two_caches(2)
    plan = Plan.migrate(
        src_view.at([[0, 1]]), dst_view.at(slots=SlotMapping.of([0])), [1], same_model=True
    )
    for start, slots in ((2, [9, 17, -1, 3]), (0, [55, 0, 1, 2])):
        expected = [tensor.clone() for tensor in dst]
        for i, slot in enumerate(slots):
            token = start + i
            for from_, into in zip(src, expected, strict=True):
                if slot >= 0:
                    into[slot // 8, :, slot % 8] = from_[(4, 7)[token // 4], token % 4]
        plan.run(
            torch.tensor([4]),
            src_block_table=torch.tensor([[4, 7]]),
            src_starts=torch.tensor([start]),
            dst_slots=torch.tensor(slots),
        )
        assert_equal(dst, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranges_move_the_same(seed: int) -> None:
    src, dst, src_view, dst_view = two_caches(seed)
    plan = Plan.migrate(src_view.at([[3, 1]]), dst_view.at([[6]]), [seed + 4], same_model=True)
    expected = expect(src, dst, [[3, 1]], [[6]], [seed + 4])
    ranges = plan.ranges()
    assert ranges.dtype == RANGE
    assert len(ranges) == 4 * (seed + 4) * 3
    assert set(ranges["bytes"]) == {32}
    for number, (tensor, to) in enumerate(zip(src, dst, strict=True)):
        of_plane = ranges[ranges["plane"] == number]
        for one in of_plane:
            at, into = int(one["src"]) - tensor.data_ptr(), int(one["dst"]) - to.data_ptr()
            n = int(one["bytes"])
            to.view(-1).view(torch.uint8)[into : into + n] = tensor.view(-1).view(torch.uint8)[
                at : at + n
            ]
    assert_equal(dst, expected)
    assert len(plan.ranges([0])) == 0


def test_info_and_its_table() -> None:
    _, _, src_view, dst_view = two_caches(1, num_layers=3)
    plan = Plan.migrate(src_view.at([[3, 1]]), dst_view.at([[6]]), [7], same_model=True)
    info = plan.info
    assert (info.num_sequences, info.num_tokens, info.num_moved) == (1, 7, 7)
    assert info.bytes_written == info.bytes_read == 7 * 6 * 3 * 16 * 2
    assert info.exact
    assert [(plane.layer, plane.name) for plane in info.planes] == [
        (layer, name) for layer in range(3) for name in "KV"
    ]
    lines = repr(info).splitlines()
    assert lines[0].startswith("PlanInfo(1 sequence, 7 tokens, 4,032 bytes, 1 thread, exact, about")
    assert [line.split() for line in lines[1:]] == [
        ["layers", "plane", "numbers", "from", "to", "by", "run", "bytes"],
        ["0-2", "K", "3", "x", "16", "BF16", "BF16", "copy", "32"],
        ["0-2", "V", "3", "x", "16", "BF16", "BF16", "copy", "32"],
    ]
    described = plan.describe([3])
    assert described.num_tokens == 3
    with pytest.raises(OutOfRangeError, match=r"src\.block_table\.indices\[0\] is 9"):
        plan.describe(src_block_table=[[9, 1]])


def test_a_conversion_is_described_and_has_no_ranges() -> None:
    _, _, src_view, dst_view = two_caches(1, dst_dtype=torch.float16)
    plan = Plan.migrate(src_view.at([[3]]), dst_view.at([[6]]), [3], same_model=True)
    assert not plan.info.exact
    assert "F16, not exact" in repr(plan.info)
    with pytest.raises(UnsupportedError, match=r"^K of layer 0 has another dtype at each end"):
        plan.ranges()


def test_refusals() -> None:
    src, dst, src_view, dst_view = two_caches(1)
    before = [tensor.clone() for tensor in dst]
    ends = src_view.at([[3]]), dst_view.at([[6]])
    with pytest.raises(FactsMismatchError):
        Plan.migrate(*ends, [3])
    with pytest.raises(InvalidArgumentError, match="paged"):
        Plan.migrate(src_view, ends[1], [3])
    plan = Plan.migrate(*ends, [3], same_model=True)
    with pytest.raises(
        InvalidArgumentError,
        match=r"^lookups\.dst\.slots is given, expected NULL: the plan was made with a block_table",
    ):
        plan.run(dst_slots=torch.tensor([1, 2, 3]))
    with pytest.raises(InvalidArgumentError, match=r"^src\.block_table has 2 rows, expected 1"):
        plan.run(src_block_table=torch.tensor([[1], [2]]))
    with pytest.raises(OutOfRangeError, match=r"src\.block_table\.indices\[0\] is 9"):
        plan.run(src_block_table=torch.tensor([[9]]))
    with pytest.raises(InvalidArgumentError, match="seq_lens"):
        plan.run(torch.tensor([3.0]))
    assert_equal(dst, before)
    src[0].untyped_storage().resize_(src[0].untyped_storage().nbytes() * 2)
    for call in (plan.run, plan.describe, plan.ranges):
        with pytest.raises(InvalidArgumentError, match=r"src\.layers\[0\]\.k"):
            call()
    assert_equal(dst, before)


def test_close() -> None:
    _, _, src_view, dst_view = two_caches(1)
    with Plan.migrate(src_view.at([[3]]), dst_view.at([[6]]), [3], same_model=True) as plan:
        plan.run()
    plan.close()
    for call in (plan.run, plan.describe, plan.ranges):
        with pytest.raises(
            InvalidArgumentError, match=r"^the plan is closed, expected an open one"
        ):
            call()


def test_a_plan_keeps_what_it_needs_and_lets_go() -> None:
    src, dst, src_view, dst_view = two_caches(1)
    table, lengths = torch.tensor([[3]]), torch.tensor([3])
    kept = [weakref.ref(tensor) for tensor in (*src, table, lengths)]
    expected = expect(src, dst, [[3]], [[6]], [3])
    plan = Plan.migrate(src_view.at(table), dst_view.at([[6]]), lengths, same_model=True)
    del src, src_view, table, lengths
    gc.collect()
    assert all(ref() is not None for ref in kept)
    plan.run()
    assert_equal(dst, expected)
    plan.close()
    del plan
    gc.collect()
    assert all(ref() is None for ref in kept)


def test_threads_share_a_plan() -> None:
    """Each moves a sequence of its own, many times."""
    src, dst, src_view, dst_view = two_caches(3)
    none = torch.zeros(0, 1, dtype=torch.int64)
    plan = Plan.migrate(src_view.at(none), dst_view.at(none), same_model=True)
    rows = [([[2 * i, 2 * i + 1]], [[i]]) for i in range(4)]
    expected = dst
    for src_table, dst_table in rows:
        expected = expect(src, expected, src_table, dst_table, [8])
    barrier = threading.Barrier(len(rows))

    def work(src_table: list[list[int]], dst_table: list[list[int]]) -> None:
        tables = torch.tensor(src_table), torch.tensor(dst_table)
        lens = torch.tensor([8])
        barrier.wait()
        for _ in range(300):
            plan.run(lens, src_block_table=tables[0], dst_block_table=tables[1])

    threads = [threading.Thread(target=work, args=row) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(dst, expected)


def test_numpy_caches() -> None:
    """No torch tensor at either end."""
    source = np.arange(2 * 4 * 1 * 8, dtype=np.float32).reshape(2, 4, 1, 8)
    target = np.zeros((2, 1, 4, 8), np.float32)
    src = CacheDesc.from_kv(describe(source, Layout.BLOCK_NHD))
    dst = CacheDesc.from_kv(describe(target, Layout.BLOCK_HND))
    views = [CacheView((desc,), CacheFacts()) for desc in (src, dst)]
    plan = Plan.migrate(views[0].at([[1]]), views[1].at([[0]]), [3], same_model=True)
    plan.run()
    assert np.array_equal(target[0, 0, :3], source[1, :3, 0])
    plan.run(np.array([4]), src_block_table=[[0]])
    assert np.array_equal(target[0, 0], source[0, :, 0])
    assert kvx_core.Plan is Plan
    assert migrate(views[0].at([[1]]), views[1].at([[1]]), [4], same_model=True) == 4 * 32
