"""Requests, blocks and steps of DeepSeek-V4's caches: manager, prepare_forward and handle."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvx_core import InternalError, InvalidArgumentError
from kvx_core.hybrid import (
    AttentionType,
    DSV4Config,
    KVCacheManager,
    OutOfBlocksError,
    capturing,
    compress_csa,
    compress_hca,
    compute_block_budget,
    prepare_forward,
)
from tests.hybrid.models import SMALL, layers, manager, tokens, weights

SWA, CSA, HCA = 0, 1, 2  # layers of `manager`


def check(caches: KVCacheManager) -> None:
    """Every block is free or held by one request, and tables show who holds it."""
    for layer, allocator in caches.allocators.items():
        if allocator is None:
            continue
        held = {slot: caches.held_blocks(layer, slot) for slot in caches.requests}
        ids = [block for blocks in held.values() for block in blocks]
        assert len(ids) == len(set(ids)) == allocator.num_held
        assert allocator.num_free + len(ids) == allocator.num_blocks
        free = allocator.free_ids[: allocator.num_free].tolist()
        assert sorted(ids + free) == list(range(allocator.num_blocks))
        table, lens = caches.block_tables[layer], caches.block_lens[layer]
        assert table is not None
        assert lens is not None
        for slot in range(caches.max_requests):
            blocks = held.get(slot, [])
            assert table[slot].tolist() == blocks + [-1] * (table.shape[1] - len(blocks))
            assert int(lens[slot]) == len(blocks)


# --- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "csa", "hca"),
    [
        (0, 3, (0, 0, 3), (0, 0, 3)),
        (0, 4, (1, 1, 0), (0, 0, 4)),
        (4, 8, (1, 0, 0), (0, 0, 8)),
        (0, 127, (31, 1, 3), (0, 0, 127)),
        (0, 128, (32, 1, 0), (1, 1, 0)),
        (0, 131, (32, 1, 3), (1, 1, 3)),
        (0, 132, (33, 2, 0), (1, 1, 4)),
        (127, 128, (1, 0, 0), (1, 1, 0)),
        (128, 132, (1, 1, 0), (0, 0, 4)),
        (131, 132, (1, 1, 0), (0, 0, 4)),
        (255, 256, (1, 0, 0), (1, 1, 0)),
        (256, 260, (1, 1, 0), (0, 0, 4)),
        (0, 1000, (250, 8, 0), (7, 7, 104)),
        (1000, 1001, (0, 0, 1), (0, 0, 105)),
        (0, 4096, (1024, 32, 0), (32, 32, 0)),
    ],
)
def test_entries_and_blocks_of_a_step(
    before: int, after: int, csa: tuple[int, int, int], hca: tuple[int, int, int]
) -> None:
    """Token counts before and after: new entries, new blocks, tokens left in the tail."""
    caches = manager(1, 4096)
    slot = caches.admit_request()
    prepare_forward(caches, [slot], [0], [before])
    found = prepare_forward(caches, [slot], [before], [after])
    for layer, wanted in ((SWA, (0, 0, 0)), (CSA, csa), (HCA, hca), (3, csa)):
        got = found.new_entries[layer], found.new_blocks[layer], found.tail_lens[layer]
        assert got == tuple([number] for number in wanted), layer
    again = prepare_forward(caches, [slot], [before], [after])
    assert again == prepare_forward(caches, [slot], [before], [after]) != (before, after)
    assert again.new_blocks == {layer: [0] for layer in range(4)}
    check(caches)


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_any_size_take_the_same_blocks(seed: int) -> None:
    rng = random.Random(seed)
    whole, parts = manager(1, 2000), manager(1, 2000)
    last = rng.randrange(1, 2000)
    slots = whole.admit_request(), parts.admit_request()
    wanted = prepare_forward(whole, [slots[0]], [0], [last])
    cuts = [0, *sorted(rng.randrange(last + 1) for _ in range(20)), last]
    found = [prepare_forward(parts, [slots[1]], [a], [b]) for a, b in pairwise(cuts)]
    for layer in range(4):
        assert sum(f.new_blocks[layer][0] for f in found) == wanted.new_blocks[layer][0]
        assert sum(f.new_entries[layer][0] for f in found) == wanted.new_entries[layer][0]
    check(parts)


def test_a_step_says_which_tokens_it_brings() -> None:
    caches = manager()
    first, second = caches.admit_request(), caches.admit_request()
    prepare_forward(caches, [first], [0], [7])
    prepare_forward(caches, [second, first], [0, 7], [1, 8])
    assert caches.step.one_each
    prepare_forward(caches, [second, first], [0, 7], [2, 8])
    assert not caches.step.one_each  # else a kernel may give both tokens of `second` one place
    handle = caches.acquire(CSA)
    assert handle.request_slots.tolist() == [second, first]
    assert handle.positions.tolist() == [0, 1, 7]
    assert handle.request_ids.tolist() == [0, 0, 1]
    assert caches.step.token_slots.tolist() == [second, second, first]
    assert handle.read_classical_view().valid_lens.tolist() == [2, 0, 0]
    assert caches.step.compression[4].most_entries == 1
    flush = caches.step.compression[4].flush
    assert flush.valid_mask.tolist() == [True, False, False]
    assert flush.entry_ids.tolist() == [1, 0, 0]
    assert flush.positions.tolist() == [4, 0, 0]


def test_a_step_is_all_or_nothing() -> None:
    """One layer of four has too few blocks: no layer's are taken, and the step stays."""
    caches = manager(2, 1024, csa=16, hca=1)
    slot, other = caches.admit_request(), caches.admit_request()
    prepare_forward(caches, [slot], [0], [128])
    before = caches.step.positions.tolist(), caches.held_blocks(CSA, slot)
    with pytest.raises(
        OutOfBlocksError, match="HCA layer 2: requested 3 blocks, available 0, total 1"
    ):
        prepare_forward(caches, [slot, other], [128, 0], [256, 256])
    assert (caches.step.positions.tolist(), caches.held_blocks(CSA, slot)) == before
    assert caches.held_blocks(CSA, other) == caches.held_blocks(3, other) == []
    check(caches)
    prepare_forward(caches, [slot, other], [128, 0], [255, 127])
    check(caches)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (([0], [0], [1, 2]), "num_tokens_after has 2 numbers, expected 1, one per request"),
        (([0], 0, [1]), "num_tokens_before is 0, expected a list or tuple of integers"),
        (([0, 0], [0, 0], [1, 1]), r"request_slots is \[0, 0\], expected each slot once"),
        (([2], [0], [1]), r"request_slots\[0\] is 2, which no request has"),
        (([0], [5], [4]), r"num_tokens_after\[0\] is 4, expected at least 5"),
        (([0], [0], [1025]), r"num_tokens_after\[0\] is 1025, expected 0 to 1024"),
        (
            ([0], [4], [5]),
            r"num_tokens_before\[0\] is 4, and the last step of slot 0 had 0 tokens after it, "
            "expected 0: tokens come step by step",
        ),
        (([0, 1], [0, 0], [400, 400]), "the step brings 800 tokens, expected at most 512"),
    ],
)
def test_steps_that_are_refused(args: tuple[Any, Any, Any], says: str) -> None:
    caches = manager(max_tokens_per_step=512)
    caches.admit_request()
    caches.admit_request()
    with pytest.raises(InvalidArgumentError, match=says):
        prepare_forward(caches, *args)
    check(caches)
    assert all(a is None or a.num_held == 0 for a in caches.allocators.values())
    assert caches.step.spans == []


