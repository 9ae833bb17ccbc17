"""Plans of kvx_write_kv and kvx_gather_kv: created, described, run, listed and freed. Spec: E.13"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core._c import abi, abi_plan
from kvx_core._c.abi_plan import kvx_end_lookup_t, kvx_plan_lookups_t
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.types import DType, Memory
from tests import reference, tables, test_find_scales, test_write_gather
from tests.caches import LAYOUTS, Cache, Geometry, assert_same_bytes
from tests.calls import CPU, Backend
from tests.plans import Plan, bury, carry_out, planned
from tests.test_write_gather import DTYPES
from tests.token_calls import CASES, key_value

SEEDS = (1, 2, 3)
CREATE = {
    "kvx_write_kv": "kvx_plan_create_write",
    "kvx_write_kv_ext": "kvx_plan_create_write",
    "kvx_gather_kv": "kvx_plan_create_gather",
    "kvx_gather_kv_ext": "kvx_plan_create_gather",
}


@dataclass(frozen=True)
class Planned(Backend):
    """A backend whose writes and gathers are plans, run once their descriptors are gone."""

    def call(self, function: str, *structs: Any) -> None:
        with planned(self, *self.given(*structs), create=CREATE[function]) as plan:
            for struct in structs:
                if struct is not None:
                    bury(struct)
            self.carry_out(plan)

    def given(self, *structs: Any) -> tuple[Any, ...]:
        return (*structs, None) if len(structs) == 2 else structs

    def carry_out(self, plan: Any) -> None:
        plan.run()


class Listed(Planned):
    """A backend whose writes and gathers are lists of copies, which the test carries out."""

    def carry_out(self, plan: Any) -> None:
        ranges = plan.ranges()
        _, infos = plan.describe()
        for number, plane in enumerate(infos):
            assert sum(r[3] for r in ranges if r[0] == number) == plane.bytes_written
        carry_out(ranges)


class Reused(Planned):
    """A backend whose writes and gathers are runs of plans that were made without tokens."""

    def call(self, function: str, *structs: Any) -> None:
        cache, desc, options = self.given(*structs)
        empty = type(desc).from_buffer_copy(desc)
        empty.io.num_tokens = 0
        if isinstance(desc, abi.kvx_write_desc_t):
            slots = abi.kvx_slot_mapping_t.from_buffer_copy(desc.slots)
            lookups = kvx_plan_lookups_t(dst=kvx_end_lookup_t(slots=ctypes.pointer(slots)))
            empty.slots.token_count, empty.slots.slots = 0, None
        else:
            table = abi.kvx_block_table_t.from_buffer_copy(desc.block_table)
            lens = abi.kvx_seq_lens_t.from_buffer_copy(desc.seq_lens)
            lookups = kvx_plan_lookups_t(
                max_seq_len=desc.max_seq_len,
                seq_lens=ctypes.pointer(lens),
                src=kvx_end_lookup_t(block_table=ctypes.pointer(table)),
            )
            empty.max_seq_len = 0
            for tensor in (empty.io.key, empty.io.value):
                if tensor.ndim:
                    tensor.shape[1 if tensor.ndim == 4 else 0] = 0
        io = abi.kvx_kv_io_desc_t.from_buffer_copy(desc.io)
        lookups.io = ctypes.pointer(io)
        empty.io.key.data = empty.io.value.data = None
        with planned(self, cache, empty, options, create=CREATE[function]) as plan:
            bury(cache)
            plan.run()
            plan.run(lookups)


def backend_of(way: type[Planned], backend: Backend) -> Backend:
    return way(**{name: getattr(backend, name) for name in backend.__dataclass_fields__})


@pytest.fixture(params=[Planned, Reused])
def plans(request: pytest.FixtureRequest, backend: Backend) -> Backend:
    return backend_of(request.param, backend)


# --- what a call does, a plan does ------------------------------------------------------------


@pytest.mark.parametrize(("layout", "geometry"), CASES[:: len(CASES) // 12])
def test_plans_of_every_layout(plans: Backend, layout: str, geometry: str) -> None:
    test_write_gather.test_write_every_layout_and_geometry(plans, layout, geometry)
    test_write_gather.test_gather_every_layout_and_geometry(plans, layout, geometry)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plans_that_convert(plans: Backend, dtype: torch.dtype) -> None:
    """With scales, which each run reads."""
    for io_dtype in (torch.float32, torch.bfloat16):
        test_write_gather.test_write_converts(plans, "vllm_BHLNC", dtype, io_dtype)
        test_write_gather.test_gather_converts(plans, "tgi", dtype, io_dtype)


def test_plans_of_other_calls(plans: Backend) -> None:
    test_write_gather.test_write_with_the_v1_scale_pointers(plans)
    test_write_gather.test_write_nothing(plans)
    test_write_gather.test_write_skips_the_invalid_slot(plans, 7)
    test_write_gather.test_gather_nothing(plans)
    test_write_gather.test_gather_into_3d(plans)
    test_write_gather.test_gather_cuts_at_max_seq_len(plans)
    test_write_gather.test_gather_kv_offsets(plans, 4, 3, True)
    test_write_gather.test_gather_never_reads_null_blocks(
        plans, layout="tgi", zero_fill=True, null_block_id=1, make=tables.ragged
    )


def test_a_bad_index_moves_nothing(plans: Backend) -> None:
    test_write_gather.test_a_slot_out_of_range(plans, 7, 21, torch.int64)
    test_write_gather.test_a_block_out_of_range(plans, torch.int32)
    test_write_gather.test_lengths_out_of_range(plans)


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("layout", ["nhd", "tgi", "vllm_LBNHC", "hnd", "packed8"])
def test_ranges_are_the_copies_of_a_call(layout: str, zero_fill: bool) -> None:
    on = Listed("cpu", Memory.HOST)
    for seed in SEEDS:
        cache = LAYOUTS[layout](Geometry(num_kv_heads=seed), torch.bfloat16, seed)
        lengths = [9, 0, 5 + seed]
        end = tables.packed(cache, lengths, seed, nulls=0.3)
        test_write_gather.check_gather(
            on, cache, end, torch.tensor(lengths), 8, style="strided", zero_fill=zero_fill
        )
        tokens = key_value(cache.layers[-1], 13, torch.bfloat16, seed)
        slots = tables.slots(cache, 13, seed=seed)
        test_write_gather.check_write(on, cache, tokens, slots)


# --- other tokens -----------------------------------------------------------------------------


class OneWrite:
    """A kvx_write_desc_t of some tokens into the last layer of a cache."""

    def __init__(self, on: Backend, cache: Cache, tokens: list[Tensor], slots: Tensor) -> None:
        self.kept = cache, tokens, slots
        key, value = (*tokens, None)[:2]
        self.cache = on.layer(cache.layers[-1], cache.bytes_per_block)
        self.io = on.io(key, value, slots.numel())
        self.slots = on.slots(slots)
        self.desc = abi.kvx_write_desc_t(io=self.io, slots=self.slots)

    def lookups(self) -> kvx_plan_lookups_t:
        end = kvx_end_lookup_t(slots=ctypes.pointer(self.slots))
        return kvx_plan_lookups_t(dst=end, io=ctypes.pointer(self.io))


def some_cache(seed: int, layout: str = "vllm_LBNHC") -> Cache:
    return LAYOUTS[layout](Geometry(num_kv_heads=seed, head_dim=8 * seed), torch.bfloat16, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_runs_again_with_other_tokens(backend: Backend, seed: int) -> None:
    """Of other counts, dtypes and memory; then again with those that it was made with."""
    cache = some_cache(seed)
    expected, layer = cache.clone(), cache.layers[-1]

    def write(number: int) -> OneWrite:
        dtype = (torch.bfloat16, torch.float32)[number % 2]
        count = (5, 0, 1, 17)[number % 4]
        tokens = key_value(layer, count + number, dtype, seed + number)
        slots = tables.slots(cache, count, seed=seed * 7 + number)
        return OneWrite(backend, cache, tokens, slots)

    def expect(made: OneWrite) -> None:
        _, tokens, slots = made.kept
        reference.write(expected.layers[-1], tokens[0], tokens[1], slots, -1)
        assert_same_bytes(cache, expected)

    first = write(0)
    with planned(backend, first.cache, first.desc, None, create="kvx_plan_create_write") as plan:
        assert_same_bytes(cache, expected)  # a plan moves nothing
        for number in range(1, 6):
            other = write(number)
            plan.run(other.lookups())
            expect(other)
        first.kept[1][0].add_(1)  # memory of the caller's: read by each run
        if backend.mirror is not None:
            backend.mirror.upload()
        plan.run()
        expect(first)


@pytest.mark.parametrize("seed", SEEDS)
def test_describe_counts(backend: Backend, seed: int) -> None:
    cache = some_cache(seed, "nhd")
    count = 10 + seed
    tokens = key_value(cache.layers[-1], count, torch.bfloat16, seed)
    slots = tables.slots(cache, count, seed=seed)
    slots[:seed] = -1
    made, before = OneWrite(backend, cache, tokens, slots), cache.clone()
    with planned(backend, made.cache, made.desc, None, create="kvx_plan_create_write") as plan:
        info, planes = plan.describe()
    assert_same_bytes(cache, before)
    on_device = backend.memory != Memory.HOST
    assert (info.num_planes, info.num_sequences, info.is_exact) == (2, 0, 1)
    assert [(plane.layer, plane.role) for plane in planes] == [(0, 0), (0, 1)]
    for plane in planes:
        assert (plane.src_dtype, plane.dst_dtype) == (DType.BF16, DType.BF16)
        assert (plane.num_heads, plane.vector_size) == (seed, 8 * seed)
        assert plane.kernel == (b"blocks" if on_device else b"copy") or on_device
    if backend.mirror is not None:
        assert info.num_tokens == abi_plan.UNKNOWN
        return
    token = seed * 8 * seed * 2
    moved = int((slots >= 0).sum())
    assert (info.num_tokens, info.num_moved, info.num_null_dst) == (count, moved, count - moved)
    assert [plane.bytes_written for plane in planes] == [moved * token] * 2
    assert info.bytes_read == info.bytes_written == 2 * moved * token


def test_describe_of_a_gather(backend: Backend) -> None:
    """Rows past a length have no source; with ZERO_FILL they are zeroed."""
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1)
    layer, lengths = cache.layers[-1], torch.tensor([6, 1])
    end = tables.packed(cache, [6, 1], 3)
    out = [torch.zeros(2, 8, t.shape[2], t.shape[3]) for t in key_value_shapes(layer)]
    for zero_fill in (False, True):
        table, lens = backend.block_table(end), backend.seq_lens(lengths)
        desc = abi.kvx_gather_desc_t(
            io=backend.io(out[0], out[1], 16), block_table=table, seq_lens=lens, max_seq_len=8
        )
        options = abi.kvx_gather_options_t(flags=abi.FLAG_ZERO_FILL * zero_fill)
        structs = backend.layer(layer), desc, options
        with planned(backend, *structs, create="kvx_plan_create_gather") as plan:
            info, planes = plan.describe()
            with pytest.raises(UnsupportedError, match=r"^K of layer 0 has another dtype"):
                plan.ranges()
        assert info.num_sequences == 2
        assert [plane.flags for plane in planes] == [abi_plan.CONVERTS | abi_plan.EXACT] * 2
        if backend.mirror is not None:
            continue
        token = out[0][0, 0].numel() * 4
        assert info.num_moved == 7
        assert info.num_null_src == 9 * zero_fill
        assert planes[0].bytes_written == (16 if zero_fill else 7) * token
    backend.forget()


def key_value_shapes(layer: reference.Layer) -> list[Tensor]:
    return [torch.zeros(1, 1, half.num_kv_heads, half.head_dim) for half in layer.halves()]


# --- refusals ---------------------------------------------------------------------------------


def test_lookups_that_a_write_has_no_use_for() -> None:
    cache = some_cache(2)
    tokens = key_value(cache.layers[-1], 3, torch.bfloat16, 1)
    made = OneWrite(CPU, cache, tokens, torch.tensor([1, 2, 3]))
    lens = CPU.seq_lens(torch.tensor([1]))
    table = CPU.block_table(tables.packed(cache, [1], 1))
    before = cache.clone()
    with planned(CPU, made.cache, made.desc, None, create="kvx_plan_create_write") as plan:

        def refused(message: str, size: int = 72, **fields: Any) -> None:
            lookups = kvx_plan_lookups_t(**fields)
            lookups.size = size
            for call in (plan.run, plan.describe, plan.ranges):
                with pytest.raises(InvalidArgumentError) as error:
                    call(lookups)
                assert str(error.value).startswith(message), error.value

        takes = "a write takes dst.slots and io (spec E.13)"
        expected_null = f"is given, expected NULL: {takes}"
        refused(f"lookups.seq_lens {expected_null}", seq_lens=ctypes.pointer(lens))
        refused(f"lookups.max_seq_len is 7, expected 0: {takes}", max_seq_len=7)
        for end in ("src", "dst"):
            starts = kvx_end_lookup_t(starts=ctypes.pointer(lens))
            refused(f"lookups.{end}.starts {expected_null}", **{end: starts})
            at = kvx_end_lookup_t(block_table=ctypes.pointer(table))
            refused(f"lookups.{end}.block_table {expected_null}", **{end: at})
        slots = kvx_end_lookup_t(slots=ctypes.pointer(made.slots))
        refused(f"lookups.src.slots {expected_null}", src=slots)
        refused("lookups.size is 64, expected at least 72 (spec 6)", size=64)
        short = CPU.slots(torch.tensor([1]))
        other = kvx_end_lookup_t(slots=ctypes.pointer(short))
        refused("write.slots.token_count is 1, expected io.num_tokens 3 (spec 6.4)", dst=other)
        short.size = 31
        refused("lookups.dst.slots.size is 31, expected at least 32 (spec 6)", dst=other)
        io = CPU.io(*tokens, 3)
        io.num_kv_heads = 1
        refused("write.io.num_kv_heads is 1, expected cache.", io=ctypes.pointer(io))
        io.size = 247
        refused("lookups.io.size is 247, expected at least 248 (spec 6)", io=ctypes.pointer(io))
    assert_same_bytes(cache, before)


def test_lookups_that_a_gather_has_no_use_for() -> None:
    cache = some_cache(2)
    layer, end = cache.layers[-1], tables.packed(cache, [3, 1], 1)
    out = [torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16) for _ in range(2)]
    table, lens = CPU.block_table(end), CPU.seq_lens(torch.tensor([3, 1]))
    desc = abi.kvx_gather_desc_t(
        io=CPU.io(*out, 8), block_table=table, seq_lens=lens, max_seq_len=4
    )
    slots = CPU.slots(torch.tensor([1]))
    with planned(CPU, CPU.layer(layer), desc, None, create="kvx_plan_create_gather") as plan:

        def refused(message: str, **fields: Any) -> None:
            for call in (plan.run, plan.describe, plan.ranges):
                with pytest.raises(InvalidArgumentError) as error:
                    call(kvx_plan_lookups_t(**fields))
                assert str(error.value).startswith(message), error.value

        takes = "a gather takes src.block_table, seq_lens, max_seq_len and io (spec E.13)"
        for name in ("src", "dst"):
            at = kvx_end_lookup_t(slots=ctypes.pointer(slots))
            refused(f"lookups.{name}.slots is given, expected NULL: {takes}", **{name: at})
            at = kvx_end_lookup_t(starts=ctypes.pointer(lens))
            refused(f"lookups.{name}.starts is given, expected NULL: {takes}", **{name: at})
        at = kvx_end_lookup_t(block_table=ctypes.pointer(table))
        refused(f"lookups.dst.block_table is given, expected NULL: {takes}", dst=at)
        refused("gather.io.num_tokens is 8, expected seq_count * beam_width *", max_seq_len=5)
        other = CPU.block_table(tables.ragged(cache, [3, 1], 1))
        at = kvx_end_lookup_t(block_table=ctypes.pointer(other))
        refused("lookups.src.block_table.format is 2, expected PACKED (1)", src=at)
        other.size = 63
        refused("lookups.src.block_table.size is 63, expected at least 64 (spec 6)", src=at)
        short = CPU.seq_lens(torch.tensor([3]))
        refused("gather.seq_lens.seq_count is 1, expected", seq_lens=ctypes.pointer(short))
        short.size = 23
        refused("lookups.seq_lens.size is 23, expected", seq_lens=ctypes.pointer(short))
        bad = CPU.block_table(tables.packed(cache, [3, 1], 1))
        indices = torch.full((2, bad.max_blocks_per_seq), 1000, dtype=torch.int32)
        bad.index_dtype, bad.indices = DType.S32, indices.data_ptr()
        at = kvx_end_lookup_t(block_table=ctypes.pointer(bad))
        for call in (plan.run, plan.describe, plan.ranges):
            with pytest.raises(OutOfRangeError, match=r"indices\[0\] is 1000"):
                call(kvx_plan_lookups_t(src=at))
    assert not any(tensor.any() for tensor in out)


@pytest.mark.parametrize("create", ["kvx_plan_create_write", "kvx_plan_create_gather"])
def test_what_a_call_refuses_is_not_planned(create: str) -> None:
    cache = some_cache(2)
    tokens = key_value(cache.layers[-1], 3, torch.bfloat16, 1)
    made = OneWrite(CPU, cache, tokens, torch.tensor([1, 2, 3]))
    desc = made.desc
    if create.endswith("gather"):
        desc = abi.kvx_gather_desc_t(
            io=made.io,
            block_table=CPU.block_table(tables.packed(cache, [3], 1)),
            seq_lens=CPU.seq_lens(torch.tensor([3])),
            max_seq_len=3,
        )
    desc.io.head_dim = 5
    with pytest.raises(InvalidArgumentError, match=r"\.io\.head_dim is 5, expected cache"):
        Plan(CPU, made.cache, desc, None, create=create)
    with pytest.raises(InvalidArgumentError, match=r"^cache is NULL"):
        Plan(CPU, None, desc, None, create=create)
    library = abi_plan.declare(abi.library())
    assert getattr(library, create)(made.cache, desc, None, None) == 1
    assert b"plan is NULL" in library.kvx_last_error()


def test_found_scales_are_found_by_each_run(plans: Backend) -> None:
    test_find_scales.test_write_many_tokens(plans)
