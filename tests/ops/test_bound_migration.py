"""Repeated migrations: what Python keeps, what every call checks, and its cost."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import timeit
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    KvxError,
    OutOfRangeError,
    Plan,
    ScaleDesc,
    SeqLens,
    UnsupportedError,
    describe,
    migrate,
)
from kvx_core._c import bound
from kvx_core.ops import bound_migration
from tests.facts import SAME_MODEL

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 7, 4, 3, 5
ROW_BYTES = HEADS * DIM * 4


class End:
    """Two layers of float32, and where two sequences lie in them."""

    def __init__(self, layout: str, seed: int, facts: CacheFacts = SAME_MODEL) -> None:
        self.layout = layout
        shape = {
            "BLOCK_NHD": (2, 2, NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM),
            "BLOCK_HND": (2, 2, NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM),
        }[layout]
        self.all = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        layers = [
            CacheDesc.from_kv(*(describe(t, layout) for t in pair.unbind(0))) for pair in self.all
        ]
        self.view = CacheView(tuple(layers), facts)
        self.blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed))
        self.span = self.view.at(self.blocks[:4].view(2, 2))

    def tokens(self) -> torch.Tensor:
        """A view: (layers, K and V, num_blocks, block_size, heads, dim)."""
        return self.all.transpose(3, 4) if self.layout == "BLOCK_HND" else self.all


def expected(src: End, dst: End, lens: list[int]) -> torch.Tensor:
    """What `dst` holds after the migration, token by token."""
    after = dst.tokens().clone()
    for s, length in enumerate(lens):
        for i in range(length):
            block, at = divmod(i, BLOCK_SIZE)
            from_, to = (int(end.blocks[2 * s + block]) for end in (src, dst))
            after[:, :, to, at] = src.tokens()[:, :, from_, at]
    return after


def kept_by(view: CacheView) -> dict[Any, bound_migration.BoundMigration]:
    """What is kept for migrations from a view or into it."""
    return {
        key: one[2]
        for key, one in bound_migration._kept.items()
        if any(view is known() for known in one[:2])
    }


@pytest.fixture(params=["DLPack", "no DLPack"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are read in C, or, as without the exchange API, described in Python."""
    if request.param == "no DLPack":
        monkeypatch.setattr("kvx_core._c.bound._torch_reader", lambda: None)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_call_moves_the_lengths_that_it_is_given(seed: int) -> None:
    src, dst = End("BLOCK_NHD", seed), End("BLOCK_HND", seed + 10)
    kinds: list[Callable[[list[int]], Any]] = [
        torch.tensor,
        lambda lens: torch.tensor(lens, dtype=torch.int32),
        list,
        np.array,
        SeqLens.of,
        torch.tensor,
    ]
    for kind, lens in zip(kinds, ([3, 1], [8, 0], [0, 5], [1, 1], [7, 8], [0, 0]), strict=True):
        src.all += 1
        after = expected(src, dst, lens)
        assert migrate(src.span, dst.span, kind(lens)) == sum(lens) * 4 * ROW_BYTES
        assert torch.equal(dst.tokens(), after)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_two_views_by_tables_and_by_slots(seed: int) -> None:
    """What is kept for one kind of lookup serves no other, in any order."""
    src, dst = End("BLOCK_NHD", seed), End("BLOCK_HND", seed + 10)

    def lookups(end: End) -> dict[str, Any]:
        slots = end.blocks[:4].view(2, 2, 1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        named = torch.cat([slots[0].flatten()[:7], slots[1].flatten()[:5]])
        ragged = BlockTable.ragged(named // BLOCK_SIZE, [0, 7, 12])
        dense = replace(end.view, dense=True)
        return {
            "table": end.span,
            "slots": end.view.at(slots=named),
            "ragged": end.view.at(ragged),
            "ring": end.view.at(BlockTable.ring(end.blocks[:4].view(2, 2))),
            "dense": dense.at([[int(b) for b in row] for row in end.blocks[:4].view(2, 2)]),
        }

    pairs = list(itertools.product(lookups(src).values(), lookups(dst).values())) * 2
    random.Random(seed).shuffle(pairs)
    for one, other in pairs:
        src.all += 1
        after = expected(src, dst, [7, 5])
        assert migrate(one, other, [7, 5]) == 12 * 4 * ROW_BYTES
        assert torch.equal(dst.tokens(), after)


@pytest.mark.usefixtures("reader")
def test_what_is_kept_is_of_these_options_only() -> None:
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_HND", 2)
    lens = torch.tensor([2, 0])
    for _ in range(2):
        before = dst.all.clone()
        assert migrate(src.span, dst.span, lens, num_heads=1) == 2 * 4 * DIM * 4
        assert torch.equal(dst.all[:, :, :, 1:], before[:, :, :, 1:])
        assert migrate(src.span, dst.span, lens, zero_fill=True) == 2 * 4 * ROW_BYTES
        for wrong, options in (
            ("num_heads is True", {"num_heads": True}),
            ("zero_fill is 1", {"zero_fill": 1}),
            ("find_scales is 0", {"find_scales": 0}),
            ("transfer is 0", {"transfer": 0}),
            ("same_model is 1", {"same_model": 1}),
            ("stream is 'x'", {"stream": "x"}),
        ):
            with pytest.raises(InvalidArgumentError, match=wrong):
                migrate(src.span, dst.span, lens, **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("reader")
def test_every_call_is_refused_for_what_is_wrong_with_it() -> None:
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_HND", 2)
    good = torch.tensor([2, 3])
    wrong: list[tuple[Any, type[KvxError], str]] = [
        (torch.tensor([2, 9]), OutOfRangeError, r"row 1 needs tokens \[0, 0 \+ 9\), but"),
        (torch.tensor([-1, 9]), OutOfRangeError, r"lengths\[0\] is -1, expected at least 0"),
        (torch.tensor([2**62, 2**62]), OutOfRangeError, r"row 0 needs tokens"),
        (torch.tensor([1, 1, 1]), InvalidArgumentError, "expected"),
        (torch.tensor([1.0, 1.0]), InvalidArgumentError, "seq_lens.dtype is float32, expected"),
        (torch.tensor([[1, 1]]), InvalidArgumentError, "seq_lens.ndim is 2, expected 1"),
        (torch.tensor([1, 9, 1, 9])[::2], InvalidArgumentError, r"seq_lens.stride is \(2,\)"),
        (torch._neg_view(torch.tensor([1, 1])), UnsupportedError, r"seq_lens.is_neg\(\) is True"),
        (None, InvalidArgumentError, "seq_lens is None, expected a tensor of int32 or int64"),
        ([1, 2.5], InvalidArgumentError, r"seq_lens\[1\] is 2.5, expected an integer of 64 bits"),
    ]
    for lens, error, sentence in wrong:
        migrate(src.span, dst.span, good)
        before = dst.all.clone()
        with pytest.raises(error, match=sentence):
            migrate(src.span, dst.span, lens)
        assert torch.equal(dst.all, before)
    with pytest.raises(InvalidArgumentError, match="dst is 3, expected a CacheView"):
        migrate(src.span, 3, good)  # type: ignore[arg-type]


@pytest.mark.usefixtures("reader")
def test_facts_are_compared_for_every_pair() -> None:
    """That a copy was right between two ends says nothing of others, nor of another same_model."""
    unknown = CacheFacts()
    src, dst, other = (End("BLOCK_NHD", seed, unknown) for seed in range(3))
    lens = torch.tensor([1, 1])
    for _ in range(2):
        assert migrate(src.span, dst.span, lens, same_model=True)
        for pair in ((src, dst), (src, other), (dst, src)):
            with pytest.raises(FactsMismatchError, match="fingerprint is unknown"):
                migrate(pair[0].span, pair[1].span, lens)


@pytest.mark.usefixtures("reader")
def test_every_call_reorders_the_dims_of_k_that_the_first_one_did() -> None:
    half = replace(SAME_MODEL, rotary="half", rotary_dim=4, rope_applied=True, hadamard=False)
    src, dst = End("BLOCK_NHD", 1, half), End("BLOCK_HND", 2, replace(half, rotary="interleaved"))
    for lens in ([3, 1], [8, 0], [0, 5]):
        src.all += 1
        after = expected(src, dst, lens)
        moved = after != dst.tokens()
        after[:, 0, ..., :4] = after[:, 0, ..., [0, 2, 1, 3]]  # half: 0 1 pair with 2 3
        after = torch.where(moved.any(-1, keepdim=True), after, dst.tokens())
        assert migrate(src.span, dst.span, torch.tensor(lens)) == sum(lens) * 4 * ROW_BYTES
        assert torch.equal(dst.tokens(), after)
    wrong = replace(src.view, facts=replace(half, rope_applied=None)).at([[0, 1], [2, 3]])
    with pytest.raises(FactsMismatchError, match="rope_applied"):
        migrate(wrong, dst.span, torch.tensor([1, 1]))


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("end", ["src", "dst"])
def test_memory_that_moves_between_calls_is_refused(end: str) -> None:
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_NHD", 2)
    lens = torch.tensor([2, 3])
    migrate(src.span, dst.span, lens)
    moved = {"src": src, "dst": dst}[end]
    moved.all.untyped_storage().resize_(64)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=rf"^{end}\.layers\[0\]\.k describes memory"):
            migrate(src.span, dst.span, lens)


@pytest.mark.usefixtures("reader")
def test_memory_that_is_still_there_is_bound_anew() -> None:
    """A storage that now is longer, in the same place, holds what was described."""
    memory = np.zeros((3, NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM), np.float32)
    k, v = torch.from_numpy(memory[:1])[0], torch.from_numpy(memory[1:2])[0]
    view = CacheView(
        (CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")),), SAME_MODEL
    )
    src, dst = view.at([[0]]), view.at([[3]])
    memory[0, 0], memory[1, 0] = 5, 6
    for length in (1, 2, 3, 4):
        if length == 2:
            for half, start in ((k, 0), (v, k.numel())):
                longer = torch.from_numpy(memory[:2] if half is k else memory)
                half.set_(longer.untyped_storage(), start, half.shape)
            assert k.untyped_storage().nbytes() == 2 * memory[0].nbytes
        before = kept_by(view)
        assert migrate(src, dst, torch.tensor([length])) == 2 * length * ROW_BYTES
        assert (memory[0, 3, :length] == 5).all()
        assert (memory[1, 3, :length] == 6).all()
        assert not memory[:2, 3, length:].any()
        assert (before == kept_by(view)) == (length > 2)  # 2: bound anew


def test_read_only_ends_and_scales_are_never_written() -> None:
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_NHD", 2)
    shape = (NUM_BLOCKS, BLOCK_SIZE, HEADS)
    scales = np.zeros(shape, np.float32)
    scales.flags.writeable = False
    fp8 = torch.zeros(*shape, DIM, dtype=torch.float8_e4m3fn)
    layers = tuple(CacheDesc.from_kv(describe(fp8.clone(), "BLOCK_NHD")) for _ in range(2))
    found = ScaleDesc.of(scales, "PER_TOKEN_HEAD")
    into = CacheView(layers, SAME_MODEL, k_scales=(found, found)).at([[0, 1], [2, 3]])
    only_k = CacheView(tuple(replace(la, v=None) for la in src.view.layers), SAME_MODEL)
    lens = torch.tensor([1, 1])
    for _ in range(2):
        migrate(src.span, dst.span, lens)
        with pytest.raises(InvalidArgumentError, match=r"dst\.k_scales\[0\] is read-only memory"):
            migrate(only_k.at([[0, 1], [2, 3]]), into, lens, find_scales=True)
    closed = replace(dst.view.layers[1], k=replace(dst.view.layers[1].k, writable=False))
    span = replace(dst.view, layers=(dst.view.layers[0], closed)).at([[0, 1], [2, 3]])
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"dst\.layers\[1\]\.k is read-only memory"):
            migrate(src.span, span, lens)
    assert not scales.any()


def test_nothing_is_kept_of_an_end_that_is_gone() -> None:
    """Neither end keeps the other alive, and no garbage collection is needed."""
    gc.disable()
    try:
        src = End("BLOCK_NHD", 1)
        for seed in range(2, 5):
            dst = End("BLOCK_HND", seed)
            migrate(src.span, dst.span, torch.tensor([1, 2]))
            migrate(dst.span, src.span, torch.tensor([1, 2]))
            memory = weakref.ref(dst.view.layers[0].k.owner)
            assert len(kept_by(src.view)) == 2
            del dst
            assert memory() is None
            assert not kept_by(src.view)
        dst = End("BLOCK_HND", 9)
        migrate(src.span, dst.span, torch.tensor([1, 2]))
        memory = weakref.ref(src.view.layers[0].k.owner)
        del src
        assert memory() is None
    finally:
        gc.enable()


def test_what_is_kept_is_bounded() -> None:
    src = End("BLOCK_NHD", 1)
    ends = [End("BLOCK_HND", seed) for seed in range(2, 100)]
    for dst in ends:
        after = expected(src, dst, [2, 5])
        migrate(src.span, dst.span, torch.tensor([2, 5]))
        assert torch.equal(dst.tokens(), after)
        assert len(bound_migration._kept) <= 64
    assert len(kept_by(src.view)) == 64


def test_a_new_span_of_a_known_view_takes_what_is_kept() -> None:
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_NHD", 2)
    migrate(src.span, dst.span, torch.tensor([1, 1]))
    before = kept_by(src.view)
    for order in ([0, 1, 2, 3], [6, 5, 4, 3], [2, 6, 0, 1]):
        for kind in (torch.tensor, np.array, list):
            src.all += 1
            src.blocks, dst.blocks = torch.tensor(order), torch.tensor(order[::-1])
            after = expected(src, dst, [7, 3])
            here = src.view.at(kind([order[:2], order[2:]]))  # type: ignore[operator]
            there = dst.view.at(kind([order[:1:-1], order[1::-1]]))  # type: ignore[operator]
            migrate(here, there, [7, 3])
            assert torch.equal(dst.tokens(), after)
    assert kept_by(src.view) == before
    moved = replace(src.span, head_start=1)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"src\.head_start is 1"):
            migrate(moved, dst.span, torch.tensor([1, 1]), num_heads=3)
    assert kept_by(src.view) == before


def test_a_view_at_the_address_of_one_that_is_gone_is_another() -> None:
    """Objects of one size take each other's place: what was kept for the first is not found."""
    src, seen = End("BLOCK_NHD", 1), set()
    for seed in range(2, 40):
        dst = End("BLOCK_HND" if seed % 2 else "BLOCK_NHD", seed)
        after = expected(src, dst, [4, 6])
        migrate(src.span, dst.span, [4, 6])
        assert torch.equal(dst.tokens(), after)
        seen.add(id(dst.view))
        del dst
    assert len(seen) < 38


def test_a_table_that_has_moved_is_refused() -> None:
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_HND", 2)
    table = torch.tensor([[0, 1], [2, 3]])
    span = src.view.at(table)
    for _ in range(2):
        migrate(span, dst.span, [1, 2])
    before = dst.all.clone()
    table.set_(torch.tensor([[4, 5], [6, 0]]).untyped_storage(), 0, (2, 2))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"^src\.block_table\.indices describes mem"):
            migrate(span, dst.span, [1, 2])
        with pytest.raises(InvalidArgumentError, match=r"^dst\.block_table\.indices describes mem"):
            migrate(dst.span, span, [1, 2])
    assert torch.equal(dst.all, before)


