"""Bound plans: the bytes of write_kv and gather_kv, from any thread, at a fraction of the cost."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import timeit
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
    KvxError,
    Layout,
    OutOfRangeError,
    Plan,
    WritePlan,
    describe,
    gather_kv,
    write_kv,
)
from kvx_core._c import bound
from tests.ops.in_threads import run_in_threads

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 8, 2, 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
IO = Layout.BLOCK_CUSTOM


class Cache:
    """A cache of halves filled with sevens, as vLLM has it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.kv = torch.full((NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM), 7.0).to(dtype)
        k, v = self.kv.split(DIM, dim=-1)
        self.desc = CacheDesc.from_kv(describe(k, Layout.BLOCK_HND), describe(v, Layout.BLOCK_HND))


def qkv(n: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Keys and values as a model makes them: slices of one projection, not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 3, HEADS, DIM, generator=generator).to(dtype)
    return rows[:, 1], rows[:, 2]


def write_described(cache: CacheDesc, key: Any, value: Any, slots: Any) -> None:
    """write_kv of tensors described in Python, whatever they are."""
    halves = {"key": key, "value": value}.items()
    write_kv(cache, *[t if t is None else describe(t, IO, name=name) for name, t in halves], slots)


def gather_described(cache: CacheDesc, table: Any, lens: Any, out: Any, **options: Any) -> None:
    """gather_kv into tensors described in Python."""
    gather_kv(cache, table, lens, out=tuple(describe(t, IO) for t in out), **options)


@pytest.fixture(params=["DLPack", "no DLPack"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in C, or, as without the exchange API, described in Python."""
    if request.param == "no DLPack":
        monkeypatch.setattr("kvx_core._c.bound._torch_reader", lambda: None)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the plans made from now on was taken by C."""
    calls: list[bool] = []

    def watch(call: Callable[..., int]) -> Callable[..., int]:
        def watched(*tensors: object) -> int:
            status = call(*tensors)
            if len(tensors) <= 4:  # else it is given what it has left, described
                calls.append(status >= 0)
            return status

        return watched

    for name in ("write", "gather"):
        bind = getattr(bound, name)
        monkeypatch.setattr(bound, name, lambda *args, bind=bind: watch(bind(*args)))
    return calls


def test_making_a_plan_writes_nothing() -> None:
    cache = Cache()
    WritePlan(cache.desc, *qkv(3, 0))
    assert (cache.kv == 7).all()


@pytest.mark.usefixtures("reader")
def test_write_is_write_kv_whatever_comes() -> None:
    """Decode and prefill batches in turn, then other strides, dtypes, index types and libraries."""
    batches: list[tuple[Any, Any, Any]] = []
    for seed, n in enumerate([1, 1, 5, 1, 40, 0, 3]):
        slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed))[:n]
        batches.append((*qkv(n, seed), slots))
    key, value = qkv(4, 10)
    slots = torch.tensor([1, -1, 9, 30])
    batches += [
        (key.contiguous(), value, slots),
        (key, value.contiguous(), slots.int()),
        (key.float(), value.half(), slots),
        (key.transpose(0, 1).contiguous().transpose(0, 1), value, slots),
        (key, value, [3, 4, 5, 6]),
        (key.float().numpy(), value.float().numpy(), np.array([7, 8, 9, 10])),
        (key, value, slots[:2]),  # keys padded past the slots
        (key, value, slots),
    ]
    planned, plain, described = Cache(), Cache(), Cache()
    plan = WritePlan(planned.desc, *qkv(1, 0), stream=1 << 40)  # which HOST memory ignores
    for batch in batches:
        plan(*batch)
        write_kv(plain.desc, *batch)
        write_described(described.desc, *batch)
        assert torch.equal(planned.kv, described.kv)
        assert torch.equal(plain.kv, described.kv)


