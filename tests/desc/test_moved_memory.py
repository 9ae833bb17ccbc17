"""Descriptions that a caller keeps and gives to calls after their tensors have moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import kvx_core.ops.torch_ops  # noqa: F401  registers torch.ops.kvx
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    GatherPlan,
    InvalidArgumentError,
    Plan,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    WritePlan,
    borrow,
    describe,
    gather_kv,
    migrate,
    verify,
    write_kv,
    write_layers,
)
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.stores import Section
from tests.desc.dlpack import OnlyDLPack

ROWS = [[0, 1], [3, 2]]
FP8 = torch.float8_e4m3fn


def cache(seed: int) -> tuple[CacheDesc, Tensor]:
    torch.manual_seed(seed)
    k, v = torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    return CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")), k


def view(seed: int) -> CacheView:
    return CacheView((cache(seed)[0],), CacheFacts(first_kv_head=0))


def move(tensor: Any, how: str) -> None:
    if isinstance(tensor, OnlyDLPack):
        tensor.tensor = tensor.tensor.clone() if how == "replaced" else None
    elif how == "freed":
        tensor.untyped_storage().resize_(0)
    else:
        tensor.set_(torch.zeros(1000, dtype=tensor.dtype).untyped_storage())


def both() -> tuple[Any, Any]:
    return view(1).at(ROWS), view(2).at(ROWS)


def lens_of_a_plan(lens: Tensor) -> list[Callable[[], Any]]:
    plan = Plan.migrate(*both(), lens, same_model=True)
    plan.run()
    return [plan.run, plan.describe, plan.ranges]


def lens_of_a_run(lens: Tensor) -> list[Callable[[], Any]]:
    plan, kept = Plan.migrate(*both(), [8, 8], same_model=True), SeqLens.of(lens)
    plan.run(kept)
    return [lambda: plan.run(kept), lambda: plan.describe(kept), lambda: plan.ranges(kept)]


def lens_of_calls(lens: Tensor) -> list[Callable[[], Any]]:
    kept, ends = SeqLens.of(lens), both()
    return [
        lambda: migrate(*ends, kept, same_model=True),
        lambda: verify(*ends, kept),
        lambda: gather_kv(view(1).layers[0], ROWS, kept),
    ]


def starts_of_verify(starts: Tensor) -> list[Callable[[], Any]]:
    src, dst = view(1).at(ROWS, starts=[0, 0]), view(1).at(ROWS)
    kept = view(1).at(ROWS, starts=starts)
    assert verify(src, dst, [8, 8])
    return [lambda: verify(kept, dst, [0, 0]), lambda: verify(dst, kept, [0, 0])]


def table_of_a_run(table: Tensor) -> list[Callable[[], Any]]:
    plan, kept = Plan.migrate(*both(), [8, 8], same_model=True), BlockTable.packed(table)
    plan.run(src_block_table=kept)
    return [
        lambda: plan.run(src_block_table=kept),
        lambda: plan.ranges(dst_block_table=kept),
    ]


def table_of_calls(table: Tensor) -> list[Callable[[], Any]]:
    kept, one = BlockTable.packed(table), cache(1)[0]
    out = torch.empty(16, 2, 8), torch.empty(16, 2, 8)
    plan = GatherPlan(one, *out)
    plan(*out, kept, [8, 8])
    span = view(1).at(kept)
    return [
        lambda: plan(*out, kept, [8, 8]),
        lambda: plan.ranges(*out, kept, [8, 8]),
        lambda: gather_kv(one, kept, [8, 8]),
        lambda: verify(span, view(1).at(ROWS), [8, 8]),
        lambda: find_tokens(span, SeqLens.of([8, 8])),
    ]


def table_of_a_section(table: Tensor) -> list[Callable[[], Any]]:
    section = Section((0,), view(1), BlockTable.packed(table))
    assert not section.has_null(0, 8)
    return [lambda: section.has_null(0, 8), lambda: section.is_null(0, 8)]


def slots(found: Tensor) -> list[Callable[[], Any]]:
    kept, (one, _) = SlotMapping.of(found), cache(1)
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    plan = WritePlan(one, key, value)
    plan(key, value, kept)
    return [
        lambda: plan(key, value, kept),
        lambda: plan.describe(key, value, kept),
        lambda: write_kv(one, key, value, kept),
    ]


def key_of_a_write(key: Tensor) -> list[Callable[[], Any]]:
    one, value = cache(1)[0], torch.randn(4, 2, 8)
    kept, plan = describe(key, "BLOCK_CUSTOM"), WritePlan(one, key, value)
    plan(kept, value, [0, 1, 2, 3])
    return [
        lambda: plan(kept, value, [0, 1, 2, 3]),
        lambda: plan.ranges(kept, value, [0, 1, 2, 3]),
        lambda: write_kv(one, kept, value, [0, 1, 2, 3]),
    ]


KEPT = [
    (lens_of_a_plan, lambda: torch.tensor([8, 7])),
    (lens_of_a_run, lambda: torch.tensor([8, 7])),
    (lens_of_calls, lambda: torch.tensor([8, 7], dtype=torch.int32)),
    (starts_of_verify, lambda: torch.tensor([8, 8])),
    (table_of_a_run, lambda: torch.tensor(ROWS)),
    (table_of_calls, lambda: torch.tensor(ROWS, dtype=torch.int32)),
    (table_of_a_section, lambda: torch.tensor(ROWS[:1])),
    (slots, lambda: torch.tensor([0, 5, 9, 2])),
    (key_of_a_write, lambda: torch.randn(4, 2, 8)),
]


@pytest.mark.parametrize("library", [lambda tensor: tensor, OnlyDLPack], ids=["torch", "dl"])
@pytest.mark.parametrize("how", ["freed", "replaced"])
@pytest.mark.parametrize(("make", "tensor"), KEPT, ids=[make.__name__ for make, _ in KEPT])
def test_a_description_of_memory_that_has_moved_is_refused(
    make: Callable[[Any], list[Callable[[], Any]]],
    tensor: Callable[[], Tensor],
    how: str,
    library: Callable[[Tensor], Any],
) -> None:
    given = library(tensor())
    calls = make(given)
    move(given, how)
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"describes memory that its tensor no long"):
            call()


class Parts(NamedTuple):
    """Everything of a cache whose memory may be another library's, described."""

    cache: CacheDesc
    scale: ScaleDesc
    view: CacheView
    span: CacheSpan  # its blocks are given one by one

    @classmethod
    def of(cls, k: Any, v: Any, scale: Any, blocks: list[Any]) -> Parts:
        one = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
        planes = CacheView((one,), CacheFacts(first_kv_head=0))
        given = CacheDesc.from_kv(*(describe(block, "BLOCK_NHD") for block in FIRST))
        span = CacheView((given,), CacheFacts(first_kv_head=0)).at(
            block_table=BlockTable.pointers([[blocks]])
        )
        return cls(one, ScaleDesc.of(scale), planes, span)