def test_a_step_follows_the_last_one_or_repeats_it() -> None:
    """Gaps and overlaps lie within blocks that the request has: nothing else would notice them."""
    caches = manager(2)
    slot, other = caches.admit_request(), caches.admit_request()
    prepare_forward(caches, [slot], [0], [10])
    prepare_forward(caches, [slot, other], [0, 0], [10, 3])  # the same again, and another request
    prepare_forward(caches, [slot], [10], [12])
    for before in (0, 9, 11, 13, 20):
        says = f"is {before}, .* slot {slot} had 12 tokens after it, expected 12, or 10 to repeat"
        with pytest.raises(InvalidArgumentError, match=says):
            prepare_forward(caches, [slot, other], [before, 3], [21, 4])
    assert caches.step.spans == [(slot, 10, 12)]
    prepare_forward(caches, [slot, other], [12, 3], [12, 4])  # one waits
    with pytest.raises(InvalidArgumentError, match="had 12 tokens after it, expected 12: tokens"):
        prepare_forward(caches, [slot], [10], [13])
    caches.release_request(slot)
    assert caches.admit_request() == slot
    for before in (10, 12):
        with pytest.raises(InvalidArgumentError, match="had 0 tokens after it, expected 0: tokens"):
            prepare_forward(caches, [slot], [before], [13])
    prepare_forward(caches, [other, slot], [4, 0], [5, 1])


