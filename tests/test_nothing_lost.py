"""Calls that would lose tokens or overwrite what they read: refused, with nothing written.

Spec: 5.1, 5.2, 7, E.3
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    OutOfRangeError,
    Plan,
    ScaleDesc,
    SlotMapping,
    describe,
    gather_kv,
    migrate,
    rotate_keys,
    verify,
    write_kv,
)
from kvx_core.ops import left_out

SAME_MODEL = CacheFacts(fingerprint="m", rotary="half", rotary_dim=8, rope_applied=True)
BLOCKS, SIZE, HEADS, DIM = 9, 4, 2, 8
TOKEN_BYTES = 2 * HEADS * DIM * 4


def a_cache(seed: int, **options: Any) -> tuple[Tensor, CacheView]:
    """K and V, each (BLOCKS, HEADS, SIZE, DIM)."""
    kv = torch.randn(2, BLOCKS, HEADS, SIZE, DIM, generator=torch.Generator().manual_seed(seed))
    layer = CacheDesc.from_kv(describe(kv[0], "BLOCK_HND"), describe(kv[1], "BLOCK_HND"))
    return kv, CacheView((layer,), SAME_MODEL, **options)


def tokens_of(kv: Tensor, blocks: list[int]) -> Tensor:
    """(2, tokens, HEADS, DIM) of these blocks."""
    return kv[:, blocks].transpose(2, 3).reshape(2, -1, HEADS, DIM)


def table(kind: str, blocks: list[list[int]]) -> BlockTable:
    if kind == "packed":
        return BlockTable.packed(blocks)
    if kind == "ring":
        return BlockTable.ring(blocks)
    ids = [block for row in blocks for block in row for _ in range(SIZE)]
    ends = [len(row) * SIZE for row in blocks]
    return BlockTable.ragged(ids, [sum(ends[:i]) for i in range(len(ends) + 1)])


# ---- Tokens with one place


@pytest.mark.parametrize("kind", ["packed", "ring", "ragged"])
@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([[3, 3, 3], [5, 6, 7]], "block 3 for token 0 of row 0 and for token 4 of row 0"),
        ([[3, 4, 5], [6, 4, 7]], "block 4 for token 4 of row 0 and for token 4 of row 1"),
    ],
)
def test_a_destination_block_is_named_once(kind: str, blocks: Any, said: str) -> None:
    _, src = a_cache(1)
    kv, dst = a_cache(2)
    before = kv.clone()
    with pytest.raises(InvalidArgumentError, match=said):
        migrate(src.at([[0, 1, 2], [2, 1, 0]]), dst.at(table(kind, blocks)), [12, 12])
    assert torch.equal(kv, before)


def test_sequences_may_share_a_block_that_each_fills_in_part() -> None:
    """And blocks of the source, and blocks of which nothing is written."""
    source, src = a_cache(1)
    kv, dst = a_cache(2)
    expected = kv.clone()
    expected[:, 3, :, :2] = source[:, 0, :, :2]
    expected[:, 3, :, 2:] = source[:, 0, :, 2:]
    moved = migrate(
        src.at([[0], [0], [0]], starts=[0, 2, 0]),
        dst.at([[3], [3], [3]], starts=[0, 2, 0]),
        [2, 2, 0],
    )
    assert moved == 4 * TOKEN_BYTES
    assert torch.equal(kv, expected)
    with pytest.raises(InvalidArgumentError, match="block 3 for token 1 of row 0 and for token 0"):
        migrate(src.at([[0], [0]], starts=[0, 1]), dst.at([[3], [3]], starts=[0, 1]), [2, 2])
    assert torch.equal(kv, expected)


def test_many_blocks_out_of_order_are_told_apart() -> None:
    """More than the check keeps without allocating memory."""
    tokens = 3001
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(3))
    here, there = torch.randn(tokens, 1, 1, 8), torch.zeros(tokens, 1, 1, 8)
    layers = [CacheDesc.from_kv(describe(kv, "BLOCK_NHD")) for kv in (here, there)]
    src, dst = (CacheView((layer,), SAME_MODEL) for layer in layers)
    rows = torch.arange(tokens)[None]
    migrate(src.at(rows), dst.at(order[None]), [tokens])
    assert torch.equal(there[order], here)
    write_kv(layers[1], here[:, 0], None, slots=order)
    order[7] = order[2900]
    with pytest.raises(InvalidArgumentError, match="for token 7 of row 0 and for token 2900 of"):
        migrate(src.at(rows), dst.at(order[None]), [tokens])
    with pytest.raises(InvalidArgumentError, match="twice, for tokens 7 and 2900"):
        write_kv(layers[1], here[:, 0], None, slots=order)


def test_a_slot_is_named_once() -> None:
    kv, dst = a_cache(2)
    _, src = a_cache(1)
    before = kv.clone()
    tokens = torch.randn(4, HEADS, DIM)
    said = r"slots.slots has slot 9 twice, for tokens 1 and 3 of rows 0 and 0.*\(spec 5\.2\)"
    with pytest.raises(InvalidArgumentError, match="write." + said):
        write_kv(dst.layers[0], tokens, tokens, slots=torch.tensor([30, 9, 7, 9]))
    with pytest.raises(InvalidArgumentError, match="dst." + said):
        migrate(src.at([[1]]), dst.at(slots=[30, 9, 7, 9]), [4])
    assert torch.equal(kv, before)
    assert migrate(src.at([[1]]), dst.at(slots=[30, 9, -1, -1]), [4]) == 2 * TOKEN_BYTES


def test_an_address_is_named_once() -> None:
    blocks = torch.randn(3, 2, SIZE, HEADS, DIM)
    layer = CacheDesc.from_kv(*(describe(blocks[0, i][None], "BLOCK_NHD") for i in range(2)))
    dst = CacheView((layer,), SAME_MODEL)
    _, src = a_cache(1)
    before = blocks.clone()
    rows = [[[blocks[1, 0], blocks[1, 1]], [blocks[2, 0], blocks[1, 1]]]]
    with pytest.raises(InvalidArgumentError, match="for token 0 of row 0 and for token 4 of row 0"):
        migrate(src.at([[0, 1]]), dst.at(BlockTable.pointers(rows)), [8])
    assert torch.equal(blocks, before)


# ---- Holes


@pytest.mark.parametrize("end", ["src", "dst"])
def test_tokens_are_left_out_only_where_a_table_has_holes(end: str) -> None:
    """41 tokens, of which 4 blocks' are moved, and no byte of the others."""
    source, src = a_cache(1)
    kv, dst = a_cache(2)
    full, holed = [8, 1, 2, 3, 4, 5, 6, 7, 0], [8, -1, 2, 3, 4, 5, 6, 7, 0]
    rows = {"src": ([holed], [full]), "dst": ([full], [holed])}[end]
    expected = kv.clone()
    with pytest.raises(OutOfRangeError, match=rf"{end}.block_table.indices\[1\] is -1, a null"):
        migrate(src.at(rows[0]), dst.at(rows[1]), [33])
    assert torch.equal(kv, expected)
    a, b = (
        src.at(BlockTable.packed(rows[0]).with_holes()),
        dst.at(BlockTable.packed(rows[1]).with_holes()),
    )
    assert migrate(a, b, [33]) == (33 - SIZE) * TOKEN_BYTES
    moved = [block for block in full if block not in (1, 0)]
    expected[:, moved] = source[:, moved]
    expected[:, 0, :, :1] = source[:, 0, :, :1]
    assert torch.equal(kv, expected)
    found = verify(a, b, [33])
    assert found
    assert (found.num_tokens, found.num_left_out) == (29, 4)
    assert not verify(src.at(rows[0]), dst.at(rows[1]), [33])
    plan = Plan.migrate(src.at([full]), dst.at([full]), [33])
    with pytest.raises(OutOfRangeError, match="null block"):
        plan.run(**{f"{end}_block_table": torch.tensor([holed])})