def test_an_engine_is_asked_by_every_call() -> None:
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_NHD", 2)
    reasons: list[str | None] = [None] * 5 + ["it has grown"]
    watched = replace(dst.view, outdated=lambda: reasons.pop(0)).at([[0, 1], [2, 3]])
    for _ in range(5):
        migrate(src.span, watched, torch.tensor([1, 1]))
    with pytest.raises(InvalidArgumentError, match="dst is out of date: it has grown"):
        migrate(src.span, watched, torch.tensor([1, 1]))
    assert not reasons


def test_threads_share_two_ends() -> None:
    src = End("BLOCK_NHD", 1)
    ends = [End("BLOCK_HND", seed) for seed in range(2, 6)]
    failed: list[BaseException] = []

    def work(dst: End) -> None:
        try:
            for i in range(200):
                lens = [i % 9, (3 * i) % 9]
                after = expected(src, dst, lens) if i % 50 == 0 else None
                migrate(src.span, dst.span, torch.tensor(lens))
                assert after is None or torch.equal(dst.tokens(), after)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(dst,)) for dst in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_lengths_are_read_in_c_and_cost_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two to three on a quiet machine; the bound leaves room for a slow and busy one."""
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_HND", 2)
    lens = torch.tensor([2, 2])

    def best(lengths: Any) -> float:
        timer = timeit.Timer(lambda: migrate(src.span, dst.span, lengths))
        timer.timeit(50)
        return min(timer.repeat(40, 50)) / 50

    for lengths in (lens, lens.numpy(), [2, 2]):
        assert best(lengths) < 10e-6
    monkeypatch.setattr(bound, "_torch_type", lambda: 1 / 0)  # nothing is bound by another call
    migrate(src.span, dst.span, lens)


def test_layers_that_share_memory_are_refused_however_the_plan_was_made() -> None:
    """A plan of no sequences has not broken the rule; its first run that has some would."""
    src, dst = End("BLOCK_NHD", 1), End("BLOCK_NHD", 2)
    view = replace(dst.view, layers=(dst.view.layers[0],) * 2)
    before = dst.all.clone()
    plan = Plan.migrate(src.view.at([]), view.at([]))
    plan.run([], src_block_table=[], dst_block_table=[])
    sentence = r"^dst\.layers\[1\]\.k\.data is that of layers\[0\], expected layers of their own"
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=sentence):
            plan.run([1], src_block_table=[[0]], dst_block_table=[[1]])
        with pytest.raises(InvalidArgumentError, match=sentence):
            migrate(src.view.at([[0]]), view.at([[1]]), [1])
        assert migrate(src.view.at([]), view.at([]), []) == 0
    assert torch.equal(dst.all, before)


def test_scales_of_all_layers_are_kept_apart_from_the_destination() -> None:
    """Of the second layer too, although a run of a plan checks lookups with the first alone."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, HEADS)
    memory = torch.zeros(2, *shape, DIM)
    layers = tuple(CacheDesc.from_kv(describe(k, "BLOCK_NHD")) for k in memory)
    fp8 = torch.zeros(2, *shape, DIM, dtype=torch.float8_e4m3fn)
    from_layers = tuple(CacheDesc.from_kv(describe(k, "BLOCK_NHD")) for k in fp8)
    apart = ScaleDesc.of(torch.ones(shape), "PER_TOKEN_HEAD")
    inside = ScaleDesc.of(memory[1].flatten()[: shape[0] * 12].view(shape), "PER_TOKEN_HEAD")
    src = CacheView(from_layers, SAME_MODEL, k_scales=(apart, inside))
    dst = CacheView(layers, SAME_MODEL)
    plan = Plan.migrate(src.at([]), dst.at([]))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"src\.k_scales\[1\]"):
            migrate(src.at([[0]]), dst.at([[1]]), [1])
        with pytest.raises(InvalidArgumentError, match=r"src\.k_scales\[1\]"):
            plan.run([1], src_block_table=[[0]], dst_block_table=[[1]])
    assert not memory.any()