def test_a_step_that_fails_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails: too few blocks, or memory for the step's tensors after blocks were taken."""
    caches = manager(2, 1024, csa=3, hca=3)
    slot, other = caches.admit_request(), caches.admit_request()
    prepare_forward(caches, [slot], [0], [100])
    with pytest.raises(OutOfBlocksError):
        prepare_forward(caches, [slot, other], [100, 0], [300, 200])
    prepare_forward(caches, [slot, other], [100, 0], [120, 100])

    def fails(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(caches.step), "fill", fails)
        with pytest.raises(MemoryError):
            prepare_forward(caches, [slot, other], [120, 100], [133, 101])
    check(caches)
    assert caches.num_held(CSA, slot) == 2
    prepare_forward(caches, [slot, other], [120, 100], [133, 101])
    assert caches.num_held(CSA, slot) == 2
    assert caches.step.spans == [(slot, 120, 133), (other, 100, 101)]
    check(caches)


@pytest.mark.parametrize("fails", ["index_copy_", "copy_"])
def test_a_step_that_fails_on_its_way_can_be_repeated(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fails at any operation, before or after blocks are taken."""
    caches = manager(2, 1024)
    slot, other = caches.admit_request(), caches.admit_request()
    prepare_forward(caches, [slot], [0], [100])
    held = {layer: caches.held_blocks(layer, slot) for layer in (CSA, HCA, 3)}
    whole, calls = getattr(torch.Tensor, fails), []
    for turn in range(2):

        def breaks(
            tensor: torch.Tensor, *args: object, turn: int = turn, **options: object
        ) -> object:
            calls.append(tensor)
            if len(calls) > turn:
                raise RuntimeError("the device is gone")
            return whole(tensor, *args, **options)

        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, fails, breaks)
            with pytest.raises(RuntimeError, match="the device is gone"):
                prepare_forward(caches, [slot, other], [100, 0], [260, 128])
        assert len(calls) == turn + 1
        counts = [allocator.num_held for allocator in caches.allocators.values() if allocator]
        assert counts in ([1, 0, 1], [4, 3, 4])  # none of the step's blocks, or all of them
        assert caches.held_blocks(CSA, slot)[:1] == held[CSA]
    assert prepare_forward(caches, [slot, other], [100, 0], [260, 128]).new_entries == {
        SWA: [0, 0],
        CSA: [40, 32],
        HCA: [2, 1],
        3: [40, 32],
    }
    check(caches)
    assert caches.num_held(CSA, slot) == 3
    assert caches.step.spans == [(slot, 100, 260), (other, 0, 128)]


def test_a_pass_that_ran_is_not_repeated_and_one_that_failed_is_not_passed_over() -> None:
    """Tokens would be in tails twice, or not at all, and entries of them wrong."""
    caches = manager(2, 1024)
    slot, other = caches.admit_request(), caches.admit_request()

    def run(layers: Sequence[int], num_tokens: int) -> None:
        dim = caches.schemas[CSA].nope_dim + caches.schemas[CSA].rope_dim
        rows = torch.ones(num_tokens, dim, dtype=torch.bfloat16)
        for layer in layers:
            caches.acquire(layer).write_swa(rows)

    prepare_forward(caches, [slot, other], [0, 0], [5, 3])
    prepare_forward(caches, [slot, other], [0, 0], [6, 2])  # it has not run: it may be another
    run(list(caches.schemas), 8)
    step = caches.step.spans
    for again in ([slot], [slot, other]):
        with pytest.raises(InvalidArgumentError) as caught:
            prepare_forward(caches, again, [0] * len(again), [6] * len(again))
        assert str(caught.value) == (
            f"num_tokens_before[0] is 0, and 4 of 4 layers hold the tokens 0 to 6 of the last step "
            f"of slot {slot}, expected 6, the step after it. Release the request and compute it "
            "anew if that pass has failed"
        )
    assert caches.step.spans == step
    prepare_forward(caches, [slot, other], [6, 2], [7, 3])
    run([SWA, CSA, HCA], 2)  # and then it fails
    for before in (6, 7):
        with pytest.raises(InvalidArgumentError, match="3 of 4 layers hold the tokens 6 to 7 of"):
            prepare_forward(caches, [slot], [before], [8])
    caches.release_request(slot)
    assert caches.admit_request() == slot
    prepare_forward(caches, [slot], [0], [9])
    run(list(caches.schemas), 9)
    prepare_forward(caches, [slot], [9], [10])


def test_a_compressor_that_missed_a_step_is_seen() -> None:
    """Its tail has other tokens than those of the sequence: entries after it would be wrong."""
    caches = manager(2, 1024, types=("SWA", "CSA", "HCA"))
    main, index = (weights(4, dim, True, 1) for dim in (SMALL.head_dim, SMALL.indexer_head_dim))
    whole = weights(128, SMALL.head_dim, False, 3)
    csa, hca = tokens(300, 2, 1), tokens(300, 1, 2)
    window = torch.ones(300, SMALL.head_dim, dtype=torch.bfloat16)

    def run(before: int, after: int, skipped: Sequence[int] = ()) -> None:
        for layer in (SWA, CSA, HCA):
            caches.acquire(layer).write_swa(window[before:after])
        if CSA not in skipped:
            part = csa.part(before, after)
            compress_csa(caches.acquire(CSA), *part, main, index)
        if HCA not in skipped:
            part = hca.part(before, after)
            compress_hca(caches.acquire(HCA), part.k, part.z, whole)

    other = caches.admit_request()
    prepare_forward(caches, [other], [0], [131])
    run(0, 131)
    for skipped, says in ((CSA, "tail_len of layer 1 has 0"), (HCA, "tail_len of layer 2 has 0")):
        slot = caches.admit_request()
        prepare_forward(caches, [slot], [0], [6])
        run(0, 6, [skipped])
        with pytest.raises(InvalidArgumentError, match=f"{says} waiting tokens of slot {slot}, "):
            prepare_forward(caches, [slot], [6], [7])
        caches.release_request(slot)
    slot = caches.admit_request()
    prepare_forward(caches, [slot], [0], [6])
    with pytest.raises(InvalidArgumentError, match="0 of 3 layers hold the tokens 0 to 6 of the"):
        prepare_forward(caches, [slot], [6], [7])  # whose pass never ran
    prepare_forward(caches, [slot], [0], [5])  # but may run now
    run(0, 5)
    prepare_forward(caches, [other, slot], [131, 5], [131, 7])
    run(5, 7)
    prepare_forward(caches, [other, slot], [131, 7], [132, 7])


def test_blocks_of_one_layer_alone_count_for_it_alone() -> None:
    caches = manager(2)
    slot, other = caches.admit_request(), caches.admit_request()
    taken = [caches.allocate_block(CSA, slot), caches.allocate_block(CSA, slot)]
    found = prepare_forward(caches, [other, slot], [0, 0], [256, 260])
    assert found.new_blocks == {SWA: [0, 0], CSA: [2, 1], HCA: [2, 2], 3: [2, 3]}
    assert caches.held_blocks(CSA, slot)[:2] == taken
    check(caches)
    for request in (slot, other):
        caches.release_request(request)
        check(caches)
    assert all(a is None or a.num_held == 0 for a in caches.allocators.values())
    again = caches.admit_request()
    taken = prepare_forward(caches, [again], [0], [128]).new_blocks
    assert taken == {SWA: [0], CSA: [1], HCA: [1], 3: [1]}
    assert repr(found).startswith("PreparedForward(new_entries={0: [0, 0], 1: [64, 65], ")


def test_what_a_step_costs_does_not_grow_with_layers_and_requests() -> None:
    """Calls of functions, which do not depend on how fast a machine is."""

    def calls(requests: int, num_layers: int) -> int:
        caches = manager(requests, 256, types=("CSA", "HCA") * (num_layers // 2))
        slots = [caches.admit_request() for _ in range(requests)]
        for slot in slots:
            prepare_forward(caches, [slot], [0], [127])
        count = 0

        def profile(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        prepare_forward(caches, slots, [127] * requests, [128] * requests)
        sys.setprofile(None)
        check(caches)
        assert caches.acquire(1).read_classical_view().valid_lens.tolist() == [1] * requests
        return count

    few = calls(2, 2)
    assert calls(100, 2) == calls(2, 40) == calls(100, 40) == few < 500


def test_nothing_is_taken_inside_a_capture() -> None:
    caches = manager()
    slot = caches.admit_request()
    calls: list[Callable[[], object]] = [
        lambda: prepare_forward(caches, [slot], [0], [4]),
        lambda: caches.allocate_block(CSA, slot),
        lambda: caches.release_request(slot),
    ]
    with capturing():
        for call in calls:
            with pytest.raises(RuntimeError, match="inside a captured graph"):
                call()
    assert caches.requests == [slot]
    check(caches)


# --- requests -----------------------------------------------------------------------------------


def test_slots_are_given_once_and_again() -> None:
    caches = manager(3)
    slots = [caches.admit_request() for _ in range(3)]
    assert sorted(slots) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="all 3 request slots are taken"):
        caches.admit_request()
    prepare_forward(caches, slots, [0, 0, 0], [200, 300, 400])
    for state in caches.states.values():
        state.swa_pos[slots[1]] = 5
        if state.tail_zb is not None:
            state.tail_zb[slots[1]] = 5
    caches.release_request(slots[1])
    check(caches)
    for state in caches.states.values():
        assert bool((state.swa_pos[slots[1]] == -1).all())
        assert state.tail_zb is None or bool((state.tail_zb[slots[1]] == -1e9).all())
    for wrong in (slots[1], 3, -1, "0"):
        with pytest.raises(InvalidArgumentError, match="request_slot is"):
            caches.release_request(wrong)  # type: ignore[arg-type]
    assert caches.admit_request() == slots[1]
    for slot in slots:
        caches.release_request(slot)
    assert all(a is None or a.num_held == 0 for a in caches.allocators.values())


@pytest.mark.parametrize(
    ("tokens", "layer", "blocks"), [(200, "CSA layer 1", (2, 1)), (127, "CSA layer 1", (1, 0))]
)
def test_admission_counts_the_last_block(tokens: int, layer: str, blocks: tuple[int, int]) -> None:
    """Tokens inside the last block need a block, too."""
    needed, total = blocks
    caches = manager(1, tokens, csa=total, hca=total)
    says = f"{layer}: requested {needed} blocks, available {total}, total {total}"
    with pytest.raises(OutOfBlocksError, match=says):
        caches.admit_request(tokens)
    assert caches.requests == []
    assert caches.admit_request(128 * total) == 0


@pytest.mark.parametrize(
    ("requests", "context"), [(4, 1000), (1, 127), (1, 128), (3, 129), (10, 100), (1, 3), (2, 1281)]
)
def test_pools_hold_what_the_manager_is_made_for(requests: int, context: int) -> None:
    """As many requests as it names, each as long as it names, also inside their last blocks."""
    caches = manager(requests, context)
    slots = [caches.admit_request(context) for _ in range(requests)]
    for slot in slots:
        prepare_forward(caches, [slot], [0], [context - 1])
    prepare_forward(caches, slots, [context - 1] * requests, [context] * requests)
    check(caches)
    budget = compute_block_budget(SMALL, layers("CSA", "HCA"), context, requests)
    for layer, attn in ((CSA, "csa"), (HCA, "hca")):
        pool = caches.paged[layer]
        assert pool is not None
        # As many as are needed, or the budget where it is larger.
        least = requests * caches.schemas[layer].blocks(context)
        assert pool.num_blocks == max(least, budget[attn])


def test_blocks_that_were_promised_are_not_given_to_others() -> None:
    caches = manager(2, 1024, csa=3, hca=3)
    first = caches.admit_request(256)
    second = caches.admit_request()
    with pytest.raises(OutOfBlocksError, match="requested 2 blocks, available 1, total 3"):
        prepare_forward(caches, [second], [0], [256])
    prepare_forward(caches, [second], [0], [128])
    prepare_forward(caches, [first], [0], [256])
    with pytest.raises(OutOfBlocksError, match="requested 1 blocks, available 0, total 3"):
        prepare_forward(caches, [first], [256], [384])
    check(caches)


def test_one_more_block() -> None:
    caches = manager(1, 256, csa=3)
    slot = caches.admit_request()
    assert [caches.allocate_block(CSA, slot)] == caches.held_blocks(CSA, slot)
    caches.allocate_block(CSA, slot)
    with pytest.raises(InvalidArgumentError, match="slot 0 would have 3 blocks in layer 1, expect"):
        caches.allocate_block(CSA, slot)
    with pytest.raises(InvalidArgumentError, match="layer_idx is 0, expected a layer with compres"):
        caches.allocate_block(SWA, slot)
    check(caches)


@pytest.mark.parametrize("seed", range(4))
def test_random_walk(seed: int) -> None:
    """Requests come, grow and go; some steps fail. No block is lost or held twice."""
    rng = random.Random(seed)
    caches = manager(4, 1500, types=("CSA", "HCA", "SWA"), csa=20, hca=18)
    counts: dict[int, int] = {}
    failed = 0
    for _ in range(200):
        choice = rng.random()
        try:
            if choice < 0.15:
                counts[caches.admit_request(rng.choice([0, 0, 300, 900]))] = 0
            elif choice < 0.25 and counts:
                slot = rng.choice(list(counts))
                caches.release_request(slot)
                del counts[slot]
            elif counts:
                slots = rng.sample(list(counts), rng.randint(1, len(counts)))
                after = [min(1500, counts[s] + rng.choice([1, 1, 3, 128, 500])) for s in slots]
                prepare_forward(caches, slots, [counts[s] for s in slots], after)
                counts.update(zip(slots, after, strict=True))
        except InternalError:
            failed += 1
        assert sorted(counts) == caches.requests
        check(caches)
        for slot, count in counts.items():
            for layer, schema in caches.schemas.items():
                if schema.entries_per_block:
                    assert caches.num_held(layer, slot) == schema.blocks(count)
    assert failed > 5


# --- handles ------------------------------------------------------------------------------------


def test_views_share_the_memory_of_the_cache() -> None:
    caches = manager()
    slot = caches.admit_request()
    prepare_forward(caches, [slot], [0], [130])
    handle = caches.acquire(CSA)
    state, pool = caches.states[CSA], caches.paged[CSA]
    assert pool is not None
    swa, classical, indexer = (
        handle.read_swa_view(),
        handle.read_classical_view(),
        handle.read_indexer_view(),
    )
    for view, owner in (
        (swa.fp8, state.swa_fp8),
        (swa.positions, state.swa_pos),
        (classical.entries_fp8, pool.entries_fp8),
        (classical.block_table, caches.block_tables[CSA]),
        (indexer.keys, pool.indexer_keys),
        (indexer.scales, pool.indexer_scales),
    ):
        assert owner is not None
        assert view.data_ptr() == owner.data_ptr()
    # Two blocks have room for 64 entries; 32 are complete.
    assert classical.valid_lens.tolist() == [32, 0, 0]
    assert caches.acquire(HCA).read_classical_view().valid_lens.tolist() == [1, 0, 0]
    assert classical.block_lens.tolist() == [1, 0, 0]
    assert classical.block_table[slot, 1:].tolist() == [-1] * 7
    assert repr(handle) == "LayerCacheHandle(CSA layer 1, 1 requests)"


def test_layers_without_entries_have_no_such_views() -> None:
    caches = manager()
    window = caches.acquire(SWA)
    assert window.read_swa_view().head.tolist() == [0, 0, 0]
    for read in (window.read_classical_view, window.read_indexer_view):
        with pytest.raises(InvalidArgumentError, match="layer 0 is of type SWA, which has no"):
            read()
    with pytest.raises(InvalidArgumentError, match="layer 2 is of type HCA, which has no indexer"):
        caches.acquire(HCA).read_indexer_view()
    with pytest.raises(InvalidArgumentError, match="layer_idx is 4, expected one of the schedule"):
        caches.acquire(4)
    for wrong in ([0], None, "1", 1.0, True):
        for call in (caches.acquire, lambda layer: caches.num_held(layer, 0)):
            with pytest.raises(InvalidArgumentError, match=r"layer_idx is .*, expected an integer"):
                call(wrong)  # type: ignore[arg-type]


class NoTensors(TorchDispatchMode):
    """Fails at every operation of torch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        raise AssertionError(f"{func} was called")


def test_acquire_allocates_no_tensor() -> None:
    caches = manager()
    slot = caches.admit_request()
    prepare_forward(caches, [slot], [0], [130])
    pointers = [t.data_ptr() for t in caches.states[CSA].tensors.values()]
    free = [a.num_free for a in caches.allocators.values() if a]
    with NoTensors():
        for _ in range(1000):
            handle = caches.acquire(CSA)
        views = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
    assert views[1].block_table is caches.block_tables[CSA]
    assert [a.num_free for a in caches.allocators.values() if a] == free
    assert [t.data_ptr() for t in caches.states[CSA].tensors.values()] == pointers


def test_tensors_of_a_step_stay_where_they_are() -> None:
    """A captured graph reads the same addresses at every replay."""
    caches = manager()
    slot = caches.admit_request()
    found = set()
    for before in range(10):
        prepare_forward(caches, [slot], [before], [before + 1])
        step, handle = caches.step, caches.acquire(CSA)
        flush = step.compression[4].flush
        found.add(
            tuple(
                t.data_ptr()
                for t in (
                    *(step.request_slots, step.positions, step.request_ids, step.token_slots),
                    *(flush.valid_mask, flush.entry_ids, flush.positions),
                    handle.read_classical_view().valid_lens,
                )
            )
        )
    assert len(found) == 1


def test_a_window_in_order() -> None:
    caches = manager()
    view = caches.acquire(SWA).read_swa_view()
    view.positions[1, :4] = torch.tensor([18, 3, -1, 17], dtype=torch.int32)
    assert view.in_order(1).tolist() == [1, 3, 0]
    assert view.in_order(0).tolist() == []


# --- the manager as a whole ---------------------------------------------------------------------


def test_managers_that_are_refused() -> None:
    twice = [*layers("CSA"), *layers("HCA")]
    for schedule in (twice, []):
        with pytest.raises(InvalidArgumentError, match="schedule has"):
            KVCacheManager(SMALL, schedule, 1)
    with pytest.raises(InvalidArgumentError, match="max_concurrent_requests is 0, expected 1"):
        KVCacheManager(SMALL, layers("CSA"), 0)
    with pytest.raises(InvalidArgumentError, match="num_blocks_per_csa_layer is -1, expected 0"):
        KVCacheManager(SMALL, layers("CSA"), 1, 128, num_blocks_per_csa_layer=-1)


def test_memory() -> None:
    caches = KVCacheManager(DSV4Config(), layers("CSA", "HCA"), 1, 1280)
    pools = [pool for pool in caches.paged.values() if pool]
    assert [pool.num_blocks for pool in pools] == [11, 11]
    assert sum(pool.memory_bytes() for pool in pools) == 11 * (20_864 + 580)
    states = sum(state.memory_bytes() for state in caches.states.values())
    assert caches.memory_bytes() == 11 * (20_864 + 580) + states
    assert repr(caches).startswith("KVCacheManager(2 layers, 0 of 1 requests, ")
    assert caches.schemas[0].attn_type is AttentionType.CSA