class Subclass(torch.Tensor):
    """Memory of a subclass may mean something else."""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda k, v, s: (k, v, s), True),
        (lambda k, v, s: (k[:, :, :], v, s), True),
        (lambda k, v, s: (k.contiguous(), v.contiguous(), s), True),
        (lambda k, v, s: (*qkv(6, 1), s), True),
        (lambda k, v, s: (k.half(), v.float(), s.int()), True),
        (lambda k, v, s: (k, v, torch.arange(8)[::2]), False),
        (lambda k, v, s: (k, v, torch.arange(8)[:1:2]), True),  # one slot, with a stride
        (lambda k, v, s: (k, v, s.tolist()), True),
        (lambda k, v, s: (k, v, list(s)), False),
        (lambda k, v, s: (k, v, s.numpy()), True),
        (lambda k, v, s: (k.float().numpy(), v.half().numpy(), s), True),
        (lambda k, v, s: (k.as_subclass(Subclass), v, s), False),
        (lambda k, v, s: (torch.nn.Parameter(k), v, s), False),
        (lambda k, v, s: (k, v, s[None]), False),
        (lambda k, v, s: (k, v.double(), s), False),
        (lambda k, v, s: (k.to_sparse(), v, s), False),
        (lambda k, v, s: (k.to("meta"), v, s), False),
        (lambda k, v, s: (k[None, None, None], v, s), False),
    ],
)
def test_what_is_read_in_c(taken: list[bool], change: Any, expected: bool) -> None:
    """And what is not does the same, or is refused."""
    cache, plain, described = Cache(), Cache(), Cache()
    key, value = qkv(4, 0)
    tensors = change(key, value, torch.tensor([1, 9, 30, 8]))
    plan = WritePlan(cache.desc, key, value)
    try:
        write_described(described.desc, *tensors)
    except KvxError as error:
        for call in (plan, partial(write_kv, plain.desc)):
            with pytest.raises(type(error), match=re.escape(str(error))):
                call(*tensors)
    else:
        plan(*tensors)
        write_kv(plain.desc, *tensors)
    assert taken[-2:] == [expected, expected]
    assert torch.equal(cache.kv, described.kv)
    assert torch.equal(plain.kv, described.kv)


@pytest.mark.usefixtures("reader")
def test_fewer_heads_in_the_same_strides_are_seen() -> None:
    cache = Cache()
    key, value = qkv(4, 0)
    plan = WritePlan(cache.desc, key, value)
    plan(key, value, torch.arange(4))
    with pytest.raises(InvalidArgumentError, match=r"write\.io\.key\.shape\[1\] is 1, expected"):
        plan(key[:, :1], value, torch.arange(4))
    with pytest.raises(InvalidArgumentError, match=r"write\.io\.value\.shape\[2\] is 8, expected"):
        plan(key, value[:, :, :8], torch.arange(4))
    with pytest.raises(InvalidArgumentError, match="expected at least num_tokens 5"):
        plan(key, value, torch.arange(5))


@pytest.mark.usefixtures("reader")
def test_one_slot_of_a_strided_tensor_does_not_stand_for_many() -> None:
    """One slot is contiguous with any stride; the next batch of that stride is not."""
    cache = Cache()
    slots = torch.arange(20)[::2]
    key, value = qkv(5, 0)
    plan = WritePlan(cache.desc, key, value)
    plan(key, value, slots[:1])
    with pytest.raises(InvalidArgumentError, match=r"slots\.stride is \(2,\), expected \(1,\)"):
        plan(key, value, slots[:5])


def test_a_plan_refuses_what_write_kv_refuses() -> None:
    cache = Cache()
    key, value = qkv(2, 0)
    plan = WritePlan(cache.desc, key, value)
    for _ in range(2):  # described anew, then refreshed
        with pytest.raises(OutOfRangeError) as raised:
            plan(key, value, torch.tensor([0, NUM_SLOTS]))
        assert str(raised.value) == (
            "write.slots.slots[1] is 48, expected below num_blocks * block_size = 48 (spec 5.2)"
        )
        plan(key, value, torch.tensor([-1, -1]))
    assert (cache.kv == 7).all()
    with pytest.raises(InvalidArgumentError, match="expected num_kv_heads 2"):
        WritePlan(cache.desc, key[:, :1], value)
    with pytest.raises(InvalidArgumentError, match=r"write\.io\.value"):
        plan(key, None, torch.tensor([0, 1]))


@pytest.mark.usefixtures("reader")
def test_a_plan_without_v() -> None:
    k = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, DIM)
    cache = CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD))
    key = torch.randn(2, 1, DIM)
    plan = WritePlan(cache, key, None)
    for slots in ([0, 1], [8, 9], [3, 5]):
        plan(key, None, torch.tensor(slots))
        assert torch.equal(k.view(-1, 1, DIM)[slots], key)
    with pytest.raises(InvalidArgumentError, match=r"write\.io\.value is given, but cache\.v is"):
        plan(key, key, torch.tensor([0, 1]))
    out = torch.zeros(1, 4, 1, DIM)
    gather = GatherPlan(cache, out, None)
    for block in (0, 1):
        gather(out, None, torch.tensor([[block]]), torch.tensor([4]))
        assert torch.equal(out[0], k[block, :4])


