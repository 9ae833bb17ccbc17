"""The functions of kvx_blocks.h: bytes, the backend that is taken, what is refused. Spec: E.15"""

from __future__ import annotations

import re
from ctypes import byref, c_int
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core._c import abi_blocks
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.types import Memory
from tests.block_calls import U16, Blocks, run
from tests.block_layouts import (
    Dims,
    all_same,
    as_operational,
    as_universal,
    filled,
    random,
    same,
)
from tests.calls import Backend
from tests.native import CXX, ROOT
from tests.native import run as run_command

DIMS = Dims(nh=3, nl=2, no=2, nt=4, hd=5, nb=3)
OPERATIONAL = Dims(nh=2, nl=3, no=2, nt=4, hd=3, nb=2)
AUTO, VECTORIZED, KERNEL, ASYNC, BATCH = range(5)
LEGACY, STREAM = 1, 8  # streams: the legacy default one, and of hostgrid any other


def universal(blocks: Blocks, to_universal: bool, **sizes: int) -> None:
    tables = blocks.table(blocks.whole), blocks.table(blocks.chunks)
    function = "kvx_universal_from_block" if to_universal else "kvx_block_from_universal"
    run(blocks.on, function, *tables, byref(blocks.sizes(**sizes)))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("hd", [1, 5, 8, 64])
def test_universal(backend: Backend, seed: int, hd: int) -> None:
    """Both ways, for odd rows and for rows of vectors."""
    dims = replace(DIMS, hd=hd)
    there = Blocks.of(backend, dims, seed, universal=True, from_stack=True)
    universal(there, True)
    assert all_same(there.whole, [as_universal(block, dims, "NHD") for block in there.stack])
    back = Blocks.of(backend, dims, seed, universal=True, from_stack=False)
    universal(back, False)
    assert all_same(back.whole, [as_universal(block, dims, "NHD") for block in back.stack])


def test_a_rank_of_the_heads(backend: Backend) -> None:
    """Heads 1 and 2 of 4; HND chunks, as bytes of eight-byte numbers."""
    dims = Dims(nh=2, nl=2, no=1, nt=3, hd=4, nb=2)
    blocks = Blocks.of(backend, dims, 4, universal=True, from_stack=True)
    blocks.whole = filled(2, (4, *dims.universal[1:]), U16)
    universal(blocks, True, layout=1, universal_heads=4, head_start=1, itemsize=8, hd=1)
    for whole, block in zip(blocks.whole, blocks.stack, strict=True):
        as_heads = [chunk.reshape(2, 3, 4) for chunk in block]
        expected = filled(1, whole.shape, U16)[0]
        expected[1:3] = as_universal(as_heads, dims, "HND")
        assert same(whole, expected)


def has_batches(backend: Backend) -> bool:
    """Whether this build calls cudaMemcpyBatchAsync, which CUDA has from 12.9 on."""
    return bool(abi_blocks.declare(backend.library()).kvx_has_memcpy_batch_async())


def operational(blocks: Blocks, backend: int, to_operational: bool, stream: int | None) -> int:
    """Returns the backend that was taken."""
    chunks, whole = blocks.table(blocks.chunks), blocks.table(blocks.whole)
    used = c_int(-1)
    direction = 0 if to_operational else 1
    tables = chunks.data_ptr(), chunks, whole.data_ptr(), whole
    sizes = byref(blocks.sizes())
    call = *tables, sizes, direction, backend, byref(used)
    run(blocks.on, "kvx_operational_copy", *call, stream=stream)
    return used.value


