"""kvx_core.ops.live: every byte of a sequence that moves while it grows, and states that cannot."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheSpan,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    KvxError,
    Layout,
    OutOfRangeError,
    Plane,
    UnsupportedError,
    describe,
    verify,
    write_kv,
)
from kvx_core.ops.live import Copied, LiveMigration
from kvx_core.ops.reorder import _in_orders
from tests.facts import SAME_MODEL

LAYERS, HEADS, DIM = 2, 2, 8
TOKENS = torch.randn(LAYERS, 2, 200, HEADS, DIM, generator=torch.Generator().manual_seed(3))
OTHERS = -7.0  # in all memory before
A_BLOCKS = [5, 0, 7, 2, 9, 11, 3, 8, 12, 1]  # of 12 tokens
B_BLOCKS = [3, 1, 4, 0, 6]  # of 32


def paged(num_blocks: int, block_size: int, layout: Layout, **facts: Any) -> CacheView:
    shape = {
        Layout.BLOCK_NHD: (num_blocks, block_size, HEADS, DIM),
        Layout.BLOCK_HND: (num_blocks, HEADS, block_size, DIM),
    }[layout]
    halves = [[torch.full(shape, OTHERS) for _ in "kv"] for _ in range(LAYERS)]
    layers = [CacheDesc.from_kv(*(describe(t, layout) for t in pair)) for pair in halves]
    return CacheView(tuple(layers), replace(SAME_MODEL, **facts))


def source(block_size: int = 12) -> CacheView:
    return paged(13, block_size, Layout.BLOCK_NHD)


def target(block_size: int = 32, **facts: Any) -> CacheView:
    return paged(7, block_size, Layout.BLOCK_HND, **facts)


def at_a(view: CacheView) -> CacheSpan:
    return view.at(block_table=[A_BLOCKS])


def at_b(view: CacheView) -> CacheSpan:
    return view.at(block_table=[B_BLOCKS])


def write(view: CacheView, first: int, last: int) -> None:
    """Writes TOKENS `first` to `last` as the source's engine does."""
    size = view.layers[0].block_size
    slots = [A_BLOCKS[t // size] * size + t % size for t in range(first, last)]
    for layer, (key, value) in zip(view.layers, TOKENS, strict=True):
        write_kv(layer, key[first:last], value[first:last], slots)


def held(span: CacheSpan, count: int) -> torch.Tensor:
    """(layers, 2, count, heads, dim) of tokens in B_BLOCKS of a view in HND order."""
    size = span.view.layers[0].block_size
    places = [(B_BLOCKS[t // size], t % size) for t in range(count)]
    return torch.stack(
        [
            torch.stack([torch.stack([t.owner[b, :, i] for b, i in places]) for t in (la.k, la.v)])
            for la in span.view.layers
        ]
    )


@pytest.mark.parametrize(("size_a", "size_b"), [(12, 32), (16, 32), (32, 32)])
@pytest.mark.parametrize("prompt", [0, 1, 61, 97])
def test_a_sequence_moves_while_it_grows(size_a: int, size_b: int, prompt: int) -> None:
    src, dst = source(size_a), target(size_b)
    unit = 96 if size_a == 12 else 32
    moving = LiveMigration(at_b(dst))
    write(src, 0, prompt)
    done = prompt
    for step in (0, 1, 2, 7, 13):
        write(src, done, done + step)
        done += step
        before = moving.copied
        copied = moving.copy(at_a(src), done)
        assert moving.copied == done // unit * unit
        assert copied.num_tokens == moving.copied - before
    report = moving.finish(at_a(src), done)
    assert report.num_tokens == moving.copied == done
    assert report.running == moving.running
    assert report.running.num_tokens == done // unit * unit
    assert report.paused.num_tokens == done % unit
    moved = report.running + report.paused
    assert moved.num_bytes == done * dst.bytes_per_token()
    assert (report.paused.num_calls, report.paused.seconds > 0) == (done % unit > 0, True)
    assert torch.equal(held(at_b(dst), done), TOKENS[:, :, :done])
    assert verify(at_a(src), at_b(dst), [done]).ok
    rest = held(at_b(dst), 5 * size_b)[:, :, done:]
    assert (rest == OTHERS).all()


def test_slots_dense_ends_and_starts() -> None:
    src, dst = source(), target()
    dense = paged(1, 120, Layout.BLOCK_HND)
    dense = CacheView(dense.layers, dense.facts, dense=True)
    write(src, 0, 100)
    slots = [A_BLOCKS[t // 12] * 12 + t % 12 for t in range(100)]
    first, then = LiveMigration(dense), LiveMigration(at_b(dst))
    first.copy(src.at(slots=slots), 50)
    assert first.copied == 48  # of 16 tokens each
    first.finish(src.at(slots=slots), 100)
    then.copy(dense.at(starts=[3]), 90)
    assert then.copied == 64
    then.finish(dense.at(starts=[3]), 97)
    assert torch.equal(held(at_b(dst), 97), TOKENS[:, :, 3:100])
    table = BlockTable.ragged([A_BLOCKS[t // 12] for t in range(100)], [0, 100])
    again = LiveMigration(dense, block_tokens=24)
    again.copy(src.at(block_table=table), 99)
    assert again.copied == 96
    again.finish(src.at(block_table=table), 100)
    assert verify(dense, src.at(block_table=table), [100]).ok


def test_a_long_prompt_is_copied_in_parts() -> None:
    src, dst = source(16), target(16)
    write(src, 0, 80)
    moving = LiveMigration(at_b(dst))
    found = [moving.copy(at_a(src), 80, most_tokens=most).num_tokens for most in (1, 33, 500, 5)]
    assert found == [16, 32, 32, 0]
    assert moving.copy(at_a(src), 80) == Copied()
    assert (moving.running.num_tokens, moving.running.num_calls) == (80, 3)
    report = moving.finish(at_a(src), 80)
    assert (report.paused.num_tokens, report.paused.num_calls) == (0, 0)
    assert torch.equal(held(at_b(dst), 80), TOKENS[:, :, :80])


def test_tokens_that_the_source_has_dropped_are_copied_again() -> None:
    src, dst = source(16), target(16)
    write(src, 0, 70)
    for layer in src.layers:  # drafts, which the source drops later
        for t in (layer.k, layer.v):
            t.owner[A_BLOCKS[2], 8:] = 99.0
    moving = LiveMigration(at_b(dst))
    moving.copy(at_a(src), 70)
    with pytest.raises(InvalidArgumentError) as raised:
        moving.copy(at_a(src), 40)
    assert str(raised.value) == (
        "written is 40, expected at least 64, the tokens that were copied. If the source has "
        "dropped tokens, call rewind(40) first"
    )
    moving.rewind(40)
    assert moving.copied == 32
    write(src, 40, 75)
    report = moving.finish(at_a(src), 75)
    assert report.paused.num_tokens == 75 - 32
    assert torch.equal(held(at_b(dst), 75), TOKENS[:, :, :75])


@pytest.mark.parametrize("rotary_dim", [DIM, 4])
def test_the_destination_is_described_once_in_the_order_of_the_source(rotary_dim: int) -> None:
    """The source is another view in each call: what is computed for one would be lost."""
    own = {"rotary_dim": rotary_dim, "rope_applied": True, "hadamard": False}
    src = paged(13, 12, Layout.BLOCK_NHD, rotary="half", **own)
    dst = target(rotary="interleaved", **own)
    write(src, 0, 110)
    moving = LiveMigration(at_b(dst))
    for written in (1, 97, 110):
        now = replace(src)
        move = moving.copy if written < 110 else moving.finish
        move(at_a(now), written)
        whole = [found for found in _in_orders.of(now).values() if isinstance(found, CacheView)]
        assert len(whole) == (1 if rotary_dim < DIM else 0)  # two parts of a head
    assert len(_in_orders.of(dst)) == 1
    got, want = held(at_b(dst), 110), TOKENS[:, :, :110]
    half = rotary_dim // 2
    order = [i // 2 + half * (i % 2) for i in range(rotary_dim)] + [*range(rotary_dim, DIM)]
    assert torch.equal(got[:, 0], want[:, 0][..., order])
    assert torch.equal(got[:, 1], want[:, 1])


def test_a_thread_copies_while_the_source_writes() -> None:
    src, written = source(), [0]
    dst = paged(31, 4, Layout.BLOCK_HND).at(block_table=[list(range(30))])
    moving, stop = LiveMigration(dst), threading.Event()

    def copy() -> None:
        while not stop.is_set():
            moving.copy(at_a(src), written[0])

    thread = threading.Thread(target=copy)
    thread.start()
    for t in range(110):
        write(src, t, t + 1)
        written[0] = t + 1
    stop.set()
    thread.join()
    report = moving.finish(at_a(src), 110)
    assert report.running.num_tokens + report.paused.num_tokens == 110
    assert verify(at_a(src), dst, [110]).ok


def test_a_refused_call_writes_nothing_and_the_next_one_succeeds() -> None:
    src, dst = source(), target()
    write(src, 0, 100)
    moving = LiveMigration(at_b(dst))
    with pytest.raises(OutOfRangeError):
        moving.finish(src.at(block_table=[A_BLOCKS[:3]]), 100)
    with pytest.raises(FactsMismatchError):
        moving.copy(at_a(CacheView(src.layers, replace(src.facts, fingerprint="another"))), 100)
    assert moving.copied == 0
    assert (held(at_b(dst), 160) == OTHERS).all()
    moving.copy(at_a(src), 100)
    other = CacheView(src.layers, replace(src.facts, fingerprint="another"))
    for call in (moving.copy, moving.finish):  # though nothing is left to copy
        with pytest.raises(FactsMismatchError):
            call(at_a(other), moving.copied)
    moving.finish(at_a(src), 100)
    assert torch.equal(held(at_b(dst), 100), TOKENS[:, :, :100])
    for call in (moving.copy, moving.finish):
        with pytest.raises(InvalidArgumentError) as raised:
            call(at_a(src), 100)
        assert str(raised.value) == (
            "the migration is finished with 100 tokens, expected one that runs. Make a "
            "LiveMigration for each move"
        )
    with pytest.raises(InvalidArgumentError, match="is finished"):
        moving.rewind(0)


def test_a_source_may_not_change_its_blocks_on_the_way() -> None:
    src, other, dst = source(16), source(12), target()
    write(src, 0, 100)
    moving = LiveMigration(at_b(dst))
    moving.copy(at_a(src), 40)
    with pytest.raises(InvalidArgumentError) as raised:
        moving.copy(at_a(other), 100)
    assert str(raised.value) == (
        "src has blocks that make copies of 96 tokens, expected blocks as in the calls before, "
        "which have copied 32 tokens. Call rewind(0) first"
    )


def copy_all(moving: LiveMigration, src: CacheSpan, counts: Iterable[int], **most: int) -> None:
    for count in counts:
        moving.copy(src, count, **most)


def held_by_a(view: CacheView) -> torch.Tensor:
    """(layers, 2, blocks of A that 60 tokens lie in, ...)."""
    halves: list[list[Any]] = [[la.k.owner, la.v.owner] for la in view.layers if la.v]
    return torch.stack([torch.stack([t[A_BLOCKS[:5]] for t in pair]) for pair in halves])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["table", "ragged", "slots"])
def test_tokens_of_two_calls_have_places_of_their_own(kind: str, seed: int) -> None:
    """A block that stands twice in the destination's table: within a call, and in two calls."""
    rng = random.Random(seed)
    src, dst = source(), target(4)
    write(src, 0, 24)
    ids = rng.sample(range(7), 6)
    again, before = sorted(rng.sample(range(6), 2), reverse=True)
    wrong = [*ids[:again], ids[before], *ids[again + 1 :]]

    def end(blocks: list[int]) -> CacheSpan:
        tokens = [block for block in blocks for _ in range(4)]
        if kind == "ragged":
            return dst.at(BlockTable.ragged(tokens, [0, 24]))
        if kind == "slots":
            return dst.at(slots=[block * 4 + t % 4 for t, block in enumerate(tokens)])
        return dst.at([blocks])

    moving = LiveMigration(end(wrong))
    with pytest.raises(InvalidArgumentError, match=r"place of its own|overwrite each other"):
        copy_all(moving, at_a(src), (12, 24))
    for i, layer in enumerate(dst.layers):
        for half, tensor in enumerate((layer.k, layer.v)):
            assert tensor is not None
            owner: Any = tensor.owner
            expected = torch.full_like(owner, OTHERS)
            for t in range(moving.copied):
                expected[wrong[t // 4], :, t % 4] = TOKENS[i, half, t]
            assert torch.equal(owner, expected)
    right = LiveMigration(end(ids))
    right.copy(at_a(src), 12)
    right.rewind(0)
    right.copy(at_a(src), 13)
    right.finish(at_a(src), 24)
    keys: Any = dst.layers[1].k.owner
    for t in range(24):
        assert torch.equal(keys[ids[t // 4], :, t % 4], TOKENS[1, 0, t])


def test_a_destination_in_the_blocks_of_the_source_is_refused() -> None:
    """In one pool: blocks that an earlier call has copied, and those that a later one will."""
    view = source()
    write(view, 0, 60)
    before = held_by_a(view)
    for blocks in ([4, 6, A_BLOCKS[0]], [A_BLOCKS[2], 4, 6]):
        moving = LiveMigration(view.at([[*blocks, 10, 10]]))
        with pytest.raises(InvalidArgumentError, match=r"block [57] is .* in the same pool"):
            copy_all(moving, at_a(view), (12, 24, 36) if blocks[0] == 4 else (36,), most_tokens=12)
        assert torch.equal(held_by_a(view), before)


REFUSED: dict[str, tuple[type[KvxError], Callable[[], object], str]] = {
    "window": (
        UnsupportedError,
        lambda: LiveMigration(at_b(target(window=64))),
        "dst.facts.window is 64, expected 0: tokens leave the window while a sequence runs. "
        "Pause the source and call migrate",
    ),
    "ring": (
        UnsupportedError,
        lambda: LiveMigration(at_b(target())).copy(
            source().at(block_table=BlockTable.ring([A_BLOCKS])), 1
        ),
        "src.block_table.format is RING, expected a table of all tokens: a ring is written over "
        "while a sequence runs. Pause the source and call migrate",
    ),
    "planes": (
        UnsupportedError,
        lambda: LiveMigration(
            replace(
                target(),
                planes=(Plane.of(torch.zeros(7, 32, 4), ("BLOCK", "TOKEN", "DIM"), "INDEX_K"),),
            ).at(block_table=[B_BLOCKS])
        ),
        "dst has 1 planes beside 2 layers, expected layers alone: states and compressed entries "
        "change while a sequence runs. Pause the source and call migrate",
    ),
    "empty": (
        UnsupportedError,
        lambda: LiveMigration(CacheView((), SAME_MODEL, dense=True)),
        "dst has 0 planes beside 0 layers, expected layers alone: states and compressed entries "
        "change while a sequence runs. Pause the source and call migrate",
    ),
    "sequences": (
        InvalidArgumentError,
        lambda: LiveMigration(target().at(block_table=[[1], [2]])),
        "dst has 2 sequences and 1 starts, expected 1. Make a LiveMigration for each sequence: "
        "view.at(block_table=[[...]]), whose blocks in a dense cache are its rows",
    ),
    "batch": (
        InvalidArgumentError,
        lambda: LiveMigration(CacheView(target().layers, SAME_MODEL, dense=True)),
        "dst has 7 sequences and 1 starts, expected 1. Make a LiveMigration for each sequence: "
        "view.at(block_table=[[...]]), whose blocks in a dense cache are its rows",
    ),
    "block_tokens": (
        InvalidArgumentError,
        lambda: LiveMigration(at_b(target()), block_tokens=48),
        "block_tokens is 48, expected a multiple of 32, the block size of dst. Leave it out to "
        "take the best",
    ),
    "block_tokens of src": (
        InvalidArgumentError,
        lambda: LiveMigration(at_b(target()), block_tokens=64).copy(at_a(source()), 1),
        "block_tokens is 64, expected a multiple of 12, the block size of src. Leave it out to "
        "take the best",
    ),
    "room": (
        InvalidArgumentError,
        lambda: LiveMigration(target().at(slots=[1, 2])).copy(at_a(source()), 3),
        "dst.slots has 2 tokens, expected at least 3, as written says. Reserve room for the "
        "sequence as it is at the end of the move",
    ),
    "tokens of slots": (
        OutOfRangeError,
        lambda: LiveMigration(replace(target(), holds=lambda: 20).at(slots=range(30))).copy(
            at_a(source()), 30
        ),
        "dst holds 20 tokens of sequence 0 by its engine's own count, expected at least 30, as "
        "starts and seq_lens say. A token that was sampled last is not in a cache before the next "
        "forward pass; a destination is made to hold the tokens first (the adapter's reserve)",
    ),
    "old slots": (
        InvalidArgumentError,
        lambda: LiveMigration(at_b(target())).finish(source().at(slots=[1, 2]), 3),
        "src.slots has 2 tokens, expected at least 3, as written says. Describe the source after "
        "each of its steps",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_states_that_cannot_move_are_refused(name: str) -> None:
    error, call, sentence = REFUSED[name]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == sentence


@pytest.mark.parametrize("wrong", [None, "x", 2.5, True, object(), [1], torch.ones(2)])
def test_wrong_types_are_refused_in_words(wrong: Any) -> None:
    moving = LiveMigration(at_b(target()))
    src = at_a(source())
    calls: dict[str, Callable[[], object]] = {
        "dst": lambda: LiveMigration(wrong),
        "src": lambda: moving.copy(wrong, 1),
        "written": lambda: moving.finish(src, wrong),
    }
    if wrong is not None:
        calls["block_tokens"] = lambda: LiveMigration(at_b(target()), block_tokens=wrong)
        calls["most_tokens"] = lambda: moving.copy(src, 1, most_tokens=wrong)
    if wrong is not True:
        calls["same_model"] = lambda: LiveMigration(at_b(target()), same_model=wrong)
        calls["find_scales"] = lambda: LiveMigration(at_b(target()), find_scales=wrong)
    for name, call in calls.items():
        with pytest.raises(InvalidArgumentError, match=rf"^{name} is .*, expected "):
            call()
    with pytest.raises(InvalidArgumentError, match=r"^written is .*, expected "):
        moving.rewind(wrong)
    assert repr(moving) == "LiveMigration(0 tokens copied, running)"
