"""Plans that callers keep: created, described, run, listed and freed. Spec: E.13"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import use_openmp
from kvx_core._c import abi, abi_plan
from kvx_core._c.abi_plan import (
    kvx_plan_info_t,
    kvx_plane_info_t,
    kvx_take_ranges_t,
)
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.types import DType, Memory, ScaleGranularity
from tests import planes, reference, tables, test_migrate
from tests.caches import LAYOUTS, Cache, Geometry, assert_same_bytes
from tests.calls import Backend
from tests.plans import Migration, Plan, bury, carry_out, planned
from tests.reference import Packed

SEEDS = (1, 2, 3)
LENGTHS = (9, 0, 1, 6)


@dataclass(frozen=True)
class Planned(Backend):
    """A backend whose migrations are plans, run once their descriptors are gone."""

    def call(self, function: str, *structs: Any) -> None:
        if function != "kvx_migrate_kv":
            return super().call(function, *structs)
        with planned(self, structs[0]) as plan:
            bury(structs[0])
            plan.run()
        return None


class Listed(Planned):
    """A backend whose migrations are lists of copies, which the test carries out."""

    def call(self, function: str, *structs: Any) -> None:
        assert function == "kvx_migrate_kv"
        with planned(self, structs[0]) as plan:
            ranges = plan.ranges()
            _, infos = plan.describe()
        for number, plane in enumerate(infos):
            assert sum(r[3] for r in ranges if r[0] == number) == plane.bytes_written
        carry_out(ranges)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", [Planned, Listed])
@pytest.mark.parametrize("dst", [planes.bhnd, planes.tiles, planes.threes])
@pytest.mark.parametrize("src", [planes.bnhd, planes.pairs, planes.packed_dim])
def test_planes_with_split_axes(way: type[Planned], src: Any, dst: Any, seed: int) -> None:
    """Parts of tokens and of dim, null blocks and zeros."""
    on = way("cpu", Memory.HOST)
    from_, to = src(4, 48, 2, 32, torch.bfloat16), dst(3, 96, 2, 32, torch.bfloat16)
    from_.role = to.role = 40 + seed
    planes.randomize(from_, seed)
    ends = (
        planes.View([from_], [[3, 1], [2, -1]], [seed, 16]),
        planes.View([to], [[2, 0], [1, -1]], [3 * seed, 7]),
    )
    planes.check(on, *ends, [71, 64], zero_fill=True)


def test_planes_are_described_by_layer_and_role() -> None:
    on = Planned("cpu", Memory.HOST)
    views, ends = [], []
    for make, blocks in ((planes.bnhd, 4), (planes.bhnd, 5)):
        of_end = [make(blocks, 6, 2, 16, torch.float16) for _ in range(3)]
        for plane, (layer, role) in zip(of_end, ((7, 4), (7, 2), (9, 4)), strict=True):
            plane.layer, plane.role = layer, role
        views.append(planes.View(of_end, [[1]]))
        ends.append(views[-1].to_c(on))
    lengths = torch.tensor([5])
    lens = on.seq_lens(lengths)
    desc = abi.kvx_migrate_desc_t(
        seq_lens=ctypes.pointer(lens), src=ctypes.pointer(ends[0]), dst=ctypes.pointer(ends[1])
    )
    with planned(on, desc) as plan:
        info, infos = plan.describe()
    assert [(plane.layer, plane.role) for plane in infos] == [(7, 4), (7, 2), (9, 4)]
    assert {(plane.num_heads, plane.vector_size) for plane in infos} == {(2, 16)}
    assert info.bytes_written == 3 * 5 * 2 * 16 * 2


@pytest.fixture
def plans(backend: Backend) -> Backend:
    return Planned(**{name: getattr(backend, name) for name in backend.__dataclass_fields__})


# --- what migrate does, a plan does -----------------------------------------------------------


@pytest.mark.parametrize("dst_kind", test_migrate.KINDS)
@pytest.mark.parametrize("src_kind", test_migrate.KINDS)
def test_plans_of_every_pair_of_ends(plans: Backend, src_kind: str, dst_kind: str) -> None:
    test_migrate.test_migrate_every_pair_of_ends(plans, src_kind, dst_kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_of_every_layout(plans: Backend, layout: str) -> None:
    test_migrate.test_migrate_every_pair_of_layouts(
        plans, layout, "mla" if layout == "mla" else "hnd"
    )


@pytest.mark.parametrize("dtype", test_migrate.DTYPES, ids=str)
def test_plans_that_convert(plans: Backend, dtype: torch.dtype) -> None:
    test_migrate.test_migrate_every_pair_of_dtypes(plans, dtype, torch.bfloat16)
    test_migrate.test_migrate_every_pair_of_dtypes(plans, torch.float8_e4m3fn, dtype)


def test_plans_within_a_pool(plans: Backend) -> None:
    test_migrate.test_migrate_within_a_pool(plans, "nhd")
    test_migrate.test_one_pool_under_two_names(plans)


# --- other lookups ----------------------------------------------------------------------------


def geometry(seed: int, block_size: int) -> Geometry:
    return Geometry(
        num_blocks=23,
        block_size=block_size,
        num_kv_heads=seed,
        head_dim=8 * seed + 8,
        num_layers=seed,
    )


def both_ends(seed: int, kinds: tuple[str, str]) -> tuple[Cache, Cache]:
    caches = []
    for i, kind in enumerate(kinds):
        layout = "tensorrt_llm" if kind == "kv_offsets" else ("vllm_LBNHC", "hnd")[i]
        block_size = 16 if kind == "dense" else (4, 8)[i]
        caches.append(LAYOUTS[layout](geometry(seed, block_size), torch.bfloat16, seed + i))
    return caches[0], caches[1]


def some_lengths(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(1, 6, (1,), generator=generator))
    return torch.randint(0, 11, (rows,), generator=generator).tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kinds",
    [
        ("packed", "packed"),
        ("packed64", "slots"),
        ("slots", "ragged"),
        ("ragged", "dense"),
        ("dense", "kv_offsets"),
        ("kv_offsets", "packed"),
    ],
)
def test_a_plan_runs_again_with_other_lookups(
    backend: Backend, kinds: tuple[str, str], seed: int
) -> None:
    """Of other sequences, lengths and columns; then again with those that it was made with."""
    src, dst = both_ends(seed, kinds)
    expected = dst.clone()

    def migration(number: int) -> tuple[Migration, tuple[Any, ...]]:
        lengths = some_lengths(10 * seed + number)
        src_end, dst_end = (
            test_migrate.ends(kind, cache, lengths, number + i, target=i == 1)
            for i, (kind, cache) in enumerate(zip(kinds, (src, dst), strict=True))
        )
        made = Migration(
            backend,
            (src, src_end),
            (dst, dst_end),
            torch.tensor(lengths),
            flags=abi.FLAG_ZERO_FILL,
        )
        return made, (src_end, dst_end, lengths)

    def expect(what: tuple[Any, ...]) -> None:
        src_end, dst_end, lengths = what
        reference.migrate(src.layers, src_end, expected.layers, dst_end, lengths, zero_fill=True)
        assert_same_bytes(dst, expected)

    first, first_what = migration(0)
    source = src.clone()
    with planned(backend, first.desc) as plan:
        assert_same_bytes(dst, expected)  # a plan moves nothing
        for number in range(1, 5):
            other, what = migration(number)
            plan.run(other.lookups())
            expect(what)
        plan.run()
        expect(first_what)
    assert_same_bytes(src, source)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_without_sequences_takes_them_at_each_run(backend: Backend, seed: int) -> None:
    src, dst = both_ends(seed, ("packed", "packed"))
    expected, empty = dst.clone(), Packed(torch.zeros(0, 2, dtype=torch.int32), 4)
    nothing = Migration(backend, (src, empty), (dst, empty), torch.zeros(0, dtype=torch.int64))
    src_end = tables.packed(src, LENGTHS, seed, nulls=0.2)
    dst_end = tables.packed(dst, LENGTHS, seed + 1, shared=False)
    other = Migration(backend, (src, src_end), (dst, dst_end), torch.tensor(LENGTHS))
    with planned(backend, nothing.desc) as plan:
        plan.run()
        assert_same_bytes(dst, expected)
        plan.run(other.lookups())
    reference.migrate(src.layers, src_end, expected.layers, dst_end, LENGTHS)
    assert_same_bytes(dst, expected)


def test_contents_of_tables_may_change_between_runs(backend: Backend) -> None:
    src, dst = both_ends(2, ("packed", "packed"))
    table, lengths = torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([7])
    to = Packed(torch.tensor([[5]]), 8)
    expected = dst.clone()
    made = Migration(backend, (src, Packed(table, 4)), (dst, to), lengths)
    with planned(backend, made.desc) as plan:
        for blocks, length in (([3, 1], 7), ([0, 22], 5), ([6, 6], 8)):
            table[0], lengths[0] = torch.tensor(blocks, dtype=torch.int32), length
            plan.run()
            reference.migrate(src.layers, Packed(table, 4), expected.layers, to, [length])
            assert_same_bytes(dst, expected)


def test_a_scale_may_change_between_runs(backend: Backend) -> None:
    """Also from 1, which a plan takes for none."""
    src = LAYOUTS["nhd"](Geometry(), torch.float8_e4m3fn, 1).fill(2)
    scale = torch.tensor(1.0)
    src = src.with_scales(lambda half, name: (scale, reference.ScaleGranularity.PER_TENSOR))
    dst = LAYOUTS["hnd"](Geometry(), torch.float8_e4m3fn, 3)
    end, to = Packed(torch.tensor([[3, 1]]), 4), Packed(torch.tensor([[2, 4]]), 4)
    made = Migration(backend, (src, end), (dst, to), torch.tensor([7]))
    expected = dst.clone()
    with planned(backend, made.desc) as plan:
        for number in (1.0, 0.5, 1.0, 3.0):
            scale.fill_(number)
            plan.run()
            reference.migrate(src.layers, end, expected.layers, to, [7])
            assert_same_bytes(dst, expected)


# --- refusals ---------------------------------------------------------------------------------


def packed(rows: Sequence[Sequence[int]], block_size: int = 4) -> Packed:
    return Packed(torch.tensor(rows, dtype=torch.int32), block_size)


def test_what_migrate_refuses_is_not_planned(backend: Backend) -> None:
    src, dst = both_ends(2, ("packed", "packed"))
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]], 8)), torch.tensor([3]))
    made.desc.src.contents.layers[1].contents.k.dtype = 77
    with pytest.raises(InvalidArgumentError, match=r"^src\.layers\[1\]\.k\.dtype is 77"):
        Plan(backend, made.desc)


def test_indices_among_what_is_written_are_refused(backend: Backend) -> None:
    """Also in the last layer, which a run does not validate again."""
    src, dst = both_ends(3, ("packed", "packed"))
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]], 8)), torch.tensor([3]))
    with planned(backend, made.desc) as plan:
        other = made.lookups()
        lens = backend.seq_lens(torch.tensor([3]))
        lens.lengths = made.desc.dst.contents.layers[2].contents.v.data
        other.seq_lens = ctypes.pointer(lens)
        with pytest.raises(
            InvalidArgumentError, match=r"meet dst\.layers\[2\]\.v, which the call writes"
        ):
            plan.run(other)


def test_a_bad_index_moves_nothing(backend: Backend) -> None:
    src, dst = both_ends(2, ("packed", "packed"))
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]], 8)), torch.tensor([3]))
    bad = Migration(backend, (src, packed([[1, 23]])), (dst, packed([[2]], 8)), torch.tensor([7]))
    expected = dst.clone()
    with planned(backend, made.desc) as plan:
        if not backend.looks_first:
            reference.migrate(src.layers, packed([[1]]), expected.layers, packed([[2]], 8), [4])
        with pytest.raises(OutOfRangeError, match=r"src\.block_table\.indices\[1\] is 23"):
            plan.run(bad.lookups())
    assert_same_bytes(dst, expected)


def test_no_plan(backend: Backend) -> None:
    library = abi_plan.declare(backend.library())
    with pytest.raises(InvalidArgumentError, match=r"^plan is NULL$"):
        abi.check(library.kvx_plan_run(None, None, None), library)
    src, dst = both_ends(1, ("packed", "packed"))
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]], 8)), torch.tensor([3]))
    with pytest.raises(InvalidArgumentError, match=r"^plan is NULL$"):
        abi.check(library.kvx_plan_create(made.desc, None), library)
    library.kvx_plan_free(None)


# --- describe ---------------------------------------------------------------------------------


def is_known(backend: Backend) -> bool:
    """The host can read the tables."""
    return backend.mirror is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("zero_fill", [False, True])
def test_describe_counts(backend: Backend, seed: int, zero_fill: bool) -> None:
    """Against a walk over the tokens with the reference's ends."""
    use_openmp(False)  # another test of this process may have lent its threads
    lengths = (41, 0, 1, 70)
    src, dst = both_ends(seed, ("packed", "packed"))
    src_end = tables.packed(src, lengths, seed, nulls=0.4)
    dst_end = tables.packed(dst, lengths, seed + 1, shared=False, nulls=0.3)
    flags = abi.FLAG_ZERO_FILL * zero_fill
    made = Migration(backend, (src, src_end), (dst, dst_end), torch.tensor(lengths), flags=flags)
    expected = dst.clone()
    with planned(backend, made.desc) as plan:
        info, planes = plan.describe()
    assert_same_bytes(dst, expected)
    places = [
        (src_end.place(row, token, 0), dst_end.place(row, token, 0))
        for row, length in enumerate(lengths)
        for token in range(length)
    ]
    null_dst = sum(to is None for _, to in places)
    null_src = sum(at is None and to is not None for at, to in places)
    moved = len(places) - null_dst - null_src
    assert min(null_dst, null_src, moved) > 0
    vector = (8 * seed + 8) * 2
    of_plane = seed * vector
    num_planes = 2 * seed
    assert [plane.layer for plane in planes] == [i // 2 for i in range(num_planes)]
    assert [plane.role for plane in planes] == [0, 1] * seed
    assert info.num_planes == num_planes
    assert info.num_sequences == len(lengths)
    assert info.is_exact == 1
    on_device = backend.memory != Memory.HOST
    assert bool(info.on_device) == on_device
    assert info.num_launches == on_device  # all planes differ in their pointers alone
    assert info.num_threads == (0 if on_device else 1)
    for plane in planes:
        assert plane.flags == abi_plan.EXACT
        assert (plane.src_dtype, plane.dst_dtype) == (DType.BF16, DType.BF16)
        assert (plane.num_heads, plane.vector_size) == (seed, 8 * seed + 8)
        assert plane.launch == 0
        assert plane.kernel == (b"remap" if on_device else b"copy")
        # One head: a token after the other at both ends, 4 in a block of the source.
        assert plane.run_bytes == vector
    if not is_known(backend):
        assert {info.num_tokens, info.bytes_read, planes[0].num_vectors} == {abi_plan.UNKNOWN}
        return
    written = moved + null_src * zero_fill
    assert (info.num_tokens, info.num_moved) == (sum(lengths), moved)
    assert (info.num_null_src, info.num_null_dst) == (null_src, null_dst)
    for plane in planes:
        assert plane.num_vectors == moved * seed
        assert (plane.bytes_read, plane.bytes_written) == (moved * of_plane, written * of_plane)
    assert info.bytes_read == num_planes * moved * of_plane
    assert info.bytes_written == num_planes * written * of_plane
    assert 1e7 < info.copy_bytes_per_second < 1e13
    assert info.seconds == info.bytes_written / info.copy_bytes_per_second


def is_exact(src: torch.dtype, dst: torch.dtype) -> bool:
    """Every finite number of `src` comes back from `dst`."""
    if src == torch.float32:
        return dst == torch.float32
    if torch.int8 in (src, dst):
        return src == dst  # -128 does not come back
    codes = np.arange(256**src.itemsize).astype(reference.FORMATS[src].bits)
    numbers = reference.from_bits(codes, src)
    again = reference.convert(reference.convert(numbers, dst), src)
    return bool(((reference.bits_of(again) == codes) | ~numbers.float().isfinite().numpy()).all())


@pytest.mark.parametrize("dst_dtype", test_migrate.DTYPES, ids=str)
@pytest.mark.parametrize("src_dtype", test_migrate.DTYPES, ids=str)
def test_which_conversions_are_exact(
    backend: Backend, src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    src = LAYOUTS["nhd"](Geometry(), src_dtype, 1)
    dst = LAYOUTS["nhd"](Geometry(), dst_dtype, 2)
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]])), torch.tensor([3]))
    with planned(backend, made.desc) as plan:
        info, planes = plan.describe()
    converts = src_dtype != dst_dtype
    exact = is_exact(src_dtype, dst_dtype)
    for plane in planes:
        assert plane.flags == converts * abi_plan.CONVERTS + exact * abi_plan.EXACT
        assert bool(plane.run_bytes) != converts
        if converts:
            assert plane.kernel in (b"convert", b"generic")
    assert info.is_exact == exact


