"""A long prompt of a small model, brought to a disk: chunks of a store beside plain files.

131,072 tokens, 4 layers, 2 heads x 128, bfloat16: 1,024 chunks of 128 tokens, which have been
captured. A connector's two threads write them, 64 at a time, each time until they are on the disk.
Beside it as many plain files of the same bytes are written, and then one sync brings them there.
Both into new folders of the file system of the current directory. Run with
`python -m benchmarks durable`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.rounds import Contestant, Goal, once
from benchmarks.snapshots import MODELS, Prompt
from kvx_core import BlockTable, Directory, PrefixStore, Snapshot
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.writer import Writer
from kvx_core.snapshot import Precision

_MODEL, _CHUNK = "4 layers, 2 heads", 128
_PIECE = 8192  # tokens of the caches
_GOAL = 1 / 1.3  # of the speed of plain files and one sync


def run(rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures; prints and returns the results."""
    num_layers, num_heads, _ = MODELS[_MODEL]
    num_tokens = 131_072 // (16 if quick else 1)
    name = f"{num_tokens:,} tokens on the disk, {_MODEL}"
    if only not in name:
        return []
    with tempfile.TemporaryDirectory(prefix=".kvx-bench-", dir=".") as here:
        folder = Path(here)
        chunks = _chunks(num_layers, num_heads, num_tokens, folder)
        memory = [np.ones(chunk.num_bytes, np.uint8) for chunk in chunks]

        def commit() -> None:
            store = _store(num_layers, num_heads, folder / "store")
            counts = Counts()
            writer = Writer(
                StoreSettings(path=folder / "store"),
                Boundary(print),
                counts,
                lambda store, chunk: _is_stored(store, chunk, num_layers, num_heads),
            )
            for chunk in chunks:
                writer.add(store, chunk)
            assert writer.threads.shutdown()
            assert counts.take()["saved_bytes"] > sum(chunk.num_bytes for chunk in chunks)

        def write() -> None:
            (folder / "plain").mkdir()
            for i, data in enumerate(memory):
                with (folder / f"plain/{i}").open("wb", buffering=0) as file:
                    file.write(data.data)
            os.sync()

        report.print_head(("plain",))
        return on_threads(
            name,
            {"kvx": _into_new(folder, commit), "plain": _into_new(folder, write)},
            [1],
            max(rounds // 3, 1),
            sum(chunk.num_bytes for chunk in chunks),
            (Goal("plain", _GOAL),),
            ("plain",),
        )


def _store(num_layers: int, num_heads: int, path: Path) -> PrefixStore:
    return PrefixStore(
        Directory(path),
        fingerprint="a model",
        num_layers=num_layers,
        total_kv_heads=num_heads,
        precision=Precision.of("bfloat16"),
        new_chunk_tokens=_CHUNK,
    )


def _is_stored(store: PrefixStore, chunk: Snapshot, num_layers: int, num_heads: int) -> bool:
    """As a Saver asks."""
    start, tokens = chunk.header.start, chunk.tokens
    return not store.missing(
        tokens,
        start,
        start + len(tokens),
        range(num_layers),
        (0, num_heads),
        node=chunk.header.prefix,
        base=start,
        from_memory=False,
    )


def _chunks(num_layers: int, num_heads: int, num_tokens: int, folder: Path) -> list[Snapshot]:
    """A prompt in chunks. Its blocks lie in the caches several times over."""
    prompt = Prompt(num_layers, num_heads, _PIECE, folder)
    blocks = np.tile(np.random.default_rng(0).permutation(_PIECE // 16), num_tokens // _PIECE)
    section = replace(prompt.section, block_table=BlockTable.packed(blocks[None]))
    store, tokens = _store(num_layers, num_heads, folder / "store"), np.arange(num_tokens)
    run, chain = store.chunks([section], 0, num_tokens), store.chain_of(tokens)
    chunks = []
    for start, stop in store.spans(num_tokens):
        chunk = store.reserve(tokens, start, stop, run, node=chain.node(start // _CHUNK))
        assert chunk is not None
        chunks.append(chunk)
        chunk.fill(run.sections[0])
    return chunks


def _into_new(folder: Path, call: Callable[[], object]) -> Contestant:
    """The call, timed, with nothing in the folder and nothing that waits for the disk."""

    def run() -> float:
        for each in folder.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        os.sync()
        return once(call)()

    return run
