"""Arrays of a call that lie anywhere in one allocation: a call is refused and writes nothing, or it
leaves what a call would that had read everything before it wrote.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Plan,
    describe,
    gather_kv,
    migrate,
    write_kv,
)

FACTS = CacheFacts(fingerprint="a model", rotary="none", rotary_dim=0, rope_applied=True)
ROOM = 240
Place = tuple[int, ...]


def window(rng: random.Random, memory: Tensor, shape: Place) -> Tensor:
    """A view of `shape` that begins anywhere, with NHD or HND strides and some gaps."""
    order = rng.choice([(0, 1, 2, 3), (0, 2, 1, 3)])
    strides, step = [0] * 4, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + rng.choice([0, 0, 1])
    last = sum(stride * (extent - 1) for stride, extent in zip(strides, shape, strict=True))
    return memory.as_strided(shape, strides, rng.randrange(ROOM - last))


def cache(k: Tensor, v: Tensor) -> CacheDesc:
    axes = ("block", "token", "head", "dim")
    return CacheDesc.from_kv(describe(k, axes), describe(v, axes))


@pytest.mark.parametrize("call", ["migrate", "plan", "write", "gather"])
def test_calls_in_one_allocation(call: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        rng = random.Random(f"{call} {seed}")
        memory = torch.arange(float(ROOM))
        sizes = rng.choice([1, 2]), rng.choice([2, 4])  # heads, dims
        count, size = rng.randint(1, 4), rng.choice([1, 2, 3])  # tokens, block size
        blocks = -(-count // size)
        shape = blocks + rng.randint(0, 2), size, *sizes
        halves = [window(rng, memory, shape) for _ in range(2)]
        table = rng.sample(range(shape[0]), blocks)
        dense = [window(rng, memory, (1, count, *sizes)) for _ in range(2)]
        at = [(table[t // size], t % size) for t in range(count)]
        rows = [(0, t) for t in range(count)]
        before = memory.clone()
        try:
            paged = cache(*halves)
            if call == "gather":
                gather_kv(paged, [table], [count], out=(dense[0], dense[1]))
            elif call == "write":
                key, value = dense[0][0], dense[1][0]
                write_kv(paged, key, value, [b * size + offset for b, offset in at])
            else:
                src = CacheView((cache(*dense),), FACTS, dense=True)
                dst = CacheView((paged,), FACTS).at([table])
                if call == "plan":
                    with Plan.migrate(src, dst, [count]) as plan:
                        plan.run()
                else:
                    migrate(src, dst, [count])
        except InvalidArgumentError:
            assert torch.equal(memory, before)
            seen["refused"] += 1
            continue
        to_cache = call != "gather"
        ends = (dense, halves) if to_cache else (halves, dense)
        expected, written = before.clone(), torch.zeros(ROOM, dtype=torch.int32)
        for source, target in zip(*ends, strict=True):
            here, there, times = (
                of.as_strided(t.shape, t.stride(), t.storage_offset())
                for of, t in ((before, source), (expected, target), (written, target))
            )
            for read, write in zip(*((rows, at) if to_cache else (at, rows)), strict=True):
                there[write] = here[read]
                times[write] += 1
        assert written.max() <= 1, f"seed {seed}: a place is written twice"
        assert torch.equal(memory, expected), f"seed {seed}"
        seen["done"] += 1
    assert min(seen["refused"], seen["done"]) > 10, seen


def test_the_generator_makes_windows_that_meet_and_that_do_not() -> None:
    rng, memory = random.Random(0), torch.arange(float(ROOM))
    pairs = [
        [set(window(rng, memory, (2, 2, 1, 2)).flatten().tolist()) for _ in "kv"] for _ in range(99)
    ]
    assert {bool(a & b) for a, b in pairs} == {False, True}
    assert all(len(each) == 8 for each in itertools.chain(*pairs))
