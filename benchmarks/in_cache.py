"""Copies that fit into the caches, 4 KiB to 4 MiB: never slower than a memcpy per contiguous piece.

KVX and the memcpy loop are both timed in C, warm, over and over on the same tensors: what Python
adds to a call is in call_overhead.py. The memcpy loop is given its addresses and runs on one thread
whatever KVX may use. Writes are timed from Python too: a WritePlan beside torch's index_copy_.
Run with `python -m benchmarks in_cache`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvx_core
from benchmarks import native, report
from benchmarks.cases import check, row
from benchmarks.pools import PACK, Pool, Shape, random_numbers, random_table
from benchmarks.rounds import SPIN_SECONDS, Contestant, Goal, batched, compete, repeated
from kvx_core import (
    Layout,
    SeqLens,
    SlotMapping,
    WritePlan,
    describe,
)
from kvx_core._c import abi

_KIB = 1 << 10
_GOALS = (Goal("rows", 1.0),)


@dataclass(frozen=True)
class InCache:
    """One copy: KVX through its C structs, the memcpy loop, and others timed from Python.

    kvx, rows: copy n times and return seconds per time
    expect:    does what kvx does, in a way that is easy to believe
    """

    name: str
    kvx: Callable[[int], float]
    rows: Callable[[int], float]
    expect: Callable[[], object]
    outputs: Sequence[Tensor]
    num_bytes: int
    python: dict[str, Callable[[], object]]
    keep: object  # what the C structs point into

    def verify(self) -> None:
        """Raises AssertionError unless both ways leave the right bytes."""
        for way in (self.kvx, self.rows):
            check(self.name, lambda way=way: way(1), self.expect, self.outputs)  # type: ignore[misc]

    def contestants(self) -> dict[str, Contestant]:
        from_python = {name: repeated(call) for name, call in self.python.items()}
        return {"kvx": batched(self.kvx), "rows": batched(self.rows), **from_python}


def run(shape: Shape, threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results.

    shape: its num_tokens is not used
    """
    results = []
    report.print_head(["rows", "torch"])
    for case in _cases(shape):
        if only not in case.name:
            continue
        case.verify()
        for count in threads:
            kvx_core.set_num_threads(count)
            torch.set_num_threads(count)
            label = f"{case.name}, {count} threads"
            timing = compete(
                case.contestants(), rounds, case=label, before=lambda _: time.sleep(SPIN_SECONDS)
            )
            results.append(row(case.name, count, case.num_bytes, timing, _GOALS))
            report.print_row(results[-1], ["rows", "torch"])
    kvx_core.set_num_threads(0)
    return results


def _cases(shape: Shape) -> Iterator[InCache]:
    for num_tokens in (1, 16, 256, 1024):
        yield _write(shape, num_tokens)
    for src_layout, dst_layout in (
        ("NHD", "NHD"),
        ("NHD", "HND"),
        ("HND", "NHD"),
        ("NHD", "packed"),
        ("packed", "NHD"),
    ):
        for num_tokens in (16, 64, 256, 1024):
            yield _paged(shape.with_tokens(num_tokens), src_layout, dst_layout)


def _size(num_bytes: int) -> str:
    return f"{num_bytes // _KIB} KiB" if num_bytes < _KIB**2 else f"{num_bytes // _KIB**2} MiB"


