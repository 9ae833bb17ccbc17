"""INT8 caches: in snapshots bytes and scales as they are; verify knows how they round. Spec: E.6"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvx_core import (
    CacheDesc,
    CacheView,
    ScaleDesc,
    ScaleGranularity,
    Section,
    Snapshot,
    describe,
    migrate,
    verify,
)
from tests.core.sections import FACTS
from tests.core.test_snapshot_planes import header_of, reopened, section


@pytest.mark.parametrize("granularity", ["PER_TENSOR", "PER_HEAD", "PER_TOKEN_HEAD"])
def test_int8_stays_int8(granularity: str, tmp_path: Path) -> None:
    """Every byte, -128 too, with its scales, in a file that says I8; and back into other blocks."""
    k, other = (torch.zeros(5, 4, 2, 64, dtype=torch.int8) for _ in range(2))
    k[:] = torch.arange(k.numel()).view_as(k).to(torch.int8)
    shape = {"PER_TENSOR": (1,), "PER_HEAD": (2,), "PER_TOKEN_HEAD": (5, 4, 2)}[granularity]
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    room = torch.zeros(shape) if granularity == "PER_TOKEN_HEAD" else scale

    def held(k: torch.Tensor, scale: torch.Tensor, table: list[int]) -> Section:
        descs = (ScaleDesc.of(scale, ScaleGranularity[granularity]),)
        view = CacheView((CacheDesc.from_kv(describe(k, "BLOCK_NHD")),), FACTS, k_scales=descs)
        return section(view, table)

    file = tmp_path / "file"
    read = reopened(Snapshot.capture(range(11), [held(k, scale, [4, 0, 2])]), file)
    assert json.loads(header_of(file))["layers.3.k"]["dtype"] == "I8"
    tokens = k[[4, 0, 2]].flatten(0, 1)[:11]
    with safe_open(file, "pt") as opened:
        assert torch.equal(opened.get_tensor("layers.3.k"), tokens)
    read.restore(held(other, room, [1, 3, 0]), 0, 11)
    if granularity == "PER_HEAD":  # numbers are multiplied and divided again
        tokens = tokens.clamp(min=-127)
    assert torch.equal(other[[1, 3, 0]].flatten(0, 1)[:11], tokens)
    if room is not scale:
        expected = scale[[4, 0, 2]].flatten(0, 1)[:11]
        assert torch.equal(room[[1, 3, 0]].flatten(0, 1)[:11], expected)


@pytest.mark.parametrize("given", [None, 0.03])
def test_verify_takes_rounding_for_what_it_is(given: float | None) -> None:
    """A scale found per token and head, or one of the tensor; the next code is refused."""
    k = torch.randn(3, 4, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, room = torch.zeros(3, 4, 2, 64, dtype=torch.int8), torch.zeros(3, 4, 2)
    scale = ScaleDesc.of(room, "PER_TOKEN_HEAD") if given is None else ScaleDesc.of(given)
    ends = [
        CacheView((CacheDesc.from_kv(describe(t, "BLOCK_NHD")),), FACTS, k_scales=scales).at(table)
        for t, scales, table in ((k, None, [[0, 2]]), (codes, (scale,), [[1, 0]]))
    ]
    migrate(*ends, [7], find_scales=given is None)
    found = verify(*ends, [7], tolerance="codec")
    assert found.ok
    assert 0 < found.max_error < 0.03 * (1 if given else 2)
    codes[1, 2, 1, 5] += 2
    difference = verify(*ends, [7], tolerance="codec").difference
    assert difference is not None
    assert (difference.token, difference.head, difference.dim) == (2, 1, 5)