FIRST = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)


def calls_on(parts: Parts) -> dict[str, Callable[[], Any]]:
    """Calls that read and write what was described once; those that were bound before as well."""
    key, value, dst = torch.randn(4, 2, 8), torch.randn(4, 2, 8), view(2).at(ROWS)
    out = torch.empty(1, 4, 2, 8), torch.empty(1, 4, 2, 8)
    write, read = WritePlan(parts.cache, key, value), GatherPlan(parts.cache, *out)
    src = parts.view.at(ROWS)
    plan, back = (Plan.migrate(*ends, [8, 7], same_model=True) for ends in ((src, dst), (dst, src)))
    layers = (parts.cache, cache(2)[0])
    return {
        "write": lambda: write(key, value, [0, 1, 2, 3]),
        "write_kv": lambda: write_kv(parts.cache, key, value, [0, 1, 2, 3]),
        "write_layers": lambda: write_layers(layers, [key] * 2, [value] * 2, [0, 1, 2, 3]),
        "read": lambda: read(*out, [[1]], [4]),
        "gather_kv": lambda: gather_kv(parts.cache, [[1]], [4], out=out),
        "plan": lambda: plan.run(),
        "back": lambda: back.run(),
        "ranges": lambda: back.ranges(),
        "migrate": lambda: migrate(src, dst, [8, 7], same_model=True),
        "verify": lambda: verify(src, dst, [8, 7]),
    }