def test_describe_of_merged_planes_and_of_scales(backend: Backend) -> None:
    """vLLM's [.., 2 * head_dim] at both ends is one copy; a scale makes a conversion inexact."""
    g = Geometry(num_kv_heads=3, head_dim=24, num_layers=2)
    src, dst = (LAYOUTS["vllm_LBNHC"](g, torch.bfloat16, seed) for seed in (1, 2))
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]])), torch.tensor([3]))
    with planned(backend, made.desc) as plan:
        info, planes = plan.describe()
    assert (info.num_planes, info.is_exact) == (2, 1)
    for layer, plane in enumerate(planes):
        assert (plane.layer, plane.role, plane.vector_size) == (layer, 0, 48)
        assert plane.flags == abi_plan.EXACT | abi_plan.JOINED
        assert plane.run_bytes == 4 * 3 * 48 * 2  # a block
    src = LAYOUTS["nhd"](g, torch.float8_e4m3fn, 1).with_scales(
        lambda half, name: (torch.tensor(0.5), ScaleGranularity.PER_TENSOR)
    )
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]])), torch.tensor([3]))
    with planned(backend, made.desc) as plan:
        info, planes = plan.describe()
    assert (info.num_planes, info.is_exact) == (4, 0)
    assert {plane.flags for plane in planes} == {abi_plan.CONVERTS}