def test_a_plan_keeps_the_scales_it_was_given() -> None:
    k = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype=torch.float8_e4m3fn)
    v = k.clone()
    cache = CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
    ones = torch.ones(1, HEADS, DIM)
    write = WritePlan(cache, ones, ones, k_scale=0.5, v_scale=0.25)
    out = torch.zeros(1, 1, HEADS, DIM), torch.zeros(1, 1, HEADS, DIM)
    gather = GatherPlan(cache, *out, k_scale=0.5, v_scale=0.25)
    for slot in range(3):
        write(ones, ones, torch.tensor([slot * BLOCK_SIZE]))
        assert (k[slot, 0].float() == 2).all()
        assert (v[slot, 0].float() == 4).all()
        gather(*out, torch.tensor([[slot]]), torch.tensor([1]))
        assert (out[0] == 1).all()
        assert (out[1] == 1).all()


@pytest.mark.usefixtures("reader")
def test_gather_is_gather_kv_whatever_comes() -> None:
    cache = Cache()
    write_kv(cache.desc, *qkv(NUM_SLOTS, 0), torch.arange(NUM_SLOTS))
    shapes: list[tuple[int, int, torch.dtype, torch.dtype]] = [
        (1, 8, torch.bfloat16, torch.int64),
        (1, 8, torch.bfloat16, torch.int64),
        (3, 16, torch.bfloat16, torch.int32),
        (3, 16, torch.float32, torch.int32),
        (1, 8, torch.bfloat16, torch.int64),
    ]
    like_ = torch.zeros(1, 8, HEADS, DIM, dtype=torch.bfloat16)
    plan = GatherPlan(cache.desc, like_, like_, null_block_id=0)
    for seed, (rows, length, dtype, index) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(0, NUM_BLOCKS, (rows, 2), generator=generator).to(index)
        lens = torch.randint(0, length + 1, (rows,), generator=generator)
        outs = [torch.full((rows, length, HEADS, DIM), 5.0).to(dtype) for _ in range(4)]
        holed = BlockTable.packed(table).with_holes()
        plan(outs[0], outs[1], holed, lens)
        gather_described(cache.desc, holed, lens, outs[2:], null_block_id=0)
        assert torch.equal(outs[0], outs[2])
        assert torch.equal(outs[1], outs[3])
    plan(outs[0], outs[1], [[1]], [3])
    gather_kv(cache.desc, [[1]], [3], out=(outs[2], outs[3]), null_block_id=0)
    assert torch.equal(outs[0], outs[2])
    with pytest.raises(OutOfRangeError):
        plan(outs[0], outs[1], torch.tensor([[NUM_BLOCKS]]), torch.tensor([1]))


EXTENSION = """
import sys
torch = sys.modules["torch"]
torch.Tensor.__dlpack_c_exchange_api__ = torch.api
"""


