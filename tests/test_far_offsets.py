"""Tokens at the end of a cache of 20 GiB, whose offsets in bytes and in elements need 64 bits.

On the CPU the same lines run with a small cache, so that a machine without a GPU shows whether the
test is right.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu import caches, calls
from benchmarks.gpu.caches import BASE
from benchmarks.gpu.places import Gpu, Place, Rehearsal
from kvx_core import Memory
from tests.calls import BACKENDS

FAR = 20 << 30  # bytes
NUM_TOKENS = 64
HAS_CUDA = "cuda" in [backend.name for backend in BACKENDS]


@pytest.fixture(params=["cpu", "cuda"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A device; what the test has allocated there is given back."""
    if request.param == "cpu":
        yield Rehearsal(Memory.HOST)
        return
    if not HAS_CUDA or torch.cuda.mem_get_info()[0] < FAR + (4 << 30):
        pytest.skip("needs a GPU with 24 GiB free, and a libkvx that was built with nvcc")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield Gpu()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "split", "packed-x", "transposed V"])
def test_offsets_past_32_bits(place: Place, layout: str) -> None:
    num_bytes = FAR if place.device == "cuda" else 1 << 20
    num_blocks = num_bytes // (BASE.token_bytes * BASE.block_size)
    cache = caches.new(layout, BASE, 1, num_blocks, place, random=False)
    (layer,), last = cache.layers, num_blocks - NUM_TOKENS // BASE.block_size
    slots = torch.arange(last * BASE.block_size, num_blocks * BASE.block_size, device=place.device)
    sizes = (2, NUM_TOKENS, BASE.num_kv_heads, BASE.head_dim)
    tokens = torch.randn(sizes, dtype=torch.bfloat16, device=place.device)
    calls.write(place, layer, *tokens, slots)()
    place.settle()
    for half, expected in zip(layer.halves, tokens, strict=True):
        assert torch.equal(half[last:].flatten(0, 1).flatten(2), expected)
        assert not half[last - 1].any()  # what is before them is as it was

    out = torch.empty((2, 1, *sizes[1:]), dtype=torch.bfloat16, device=place.device)
    table = torch.arange(last, num_blocks, device=place.device)[None]
    lens = torch.tensor([NUM_TOKENS], device=place.device)
    calls.gather(place, layer, table, lens, *out)()
    place.settle()
    assert torch.equal(out[:, 0], tokens)