def test_describe_says_what_run_would_refuse(backend: Backend) -> None:
    src, dst = both_ends(2, ("packed", "packed"))
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]], 8)), torch.tensor([3]))
    bad = Migration(backend, (src, packed([[1, 23]])), (dst, packed([[2]], 8)), torch.tensor([7]))
    with planned(backend, made.desc) as plan:
        plan.describe()
        if is_known(backend):
            with pytest.raises(OutOfRangeError, match=r"src\.block_table\.indices\[1\] is 23"):
                plan.describe(bad.lookups())
        library, info = plan.library, kvx_plan_info_t()
        planes = (kvx_plane_info_t * 4)(*[kvx_plane_info_t()] * 4)

        def refused(sentence: str, *arguments: Any) -> None:
            with pytest.raises(InvalidArgumentError) as error:
                abi.check(library.kvx_plan_describe(plan.handle, None, *arguments), library)
            assert str(error.value) == sentence

        refused("info is NULL", None, None, 0)
        refused(
            "num_planes is 3, expected info.num_planes 4, or 0 with planes NULL (spec E.13)",
            *(info, planes, 3),
        )
        refused(
            "num_planes is 1, expected info.num_planes 4, or 0 with planes NULL (spec E.13)",
            *(info, None, 1),
        )
        planes[3].size = 79
        refused("planes[3].size is 79, expected at least 80 (spec 6)", info, planes, 4)
        info.size = 95
        refused("info.size is 95, expected at least 96 (spec 6)", info, None, 0)