@pytest.mark.parametrize(
    ("code", "is_there"),
    [(EXTENSION, True), (None, False), ("import ctypes; ctypes.CDLL('/no/such.so')", False)],
)
def test_an_older_torch_is_extended_where_it_can_be(
    code: str | None, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OlderTensor:
        """Without the exchange API."""

    older = SimpleNamespace(Tensor=OlderTensor, api=torch.Tensor.__dlpack_c_exchange_api__)
    if code is not None:
        (tmp_path / "torch_c_dlpack_ext.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", older)
    bound._extend_torch.cache_clear()
    try:
        found = bound._torch_reader()
    finally:
        sys.modules.pop("torch_c_dlpack_ext", None)
        bound._extend_torch.cache_clear()
    assert (found is not None) is is_there
    assert found is None or (found[0] is OlderTensor and found[1])


def test_a_cache_that_is_read_only_stays_so() -> None:
    """However often it is asked."""
    memory = np.zeros((2, NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM), np.float32)
    memory.flags.writeable = False
    k, v = (describe(half, Layout.BLOCK_NHD) for half in memory)
    cache, (key, value) = CacheDesc.from_kv(k, v), qkv(1, 0)
    for _ in range(3):
        with pytest.raises(InvalidArgumentError, match=r"cache\.k is read-only memory"):
            write_kv(cache, key, value, torch.tensor([0]))
    out = torch.ones(1, 1, HEADS, DIM), torch.ones(1, 1, HEADS, DIM)
    for _ in range(3):
        assert gather_kv(cache, torch.tensor([[0]]), torch.tensor([1]), out=list(out)) == out
        assert not out[0].any()
        out[0].fill_(1)


def test_making_a_gather_plan_checks_its_outputs() -> None:
    cache = Cache()
    good, bad = torch.zeros(1, 8, HEADS, DIM), torch.zeros(1, 8, HEADS + 1, DIM)
    with pytest.raises(InvalidArgumentError, match=r"gather\.io\.value\.shape\[2\] is 3, expected"):
        GatherPlan(cache.desc, good, bad)
    with pytest.raises(InvalidArgumentError, match="secondary_num_blocks is -1, expected 0 to"):
        GatherPlan(cache.desc, good, good, secondary_num_blocks=-1)


def test_threads_share_a_plan() -> None:
    """Every thread writes its own blocks, with its own dtype, and reads them back."""
    cache = Cache(torch.float32)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    write = WritePlan(cache.desc, *qkv(1, 0, torch.float32))
    like_ = torch.zeros(1, BLOCK_SIZE, HEADS, DIM)
    gather = GatherPlan(cache.desc, like_, like_)

    def work(block: int) -> None:
        out = torch.zeros(1, BLOCK_SIZE, HEADS, DIM), torch.zeros(1, BLOCK_SIZE, HEADS, DIM)
        slots = torch.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        table, lens = torch.tensor([[block]]), torch.tensor([BLOCK_SIZE])
        batches = [qkv(BLOCK_SIZE, 100 * block + i, dtypes[block % 3]) for i in range(10)]
        for i in range(600):
            key, value = batches[i % 10]
            write(key, value, slots)
            gather(*out, table, lens)
            assert torch.equal(out[0][0], key.float())
            assert torch.equal(out[1][0], value.float())

    run_in_threads(work, NUM_BLOCKS)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("num_threads", "num_tokens", "num_calls"),
    [(8, 3, 1000), (4, 2048, 30)],  # small calls keep the GIL, large ones give it away
)
def test_threads_share_a_plan_of_like_tensors(
    num_threads: int, num_tokens: int, num_calls: int
) -> None:
    k = torch.zeros(num_threads, num_tokens, HEADS, DIM)
    v = torch.zeros_like(k)
    cache = CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
    write = WritePlan(cache, *qkv(1, 0, torch.float32))
    gather = GatherPlan(cache, k, v)

    def work(block: int) -> None:
        slots = torch.arange(num_tokens) + block * num_tokens
        table, lens = torch.tensor([[block]]), torch.tensor([num_tokens])
        out = torch.zeros(2, 1, num_tokens, HEADS, DIM)
        batches = [qkv(num_tokens, 100 * block + i, torch.float32) for i in range(10)]
        for i in range(num_calls):
            key, value = batches[i % 10]
            write(key, value, slots)
            gather(out[0], out[1], table, lens)
            assert torch.equal(out[0, 0], key)
            assert torch.equal(out[1, 0], value)

    run_in_threads(work, num_threads)


def test_a_plan_asks_for_its_stream() -> None:
    """A function is asked by every call that C takes; what it raises, the call raises."""
    asked: list[int] = []
    cache = Cache()
    key, value = qkv(1, 0)

    def stream() -> int:
        asked.append(1)
        if len(asked) == 4:
            raise RuntimeError("no stream")
        return 1 << 40  # which HOST memory ignores

    plan = WritePlan(cache.desc, key, value, stream=stream)
    plan(key, value, torch.tensor([0]))
    plan(key, value, torch.tensor([1]))
    assert len(asked) == 3
    with pytest.raises(RuntimeError, match="no stream"):
        plan(key, value, torch.tensor([2]))


def test_a_stream_may_be_none() -> None:
    cache, (key, value) = Cache(), qkv(1, 0)
    plan = WritePlan(cache.desc, key, value, stream=lambda: None)  # type: ignore[arg-type, return-value]
    plan(key, value, torch.tensor([3]))
    assert torch.equal(cache.kv[0, :, 3], torch.cat((key[0], value[0]), dim=-1))


def test_an_engine_that_its_plans_know_is_collected() -> None:
    """A plan's function leads to the engine, which owns the plan and the cache."""

    class Engine:
        def __init__(self) -> None:
            self.cache = Cache()
            self.plan = WritePlan(self.cache.desc, *qkv(1, 0), stream=self.stream)

        def stream(self) -> int:
            return 0

    engine = Engine()
    engine.plan(*qkv(1, 0), torch.tensor([0]))
    memory = weakref.ref(engine.cache.kv)
    del engine
    gc.collect()
    assert memory() is None