@pytest.mark.parametrize("to_operational", [True, False])
@pytest.mark.parametrize("which", [AUTO, VECTORIZED, KERNEL, ASYNC, BATCH])
@pytest.mark.parametrize("dims", [OPERATIONAL, replace(OPERATIONAL, nt=3, nh=1)], ids=["8", "2"])
def test_operational_backends(
    backend: Backend, which: int, to_operational: bool, dims: Dims
) -> None:
    """Chunks of 48 bytes, and of 18, which are no multiple of 8."""
    on_host = backend.memory == Memory.HOST
    is_aligned = dims is OPERATIONAL
    blocks = Blocks.of(backend, dims, 5, universal=False, from_stack=to_operational)
    before = [t.clone() for t in (*blocks.whole, *blocks.chunks)]
    stream = None if on_host or backend.mirror is not None else STREAM
    refused = None
    if which == VECTORIZED and not is_aligned:
        refused = InvalidArgumentError, "pair 0 copies 18 bytes from 0x[0-9a-f]+ to 0x[0-9a-f]+, "
    if which == BATCH and on_host:
        refused = UnsupportedError, "memory is HOST, where there is no cudaMemcpyBatchAsync"
    elif which == BATCH and not has_batches(backend):
        refused = UnsupportedError, "a batch of copies is asked for, which takes CUDA 12.9"
    if refused:
        with pytest.raises(refused[0], match=refused[1]):
            operational(blocks, which, to_operational, stream)
        assert all_same([*blocks.whole, *blocks.chunks], before)
        return
    taken = operational(blocks, which, to_operational, stream)
    assert all_same(blocks.whole, [as_operational(block, dims) for block in blocks.stack])
    expected = which
    if which == AUTO:  # vectorized, then a batch, then copy by copy
        has_batch = has_batches(backend) and not on_host
        expected = VECTORIZED if is_aligned else BATCH if has_batch else ASYNC
    assert taken == expected


@pytest.mark.parametrize(
    ("version", "last"), [(12080, None), (12090, "&failed, stream_"), (13000, "1, stream_")]
)
def test_batches_of_each_cuda(version: int, last: str | None) -> None:
    """CUDA 12.9 has batches with one more argument than 13. Source: cuda_runtime_api.h of both"""
    folders = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/include", "tests/hostgrid")]
    compiler = [CXX, "-std=c++20", "-xc++", f"-DCUDART_VERSION={version}", *folders]
    source = ROOT / "csrc/cuda/copy_engine.cu"
    run_command([*compiler, "-fsyntax-only", "-Wall", "-Werror", source])
    text = run_command([*compiler, "-E", "-P", source]).split("class Copies", 1)[1]
    calls = re.findall(r"cudaMemcpyBatchAsync\(dsts, .*?, (\S+ stream_)\)", text, re.DOTALL)
    assert set(calls) == ({last} if last else set())


def test_a_batch_needs_a_stream_of_its_own(backend: Backend) -> None:
    if backend.memory == Memory.HOST or backend.mirror is not None:
        pytest.skip("the legacy default stream of the kernels on the CPU")
    blocks = Blocks.of(backend, OPERATIONAL, 6, universal=False, from_stack=True)
    with pytest.raises(UnsupportedError, match=r"12\.9, a stream that is not the legacy"):
        operational(blocks, BATCH, True, LEGACY)
    odd = replace(OPERATIONAL, nt=3, nh=1)
    blocks = Blocks.of(backend, odd, 6, universal=False, from_stack=True)
    assert operational(blocks, AUTO, True, LEGACY) == ASYNC


def test_the_alignment_of_every_pair_counts(backend: Backend) -> None:
    """The last chunk alone lies 2 bytes further on."""
    blocks = Blocks.of(backend, OPERATIONAL, 7, universal=False, from_stack=True)
    room = torch.zeros(25, dtype=U16)
    room[1:] = blocks.stack[-1][-1].flatten()
    blocks.stack[-1][-1] = room[1:].view(4, 2, 3)
    with pytest.raises(InvalidArgumentError, match="pair 11 copies 48 bytes"):
        operational(blocks, VECTORIZED, True, None)
    assert operational(blocks, KERNEL, True, None) == KERNEL
    assert all_same(blocks.whole, [as_operational(block, OPERATIONAL) for block in blocks.stack])


def pairs(backend: Backend, num_bytes: int, shift: int) -> tuple[Any, list[Tensor], list[Tensor]]:
    """5 pairs, the source of each `shift` bytes into its memory."""
    generator = torch.Generator().manual_seed(num_bytes)
    rooms = [random((num_bytes + shift,), torch.uint8, generator) for _ in range(5)]
    srcs = [room[shift:] for room in rooms]
    dsts = filled(5, (num_bytes,), torch.uint8)
    blocks = Blocks(backend, DIMS, [], [])
    return blocks, srcs, dsts


