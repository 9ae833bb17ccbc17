"""KVBM's block layouts on the CPU: stacks to universal and operational blocks, and back.

nl 32 and 80 layers of K and V, blocks of 16, 64 and 128 tokens, 8 heads of 128 numbers, bfloat16,
as many blocks as make 256 MB. Ends are described once and planned; "list" is the call of
kvx_adapters.kvbm with lists of tensors, which looks at every one of them. Every copy is beside one
memcpy of the same bytes and torch's copy_ of each chunk. Two more do what nobody can do without,
their addresses known beforehand: "rows", a memcpy of each piece that is contiguous at both ends of
a universal copy; "blocks", streaming stores of each chunk of an operational one, on processors that
have such stores. Run with `python -m benchmarks blocks`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import kvx_core
from benchmarks import report
from benchmarks.cases import row
from benchmarks.native import PlainCopy, RowCopy, stream_isa
from benchmarks.rounds import Goal, compete, once
from kvx_adapters import kvbm
from kvx_core import Plan
from kvx_core.blocks import block_stack, operational_blocks, universal_blocks

_HEADS, _DIM, _OUTER = 8, 128, 2
_VERSUS = ("memcpy", "blocks", "rows", "torch", "list")
_BYTES, _QUICK_BYTES = 256 << 20, 16 << 20
_UNIVERSAL, _OPERATIONAL = Goal("memcpy", 0.8), Goal("memcpy", 1.0)


def run(threads: Sequence[int], rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_VERSUS)
    for nl in (32, 80):
        for nt in (16, 64, 128):
            for layout in ("NHD", "HND"):
                wanted = [case for case in _names(nl, nt, layout) if only in case]
                if wanted:
                    num_bytes = _QUICK_BYTES if quick else _BYTES
                    results += _copies(nl, nt, layout, wanted, num_bytes, threads, rounds)
    return results


def _names(nl: int, nt: int, layout: str) -> list[str]:
    sizes = f"{nl} x {nt}"
    return [
        f"{layout} to universal {sizes}",
        f"universal to {layout} {sizes}",
        *([f"to operational {sizes}", f"from operational {sizes}"] if layout == "NHD" else []),
    ]


def _copies(
    nl: int,
    nt: int,
    layout: str,
    wanted: Sequence[str],
    num_bytes: int,
    threads: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    per_block = nl * _OUTER * nt * _HEADS * _DIM * 2
    nb = max(1, num_bytes // per_block)
    chunk = (nt, _HEADS, _DIM) if layout == "NHD" else (_HEADS, nt, _DIM)
    stack = [[torch.randn(chunk).bfloat16() for _ in range(nl * _OUTER)] for _ in range(nb)]
    universal = _empty(nb, (_HEADS, nl, _OUTER, nt, _DIM))
    operational = _empty(nb, (nl, _OUTER, nt * _HEADS * _DIM))
    blocks = block_stack(stack, layout), universal_blocks(universal)
    flat = blocks[0], operational_blocks(operational, chunk, layout)
    of_universal = [_as_chunks(block, layout) for block in universal]
    of_operational = [block.view(nl * _OUTER, *chunk) for block in operational]
    cases: list[tuple[Any, Any, Callable[[], None], Callable[[], None], Goal]] = [
        (
            *blocks,
            lambda: kvbm.block_to_universal(stack, universal, layout),
            lambda: _to_whole(stack, of_universal),
            _UNIVERSAL,
        ),
        (
            *blocks[::-1],
            lambda: kvbm.universal_to_block(universal, stack, layout),
            lambda: _to_stack(stack, of_universal),
            _UNIVERSAL,
        ),
        (
            *flat,
            lambda: kvbm.block_to_operational(stack, operational),
            lambda: _to_whole(stack, of_operational),
            _OPERATIONAL,
        ),
        (
            *flat[::-1],
            lambda: kvbm.operational_to_block(operational, stack),
            lambda: _to_stack(stack, of_operational),
            _OPERATIONAL,
        ),
    ]
    _to_whole(stack, of_universal)
    _to_whole(stack, of_operational)
    results = []
    src, dst = torch.zeros(2, nb * per_block, dtype=torch.uint8).fill_(1)
    for name, (src_end, dst_end, as_lists, by_torch, goal) in zip(
        _names(nl, nt, layout), cases, strict=False
    ):
        if name not in wanted:
            continue
        plan = Plan.migrate(src_end, dst_end, [nb * nt], same_model=True)
        to_stack = dst_end is blocks[0]
        pairs = _pairs(stack, of_operational if goal is _OPERATIONAL else of_universal, to_stack)
        rows = _row_copy(pairs, layout)
        written = [t for block in stack for t in block] if to_stack else [*universal, *operational]
        _verify(name, written, by_torch, plan.run, as_lists, lambda rows=rows: rows(1))
        for count in threads:
            kvx_core.set_num_threads(count)
            torch.set_num_threads(count)
            contestants = {"kvx": once(plan.run), "torch": once(by_torch), "list": once(as_lists)}
            if count == 1:
                contestants["memcpy"] = once(lambda: _memcpy(dst, src))
            if goal is _OPERATIONAL and stream_isa():
                contestants["blocks"] = PlainCopy(pairs, "blocks", count)
            if goal is _UNIVERSAL and count == 1:
                contestants["rows"] = lambda rows=rows: rows(1)
            timing = compete(contestants, rounds, case=name)
            goals = [goal] if count == 1 else []
            results.append(row(name, count, nb * per_block, timing, goals))
            report.print_row(results[-1], _VERSUS)
    kvx_core.set_num_threads(0)
    return results


def _verify(name: str, written: list[Tensor], right: Callable[[], None], *ways: Any) -> None:
    """Every way leaves what torch leaves."""
    right()
    expected = [tensor.clone() for tensor in written]
    for way in ways:
        for tensor in written:
            tensor.zero_()
        way()
        wrong = [i for i, t in enumerate(written) if t.any() and not torch.equal(t, expected[i])]
        if wrong or not any(tensor.any() for tensor in written):
            raise AssertionError(f"{name}: tensor {wrong[0] if wrong else 0} is wrong")
    right()


def _empty(count: int, shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(count)]


def _as_chunks(universal: Tensor, layout: str) -> Tensor:
    """(nl * no, ...) chunks of a universal block, a view."""
    heads_last = universal.flatten(1, 2).movedim(0, 1)
    return heads_last if layout == "HND" else heads_last.transpose(1, 2)


def _to_whole(stack: list[list[Tensor]], wholes: list[Tensor]) -> None:
    for block, whole in zip(stack, wholes, strict=True):
        for chunk, to in zip(block, whole, strict=True):
            to.copy_(chunk)


def _to_stack(stack: list[list[Tensor]], wholes: list[Tensor]) -> None:
    for block, whole in zip(stack, wholes, strict=True):
        for chunk, begin in zip(block, whole, strict=True):
            chunk.copy_(begin)


def _pairs(
    stack: list[list[Tensor]], wholes: list[Tensor], to_stack: bool
) -> list[tuple[Tensor, Tensor]]:
    """(destination, source) of every chunk."""
    pairs = [
        (whole_chunk, chunk)
        for block, whole in zip(stack, wholes, strict=True)
        for chunk, whole_chunk in zip(block, whole, strict=True)
    ]
    return [pair[::-1] for pair in pairs] if to_stack else pairs


def _row_copy(pairs: list[tuple[Tensor, Tensor]], layout: str) -> RowCopy:
    """A memcpy of what is contiguous at both ends: a row of NHD, the rows of a head of HND."""
    num_dims = 2 if layout == "NHD" else 1
    to, from_ = (_offsets(chunk, num_dims) for chunk in pairs[0])
    row_bytes = pairs[0][0][(0,) * num_dims].nbytes
    return RowCopy([(dst, src, to, from_) for dst, src in pairs], row_bytes)


def _offsets(chunk: Tensor, num_dims: int) -> Tensor:
    """Bytes from the beginning of a chunk to every index of its first dimensions."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(chunk.shape[:num_dims], chunk.stride(), strict=False):
        steps = torch.arange(size) * stride * chunk.element_size()
        offsets = (offsets[:, None] + steps).flatten()
    return offsets


def _memcpy(dst: Tensor, src: Tensor) -> None:
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel())
