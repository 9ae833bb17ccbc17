"""Snapshots of chunks beside the copies that they stand for: captured, committed and loaded.

A prompt in the caches of a model, in blocks of 16 tokens. Capture: chunks of 128 tokens out of the
caches into memory of a pool, beside one migration of the same tokens into a cache that lies there
already. Commit: as many files beside plain files with the same bytes, in the same folder; nothing
is synced. Load: a store finds nothing anew, reads the files of the prompt, checks them and copies
them into the caches, beside plain reads of the same bytes into memory and the same migration back.
Run with `python -m benchmarks snapshots`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.rounds import Goal, once
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    Directory,
    PrefixStore,
    Snapshot,
    describe,
    migrate,
)
from kvx_core.desc.tables import BlockTable
from kvx_core.snapshot import MemoryPool, Precision, Section

_BLOCK, _CHUNK, _DIM = 16, 128, 128
MODELS = {"32 layers, 8 heads": (32, 8, 2048), "4 layers, 2 heads": (4, 2, 8192)}
_FACTS = CacheFacts(
    fingerprint="a model", rotary="half", rotary_dim=_DIM, rope_applied=True, first_kv_head=0
)
_VERSUS = ("migrate", "plain")
_CAPTURE, _COMMIT, _LOAD = 0.7, 0.6, 0.5


def run(threads: Sequence[int], rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_VERSUS)
    for model, (num_layers, num_heads, num_tokens) in MODELS.items():
        with folder() as path:
            prompt = Prompt(num_layers, num_heads, num_tokens // (4 if quick else 1), path)
            for name, (calls, goals) in prompt.cases().items():
                if only in f"{name}, {model}":
                    work = {n: once(call) for n, call in calls.items()}
                    results += on_threads(
                        f"{name}, {model}, {prompt.num_tokens} tokens",
                        work,
                        threads,
                        rounds,
                        prompt.num_bytes,
                        goals,
                        _VERSUS,
                    )
    return results


@contextmanager
def folder() -> Iterator[Path]:
    """A folder in memory where there is one, so that no disk is measured."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="kvx-", dir=shared if shared.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Prompt:
    """A prompt in an engine's caches, and its chunks."""

    def __init__(self, num_layers: int, num_heads: int, num_tokens: int, folder: Path) -> None:
        self.num_tokens, self.folder = num_tokens, folder
        num_blocks = num_tokens // _BLOCK
        view = _caches(num_layers, num_blocks, _BLOCK, num_heads, dense=False)
        table = np.random.default_rng(0).permutation(num_blocks)[None]
        self.section = Section(tuple(range(num_layers)), view, BlockTable.packed(table))
        self.num_bytes = num_tokens * view.bytes_per_token()
        self.paged = view.at(block_table=table)
        self.dense = _caches(num_layers, 1, num_tokens, num_heads, dense=True).at()
        self.pool = MemoryPool(_CHUNK)
        self.store = PrefixStore(
            Directory(folder / "store"),
            fingerprint=_FACTS.fingerprint or "",
            num_layers=num_layers,
            total_kv_heads=num_heads,
            precision=Precision.of("bfloat16"),
            chunk_tokens=_CHUNK,
        )
        self.ids = np.arange(num_tokens)
        self.nodes = self.store.nodes(self.ids)
        self.chunks = self.capture()
        self.store.commit_all(self.chunks)
        self.match = self.store.lookup(self.ids)
        assert self.match.num_tokens == num_tokens
        self.memory = [np.empty(chunk.num_bytes, np.uint8) for chunk in self.chunks]
        self._verify()

    def capture(self) -> list[Snapshot]:
        return self.captured_for(self.store)

    def captured_for(self, store: PrefixStore) -> list[Snapshot]:
        run = store.chunks([self.section], 0, self.num_tokens, pool=self.pool)
        starts = range(0, self.num_tokens, _CHUNK)
        found = (
            Snapshot.reserve_of(run, self.ids[at : at + _CHUNK], start=at, prefix=node)
            for at, node in zip(starts, self.nodes, strict=False)
        )
        chunks = [chunk for chunk in found if chunk is not None]
        assert len(chunks) == len(starts)
        Snapshot.fill_all(chunks, self.section)
        return chunks

    def cases(self) -> dict[str, tuple[dict[str, Callable[[], object]], Sequence[Goal]]]:
        self.commit()
        self.write()
        return {
            "capture": (
                {"kvx": self.capture, "migrate": lambda: self.migrate(self.paged, self.dense)},
                (Goal("migrate", _CAPTURE),),
            ),
            "commit": ({"kvx": self.commit, "plain": self.write}, (Goal("plain", _COMMIT),)),
            "load": ({"kvx": self.load, "plain": self.read}, (Goal("plain", _LOAD),)),
        }

    def migrate(self, src: Any, dst: Any) -> None:
        migrate(src, dst, [self.num_tokens])

    def commit(self) -> None:
        for i, chunk in enumerate(self.chunks):
            chunk.save(self.folder / f"{i}.safetensors")

    def write(self) -> None:
        for i, data in enumerate(self.memory):
            with (self.folder / f"{i}.plain").open("wb", buffering=0) as file:
                file.write(data.data)

    def load(self) -> None:
        self.store.load(self.match, 0, self.num_tokens, [self.section])

    def read(self) -> None:
        for i, data in enumerate(self.memory):
            with (self.folder / f"{i}.plain").open("rb", buffering=0) as file:
                file.readinto(data.data)
        self.migrate(self.dense, self.paged)

    def _verify(self) -> None:
        """Raises AssertionError unless chunks have the bytes of a migration."""
        self.migrate(self.paged, self.dense)
        for layer, cache in enumerate(self.dense.view.layers):
            for kind, tensor in cache.tensors.items():
                wanted = tensor.owner.view(torch.int16).numpy().reshape(self.num_tokens, -1)
                for chunk in self.chunks:
                    found = chunk.array(f"layers.{layer}.{kind}").view(np.int16)
                    begin = chunk.header.start
                    expected = wanted[begin : begin + _CHUNK]
                    assert np.array_equal(found.reshape(_CHUNK, -1), expected)


def _caches(
    num_layers: int, num_blocks: int, block_size: int, num_heads: int, *, dense: bool
) -> CacheView:
    shape = 2, num_blocks, block_size, num_heads, _DIM
    caches = [torch.randn(shape).to(torch.bfloat16) for _ in range(num_layers)]
    layers = tuple(
        CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in caches
    )
    return CacheView(layers, replace(_FACTS, total_kv_heads=num_heads), dense=dense)
