"""Slots, tables and lengths of every kind that a bound call reads in C, and those that it leaves.

The oracle is a loop over tokens; memory is compared whole.
"""

from __future__ import annotations

import array
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    CacheDesc,
    CacheView,
    GatherPlan,
    InvalidArgumentError,
    KvxError,
    OutOfRangeError,
    Plan,
    SlotMapping,
    UnsupportedError,
    WriteLayersPlan,
    WritePlan,
    describe,
    gather_kv,
    migrate,
    write_kv,
)
from tests.facts import SAME_MODEL

NUM_BLOCKS, BLOCK, HEADS, DIM = 7, 3, 2, 5
LEFT = 7.5  # what tests fill memory with that nothing may write

# Integers of one axis or two, as callers have them.
KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "torch int64": torch.tensor,
    "torch int32": lambda numbers: torch.tensor(numbers, dtype=torch.int32),
    "numpy int64": np.array,
    "numpy int32": lambda numbers: np.array(numbers, np.int32),
    "numpy long long": lambda numbers: np.array(numbers, np.longlong),
    "read-only numpy": lambda numbers: np.broadcast_to(np.array(numbers), np.shape(numbers)),
    "memoryview": lambda numbers: memoryview(np.array(numbers)),
    "list": list,
    "tuple": lambda numbers: tuple(tuple(n) if isinstance(n, list) else n for n in numbers),
}
LISTS = KINDS | {
    "array of int": lambda numbers: array.array("i", numbers),
    "array of long": lambda numbers: array.array("l", numbers),
}


class Cache:
    """One layer of float32, of torch or of numpy."""

    def __init__(self, seed: int, *, is_numpy: bool = False) -> None:
        numbers = np.random.default_rng(seed).standard_normal((2, NUM_BLOCKS, BLOCK, HEADS, DIM))
        self.k, self.v = numbers.astype(np.float32)
        tensors = (self.k, self.v) if is_numpy else map(torch.from_numpy, (self.k, self.v))
        self.desc = CacheDesc.from_kv(*(describe(t, "BLOCK_NHD") for t in tensors))
        self.view = CacheView((self.desc,), SAME_MODEL)

    def rows(self, which: str) -> np.ndarray[Any, Any]:
        """K or V, a view: (tokens, heads, dim)."""
        return getattr(self, which).reshape(-1, HEADS, DIM)


def tokens(seed: int, count: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, HEADS, DIM)).astype(np.float32)


