"""Migrations: all layers of a model from one engine's cache into another's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import calls, families, fp8
from benchmarks.gpu.caches import BASE, VLLM_ORDERS, Cache, Shape, new, random_blocks
from benchmarks.gpu.cases import Case, Named, Size, name_of
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.places import Call, Place
from benchmarks.rounds import Goal
from kvx_core import BlockTable, CacheFacts, CacheSpan, CacheView, Transfer

_SEQUENCES = 2
_HND32 = Shape(block_size=32)


@dataclass(frozen=True)
class Migration:
    """As many tokens as fill the GPU, over all layers, from NHD blocks of 16 by default."""

    src_layout: str = "split"
    dst_layout: str = "trtllm"
    dst_shape: Shape = _HND32
    kv_offsets: bool = False  # the destination's table is TensorRT-LLM's own
    find_scales: bool = False
    transfer: Transfer = Transfer.KERNEL


def cases(place: Place, size: Size, peers: Peers) -> Iterator[Named]:
    for migration in _sweep():
        way = f"{migration.src_layout} to {migration.dst_layout}"
        table = " (KV_OFFSETS)" if migration.kv_offsets else ""
        name = name_of(
            way + table,
            migration.dst_shape,
            find_scales=migration.find_scales,
            transfer=migration.transfer,
        )
        yield Named(name, partial(_build, migration, place, size, peers))


def _sweep() -> Iterator[Migration]:
    yield Migration(kv_offsets=True)
    yield Migration()
    for order in VLLM_ORDERS:
        yield Migration(order)
    yield Migration("LBNHC", "LBHNC", BASE)
    yield Migration("split", "split", BASE)
    yield Migration("split", "packed-x")
    yield Migration("split", "transposed V")
    yield Migration(dst_shape=replace(_HND32, dtype=fp8.E4M3))
    yield Migration(dst_shape=replace(_HND32, dtype=fp8.E4M3), find_scales=True)
    for transfer in (Transfer.BACKGROUND, Transfer.COPY_ENGINE):
        yield Migration("split", "split", BASE, transfer=transfer)


def _build(migration: Migration, place: Place, size: Size, peers: Peers) -> Case:
    num_layers, dst_shape = size.num_layers, migration.dst_shape
    num_tokens = size.num_tokens(_HND32) // num_layers
    src = new(migration.src_layout, BASE, num_layers, num_tokens // 16, place)
    dst = new(
        migration.dst_layout, dst_shape, num_layers, num_tokens // dst_shape.block_size, place
    )
    src_table, dst_table = (_table(cache, place) for cache in (src, dst))
    outputs, scales = [dst.storage], None
    if migration.find_scales:
        room = (num_layers, 2, *dst.layers[0].k.shape[:3])
        scales = torch.empty(room, device=place.device)
        outputs.append(scales)
    elif dst_shape.dtype == fp8.E4M3:
        scales = fp8.static_scales(num_layers, place)

    by_host = migration.transfer is Transfer.COPY_ENGINE
    lens = torch.full((_SEQUENCES,), num_tokens // _SEQUENCES, device=place.device)
    where = [
        calls.indices(
            place, BlockTable.packed(table.cpu() if by_host else table), migration.transfer
        )
        for table in (src_table, dst_table)
    ]
    if migration.kv_offsets:
        where[1] = place.located(BlockTable.kv_offsets(_kv_offsets(dst_table, num_layers)))
    ways: dict[str, list[Call]] = {
        "kvx": [
            calls.migrate(
                place,
                _span(src, where[0], None, place),
                _span(dst, where[1], scales, place),
                lens.cpu() if by_host else lens,
                find_scales=migration.find_scales,
                transfer=migration.transfer,
            )
        ],
        "torch": [partial(_torch, src, src_table, dst, dst_table, scales)],
        "staged": [_Staged(src, src_table, dst, dst_table, scales, place)],
    }
    by_kernel = migration.transfer is Transfer.KERNEL
    family = families.of(src, dst) if by_kernel else families.BESIDE
    goals = [family.goal] if by_kernel else []
    if migration.src_layout in ("split", "LBNHC") and migration.dst_layout == "trtllm":
        goals += [Goal("torch", 3.0), Goal("staged", 2.0)]
    if (migration.src_layout, migration.dst_layout) == ("split", "trtllm") and scales is None:
        for name, migrator in peers.migrators.items():
            ways[name] = [migrator(src, src_table, dst, dst_table)]
    num_bytes = num_layers * dst_shape.moved_bytes(num_tokens)
    return Case(ways, outputs, num_bytes, family, goals)


def _table(cache: Cache, place: Place) -> Tensor:
    return random_blocks(cache.layers[0].k.shape[0], place).view(_SEQUENCES, -1)


def _span(cache: Cache, table: BlockTable, scales: Tensor | None, place: Place) -> CacheSpan:
    k_scales = v_scales = None
    if scales is not None:
        described = [fp8.describe_scales(of_layer, place) for of_layer in scales]
        k_scales, v_scales = zip(*described, strict=True)
    layers = tuple(layer.desc for layer in cache.layers)
    view = CacheView(layers, CacheFacts(), k_scales=k_scales, v_scales=v_scales)
    return view.at(table)


def _kv_offsets(table: Tensor, num_layers: int) -> Tensor:
    """(seq_count, 1, 2, max_blocks_per_seq): a block has a sub-block for K and V of each layer."""
    first = table.int() * num_layers * 2
    return torch.stack([first, first + 1], 1)[:, None].contiguous()


def _torch(
    src: Cache, src_table: Tensor, dst: Cache, dst_table: Tensor, scales: Tensor | None
) -> None:
    """Half a layer after the other, whose tokens are still in the L2 when they are stored."""
    for i, (from_layer, to_layer) in enumerate(zip(src.layers, dst.layers, strict=True)):
        for kv in range(2):
            tokens = from_layer.halves[kv].index_select(0, src_table.view(-1))
            scale = None if scales is None else scales[i, kv]
            _store(tokens, to_layer.halves[kv], dst_table.view(-1), scale)


class _Staged:
    """Two hops, as connectors go that know one cache each: all layers to dense tokens, and on."""

    def __init__(
        self,
        src: Cache,
        src_table: Tensor,
        dst: Cache,
        dst_table: Tensor,
        scales: Tensor | None,
        place: Place,
    ) -> None:
        self._src, self._src_blocks = src, src_table.view(-1)
        self._dst, self._dst_blocks = dst, dst_table.view(-1)
        self._scales = scales
        half = src.layers[0].k
        room = (len(src.layers), 2, *half.shape)
        self._tokens = torch.empty(room, dtype=half.dtype, device=place.device)

    def __call__(self) -> None:
        for tokens, layer in zip(self._tokens, self._src.layers, strict=True):
            for kv, half in enumerate(layer.halves):
                torch.index_select(half, 0, self._src_blocks, out=tokens[kv])
        for i, (tokens, layer) in enumerate(zip(self._tokens, self._dst.layers, strict=True)):
            for kv, half in enumerate(layer.halves):
                scale = None if self._scales is None else self._scales[i, kv]
                _store(tokens[kv], half, self._dst_blocks, scale)


def _store(tokens: Tensor, half: Tensor, blocks: Tensor, scale: Tensor | None) -> None:
    """Dense tokens into blocks; scales that are found per token and head into theirs."""
    values = tokens.view(len(blocks), *half.shape[1:3], -1)
    if scale is not None:
        if scale.ndim:
            found = fp8.found_scales(values)
            scale[blocks] = found[..., 0]
            scale = found
        values, half = fp8.encode(values, scale), half.view(torch.uint8)
    half[blocks] = values.view(len(blocks), *half.shape[1:])
