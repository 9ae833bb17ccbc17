"""Calls captured in a CUDA graph, and replayed on other data at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    Layout,
    OutOfRangeError,
    describe,
    device_status,
    gather_kv,
    write_kv,
)
from kvx_core.migrate import copy_tokens
from kvx_core.tables import BlockTable, SeqLens
from kvx_core.view import CacheSpan
from tests.calls import BACKENDS

pytestmark = pytest.mark.skipif(
    "cuda" not in [backend.name for backend in BACKENDS],
    reason="needs a GPU, and a libkvx that was built with nvcc",
)

BLOCKS, SIZE, HEADS, DIM, LAYERS = 8, 4, 3, 16, 3
TOKENS = 6


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    """A stream of its own, current for the whole test: the default one cannot be captured."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        yield side


def capture(call: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The call as a graph. It is made once before, and loads its kernels then."""
    call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def described(layers: Tensor) -> tuple[CacheDesc, ...]:
    """Of [layer, block, token, head, K | V]."""
    return tuple(
        CacheDesc.from_kv(*[describe(half, Layout.BLOCK_NHD) for half in layer.split(DIM, dim=-1)])
        for layer in layers
    )


def dense(layer: Tensor, blocks: Tensor, kv: int) -> Tensor:
    """The tokens of the blocks, one after the other: [token, head, dim]."""
    return layer.split(DIM, dim=-1)[kv][blocks].flatten(0, 1)


def permuted(count: int, *shape: int) -> Tensor:
    """Different numbers below `count`."""
    return torch.randperm(count, device="cuda")[: torch.Size(shape).numel()].view(shape)


def test_write_replayed_with_other_tokens_and_slots(stream: torch.cuda.Stream) -> None:
    storage, tokens = random(1, BLOCKS, SIZE, HEADS, 2 * DIM), random(2, TOKENS, HEADS, DIM)
    slots = permuted(BLOCKS * SIZE, TOKENS)
    (cache,) = described(storage)
    graph = capture(lambda: write_kv(cache, tokens[0], tokens[1], slots), stream)
    for skipped in range(3):
        tokens.copy_(random(*tokens.shape))
        slots.copy_(permuted(BLOCKS * SIZE, TOKENS))
        slots[skipped] = -1
        expected = storage.clone()
        written = slots >= 0
        rows = expected.view(-1, HEADS, 2 * DIM)
        rows[slots[written]] = torch.cat(tuple(tokens[:, written]), dim=-1)
        graph.replay()
        assert torch.equal(storage, expected)


def test_gather_replayed_with_another_table_and_lengths(stream: torch.cuda.Stream) -> None:
    storage = random(1, BLOCKS, SIZE, HEADS, 2 * DIM)
    (cache,) = described(storage)
    table, lens = permuted(BLOCKS, 2, 3), torch.tensor([12, 5], device="cuda")
    out = random(2, 2, 12, HEADS, DIM)
    graph = capture(lambda: gather_kv(cache, table, lens, out=(out[0], out[1])), stream)
    for lengths in ([0, 12], [7, 1], [11, 4]):
        storage.copy_(random(*storage.shape))
        table.copy_(permuted(BLOCKS, 2, 3))
        lens.copy_(torch.tensor(lengths))
        expected = out.clone()
        for kv in range(2):
            for row, length in enumerate(lengths):
                expected[kv, row, :length] = dense(storage[0], table[row], kv)[:length]
        graph.replay()
        assert torch.equal(out, expected)


def test_migrate_replayed_with_other_tables_and_lengths(stream: torch.cuda.Stream) -> None:
    src, dst = (random(LAYERS, BLOCKS, SIZE, HEADS, 2 * DIM) for _ in range(2))
    tables = [permuted(BLOCKS, 2, 3) for _ in range(2)]
    lens = torch.tensor([12, 12], device="cuda")

    def span(storage: Tensor, table: Tensor) -> CacheSpan:
        return CacheView(described(storage), CacheFacts()).at(BlockTable.packed(table))

    ends = [span(storage, table) for storage, table in zip((src, dst), tables, strict=True)]
    graph = capture(lambda: copy_tokens(ends[0], ends[1], SeqLens.of(lens)), stream)
    for lengths in ([0, 12], [7, 1], [11, 4]):
        src.copy_(random(*src.shape))
        for table in tables:
            table.copy_(permuted(BLOCKS, 2, 3))
        lens.copy_(torch.tensor(lengths))
        expected = dst.clone()
        for row, length in enumerate(lengths):
            for layer in range(LAYERS):
                moved = src[layer, tables[0][row]].flatten(0, 1)[:length]
                token = torch.arange(length, device=src.device)
                block = tables[1][row][token // SIZE]
                expected[layer, block, token % SIZE] = moved
        graph.replay()
        assert torch.equal(dst, expected)


def test_a_bad_slot_in_a_replay_is_skipped_and_reported(stream: torch.cuda.Stream) -> None:
    storage, tokens = random(1, BLOCKS, SIZE, HEADS, 2 * DIM), random(2, TOKENS, HEADS, DIM)
    slots = permuted(BLOCKS * SIZE, TOKENS)
    (cache,) = described(storage)
    graph = capture(lambda: write_kv(cache, tokens[0], tokens[1], slots), stream)
    device_status(stream.cuda_stream)

    slots[1] = BLOCKS * SIZE
    tokens.copy_(random(*tokens.shape))
    good = torch.arange(TOKENS, device=slots.device) != 1
    expected = storage.clone()
    rows = expected.view(-1, HEADS, 2 * DIM)
    rows[slots[good]] = torch.cat(tuple(tokens[:, good]), dim=-1)
    graph.replay()
    assert torch.equal(storage, expected)
    with pytest.raises(OutOfRangeError, match=rf"slots\[1\] is {BLOCKS * SIZE}, "):
        device_status(stream.cuda_stream)
    device_status(stream.cuda_stream)  # it has been told