def test_entries_that_no_token_needs_may_be_null() -> None:
    """Past the end, before a start, and in a ring between the last token and the first."""
    source, src = a_cache(1)
    kv, dst = a_cache(2)
    migrate(src.at([[-1, 1, 2, -1]], starts=[5]), dst.at([[-1, 3, 4]], starts=[5]), [6])
    assert torch.equal(kv[:, 3, :, 1:], source[:, 1, :, 1:])
    ring = BlockTable.ring([[5, -1, -1, 6]])  # tokens 14 to 17 of blocks 3 and 4: entries 3 and 0
    migrate(src.at([[-1, -1, -1, 7, 8]], starts=[14]), dst.at(ring, starts=[14]), [4])
    assert torch.equal(kv[:, 6, :, 2:], source[:, 7, :, 2:])
    assert torch.equal(kv[:, 5, :, :2], source[:, 8, :, :2])


def test_a_gather_leaves_out_what_its_table_says() -> None:
    kv, view = a_cache(1)
    cache, lens = view.layers[0], torch.tensor([8])
    rows = torch.tensor([[3, 0]])
    out = torch.full((2, 1, 8, HEADS, DIM), 9.0)
    with pytest.raises(OutOfRangeError, match=r"gather.block_table.indices\[1\] is 0, a null"):
        gather_kv(cache, rows, lens, out=(out[0], out[1]), null_block_id=0)
    assert (out == 9).all()
    gather_kv(
        cache, BlockTable.packed(rows).with_holes(), lens, out=(out[0], out[1]), null_block_id=0
    )
    assert torch.equal(out[:, 0, :4], tokens_of(kv, [3]))
    assert (out[:, 0, 4:] == 9).all()
    gather_kv(cache, rows, lens, out=(out[0], out[1]), null_block_id=0, zero_fill=True)
    assert (out[:, 0, 4:] == 0).all()


