"""Gathers: one layer's sequences out of its blocks, as dense tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import calls, families, fp8
from benchmarks.gpu.caches import BASE, VLLM_ORDERS, Layer, Shape, new, random_blocks
from benchmarks.gpu.cases import Case, Named, Size, name_of
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.places import Call, Place
from kvx_core import Transfer

_SEQUENCES = 2


@dataclass(frozen=True)
class Gather:
    """All tokens of a cache of one layer, as bfloat16."""

    layout: str = "split"
    shape: Shape = BASE
    transfer: Transfer = Transfer.KERNEL


def cases(place: Place, size: Size, peers: Peers) -> Iterator[Named]:
    for gather in _sweep():
        name = name_of(gather.layout, gather.shape, transfer=gather.transfer)
        yield Named(name, partial(_build, gather, place, size))


def _sweep() -> Iterator[Gather]:
    """One thing differs from the base at a time."""

    yield Gather()
    for num_kv_heads in (1, 2, 128):
        yield Gather(shape=Shape(num_kv_heads=num_kv_heads))
    for head_dim in (64, 256):
        yield Gather(shape=Shape(head_dim=head_dim))
    for block_size in (64, 256):
        yield Gather(shape=Shape(block_size=block_size))
    for layout in (*VLLM_ORDERS, "packed-x", "transposed V"):
        yield Gather(layout)
    for layout in ("split", "LBNHC"):
        yield Gather(layout, Shape(dtype=fp8.E4M3))
    for transfer in (Transfer.BACKGROUND, Transfer.COPY_ENGINE):
        yield Gather(transfer=transfer)


def _build(gather: Gather, place: Place, size: Size) -> Case:
    shape = gather.shape
    num_tokens = size.num_tokens(shape)
    num_blocks, seq_len = num_tokens // shape.block_size, num_tokens // _SEQUENCES
    cache = new(gather.layout, shape, 1, num_blocks, place)
    layer = cache.layers[0]
    table = random_blocks(num_blocks, place).view(_SEQUENCES, -1)
    lens = torch.full((_SEQUENCES,), seq_len, device=place.device)
    out = torch.empty(
        (2, _SEQUENCES, seq_len, shape.num_kv_heads, shape.head_dim),
        dtype=torch.bfloat16,
        device=place.device,
    )
    scales = fp8.static_scales(1, place)[0] if shape.dtype == fp8.E4M3 else None
    described = None if scales is None else fp8.describe_scales(scales, place)
    by_host = gather.transfer is Transfer.COPY_ENGINE
    where = (table.cpu(), lens.cpu()) if by_host else (table, lens)
    kvx = calls.gather(place, layer, *where, *out, scales=described, transfer=gather.transfer)
    torch_way = partial(_torch, layer, table.view(-1), out, scales)
    ways: dict[str, list[Call]] = {"kvx": [kvx], "torch": [torch_way]}
    by_kernel = gather.transfer is Transfer.KERNEL
    family = families.of(cache) if by_kernel else families.BESIDE
    goals = [family.goal] if by_kernel else []
    return Case(ways, [out], shape.moved_bytes(num_tokens), family, goals)


def _torch(layer: Layer, blocks: Tensor, out: Tensor, scales: Tensor | None) -> None:
    """Whole blocks, in the order of the sequences."""
    for kv, half in enumerate(layer.halves):
        into = out[kv].view(len(blocks), *half.shape[1:])
        if scales is None:
            torch.index_select(half, 0, blocks, out=into)
        else:
            stored = torch.index_select(half.view(torch.uint8), 0, blocks)
            into.copy_(fp8.decode(stored, scales[kv]))
