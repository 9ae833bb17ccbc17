"""Conversions from FP8: what a lane loads at a time, and that every width copies the same bytes.

Two lanes load 16 bytes each where 32 elements of the destination, of 16 bits, follow each other and
the source has 16 aligned ones; else they load 8. Each case says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from kvx_core.errors import KvxError
from kvx_core.types import Layout, ScaleGranularity
from tests import reference, tables
from tests.caches import LAYOUTS, Allocation, Cache, Geometry, assert_same_bytes, scaled
from tests.calls import HOSTGRID, Backend, hostgrid_library
from tests.migrations import check_migrate
from tests.reference import Half, Layer, Packed
from tests.sass.machine import Machine
from tests.token_calls import check_gather, output, outputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PER_TENSOR, PER_HEAD = ScaleGranularity.PER_TENSOR, ScaleGranularity.PER_HEAD
PER_BLOCK, PER_TOKEN_HEAD = ScaleGranularity.PER_BLOCK, ScaleGranularity.PER_TOKEN_HEAD

LENGTHS = [33, 0, 71, 1]
COLUMNS = 3000  # of a table with room for far more tokens: a warp then takes up to 32


@dataclass(frozen=True)
class Case:
    """An FP8 cache, its scales (a number: of both tensors; None: there are none), and the bytes
    that a lane loads."""

    layout: str
    num_kv_heads: int
    head_dim: int
    scale: float | ScaleGranularity | None
    num_bytes: int
    src: torch.dtype = E4M3
    dst: torch.dtype = BF16

    def __str__(self) -> str:
        scale = self.scale.name if isinstance(self.scale, ScaleGranularity) else self.scale
        dtypes = " to ".join(str(dtype).removeprefix("torch.") for dtype in (self.src, self.dst))
        return f"{self.layout}-{self.num_kv_heads}x{self.head_dim}-{scale}-{dtypes}"


CASES = [
    Case("nhd", 8, 128, None, 16),
    Case("nhd", 8, 128, 1.0, 16, E5M2, F16),
    Case("nhd", 2, 128, 0.0237, 16, E4M3, F16),
    Case("nhd", 1, 64, 0.37, 16),
    Case("nhd", 2, 64, PER_HEAD, 16, E5M2),
    Case("nhd", 8, 96, PER_TOKEN_HEAD, 16, E4M3, F16),
    Case("hnd", 2, 96, PER_BLOCK, 16, E5M2),
    Case("packed16", 2, 64, 0.37, 16),
    Case("packed16", 1, 160, PER_TOKEN_HEAD, 16),
    Case("nhd", 2, 80, 0.37, 16),  # heads follow each other: one of 160
    Case("nhd", 2, 80, PER_HEAD, 8),
    Case("hnd", 8, 80, 0.0237, 8, E5M2, F16),
    Case("nhd", 1, 72, 0.37, 8),
    Case("hnd", 2, 72, PER_TOKEN_HEAD, 8, E4M3, F32),
    Case("packed8", 8, 128, 0.37, 8),
    Case("nhd", 8, 128, 0.37, 8, E4M3, F32),
    Case("padded", 2, 64, 0.0237, 8),
    Case("padded", 1, 128, PER_HEAD, 8, E5M2),
]


def padded(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
    """Heads 8 bytes further apart than they are long."""
    shape = (g.num_blocks, g.block_size, g.num_kv_heads, g.head_dim + 8)
    memory = Allocation(2 * torch.Size(shape).numel() * dtype.itemsize, seed)
    halves = (memory.take(shape, dtype)[..., : g.head_dim].transpose(1, 2) for _ in range(2))
    k, v = (Half(half, Layout.BLOCK_CUSTOM) for half in halves)
    return Cache((memory.storage,), (Layer(k, v),))


def source(case: Case, seed: int) -> Cache:
    sizes = Geometry(7, 4, case.num_kv_heads, case.head_dim, num_layers=1)
    cache = (LAYOUTS | {"padded": padded})[case.layout](sizes, case.src, seed).fill(seed)
    if isinstance(case.scale, ScaleGranularity):
        return scaled(cache, case.scale, seed)
    if case.scale is None:
        return cache
    scale = torch.tensor(case.scale)
    return cache.with_scales(lambda half, name: (scale, PER_TENSOR))


def migrate(backend: Backend, case: Case, seed: int) -> int:
    """Migrates rows of all lengths with tokens that are skipped at either end, and compares all of
    memory. Returns how many tokens move."""
    src = source(case, seed)
    sizes = Geometry(40, 4, case.num_kv_heads, case.head_dim, num_layers=1)
    dst = LAYOUTS["nhd"](sizes, case.dst, seed + 1)
    ends = [
        roomy(tables.packed(src, LENGTHS, seed + 2, nulls=0.2)),
        roomy(tables.packed(dst, LENGTHS, seed + 3, shared=False, nulls=0.2)),
    ]
    check_migrate(backend, src, ends[0], dst, ends[1], LENGTHS)
    return sum(
        all(end.indices[row, token // 4] >= 0 for end in ends)
        for row, length in enumerate(LENGTHS)
        for token in range(length)
    )


def roomy(end: Packed) -> Packed:
    more = COLUMNS - end.indices.shape[1]
    return replace(end, indices=pad(end.indices, (0, more), value=tables.POISON))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_migrations_from_fp8(backend: Backend, case: Case) -> None:
    assert migrate(backend, case, 1) > 0


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gathers_from_fp8(backend: Backend, case: Case, zero_fill: bool) -> None:
    cache, lengths = source(case, 5), [9, 0, 22]
    for style in ("dense", "strided"):
        end = tables.packed(cache, lengths, 6, nulls=0.3)
        check_gather(
            backend, cache, end, torch.tensor(lengths), 23,
            dtype=case.dst, style=style, zero_fill=zero_fill,
        )  # fmt: skip


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_memory_that_is_not_aligned(backend: Backend, shift: int) -> None:
    """Elements of a head from `shift` on."""
    case = Case("nhd", 2, 128, 0.37, 8)
    cache = source(case, 7)
    (layer,) = cache.layers
    k, v = (
        replace(
            half,
            tensor=half.tensor[..., shift : shift + 64].transpose(1, 2),
            layout=Layout.BLOCK_CUSTOM,
        )
        for half in layer.halves()
    )
    cut = replace(cache, layers=(Layer(k, v),))
    end = tables.packed(cut, [30], 8, nulls=0.2)
    check_gather(backend, cut, end, torch.tensor([30]), 30, dtype=case.dst)


def gather_past_a_scale(bad: float) -> None:
    """One head of one token has no usable scale: it alone is left out, and reported once."""
    cache = source(Case("nhd", 2, 128, PER_TOKEN_HEAD, 16), 11)
    (layer,) = cache.layers
    sound = cache.clone()
    assert layer.k.scale is not None
    layer.k.scale[3, 2, 1] = bad
    end = Packed(torch.tensor([[3, 5]]), 4)
    result = output(layer, 1, 7, BF16, "dense")
    expected = result.clone()
    reference.gather(sound.layers[0], end, [7], *outputs(expected))
    key, value = outputs(result)
    outputs(expected)[0][0, 2, 1] = key[0, 2, 1]
    with pytest.raises(KvxError, match="expected a finite scale above 0") as found:
        HOSTGRID.gather(layer, end, torch.tensor([7]), key, value, max_seq_len=7)
    assert "is skipped, 1 times" in str(found.value)
    assert_same_bytes(result, expected)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_head_without_a_usable_scale(bad: float) -> None:
    gather_past_a_scale(bad)


# ---- The machine code, executed on the CPU ----


@pytest.fixture(scope="module")
def machine(release_library: Path) -> Iterator[Machine]:
    hostgrid = hostgrid_library()
    found = Machine(release_library, Path(hostgrid._name))
    yield found
    found.close()
    HOSTGRID.forget()


@pytest.mark.slow  # it builds for minutes
@pytest.mark.of_csrc
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_a_load(machine: Machine, case: Case) -> None:
    """The machine code moves the same bytes, and loads all of FP8 by vectors of this size."""
    machine.launches.clear()
    num_tokens = migrate(HOSTGRID, case, 9)
    num_bytes = 2 * num_tokens * case.num_kv_heads * case.head_dim
    (launch,) = (launch for launch in machine.launches if "convert_kernel" in launch.kernel)
    loaded = {width: width * count for width, count in launch.loads.items()}
    assert loaded.get(case.num_bytes, 0) >= num_bytes
    if case.num_bytes == 8:
        assert 16 not in loaded


@pytest.mark.slow
@pytest.mark.of_csrc
def test_the_machine_code_leaves_out_a_head_without_a_usable_scale(machine: Machine) -> None:
    gather_past_a_scale(0.0)
    assert any("convert_kernel<E4m3,Bf16" in launch.kernel for launch in machine.launches)