def _write(shape: Shape, num_tokens: int) -> InCache:
    """Tokens of as many sequences into random slots: a decode step."""
    shape = shape.with_tokens(max(num_tokens, shape.block_size))
    pool = Pool.new(shape, "NHD").fill(random_numbers(2 * shape.elements))
    tokens = (num_tokens, shape.num_kv_heads, shape.head_dim)
    key, value = random_numbers(2 * num_tokens * shape.token_elements).view(2, *tokens)
    slots = random_table(shape.num_tokens, 1)[:num_tokens].clone()
    cache = pool.desc()
    key_c, value_c = (describe(t, Layout.BLOCK_CUSTOM).to_c() for t in (key, value))
    write = abi.kvx_write_desc_t(
        io=abi.kvx_kv_io_desc_t(
            key=key_c,
            value=value_c,
            num_tokens=num_tokens,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        ),
        slots=SlotMapping.of(slots).to_c(),
    )
    k_rows, v_rows = (t.view(shape.num_tokens, *tokens[1:]) for t in pool.tensors)
    row_bytes = shape.token_elements * key.element_size()
    to, from_ = slots * row_bytes, torch.arange(num_tokens) * row_bytes
    plan = WritePlan(cache, key, value)

    def by_torch() -> None:
        k_rows.index_copy_(0, slots, key)
        v_rows.index_copy_(0, slots, value)

    plural = "s" if num_tokens > 1 else ""
    return InCache(
        f"write {num_tokens} token{plural}, {_size(2 * num_tokens * row_bytes)}",
        native.timed("write", cache.to_c(), write),
        native.RowCopy([(k_rows, key, to, from_), (v_rows, value, to, from_)], row_bytes),
        by_torch,
        pool.tensors,
        2 * num_tokens * row_bytes,
        {"plan": lambda: plan(key, value, slots), "torch": by_torch},
        keep=(cache, slots),
    )


def _paged(shape: Shape, src_layout: str, dst_layout: str) -> InCache:
    """From the random blocks of one pool to those of another."""
    src = Pool.new(shape, src_layout).fill(random_numbers(2 * shape.elements))
    dst = Pool.new(shape, dst_layout)
    src_table, dst_table = (random_table(shape.num_blocks, seed) for seed in (1, 2))
    src_end, dst_end = src.view().at(src_table[None]), dst.view().at(dst_table[None])
    lens = SeqLens.of([shape.num_tokens])
    migrate = abi.kvx_migrate_desc_t(
        seq_lens=ctypes.pointer(lens.to_c()),
        src=ctypes.pointer(src_end.to_c()),
        dst=ctypes.pointer(dst_end.to_c()),
    )
    run_elements = _common_run(shape, src_layout, dst_layout)
    to, from_ = _row_starts(src, dst, src_table, dst_table, run_elements)

    def expect() -> None:
        for to, from_ in zip(dst.tensors, src.tensors, strict=True):
            dst.as_nhd(to)[dst_table] = src.as_nhd(from_)[src_table]

    num_bytes = src.k.nbytes + src.v.nbytes
    return InCache(
        f"{src_layout} to {dst_layout}, {_size(num_bytes)}",
        native.timed("migrate", migrate),
        native.RowCopy(
            [(d, s, to, from_) for d, s in zip(dst.tensors, src.tensors, strict=True)],
            run_elements * src.k.element_size(),
        ),
        expect,
        dst.tensors,
        num_bytes,
        {},
        keep=(src_end, dst_end, lens),
    )


def _common_run(shape: Shape, src_layout: str, dst_layout: str) -> int:
    """Elements that lie side by side in both layouts."""
    layouts = {src_layout, dst_layout}
    if len(layouts) == 1:
        return shape.block_size * shape.token_elements
    return PACK if "packed" in layouts else shape.head_dim


def _row_starts(
    src: Pool, dst: Pool, src_table: Tensor, dst_table: Tensor, run_elements: int
) -> tuple[Tensor, Tensor]:
    """Byte offsets of every run in destination and source, in the order of the source's memory."""
    element = torch.arange(src.k.numel())
    from_ = src.as_nhd(element.view(src.k.shape))[src_table].flatten()
    to = dst.as_nhd(element.view(dst.k.shape))[dst_table].flatten()
    block_elements = src.k[0].numel()
    order = (element // block_elements * block_elements + from_ % block_elements).argsort()
    size = src.k.element_size()
    to, from_ = to[order] * size, from_[order] * size
    return to[::run_elements].clone(), from_[::run_elements].clone()