# --- ranges -----------------------------------------------------------------------------------


@pytest.fixture
def in_place(backend: Backend) -> Backend:
    """A backend whose addresses the test can read."""
    if backend.mirror is not None:
        pytest.skip("ranges are addresses of the device")
    return backend


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dst_layout", ["hnd", "tgi", "vllm_LBNHC", "packed8", "nhd"])
@pytest.mark.parametrize("src_layout", ["nhd", "vllm_LBNHC", "tgi", "tensorrt_llm"])
def test_ranges_are_the_copies_of_a_run(
    in_place: Backend, src_layout: str, dst_layout: str, seed: int
) -> None:
    """Null blocks, zeros, block sizes that differ, packs that do not divide each other."""
    g = Geometry(num_blocks=9, num_kv_heads=seed, head_dim=(24, 20, 16)[seed - 1])
    src = LAYOUTS[src_layout](g, torch.bfloat16, seed)
    dst = LAYOUTS[dst_layout](replace(g, block_size=(6, 8, 4)[seed - 1]), torch.bfloat16, seed + 9)
    make = tables.kv_offsets if src_layout == "tensorrt_llm" else tables.packed
    src_end = make(src, LENGTHS, seed, nulls=0.2)
    dst_end = tables.packed(dst, LENGTHS, seed + 1, shared=False, nulls=0.1)
    for flags in (0, abi.FLAG_ZERO_FILL):
        made = Migration(
            in_place, (src, src_end), (dst, dst_end), torch.tensor(LENGTHS), flags=flags
        )
        expected = dst.clone()
        with planned(in_place, made.desc) as plan:
            ranges = plan.ranges()
            _, planes = plan.describe()
        assert_same_bytes(dst, expected)
        reference.migrate(
            src.layers, src_end, expected.layers, dst_end, LENGTHS, zero_fill=bool(flags)
        )
        carry_out(ranges)
        assert_same_bytes(dst, expected)
        assert [r[0] for r in ranges] == sorted(r[0] for r in ranges)
        for i, plane in enumerate(planes):
            assert sum(r[3] for r in ranges if r[0] == i) == plane.bytes_written
        for a, b in itertools.pairwise(ranges):  # what continues has been joined
            follows = a[1] + a[3] == b[1] if a[1] else not b[1]
            assert not (a[0] == b[0] and follows and a[2] + a[3] == b[2])
        dst.fill(seed)


