"""K's rotary dims, which an engine keeps in half or in interleaved order, reordered by migrate.

The oracle of the meaning is a model of both conventions in torch; that of the bytes is
tests/reference.py, on a source whose dims have been moved one by one.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
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
    Layout,
    PoolDesc,
    compare,
    describe,
    migrate,
    verify,
)
from kvx_core.ops import reorder
from kvx_core.types import ScaleGranularity
from tests import reference, tables
from tests.caches import (
    LAYOUTS,
    Cache,
    Geometry,
    assert_same_bytes,
    canonical,
    mla,
    pack_of,
    random_values,
    scaled,
)
from tests.reference import Packed, Place
from tests.snapshot.sections import section_of

Order = Literal["half", "interleaved"]
ORDERS: tuple[tuple[Order, Order], ...] = (("half", "interleaved"), ("interleaved", "half"))
in_both_directions = pytest.mark.parametrize(("held", "wanted"), ORDERS)

FACTS = CacheFacts(fingerprint="one model", rope_applied=True, hadamard=False)


def facts_of(rotary: Order, rotary_dim: int) -> CacheFacts:
    return replace(FACTS, rotary=rotary, rotary_dim=rotary_dim)


def moved(vectors: Tensor, wanted: Order, rotary_dim: int) -> Tensor:
    """Vectors of the other order in this one, a pair of dims at a time: [.., head_dim]."""
    result = vectors.clone()
    for pair in range(rotary_dim // 2):
        in_half = pair, pair + rotary_dim // 2
        interleaved = 2 * pair, 2 * pair + 1
        ours, theirs = (in_half, interleaved) if wanted == "half" else (interleaved, in_half)
        for mine, other in zip(ours, theirs, strict=True):
            result[..., mine] = vectors[..., other]
    return result


# ---- what it means ----


def rotate(vectors: Tensor, order: Order, rotary_dim: int) -> Tensor:
    """Vectors [token, head, dim] turned by their position, as GPT-NeoX or GPT-J do."""
    angles = torch.arange(len(vectors), dtype=torch.float64)[:, None, None] * torch.tensor(
        [100.0 ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)], dtype=torch.float64
    )
    cos, sin = angles.cos(), angles.sin()
    result = vectors.clone()
    if order == "half":
        at = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    else:
        at = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    x, y = vectors[..., at[0]], vectors[..., at[1]]
    result[..., at[0]] = x * cos - y * sin
    result[..., at[1]] = y * cos + x * sin
    return result


@in_both_directions
@pytest.mark.parametrize("rope_applied", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (20, 10), (6, 4), (12, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_the_other_engine(
    held: Order, wanted: Order, rope_applied: bool, head_dim: int, rotary_dim: int, seed: int
) -> None:
    """Two engines compute one model, each in its order: the rows of key and query weights of the
    second are reordered. Its own keys, and the first engine's after migrate, are the same bytes.
    """
    tokens, heads, hidden = 9, 3, 7
    generator = torch.Generator().manual_seed(seed)

    def whole_numbers(*shape: int) -> Tensor:  # so that sums do not depend on their order
        return torch.randint(-9, 10, shape, generator=generator).double()

    x, w_k, w_q = (whole_numbers(n, hidden) for n in (tokens, heads * head_dim, heads * head_dim))

    def engine(order: Order) -> tuple[Tensor, Tensor]:
        """Keys as they are stored, and scores from them: [token, head, dim], [head, q, k]."""

        def projected(weights: Tensor) -> Tensor:
            rows = weights.view(heads, head_dim, hidden)
            if order == wanted:
                rows = moved(rows.transpose(1, 2), wanted, rotary_dim).transpose(1, 2)
            return torch.einsum("td,hed->the", x, rows)

        key, query = projected(w_k), rotate(projected(w_q), order, rotary_dim)
        stored = rotate(key, order, rotary_dim) if rope_applied else key
        return stored, scores(stored, query, order)

    def scores(stored: Tensor, query: Tensor, order: Order) -> Tensor:
        key = stored if rope_applied else rotate(stored, order, rotary_dim)
        return torch.einsum("qhe,khe->hqk", query, key)

    def view(key: Tensor, value: Tensor, order: Order) -> CacheView:
        cache = CacheDesc.from_kv(
            describe(key[None], "BLOCK_NHD"), describe(value[None], "BLOCK_NHD")
        )
        facts = replace(facts_of(order, rotary_dim), rope_applied=rope_applied)
        return CacheView(layers=(cache,), facts=facts, dense=True)

    (first, first_scores), (second, second_scores) = engine(held), engine(wanted)
    torch.testing.assert_close(first_scores, second_scores, rtol=0, atol=1e-9)
    value = torch.randn(tokens, heads, 5, generator=generator)
    # float32 bits of float64 sums of whole numbers and rotations, the same on both sides
    got, got_value = torch.full_like(first, 9).float(), torch.full_like(value, 9)
    migrate(view(first.float(), value, held), view(got, got_value, wanted), [tokens])
    assert torch.equal(got, second.float())
    assert torch.equal(got_value, value)


# ---- which bytes ----


def view_of(cache: Cache, facts: CacheFacts) -> CacheView:
    encoding = "bytes" if cache.layers[0].k.tensor.dtype == torch.uint8 else "values"
    section = section_of(cache, range(len(cache.layers)), [0], encoding=encoding)
    return replace(section.view, facts=facts)


def with_k(cache: Cache, change: Callable[[Tensor], Tensor]) -> Cache:
    """A copy whose K vectors have gone through `change`, token by token."""
    result = cache.clone()
    for layer in result.layers:
        for block, offset in itertools.product(range(cache.num_blocks), range(cache.block_size)):
            place = Place(block, offset)
            layer.k.put(place, change(layer.k.read(place)))
    return result


LENS = (0, 1, 11, 6)
# Of each seed: head_dim, that of V, and the dims that rotate where not all do.
SIZES = ((16, 16, 8), (40, 24, 16), (24, 24, 6))
PLAIN = ("nhd", "hnd", "vllm_LBNHC", "custom_dim_outermost")


def geometry(seed: int, name: str, block_size: int) -> Geometry:
    head_dim, v_head_dim, _ = SIZES[seed]
    same = name in ("flashinfer", "universal", "tensorrt_llm")
    return Geometry(
        num_blocks=9,
        block_size=block_size,
        num_kv_heads=3,
        head_dim=head_dim,
        v_head_dim=None if same else v_head_dim,
    )


def check(
    src: Cache, dst: Cache, held: Order, wanted: Order, rotary_dim: int, seed: int, **options: Any
) -> None:
    """migrate moves what the reference moves from a source whose dims have been reordered."""
    here = tables.packed(src, LENS, seed, shared=False, nulls=0.2, null_block_id=0)
    there = tables.packed(dst, LENS, seed + 1, shared=False)
    expected, before = dst.clone(), src.clone()
    reference.migrate(
        with_k(src, lambda k: moved(k, wanted, rotary_dim)).layers,
        here,
        expected.layers,
        there,
        LENS,
        **options,
    )
    names = {"src_head": "head_start", "dst_head": "head_start"}
    heads = [
        {names[k]: options.pop(k)} if (k := f"{end}_head") in options else {}
        for end in ("src", "dst")
    ]
    from_view = replace(view_of(src, facts_of(held, rotary_dim)), null_block_id=0)
    at_src = from_view.at(BlockTable.packed(here.indices).with_holes(), **heads[0])
    at_dst = view_of(dst, facts_of(wanted, rotary_dim)).at(there.indices, **heads[1])
    for _ in range(2):  # the second time, by the views that have been described
        migrate(at_src, at_dst, list(LENS), **options)
        assert_same_bytes(dst, expected)
    assert_same_bytes(src, before)
    options.pop("zero_fill", None)
    assert verify(at_src, at_dst, list(LENS), **options, tolerance="codec")


def same_dims(a: str, b: str, seed: int) -> bool:
    return geometry(seed, a, 4).head_dims == geometry(seed, b, 4).head_dims


EVERY = sorted(set(LAYOUTS) - {"mla", "tensorrt_llm"})


@in_both_directions
@pytest.mark.parametrize("name", EVERY)
def test_every_layout_to_and_from_plain_ones(name: str, held: Order, wanted: Order) -> None:
    dtypes = torch.bfloat16, torch.float32, torch.float16
    for seed, dtype in enumerate(dtypes):
        rotary_dim = SIZES[seed][0]
        other = PLAIN[(EVERY.index(name) + seed) % len(PLAIN)]
        for first, second in ((name, other), (other, name)):
            g = geometry(seed, first, 4), geometry(seed, second, 3)
            if same_dims(first, second, seed):
                src = LAYOUTS[first](g[0], dtype, seed).fill(seed)
                dst = LAYOUTS[second](g[1], dtype, seed + 50)
                check(src, dst, held, wanted, rotary_dim, seed)


@in_both_directions
@pytest.mark.parametrize("name", ["nhd", "hnd", "packed8", "vllm_LHBNC", "custom_token_innermost"])
@pytest.mark.parametrize("seed", range(3))
def test_heads_that_rotate_in_part(name: str, held: Order, wanted: Order, seed: int) -> None:
    rotary_dim = SIZES[seed][2]
    for first, second in ((name, "nhd"), ("nhd", name)):
        src = LAYOUTS[first](geometry(seed, first, 4), torch.bfloat16, seed).fill(seed)
        dst = LAYOUTS[second](geometry(seed, second, 5), torch.bfloat16, seed + 50)
        if name == "packed8" and rotary_dim % 8:
            with pytest.raises(FactsMismatchError, match="k is packed by 8, and no strides"):
                check(src, dst, held, wanted, rotary_dim, seed)
        else:
            check(src, dst, held, wanted, rotary_dim, seed)
            check(src, dst, held, wanted, rotary_dim, seed, zero_fill=True)


@in_both_directions
def test_there_and_back(held: Order, wanted: Order) -> None:
    """Also through FP8 that is stored as it is, with its scales."""
    for seed, dtype in enumerate((torch.float8_e4m3fn, torch.bfloat16, torch.float32)):
        for rotary_dim in {*SIZES[seed], 2, 0}:
            if rotary_dim > SIZES[seed][0]:
                continue
            g = geometry(seed, "nhd", 4)
            src = LAYOUTS["nhd"](g, dtype, seed).fill(seed)
            middle, back = LAYOUTS["hnd"](g, dtype, seed + 50), LAYOUTS["nhd"](g, dtype, seed)
            table, lens = [[7, 1, 4], [2, 8, 0]], [11, 12]
            ends = [
                view_of(cache, facts_of(order, rotary_dim)).at(table)
                for cache, order in ((src, held), (middle, wanted), (back, held))
            ]
            migrate(ends[0], ends[1], lens)
            expected = with_k(src, lambda k, n=rotary_dim: moved(k, wanted, n))  # type: ignore[misc]
            plain = [view_of(cache, FACTS).at(table) for cache in (expected, middle)]
            assert verify(*plain, lens)
            migrate(ends[1], ends[2], lens)
            assert verify(*(view_of(cache, FACTS).at(table) for cache in (src, back)), lens)


@in_both_directions
@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_converted_and_scaled_on_the_way(held: Order, wanted: Order, seed: int) -> None:
    narrow, granularity = (
        (torch.float8_e4m3fn, ScaleGranularity.PER_TENSOR),
        (torch.float8_e5m2, ScaleGranularity.PER_HEAD),
        (torch.float8_e4m3fn, ScaleGranularity.PER_TOKEN_HEAD),
    )[seed]
    head_dim, _, part = SIZES[seed]
    for rotary_dim in (head_dim, part):
        for names in (("nhd", "vllm_LBHNC"), ("packed8", "nhd"), ("hnd", "packed16")):
            packs = (pack_of(head_dim, int(name[6:])) for name in names if "packed" in name)
            if rotary_dim == part and any(part % pack for pack in packs):
                continue  # a part of a pack: refused
            g = geometry(seed, "nhd", 4)
            wide = LAYOUTS[names[0]](g, torch.bfloat16, seed).fill(seed)
            small = scaled(LAYOUTS[names[1]](g, narrow, seed + 9), granularity, seed)
            check(wide, small, held, wanted, rotary_dim, seed)
            small = scaled(LAYOUTS[names[0]](g, narrow, seed).fill(seed), granularity, seed)
            check(small, LAYOUTS[names[1]](g, torch.float32, seed), held, wanted, rotary_dim, seed)


@in_both_directions
def test_some_heads_slots_and_starts(held: Order, wanted: Order) -> None:
    for seed in range(3):
        rotary_dim = SIZES[seed][seed % 2 * 2]
        src = LAYOUTS["vllm_LBNHC"](geometry(seed, "nhd", 4), torch.bfloat16, seed).fill(seed)
        g = replace(geometry(seed, "nhd", 3), num_kv_heads=2)
        dst = LAYOUTS["nhd"](g, torch.bfloat16, seed + 50)
        check(src, dst, held, wanted, rotary_dim, seed, src_head=2, dst_head=1, num_heads=1)
        at_src = view_of(src, facts_of(held, rotary_dim)).at([[3, 1, 2]], starts=[5], head_start=1)
        slots = [25, -1, 3, 14]
        expected = dst.clone()
        reference.migrate(
            with_k(src, lambda k, n=rotary_dim: moved(k, wanted, n)).layers,  # type: ignore[misc]
            Packed(torch.tensor([[3, 1, 2]]), 4),
            expected.layers,
            reference.Slots(torch.tensor(slots), [4], 3),
            [4],
            src_starts=[5],
            src_head=1,
            num_heads=2,
        )
        at_dst = view_of(dst, facts_of(wanted, rotary_dim)).at(slots=slots)
        assert migrate(at_src, at_dst, [4], num_heads=2) == 3 * 2 * 2 * sum(g.head_dims) * 2
        assert_same_bytes(dst, expected)


@in_both_directions
def test_scales_found_on_the_way_are_those_of_whole_heads(held: Order, wanted: Order) -> None:
    for seed in range(3):
        g = geometry(seed, "nhd", 4)
        src = LAYOUTS["nhd"](g, torch.bfloat16, seed).fill(seed)
        plain = with_k(src, lambda k, n=g.head_dim: moved(k, wanted, n))  # type: ignore[misc]
        empty = LAYOUTS["hnd"](g, torch.float8_e4m3fn, seed + 50)
        found = [scaled(empty.clone(), ScaleGranularity.PER_TOKEN_HEAD, seed) for _ in "ab"]
        table, lens = [[7, 1, 4], [2, 8, 0]], [11, 12]
        for cache, dst, order in ((src, found[0], held), (plain, found[1], wanted)):
            at_src = view_of(cache, facts_of(order, g.head_dim)).at(table)
            at_dst = view_of(dst, facts_of(wanted, g.head_dim)).at(table)
            migrate(at_src, at_dst, lens, find_scales=True)
        assert_same_bytes(*found)
        for a, b in zip(*(cache.layers for cache in found), strict=True):
            for x, y in zip(a.halves(), b.halves(), strict=True):
                assert x.scale is not None
                assert y.scale is not None
                assert torch.equal(x.scale, y.scale)


@in_both_directions
def test_both_ends_packed_where_strides_can_say_it(held: Order, wanted: Order) -> None:
    """Packs that are the pairs of interleaved order, or the halves of half order."""
    packs: dict[Order, int] = {"interleaved": 2, "half": 12}
    g = replace(geometry(2, "nhd", 4), v_head_dim=None)
    for other in (8, 6, 3):
        for order, pack in packs.items():
            sizes = {order: pack, ("half" if order == "interleaved" else "interleaved"): other}
            src = canonical(Layout.BLOCK_HND_PACKED, sizes[held])(g, torch.bfloat16, 0).fill(0)
            dst = canonical(Layout.BLOCK_HND_PACKED, sizes[wanted])(g, torch.bfloat16, 50)
            check(src, dst, held, wanted, 24, 0)


# ---- pools ----


def in_pool(pool: Tensor, facts: CacheFacts) -> CacheView:
    """Two layers of [block, layer, K/V, head, token, dim]."""
    layers = []
    for layer in range(2):
        k, v = (describe(pool[:, layer, kv], "BLOCK_HND") for kv in range(2))
        sub_block = pool[0, 0, 0].numel() * pool.itemsize
        layers.append(CacheDesc.from_kv(k, v, pool=PoolDesc.of(pool[:, layer, 0], sub_block)))
    return CacheView(layers=tuple(layers), facts=facts)


@in_both_directions
@pytest.mark.parametrize("seed", range(3))
def test_pools_of_tensorrt_llm(held: Order, wanted: Order, seed: int) -> None:
    dim, lens, blocks = SIZES[seed][0], [7, 3], [[5, 2], [0, 0]]
    pool = random_values((6, 2, 2, 3, 4, dim), torch.bfloat16, seed)
    rows = torch.tensor([[[[b * 4 + kv for b in row] for kv in range(2)]] for row in blocks])
    table = BlockTable.kv_offsets(rows.int())
    src = in_pool(pool, facts_of(held, dim)).at(table)
    tokens = [torch.full((2, 8, 3, dim), 9.0).bfloat16() for _ in range(4)]
    layers = tuple(
        CacheDesc.from_kv(*(describe(t, "BLOCK_NHD") for t in tokens[i : i + 2])) for i in (0, 2)
    )
    dst = CacheView(layers=layers, facts=facts_of(wanted, dim), dense=True)
    migrate(src, dst, lens)
    for i, got in enumerate(tokens):
        expected = torch.full_like(got, 9)
        for s, n in enumerate(lens):
            held_rows = pool[blocks[s], i // 2, i % 2].transpose(1, 2).reshape(-1, 3, dim)[:n]
            expected[s, :n] = held_rows if i % 2 else moved(held_rows, wanted, dim)
        assert torch.equal(got, expected)
    back = torch.full_like(pool, 9)
    migrate(dst, in_pool(back, facts_of(held, dim)).at(table), lens)
    assert verify(src, in_pool(back, facts_of(held, dim)).at(table), lens)
    part = replace(dst, facts=facts_of(wanted, dim - 2))
    before = [t.clone() for t in tokens]
    with pytest.raises(FactsMismatchError) as refused:
        migrate(in_pool(pool, facts_of(held, dim - 2)).at(table), part, lens)
    assert refused.value.reasons == (
        f"rotary is '{held}' at the source and '{wanted}' at the destination: rotary_dim is "
        f"{dim - 2} and src.layers[0].head_dim is {dim}, so that K moves in two parts, which a "
        "pool cannot be described by. Migrate by way of a cache without one",
    )
    assert all(map(torch.equal, tokens, before))


# ---- what is refused ----


def refused(src: CacheView, dst: CacheView, **options: Any) -> tuple[str, ...]:
    """The reasons of migrate, which are verify's too, without what they all begin with."""
    begins = "rotary is 'half' at the source and 'interleaved' at the destination: "
    with pytest.raises(FactsMismatchError) as error:
        migrate(src.at([[0]]), dst.at([[1]]), [1], **options)
    if not options:
        with pytest.raises(FactsMismatchError) as of_verify:
            verify(src.at([[0]]), dst.at([[1]]), [1])
        assert of_verify.value.reasons == error.value.reasons
    assert all(reason.startswith(begins) for reason in error.value.reasons)
    return tuple(reason.removeprefix(begins) for reason in error.value.reasons)