# ---- Memory that is read and written


def test_outputs_of_a_gather_lie_apart() -> None:
    kv, view = a_cache(1)
    before, cache = kv.clone(), view.layers[0]
    rows, lens = torch.tensor([[3, 4]]), torch.tensor([8])
    out = torch.zeros(1, 8, HEADS, DIM)
    with pytest.raises(InvalidArgumentError, match=r"io.value.data .* gather.io.key.*spec 7"):
        gather_kv(cache, rows, lens, out=(out, out))
    inside = kv[1, :2].view(1, 8, HEADS, DIM)
    with pytest.raises(InvalidArgumentError, match=r"gather.io.key.data .* cache.v"):
        gather_kv(cache, rows, lens, out=(inside, out))
    with pytest.raises(InvalidArgumentError, match=r"gather.io.value.data .* cache.v"):
        gather_kv(cache, rows, lens, out=(out, inside))
    assert torch.equal(kv, before)
    both = torch.zeros(1, 8, HEADS, 2, DIM)  # one after the other in each head
    gather_kv(cache, rows, lens, out=(both[:, :, :, 0], both[:, :, :, 1]))
    assert torch.equal(both[0].movedim(2, 0), tokens_of(kv, [3, 4]))


def test_a_write_reads_nothing_that_it_writes() -> None:
    flat = torch.randn(2, BLOCKS * SIZE, HEADS, DIM)
    cache = CacheDesc.from_kv(
        *(describe(half.view(BLOCKS, SIZE, HEADS, DIM), "BLOCK_NHD") for half in flat)
    )
    expected = flat.clone()
    expected[:, 20:24] = flat[:, 2:6]
    write_kv(cache, flat[0, 2:6], flat[1, 2:6], slots=torch.arange(20, 24))
    assert torch.equal(flat, expected)
    with pytest.raises(InvalidArgumentError, match=r"of a key or value and of a slot.*spec 7"):
        write_kv(cache, flat[0, 2:6], flat[1, 2:6], slots=torch.arange(5, 9))
    with pytest.raises(InvalidArgumentError, match=r"of a key or value and of a slot.*spec 7"):
        write_kv(cache, flat[1, 2:6], flat[0, 2:6], slots=torch.arange(5, 9))
    assert torch.equal(flat, expected)


def fp8(scales: tuple[Tensor, Tensor]) -> tuple[Tensor, CacheView]:
    kv = torch.zeros(2, BLOCKS, SIZE, HEADS, DIM).to(torch.float8_e4m3fn)
    layer = CacheDesc.from_kv(*(describe(half, "BLOCK_NHD") for half in kv))
    per_token = [(ScaleDesc.of(scale, "PER_TOKEN_HEAD"),) for scale in scales]
    return kv, CacheView((layer,), SAME_MODEL, k_scales=per_token[0], v_scales=per_token[1])