def test_whole_blocks_are_few_ranges(in_place: Backend) -> None:
    """Blocks of the same bytes, consecutive at both ends, are one range per plane."""
    g = Geometry(num_blocks=9, num_kv_heads=3, head_dim=24)
    src, dst = (LAYOUTS["hnd"](g, torch.bfloat16, seed) for seed in (1, 2))
    ends = (src, packed([[2, 3, 7]])), (dst, packed([[4, 5, 1]]))
    made = Migration(in_place, *ends, torch.tensor([12]))
    with planned(in_place, made.desc) as plan:
        ranges = plan.ranges()
    block = 4 * 3 * 24 * 2
    assert [(plane, num_bytes) for plane, _, _, num_bytes in ranges] == [
        (plane, num_bytes) for plane in range(4) for num_bytes in (2 * block, block)
    ]


def test_ranges_with_other_lookups_and_in_pieces(in_place: Backend) -> None:
    src, dst = both_ends(2, ("packed", "packed"))
    empty = packed([[0]])
    nothing = Migration(in_place, (src, empty), (dst, empty), torch.tensor([0]))
    src_end = tables.packed(src, LENGTHS, 3)
    dst_end = tables.packed(dst, LENGTHS, 4, shared=False)
    other = Migration(in_place, (src, src_end), (dst, dst_end), torch.tensor(LENGTHS))
    with planned(in_place, nothing.desc) as plan:
        assert plan.ranges() == []
        ranges = plan.ranges(other.lookups())
    expected = dst.clone()
    reference.migrate(src.layers, src_end, expected.layers, dst_end, LENGTHS)
    carry_out(ranges)
    assert_same_bytes(dst, expected)