def ends(
    rotary_dim: int = 16, name: str | tuple[str, str] = "nhd", dtype: torch.dtype = torch.bfloat16
) -> tuple[Cache, CacheView, Cache, CacheView]:
    """A source in half order and a destination in interleaved order, head_dim 16."""
    g, names = Geometry(), (name, name) if isinstance(name, str) else name
    src = LAYOUTS[names[0]](g, dtype, 1).fill(1)
    dst = LAYOUTS[names[1]](g, dtype, 2)
    here, there = (
        view_of(cache, facts_of(order, rotary_dim))
        for cache, order in zip((src, dst), ("half", "interleaved"), strict=True)
    )
    return src, here, dst, there


def check_untouched(dst: Cache, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
    assert_same_bytes(dst, LAYOUTS[name](Geometry(), dtype, 2))


def test_opaque_bytes_are_refused() -> None:
    _, src, dst, into = ends(dtype=torch.uint8)
    assert refused(src, into) == (
        "src.layers[0].k is U8, opaque bytes, whose dims cannot be told apart",
        "dst.layers[0].k is U8, opaque bytes, whose dims cannot be told apart",
    )
    check_untouched(dst, "nhd", torch.uint8)


def test_one_memory_for_k_and_v_is_refused() -> None:
    _, src, dst, into = ends()
    k = into.layers[0].k
    shared = CacheDesc.from_kv(k, k, shared_kv=True)
    into = replace(into, layers=(shared, into.layers[1]))
    reason = "dst.layers[0] has K and V in the same memory, and only dims of K change places"
    assert refused(src, into) == (reason,)
    check_untouched(dst, "nhd")


def test_more_rotary_dims_than_a_head_has_are_refused() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        ends(18)
    assert str(raised.value) == (
        "facts.rotary_dim is 18, expected at most head_dim, which is 16: it counts the dims of a "
        "head that rotate"
    )


def test_more_rotary_dims_than_some_heads_have_are_refused() -> None:
    """The first layers have more dims than the others."""
    _, src, dst, into = ends()
    wide = CacheDesc.from_kv(*(describe(torch.zeros(3, 4, 2, 20), "BLOCK_NHD") for _ in "kv"))
    here, there = (
        replace(view, layers=(wide, *view.layers[1:]), facts=replace(view.facts, rotary_dim=18))
        for view in (src, into)
    )
    assert refused(here, there) == tuple(
        f"rotary_dim is 18 and {end}.layers[1].head_dim is 16, expected at least as many"
        for end in ("src", "dst")
    )
    check_untouched(dst, "nhd")


def test_a_latent_of_mla_is_refused() -> None:
    """Its last dims rotate. Where all of a head does, it is a head like others."""
    _, src, dst, into = ends(8, "mla")
    assert refused(src, into) == tuple(
        f"rotary_dim is 8 and {end}.layers[0].head_dim is 16 without a V, as in a latent of MLA, "
        "whose first dims do not rotate"
        for end in ("src", "dst")
    )
    check_untouched(dst, "mla")
    check(
        mla(Geometry(num_blocks=9), torch.float16, 1).fill(1),
        mla(Geometry(num_blocks=9), torch.float16, 2),
        *ORDERS[0],
        16,
        1,
    )


def test_finding_scales_of_a_head_in_two_parts_is_refused() -> None:
    _, src, _, _ = ends(8)
    dst = LAYOUTS["nhd"](Geometry(), torch.float8_e4m3fn, 2)
    dst = scaled(dst, ScaleGranularity.PER_TOKEN_HEAD, 3)
    before, into = dst.clone(), view_of(dst, facts_of("interleaved", 8))
    assert refused(src, into, find_scales=True) == tuple(
        f"rotary_dim is 8 and {end}.layers[0].head_dim is 16, so that K moves in two parts, and "
        "find_scales would find a scale for each. Migrate by way of a float16 or bfloat16 cache "
        "in the order of dst"
        for end in ("src", "dst")
    )
    assert_same_bytes(dst, before)
    migrate(src.at([[0]]), into.at([[1]]), [1])  # scales that are there serve both parts


def test_packs_that_no_strides_step_through_are_refused() -> None:
    _, src, dst, into = ends(16, "packed8")
    src = replace(src, layers=tuple(replace(la, k=packed4().layers[0].k) for la in src.layers))
    assert refused(src, into) == tuple(
        f"{end}.layers[0].k is packed by {pack}, and no strides step through its dims in another "
        "order. Migrate by way of a cache that is not packed"
        for end, pack in (("src", 4), ("dst", 8))
    )
    check_untouched(dst, "packed8")


UNITS: dict[str, tuple[int, int]] = {"Q8_0": (32, 34), "Q5_1": (32, 24)}  # numbers, bytes


def in_units(name: str, head_dim: int, rotary: Order, rotary_dim: int) -> tuple[Tensor, CacheView]:
    """One layer of 4 blocks of 3 tokens and 2 heads, filled with sentinels."""
    numbers, num_bytes = UNITS[name]
    memory = torch.full((2, 4, 3, 2, head_dim // numbers * num_bytes), 0x5A, dtype=torch.uint8)
    cache = CacheDesc.from_kv(*(describe(half, "BLOCK_NHD", dtype=name) for half in memory))
    return memory, CacheView(layers=(cache,), facts=facts_of(rotary, rotary_dim))


@in_both_directions
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("rotary_dim", [96, 64])
@pytest.mark.parametrize("seed", range(3))
def test_units_of_several_numbers_keep_their_order_and_the_other_end_is_reordered(
    held: Order, wanted: Order, name: str, rotary_dim: int, seed: int
) -> None:
    """Into units and out of them: the same as from and to a cache that has the units' order."""
    tokens = random_values((2, 4, 3, 2, 96), torch.bfloat16, seed)
    tables, lens = ([[1, 3]], [[2, 0]]), [5]

    def of(values: Tensor, rotary: Order) -> CacheView:
        cache = CacheDesc.from_kv(*(describe(half, "BLOCK_NHD") for half in values))
        return CacheView(layers=(cache,), facts=facts_of(rotary, rotary_dim))

    plain = torch.stack([moved(tokens[0], wanted, rotary_dim), tokens[1]])
    (got, into), (expected, like) = (in_units(name, 96, wanted, rotary_dim) for _ in "ab")
    migrate(of(tokens, held).at(tables[0]), into.at(tables[1]), lens)
    migrate(of(plain, wanted).at(tables[0]), like.at(tables[1]), lens)
    assert torch.equal(got, expected)
    assert (got == 0x5A).any()
    back, unmoved = torch.full_like(tokens, 9), torch.full_like(tokens, 9)
    migrate(into.at(tables[1]), of(back, held).at(tables[0]), lens)
    migrate(into.at(tables[1]), of(unmoved, wanted).at(tables[0]), lens)
    assert torch.equal(back, torch.stack([moved(unmoved[0], held, rotary_dim), unmoved[1]]))
    assert verify(into.at(tables[1]), of(back, held).at(tables[0]), lens, tolerance="codec")


@pytest.mark.parametrize("name", UNITS)
def test_units_of_several_numbers_are_not_taken_apart(name: str) -> None:
    _, src = in_units(name, 96, "half", 96)
    dst, into = in_units(name, 96, "interleaved", 96)
    assert refused(src, into) == tuple(
        f"{end}.layers[0].k is {name}, units of 32 dims, which are not taken apart. Migrate by way "
        "of a float32 cache"
        for end in ("src", "dst")
    )
    assert (dst == 0x5A).all()
    dst, part = in_units(name, 96, "interleaved", 80)  # two units and a half
    plain = CacheDesc.from_kv(*(describe(torch.zeros(4, 3, 2, 96), "BLOCK_NHD") for _ in "kv"))
    (reason,) = refused(CacheView(layers=(plain,), facts=facts_of("half", 80)), part)
    assert reason.startswith(f"dst.layers[0].k is {name}, units of 32 dims, which are not taken")
    assert (dst == 0x5A).all()


def packed4() -> CacheView:
    return view_of(canonical(Layout.BLOCK_HND_PACKED, 4)(Geometry(), torch.bfloat16, 5), FACTS)


def test_descriptors_that_are_wrong_are_refused_as_ever() -> None:
    """New shapes do not hide that the old ones were wrong."""
    _, src, dst, into = ends()
    k = src.layers[0].k

    def move(change: dict[str, Any]) -> None:
        wrong = replace(src.layers[0], k=replace(k, **change))
        migrate(replace(src, layers=(wrong, wrong)).at([[0]]), into.at([[1]]), [1])

    for change, message in (
        ({"shape": (*k.shape[:3], 14)}, r"src.layers\[0\]: cache.k.shape\[3\] is 14, expected"),
        ({"stride": (*k.stride[:3], 5)}, "v is in the memory of k"),
        ({"data": 0}, r"src.layers\[0\]: cache.k.data is NULL"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            move(dict(change))
    fewer = CacheView(layers=into.layers[:1], facts=into.facts)
    with pytest.raises(InvalidArgumentError, match=r"dst.num_layers is 1, expected src.num_layers"):
        migrate(src.at([[0]]), fewer.at([[1]]), [1])
    wider = view_of(LAYOUTS["nhd"](Geometry(head_dim=24), torch.bfloat16, 2), into.facts)
    with pytest.raises(InvalidArgumentError, match=r"dst.layers\[0\].k has head_dim 24, expected"):
        migrate(src.at([[0]]), wider.at([[1]]), [1])
    check_untouched(dst, "nhd")


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_one_pool_cannot_hold_both_orders(rotary_dim: int) -> None:
    src, here, _, _ = ends(rotary_dim)
    before = src.clone()
    there = replace(here, facts=facts_of("interleaved", rotary_dim))
    with pytest.raises(InvalidArgumentError, match="memory"):
        migrate(here.at([[0]]), there.at([[1]]), [1])
    assert_same_bytes(src, before)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_nothing_is_written_when_the_call_fails(rotary_dim: int) -> None:
    """All parts of K are one call: a wrong block id is found before any of them moves."""
    _, src, dst, into = ends(rotary_dim)
    with pytest.raises(IndexError, match="block_table"):
        migrate(src.at([[0, 1], [2, 77]]), into.at([[1, 2], [3, 4]]), [8, 8])
    check_untouched(dst, "nhd")


# ---- descriptions ----


def test_views_keep_what_was_described_and_nothing_keeps_them() -> None:
    for rotary_dim in (16, 8):
        _, src, _, into = ends(rotary_dim)
        (transform,) = compare(src.facts, into.facts).transforms
        first = reorder.reordered(src.at([[0]]), into.at([[1]]), transform)
        again = reorder.reordered(src.at([[0]]), into.at([[1]]), transform)
        assert all(a.view is b.view for a, b in zip(first, again, strict=True))
        memory = torch.zeros(5, 4, 2, 16)
        alive = weakref.ref(memory)
        layer = CacheDesc.from_kv(*(describe(memory[..., i:16:2], "BLOCK_NHD") for i in (0, 1)))
        view = CacheView(layers=(layer,), facts=facts_of("half", 4))
        other = replace(view, facts=facts_of("interleaved", 4))
        reorder.reordered(view.at([[0]]), other.at([[0]]), replace(transform, rotary_dim=4))
        gc.disable()
        del memory, layer, view, other
        gc.enable()
        assert alive() is None


def test_a_storage_that_was_replaced_is_refused_after_it_was_described() -> None:
    for end in ("src", "dst"):
        k = {name: torch.zeros(5, 4, 2, 16) for name in ("src", "dst")}
        views = {
            name: CacheView(
                layers=(CacheDesc.from_kv(describe(tensor, "BLOCK_NHD")),),
                facts=facts_of("half" if name == "src" else "interleaved", 16),
            )
            for name, tensor in k.items()
        }
        migrate(views["src"].at([[0]]), views["dst"].at([[1]]), [1])
        k[end].set_(torch.zeros(5, 4, 2, 16))
        with pytest.raises(InvalidArgumentError, match=f"{end}.*layers.0..k"):
            migrate(views["src"].at([[0]]), views["dst"].at([[1]]), [1])


def two_loops(at: Sequence[int]) -> bool:
    """Whether any two loops with strides from 0 on visit these positions, tried out one by one."""
    steps = sorted({abs(x - at[0]) for x in at})
    for inner in (n for n in range(1, len(at) + 1) if len(at) % n == 0):
        for a, b in itertools.product(steps, steps):
            visited = [at[0] + i * a + j * b for i in range(len(at) // inner) for j in range(inner)]
            if visited == list(at):
                return True
    return False


def test_two_loops_are_found_where_there_are_any() -> None:
    """Of all orders of up to 6 positions, and of both orders of packed dims."""
    tried = [p for n in range(1, 7) for p in itertools.permutations(range(n))]
    for rotary_dim, pack in itertools.product((4, 8, 12, 16), (1, 2, 3, 4, 6, 8, 12, 16)):
        if rotary_dim % pack == 0:
            for held, wanted in ORDERS:
                dims = reorder.dims_in_order(held, wanted, rotary_dim)
                tried.append(tuple((dims // pack * 100 + dims % pack).tolist()))
    for at in tried:
        found = reorder._two_loops(np.array(at))
        assert (found is not None) == two_loops(at), at
        if found is not None:
            (m, a), (n, b) = found
            assert [at[0] + i * a + j * b for i in range(m) for j in range(n)] == list(at)


@in_both_directions
@pytest.mark.parametrize("rotary_dim", [0, 2, 4, 10, 64])
def test_dims_in_order(held: Order, wanted: Order, rotary_dim: int) -> None:
    dims = torch.arange(rotary_dim)
    expected = moved(dims, wanted, rotary_dim)
    assert reorder.dims_in_order(held, wanted, rotary_dim).tolist() == expected.tolist()
    assert reorder.dims_in_order(held, held, rotary_dim).tolist() == dims.tolist()


def test_verify_names_dims_as_the_source_counts() -> None:
    src, here, dst, there = ends(16, ("nhd", "hnd"))
    migrate(here.at([[0]]), there.at([[1]]), [3])
    assert verify(here.at([[0]]), there.at([[1]]), [3])
    dst.layers[1].k.tensor[1, 1, 2, 5] += 1  # interleaved dim 5: pair 2, its second dim
    found = verify(here.at([[0]]), there.at([[1]]), [3]).difference
    assert found is not None
    assert (found.layer, found.kv, found.token, found.head, found.dim) == (1, "K", 2, 1, 2 + 8)
    assert found.src_value == float(src.layers[1].k.tensor[0, 2, 1, 10])
    assert found.dst_value == float(dst.layers[1].k.tensor[1, 1, 2, 5])