@pytest.mark.parametrize("num_bytes", [1, 3, 16, 250, 4096, 65536])
@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_vectorized_copy(backend: Backend, num_bytes: int, shift: int) -> None:
    blocks, srcs, dsts = pairs(backend, num_bytes, shift)
    bits = [backend.address(t) for t in (*srcs, *dsts)]
    alignment = min(16, *(address & -address for address in bits))
    tables = blocks.table(srcs), blocks.table(dsts)
    run(backend, "kvx_vectorized_copy", *tables, num_bytes, 5, backend.memory, alignment)
    assert all_same(dsts, srcs)


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 250, 65536, 65552, 131077])
def test_vectorized_copy_looks_at_each_pair(backend: Backend, num_bytes: int) -> None:
    """Alignment 0: one call whose pairs are aligned to 16, 8, 4, 2 bytes and 1."""
    blocks, srcs, dsts = pairs(backend, num_bytes, 16)
    rooms = [torch.zeros(num_bytes + 32, dtype=torch.uint8) for _ in range(5)]
    for i, shift in enumerate((16, 8, 4, 2, 1)):
        rooms[i][shift : shift + num_bytes] = srcs[i]
    srcs = [room[shift:][:num_bytes] for room, shift in zip(rooms, (16, 8, 4, 2, 1), strict=True)]
    tables = blocks.table(srcs), blocks.table(dsts)
    run(backend, "kvx_vectorized_copy", *tables, num_bytes, 5, backend.memory, 0)
    assert all_same(dsts, srcs)


def test_vectorized_copy_reports_a_null_pair(backend: Backend) -> None:
    blocks, srcs, dsts = pairs(backend, 64, 0)
    tables = blocks.table(srcs), blocks.table(dsts)
    tables[1][3] = 0
    before = dsts[3].clone()
    call = "kvx_vectorized_copy", *tables, 64, 5, backend.memory, 0
    if backend.looks_first:
        with pytest.raises(InvalidArgumentError, match=r"dsts\[3\] is NULL, expected an address"):
            run(backend, *call)
        return
    with pytest.raises(OutOfRangeError, match=r"dst.block_table.indices\[3\] is 0, a null block"):
        run(backend, *call)
    assert same(dsts[3], before)
    assert all_same(dsts[:3], srcs[:3])
    assert same(dsts[4], srcs[4])


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_memcpy_batch(backend: Backend, mode: int) -> None:
    blocks, srcs, dsts = pairs(backend, 250, 3)
    tables = [blocks.table(t).data_ptr() for t in (srcs, dsts)]
    on_host = backend.memory == Memory.HOST
    stream = None if on_host or backend.mirror is not None else STREAM
    call = "kvx_memcpy_batch", *tables, 250, 5, backend.memory, mode
    if on_host and mode == 2:
        with pytest.raises(UnsupportedError, match="where there is no cudaMemcpyBatchAsync"):
            run(backend, *call, stream=stream)
        return
    if mode == 2 and not has_batches(backend):
        with pytest.raises(UnsupportedError, match=r"takes CUDA 12\.9"):
            run(backend, *call, stream=stream)
        return
    run(backend, *call, stream=stream)
    assert all_same(dsts, srcs)


def test_a_wrong_promise_of_alignment(backend: Backend) -> None:
    """A device skips what is not aligned as promised, and says so; the host looks for itself."""
    blocks, srcs, dsts = pairs(backend, 64, 2)
    tables = blocks.table(srcs), blocks.table(dsts)
    before = [t.clone() for t in dsts]
    call = "kvx_vectorized_copy", *tables, 64, 5, backend.memory, 16
    if backend.looks_first:
        run(backend, *call)
        assert all_same(dsts, srcs)
        return
    with pytest.raises(OutOfRangeError, match="expected NULL or an address that is"):
        run(backend, *call)
    assert all_same(dsts, before)


def test_what_this_build_has(backend: Backend) -> None:
    library = abi_blocks.declare(backend.library())
    assert library.kvx_is_stub_build() == (not backend.has_kernels())
    if backend.name != "cuda":  # there it is so if its nvcc is of CUDA 12.9
        assert has_batches(backend) == backend.has_kernels()
