"""device_status after calls on a device, in cases that only a device can miss.

On HOST memory every length is known before a byte moves. On a device the host launches work without
knowing lengths, and kernels must report every fault. Other backends refuse the same calls.
"""

from __future__ import annotations

import pytest
import torch

from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from tests import tables
from tests.caches import LAYOUTS, Geometry, assert_same_bytes
from tests.calls import HOSTGRID, Backend
from tests.migrations import check_migrate
from tests.reference import Packed, Ragged, Slots

LONG = Geometry(num_blocks=24, block_size=4)
WIDE = Geometry(num_blocks=300, block_size=4, num_kv_heads=1)


def packed(blocks: int) -> Packed:
    return Packed(torch.arange(blocks, dtype=torch.int32)[None], LONG.block_size)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed8", "tgi"])
@pytest.mark.parametrize(("slots", "length"), [(80, 81), (50, 80), (0, 5), (0, 1)])
def test_too_few_slots(backend: Backend, layout: str, slots: int, length: int) -> None:
    src = LAYOUTS[layout](LONG, torch.bfloat16, seed=1).fill(2)
    dst = LAYOUTS[layout](LONG, torch.bfloat16, seed=3)
    where = Slots(torch.arange(slots), [length], LONG.block_size)
    with pytest.raises(InvalidArgumentError, match=rf"dst\.slots\.slots has {slots} entries"):
        backend.migrate(src, packed(24), dst, where, torch.tensor([length]))


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed8"])
def test_a_table_that_holds_nothing(backend: Backend, layout: str) -> None:
    src = LAYOUTS[layout](LONG, torch.bfloat16, seed=1).fill(2)
    dst = LAYOUTS[layout](LONG, torch.bfloat16, seed=3)
    before = dst.clone()
    none = Ragged(torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 4)
    with pytest.raises(OutOfRangeError, match=r"row 0 needs tokens \[0, 0 \+ 3\), but"):
        backend.migrate(src, none, dst, packed(24), torch.tensor([3]))
    assert_same_bytes(dst, before)


@pytest.mark.parametrize("zero_fill", [False, True])
def test_a_negative_length_moves_nothing(backend: Backend, zero_fill: bool) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1).fill(2)
    key, value = (torch.full((1, 8, 2, 16), 7.0, dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(OutOfRangeError, match=r"gather\.seq_lens\.lengths\[0\] is -3"):
        backend.gather(
            cache.layers[0],
            packed(2),
            torch.tensor([-3]),
            key,
            value,
            max_seq_len=8,
            zero_fill=zero_fill,
        )
    assert (key == 7).all()
    assert (value == 7).all()


def test_memory_that_a_device_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pageable memory, named DEVICE or HOST, in a call that runs on the device."""
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1)
    before = cache.clone()
    key = torch.ones(1, 2, 16, dtype=torch.bfloat16)
    monkeypatch.setenv("HOSTGRID_PAGEABLE", "1")
    with pytest.raises(
        UnsupportedError, match=r"^cache\.k\.data is 0x\w+, which the device cannot reach, .* pin "
    ):
        HOSTGRID.write(cache.layers[0], key, key, torch.tensor([1]))
    assert_same_bytes(cache, before)


def test_not_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting would end the capture, and what is captured has not run."""
    library = HOSTGRID.library()
    monkeypatch.setenv("HOSTGRID_CAPTURES", "1")
    with pytest.raises(UnsupportedError, match=r"^stream is being captured, and kvx_device_status"):
        abi.check(library.kvx_device_status(None), library)
    monkeypatch.delenv("HOSTGRID_CAPTURES")
    abi.check(library.kvx_device_status(None), library)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed8", "tgi"])
@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 1000, 0), (70, 0, 9)])
def test_rows_with_room_for_far_more_tokens(
    backend: Backend, layout: str, lengths: tuple[int, ...]
) -> None:
    """Tables as long as a model's context, rows of any length: no row has most of the chunks."""
    src = LAYOUTS[layout](WIDE, torch.bfloat16, seed=1).fill(2)
    dst = LAYOUTS[layout](WIDE, torch.bfloat16, seed=3)
    indices = torch.full((3, 1 << 17), tables.POISON, dtype=torch.int32)
    blocks = iter(torch.randperm(WIDE.num_blocks, generator=torch.Generator().manual_seed(4)))
    for row, length in enumerate(lengths):
        for column in range(-(-length // WIDE.block_size)):
            indices[row, column] = next(blocks)
    table = Packed(indices, WIDE.block_size)
    check_migrate(backend, src, table, dst, table, lengths)
