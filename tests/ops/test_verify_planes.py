"""verify of planes and of POINTERS tables: one bit that differs is found and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters.vllm import amx_planes
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    OutOfRangeError,
    Plane,
    ScaleDesc,
    UnsupportedError,
    describe,
    migrate,
    verify,
)
from kvx_core.ops import readers
from kvx_core.types import Memory
from tests.desc.dlpack import CUDA, Producer
from tests.facts import SAME_MODEL

SEEDS = [1, 2, 3]
LENS = [100, 0, 33]


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few entries at a time."""
    monkeypatch.setattr(readers, "PIECE_BYTES", 5000)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Bytes of every value."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
        .to(torch.uint8)
        .view(dtype)
    )


def flip(tensor: Tensor, *place: int) -> None:
    """Changes the lowest bit of an element."""
    tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])[place] ^= 1


def equal_until_changed(
    src: CacheSpan, dst: CacheSpan, lens: Any, changes: Any, **more: Any
) -> int:
    """Migrates, finds the ends equal, and each change of one bit.

    changes: (tensor, place) and what the difference is called: (layer, kv, sequence, token, head,
             dim). Returns how many values are compared.
    """
    migrate(src, dst, lens, **more)
    found = verify(src, dst, lens, **more)
    assert found, found
    for tensor, place, name in changes:
        flip(tensor, *place)
        differs = verify(src, dst, lens, **more).difference
        assert differs is not None, name
        named = (
            differs.layer,
            differs.kv,
            differs.sequence,
            differs.token,
            differs.head,
            differs.dim,
        )
        assert named == name
        flip(tensor, *place)
    assert verify(src, dst, lens, **more)
    return found.num_values


# --- pages of DeepSeek-V3.2: a latent as K, and two planes over one page of an indexer ------------


def deepseek(block_size: int, num_blocks: int, seed: int) -> tuple[Tensor, Tensor, CacheView]:
    """Source: vllm 0.32 v1/attention/backends/mla/indexer.py"""
    n = block_size
    latent = random((num_blocks, n, 1, 24), torch.bfloat16, seed)
    page = random((num_blocks, n * 12), torch.uint8, seed + 1)  # 8 bytes and a scale per token
    k = page.as_strided((num_blocks, n, 8), (n * 12, 8, 1))
    scale = page.view(torch.float32).as_strided((num_blocks, n), (n * 3, 1), n * 2)
    view = CacheView(
        (CacheDesc.from_kv(describe(latent, "BLOCK_NHD")),),
        SAME_MODEL,
        planes=(
            Plane.of(k, ("block", "token", "dim"), "index_k", dtype="F8_E4M3", replicated=True),
            Plane.of(scale, ("block", "token"), "index_k_scale", replicated=True),
        ),
        null_block_id=0,
    )
    return latent, page, view


@pytest.mark.parametrize("seed", SEEDS)
def test_an_indexer_beside_a_latent(seed: int) -> None:
    _, _, src = deepseek(64, 4, seed)
    latent, page, dst = deepseek(16, 12, seed + 10)
    rows = [[7, 3, 11, 2, 5, 9, 1], [-1] * 7, [8, 4, 6, -1, -1, -1, -1]]
    at = src.at([[3, 1], [-1, -1], [2, -1]], starts=[0, 0, 5]), dst.at(rows)
    changes = [
        (latent, (9, 3, 0, 7), (0, "K", 0, 83, 0, 7)),
        (page, (9, 3 * 8 + 5), (0, "INDEX_K", 0, 83, 0, 5)),
        (page, (6, 16 * 8), (0, "INDEX_K_SCALE", 2, 32, 0, 0)),
    ]
    assert equal_until_changed(*at, LENS, changes) == 133 * (24 + 8 + 1)


def test_null_blocks_of_planes_are_passed_over() -> None:
    _, page, src = deepseek(64, 4, 1)
    _, _, dst = deepseek(64, 4, 2)
    span, into = src.at(BlockTable.packed([[3, 0]]).with_holes()), dst.at([[1, 2]])
    migrate(span, into, [100])
    found = verify(span, into, [100])
    assert found
    assert (found.num_tokens, found.num_left_out) == (64, 36)
    assert found.num_values == 64 * 33
    flip(page, 0, 0)
    assert verify(span, into, [100])


