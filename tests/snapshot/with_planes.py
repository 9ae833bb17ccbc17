"""An engine whose cache has planes, packed formats and POINTERS tables, copied by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    Plane,
    Section,
    Snapshot,
    describe,
)
from tests.snapshot.sections import FACTS

SENTINEL = 0x5A


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int | None) -> Tensor:
    """Bytes of every value, or of the sentinel."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.full((*shape[:-1], shape[-1] * size), SENTINEL, dtype=torch.uint8)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 256, raw.shape, generator=generator).to(torch.uint8)
    return raw.view(dtype)


def raw(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def reopened(
    snapshot: Snapshot | None, path: Path, layers: Sequence[int] | None = None
) -> Snapshot:
    """The snapshot, written and read."""
    assert snapshot is not None
    snapshot.save(path)
    with Snapshot.open(path) as file:
        assert file.header == snapshot.header
        return file.read(file.header.layers if layers is None else layers)


def section(view: CacheView, blocks: Any, layers: Sequence[int] = (3,), **fields: Any) -> Section:
    facts = replace(FACTS, first_kv_head=0, total_kv_heads=2) if view.facts is FACTS else view.facts
    table = blocks if blocks is None or isinstance(blocks, BlockTable) else BlockTable.of([blocks])
    return Section(tuple(layers), replace(view, facts=facts), table, **fields)


@dataclass
class Engine:
    """A layer of every kind of plane: a latent as K, an indexer's page, an entry per 4 tokens by a
    table of its own, and a state by a slot.

    block_size: of K and the indexer; entries: of a block of the plane of 4 tokens
    """

    block_size: int
    entries: int
    seed: int | None
    num_blocks: int = 9
    layer: int = 3
    blocks: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    slot: int = 2

    def __post_init__(self) -> None:
        n, blocks, s = self.block_size, self.num_blocks, self.seed
        self.latent = filled((blocks, n, 2, 24), torch.bfloat16, s)
        self.page = filled((blocks, n * 12), torch.uint8, None if s is None else s + 1)
        self.compressed = filled((blocks, self.entries, 2, 6), torch.float16, s)
        self.state = filled((5, 2, 3, 7), torch.float32, s)
        order = torch.Generator().manual_seed((s or 0) + n)
        self.blocks = torch.randperm(blocks, generator=order).tolist()
        self.own = torch.randperm(blocks, generator=order).tolist()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.latent, self.page, self.compressed, self.state]

    @property
    def k(self) -> Tensor:
        return self.page.as_strided(
            (self.num_blocks, self.block_size, 8), (self.block_size * 12, 8, 1)
        )

    @property
    def k_scale(self) -> Tensor:
        n = self.block_size
        floats = self.page.view(torch.float32)
        return floats.as_strided((self.num_blocks, n), (n * 3, 1), n * 2)

    def planes(self, state: bool = True) -> tuple[Plane, ...]:
        axes, layer = ("block", "token", "dim"), self.layer
        found = (
            Plane.of(self.k, axes, "index_k", layer, dtype="F8_E4M3", replicated=True),
            Plane.of(self.k_scale, axes[:2], "index_k_scale", layer, replicated=True),
            Plane.of(
                self.compressed,
                ("block", "token", "head", "dim"),
                40,
                layer,
                tokens_per_entry=4,
                block_table=[self.own],
            ),
            Plane.of(
                self.state,
                ("block", "head", "dim", "dim"),
                "state",
                layer,
                tokens_per_entry=0,
                slots=[self.slot],
            ),
        )
        return found if state else found[:3]

    def cache(self) -> CacheDesc:
        return CacheDesc.from_kv(describe(self.latent, "BLOCK_NHD"))

    def section(self, *, state_tokens: int | None = None, state: bool = True) -> Section:
        view = CacheView((self.cache(),), FACTS, planes=self.planes(state))
        return section(view, self.blocks, [self.layer], state_tokens=state_tokens)

    def token(self, t: int) -> list[Tensor]:
        """What is stored of a token in K and the indexer."""
        at = self.blocks[t // self.block_size], t % self.block_size
        return [self.latent[at], self.k[at], self.k_scale[at]]

    def entry(self, e: int) -> Tensor:
        return self.compressed[self.own[e // self.entries], e % self.entries]


def copy_by_hand(src: Engine, dst: Engine, start: int, stop: int, *, state: bool) -> None:
    for t in range(start, stop):
        for to, of in zip(dst.token(t), src.token(t), strict=True):
            to.copy_(of)
    for e in range(start // 4, start // 4 + (stop - start) // 4):
        dst.entry(e).copy_(src.entry(e))
    if state:
        dst.state[dst.slot].copy_(src.state[src.slot])


def assert_same(engine: Engine, expected: Engine) -> None:
    for found, wanted in zip(engine.tensors, expected.tensors, strict=True):
        assert torch.equal(raw(found), raw(wanted))
