"""Calls captured in a CUDA graph, and replayed on other data at the same addresses."""

from __future__ import annotations

import subprocess
import sys
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
    WriteLayersPlan,
    describe,
    device_status,
    gather_kv,
    write_kv,
)
from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.view import CacheSpan
from kvx_core.hybrid import Compressor, KVCacheManager, compress_csa, compress_hca, prepare_forward
from kvx_core.ops.migrate import copy_tokens
from tests.calls import BACKENDS
from tests.hybrid.models import SMALL, Tokens, manager, tokens, weights
from tests.native import ROOT

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


def test_the_first_call_of_a_process_may_be_in_a_capture() -> None:
    """As in an engine whose warm-up took other kernels. Only a new process has a first call."""
    code = (
        "import torch\n"
        "from tests import test_cuda_graph as here\n"
        "tokens, slots = here.random(2, 6, here.HEADS, here.DIM), torch.arange(6).cuda()\n"
        "storage = here.random(1, here.BLOCKS, here.SIZE, here.HEADS, 2 * here.DIM)\n"
        "expected = storage.clone()\n"
        "expected.view(-1, here.HEADS, 2 * here.DIM)[slots] = torch.cat(tuple(tokens), dim=-1)\n"
        "(cache,) = here.described(storage)\n"
        "torch.cuda.synchronize()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): here.write_kv(cache, *tokens, slots)\n"
        "graph.replay()\n"
        "assert torch.equal(storage, expected)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("count", [1, 6, 500])
def test_writes_wait_for_what_comes_before_and_are_waited_for(
    count: int, stream: torch.cuda.Stream
) -> None:
    """Kernels that start while the one before them ends: they read what torch has just written,
    torch reads what they have, and of two writes of a slot the second remains."""
    steps = 100  # numbers that bfloat16 has
    storage = random(1, 128, SIZE, HEADS, 2 * DIM)
    tokens, others = random(2, count, HEADS, DIM), random(2, count, HEADS, DIM)
    slots = permuted(128 * SIZE, count)
    rows, seen = storage.view(-1, HEADS, 2 * DIM), random(steps, count, HEADS, 2 * DIM)
    (cache,) = described(storage)

    def chain() -> None:
        tokens.zero_()
        for step in range(steps):
            tokens.add_(1)
            write_kv(cache, others[0], others[1], slots)
            write_kv(cache, tokens[0], tokens[1], slots)
            torch.index_select(rows, 0, slots, out=seen[step])

    expected = torch.arange(1.0, steps + 1, device="cuda").bfloat16().view(-1, 1, 1, 1)
    chain()
    assert (seen == expected).all()
    graph = capture(chain, stream)
    for _ in range(3):
        seen.zero_()
        graph.replay()
        assert (seen == expected).all()


def test_write_layers_replayed_with_other_tokens_and_slots(stream: torch.cuda.Stream) -> None:
    storage, tokens = (
        random(LAYERS, BLOCKS, SIZE, HEADS, 2 * DIM),
        random(2, LAYERS, TOKENS, HEADS, DIM),
    )
    slots = permuted(BLOCKS * SIZE, TOKENS)
    plan = WriteLayersPlan(described(storage))
    graph = capture(lambda: plan(tokens[0], tokens[1], slots), stream)
    for skipped in range(3):
        tokens.copy_(random(*tokens.shape))
        slots.copy_(permuted(BLOCKS * SIZE, TOKENS))
        slots[skipped] = -1
        expected = storage.clone()
        written = slots >= 0
        rows = expected.view(LAYERS, -1, HEADS, 2 * DIM)
        rows[:, slots[written]] = torch.cat(tuple(tokens[:, :, written]), dim=-1)
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


def test_decode_steps_of_deepseek_v4_replayed(stream: torch.cuda.Stream) -> None:
    """One graph of a window, a CSA and an HCA layer, replayed for every token of two requests: the
    bytes of a manager on the CPU, though entries are complete at other steps in each."""
    given = [tokens(300, 2, seed) for seed in range(2)]
    whole = [tokens(300, 1, 10 + seed) for seed in range(2)]
    caches = [manager(2, 512, device=device) for device in ("cpu", "cuda")]
    compressors = [
        [weights(4, SMALL.head_dim, True, 1), weights(4, SMALL.indexer_head_dim, True, 2)],
        [weights(128, SMALL.head_dim, False, 3)],
    ]
    on_device = [[_moved(one) for one in layer] for layer in compressors]
    slots = [[one.admit_request(), one.admit_request()] for one in caches]
    assert slots[0] == slots[1]
    inputs = [t.cuda() for t in _step(given, whole, [0, 0])]

    # The second request is some tokens ahead; its steps have loaded the kernels.
    for n in range(37):
        for one, parts, device in ((caches[0], compressors, "cpu"), (caches[1], on_device, "cuda")):
            prepare_forward(one, slots[0][1:], [n], [n + 1])
            _decode(one, parts, [t[1:].to(device) for t in _step(given, whole, [0, n])])
    prepare_forward(caches[1], slots[1], [0, 37], [1, 38])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _decode(caches[1], on_device, inputs)
    for n in range(250):
        before, after = [n, 37 + n], [n + 1, 38 + n]
        for one in caches:
            prepare_forward(one, slots[0], before, after)
        rows = _step(given, whole, before)
        for to, row in zip(inputs, rows, strict=True):
            to.copy_(row)
        _decode(caches[0], compressors, rows)
        graph.replay()
    torch.cuda.synchronize()
    for layer, pool in caches[0].paged.items():
        found = dict(caches[0].states[layer].tensors) | (pool.tensors if pool else {})
        theirs = caches[1].paged[layer]
        replayed = dict(caches[1].states[layer].tensors) | (theirs.tensors if theirs else {})
        for name, tensor in found.items():
            assert torch.equal(tensor.view(torch.uint8), replayed[name].cpu().view(torch.uint8)), (
                layer,
                name,
            )


def _moved(one: Compressor) -> Compressor:
    ape_b = None if one.ape_b is None else one.ape_b.cuda()
    return Compressor(one.ape_a.cuda(), ape_b, one.norm_weight.cuda(), one.cos_sin.cuda(), one.eps)


def _step(given: list[Tokens], whole: list[Tokens], at: list[int]) -> list[Tensor]:
    """What the layers compute of one token of each request: a window's row, CSA's, HCA's."""
    csa = Tokens.joined([t.part(n, n + 1) for t, n in zip(given, at, strict=True)])
    hca = Tokens.joined([t.part(n, n + 1) for t, n in zip(whole, at, strict=True)])
    return [hca.k.bfloat16(), *csa, hca.k, hca.z]


def _decode(
    caches: KVCacheManager, compressors: list[list[Compressor]], rows: list[Tensor]
) -> None:
    """A forward pass of the layers SWA, CSA, HCA and CSA."""
    x, k, z, index_k, index_z, hca_k, hca_z = rows
    for layer in range(4):
        handle = caches.acquire(layer)
        handle.write_swa(x)
        if layer in (1, 3):
            compress_csa(handle, k, z, index_k, index_z, *compressors[0])
        if layer == 2:
            compress_hca(handle, hca_k, hca_z, *compressors[1])