def test_scales_that_are_found_lie_apart() -> None:
    """From what is read, from what else is written, and from each other."""
    source, src = a_cache(1)
    before = source.clone()
    room = torch.zeros(2, BLOCKS, SIZE, HEADS)
    in_source = source[0].reshape(-1)[: BLOCKS * SIZE * HEADS].view(BLOCKS, SIZE, HEADS)
    for scales, with_ in [
        ((in_source, room[1]), r"dst.k_scales\[0\].data .* src.layers\[0\].k"),
        ((room[0], in_source), r"dst.v_scales\[0\].data .* src.layers\[0\].k"),
        ((room[0], room[0]), r"dst.[kv]_scales\[0\].data .* dst.[kv]_scales\[0\]"),
    ]:
        kv, dst = fp8(scales)
        with pytest.raises(InvalidArgumentError, match=with_):
            migrate(src.at([[0, 1]]), dst.at([[2, 3]]), [8], find_scales=True)
        assert (kv.view(torch.uint8) == 0).all()
    assert torch.equal(source, before)
    kv, dst = fp8((room[0], room[1]))
    migrate(src.at([[0, 1]]), dst.at([[2, 3]]), [8], find_scales=True)
    assert (room[:, 2:4] > 0).all()
    tokens = torch.randn(2, HEADS, DIM)
    options = {"find_scales": True, "slots": torch.tensor([1, 2])}
    scale = ScaleDesc.of(room[0], "PER_TOKEN_HEAD")
    with pytest.raises(InvalidArgumentError, match=r"v_scale_desc.data .* write.k_scale_desc"):
        write_kv(dst.layers[0], tokens, tokens, k_scale=scale, v_scale=scale, **options)


