"""Blocks, entries and states of kvx_core.hybrid: allocator, paged_cache and state_cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvx_core import InvalidArgumentError
from kvx_core.hybrid import (
    AttentionType,
    BlockAllocator,
    DSV4Config,
    LayerCacheSchema,
    LayerSpec,
    OutOfBlocksError,
    PagedCache,
    StateCache,
    build_schema,
    capturing,
)


def schema(attn: str) -> LayerCacheSchema:
    return build_schema(DSV4Config(), LayerSpec(3, AttentionType[attn]))


# --- the allocator ------------------------------------------------------------------------------


def test_all_blocks_and_no_more() -> None:
    blocks = BlockAllocator(8, name="layer 3")
    ids = blocks.acquire(8)
    assert ids.dtype == torch.int32
    assert sorted(ids.tolist()) == list(range(8))
    before = blocks.free_ids.clone()
    with pytest.raises(
        OutOfBlocksError, match="layer 3: requested 1 blocks, available 0, total 8"
    ) as error:
        blocks.acquire(1)
    assert isinstance(error.value, RuntimeError)
    assert (error.value.requested, error.value.available, error.value.total) == (1, 0, 8)
    assert (blocks.num_free, blocks.num_held) == (0, 8)
    assert torch.equal(blocks.free_ids, before)
    given = ids[[1, 4, 6]]
    blocks.release(given)
    assert sorted(blocks.acquire(3).tolist()) == sorted(given.tolist())
    assert blocks.acquire(0).shape == (0,)


def test_what_was_given_back_last_is_taken_first() -> None:
    blocks = BlockAllocator(8)
    blocks.acquire(8)
    blocks.release([2])
    blocks.release([7, 5])
    assert blocks.acquire(2).tolist() == [7, 5]
    assert blocks.acquire(1).tolist() == [2]


def test_ids_are_not_the_stack() -> None:
    """An id that was taken stays what it was when others are given back."""
    blocks = BlockAllocator(4)
    ids = blocks.acquire(2)
    kept = ids.clone()
    blocks.release(ids.flip(0))
    assert torch.equal(ids, kept)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([0], "block 0 is released and nobody holds it"),
        ([6, 6], "block 6 is released twice"),
        ([8], r"block_ids\[0\] is 8, expected 0 to 7"),
        ([7, -1], r"block_ids\[1\] is -1, expected 0 to 7"),
        ([7, 6, 5, 4, 7], "5 blocks are released and 4 are held"),
        (torch.tensor([1.5]), "block_ids is a Tensor, expected a tensor"),
        (torch.tensor([[7]]), "block_ids is a Tensor, expected a tensor"),
        (7, "block_ids is 7, expected a tensor"),
        ([True], "is True, expected an integer"),
    ],
)
def test_releases_that_are_refused(given: object, says: str) -> None:
    blocks = BlockAllocator(8)
    blocks.acquire(4)
    before = blocks.free_ids.clone()
    with pytest.raises(InvalidArgumentError, match=says):
        blocks.release(given)  # type: ignore[arg-type]
    assert torch.equal(blocks.free_ids, before)
    assert blocks.num_free == 4
    blocks.release([7, 6, 5, 4])
    with pytest.raises(InvalidArgumentError, match="1 blocks are released and 0 are held"):
        blocks.release([4])


def test_nothing_is_taken_inside_a_capture() -> None:
    blocks = BlockAllocator(8)
    held = blocks.acquire(2)
    with capturing():
        for call in (lambda: blocks.acquire(1), lambda: blocks.release(held)):
            with pytest.raises(RuntimeError, match="inside a captured graph"):
                call()
    assert blocks.num_free == 6
    blocks.release(held)


def test_the_top_is_on_the_host() -> None:
    blocks = BlockAllocator(8)
    assert (blocks.top.device.type, blocks.top.dtype, int(blocks.top)) == ("cpu", torch.int32, 8)
    assert blocks.holds(3) is False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_the_top_is_pinned() -> None:
    blocks = BlockAllocator(8, "cuda")
    assert blocks.top.is_pinned()
    assert blocks.acquire(3).is_cuda


# --- compressed entries -------------------------------------------------------------------------


def test_blocks_of_csa() -> None:
    pool = PagedCache(schema("CSA"), 10)
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in pool.tensors.items()}
    assert shapes == {
        "entries_fp8": ((10, 32, 448), torch.uint8),
        "entries_rope": ((10, 32, 64), torch.bfloat16),
        "inv_scale": ((10, 32), torch.float32),
        "indexer_keys": ((10, 32, 64), torch.uint8),
        "indexer_scales": ((10, 32, 8), torch.uint8),
    }
    assert bool((pool.inv_scale == 1).all())
    assert pool.block_bytes == 20_864
    assert pool.memory_bytes() == 208_640
    assert repr(pool) == "PagedCache(CSA layer 3, 10 blocks of 32 entries, 208640 bytes)"


def test_blocks_of_hca() -> None:
    pool = PagedCache(schema("HCA"), 10)
    assert pool.indexer_keys is None
    assert pool.indexer_scales is None
    assert (pool.block_bytes, pool.memory_bytes()) == (580, 5800)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"index_keys": "int8"}, "index_keys is 'int8', expected 'nvfp4', 'mxfp4' or 'fp8'"),
        ({"index_rounding": "up"}, "index_rounding is 'up', expected 'nearest_even' or 'thresh"),
        (
            {"index_keys": "fp8", "index_rounding": "thresholds"},
            "index_rounding is 'thresholds' and index_keys 'fp8', expected 'nearest_even'",
        ),
    ],
)
def test_keys_that_are_refused(fields: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        PagedCache(schema("CSA"), 1, **fields)  # type: ignore[arg-type]


def test_a_window_alone_has_no_blocks() -> None:
    with pytest.raises(InvalidArgumentError, match="layer 3 is of type SWA, which has no compress"):
        PagedCache(schema("SWA"), 10)


# --- states -------------------------------------------------------------------------------------


def test_shapes_of_states() -> None:
    shapes = {
        attn: {name: tuple(t.shape) for name, t in StateCache(schema(attn), 2).tensors.items()}
        for attn in ("CSA", "HCA", "SWA")
    }
    window = {
        "swa_fp8": (2, 128, 448),
        "swa_rope": (2, 128, 64),
        "swa_inv": (2, 128),
        "swa_pos": (2, 128),
        "swa_head": (2,),
    }
    assert shapes["SWA"] == window
    assert shapes["HCA"] == window | {
        "tail_ka": (2, 128, 512),
        "tail_za": (2, 128, 512),
        "tail_len": (2,),
    }
    tails = dict.fromkeys(("tail_ka", "tail_za", "tail_kb", "tail_zb"), (2, 4, 1024))
    indexer = dict.fromkeys(("idx_ka", "idx_za", "idx_kb", "idx_zb"), (2, 4, 256))
    assert shapes["CSA"] == window | tails | indexer | {"tail_len": (2,), "idx_tail_len": (2,)}
    plain = StateCache(replace(schema("CSA"), needs_inv_scale=False), 2)
    assert plain.tensors.keys() == shapes["CSA"].keys() - {"swa_inv"}
    assert plain.swa_inv is None
    pool = PagedCache(replace(schema("CSA"), needs_inv_scale=False), 3)
    assert pool.inv_scale is None
    assert pool.block_bytes == 20_864 - 4 * 32
    narrow = StateCache(schema("CSA"), 2, tail_row_width="single").tensors
    assert narrow["tail_zb"].shape == (2, 4, 512)
    assert narrow["idx_kb"].shape == (2, 4, 128)
    assert StateCache(schema("HCA"), 2, tail_row_width="single").tail_ka.shape == (2, 128, 512)  # type: ignore[union-attr]


def test_bytes_of_states() -> None:
    """Windows of Pro and Flash, and tails in float32."""
    window = StateCache(schema("SWA"), 1).memory_bytes()
    assert window == 128 * 584 + 4
    hca, csa = StateCache(schema("HCA"), 1).tensors, StateCache(schema("CSA"), 1).tensors
    assert hca["tail_ka"].nbytes + hca["tail_za"].nbytes == 524_288
    assert sum(csa[f"tail_{name}"].nbytes for name in ("ka", "za", "kb", "zb")) == 65_536
    assert sum(csa[f"idx_{name}"].nbytes for name in ("ka", "za", "kb", "zb")) == 16_384


def fresh(state: StateCache, slot: int) -> bool:
    wanted = {"swa_inv": 1.0, "swa_pos": -1, "tail_zb": -1e9, "idx_zb": -1e9}
    return all(
        bool((tensor[slot] == torch.tensor(wanted.get(name, 0)).to(tensor.dtype)).all())
        for name, tensor in state.tensors.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attn", ["CSA", "HCA", "SWA"])
def test_a_reset_empties_one_slot(attn: str, dtype: torch.dtype) -> None:
    state = StateCache(schema(attn), 3, tail_dtype=dtype)
    assert all(fresh(state, slot) for slot in range(3))
    for tensor in state.tensors.values():
        tensor.view(torch.uint8).fill_(0x3C)
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    state.reset_slot(1)
    assert fresh(state, 1)
    for name, tensor in state.tensors.items():
        for slot in (0, 2):
            same = tensor[slot].reshape(-1).view(torch.uint8)
            assert torch.equal(same, before[name][slot].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tail_zb", "idx_zb"])
def test_an_absent_token_has_no_weight(name: str, dtype: torch.dtype) -> None:
    """A new slot's scores beside a low one have weight 0; alone they have equal weights, not NaN.
    In float16 they would be infinite, and NaN alone.
    """
    absent = StateCache(schema("CSA"), 1, tail_dtype=dtype).tensors[name].reshape(-1)
    low = torch.tensor([-30_000.0], dtype=dtype)
    beside = torch.softmax(torch.cat((absent, low)).float(), dim=0)
    assert beside[-1] == 1
    assert not beside[:-1].any()
    alone = torch.softmax(absent.float(), dim=0)
    assert torch.equal(alone, torch.full_like(alone, 1 / len(alone)))
    assert absent.half().isinf().all()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tail_dtype": torch.float16}, "tail_dtype is 'torch.float16', expected torch.float32 or"),
        ({"tail_row_width": "narrow"}, "tail_row_width is 'narrow', expected 'wide' or 'single'"),
        ({"max_requests": 0}, "max_requests is 0, expected 1 to"),
    ],
)
def test_states_that_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        StateCache(schema("CSA"), **{"max_requests": 2, **fields})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="slot is 2, expected 0 to 1"):
        StateCache(schema("CSA"), 2).reset_slot(2)


def test_a_block_that_was_given_back_is_not_given_back_again() -> None:
    """Others are held, so that the count alone would not tell."""
    pool = BlockAllocator(4)
    first, second = pool.acquire(2).tolist()
    pool.release([first])
    with pytest.raises(InvalidArgumentError, match=f"block {first} is released and nobody holds"):
        pool.release([first])
    assert [pool.holds(block) for block in (first, second)] == [False, True]
    assert sorted(pool.acquire(3).tolist()) == sorted({0, 1, 2, 3} - {second})
