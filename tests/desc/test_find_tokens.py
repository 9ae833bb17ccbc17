"""find_tokens against the spec written out in tests/reference.py. Spec: E.12"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvx_core import BlockTable, CacheDesc, CacheView, Plane, SeqLens, SlotMapping, describe
from kvx_core.desc.cache import PoolDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.desc.view import CacheSpan
from kvx_core.errors import InvalidArgumentError, KvxError, OutOfRangeError
from kvx_core.types import Memory
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


def planes_of(seed: int) -> tuple[CacheView, list[list[int]]]:
    """A plane of one entry per token by the table of K, one per 4 tokens by a table of its own, and
    one per sequence by slots."""
    cache = LAYOUTS["nhd"](Geometry(block_size=8), torch.bfloat16, 1)
    generator = torch.Generator().manual_seed(seed)
    own = [torch.randperm(5, generator=generator).tolist()[:2] for _ in LENGTHS]
    axes = ("block", "token", "dim")
    planes = (
        Plane.of(torch.zeros(cache.layers[0].k.num_blocks, 8, 3), axes, "index_k"),
        Plane.of(torch.zeros(5, 3, 6), axes, 40, tokens_per_entry=4, block_table=own),
        Plane.of(torch.zeros(9, 6), axes[::2], "state", tokens_per_entry=0, slots=[7, 2, -1, 0]),
    )
    return replace(view_of(cache, null_block_id=2), planes=planes), own


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_entries_of_planes(seed: int) -> None:
    """Entries of several tokens are complete ones; a sequence without tokens has no state."""
    view, own = planes_of(seed)
    generator = torch.Generator().manual_seed(seed + 10)
    blocks = torch.randint(-1, 5, (4, 3), generator=generator)
    starts = [4, 0, 8, 12]
    span, lens = view.at(block_table=blocks, starts=starts), SeqLens.of(LENGTHS)
    k = find_tokens(span, lens)
    assert find_tokens(span, lens, plane=0).tolist() == k.tolist()
    expected = [
        (own[s][e // 3], e % 3, 0) if own[s][e // 3] != 2 else (-1, 0, 0)
        for s, length in enumerate(LENGTHS)
        for e in range(starts[s] // 4, starts[s] // 4 + length // 4)
    ]
    assert len(expected) == 1 + 2
    assert find_tokens(span, lens, plane=1).tolist() == expected
    assert find_tokens(span, lens, plane=2).tolist() == [(7, 0, 0), (-1, 0, 0), (0, 0, 0)]
    alone = CacheView((), CacheFacts(), planes=(view.planes[2],), dense=True).at()
    assert find_tokens(alone, SeqLens.of([0, 1, 0, 0]), plane=0).tolist() == [(2, 0, 0)]


def test_planes_are_refused_in_the_words_of_migrate() -> None:
    view, own = planes_of(1)
    own[2][0] = 5
    wrong = replace(view.planes[1], block_table=BlockTable.of(own))
    span = replace(view, planes=(wrong,)).at(block_table=[[1, 1, 1]] * 4)
    sentence = r"^src\.planes\[\]\.block_table\.indices\[4\] is 5, expected below num_blocks 5 "
    with pytest.raises(OutOfRangeError, match=sentence):
        find_tokens(span, SeqLens.of(LENGTHS), plane=0)
    start = view.at(block_table=[[1, 1, 1]] * 4, starts=[0, 2, 0, 0])
    with pytest.raises(OutOfRangeError, match="expected a multiple of 4, the tokens_per_entry"):
        find_tokens(start, SeqLens.of(LENGTHS), plane=1)


def test_indices_of_planes_on_a_device_are_read_back() -> None:
    view, own = planes_of(1)
    table = BlockTable.packed(torch.tensor(own))
    slots = SlotMapping.of(torch.tensor([7, 2, -1, 0]))
    there = [
        replace(view.planes[1], memory=Memory.DEVICE, block_table=None),
        replace(view.planes[2], memory=Memory.DEVICE, slots=None),
    ]
    there[0] = replace(there[0], block_table=replace(table, memory=Memory.DEVICE))
    there[1] = replace(there[1], slots=replace(slots, memory=Memory.DEVICE))
    span = CacheView((), CacheFacts(), null_block_id=2, dense=True, planes=tuple(there)).at()
    here = replace(view, layers=(), dense=True, planes=view.planes[1:]).at()
    for plane in (0, 1):
        found, expected = (find_tokens(at, SeqLens.of(LENGTHS), plane=plane) for at in (span, here))
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pointers_are_found_for_each_layer(seed: int) -> None:
    """Every K and V of every layer by its own addresses; null blocks are those of one alone."""
    k, v = torch.zeros(2, 3, 4, 6, 2, 16, dtype=torch.bfloat16)  # [K, V][layer][block]
    layers = tuple(
        CacheDesc.from_kv(
            describe(k[i, :1], "BLOCK_NHD"), describe(v[i, :1], "BLOCK_NHD") if i != 1 else None
        )
        for i in range(3)
    )
    tensors = [k[0], v[0], k[1], k[2], v[2]]
    blocks = torch.randint(-1, 4, (2, 2, 5), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [
        [
            [t[b].data_ptr() if b >= 0 else None for t, b in zip(tensors, block, strict=True)]
            for block in row
        ]
        for row in blocks
    ]
    span = CacheView(layers, CacheFacts()).at(block_table=BlockTable.pointers(rows), starts=[1, 4])
    asked = [(0, False), (0, True), (1, False), (2, False), (2, True)]
    for i, (layer, is_v) in enumerate(asked):
        found = find_tokens(span, SeqLens.of([9, 5]), v=is_v, layer=layer)
        expected = [
            (rows[s][t // 6][i], t % 6, 0) if rows[s][t // 6][i] else (-1, 0, 0)
            for s, (start, length) in enumerate([(1, 9), (4, 5)])
            for t in range(start, start + length)
        ]
        assert found.tolist() == expected
    with pytest.raises(InvalidArgumentError, match=r"find\.is_v is 1, expected 0"):
        find_tokens(span, SeqLens.of([9, 5]), v=True, layer=1)
    with pytest.raises(InvalidArgumentError, match=r"find\.layer is 3, expected at most 2"):
        find_tokens(span, SeqLens.of([9, 5]), layer=3)