def test_a_taker_may_have_enough(in_place: Backend) -> None:
    g = Geometry(num_blocks=200, block_size=16, num_kv_heads=2, head_dim=16, num_layers=2)
    src = LAYOUTS["nhd"](g, torch.bfloat16, 1)
    dst = LAYOUTS["hnd"](g, torch.bfloat16, 2)
    table = packed([list(range(200))])
    made = Migration(in_place, (src, table), (dst, table), torch.tensor([3000]))
    counts: list[int] = []

    @kvx_take_ranges_t
    def take(context: int, ranges: Any, count: int) -> int:
        counts.append(count)
        return len(counts) == 2

    with planned(in_place, made.desc) as plan:
        all_ranges = plan.ranges()
        library = plan.library
        abi.check(library.kvx_plan_ranges(plan.handle, None, take, None), library)
    assert len(all_ranges) > 2 * 4096
    assert counts == [4096, 4096]


def test_ranges_of_a_conversion_are_refused(backend: Backend) -> None:
    src = LAYOUTS["nhd"](Geometry(), torch.bfloat16, 1)
    dst = LAYOUTS["nhd"](Geometry(), torch.float16, 2)
    made = Migration(backend, (src, packed([[1]])), (dst, packed([[2]])), torch.tensor([3]))
    with planned(backend, made.desc) as plan, pytest.raises(UnsupportedError) as error:
        plan.ranges()
    assert str(error.value) == (
        "K of layer 0 has another dtype at each end, but ranges are copies of bytes: run the plan, "
        "or describe both ends alike (spec E.13)"
    )


def test_ranges_need_a_taker_and_good_indices(in_place: Backend) -> None:
    src, dst = both_ends(2, ("packed", "packed"))
    bad = Migration(in_place, (src, packed([[23]])), (dst, packed([[2]], 8)), torch.tensor([3]))
    with planned(in_place, bad.desc) as plan:
        library = plan.library
        with pytest.raises(InvalidArgumentError, match=r"^take is NULL$"):
            abi.check(
                library.kvx_plan_ranges(plan.handle, None, kvx_take_ranges_t(), None), library
            )
        with pytest.raises(OutOfRangeError, match=r"src\.block_table\.indices\[0\] is 23"):
            plan.ranges()
