"""INT8 caches: in snapshots bytes and scales as they are; verify knows how they round. Spec: E.6"""

from __future__ import annotations

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
    gather_kv,
    migrate,
    verify,
    write_kv,
)
from tests.snapshot.sections import FACTS
from tests.snapshot.with_planes import reopened, section


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
    tokens = k[[4, 0, 2]].flatten(0, 1)[:11]
    with safe_open(file, "pt") as opened:
        assert opened.get_slice("layers.3.k").get_dtype() == "I8"
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


def test_write_and_gather_by_torch_dtypes() -> None:
    """Numbers in and out by a scale per head; torch.int8 in and out as the bytes that they are."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.full((4, 5, 2, 16), 99, dtype=torch.int8) for _ in range(2))
    cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    key, value = torch.randn(2, 3, 2, 16, generator=generator).bfloat16()
    scale = torch.tensor([0.02, 0.5])
    slots = torch.tensor([7, -1, 19])
    write_kv(cache, key, value, slots, k_scale=ScaleDesc.of(scale, "PER_HEAD"), v_scale=0.03)
    expected_k, expected_v = (torch.full_like(t, 99) for t in (k, v))
    for token, slot in ((0, 7), (2, 19)):
        for out, tokens, by in (
            (expected_k, key, scale[:, None]),
            (expected_v, value, torch.tensor(0.03)),
        ):
            codes = (tokens[token].float() / by).round().clamp(-127, 127).to(torch.int8)
            out[slot // 5, slot % 5] = codes
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)
    given = torch.tensor(-128, dtype=torch.int8).expand(1, 2, 16).contiguous()
    write_kv(cache, given, given, torch.tensor([0]))
    found = gather_kv(cache, [[0, 1]], [8])
    assert found[0].dtype is torch.int8
    assert torch.equal(found[0][0, 0], given[0])
    assert torch.equal(found[1][0, 7], expected_v[1, 2])
    numbers, _ = gather_kv(cache, [[0]], [1], dtype="float32", k_scale=0.5)
    assert torch.equal(numbers[0, 0], torch.full((2, 16), -64.0))
