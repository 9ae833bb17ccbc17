"""Copies far larger than the caches: bf16, 32k tokens x 8 heads x 128, random blocks of 16.

Every case moves K and V of one layer, against memcpy of the same bytes, the best streaming-store
copy of them, the same block by block in the order that KVX has to follow, and torch.
Run with `python -m benchmarks cpu_copy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import kvx_core
from benchmarks import native, report
from benchmarks.cases import Case, cold, row
from benchmarks.pools import Pool, Shape, one_layer, random_numbers, random_table
from benchmarks.rounds import Contestant, Goal, compete, once
from kvx_core import CacheDesc, Layout, ScaleDesc, ScaleGranularity, describe

_COPY = (Goal("memcpy", 1.0), Goal("stream", 0.85), Goal("blocks", 0.85))
_REORDER = (Goal("memcpy", 0.6),)
_CONVERT = (Goal("torch", 4.0),)

_VERSUS = ("memcpy", "stream", "blocks", "torch")
_TINY_TOKENS = 64


def run(shape: Shape, threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    numbers = random_numbers(2 * shape.elements)
    methods = ["memcpy", *(["stream"] if native.stream_isa() else [])]
    rows = []
    report.print_head(_VERSUS)
    for name, build in CASES:
        if only not in name:
            continue
        case, tiny = (build(name, s, numbers) for s in (shape, shape.with_tokens(_TINY_TOKENS)))
        case.verify()
        before = cold({"kvx": tiny.kvx, "torch": tiny.torch})
        for count in threads:
            kvx_core.set_num_threads(count)
            torch.set_num_threads(count)

            contestants: dict[str, Contestant] = {
                "kvx": once(case.kvx),
                **{m: native.PlainCopy(case.plain, m, count) for m in methods},
                "torch": once(case.torch),
            }
            if case.blocks and native.stream_isa():
                contestants["blocks"] = native.BlockCopy(case.blocks, count)
            timing = compete(contestants, rounds, case=f"{name}, {count} threads", before=before)
            rows.append(row(name, count, case.num_bytes, timing, case.goals))
            report.print_row(rows[-1], _VERSUS)
    kvx_core.set_num_threads(0)
    return rows


Build = Callable[[str, Shape, Tensor], Case]


def _gather(name: str, shape: Shape, numbers: Tensor) -> Case:
    src = Pool.new(shape, "NHD").fill(numbers)
    table = random_table(shape.num_blocks, 1)
    key, value = (torch.empty(1, *_tokens(shape), dtype=torch.bfloat16) for _ in range(2))
    cache, lens = src.desc(), [shape.num_tokens]

    def by_torch() -> None:
        for out, pool in ((key, src.k), (value, src.v)):
            torch.index_select(pool, 0, table, out=out.view(pool.shape))

    return Case(
        name,
        lambda: kvx_core.gather_kv(cache, table[None], lens, out=(key, value)),
        by_torch,
        [(key, src.k), (value, src.v)],
        [key, value],
        _COPY,
        blocks=[(to, from_, _order(table), table) for to, from_ in ((key, src.k), (value, src.v))],
    )


def _gather_hnd(name: str, shape: Shape, numbers: Tensor) -> Case:
    src = Pool.new(shape, "NHD").fill(numbers)
    table = random_table(shape.num_blocks, 1)
    _, heads, dim = _tokens(shape)
    outputs = [torch.empty(1, heads, shape.num_tokens, dim, dtype=torch.bfloat16) for _ in "kv"]
    key, value = (output.transpose(1, 2) for output in outputs)
    cache, lens, staged = src.desc(), [shape.num_tokens], torch.empty_like(src.k)

    def by_torch() -> None:
        for output, pool in zip(outputs, src.tensors, strict=True):
            torch.index_select(pool, 0, table, out=staged)
            blocks = output[0].unflatten(1, (shape.num_blocks, shape.block_size))
            blocks.copy_(staged.permute(2, 0, 1, 3))

    return Case(
        name,
        lambda: kvx_core.gather_kv(cache, table[None], lens, out=(key, value)),
        by_torch,
        list(zip(outputs, src.tensors, strict=True)),
        outputs,
        _COPY,
        blocks=[
            (to, from_, _order(table), table)
            for to, from_ in zip(outputs, src.tensors, strict=True)
        ],
    )


def _paged(src_layout: str, dst_layout: str, goals: Sequence[Goal]) -> Build:
    """From random blocks of one pool to random blocks of another, in another layout."""

    def build(name: str, shape: Shape, numbers: Tensor) -> Case:
        src = Pool.new(shape, src_layout).fill(numbers)
        dst = Pool.new(shape, dst_layout)
        src_table, dst_table = (random_table(shape.num_blocks, seed) for seed in (1, 2))
        src_end, dst_end = src.view().at(src_table[None]), dst.view().at(dst_table[None])
        src_staged, dst_staged = torch.empty_like(src.k), torch.empty_like(dst.k)

        def by_torch() -> None:
            for to, from_ in zip(dst.tensors, src.tensors, strict=True):
                torch.index_select(from_, 0, src_table, out=src_staged)
                dst.as_nhd(dst_staged).copy_(src.as_nhd(src_staged))
                to.index_copy_(0, dst_table, dst_staged)

        return Case(
            name,
            lambda: kvx_core.migrate(src_end, dst_end, [shape.num_tokens], same_model=True),
            by_torch,
            list(zip(dst.tensors, src.tensors, strict=True)),
            dst.tensors,
            goals,
            blocks=[
                (to, from_, dst_table, src_table)
                for to, from_ in zip(dst.tensors, src.tensors, strict=True)
            ],
        )

    return build


def _convert(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, granularity: ScaleGranularity | None
) -> Build:
    """Between bfloat16 and FP8, random blocks to random blocks; torch's is a dense copy_."""

    def build(name: str, shape: Shape, numbers: Tensor) -> Case:
        src, dst = Pool.new(shape, "NHD", src_dtype), Pool.new(shape, "NHD", dst_dtype)
        src.fill(numbers)
        src_table, dst_table = (random_table(shape.num_blocks, seed) for seed in (1, 2))
        encodes = dst_dtype == torch.float8_e4m3fn
        scales, scale = _scales(shape, granularity)
        src_end = src.view(None if encodes else scale).at(src_table[None])
        dst_end = dst.view(scale if encodes else None).at(dst_table[None])

        def by_torch() -> None:
            for to, from_ in zip(dst.tensors, src.tensors, strict=True):
                to.copy_(from_)

        def expect() -> None:
            where = dst_table if encodes else src_table
            for to, from_ in zip(dst.tensors, src.tensors, strict=True):
                values = from_[src_table].float()
                if granularity is not None:
                    s = scales[where] if scales.shape[0] > 1 else scales
                    values = values / s if encodes else values * s
                if encodes:
                    values = values.clamp(-448, 448)
                to[dst_table] = values.to(dst_dtype)

        sizes = [(src.k.nbytes + dst.k.nbytes) // 2] * 2
        plain = [
            (torch.empty(n, dtype=torch.uint8), torch.ones(n, dtype=torch.uint8)) for n in sizes
        ]
        return Case(
            name,
            lambda: kvx_core.migrate(src_end, dst_end, [shape.num_tokens], same_model=True),
            by_torch,
            plain,
            dst.tensors,
            _CONVERT,
            expect,
        )

    return build


def _scales(shape: Shape, granularity: ScaleGranularity | None) -> tuple[Tensor, ScaleDesc | None]:
    """Scales that broadcast over NHD blocks, and the same as KVX takes them."""
    if granularity is None:
        return torch.ones(1, 1, 1, 1), None
    token_head = shape.num_blocks, shape.block_size, shape.num_kv_heads, 1
    sizes = {
        ScaleGranularity.PER_TENSOR: (1, 1, 1, 1),
        ScaleGranularity.PER_TOKEN_HEAD: token_head,
    }[granularity]
    scales = torch.rand(sizes, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.01
    one = granularity is ScaleGranularity.PER_TENSOR
    return scales, ScaleDesc.of(scales.view(1) if one else scales[..., 0], granularity)


def _vllm_to_hf(name: str, shape: Shape, numbers: Tensor) -> Case:
    """vLLM 0.32 FlashAttention: K and V share the last axis; HF: (batch, head, token, dim)."""
    heads, dim, size = shape.num_kv_heads, shape.head_dim, shape.block_size
    pool = numbers[: 2 * shape.elements].view(shape.num_blocks, size, heads, 2 * dim).clone()
    table = random_table(shape.num_blocks, 1)
    outputs = [torch.empty(1, heads, shape.num_tokens, dim, dtype=torch.bfloat16) for _ in "kv"]
    halves = pool.split(dim, dim=-1)
    src = CacheDesc.from_kv(*[describe(half, Layout.BLOCK_NHD) for half in halves])
    dst = CacheDesc.from_kv(*[describe(output, Layout.BLOCK_HND) for output in outputs])
    src_end, dst_end = one_layer(src).at(table[None]), replace(one_layer(dst), dense=True)
    staged = torch.empty_like(pool)

    def by_torch() -> None:
        torch.index_select(pool, 0, table, out=staged)
        for output, half in zip(outputs, staged.split(dim, dim=-1), strict=True):
            blocks = output[0].unflatten(1, (shape.num_blocks, size))
            blocks.copy_(half.permute(2, 0, 1, 3))

    flat = pool.view(2, -1)
    return Case(
        name,
        lambda: kvx_core.migrate(src_end, dst_end, [shape.num_tokens], same_model=True),
        by_torch,
        list(zip(outputs, flat, strict=True)),
        outputs,
        _COPY,
        blocks=[(to, from_, _order(table), table) for to, from_ in zip(outputs, flat, strict=True)],
    )


def _write(num_tokens: int) -> Build:
    """A prefill's tokens into the slots of random blocks."""

    def build(name: str, shape: Shape, numbers: Tensor) -> Case:
        tokens = min(num_tokens, shape.num_tokens)
        pool = Pool.new(shape, "NHD").fill(numbers)
        blocks = random_table(shape.num_blocks, 1)
        slots = blocks[:, None] * shape.block_size + torch.arange(shape.block_size)
        slots = slots.flatten()[:tokens].clone()
        key, value = (
            n.view(-1, shape.num_kv_heads, shape.head_dim)[:tokens].flip(0).contiguous()
            for n in numbers[: 2 * shape.elements].view(2, -1)
        )
        cache = pool.desc()
        rows = [t.view(_tokens(shape)) for t in pool.tensors]

        def by_torch() -> None:
            rows[0].index_copy_(0, slots, key)
            rows[1].index_copy_(0, slots, value)

        return Case(
            name,
            lambda: kvx_core.write_kv(cache, key, value, slots),
            by_torch,
            [(rows[0][:tokens], key), (rows[1][:tokens], value)],
            pool.tensors,
        )

    return build


def _order(table: Tensor) -> Tensor:
    """Block ids of a dense destination."""
    return torch.arange(table.numel())


def _tokens(shape: Shape) -> tuple[int, int, int]:
    return shape.num_tokens, shape.num_kv_heads, shape.head_dim


def _cases() -> Iterator[tuple[str, Build]]:
    yield "block gather, NHD to dense", _gather
    yield "NHD to HND, dense", _gather_hnd
    yield "NHD to HND, paged", _paged("NHD", "HND", _COPY)
    yield "HND to NHD, paged", _paged("HND", "NHD", ())
    yield "vLLM packed K|V to HF", _vllm_to_hf
    yield "NHD to packed-x 8, paged", _paged("NHD", "packed", _REORDER)
    yield "packed-x 8 to NHD, paged", _paged("packed", "NHD", _REORDER)
    yield "NHD to transposed, paged", _paged("NHD", "transposed", _REORDER)
    yield "transposed to NHD, paged", _paged("transposed", "NHD", _REORDER)
    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    for granularity, words in (
        (None, "unscaled"),
        (ScaleGranularity.PER_TENSOR, "per tensor"),
        (ScaleGranularity.PER_TOKEN_HEAD, "per token-head"),
    ):
        yield f"bf16 to e4m3, {words}", _convert(bf16, e4m3, granularity)
        yield f"e4m3 to bf16, {words}", _convert(e4m3, bf16, granularity)
    for num_tokens in (4096, 32768):
        yield f"write {num_tokens} tokens, NHD", _write(num_tokens)


CASES: list[tuple[str, Build]] = list(_cases())
