"""find_tokens against the spec written out in tests/reference.py. Spec: E.12"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvx_core import BlockTable, CacheDesc, CacheView, SeqLens, SlotMapping, describe
from kvx_core.cache import PoolDesc
from kvx_core.errors import InvalidArgumentError, KvxError, OutOfRangeError
from kvx_core.facts import CacheFacts
from kvx_core.lookup import find_tokens
from kvx_core.types import Memory
from kvx_core.view import CacheSpan
from tests import tables
from tests.caches import LAYOUTS, Cache, Geometry
from tests.reference import Dense, Packed, Ragged, Slots

LENGTHS = [5, 0, 9, 1]
STARTS = [2, 3, 0, 7]


def view_of(cache: Cache, **fields: Any) -> CacheView:
    layers = tuple(
        CacheDesc.from_kv(
            *(describe(half.tensor, half.layout) for half in layer.halves()),
            pool=PoolDesc.of(layer.k.tensor, cache.bytes_per_block, layer.k.secondary)
            if cache.bytes_per_block
            else None,
        )
        for layer in cache.layers
    )
    return CacheView(layers, CacheFacts(), **fields)


def assert_found(span: CacheSpan, end: Any, starts: list[int], *, v: bool = False) -> None:
    found = find_tokens(span, SeqLens.of(LENGTHS), v=v)
    expected = []
    for row, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        for token in range(start, start + length):
            place = end.place(row, token, int(v))
            expected.append(
                (-1, 0, 0) if place is None else (place.block, place.offset, int(place.secondary))
            )
    assert found.tolist() == expected


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("null", [-1, 2])
def test_packed_and_ragged(seed: int, null: int) -> None:
    view = view_of(LAYOUTS["nhd"](Geometry(), torch.bfloat16, 1), null_block_id=null)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-1, 5, (4, 4), generator=generator)
    span = view.at(block_table=blocks, starts=STARTS)
    assert_found(span, Packed(blocks, 4, null_block_id=null), STARTS)
    totals = [start + length for start, length in zip(STARTS, LENGTHS, strict=True)]
    ids = torch.randint(-1, 5, (sum(totals),), generator=generator, dtype=torch.int32)
    indptr = torch.tensor([0, *torch.tensor(totals).cumsum(0)])
    span = view.at(block_table=BlockTable.ragged(ids, indptr), starts=STARTS)
    assert_found(span, Ragged(ids, indptr, 4, null_block_id=null), STARTS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slots(seed: int) -> None:
    view = view_of(LAYOUTS["nhd"](Geometry(), torch.bfloat16, 1))
    slots = torch.randint(-2, 20, (15,), generator=torch.Generator().manual_seed(seed))
    span = view.at(slots=SlotMapping.of(slots, invalid_slot=3))
    assert_found(span, Slots(slots, LENGTHS, 4, invalid_slot=3), [0] * 4)


@pytest.mark.parametrize("v", [False, True])
@pytest.mark.parametrize("null", [-1, 0, 3])
def test_kv_offsets_in_both_pools(v: bool, null: int) -> None:
    cache = LAYOUTS["tensorrt_llm"](Geometry(), torch.bfloat16, 1)
    end = replace(tables.kv_offsets(cache, LENGTHS, 3), null_block_id=null)
    view = view_of(cache, secondary_num_blocks=7, null_block_id=null)
    span = view.at(block_table=BlockTable.kv_offsets(end.indices))
    assert_found(span, end, [0] * 4, v=v)


def test_dense() -> None:
    view = view_of(LAYOUTS["nhd"](Geometry(block_size=16), torch.bfloat16, 1), dense=True)
    assert_found(view.at(starts=STARTS), Dense(), STARTS)


@pytest.mark.parametrize(
    ("at", "error", "sentence"),
    [
        (
            {"block_table": [[0, 9, 1]]},
            OutOfRangeError,
            "src.block_table.indices[1] is 9, expected",
        ),
        ({"block_table": [[0]]}, OutOfRangeError, "row 0 needs tokens [0, 0 + 9), but src.block"),
        ({"slots": [20, *range(8)]}, OutOfRangeError, "src.slots.slots[0] is 20, expected below"),
        ({"slots": [0]}, InvalidArgumentError, "src.slots.slots has 1 entries (token_count), exp"),
    ],
)
def test_it_refuses_in_the_words_of_migrate(
    at: dict[str, Any], error: type[KvxError], sentence: str
) -> None:
    view = view_of(LAYOUTS["nhd"](Geometry(), torch.bfloat16, 1))
    with pytest.raises(error) as caught:
        find_tokens(view.at(**at), SeqLens.of([9]))
    assert str(caught.value).startswith(sentence)


def test_index_arrays_on_a_device_are_read_back() -> None:
    """Tensors of the host that say they were on a device: torch copies both the same way."""
    view = view_of(LAYOUTS["nhd"](Geometry(), torch.bfloat16, 1))
    blocks = torch.tensor([[1, 4, -1, 0]] * 4)
    ids, indptr = torch.tensor([3, 1, 2, 4, 0] * 3), torch.tensor([0, 5, 5, 14, 15])
    slots = torch.arange(15)
    for at, end in (
        ({"block_table": BlockTable.packed(blocks)}, Packed(blocks, 4)),
        ({"block_table": BlockTable.ragged(ids, indptr)}, Ragged(ids, indptr, 4)),
        ({"slots": SlotMapping.of(slots)}, Slots(slots, LENGTHS, 4)),
    ):
        found = {name: replace(value, memory=Memory.DEVICE) for name, value in at.items()}
        assert_found(view.at(**found), end, [0] * 4)
