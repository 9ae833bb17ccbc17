"""Writes: the tokens of a decode step, one layer after the other, and those of a prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import calls, families, fp8
from benchmarks.gpu.caches import BASE, VLLM_ORDERS, Cache, Layer, Shape, new, random_blocks
from benchmarks.gpu.cases import Case, Named, Size, name_of
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.places import Call, Place
from benchmarks.rounds import Goal
from kvx_core import Transfer


@dataclass(frozen=True)
class Write:
    """`num_tokens` bfloat16 tokens into each layer of a cache."""

    num_tokens: int
    layout: str = "split"
    shape: Shape = BASE
    find_scales: bool = False
    transfer: Transfer = Transfer.KERNEL
    is_decode: bool = False  # every token belongs to another sequence


def cases(place: Place, size: Size, peers: Peers) -> Iterator[Named]:
    for write in (*_lengths(size), *_sweep(size)):
        name = name_of(
            f"{write.num_tokens} tokens, {write.layout}",
            write.shape,
            find_scales=write.find_scales,
            transfer=write.transfer,
        )
        yield Named(name, partial(_build, write, place, size, peers))


def _lengths(size: Size) -> Iterator[Write]:
    for layout in ("LBNHC", "LBHNC", "split"):
        for num_tokens in size.decode_tokens:
            yield Write(num_tokens, layout, is_decode=True)
        for num_tokens in size.prefill_tokens:
            yield Write(num_tokens, layout)


def _sweep(size: Size) -> Iterator[Write]:
    """One thing differs from the base at a time; all read as many bytes."""

    def full(layout: str = "split", **sizes: Any) -> Write:
        shape = Shape(**sizes)
        return Write(size.num_tokens(shape), layout, shape)

    for num_kv_heads in (1, 2, 128):
        yield full(num_kv_heads=num_kv_heads)
    for head_dim in (64, 256):
        yield full(head_dim=head_dim)
    for block_size in (64, 256):
        yield full(block_size=block_size)
    for layout in (*VLLM_ORDERS[2:], "packed-x", "transposed V"):
        yield full(layout)
    for layout in ("split", "LBNHC"):
        yield full(layout, dtype=fp8.E4M3)
        yield replace(full(layout, dtype=fp8.E4M3), find_scales=True)
    yield replace(full(), transfer=Transfer.BACKGROUND)


def _build(write: Write, place: Place, size: Size, peers: Peers) -> Case:
    shape, num_tokens = write.shape, write.num_tokens
    num_layers = max(1, min(size.num_layers, size.num_tokens(shape) // num_tokens))
    needed = num_tokens if write.is_decode else num_tokens // shape.block_size
    num_blocks = max(needed, size.min_blocks)
    cache = new(write.layout, shape, num_layers, num_blocks, place)
    slots = _slots(write, num_blocks, place)
    token = (num_tokens, shape.num_kv_heads, shape.head_dim)
    tokens = torch.randn(num_layers, 2, *token, dtype=torch.bfloat16, device=place.device)
    outputs, scales = [cache.storage], None
    if write.find_scales:
        room = (num_layers, 2, num_blocks, shape.block_size, shape.num_kv_heads)
        scales = torch.empty(room, device=place.device)
        outputs.append(scales)
    elif shape.dtype == fp8.E4M3:
        scales = fp8.static_scales(num_layers, place)

    writers = peers.writers if _suits_peers(write) else {}
    ways: dict[str, list[Call]] = {name: [] for name in ("kvx", "torch", *writers)}
    for i, layer in enumerate(cache.layers):
        key, value = tokens[i]
        described = None if scales is None else fp8.describe_scales(scales[i], place)
        ways["kvx"].append(
            calls.write(
                place,
                layer,
                key,
                value,
                slots,
                scales=described,
                find_scales=write.find_scales,
                transfer=write.transfer,
            )
        )
        of_layer = None if scales is None else scales[i]
        ways["torch"].append(partial(_torch, layer, tokens[i], slots, of_layer))
        for name, writer in writers.items():
            k, v = (half[:, :, :, 0] for half in layer.halves)
            ways[name].append(writer(k, v, key, value, slots))

    if num_layers > 1:
        ways["layers"] = [_all_layers(cache, tokens, slots, place)]
    family, goals = families.of(cache), []
    if write.transfer is not Transfer.KERNEL:
        family = families.BESIDE
    elif num_layers == 1:
        goals.append(family.goal)
    elif write.is_decode:
        family = families.DECODE
    if write.layout in VLLM_ORDERS:
        goals.append(Goal("vllm", 1.0 if write.is_decode else 1.5))
    return Case(ways, outputs, shape.moved_bytes(num_tokens), family, goals)


def _all_layers(cache: Cache, tokens: Tensor, slots: Tensor, place: Place) -> Call:
    keys, values = tokens.unbind(1)
    return calls.write_layers(place, cache.layers, keys, values, slots)


def _suits_peers(write: Write) -> bool:
    """Rows of bfloat16: what all of them write."""
    has_rows = write.layout not in ("packed-x", "transposed V")
    return has_rows and write.shape.dtype == BASE.dtype and write.transfer is Transfer.KERNEL


def _slots(write: Write, num_blocks: int, place: Place) -> Tensor:
    blocks, block_size = random_blocks(num_blocks, place), write.shape.block_size
    if write.is_decode:
        offsets = torch.arange(write.num_tokens, device=place.device) * 7 % block_size
        return blocks[: write.num_tokens] * block_size + offsets
    slots = blocks[:, None] * block_size + torch.arange(block_size, device=place.device)
    return slots.view(-1)[: write.num_tokens]


def _torch(layer: Layer, tokens: Tensor, slots: Tensor, scales: Tensor | None) -> None:
    """By indexing. `scales`: of K and V; those found per token and head are stored there."""
    block_size = layer.k.shape[1]
    at = slots // block_size, slots % block_size
    for kv, half in enumerate(layer.halves):
        values = tokens[kv]
        if scales is not None:
            scale = scales[kv]
            if scale.ndim:
                found = fp8.found_scales(values)
                scale[at] = found[..., 0]
                scale = found
            values, half = fp8.encode(values, scale), half.view(torch.uint8)
        half[at] = values.view(len(slots), *half.shape[2:])