@pytest.mark.parametrize("how", ["freed", "replaced"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_cache_of_another_library_that_has_moved_is_refused(which: int, how: str) -> None:
    """Writes went into memory that the library had left, and reads came from it, unnoticed."""
    both = [OnlyDLPack(torch.randn(4, 4, 2, 8)) for _ in range(2)]
    calls = calls_on(Parts.of(*both, 1.0, list(FIRST)))
    for call in calls.values():
        call()
    moved, left = both[which], both[which].tensor.clone()
    move(moved, how)
    for call in calls.values():
        with pytest.raises(InvalidArgumentError, match=r"describes memory that its tensor no long"):
            call()
    if how == "replaced":
        assert torch.equal(moved.tensor, left)


def test_blocks_and_scales_of_another_library_that_have_moved_are_refused() -> None:
    blocks = [OnlyDLPack(torch.randn(4, 2, 8)) for _ in range(2)]
    scale, codes = OnlyDLPack(torch.tensor([0.5])), torch.zeros(4, 4, 2, 8).to(FP8)
    parts = Parts.of(codes, codes.clone(), scale, blocks)
    key, dst = torch.randn(4, 2, 8), view(2).at([[2]])
    scales = {"k_scale": parts.scale, "v_scale": 1.0}
    write = WritePlan(parts.cache, key, key, **scales)
    calls = [
        lambda: write(key, key, [0, 1, 2, 3]),
        lambda: write_kv(parts.cache, key, key, [0, 1, 2, 3], **scales),
        lambda: migrate(parts.span, dst, [4], same_model=True),
        lambda: verify(parts.span, dst, [4]),
    ]
    plan = Plan.migrate(parts.span, dst, [4], same_model=True)
    calls.append(plan.run)
    for call in calls:
        call()
    move(blocks[1], "replaced")
    move(scale, "replaced")
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"describes memory that its tensor no long"):
            call()


def test_blocks_that_numpy_holds_are_kept_alive() -> None:
    """A table of addresses named memory that was free again."""
    blocks = [np.zeros((4, 2, 8), np.float32) for _ in range(4)]
    alive = [weakref.ref(block) for block in blocks]
    table = BlockTable.pointers([[blocks[:2]], [blocks[2:]]])
    del blocks
    assert all(one() is not None for one in alive)
    assert table.seq_count == 2


def test_mlx_moves_an_array_when_it_writes_it() -> None:
    """What KVX wrote there afterwards was lost: MLX's array had other memory by then."""
    mx = pytest.importorskip("mlx.core")
    k, v = mx.zeros((4, 4, 2, 8)), mx.zeros((4, 4, 2, 8))
    mx.eval(k, v)
    one = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    ones = torch.ones(1, 2, 8)
    write_kv(one, ones, ones, [5])
    assert np.array(k).sum() == 16
    k[0, 0, 0, 0] = 2.0
    mx.eval(k)
    with pytest.raises(InvalidArgumentError, match=r"cache\.k describes memory that its tensor no"):
        write_kv(one, ones, ones, [6])
    again = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    write_kv(again, ones, ones, [6])
    assert np.array(k).sum() == 34


def test_an_array_of_no_elements_has_no_memory_to_lose() -> None:
    empty = OnlyDLPack(torch.empty(0, 2, 8))
    found = describe(empty, "BLOCK_CUSTOM")
    empty.tensor = torch.empty(8)[:0].view(0, 2, 8)
    write_kv(cache(1)[0], found, torch.empty(0, 2, 8), [])


def shrink(tensor: Tensor) -> None:
    """Takes the last byte from its storage; shape and strides stay."""
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() - 1)


def calls_with(key: Tensor, value: Tensor, **given: Tensor) -> list[Callable[[], Any]]:
    """Calls that were made before with whole tensors, and read them in C each time."""
    whole, slots = (torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)), torch.arange(4)
    table, lens = torch.tensor([[1]]), torch.tensor([4])
    one, (k, v) = cache(1)[0], torch.randn(2, 4, 4, 2, 8)
    write, read = WritePlan(one, whole[0][0], whole[1][0]), GatherPlan(one, *whole)
    layers = (one, cache(2)[0])
    slots, table, lens = (given.get(n, t) for n, t in zip(NAMES, (slots, table, lens), strict=True))
    flat = key[0], value[0]
    return [
        lambda: write(*flat, slots),
        lambda: write_kv(one, *flat, slots),
        lambda: write_layers(layers, [flat[0]] * 2, [flat[1]] * 2, slots),
        lambda: torch.ops.kvx.write_kv(*flat, k, v, slots, "BLOCK_NHD"),
        lambda: read(key, value, table, lens),
        lambda: gather_kv(one, table, lens, out=(key, value)),
        lambda: torch.ops.kvx.gather_kv_out(k, v, table, lens, key, value, "BLOCK_NHD"),
    ]


NAMES = "slots", "table", "lens"


