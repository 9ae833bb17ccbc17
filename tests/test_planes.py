"""Planes (spec E.11): any axes, moved with and without layers, against indexing by axes' names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from tests.calls import CPU, Backend
from tests.planes import (
    SENTINEL,
    Paged,
    View,
    bhnd,
    bnhd,
    check,
    filled,
    migrate,
    packed_dim,
    pairs,
    randomize,
    table,
    threes,
    tiles,
)


def tokens_of(lengths: list[int]) -> list[tuple[int, int]]:
    """Every sequence and position."""
    return [(s, t) for s, length in enumerate(lengths) for t in range(length)]


UNSPLIT = (bnhd, bhnd, packed_dim)
SPLIT = (tiles, pairs, threes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dst", UNSPLIT, ids=lambda make: make.__name__)
@pytest.mark.parametrize("src", UNSPLIT, ids=lambda make: make.__name__)
def test_planes_of_any_order_of_axes(backend: Backend, src: Any, dst: Any, seed: int) -> None:
    from_, to = src(7, 6, 3, 16, torch.bfloat16), dst(5, 10, 3, 16, torch.bfloat16)
    randomize(from_, seed)
    rows = [[3, 1, 5], [2, 6, 0], [4, -1, -1]]
    ends = View([from_], rows, [1, seed, 0]), View([to], [[1, 4], [0, 2], [3, -1]], [2, 0, 5])
    check(backend, *ends, [17, 10, 0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dst", UNSPLIT + SPLIT, ids=lambda make: make.__name__)
@pytest.mark.parametrize("src", UNSPLIT + SPLIT, ids=lambda make: make.__name__)
def test_split_tokens(src: Any, dst: Any, seed: int) -> None:
    """Parts that nest and parts that do not, runs that begin and end within parts."""
    from_, to = src(4, 48, 2, 32, torch.bfloat16), dst(3, 96, 2, 32, torch.bfloat16)
    randomize(from_, seed)
    starts = [[0, 0], [seed, 16 * seed], [5, 32]][seed], [[0, 0], [3, 16], [48, 7]][seed]
    ends = View([from_], [[3, 1], [2, 0]], starts[0]), View([to], [[2, 0], [1, -1]], starts[1])
    check(CPU, *ends, [[96, 48], [71, 33], [53, 16]][seed])


@pytest.mark.parametrize("dst", UNSPLIT + SPLIT, ids=lambda make: make.__name__)
@pytest.mark.parametrize("src", [bnhd, *SPLIT], ids=lambda make: make.__name__)
def test_split_tokens_convert(src: Any, dst: Any) -> None:
    from_, to = src(4, 48, 2, 32, torch.float32), dst(3, 96, 2, 32, torch.float16)
    randomize(from_, 1)
    check(CPU, View([from_], [[3, 1]], [5]), View([to], [[1]], [2]), [77])


@pytest.mark.parametrize("dst", [bhnd, *SPLIT], ids=lambda make: make.__name__)
def test_null_blocks_zero_split_tokens(dst: Any) -> None:
    from_, to = bnhd(4, 48, 2, 32, torch.bfloat16), dst(3, 96, 2, 32, torch.bfloat16)
    randomize(from_, 2)
    src = View([from_], [[3, 0, 1]], [7], null_block=0)
    check(CPU, src, View([to], [[1, 2]], [29]), [131], zero_fill=True)


def test_a_device_says_that_it_does_not_split_tokens(backend: Backend) -> None:
    from_, to = tiles(2, 32, 1, 32, torch.bfloat16), bnhd(2, 32, 1, 32, torch.bfloat16)
    randomize(from_, 0)
    ends = View([from_], [[1]]), View([to], [[1]])
    if backend.looks_first:
        return check(backend, *ends, [32])
    before = to.bytes().clone()
    sentence = (
        "src.planes[0].axes splits TOKEN into parts of 16, which calls on DEVICE memory do not "
        "move; migrate in HOST memory (spec E.11)"
    )
    with pytest.raises(UnsupportedError) as refusal:
        migrate(backend, *ends, [32])
    assert str(refusal.value) == sentence
    assert torch.equal(to.bytes(), before)


@pytest.mark.parametrize("seed", range(3))
def test_planes_of_many_shapes_move_in_one_call(backend: Backend, seed: int) -> None:
    """Other dtypes, heads and dims, in another order at the other end; a range of heads of those
    that ranks split."""
    shapes = [(1, 128, torch.uint8), (1, 4, torch.float32), (4, 16, torch.float16)]
    src, dst = [], []
    for i, (heads, dim, dtype) in enumerate(shapes):
        from_, to = bnhd(5, 4, heads, dim, dtype), bhnd(4, 4, heads, dim, dtype)
        for plane in (from_, to):
            plane.layer, plane.role, plane.flags = i // 2, 40 + i, int(heads == 1)
        randomize(from_, seed + i)
        src.append(from_)
        dst.append(to)
    ends = View(src, [[4, 2], [1, 3]], head_start=1), View(dst, [[3, 0], [2, 1]], head_start=2)
    check(backend, *ends, [7, 5], num_heads=2)


@pytest.mark.parametrize("seed", range(3))
def test_a_plane_has_blocks_of_its_own(backend: Backend, seed: int) -> None:
    """Three lookups in a call: two planes by the view's table, one by its own at each end."""
    src, dst = [], []
    for i in range(3):
        from_, to = bnhd(6, 4, 1, 16, torch.bfloat16), bhnd(6, 8, 1, 16, torch.bfloat16)
        from_.role = to.role = i
        randomize(from_, seed + i)
        src.append(from_)
        dst.append(to)
    own = {0: [[5, 3], [0, -1]], 1: [[4], [2]]}
    for k, planes in enumerate((src, dst)):
        planes[1].table, indices = table(backend, own[k])
        planes[1].kept.append(indices)
    lengths = [8, 3]
    sources = [plane.tensor.clone() for plane in src]
    migrate(backend, View(src, [[1, 2], [3, 4]]), View(dst, [[1], [5]]), lengths)
    for i, plane in enumerate(dst):
        rows = (own[0], own[1]) if i == 1 else ([[1, 2], [3, 4]], [[1], [5]])
        written = torch.zeros_like(plane.tensor, dtype=torch.bool)
        for s, t in tokens_of(lengths):
            b = rows[1][s][0]
            assert torch.equal(plane.tensor[b, 0, t], sources[i][rows[0][s][t // 4], t % 4, 0])
            written[b, 0, t] = True
        rest = plane.tensor[~written].contiguous().view(torch.uint8)
        assert bool((rest == SENTINEL).all())
    own[1][0][0] = 6
    dst[1].table, indices = table(backend, own[1])
    sentence = r"^dst\.planes\[\]\.block_table\.indices\[0\] is 6, expected below num_blocks 6 "
    with pytest.raises(OutOfRangeError, match=sentence):
        migrate(backend, View(src, [[1, 2], [3, 4]]), View(dst, [[1], [5]]), lengths)


def test_dense_planes(backend: Backend) -> None:
    from_, to = bhnd(3, 9, 2, 16, torch.bfloat16), bnhd(3, 12, 2, 16, torch.bfloat16)
    randomize(from_, 3)
    check(backend, View([from_]), View([to]), [9, 0, 5])


@pytest.mark.parametrize("seed", range(3))
def test_indexer_pages_of_deepseek_v3_2(backend: Backend, seed: int) -> None:
    """Pages of N * 128 bytes of FP8, then N float32 scales: two planes over one page, beside a
    latent, from pages of 64 tokens into pages of 32. Each end is written and read as engines do.
    Source: vllm 0.32 v1/attention/backends/mla/indexer.py; csrc/cache_kernels.cu,
    indexer_k_quant_and_cache_kernel
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, rows = [100, 33], ([[3, 1], [2, -1]], [[4, 0, 2, 6], [1, 5, -1, -1]])
    data = [torch.randint(0, 256, (n, 128), generator=generator).to(torch.uint8) for n in lengths]
    scales = [torch.rand(n, generator=generator) for n in lengths]
    latents = [torch.randn(n, 576, generator=generator).to(torch.bfloat16) for n in lengths]

    def engine(block_size: int, num_blocks: int) -> tuple[Tensor, Tensor]:
        page = torch.full((num_blocks, block_size * 132), SENTINEL, dtype=torch.uint8)
        return page, filled((num_blocks, block_size, 576), torch.bfloat16)

    def view(page: Tensor, latent: Tensor, table: list[list[int]]) -> View:
        n = latent.shape[1]
        blocks = page.shape[0]
        k = page.as_strided((blocks, n, 128), (n * 132, 128, 1))
        of = page.view(torch.float32).as_strided((blocks, n), (n * 33, 1), n * 32)
        return View(
            [
                Paged(latent, ("block", "token", "dim"), role=2, flags=1),
                Paged(k, ("block", "token", "dim"), role=4, flags=1),
                Paged(of, ("block", "token"), role=5, flags=1),
            ],
            table,
        )

    def write(page: Tensor, latent: Tensor, table: list[list[int]]) -> None:
        n = latent.shape[1]
        for s, t in tokens_of(lengths):
            block, i = page[table[s][t // n]], t % n
            block[i * 128 : (i + 1) * 128] = data[s][t]
            at = n * 128 + i * 4
            block[at : at + 4] = scales[s][t : t + 1].view(torch.uint8)
            latent[table[s][t // n], i] = latents[s][t]

    (src_page, src_latent), (dst_page, dst_latent) = engine(64, 4), engine(32, 7)
    expected_page, expected_latent = engine(32, 7)
    write(src_page, src_latent, rows[0])
    write(expected_page, expected_latent, rows[1])
    migrate(
        backend,
        view(src_page, src_latent, rows[0]),
        view(dst_page, dst_latent, rows[1]),
        lengths,
        num_heads=1,
    )
    assert torch.equal(dst_page, expected_page)
    assert torch.equal(dst_latent.view(torch.int16), expected_latent.view(torch.int16))


@pytest.mark.parametrize("seed", range(3))
def test_amx_pages_of_vllm(seed: int) -> None:
    """bf16 pages of vLLM on CPUs with AMX, K [N/16][D/2][16][2] and V [D/16][N/2][16][2] per block
    and head, to NHD and back.
    Source: vllm 0.32 csrc/cpu/cpu_attn_amx.hpp, AttentionImpl<ISA::AMX>, reshape_and_cache
    """
    generator = torch.Generator().manual_seed(seed)
    blocks, heads, n, dim, length, table_ = 3, 2, 32, 64, 75, [[2, 0, 1]]
    k, v = torch.randn(2, length, heads, dim, generator=generator).to(torch.bfloat16)
    page = filled((blocks, 2, heads, n * dim), torch.bfloat16)
    for t, h, d in itertools.product(range(length), range(heads), range(dim)):
        b, i = table_[0][t // n], t % n
        page[b, 0, h, i // 16 * (dim * 16) + d // 2 * 32 + i % 16 * 2 + d % 2] = k[t, h, d]
        page[b, 1, h, d // 16 * (n * 16) + i // 2 * 32 + d % 16 * 2 + i % 2] = v[t, h, d]

    def amx(page: Tensor) -> View:
        tiled = page[:, 0].unflatten(-1, (n // 16, dim // 2, 16, 2))
        paired = page[:, 1].unflatten(-1, (dim // 16, n // 2, 16, 2))
        return View(
            [
                Paged(tiled, ("block", "head", "token", "dim", "token", "dim"), role=0),
                Paged(paired, ("block", "head", "dim", "token", "dim", "token"), role=1),
            ],
            table_,
        )

    nhd = [bnhd(1, length, heads, dim, torch.bfloat16) for _ in "kv"]
    nhd[1].role = 1
    migrate(CPU, amx(page), View(nhd), [length])
    for plane, expected in zip(nhd, (k, v), strict=True):
        assert torch.equal(plane.tensor[0].view(torch.int16), expected.view(torch.int16))
    back = filled((blocks, 2, heads, n * dim), torch.bfloat16)
    migrate(CPU, View(nhd), amx(back), [length])
    assert torch.equal(back.view(torch.int16), page.view(torch.int16))


def test_planes_in_the_same_pool_have_disjoint_blocks(backend: Backend) -> None:
    plane = bnhd(4, 4, 1, 16, torch.bfloat16)
    randomize(plane, 0)
    other = Paged(plane.tensor, plane.axes)
    if backend.looks_first:
        with pytest.raises(InvalidArgumentError, match="expected disjoint blocks"):
            migrate(backend, View([plane], [[1, 2]]), View([other], [[3, 1]]), [8])
    before = plane.tensor.clone()
    migrate(backend, View([plane], [[1, 2]]), View([other], [[3, 0]]), [8])
    assert torch.equal(plane.tensor[3].view(torch.int16), before[1].view(torch.int16))
    assert torch.equal(plane.tensor[0].view(torch.int16), before[2].view(torch.int16))


def test_the_ends_of_planes_are_apart(backend: Backend) -> None:
    plane = bnhd(4, 4, 1, 16, torch.bfloat16)
    other = Paged(plane.tensor[1:], plane.axes)
    with pytest.raises(InvalidArgumentError) as refusal:
        migrate(backend, View([plane], [[1]]), View([other], [[2]]), [4])
    assert str(refusal.value) == (
        "dst.planes[0] shares memory with src.planes[0], but the two spans are not the same pool, "
        "so their blocks cannot be told apart; migrate through other memory (spec E.3)"
    )


# --- entries of several tokens, and of a whole sequence ---------------------------------------


def compressed(blocks: int, entries: int, tokens_per_entry: int) -> Paged:
    tensor = filled((blocks, entries, 24), torch.bfloat16, 8)
    made = Paged(tensor, ("block", "token", "dim"), role=6)
    made.tokens_per_entry = tokens_per_entry
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lengths", [[32, 21, 3], [5, 0, 8]], ids=["long", "short"])
def test_an_entry_stands_for_four_tokens(backend: Backend, lengths: list[int], seed: int) -> None:
    """Complete entries move with the tokens of K, by the same tables; others stay."""
    src_rows = [[3, 1, 5], [2, 6, 0], [4, -1, -1]]
    dst_rows = [[1, 4], [0, 2], [3, -1]]
    src_starts, dst_starts = [4, 0, 8], [8, 16, 4]
    k, to_k = bnhd(7, 16, 2, 16, torch.bfloat16), bnhd(5, 32, 2, 16, torch.bfloat16)
    from_, to = compressed(7, 4, 4), compressed(5, 8, 4)
    for i, plane in enumerate((k, from_)):
        randomize(plane, seed + i)
    expected = to.tensor.clone()
    for s, length in enumerate(lengths):
        for e in range(length // 4):
            at, into = src_starts[s] // 4 + e, dst_starts[s] // 4 + e
            block = src_rows[s][at // 4], dst_rows[s][into // 8]
            expected[block[1], into % 8] = from_.tensor[block[0], at % 4]
    ends = View([k, from_], src_rows, src_starts), View([to_k, to], dst_rows, dst_starts)
    migrate(backend, *ends, lengths)
    assert torch.equal(to.tensor.view(torch.int16), expected.view(torch.int16))
    for s, t in tokens_of(lengths):
        at, into = src_starts[s] + t, dst_starts[s] + t
        got = to_k.tensor[dst_rows[s][into // 32], into % 32]
        assert torch.equal(got, k.tensor[src_rows[s][at // 16], at % 16])


def test_entries_begin_where_sequences_do(backend: Backend) -> None:
    from_, to = compressed(3, 4, 4), compressed(3, 4, 4)
    randomize(from_, 0)
    before = to.bytes().clone()
    ends = View([from_], [[1]], [6]), View([to], [[2]])
    sentence = r"^src\.starts\.lengths\[0\] is 6, expected a multiple of 4, the tokens_per_entry"
    with pytest.raises(OutOfRangeError, match=sentence):
        migrate(backend, *ends, [8])
    assert torch.equal(to.bytes(), before)
    too_long = View([from_], [[1]], [4]), View([to], [[2]])
    sentence = r"^row 0 needs tokens \[4, 4 \+ 16\), but src\.block_table holds 16 per row"
    with pytest.raises(OutOfRangeError, match=sentence):
        migrate(backend, *too_long, [16])


@pytest.mark.parametrize("seed", range(3))
def test_a_state_is_one_entry_of_a_sequence(backend: Backend, seed: int) -> None:
    """Found by a slot per sequence at one end, dense at the other; a sequence without tokens has
    none. Its axes are transposed on the way."""
    src, dst = filled((6, 3, 8, 5), torch.float32), filled((4, 3, 5, 8), torch.float32, 4)
    axes = ("block", "head", "dim", "dim")
    from_ = Paged(src, axes, role=8, tokens_per_entry=0)
    to = Paged(dst.transpose(2, 3), axes, role=8, tokens_per_entry=0)
    randomize(from_, seed)
    slots = torch.tensor([5, 2, 0, -1])
    from_.slots = backend.slots(slots)
    expected = dst.clone()
    expected[0], expected[2] = src[5].transpose(1, 2), src[0].transpose(1, 2)
    migrate(backend, View([from_]), View([to]), [1000, 0, 1, 7])
    assert torch.equal(dst.view(torch.int32), expected.view(torch.int32))
    back = Paged(filled((6, 3, 8, 5), torch.float32), axes, role=8, tokens_per_entry=0)
    of_back = slots[[0, 2]]
    back.slots = backend.slots(of_back)
    migrate(backend, View([Paged(to.tensor[[0, 2]], axes, 8, 0, 0)]), View([back]), [3, 3])
    assert torch.equal(back.tensor[[5, 0]], src[[5, 0]])


def test_entries_of_all_kinds_move_in_one_call(backend: Backend) -> None:
    """K, an entry for 4 tokens, one for 16 and a state: what DeepSeek-V4 keeps of a layer."""
    kinds = [(1, 32), (4, 8), (16, 2), (0, 1)]
    src, dst = [], []
    for i, (n, entries) in enumerate(kinds):
        for planes, blocks in ((src, 5), (dst, 4)):
            plane = Paged(filled((blocks, entries, 16), torch.bfloat16), ("block", "token", "dim"))
            plane.role, plane.tokens_per_entry = 40 + i, n
            planes.append(plane)
        randomize(src[-1], i)
    rows = [[4, 2], [1, 3]], [[3, 0], [2, 1]]
    lengths = [50, 20]
    migrate(backend, View(src, rows[0]), View(dst, rows[1]), lengths)
    for (n, entries), from_, to in zip(kinds, src, dst, strict=True):
        written = torch.zeros(to.tensor.shape[:2], dtype=torch.bool)
        for s, length in enumerate(lengths):
            if n == 0:
                assert torch.equal(to.tensor[s], from_.tensor[s])
                written[s] = True
                continue
            for e in range(length // n):
                a, b = (row[s][e // entries] for row in rows)
                assert torch.equal(to.tensor[b, e % entries], from_.tensor[a, e % entries])
                written[b, e % entries] = True
        rest = to.tensor[~written].view(torch.uint8)
        assert bool((rest == SENTINEL).all())
