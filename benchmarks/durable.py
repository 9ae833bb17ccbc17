"""Long prompts, brought to a disk: chunks of a store beside plain files.

512 MiB of bfloat16 in chunks of 128 tokens, which have been captured: 1,024 of a small model (4
layers, 2 heads x 128), 32 of a larger one (32 layers, 8 heads x 128). A connector's two threads
write them, 128 at a time, each time until they are on the disk.
Beside it as many plain files of the same bytes are written, and then one sync brings them there
(`plain`); and two threads do nothing but the calls of the file system that such a store cannot do
without (`calls`): as many files at a time are written, synced, get their names in 256 folders, each
gets a small file beside it as its mark, and all are synced again. All into new folders of the file
system of the current directory. No file is deleted before the end: for minutes after that, ext4
takes a millisecond for each new one. Run with `python -m benchmarks durable`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.rounds import Contestant, Goal, once
from benchmarks.snapshots import MODELS, Prompt
from kvx_core import BlockTable, Directory, PrefixStore, Snapshot
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.writer import TOGETHER, Writer
from kvx_core.snapshot import Precision
from kvx_core.stores.beneath import sync_file_system

_TOKENS = {"4 layers, 2 heads": 131_072, "32 layers, 8 heads": 4096}
_CHUNK = 128
_PIECE = 2048  # tokens of the caches
_MARK_BYTES = 1136  # of a chunk
_GOAL = 1 / 1.3  # of the speed of plain files and one sync


def run(rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures; prints and returns the results."""
    report.print_head(("plain", "calls"))
    results = []
    for model, tokens in _TOKENS.items():
        num_tokens = tokens // (16 if quick else 1)
        name = f"{num_tokens:,} tokens on the disk, {model}"
        if only in name:
            results += _of_model(name, model, num_tokens, rounds)
    return results


def _of_model(name: str, model: str, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    num_layers, num_heads, _ = MODELS[model]
    with tempfile.TemporaryDirectory(prefix=".kvx-bench-", dir=".") as here:
        folder = Path(here)
        chunks = _chunks(num_layers, num_heads, num_tokens, folder / "chunks")
        memory = [np.ones(chunk.num_bytes, np.uint8) for chunk in chunks]

        def commit(into: Path) -> None:
            store = _store(num_layers, num_heads, into)
            counts = Counts()
            writer = Writer(
                StoreSettings(path=into),
                Boundary(print),
                counts,
                lambda store, chunk: _is_stored(store, chunk, num_layers, num_heads),
            )
            for chunk in chunks:
                writer.add(store, chunk)
            writer.start()
            assert writer.threads.shutdown()
            assert counts.take()["saved_bytes"] > sum(chunk.num_bytes for chunk in chunks)

        def write(into: Path) -> None:
            into.mkdir()
            for i, data in enumerate(memory):
                with (into / f"{i}").open("wb", buffering=0) as file:
                    file.write(data.data)
            os.sync()

        ways = {"kvx": commit, "plain": write, "calls": lambda into: _calls(into, memory)}
        return on_threads(
            name,
            {way: _into_new(folder / way, call) for way, call in ways.items()},
            [1],
            max(rounds // 3, 1),
            sum(chunk.num_bytes for chunk in chunks),
            (Goal("plain", _GOAL),),
            ("plain", "calls"),
        )


def _calls(into: Path, memory: list[npt.NDArray[np.uint8]]) -> None:
    """The calls of the file system, in as many threads and as many at a time as a Writer has."""
    (into / ".tmp").mkdir(parents=True)
    count = len(memory)
    parts = iter([range(i, min(i + TOGETHER, count)) for i in range(0, count, TOGETHER)])
    with ExitStack() as opened:
        root = os.open(into, os.O_RDONLY)
        opened.callback(os.close, root)
        threads = [
            threading.Thread(target=_write_parts, args=(into, root, memory, parts))
            for _ in range(StoreSettings(path=into).writer_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _write_parts(
    into: Path, root: int, memory: list[npt.NDArray[np.uint8]], parts: Iterator[range]
) -> None:
    for part in parts:
        for i in part:
            with (into / f".tmp/{i}").open("xb", buffering=0) as file:
                file.write(memory[i].data)
        sync_file_system(root)
        for i in part:
            folder = into / f"{i % 256:02x}"
            folder.mkdir(exist_ok=True)
            os.link(into / f".tmp/{i}", folder / f"{i}")
            with (into / f".tmp/{i}.mark").open("xb", buffering=0) as file:
                file.write(memory[i][:_MARK_BYTES].data)
            os.link(into / f".tmp/{i}.mark", folder / f"{i}.mark")
        sync_file_system(root)
        for i in part:
            os.unlink(into / f".tmp/{i}")
            os.unlink(into / f".tmp/{i}.mark")


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
    blocks = np.random.default_rng(0).permutation(_PIECE // 16)
    blocks = np.resize(blocks, num_tokens // 16)
    section = replace(prompt.section, block_table=BlockTable.packed(blocks[None]))
    store, tokens = _store(num_layers, num_heads, folder / "store"), np.arange(num_tokens)
    run, chain = store.chunks([section], 0, num_tokens), store.chain_of(tokens)
    chunks = []
    for start, stop in store.spans(num_tokens):
        ids, node = chain.ids(start, stop), chain.node(start // _CHUNK)
        chunk = Snapshot.reserve_of(run, ids, start=start, prefix=node)
        assert chunk is not None
        chunks.append(chunk)
        chunk.fill(run.sections[0])
    return chunks


def _into_new(path: Path, call: Callable[[Path], object]) -> Contestant:
    """The call, timed, into a folder that is not there yet; nothing waits for the disk."""
    count = itertools.count()

    def run() -> float:
        into = path.with_name(f"{path.name}-{next(count)}")
        for file in into.parent.rglob("*"):
            if file.is_file():
                os.truncate(file, 0)  # gives the room back
        os.sync()
        return once(lambda: call(into))()

    return run