def test_scales_may_lie_between_the_vectors() -> None:
    """A row of a head is 8 bytes of numbers and 4 of its scale."""
    raw = torch.zeros(2, BLOCKS, SIZE, HEADS, DIM + 4, dtype=torch.uint8)
    numbers = raw[..., :DIM].view(torch.float8_e4m3fn)
    scales = [half.view(torch.float32)[..., DIM // 4] for half in raw]
    layer = CacheDesc.from_kv(*(describe(half, "BLOCK_NHD") for half in numbers))
    per_token = [(ScaleDesc.of(scale, "PER_TOKEN_HEAD"),) for scale in scales]
    dst = CacheView((layer,), SAME_MODEL, k_scales=per_token[0], v_scales=per_token[1])
    _, src = a_cache(1)
    migrate(src.at([[0, 1]]), dst.at([[2, 3]]), [8], find_scales=True)
    assert verify(src.at([[0, 1]]), dst.at([[2, 3]]), [8], tolerance="codec")
    within = [half[..., 4 : DIM + 4].view(torch.float32)[..., 0] for half in raw]
    wrong = [(ScaleDesc.of(scale, "PER_TOKEN_HEAD"),) for scale in within]
    dst = CacheView((layer,), SAME_MODEL, k_scales=wrong[0], v_scales=wrong[1])
    with pytest.raises(InvalidArgumentError, match=r"dst.[kv]_scales"):
        migrate(src.at([[0, 1]]), dst.at([[2, 3]]), [8], find_scales=True)


# ---- Positions


def test_tokens_keep_their_positions() -> None:
    source, src = a_cache(1)
    kv, dst = a_cache(2)
    before = kv.clone()
    said = "sequence 0 moves from position 0 at the source to position 20 at the destination"
    with pytest.raises(FactsMismatchError, match=said):
        migrate(src.at([[0, 1]]), dst.at([[1, 2, 3, 4, 5, 6, 7]], starts=[20]), [5])
    with pytest.raises(FactsMismatchError, match=said):
        Plan.migrate(src.at([[0, 1]]), dst.at([[1, 2, 3, 4, 5, 6, 7]], starts=[20]), [5]).run()
    assert torch.equal(kv, before)
    rows = [[1, 2, 3, 4, 5, 6, 7]]
    for at_src, at_dst in [
        (src.at([[0, 1]], first_positions=20), dst.at(rows, starts=[20])),
        (src.at([[0, 1]]), dst.at(rows, starts=[20], first_positions=[-20])),
        (src.at([[0, 1]]), dst.at(slots=[24, 25, 26, 27, 28])),
    ]:
        kv.copy_(before)
        migrate(at_src, at_dst, [5])
        assert torch.equal(kv[:, 6], source[:, 0])
    with pytest.raises(FactsMismatchError, match="from position 7 at the source to position 0"):
        migrate(src.at(slots=[8, 9], first_positions=7), dst.at(rows), [2])
    assert migrate(src.at([[0]]), dst.at(rows, starts=[20]), [0]) == 0
    assert migrate(src.at([[0]]), dst.at(rows, starts=[20]), [4], new_positions=True)


def test_keys_that_are_not_rotated_yet_may_move() -> None:
    facts = CacheFacts(rope_applied=False)
    (_, src), (_, dst) = (a_cache(seed) for seed in (1, 2))
    src, dst = (CacheView(view.layers, facts) for view in (src, dst))
    assert migrate(src.at([[0]]), dst.at([[1, 2]], starts=[3]), [4], same_model=True)


@pytest.mark.parametrize("order", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_rotated_for_their_new_positions(order: Any, dtype: torch.dtype) -> None:
    """As if they had been computed there: 6 of 8 dims rotate, and V stays."""
    inv_freq = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    raw = torch.randn(2, 11, HEADS, DIM, generator=torch.Generator().manual_seed(1)).double()
    dims = torch.tensor([0, 1, 2, 3, 4, 5] if order == "half" else [0, 2, 4, 1, 3, 5])

    def at(position: int) -> Tensor:
        angle = (torch.arange(11) + position)[:, None, None] * inv_freq
        a, b = raw[0][..., dims[:3]], raw[0][..., dims[3:]]
        found = raw[0].clone()
        found[..., dims[:3]] = a * angle.cos() - b * angle.sin()
        found[..., dims[3:]] = b * angle.cos() + a * angle.sin()
        return found

    facts = CacheFacts(fingerprint="m", rotary=order, rotary_dim=6, rope_applied=True)
    src_kv, dst_kv = torch.zeros(2, 3, SIZE, HEADS, DIM), torch.zeros(2, BLOCKS, SIZE, HEADS, DIM)
    src_kv[0].view(-1, HEADS, DIM)[:11], src_kv[1].view(-1, HEADS, DIM)[:11] = at(3), raw[1]
    src_kv, dst_kv = src_kv.to(dtype), dst_kv.to(dtype)
    src, dst = (
        CacheView((CacheDesc.from_kv(*(describe(half, "BLOCK_NHD") for half in kv)),), facts)
        for kv in (src_kv, dst_kv)
    )
    to = dst.at([[8, 1, 2, 3, 7, 5, 6, 4]], starts=[20])
    migrate(src.at([[0, 1, 2]], first_positions=3), to, [11], new_positions=True)
    value = dst_kv[1].clone()
    if dtype is not torch.float32:
        with pytest.raises(InvalidArgumentError, match="BF16, which a rotation rounds once more"):
            rotate_keys(to, [11], [17], inv_freq)
    rotate_keys(to, [11], [17], inv_freq, lossy=dtype is not torch.float32)
    found = dst_kv[0, [5, 6, 4]].reshape(-1, HEADS, DIM)[:11].double()
    wanted = at(20)
    error = (found - wanted).abs().max()
    assert error < (1e-6 if dtype is torch.float32 else 0.05)
    assert torch.equal(dst_kv[1], value)
    untouched = [block for block in range(BLOCKS) if block not in (5, 6, 4)]
    assert not dst_kv[0, untouched].any()


@pytest.mark.parametrize(
    ("rows", "lengths", "says"),
    [
        ([[5, 6], [5, 7]], [8, 8], "names block 5 for token 0 of row 0 and for token 0 of row 1"),
        ([[5, 6], [7, 99]], [8, 8], r"indices\[3\] is 99, expected below num_blocks 9"),
        ([[5, 6], [7, 8]], [8, 9], "needs tokens .* holds 8 per row"),
        ([[5, 6], [7, 8]], [8, -1], r"lengths\[1\] is -1"),
        ([[5, 6], [7, 8]], [8, 4], "span holds 3 tokens of sequence 1 by its engine's own count"),
    ],
)
def test_keys_are_rotated_all_or_none_and_once(
    rows: list[list[int]], lengths: list[int], says: str
) -> None:
    """A prefix that two sequences share would turn twice; a refusal leaves all as it was."""
    inv_freq = [1.0] * (DIM // 2)
    kv, view = a_cache(1, holds=(lambda: [8, 3]) if "holds 3" in says else None)
    before = kv.clone()
    with pytest.raises((InvalidArgumentError, OutOfRangeError), match=says):
        rotate_keys(view.at(rows), lengths, [17], inv_freq)
    assert torch.equal(kv, before)


def test_keys_of_an_exact_table_are_all_rotated() -> None:
    kv, view = a_cache(1)
    before = kv.clone()
    exact = BlockTable.ragged([5, 5, 5, 5, 6], [0, 5], exact=True)
    with pytest.raises((InvalidArgumentError, OutOfRangeError), match=r"exact|EXACT"):
        rotate_keys(view.at(exact), [4], [17], [1.0] * (DIM // 2))
    assert torch.equal(kv, before)


def test_keys_of_no_tokens_are_rotated() -> None:
    """A step without tokens is none to refuse; its wrong arguments are."""
    kv, view = a_cache(1)
    before, inv_freq = kv.clone(), [1.0] * (DIM // 2)
    for span in (view.at([[], []]), view.at([[5], [6]]), view.at(slots=[])):
        rotate_keys(span, [0, 0], [17], inv_freq)
    for lengths, table in (([-1, 0], [[5], [6]]), ([0, 0], BlockTable.ragged([5], [0, 1, 1]))):
        with pytest.raises((InvalidArgumentError, OutOfRangeError)):
            rotate_keys(view.at(table), lengths, [17], inv_freq)
    assert torch.equal(kv, before)


@pytest.mark.parametrize("length", [10**9, 10**13, 2**62])
@pytest.mark.parametrize("dense", [False, True])
def test_lengths_that_no_memory_holds_are_out_of_range(length: int, dense: bool) -> None:
    """Whoever asks for the place of each token: verify, rotate_keys, an engine's own count."""
    _, view = a_cache(1)
    held = CacheView(view.layers, SAME_MODEL, dense=dense, holds=lambda: 2**62)
    span = held.at([[5, 6]])
    for call in (
        lambda: verify(span, view.at([[5, 6]]), [length, length]),
        lambda: migrate(span, view.at([[7, 8]]), [length]),
        lambda: rotate_keys(span, [length], [17], [1.0] * (DIM // 2)),
    ):
        with pytest.raises((OutOfRangeError, InvalidArgumentError)):
            call()


def test_verify_refuses_an_exact_table_with_tokens_to_spare() -> None:
    """As migrate does: the tokens that no length counts would not be compared."""
    kv, view = a_cache(1)
    exact = BlockTable.ragged([5, 5, 5, 5, 6], [0, 5], exact=True)
    assert verify(view.at(exact), view.at([[5, 6]]), [5])
    for ends in ((view.at(exact), view.at([[5]])), (view.at([[5]]), view.at(exact))):
        with pytest.raises(OutOfRangeError, match=r"has 5 entries in src\.block_table, expected 4"):
            verify(*ends, [4])
    assert kv.shape[1] == BLOCKS


def test_keys_that_layers_share_are_not_rotated_twice() -> None:
    kv, view = a_cache(1)
    other = CacheDesc.from_kv(view.layers[0].k, describe(torch.zeros_like(kv[1]), "BLOCK_HND"))
    both = CacheView((*view.layers, other), SAME_MODEL)
    before = kv.clone()
    with pytest.raises(InvalidArgumentError, match=r"layers\[1\].k is that of layers\[0\], expect"):
        rotate_keys(both.at([[5, 6]]), [8], [17], [1.0] * (DIM // 2))
    assert torch.equal(kv, before)


@pytest.mark.parametrize(
    ("skipped", "invalid_slot", "places"), [((), -1, 0), ((4,), -1, 1), ((4, 9), 7, 2)]
)
def test_only_slots_that_are_skipped_are_looked_for(
    skipped: tuple[int, ...], invalid_slot: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the tokens that moved; where none is skipped, no token is found one by one."""
    asked = []
    find = left_out.find_tokens
    monkeypatch.setattr(left_out, "find_tokens", lambda *a, **k: asked.append(1) or find(*a, **k))
    source, src = a_cache(1)
    kv, dst = a_cache(2)
    expected, here = kv.clone(), tokens_of(source, [0, 1, 2])
    slots = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(5))[:12]
    slots[slots == 7] = 35 if 35 not in slots else 34
    slots[list(skipped)] = invalid_slot
    for token, slot in enumerate(slots.tolist()):
        if slot != invalid_slot:
            expected[:, slot // SIZE, :, slot % SIZE] = here[:, token]
    named = SlotMapping.of(slots, invalid_slot=invalid_slot)
    assert migrate(src.at([[0, 1, 2]]), dst.at(slots=named), [12]) == (12 - places) * TOKEN_BYTES
    assert torch.equal(kv, expected)
    assert bool(asked) == bool(skipped)