@pytest.fixture(params=[0, 1, 2])
def seed(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.mark.parametrize("is_numpy", [False, True])
@pytest.mark.parametrize("kind", LISTS)
def test_slots_are_read_in_c(kind: str, is_numpy: bool, seed: int) -> None:
    cache, key, value = Cache(seed, is_numpy=is_numpy), tokens(seed + 1, 4), tokens(seed + 2, 4)
    slots = np.random.default_rng(seed).permutation(NUM_BLOCKS * BLOCK)[:4].tolist()
    slots[2] = -1  # is skipped
    k, v = cache.rows("k").copy(), cache.rows("v").copy()
    for i, slot in enumerate(slots):
        if slot >= 0:
            k[slot], v[slot] = key[i], value[i]
    plan = WritePlan(cache.desc, key, value)
    assert plan._call(key, value, LISTS[kind](slots)) == 0  # Python describes nothing
    assert np.array_equal(cache.rows("k"), k)
    assert np.array_equal(cache.rows("v"), v)
    cache.rows("k")[:], cache.rows("v")[:] = 0, 0
    write_kv(cache.desc, torch.from_numpy(key), torch.from_numpy(value), LISTS[kind](slots))
    written = [slot for slot in slots if slot >= 0]
    assert np.array_equal(cache.rows("k")[written], k[written])
    assert np.count_nonzero(cache.rows("k").any((1, 2))) == len(written)


@pytest.mark.parametrize("is_numpy", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_lengths_are_read_in_c(kind: str, is_numpy: bool, seed: int) -> None:
    cache, lens = Cache(seed, is_numpy=is_numpy), [5, 0, 3]
    table = np.random.default_rng(seed).permutation(6).reshape(3, 2).tolist()
    out = np.full((2, 3, 5, HEADS, DIM), LEFT, np.float32)
    expected = out.copy()
    for s, length in enumerate(lens):
        for i in range(length):
            block, at = divmod(i, BLOCK)
            expected[0, s, i] = cache.k[table[s][block], at]
            expected[1, s, i] = cache.v[table[s][block], at]
    key, value = out
    plan = GatherPlan(cache.desc, key, value)
    assert plan._call(key, value, KINDS[kind](table), KINDS[kind](lens)) == 0
    assert np.array_equal(out, expected)
    out.fill(LEFT)
    gather_kv(cache.desc, KINDS[kind](table), KINDS[kind](lens), out=tuple(map(torch.tensor, out)))
    gather_kv(cache.desc, KINDS[kind](table), KINDS[kind](lens), out=(key, value))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_migration_reads_everything_in_c(kind: str, seed: int) -> None:
    src, dst = Cache(seed), Cache(seed + 10)
    as_kind, lens, starts = KINDS[kind], [4, 2], [2, 0]
    order = np.random.default_rng(seed).permutation(6)
    here, there = order[:4].reshape(2, 2).tolist(), order[2:].reshape(2, 2).tolist()
    expected = dst.k.copy(), dst.v.copy()
    for s, length in enumerate(lens):
        for i in range(length):
            (b, at), (c, to) = divmod(i + starts[s], BLOCK), divmod(i + starts[s], BLOCK)
            expected[0][there[s][c], to] = src.k[here[s][b], at]
            expected[1][there[s][c], to] = src.v[here[s][b], at]
    plan = Plan.migrate(src.view.at([]), dst.view.at([]), new_positions=True)
    tables = as_kind(here), None, as_kind(starts), as_kind(there), None, as_kind(starts)
    assert plan._call(as_kind(lens), *tables, None) >= 0
    assert np.array_equal(dst.k, expected[0])
    assert np.array_equal(dst.v, expected[1])


def test_rows_of_a_list_may_have_any_lengths() -> None:
    """They are padded with -1, in C as in Python; a list that is long has memory of its own."""
    cache = Cache(3)
    table: list[Any] = [[5], [], [1, 4, 0], (2,)]
    lens = [3, 0, 9, 1]
    found = gather_kv(cache.desc, table, lens, max_seq_len=9)
    out = torch.zeros(4, 9, HEADS, DIM), torch.zeros(4, 9, HEADS, DIM)
    assert GatherPlan(cache.desc, *out)._call(*out, table, lens) == 0
    for mine, theirs in zip(out, found, strict=True):
        for row, length in enumerate(lens):
            assert torch.equal(mine[row, :length], theirs[row, :length])
    with pytest.raises(KvxError, match=r"block_table\.indices\[3\] is -1, a null block"):
        gather_kv(cache.desc, table, [3, 1, 9, 1], out=out)
    many = [*range(NUM_BLOCKS * BLOCK)] * 40
    key = tokens(1, len(many))
    last = key[-NUM_BLOCKS * BLOCK :]
    plan = WritePlan(cache.desc, key, key)
    refused = r"slots\[21\] is 0, expected a slot of its own|slots"
    with pytest.raises(KvxError, match=refused):
        plan(key, key, many)  # each slot is named forty times
    many = [-1] * (len(many) - len(last)) + many[-len(last) :]
    assert plan._call(key, key, many) == 0
    assert np.array_equal(cache.rows("k"), last)


WRONG: list[Any] = [
    np.array([1.0, 2.0]),
    np.array([1, 2], ">i8"),
    np.array([1, 2], np.int16),
    np.array([1, 2], np.uint64),
    np.array([True, False]),
    np.array(["NaT"], "M8[s]"),
    np.array([[1, 2]]),
    np.array(3),
    np.arange(4)[::2],
    np.arange(2)[::-1],
    np.array([1, 2], object),
    memoryview(np.array([1.0, 2.0])),
    array.array("d", [1, 2]),
    [1, 2.5],
    [1, 2**63],
    [1, None],
    [[1], [2]],
    {1, 2},
    b"ab",
    bytearray(b"ab"),
    "ab",
    None,
    3,
]


@pytest.mark.parametrize("slots", WRONG, ids=lambda one: type(one).__name__)
def test_what_is_refused_has_the_sentence_that_python_gives(slots: Any) -> None:
    cache, key = Cache(1), tokens(2, 2)
    before = cache.k.copy(), cache.v.copy()
    with pytest.raises(KvxError, match=r"^slots[\[. ]") as expected:
        SlotMapping.of(slots)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as refused:
            write_kv(cache.desc, key, key, slots)
        assert str(refused.value) == str(expected.value)
    assert np.array_equal(cache.k, before[0])
    assert np.array_equal(cache.v, before[1])


@pytest.mark.parametrize("kind", LISTS)
def test_slots_out_of_range_are_refused(kind: str) -> None:
    cache, key = Cache(1), tokens(2, 2)
    before = cache.k.copy()
    with pytest.raises(OutOfRangeError, match=r"slots\[1\] is 21, expected"):
        write_kv(cache.desc, key, key, LISTS[kind]([1, NUM_BLOCKS * BLOCK]))
    assert np.array_equal(cache.k, before)


@pytest.mark.parametrize(
    "slots",
    [[np.int64(4), 2], [True, 2], (np.int32(4), False), range(2, 4)],
)
def test_what_c_leaves_to_python_is_written_all_the_same(slots: Any) -> None:
    cache, key = Cache(1), tokens(2, 2)
    write_kv(cache.desc, key, key, slots)
    assert np.array_equal(cache.rows("k")[list(map(int, slots))], key)


def test_memory_that_is_written_must_be_writable() -> None:
    cache = Cache(1)
    closed = np.full((2, 1, 1, HEADS, DIM), LEFT, np.float32)
    closed.flags.writeable = False
    for name, out in (
        ("key", (closed[0], closed[1].copy())),
        ("value", (closed[0] + 0, closed[1])),
    ):
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match=rf"^{name} is read-only memory"):
                gather_kv(cache.desc, [[3]], [1], out=out)
    assert (closed == LEFT).all()
    write_kv(cache.desc, closed[0, 0], closed[1, 0], [5])  # which only reads them
    assert (cache.rows("k")[5] == LEFT).all()


def test_arrays_of_other_strides_and_dtypes_are_read_as_they_are(seed: int) -> None:
    """A key in half precision, transposed and reversed."""
    cache = Cache(seed)
    numbers = np.random.default_rng(seed).standard_normal((HEADS, 3, DIM)).astype(np.float16)
    key = numbers.transpose(1, 0, 2)
    plan = WritePlan(cache.desc, key, key)
    assert plan._call(key, key, [8, 1, 4]) == 0
    assert np.array_equal(cache.rows("k")[[8, 1, 4]], key.astype(np.float32))
    for wrong, sentence in (
        (key.astype(np.float64), "key.dtype is 'float64', expected"),
        (key.astype(">f2"), "key.dtype is >f2, expected native byte order"),
    ):
        with pytest.raises(UnsupportedError, match=sentence):
            plan(wrong, wrong, [8, 1, 4])


def test_a_list_that_changes_between_calls_is_read_anew() -> None:
    src, dst = Cache(1), Cache(2)
    before, here, there = dst.k.copy(), src.view.at([[1, 2]]), dst.view.at([[3, 4]])
    lens, slots, key = [1], [0], tokens(3, 1)
    for length in (1, 2, 4, 6):
        lens[0] = length
        dst.k[:] = before
        migrate(here, there, lens)
        moved = dst.k[[3, 4]].reshape(-1, HEADS, DIM)
        assert np.array_equal(moved[:length], src.k[[1, 2]].reshape(-1, HEADS, DIM)[:length])
        assert np.array_equal(moved[length:], before[[3, 4]].reshape(-1, HEADS, DIM)[length:])
        slots[0] = length
        write_kv(src.desc, key, key, slots)
        assert np.array_equal(src.rows("k")[length], key[0])
        assert not np.array_equal(src.rows("k")[length + 1], key[0])


def test_an_array_at_the_address_of_one_that_is_gone_is_read_as_what_it_is() -> None:
    cache, key, memory = Cache(1), tokens(2, 4), np.zeros(4, np.int64)
    for slots in (
        np.ndarray(1, np.int64, memory),
        np.ndarray(2, np.int32, memory),
        np.ndarray(4, np.int64, memory),
        np.ndarray(0, np.int32, memory),
    ):
        cache.rows("k").fill(LEFT)
        slots[:] = np.arange(len(slots)) + 3
        write_kv(cache.desc, key[: len(slots)], key[: len(slots)], slots)
        assert np.array_equal(cache.rows("k")[3 : 3 + len(slots)], key[: len(slots)])
        assert np.count_nonzero((cache.rows("k") != LEFT).any((1, 2))) == len(slots)


@pytest.mark.parametrize("nothing", [[], (), np.zeros(0, np.int64), np.zeros(0, np.int32)])
def test_nothing_may_be_given(nothing: Any) -> None:
    cache, key = Cache(1), tokens(2, 0)
    before = cache.k.copy()
    write_kv(cache.desc, key, key, nothing)
    out = np.full((2, 0, 3, HEADS, DIM), LEFT, np.float32)
    gather_kv(cache.desc, np.zeros((0, 2), np.int64), nothing, out=tuple(out))
    gather_kv(cache.desc, [], nothing, out=tuple(out))
    dst = Cache(2)
    assert migrate(cache.view.at([]), dst.view.at([]), nothing) == 0
    assert np.array_equal(cache.k, before)


def test_a_call_keeps_nothing_that_it_has_read() -> None:
    cache, key = Cache(1), tokens(2, 3)
    slots, wrong, buffer = np.arange(3), np.arange(3.0), array.array("q", [1, 2, 3])
    numbers = [10**9, 2 * 10**9]
    table, lens = np.array([[1, 2]]), np.array([4])
    out = np.zeros((1, 4, HEADS, DIM), np.float32), np.zeros((1, 4, HEADS, DIM), np.float32)
    every = [key, slots, wrong, buffer, numbers, numbers[0], table, lens, *out]
    counts = [sys.getrefcount(one) for one in every]
    for _ in range(50):
        write_kv(cache.desc, key, key, slots)
        write_kv(cache.desc, key, key, buffer)
        gather_kv(cache.desc, table, lens, out=out)
        with pytest.raises(KvxError):
            write_kv(cache.desc, key, key, wrong)
        with pytest.raises(KvxError):
            write_kv(cache.desc, key, key, numbers)
    gc.collect()
    assert [sys.getrefcount(one) for one in every] == counts
    buffer.append(4)  # refused while a buffer is lent
    slots.resize(5, refcheck=False)


def test_threads_share_a_plan_and_have_numbers_of_their_own() -> None:
    cache, failed = Cache(1), list[BaseException]()
    key = tokens(2, 1)
    plan = WritePlan(cache.desc, key, key)

    def work(slot: int) -> None:
        try:
            mine = np.full_like(key, slot)
            for i in range(2000):
                numbers: Any = [slot] if i % 2 else np.array([slot])
                plan(mine, mine, numbers)
                assert (cache.rows("k")[slot] == slot).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_layers_are_written_from_arrays() -> None:
    caches = [Cache(i) for i in range(6)]
    keys = [tokens(10 + i, 2) for i in range(6)]  # more buffers than a call can hold
    plan = WriteLayersPlan([cache.desc for cache in caches])
    for count, numbers in ((6, [4, 7]), (6, np.array([4, 7], np.int32)), (6, (4, 7))):
        for cache in caches:
            cache.rows("k").fill(LEFT)
        plan(keys[:count], keys[:count], numbers)
        for cache, key in zip(caches, keys, strict=True):
            assert np.array_equal(cache.rows("k")[[4, 7]], key)
            assert np.array_equal(cache.rows("v")[[4, 7]], key)
            assert np.count_nonzero((cache.rows("k") != LEFT).any((1, 2))) == 2


@pytest.mark.parametrize("reads_torch", [True, False])
def test_a_cache_that_has_moved_is_refused_whatever_the_numbers_are(
    reads_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where C reads no torch tensor, and could not see that the storage is another one."""
    if not reads_torch:
        monkeypatch.setattr("kvx_core._c.bound._torch_reader", lambda: None)
    cache, other = Cache(1), Cache(2)
    key, out = tokens(2, 1), tuple(np.zeros((2, 1, 1, HEADS, DIM), np.float32))
    src, dst = cache.view.at([[0]]), other.view.at([[0]])
    plan = Plan.migrate(src, dst, [1])
    for _ in range(2):
        write_kv(cache.desc, key, key, np.array([1]))
        gather_kv(cache.desc, [[0]], [1], out=out)
        migrate(src, dst, [1])
        plan.run([1])
    owner: Any = cache.desc.k.owner
    owner.set_(torch.zeros_like(owner).untyped_storage(), 0, owner.shape)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"^cache\.k describes memory"):
            write_kv(cache.desc, key, key, np.array([1]))
        with pytest.raises(InvalidArgumentError, match=r"^cache\.k describes memory"):
            gather_kv(cache.desc, [[0]], [1], out=out)
        for call in (lambda: migrate(src, dst, [1]), lambda: plan.run([1])):
            with pytest.raises(
                InvalidArgumentError, match=r"^src\.layers\[0\]\.k describes memory"
            ):
                call()


WITHOUT_TORCH = """
import sys
import numpy as np
from kvx_core import CacheDesc, CacheFacts, CacheView, WritePlan, GatherPlan, Plan, describe
k = np.zeros((3, 4, 1, 8), np.float32)
cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"))
key = np.ones((1, 1, 8), np.float32)
assert WritePlan(cache, key, None)._call(key, None, [5]) == 0
out = np.zeros((1, 4, 1, 8), np.float32)
assert GatherPlan(cache, out, None)._call(out, None, [[1]], np.array([4])) == 0
view = CacheView((cache,), CacheFacts())
plan = Plan.migrate(view.at([]), view.at([]), same_model=True)
assert plan._call([4], [[1]], None, None, np.array([[2]]), None, None, None) >= 0
assert "torch" not in sys.modules
print(out[0, :, 0, 0].tolist(), k[2, :, 0, 0].tolist())
"""


def test_a_process_without_torch_reads_arrays_in_c() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "[0.0, 1.0, 0.0, 0.0] [0.0, 1.0, 0.0, 0.0]\n"