def test_plans_leave_nothing_behind() -> None:
    """Neither a plan nor its calls keep a reference to anything once it is gone."""
    cache = Cache()
    key, value = qkv(2, 0)
    slots, type_count = torch.tensor([0, 1]), sys.getrefcount(torch.Tensor)
    before = [sys.getrefcount(x) for x in (key, value, slots)]
    for _ in range(100):
        plan = WritePlan(cache.desc, key, value)
        for _ in range(10):
            plan(key, value, slots)
            plan(key, value, [0, 1])
            write_kv(cache.desc, key, value, slots)
    alive = weakref.ref(plan), weakref.ref(cache.kv)
    del plan, cache
    assert [ref() for ref in alive] == [None, None]  # without a collection: there are no cycles
    assert [sys.getrefcount(x) for x in (key, value, slots)] == before
    assert abs(sys.getrefcount(torch.Tensor) - type_count) < 50


def test_an_error_belongs_to_its_thread() -> None:
    """The sentence of a failure is that of the thread's own call."""
    cache = Cache()
    key, value = qkv(1, 0)
    plan = WritePlan(cache.desc, key, value)

    def work(i: int) -> None:
        slot = NUM_SLOTS + i
        for _ in range(300):
            with pytest.raises(OutOfRangeError, match=rf"slots\[0\] is {slot}, expected"):
                plan(key, value, torch.tensor([slot]))

    run_in_threads(work, 4)


def cost(call: Callable[[], object]) -> float:
    """Seconds of one call: the best of many short runs, which other processes did not disturb."""
    timer = timeit.Timer(call)
    timer.timeit(200)
    return min(timer.repeat(60, 200)) / 200


def test_a_call_costs_microseconds() -> None:
    """On a quiet machine one or two; the bounds leave room for a slow and busy one."""
    cache = Cache()
    key, value = qkv(1, 0)
    slots = torch.tensor([3])
    plan = WritePlan(cache.desc, key, value)
    planned = cost(lambda: plan(key, value, slots))
    plain = cost(lambda: write_kv(cache.desc, key, value, slots))
    described = cost(lambda: write_described(cache.desc, key, value, slots))
    assert max(planned, plain) < 5e-6
    assert max(planned, plain) < described / 4

    out = torch.zeros(1, 1, HEADS, DIM), torch.zeros(1, 1, HEADS, DIM)
    table, lens = torch.tensor([[0]]), torch.tensor([1])
    gather = GatherPlan(cache.desc, *out)
    planned = cost(lambda: gather(*out, table, lens))
    plain = cost(lambda: gather_kv(cache.desc, table, lens, out=out))
    described = cost(lambda: gather_described(cache.desc, table, lens, out))
    assert max(planned, plain) < 5e-6
    assert max(planned, plain) < described / 4


BEFORE_TORCH = """
import sys
import numpy as np
from kvx_core import CacheDesc, describe, write_kv
k = np.zeros((2, 4, 1, 8), np.float32)
cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"))
for slot in (0, 1):
    write_kv(cache, np.ones((1, 1, 8), np.float32), None, [slot])
(call,) = cache.bound_calls.calls.values()
assert "torch" not in sys.modules
import torch
key, slots = torch.full((1, 1, 8), 2.0), torch.tensor([5])
assert call(key, None, slots) < 0
for _ in range(2):
    write_kv(cache, key, None, slots)
(call,) = cache.bound_calls.calls.values()
assert call(key, None, slots) == 0
print(k[:, :, 0, 0].ravel().tolist())
"""


def test_a_cache_that_was_used_before_torch_was_imported() -> None:
    """Its calls read torch tensors in C as soon as there are any."""
    found = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "[1.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]\n"


def test_starts_of_a_run_at_each_end() -> None:
    """What a run is told replaces what the plan was made with."""
    torch.manual_seed(5)
    ends, tensors = [], []
    for _ in range(2):
        k, v = torch.randn(2, 2, 4, 2, 8)
        tensors.append(k)
        cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
        ends.append(CacheView((cache,), CacheFacts(first_kv_head=0)))
    src, dst = (view.at([[1, 0]], starts=[0]) for view in ends)
    plan = Plan.migrate(src, dst, [3], same_model=True)
    from_, to = (k[[1, 0]].flatten(0, 1) for k in tensors)
    to[2:5] = from_[2:5]
    plan.run([3], src_starts=[2], dst_starts=[2])
    assert torch.equal(tensors[1][[1, 0]].flatten(0, 1), to)
    ranges = plan.ranges([3], src_starts=[2], dst_starts=[2])
    for name, k in zip(("src", "dst"), tensors, strict=True):
        assert k[1, 2].data_ptr() in ranges[name]
        assert k[1, 0].data_ptr() not in ranges[name]