# --- K and V in tiles -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_amx_pages(seed: int) -> None:
    page = random((3, 2, 32, 128), torch.bfloat16, seed)
    k, v = random((2, 1, 75, 2, 64), torch.bfloat16, seed + 1)
    axes = ("block", "token", "head", "dim")
    src = CacheView((), SAME_MODEL, planes=amx_planes(page, 4))
    planes = (Plane.of(k, axes, "k", 4), Plane.of(v, axes, "v", 4))
    dst = CacheView((), SAME_MODEL, planes=planes, dense=True)
    changes = [
        (k, (0, 74, 1, 63), (4, "K", 0, 74, 1, 63)),
        (v, (0, 13, 0, 5), (4, "V", 0, 13, 0, 5)),
    ]
    assert equal_until_changed(src.at([[2, 0, 1]]), dst.at(), [75], changes) == 2 * 75 * 2 * 64


def test_a_range_of_heads_of_planes_with_scales() -> None:
    """FP8 with a scale per head at one end; the other end's head 1 is this one's head 0."""
    axes = ("block", "token", "head", "dim")
    numbers = torch.randn(2, 8, 3, 6).to(torch.float8_e4m3fn)
    scale = ScaleDesc.of(torch.tensor([0.5, 2.0, 0.25]), "PER_HEAD")
    src = Plane.of(numbers, axes, "latent", 7, scale=scale)
    copy = torch.zeros(2, 8, 4, 6)
    dst = Plane.of(copy, axes, "latent", 7)
    whole = Plane.of(torch.randn(2, 8, 2), ("block", "token", "dim"), 50, replicated=True)
    other = Plane.of(torch.randn(2, 8, 2), ("block", "token", "dim"), 50, replicated=True)
    at = [
        CacheView((), SAME_MODEL, planes=planes).at([[1, 0]], head_start=start)
        for planes, start in (((src, whole), 0), ((other, dst), 1))
    ]
    changes = [
        (copy, (1, 2, 2, 5), (7, "LATENT", 0, 2, 1, 5)),
        (other.owner, (0, 5, 1), (0, "role 50", 0, 13, 0, 1)),
    ]
    assert equal_until_changed(*at, [15], changes, num_heads=2) == 15 * (2 * 6 + 2)
    rounded = verify(*at, [15], num_heads=2, tolerance="codec")
    assert rounded


