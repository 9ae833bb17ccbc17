"""What WritePlan and GatherPlan say and list: Plan.write and Plan.gather. Spec: E.13"""

from __future__ import annotations

import ctypes
import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    GatherPlan,
    InvalidArgumentError,
    MigratePlan,
    OutOfRangeError,
    Plan,
    UnsupportedError,
    WritePlan,
    describe,
    gather_kv,
    write_kv,
)
from kvx_core.ops.plan_info import _ROLES, RANGE
from kvx_core.ops.plan_lookups import NAMES
from kvx_core.types import Layout, Role

SEEDS = (1, 2, 3)


def a_cache(seed: int, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], CacheDesc]:
    """HND blocks of 4 tokens: `seed` heads of 8."""
    stored = [torch.randn(5, seed, 4, 8).to(dtype) for _ in range(2)]
    return stored, CacheDesc.from_kv(*(describe(t, Layout.BLOCK_HND) for t in stored))


def carry_out(ranges: Any) -> None:
    for one in ranges:
        src, dst, num_bytes = (int(one[name]) for name in ("src", "dst", "bytes"))
        if src:
            ctypes.memmove(dst, src, num_bytes)
        else:
            ctypes.memset(dst, 0, num_bytes)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["torch", "numpy", "list"])
def test_ranges_of_a_write_move_the_same(seed: int, kind: str) -> None:
    torch.manual_seed(seed)
    stored, cache = a_cache(seed)
    before = [t.clone() for t in stored]
    key, value = torch.randn(2, 9, seed, 8)
    slots = torch.randperm(20)[:7]
    slots[seed] = -1
    with Plan.write(cache, key, value) as plan:
        assert isinstance(plan, WritePlan)
        assert isinstance(plan, Plan)
        given = {"torch": slots, "numpy": slots.numpy(), "list": slots.tolist()}[kind]
        ranges, info = plan.ranges(key, value, given), plan.describe(key, value, given)
        assert ranges.dtype == RANGE
        assert (info.num_tokens, info.num_moved, info.num_null_dst) == (7, 6, 1)
        assert ranges["bytes"].sum() == info.bytes_written == 2 * 6 * seed * 8 * 4
        assert all(torch.equal(a, b) for a, b in zip(stored, before, strict=True))
        carry_out(ranges)
        got = [t.clone() for t in stored]
        for tensor, old in zip(stored, before, strict=True):
            tensor.copy_(old)
        write_kv(cache, key, value, slots)
        assert all(torch.equal(a, b) for a, b in zip(stored, got, strict=True))
        for tensor, old in zip(stored, before, strict=True):
            tensor.copy_(old)
        plan.run(key, value, given)
        assert all(torch.equal(a, b) for a, b in zip(stored, got, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("zero_fill", [False, True])
def test_ranges_of_a_gather_move_the_same(seed: int, zero_fill: bool) -> None:
    torch.manual_seed(seed)
    _, cache = a_cache(seed)
    table = BlockTable.packed(torch.tensor([[3, 0], [-1, 4], [1, 2]])).with_holes()
    lens = [6, 7, seed]
    out = torch.randn(2, 3, 7, seed, 8)
    expected = out.clone()
    gather_kv(cache, table, lens, out=tuple(expected), zero_fill=zero_fill)
    with Plan.gather(cache, *out, zero_fill=zero_fill) as plan:
        assert isinstance(plan, GatherPlan)
        ranges = plan.ranges(*out, table, lens)
        info = plan.describe(*out, table, lens)
        assert (info.num_sequences, info.num_moved) == (3, 9 + seed)
        assert ranges["bytes"].sum() == info.bytes_written
        carry_out(ranges)
        assert torch.equal(out, expected)
        out.normal_()
        expected.copy_(out)
        gather_kv(cache, table, lens, out=tuple(expected), zero_fill=zero_fill)
        plan.run(*out, table, lens)
        assert torch.equal(out, expected)


def test_info_before_there_are_tokens() -> None:
    _, cache = a_cache(2, torch.bfloat16)
    key = torch.zeros(3, 2, 8)
    info = Plan.write(cache, key, key).info
    assert repr(info).splitlines()[0].startswith("PlanInfo(0 tokens, 0 bytes, ")
    assert [(plane.name, plane.kernel) for plane in info.planes] == [
        ("K", "convert"),
        ("V", "convert"),
    ]
    assert not info.exact
    out = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    gathered = Plan.gather(cache, out, out).info
    assert [plane.run_bytes for plane in gathered.planes] == [16, 16]
    assert gathered.exact


def test_refusals() -> None:
    stored, cache = a_cache(2)
    key = torch.zeros(3, 2, 8)
    write, gather = Plan.write(cache, key, key), Plan.gather(cache, key, key)
    for call in (write.describe, write.ranges, write.run):
        with pytest.raises(OutOfRangeError, match=r"^write\.slots\.slots\[1\] is 20"):
            call(key, key, [1, 20, 2])
        with pytest.raises(InvalidArgumentError, match="slots"):
            call(key, key, torch.tensor([1.0]))
    for call in (gather.describe, gather.ranges, gather.run):
        with pytest.raises(OutOfRangeError, match=r"indices\[0\] is 5"):
            call(key, key.clone(), [[5]], [3])
    converts = Plan.write(cache, key.half(), key.half())
    with pytest.raises(UnsupportedError, match=r"^K of layer 0 has another dtype at each end"):
        converts.ranges(key.half(), key.half(), [1, 2, 3])
    read_only = np.zeros((3, 2, 8), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=r"^key"):
        gather.describe(read_only, key, [[1]], [3])
    stored[0].untyped_storage().resize_(stored[0].untyped_storage().nbytes() * 2)
    for call in (write.describe, write.ranges, write.run):
        with pytest.raises(InvalidArgumentError, match=r"^cache\.k"):
            call(key, key, [1, 2, 3])


def test_close() -> None:
    _, cache = a_cache(2)
    key = torch.zeros(3, 2, 8)
    with Plan.write(cache, key, key) as write, Plan.gather(cache, key, key) as gather:
        write.describe(key, key, [1, 2, 3])
    write.close()
    calls = [(call, (key, key, [1, 2, 3])) for call in (write, write.run, write.describe)]
    calls += [(call, (key, key, [[1]], [3])) for call in (gather, gather.run, gather.ranges)]
    for call, given in calls:
        with pytest.raises(
            InvalidArgumentError, match=r"^the plan is closed, expected an open one"
        ):
            call(*given)


def test_a_scale_is_read_by_each_call() -> None:
    stored, cache = a_cache(2, torch.float8_e4m3fn)
    scale, key = torch.tensor([1.0]), torch.full((3, 2, 8), 2.0)
    plan = Plan.write(cache, key, key, k_scale=scale, v_scale=scale)
    assert plan.describe(key, key, [1, 2, 3]).num_moved == 3
    scale[0] = 4.0
    plan.run(key, key, [1, 2, 3])
    assert stored[0][0, :, 1].float().unique().tolist() == [0.5]
    scale[0] = 0.0
    with pytest.raises(InvalidArgumentError, match=r"^write\.k_scale_desc is 0"):
        plan.describe(key, key, [1, 2, 3])


def test_keywords_of_run_are_those_of_the_others() -> None:
    keywords = list(inspect.signature(MigratePlan.run).parameters)[2:]
    assert keywords == [*NAMES, "stream"]


def test_a_keyword_that_there_is_not() -> None:
    _, cache = a_cache(1)
    view = CacheView((cache,), CacheFacts())
    plan = Plan.migrate(view.at([[0]]), view.at([[1]]), [1], same_model=True)
    for call in (plan.describe, plan.ranges):
        with pytest.raises(TypeError, match=re.escape("unexpected keyword 'src_table', expected")):
            call(src_table=[[1]])


def test_every_role_has_a_name_in_a_description() -> None:
    names = [role.name.lower().replace("_", " ") for role in Role]
    assert [name.lower() for name in _ROLES] == names
