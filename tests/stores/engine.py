"""An engine whose vectors depend on all tokens before them, and stores of what it computes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvx_core import (
    BlobStore,
    Directory,
    PrefixStore,
    Section,
)
from kvx_core.snapshot import Precision
from kvx_core.types import Layout
from tests.caches import LAYOUTS, Cache, Geometry, assert_same_bytes
from tests.snapshot.sections import section_of

Tokens = Sequence[int]


LAYERS, HEADS, DIM = 3, 4, 8


def store_in(blobs: BlobStore | Path, **options: Any) -> PrefixStore:
    options = {
        "chunk_tokens": 16,
        "num_layers": LAYERS,
        "total_kv_heads": HEADS,
        "precision": Precision.of(torch.float32),
    } | options
    blobs = Directory(blobs) if isinstance(blobs, Path) else blobs
    return PrefixStore(blobs, fingerprint="model", **options)


@dataclass
class Engine:
    """One rank: a cache of some layers and heads, and the blocks of its only sequence."""

    layers: range = range(LAYERS)
    heads: range = range(HEADS)
    layout: str = "hnd"
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    num_tokens: int = 80
    seed: int = 0
    dim: int = DIM

    def __post_init__(self) -> None:
        num_blocks = -(-self.num_tokens // self.block_size)
        sizes = Geometry(
            num_blocks=num_blocks + 2,
            block_size=self.block_size,
            num_kv_heads=len(self.heads),
            head_dim=self.dim,
            num_layers=len(self.layers),
        )
        self.cache: Cache = LAYOUTS[self.layout](sizes, self.dtype, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        self.blocks = torch.randperm(num_blocks + 2, generator=generator)[:num_blocks].tolist()

    def sections(self, parts: int = 1, **options: Any) -> list[Section]:
        """All layers, dealt out to sections."""
        return [
            section_of(
                self.cache,
                self.layers[i::parts],
                self.blocks,
                heads=(self.heads[0], HEADS),
                at=range(len(self.layers))[i::parts],
                **{"fingerprint": "model", **options},
            )
            for i in range(min(parts, len(self.layers)))
        ]

    def place(self, token: int) -> tuple[int, int]:
        return self.blocks[token // self.block_size], token % self.block_size

    def compute(self, tokens: Tokens, start: int = 0, stop: int | None = None) -> Engine:
        """What a model would do: the rows of these tokens."""
        chosen = torch.arange(start, len(tokens) if stop is None else stop)
        rows = rows_of(tokens, self.dim)[chosen].to(self.dtype)
        blocks = torch.tensor(self.blocks)[chosen // self.block_size]
        for i, layer in zip(self.layers, self.cache.layers, strict=True):
            for kv, half in enumerate(layer.halves()):
                heads = rows[:, i, kv, self.heads[0] : self.heads[-1] + 1]
                is_nhd = half.layout is Layout.BLOCK_NHD
                tensor = half.tensor.transpose(1, 2) if is_nhd else half.tensor
                tensor[blocks, :, chosen % self.block_size] = heads
        return self

    def check(self, tokens: Tokens, start: int, stop: int) -> None:
        """Tokens start to stop have been loaded into a new engine, and nothing else."""
        assert_same_bytes(self.cache, replace(self).compute(tokens, start, stop).cache)


def rows_of(tokens: Tokens, dim: int = DIM) -> torch.Tensor:
    """[token, layer, kv, head, dim] integers that BF16 can hold, from the tokens up to each."""
    crcs, crc = [], 0
    for token in tokens:
        crc = zlib.crc32(int(token).to_bytes(8, "little"), crc)
        crcs.append(crc)
    shape = (len(crcs), LAYERS, 2, HEADS, dim)
    index = np.arange(np.prod(shape[1:])).reshape(1, *shape[1:])
    mixed = (np.array(crcs).reshape(-1, 1, 1, 1, 1) ^ (index * 2654435761)) % 1009 // 4
    return torch.from_numpy(mixed.astype(np.float32))


def save(
    store: PrefixStore, tokens: Tokens, engine: Engine | None = None, parts: int = 1
) -> list[int]:
    """Stores all spans of a prompt, as one rank; the bytes of each file."""
    engine = engine or Engine()
    engine.compute(tokens)
    written = []
    for start, stop in store.spans(len(tokens)):
        snapshot = store.capture(tokens, start, stop, engine.sections(parts))
        assert snapshot is not None
        written.append(store.commit(snapshot))
    return written


def ranks(*shapes: tuple[range, range], **options: Any) -> list[Engine]:
    return [Engine(layers=layers, heads=heads, **options) for layers, heads in shapes]


def damage(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = path.read_bytes()
        if name == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif name == "empty":
            path.write_bytes(b"")
        elif name == "foreign":
            path.write_bytes(os.urandom(len(data)))
        elif name == "header":
            path.write_bytes(data[:8] + b"?" + data[9:])
        elif name == "folder":
            path.unlink()
            path.mkdir()
        elif name == "pipe":
            path.unlink()
            os.mkfifo(path)
        elif name == "loop":
            path.unlink()
            path.symlink_to(path.name)

    return apply