# --- entries of several tokens, and of a sequence ----------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bytes_", [1, 500, 4 << 20], ids=lambda n: f"pieces of {n}")
def test_entries_of_all_kinds(seed: int, bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One per token by its own slots, one per 4 and per 16 tokens by tables; a state by slots."""
    monkeypatch.setattr(readers, "PIECE_BYTES", bytes_)
    src, dst = [], []
    for planes, blocks, s in ((src, 6, seed), (dst, 5, seed + 7)):
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(s)).tolist()
        one, four, long = (random((blocks, n, 6), torch.bfloat16, s + n) for n in (16, 4, 2))
        state = random((blocks, 2, 5), torch.float32, s)
        axes = ("block", "token", "dim")
        slots = [order[t // 16] * 16 + t % 16 for t in range(50)]
        own = [[order[0], order[1]], [order[2], order[3]]]
        planes += [
            Plane.of(one, axes, 40, slots=slots),
            Plane.of(four, axes, 41, tokens_per_entry=4),
            Plane.of(long, axes, 42, tokens_per_entry=16, block_table=own),
            Plane.of(state, ("block", "head", "dim"), "state", tokens_per_entry=0, slots=order[:2]),
        ]
    at = (
        CacheView((), SAME_MODEL, planes=tuple(src)).at([[3, 1, 5], [2, 0, 4]], starts=[16, 0]),
        CacheView((), SAME_MODEL, planes=tuple(dst)).at([[0, 1, 2], [4, 3, -1]], starts=[0, 16]),
    )
    lens = [31, 19]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed + 7)).tolist()
    changes = [
        (dst[0].owner, (order[40 // 16], 40 % 16, 2), (0, "role 40", 1, 9, 0, 2)),
        (dst[1].owner, (1, 2, 5), (0, "role 41", 0, 6, 0, 5)),
        (dst[2].owner, (order[2], 1, 0), (0, "role 42", 1, 0, 0, 0)),
        (dst[3].owner, (order[1], 1, 4), (0, "STATE", 1, 0, 1, 4)),
    ]
    values = 50 * 6 + (7 + 4) * 6 + (1 + 1) * 6 + 2 * 10
    assert equal_until_changed(*at, lens, changes) == values


def test_a_sequence_without_tokens_has_no_state() -> None:
    axes = ("block", "dim")
    src, dst = (random((3, 6), torch.float32, seed) for seed in (1, 2))
    at = [
        CacheView(
            (), SAME_MODEL, planes=(Plane.of(t, axes, "state", tokens_per_entry=0),), dense=True
        ).at()
        for t in (src, dst)
    ]
    dst[[0, 2]] = src[[0, 2]]
    found = verify(*at, [3, 0, 1])
    assert found
    assert (found.num_tokens, found.num_values) == (2, 12)
    difference = verify(*at, [3, 1, 1]).difference
    assert difference is not None
    assert (difference.kv, difference.sequence, difference.token) == ("STATE", 1, 0)


# --- blocks that lie anywhere ---------------------------------------------------------------------


def stack(seed: int, heads: int = 3) -> tuple[Tensor, CacheView]:
    """Blocks of K and V of 3 layers, the second without V: (blocks, 5, 4, heads, 10)."""
    pool = random((7, 5, 4, heads, 10), torch.bfloat16, seed)
    tensors = [describe(pool[:1, i], "BLOCK_NHD") for i in range(5)]
    caches = [tensors[:2], tensors[2:3], tensors[3:]]
    return pool, CacheView(tuple(CacheDesc.from_kv(*kv) for kv in caches), SAME_MODEL)


def pointers(pool: Tensor, rows: list[list[int]], nulls: Any = ()) -> BlockTable:
    """nulls: (row, column, plane)"""
    return BlockTable.pointers(
        [
            [
                [None if b < 0 or (r, c, p) in nulls else pool[b, p] for p in range(5)]
                for c, b in enumerate(row)
            ]
            for r, row in enumerate(rows)
        ]
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ends", ["src", "dst", "both"])
def test_pointers_at_either_end(seed: int, ends: str) -> None:
    (src_pool, src), (dst_pool, dst) = stack(seed), stack(seed + 10)
    rows = [[4, 1, 3], [-1, -1, -1], [0, 6, -1]], [[2, 5, 0], [-1, -1, -1], [1, 3, -1]]
    plain = [
        CacheView(
            tuple(
                CacheDesc.from_kv(*(describe(pool[:, i], "BLOCK_NHD") for i in planes))
                for planes in ((0, 1), (2,), (3, 4))
            ),
            SAME_MODEL,
        ).at(table)
        for pool, table in ((src_pool, rows[0]), (dst_pool, rows[1]))
    ]
    at = (
        plain[0] if ends == "dst" else src.at(pointers(src_pool, rows[0])),
        plain[1] if ends == "src" else dst.at(pointers(dst_pool, rows[1])),
    )
    changes = [
        (dst_pool, (5, 0, 3, 2, 9), (0, "K", 0, 7, 2, 9)),
        (src_pool, (6, 1, 0, 1, 4), (0, "V", 2, 4, 1, 4)),
        (dst_pool, (0, 2, 0, 0, 0), (1, "K", 0, 8, 0, 0)),
        (dst_pool, (3, 4, 0, 2, 9), (2, "V", 2, 4, 2, 9)),
    ]
    assert equal_until_changed(*at, [9, 0, 5], changes) == 14 * 5 * 3 * 10


def test_a_null_pointer_is_null_for_its_tensor_alone() -> None:
    (src_pool, src), (dst_pool, dst) = stack(1), stack(2)
    span = src.at(pointers(src_pool, [[4, 1]], {(0, 1, 3)}).with_holes())
    into = dst.at(pointers(dst_pool, [[2, 5]], {(0, 0, 0)}).with_holes())
    migrate(span, into, [8])
    found = verify(span, into, [8])
    assert found
    assert found.num_tokens == 4  # of K of layer 0
    assert found.num_values == (3 * 8 + 2 * 4) * 30
    flip(dst_pool, 5, 3, 0, 0, 0)
    flip(dst_pool, 2, 0, 0, 0, 0)
    assert verify(span, into, [8])
    flip(dst_pool, 2, 3, 3, 0, 0)
    difference = verify(span, into, [8]).difference
    assert difference is not None
    assert (difference.layer, difference.kv, difference.token) == (2, "K", 3)


def test_layers_that_are_less_aligned_than_others() -> None:
    """Blocks of layer 0 lie as those of layer 1 do, at multiples of 2 bytes: spec E.12."""
    raw = [random((600,), torch.bfloat16, seed) for seed in (1, 2, 3, 4)]
    first, other = raw[0][:48].view(1, 4, 1, 12), raw[1][1:49].view(1, 4, 1, 12)
    view = CacheView(
        tuple(CacheDesc.from_kv(describe(t, "BLOCK_NHD")) for t in (first, other)), SAME_MODEL
    )
    blocks = [raw[0][97:145], raw[1][193:241]]
    assert [t.data_ptr() % 16 for t in (first, other, *blocks)] == [0, 2, 2, 2]
    span = view.at(BlockTable.pointers([[blocks]]))
    dense = torch.zeros(2, 1, 4, 1, 12, dtype=torch.bfloat16)
    into = CacheView(
        tuple(CacheDesc.from_kv(describe(t, "BLOCK_NHD")) for t in dense), SAME_MODEL, dense=True
    )
    changes = [(dense[0], (0, 3, 0, 0), (0, "K", 0, 3, 0, 0))]
    assert equal_until_changed(span, into.at(), [4], changes) == 2 * 48


# --- what is refused ------------------------------------------------------------------------------


def state(*shape: int, **fields: Any) -> Plane:
    axes = ("block", "dim") if len(shape) == 2 else ("block", "token", "dim")
    return Plane.of(torch.zeros(shape), axes, **({"role": "state", "tokens_per_entry": 0} | fields))


@pytest.mark.parametrize(
    ("src", "dst", "sentence"),
    [
        (state(3, 6), None, "one of src and dst has a plane STATE of layer 0, expected both to"),
        (
            state(3, 6),
            state(3, 6, layer=1),
            "one of src and dst has a plane STATE of layer 0, expected",
        ),
        (
            None,
            state(3, 6, role=40),
            "one of src and dst has a plane role 40 of layer 0, expected both",
        ),
        (
            state(3, 6),
            state(3, 5),
            "STATE of layer 0 has numbers in DIM 5 at dst, expected 6 as at",
        ),
        (
            state(3, 6),
            state(3, 1, 6, tokens_per_entry=1),
            "STATE of layer 0 has tokens_per_entry 1 at dst, expected 0 as at src; describe both "
            "alike, or leave the plane out at both ends (spec E.11)",
        ),
        (
            state(3, 6),
            state(3, 6, replicated=True),
            "STATE of layer 0 has replicated True at dst, expected",
        ),
    ],
)
def test_planes_that_are_no_pair(src: Plane | None, dst: Plane | None, sentence: str) -> None:
    _, _, view = deepseek(64, 4, 1)
    ends = [
        replace(view, planes=() if plane is None else (plane,)).at([[1, 2]]) for plane in (src, dst)
    ]
    with pytest.raises(InvalidArgumentError) as caught:
        verify(*ends, [5])
    assert str(caught.value).startswith(sentence)


def test_indices_of_planes_are_checked() -> None:
    _, _, view = deepseek(64, 4, 1)
    wrong = replace(view.planes[0], block_table=BlockTable.of([[1, 4]]))
    span = replace(view, planes=(wrong,)).at([[1, 2]])
    expected = (
        "verify reads dst as src: src.planes[].block_table.indices[1] is 4, expected below "
        "num_blocks 4 (spec 5.1)"
    )
    with pytest.raises(OutOfRangeError) as caught:
        verify(replace(view, planes=view.planes[:1]).at([[1, 2]]), span, [100])
    assert str(caught.value) == expected


def test_planes_on_a_device_are_refused() -> None:
    there = Plane.of(Producer(4096, (3, 6), device_type=CUDA), ("block", "dim"), 40)
    view = CacheView((), SAME_MODEL, planes=(there,), dense=True)
    assert there.memory is Memory.DEVICE
    with pytest.raises(
        UnsupportedError,
        match=r"^src\.planes\[0\] is on a device and belongs to a Producer, expected",
    ):
        verify(view, view, [1])
