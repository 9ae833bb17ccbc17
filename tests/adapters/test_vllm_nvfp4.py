"""vLLM's NVFP4 caches: pages by vLLM's own split of a side into data and scales. Spec: E.18"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kvx_adapters.vllm import nvfp4_view
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Layout,
    UnsupportedError,
    describe,
    migrate,
)
from tests.fp4 import decode, encode, swap_fours

BLOCKS, HEADS, TOKENS, DIM = 5, 2, 8, 64
WIDTH = DIM // 2 + DIM // 16
E4M3 = ml_dtypes.float8_e4m3fn


def pages(order: str, seed: int) -> Tensor:
    """(blocks, 2 * heads, tokens, width) of random bytes, with a gap behind each block."""
    random = torch.Generator().manual_seed(seed)
    room = torch.randint(0, 256, (BLOCKS, 2 * HEADS * TOKENS * WIDTH + 64), generator=random)
    flat = room.to(torch.uint8)[:, : 2 * HEADS * TOKENS * WIDTH]
    if order == "HND":
        return flat.as_strided(
            (BLOCKS, 2 * HEADS, TOKENS, WIDTH), (flat.stride(0), TOKENS * WIDTH, WIDTH, 1)
        )
    return flat.as_strided(
        (BLOCKS, 2 * HEADS, TOKENS, WIDTH), (flat.stride(0), WIDTH, 2 * HEADS * WIDTH, 1)
    )


def by_bytes(cache: Tensor, order: str, is_v: bool) -> tuple[np.ndarray, np.ndarray]:
    """Data and scales of a side, [blocks, tokens, heads, ...], counted byte by byte."""
    raw = np.lib.stride_tricks.as_strided(
        cache.numpy(), (BLOCKS, 2 * HEADS * TOKENS * WIDTH), (cache.stride(0), 1)
    )
    side = raw[:, is_v * HEADS * TOKENS * WIDTH :][:, : HEADS * TOKENS * WIDTH]
    split = HEADS * TOKENS * DIM // 2
    shape = (HEADS, TOKENS) if order == "HND" else (TOKENS, HEADS)
    parts = [part.reshape(BLOCKS, *shape, -1) for part in (side[:, :split], side[:, split:])]
    return tuple(part.swapaxes(1, 2) if order == "HND" else part for part in parts)  # type: ignore[return-value]


def dense(values: Tensor) -> CacheView:
    k, v = (describe(half[None], Layout.BLOCK_NHD) for half in values)
    return CacheView((CacheDesc.from_kv(k, v),), CacheFacts(), dense=True)


@pytest.mark.parametrize(
    ("order", "capability"), [("HND", 8), ("NHD", 9), ("HND", 12), ("HND", 10)]
)
def test_written_and_read(order: str, capability: int) -> None:
    """13 tokens into blocks 3 and 1; every other byte stays."""
    cache = pages(order, 1)
    kept = cache.clone()
    values = torch.randn(2, 13, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    view = nvfp4_view(
        [cache], HEADS, CacheFacts(), capability=capability, k_scales=[0.5], v_scales=[0.37]
    )
    assert (view.null_block_id, view.layers[0].head_dim) == (0, DIM)
    migrate(dense(values).at(), view.at(block_table=[[3, 1]]), [13], same_model=True)
    tokens, groups = swap_fours(TOKENS, DIM // 16)
    for is_v, scale in ((False, 0.5), (True, 0.37)):
        data, scales = by_bytes(cache, order, is_v)
        old_data, old_scales = (part.copy() for part in by_bytes(kept, order, is_v))
        for t in range(13):
            block, offset = [3, 1][t // TOKENS], t % TOKENS
            q, s = encode(values[int(is_v), t].numpy(), E4M3, scale)
            old_data[block, offset] = q
            if is_v and capability == 10:
                for group in range(DIM // 16):
                    at = block, tokens[offset, group], slice(None), groups[offset, group]
                    old_scales[at] = s.view(np.uint8)[:, group]
            else:
                old_scales[block, offset] = s.view(np.uint8)
        np.testing.assert_array_equal(data, old_data)
        np.testing.assert_array_equal(scales, old_scales)
    back = torch.zeros(2, 13, HEADS, DIM)
    migrate(view.at(block_table=[[3, 1]]), dense(back).at(), [13], same_model=True)
    for is_v, scale in ((False, 0.5), (True, 0.37)):
        expected = decode(*encode(values[int(is_v)].numpy(), E4M3, scale), scale)
        np.testing.assert_array_equal(back[int(is_v)].numpy(), expected)


@pytest.mark.slow  # the import of vllm
def test_vllm_s_split() -> None:
    """nvfp4_split_data_scale finds the same memory in each side."""
    split = pytest.importorskip("vllm.utils.torch_utils").nvfp4_split_data_scale
    cache = pages("HND", 1)
    view = nvfp4_view([cache], HEADS, CacheFacts(), capability=9)
    assert view.k_scales is not None
    assert view.v_scales is not None
    sides = zip(cache.split(HEADS, dim=1), (view.k_scales[0], view.v_scales[0]), strict=True)
    for (side, found), name in zip(sides, "kv", strict=True):
        data, scale = split(side)
        desc = view.layers[0].tensors[name]
        assert found is not None
        for tensor, ours in ((data, desc), (scale, found)):
            wanted = tensor.transpose(1, 2)
            assert (ours.data, ours.shape) == (wanted.data_ptr(), tuple(wanted.shape))
            assert ours.stride == wanted.stride()


def test_a_block_moves_to_another_order_of_scales() -> None:
    """From capability 9 to 10: V's scales change places, no bit of data changes."""
    src, dst = pages("NHD", 1), pages("HND", 2)
    views = [
        nvfp4_view([cache], HEADS, CacheFacts(), capability=capability)
        for cache, capability in ((src, 9), (dst, 10))
    ]
    migrate(views[0].at(block_table=[[4]]), views[1].at(block_table=[[2]]), [8], same_model=True)
    tokens, groups = swap_fours(TOKENS, DIM // 16)
    for is_v in (False, True):
        (data, scales), (found, beside) = by_bytes(src, "NHD", is_v), by_bytes(dst, "HND", is_v)
        np.testing.assert_array_equal(found[2], data[4])
        kept = beside[2][tokens, :, groups].swapaxes(1, 2) if is_v else beside[2]
        np.testing.assert_array_equal(kept, scales[4])


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (
        pages("HND", 1).view(torch.int8),
        {},
        InvalidArgumentError,
        r"kv_cache is torch.int8 of 4 axes, expected torch.uint8 of 4: \(num_blocks, 2 \*",
    ),
    (
        pages("HND", 1)[:, :3],
        {},
        InvalidArgumentError,
        r"kv_cache.shape\[1\] is 3, expected 4: K and V of 2 heads",
    ),
    (
        pages("HND", 1)[..., :35],
        {},
        InvalidArgumentError,
        r"kv_cache.shape\[3\] is 35, expected a multiple of 9: 8 bytes of numbers and one of a",
    ),
    (
        pages("HND", 1)[:, :, :4],
        {},
        InvalidArgumentError,
        r"kv_cache.stride\(\) is \(.*\), expected blocks without gaps, in the order of heads or",
    ),
    (
        pages("NHD", 1),
        {"capability": 10},
        UnsupportedError,
        r"the order of tokens, expected that of heads on capability 10: its kernels read no other",
    ),
    (
        pages("HND", 1),
        {"capability": 7},
        UnsupportedError,
        r"capability is 7, expected the major one of a GPU with NVFP4 caches: 8, 9, 10, 12",
    ),
    (
        pages("HND", 1),
        {"k_scales": [1.0, 1.0]},
        InvalidArgumentError,
        r"k_scales has 2 entries, expected 1, one per layer",
    ),
]


@pytest.mark.parametrize(("cache", "how", "error", "sentence"), REFUSED)
def test_what_is_refused(
    cache: Tensor, how: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        nvfp4_view([cache], HEADS, CacheFacts(), **({"capability": 9} | how))