@pytest.mark.parametrize("which", ["key", "value", *NAMES])
def test_storages_that_were_shrunk_are_not_read_past_their_end(which: str) -> None:
    """torch keeps the shape of a tensor whose storage is resized, and the calls believed it."""
    tensors = {
        "key": torch.randn(1, 4, 2, 8),
        "value": torch.randn(1, 4, 2, 8),
        "slots": torch.arange(4),
        "table": torch.tensor([[1]]),
        "lens": torch.tensor([4]),
    }
    calls = calls_with(**tensors)
    for call in calls:
        call()
    shrink(tensors[which])
    for i, call in enumerate(calls):
        if which in ("key", "value") or (which == "slots") == (i < 4):
            with pytest.raises(InvalidArgumentError, match=r"has a storage of \d+ bytes, expected"):
                call()
        else:
            call()


def test_a_view_behind_others_of_a_storage_that_was_shrunk() -> None:
    """Its storage has as many bytes as the view, which begins in the middle."""
    memory = torch.zeros(6, 4)
    views = memory[2:], memory[2:, 1:3], memory.flatten()[3:11]
    for view in views:
        borrow(view)
    memory.untyped_storage().resize_(4 * 4 * 4)
    for view, needed in zip(views[:2], (96, 92), strict=True):
        sentence = f"x has a storage of 64 bytes, expected at least {needed}: it has been resized"
        with pytest.raises(InvalidArgumentError, match=sentence):
            borrow(view, name="x")
    borrow(views[2])


def test_a_plan_whose_lengths_have_moved_takes_others() -> None:
    lens = torch.tensor([8, 7])
    src, dst = both()
    plan = Plan.migrate(src, dst, lens, same_model=True)
    move(lens, "freed")
    plan.run([8, 7])
    assert verify(src, dst, [8, 7])
    assert plan.describe([8, 7]).num_tokens == 15


def ahead(tensor: Tensor, shift: int) -> None:
    """The same shape and strides, `shift` elements further in a storage that covers both places: as
    after a resize that has put the storage near to where it was.
    """
    place = tensor.storage_offset() + shift
    tensor.set_(tensor.untyped_storage(), place, tensor.shape, tensor.stride())


def with_room(tensor: Tensor) -> Tensor:
    """A copy in a storage that goes on behind it."""
    held = torch.zeros(tensor.numel() * 2, dtype=tensor.dtype)
    found = held[: tensor.numel()].view(tensor.shape)
    found.copy_(tensor)
    return found


@pytest.mark.parametrize("which", ["key", "value", *NAMES, "block"])
def test_a_storage_that_still_covers_a_place_is_not_that_place(which: str) -> None:
    """Kept descriptions read what lies there now, if only the storage's ends were compared."""
    k, v = with_room(torch.randn(4, 4, 2, 8)), with_room(torch.randn(4, 4, 2, 8))
    numbers = {
        "slots": with_room(torch.arange(4)),
        "table": with_room(torch.tensor([[1]])),
        "lens": with_room(torch.tensor([4])),
    }
    layer = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    table, lens = BlockTable.packed(numbers["table"]), SeqLens.of(numbers["lens"])
    slots = SlotMapping.of(numbers["slots"])
    block, described = with_room(torch.randn(4, 2, 8)), torch.randn(1, 4, 2, 8)
    one = CacheDesc.from_kv(*(describe(t, "BLOCK_NHD") for t in (described, described.clone())))
    of_blocks = CacheView((one,), CacheFacts(first_kv_head=0))
    of_block = of_blocks.at(BlockTable.pointers([[[block, block]]]))
    here = CacheView((layer,), CacheFacts(first_kv_head=0))
    there = view(2).at([[3]])
    ones = torch.ones(4, 2, 8)
    calls: dict[str, list[Callable[[], Any]]] = {
        "table": [lambda: migrate(here.at(table), there, [4], same_model=True)],
        "lens": [lambda: migrate(here.at([[1]]), there, lens, same_model=True)],
        "slots": [lambda: write_kv(layer, ones, ones, slots)],
        "block": [lambda: migrate(of_block, there, [4], same_model=True)],
    }
    calls["key"] = calls["value"] = [
        lambda: migrate(here.at([[1]]), there, [4], same_model=True),
        lambda: write_kv(layer, ones, ones, [6, 7, 8, 9]),
        lambda: gather_kv(layer, [[1]], [4]),
    ]
    for call in calls[which]:
        call()
    ahead({"key": k, "value": v, "block": block, **numbers}[which], 1)
    for call in calls[which]:
        with pytest.raises(
            InvalidArgumentError, match="describes memory that its tensor no longer"
        ):
            call()
