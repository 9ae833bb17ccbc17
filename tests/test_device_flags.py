"""KVX_FLAG_BACKGROUND and KVX_FLAG_COPY_ENGINE: the same bytes, moved in other ways.

On HOST memory the flags have no meaning. The caches here are large enough for whole blocks, long
runs and the rest at their ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvx_core._c import abi
from kvx_core.errors import OutOfRangeError, UnsupportedError
from kvx_core.types import Layout, Memory
from tests import tables
from tests.caches import LAYOUTS, Cache, Geometry, assert_same_bytes, canonical
from tests.calls import Backend
from tests.migrations import check_migrate
from tests.reference import Dense, Packed, Slots
from tests.token_calls import check_gather, check_write, key_value

FLAGS = {"plain": 0, "background": abi.FLAG_BACKGROUND, "copy_engine": abi.FLAG_COPY_ENGINE}
USUAL = Geometry(num_blocks=13, block_size=16, num_kv_heads=2, head_dim=32)
LENGTHS = (48, 0, 37, 16)


@dataclass(frozen=True)
class Flagged(Backend):
    """A backend with flags in every call."""

    flags: int = 0

    @property
    def looks_first(self) -> bool:
        return self.memory == Memory.HOST or bool(self.flags & abi.FLAG_COPY_ENGINE)

    def write(self, *args: Any, **kwargs: Any) -> None:
        super().write(*args, flags=self.flags, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> None:
        super().gather(*args, flags=self.flags, **kwargs)

    def migrate(self, *args: Any, **kwargs: Any) -> None:
        super().migrate(*args, flags=self.flags, **kwargs)


class Captured(Flagged):
    """Its streams are being captured while a call is made."""

    def launch(self, *args: Any) -> int | None:
        with pytest.MonkeyPatch.context() as during:
            during.setenv("HOSTGRID_CAPTURES", "1")
            return super().launch(*args)


def with_flags(backend: Backend, flags: int) -> Flagged:
    return Flagged(**vars(backend), flags=flags)


@pytest.fixture(params=FLAGS)
def flagged(request: pytest.FixtureRequest, backend: Backend) -> Flagged:
    return with_flags(backend, FLAGS[request.param])


@pytest.fixture
def copying(backend: Backend) -> Flagged:
    return with_flags(backend, abi.FLAG_COPY_ENGINE)


def in_order(counts: Sequence[int], first: int = 0) -> Packed:
    """A table whose blocks follow each other, in memory too."""
    columns = max(counts)
    indices = torch.full((len(counts), columns), tables.POISON, dtype=torch.int32)
    for row, count in enumerate(counts):
        indices[row, :count] = torch.arange(first, first + count)
        first += count
    return Packed(indices, USUAL.block_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_and_gather(flagged: Flagged, layout: str) -> None:
    cache = LAYOUTS[layout](USUAL, torch.bfloat16, seed=1)
    slots = tables.slots(cache, 70, seed=2)
    check_write(flagged, cache, key_value(cache.layers[-1], 70, torch.bfloat16, 3), slots)
    run = torch.arange(5, 5 + 90)
    check_write(flagged, cache, key_value(cache.layers[-1], 90, torch.bfloat16, 4), run)
    for zero_fill in (False, True):
        table = tables.packed(cache, LENGTHS, 5, nulls=0.2)
        check_gather(flagged, cache, table, torch.tensor(LENGTHS), 50, zero_fill=zero_fill)


@pytest.mark.parametrize("block_size", [16, 8, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_migrate(flagged: Flagged, layout: str, block_size: int) -> None:
    """Between caches of one layout, whole blocks among them."""
    src = LAYOUTS[layout](USUAL, torch.bfloat16, seed=1)
    geometry = replace(USUAL, block_size=block_size, num_blocks=13 * 16 // block_size)
    dst = LAYOUTS[layout](geometry, torch.bfloat16, seed=2)
    for seed, nulls in enumerate((0.0, 0.3)):
        src_end = tables.packed(src, LENGTHS, seed, nulls=nulls)
        dst_end = tables.packed(dst, LENGTHS, seed + 7, shared=False)
        check_migrate(flagged, src, src_end, dst, dst_end, LENGTHS, zero_fill=nulls > 0)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "tgi", "packed8", "vllm_BLHNC"])
def test_migrate_blocks_in_order(flagged: Flagged, layout: str) -> None:
    src = LAYOUTS[layout](USUAL, torch.float16, seed=1)
    dst = LAYOUTS[layout](USUAL, torch.float16, seed=2)
    check_migrate(flagged, src, in_order((4, 3), 2), dst, in_order((4, 3), 6), (64, 41))


@pytest.mark.parametrize("layout", ["nhd", "hnd", "tgi"])
def test_migrate_from_and_to_the_middle_of_blocks(flagged: Flagged, layout: str) -> None:
    src = LAYOUTS[layout](USUAL, torch.float16, seed=1)
    dst = LAYOUTS[layout](USUAL, torch.float16, seed=2)
    for src_starts, dst_starts in (([16, 5], [32, 5]), ([3, 0], [1, 16])):
        lengths = (48, 37)
        src_ends = [a + n for a, n in zip(src_starts, lengths, strict=True)]
        dst_ends = [a + n for a, n in zip(dst_starts, lengths, strict=True)]
        check_migrate(
            flagged,
            src,
            tables.packed(src, src_ends, 3, starts=src_starts),
            dst,
            tables.packed(dst, dst_ends, 4, shared=False, starts=dst_starts),
            lengths,
            src_starts=src_starts,
            dst_starts=dst_starts,
        )


@pytest.mark.parametrize("layout", ["nhd", "hnd", "tgi"])
def test_migrate_slots(flagged: Flagged, layout: str) -> None:
    """Places are known token by token, and still form whole blocks."""
    src = LAYOUTS[layout](USUAL, torch.float16, seed=1)
    dst = LAYOUTS[layout](USUAL, torch.float16, seed=2)
    whole = torch.arange(3 * 16)
    torn = whole.clone()
    torn[20] = -1
    for slots in (whole, torn):
        src_end = Slots(slots + 32 * (slots >= 0), [48], USUAL.block_size)
        dst_end = Slots(slots + 64 * (slots >= 0), [48], USUAL.block_size)
        check_migrate(flagged, src, src_end, dst, dst_end, (48,))


@pytest.mark.parametrize(
    ("layout", "geometry"),
    [
        ("nhd", Geometry(num_blocks=4, block_size=4, num_kv_heads=12, head_dim=256)),
        ("hnd", Geometry(num_blocks=4, block_size=16, num_kv_heads=5, head_dim=256)),
        ("hnd", Geometry(num_blocks=3, block_size=64, num_kv_heads=2, head_dim=48)),
        ("hnd", Geometry(num_blocks=3, block_size=24, num_kv_heads=2, head_dim=80)),
        ("hnd", Geometry(num_blocks=3, block_size=512, num_kv_heads=2, head_dim=8)),
        ("tgi", Geometry(num_blocks=3, block_size=32, num_kv_heads=3, head_dim=64)),
    ],
    ids=str,
)
def test_migrate_blocks_of_any_size(flagged: Flagged, layout: str, geometry: Geometry) -> None:
    """Tokens and blocks that need several steps, and blocks of more tokens than a step has."""
    src = LAYOUTS[layout](geometry, torch.float32, seed=1)
    dst = LAYOUTS[layout](geometry, torch.float32, seed=2)
    lengths = (2 * geometry.block_size, geometry.block_size - 1)
    src_end = tables.packed(src, lengths, 3)
    dst_end = tables.packed(dst, lengths, 4, shared=False)
    check_migrate(flagged, src, src_end, dst, dst_end, lengths)


def test_migrate_both_pools_of_a_model(flagged: Flagged) -> None:
    """More layers than a launch in the background takes."""
    geometry = replace(USUAL, num_layers=19)
    src = LAYOUTS["tensorrt_llm"](geometry, torch.float16, seed=1)
    dst = LAYOUTS["tensorrt_llm"](geometry, torch.float16, seed=2)
    src_end = tables.kv_offsets(src, LENGTHS, 3, nulls=0.1)
    dst_end = tables.kv_offsets(dst, LENGTHS, 4, shared=False)
    check_migrate(flagged, src, src_end, dst, dst_end, LENGTHS, zero_fill=True)


def test_migrate_heads(flagged: Flagged) -> None:
    for layout in ("nhd", "hnd", "universal"):
        src = LAYOUTS[layout](replace(USUAL, num_kv_heads=8), torch.float16, seed=1)
        dst = LAYOUTS[layout](replace(USUAL, num_kv_heads=4), torch.float16, seed=2)
        src_end = tables.packed(src, LENGTHS, 3)
        dst_end = tables.packed(dst, LENGTHS, 4, shared=False)
        heads = {"src_head": 5, "dst_head": 1, "num_heads": 2}
        check_migrate(flagged, src, src_end, dst, dst_end, LENGTHS, **heads)


def test_migrate_between_packs_that_do_not_divide(flagged: Flagged) -> None:
    geometry = replace(USUAL, head_dim=12)
    src, dst = (
        canonical(Layout.BLOCK_HND_PACKED, pack)(geometry, torch.float16, pack) for pack in (3, 4)
    )
    src_end = tables.packed(src, LENGTHS, 3, nulls=0.2)
    dst_end = tables.packed(dst, LENGTHS, 4, shared=False)
    check_migrate(flagged, src, src_end, dst, dst_end, LENGTHS, zero_fill=True)


def test_fp8_scales_are_applied_in_the_background(backend: Backend) -> None:
    src = LAYOUTS["nhd"](USUAL, torch.float16, seed=1).fill(seed=2)
    dst = LAYOUTS["hnd"](USUAL, torch.float8_e4m3fn, seed=3)
    src_end = tables.packed(src, LENGTHS, 4)
    dst_end = tables.packed(dst, LENGTHS, 5, shared=False)
    check_migrate(with_flags(backend, abi.FLAG_BACKGROUND), src, src_end, dst, dst_end, LENGTHS)


# --- copy engines -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["default_stream", "captured"])
def test_copies_where_there_are_no_batches(copying: Flagged, how: str) -> None:
    if how == "captured":
        copying = Captured(**vars(copying))
    elif copying.mirror is None:
        copying = replace(copying, stream=None)
    src = LAYOUTS["hnd"](USUAL, torch.float16, seed=1)
    for dst_layout in ("nhd", "hnd"):
        dst = LAYOUTS[dst_layout](USUAL, torch.float16, seed=2)
        src_end = tables.packed(src, LENGTHS, 3)
        dst_end = tables.packed(dst, LENGTHS, 4, shared=False)
        check_migrate(copying, src, src_end, dst, dst_end, LENGTHS)


def test_more_copies_than_a_batch_takes(copying: Flagged) -> None:
    geometry = Geometry(num_blocks=300, block_size=1, num_kv_heads=17, head_dim=1, num_layers=1)
    src = LAYOUTS["custom_padded_rows"](geometry, torch.float16, seed=1)
    dst = LAYOUTS["custom_dim_outermost"](geometry, torch.float16, seed=2)
    src_end = tables.packed(src, [290], 3)
    dst_end = tables.packed(dst, [290], 4, shared=False)
    check_migrate(copying, src, src_end, dst, dst_end, [290])


def test_copies_are_checked_first(copying: Flagged) -> None:
    src = LAYOUTS["nhd"](USUAL, torch.float16, seed=1)
    dst = LAYOUTS["nhd"](USUAL, torch.float16, seed=2)
    src_end = tables.with_entry(tables.packed(src, LENGTHS, 3), (3, 0), 13)
    dst_end = tables.packed(dst, LENGTHS, 4, shared=False)
    expected = dst.clone()
    message = re.escape("src.block_table.indices[") + r"\d+\] is 13, expected below num_blocks 13"
    with pytest.raises(OutOfRangeError, match=message):
        copying.migrate(src, src_end, dst, dst_end, torch.tensor(LENGTHS))
    slots = torch.tensor([3, 13 * 16, 5])
    tokens = key_value(dst.layers[0], 3, torch.float16, 5)
    message = re.escape("write.slots.slots[1] is 208, expected below")
    with pytest.raises(OutOfRangeError, match=message):
        copying.write(dst.layers[0], *tokens, slots)
    assert_same_bytes(dst, expected)


def test_copies_do_not_convert(copying: Flagged) -> None:
    src = LAYOUTS["nhd"](USUAL, torch.float16, seed=1).fill(seed=2)
    dst = LAYOUTS["nhd"](USUAL, torch.bfloat16, seed=3)
    src_end = tables.packed(src, LENGTHS, 4)
    dst_end = tables.packed(dst, LENGTHS, 5, shared=False)
    arguments = (src, src_end, dst, dst_end)
    if copying.memory == Memory.HOST:
        check_migrate(copying, *arguments, LENGTHS)
        return
    expected = dst.clone()
    message = "K of layer 0 has another dtype at each end, .* call without the flag .spec E.2."
    with pytest.raises(UnsupportedError, match=message):
        copying.migrate(*arguments, torch.tensor(LENGTHS))
    assert_same_bytes(dst, expected)


def test_copies_into_a_dense_cache(copying: Flagged) -> None:
    src = LAYOUTS["nhd"](USUAL, torch.float16, seed=1)
    dst: Cache = LAYOUTS["hnd"](replace(USUAL, num_blocks=4, block_size=64), torch.float16, seed=2)
    src_end = tables.packed(src, LENGTHS, 3)
    check_migrate(copying, src, src_end, dst, Dense(), LENGTHS)
