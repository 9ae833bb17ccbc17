"""Migrations beyond one GPU: from its pool to pinned memory of the host and back, to another GPU.

A tier keeps blocks in the order in which they came; one from which pools are read is measured in
write-combined memory as well. Two GPUs with peer access take one call; elsewhere a pool goes
through a tier. Last come blocks of fewer tokens: what a run has decides how fast a way is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu import calls, families
from benchmarks.gpu.caches import BASE, Cache, Shape, new, random_blocks
from benchmarks.gpu.cases import Case, Named, Size, name_of
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.places import Call, OtherGpu, PinnedHost, Place
from benchmarks.gpu.write_combined import WriteCombinedHost
from kvx_core import BlockTable, CacheFacts, CacheSpan, CacheView, Transfer

_LAYOUT = "split"
_SMALLER = tuple(Shape(block_size=tokens) for tokens in (8, 4, 2))  # runs of 16, 8 and 4 KiB


@dataclass(frozen=True)
class End:
    """A cache, and the blocks of its one sequence."""

    cache: Cache
    blocks: Tensor
    is_shuffled: bool  # else they are 0, 1, 2 ...

    def span(self, table: BlockTable) -> CacheSpan:
        layers = tuple(layer.desc for layer in self.cache.layers)
        return CacheView(layers, CacheFacts()).at(table)


def cases(place: Place, size: Size, peers: Peers) -> Iterator[Named]:
    has_peer = _has_peer(place, peers)
    for transfer in Transfer:
        yield from _both_ways(place, size, BASE, transfer)
        combined = partial(_tier, place, size, BASE, transfer, WriteCombinedHost)
        yield Named(_name("write-combined tier to pool", BASE, transfer), partial(combined, False))
    if has_peer:
        yield Named("one GPU to another", partial(_two_gpus, place, size))
    for shape, transfer in product(_SMALLER, Transfer):
        yield from _both_ways(place, size, shape, transfer)


def _both_ways(place: Place, size: Size, shape: Shape, transfer: Transfer) -> Iterator[Named]:
    pinned = partial(_tier, place, size, shape, transfer, PinnedHost)
    yield Named(_name("pool to pinned tier", shape, transfer), partial(pinned, True))
    yield Named(_name("pinned tier to pool", shape, transfer), partial(pinned, False))


def _name(what: str, shape: Shape, transfer: Transfer) -> str:
    return name_of(what, shape, transfer=transfer)


def _has_peer(place: Place, peers: Peers) -> bool:
    """Whether a second GPU can be reached; if not, the results say why."""
    count = torch.cuda.device_count() if place.device != "cpu" else 0
    if count > 1 and torch.cuda.can_device_access_peer(0, 1):
        return True
    why = f"this machine has {count} GPUs" if count < 2 else "GPU 0 has no peer access to GPU 1"
    peers.absent["a second GPU"] = why
    return False


def _tier(
    place: Place,
    size: Size,
    shape: Shape,
    transfer: Transfer,
    memory: type[PinnedHost],
    to_host: bool,
) -> Case:
    host = memory(place)
    pool, tier = _end(place, size, shape, shuffled=True), _end(host, size, shape, shuffled=False)
    src, dst = (pool, tier) if to_host else (tier, pool)
    family = families.TIER if transfer is Transfer.KERNEL else families.BESIDE
    return _case(place, src, dst, transfer, family)


def _two_gpus(place: Place, size: Size) -> Case:
    other = OtherGpu()
    src, dst = _end(place, size, BASE, shuffled=True), _end(other, size, BASE, shuffled=True)
    return _case(place, src, dst, Transfer.KERNEL, families.PEER, other)


def _end(place: Place, size: Size, shape: Shape, *, shuffled: bool) -> End:
    num_blocks = max(size.num_tokens(shape) // size.num_layers // shape.block_size // 4, 1)
    cache = new(_LAYOUT, shape, size.num_layers, num_blocks, place)
    blocks = random_blocks(num_blocks, place) if shuffled else torch.arange(num_blocks)
    return End(cache, blocks.to(place.device), shuffled)


def _case(
    place: Place,
    src: End,
    dst: End,
    transfer: Transfer,
    family: families.Family,
    other: Place | None = None,
) -> Case:
    """All blocks of all layers. other: where the ways run, if not on the GPU alone"""
    by_host = transfer is Transfer.COPY_ENGINE
    where = "cpu" if by_host else place.device
    shape = src.cache.shape
    num_tokens = len(src.blocks) * shape.block_size
    from_, to = (
        end.span(calls.indices(place, BlockTable.packed(end.blocks[None].to(where)), transfer))
        for end in (src, dst)
    )
    lens = torch.full((1,), num_tokens, device=where)
    ways: dict[str, list[Call]] = {
        "kvx": [calls.migrate(place, from_, to, lens, transfer=transfer)],
        "torch": [partial(_torch, src, dst)],
    }
    storage = dst.cache.storage
    plain = partial(storage.copy_, src.cache.storage, non_blocking=True)
    num_bytes = len(src.cache.layers) * shape.moved_bytes(num_tokens)
    goals = [family.goal] if family.share is not None else []
    return Case(ways, [storage], num_bytes, family, goals, [plain], other)


def _torch(src: End, dst: End) -> None:
    """Half a layer after the other, gathered and scattered where its blocks are in random order."""
    for from_layer, to_layer in zip(src.cache.layers, dst.cache.layers, strict=True):
        for from_half, to_half in zip(from_layer.halves, to_layer.halves, strict=True):
            tokens = from_half.index_select(0, src.blocks) if src.is_shuffled else from_half
            if dst.is_shuffled:
                to_half[dst.blocks] = tokens.to(to_half.device, non_blocking=True)
            else:
                to_half.copy_(tokens, non_blocking=True)
