"""end_ranges: both machines list their memory, and the lists match. Spec: E.13"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

from kvx_core import BlockTable, CacheDesc, CacheFacts, CacheView, InvalidArgumentError, describe
from kvx_core.ops.end_ranges import END_RANGE, cut, cut_of, end_ranges
from kvx_core.types import Layout
from tests.ops.planned import assert_equal, expect, filled, two_caches, view_of

LENGTHS = [9, 0, 5]
SRC_TABLE = [[3, 1, 8], [-1, -1, -1], [0, 5, -1]]
DST_TABLE = [[6, 2], [-1, -1], [4, -1]]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 8])
def test_lists_of_two_machines_match(seed: int, chunk_tokens: int) -> None:
    """Other layouts and block sizes: cut alike, the n-th range of one is the n-th of the other."""
    src, dst, src_view, dst_view = two_caches(seed)
    expected = expect(src, dst, SRC_TABLE, DST_TABLE, LENGTHS)
    ends = [
        end_ranges(view.at(table), LENGTHS, chunk_tokens=chunk_tokens)
        for view, table in ((src_view, SRC_TABLE), (dst_view, DST_TABLE))
    ]
    size = math.gcd(*map(cut_of, ends))
    assert size % 32 == 0  # a vector at least
    from_, to = (cut(ranges, size) for ranges in ends)
    for name in ("plane", "offset", "bytes"):
        assert np.array_equal(from_[name], to[name])
    for a, b in zip(from_, to, strict=True):
        ctypes.memmove(int(b["address"]), int(a["address"]), size)
    assert_equal(dst, expected)


@pytest.mark.parametrize(("layout", "chunk_tokens"), [(Layout.BLOCK_NHD, 1), (Layout.BLOCK_HND, 4)])
def test_blocks_are_whole_ranges(layout: Layout, chunk_tokens: int) -> None:
    shape = (9, 4, 3, 16) if layout is Layout.BLOCK_NHD else (9, 3, 4, 16)
    k, v = filled(shape, 1), filled(shape, 2)
    ranges = end_ranges(view_of([k, v], layout).at([[7, 2, 3]]), [12], chunk_tokens=chunk_tokens)
    block = 4 * 3 * 16 * 2
    assert ranges.dtype == END_RANGE
    assert [tuple(int(n) for n in r) for r in ranges] == [
        (plane, 0, offset, tensor.data_ptr() + at * block, num_bytes)
        for plane, tensor in enumerate((k, v))
        for at, offset, num_bytes in ((7, 0, block), (2, block, 2 * block))
    ]
    assert cut_of(ranges) == block


def test_null_blocks_heads_and_no_v() -> None:
    k = filled((9, 4, 3, 16), 1)
    view = CacheView((CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD)),), CacheFacts())
    span = view.at(BlockTable.packed([[-1, 2]]).with_holes(), head_start=1)
    ranges = end_ranges(span, [6], num_heads=2)
    vectors = 2 * 16 * 2
    assert [tuple(int(n) for n in r) for r in ranges] == [
        (0, 0, token * vectors, k[2, token - 4, 1].data_ptr(), vectors) for token in (4, 5)
    ]
    assert len(end_ranges(view.at([[1]]), [0])) == 0


def test_refusals() -> None:
    _, _, src_view, _ = two_caches(1)
    span = src_view.at([[1]])
    with pytest.raises(InvalidArgumentError, match=r"^chunk_tokens is 0, expected 1 or more$"):
        end_ranges(span, [3], chunk_tokens=0)
    ranges = end_ranges(span, [3])
    with pytest.raises(InvalidArgumentError, match=r"^cut_bytes is 64, expected a divisor of 288"):
        cut(ranges, 64)
    for wrong in (0, -1):
        with pytest.raises(
            InvalidArgumentError, match=rf"^cut_bytes is {wrong}, expected a diviso"
        ):
            cut(ranges, wrong)
    assert len(cut(ranges, 1)) == ranges["bytes"].sum()
    assert torch.is_tensor(filled((1,), 1))
