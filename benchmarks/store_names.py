"""What names of a store cost, and what lookups by them lose, as the entries of one template grow.

Entries of at most 128 tokens with the same parent in four shapes: full chunks, ends of prompts,
ends that differ in their last token only, and conversations that grow. Marks alone, in a folder of
the file system of the current directory; no entry has files. After 100, 10,000, 100,000 and
1,000,000 entries: the CPU time of the calling thread that a save takes for its mark, and that a
lookup takes that finds no whole entry by its name and reads marks, each from the disk; one in a
node that has none (`nothing`); and how many tokens the lookups lose against the entry that shares
most, which a sorted list in memory finds. Those among 100 entries are measured for ten templates.
Run with `python -m benchmarks store_names`.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import tempfile
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvx_core import Directory
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.index import Index
from kvx_core.stores.marks import Marks
from kvx_core.stores.names import Ids, key_of
from tests.prompts import CHUNK, SHAPES, Best, Prompts

COUNTS = (100, 10_000, 100_000, 1_000_000)
_SPACE = hashlib.sha256(b"a space").hexdigest()
_SAMPLES, _TEMPLATES = 1000, 10  # calls that are timed at each count; see above
_TIMES, _LOSS_MEAN = 2.0, 1.0  # goals: as long as among 100 entries; tokens


class _Node:
    """Marks below one parent."""

    def __init__(self, folder: Path, shape: str, seed: int) -> None:
        self._marks = Marks(
            Directory(folder), Secrets(), Index(fresh_seconds=0), lambda _, lists=False: ()
        )
        self._parent = hashlib.sha256(str(seed).encode()).hexdigest()
        self.prompts = Prompts(SHAPES[shape], seed)
        self.entries: list[Ids] = []
        self._keys: set[str] = set()

    def grow(self, count: int) -> list[float]:
        """Saves so many entries more; the CPU seconds of each."""
        seconds = []
        for _ in range(count):
            ids = self.prompts.entry()
            self.entries.append(ids.astype(np.uint32))  # what Best needs, in half of the bytes
            self._keys.add(key_of(self._parent, ids))
            begin = time.thread_time()
            self._marks.publish(_SPACE, self._parent, ids, CHUNK)
            seconds.append(time.thread_time() - begin)
        return seconds

    def look_up(self, count: int) -> tuple[list[float], list[float], list[int]]:
        """CPU seconds of lookups and of some that find nothing; the tokens that the former lose."""
        best = Best(self.entries)
        seconds, nothing, losses = [], [], list[int]()
        for i in range(count):
            ids = self.prompts.query()
            empty = hashlib.sha256(f"{len(self.entries)} {i}".encode()).hexdigest()
            for parent, times in ((empty, nothing), (self._parent, seconds)):
                begin = time.thread_time()
                found = self._marks.candidates(_SPACE, parent, ids, CHUNK)
                times.append(time.thread_time() - begin)
            shared = found[0][0] if found else 0
            if key_of(self._parent, ids) in self._keys:
                shared = len(ids)
            losses.append(best.shared(ids) - shared)
        return seconds, nothing, losses


def run(
    only: str, *, quick: bool, most: int = COUNTS[-1], samples: int = _SAMPLES
) -> list[dict[str, Any]]:
    """Measures; prints and returns the results.

    most: entries
    """
    most, samples = (1000, 100) if quick else (most, samples)
    ids = np.arange(CHUNK, dtype=np.int64)
    key_us = 1e6 * min(timeit.repeat(lambda: key_of(_SPACE, ids), number=1000, repeat=9)) / 1000
    print(f"a key of {CHUNK} tokens: {key_us:.2f} us")
    print(f"\n{'':34}{'save':^22}{'lookup':^22}{'nothing':^16}{'tokens lost':^14}")
    print(
        f"{'':34}" + f"{'p50':>8}{'p99':>7}{'x 100':>7}" * 2 + f"{'p50':>9}{'p99':>7}  mean  most"
    )
    rows = []
    for shape in SHAPES:
        if only not in shape:
            continue
        first: dict[str, Any] | None = None
        for count, times in _measured(shape, most, samples):
            row = _row(shape, count, times, first)
            first = first or row
            row["key_us"] = key_us
            rows.append(row)
            _print(row)
    return rows


_Times = tuple[list[float], list[float], list[float], list[int]]


def _measured(shape: str, most: int, samples: int) -> Iterator[tuple[int, _Times]]:
    """Of each count the seconds of saves, lookups and lookups of nothing, and tokens lost."""
    with _folder() as folder:
        found: _Times = ([], [], [], [])
        for seed in range(_TEMPLATES):
            node = _Node(folder, shape, seed)
            node.grow(COUNTS[0])
            _add(found, node, samples // _TEMPLATES)
        yield COUNTS[0], found
        node = _Node(folder, shape, _TEMPLATES)
        for count in (*(n for n in COUNTS[1:] if n < most), most):
            node.grow(count - len(node.entries))
            found = ([], [], [], [])
            _add(found, node, samples)
            yield count, found


def _add(found: _Times, node: _Node, samples: int) -> None:
    gc.collect()
    gc.disable()
    try:
        for times, more in zip(found[1:], node.look_up(samples), strict=True):
            times += more  # type: ignore[operator]
        found[0].extend(node.grow(samples))
    finally:
        gc.enable()


@contextmanager
def _folder() -> Iterator[Path]:
    """A new one, with the folders of a large store, whatever the number of entries."""
    folder = Path(tempfile.mkdtemp(prefix=".kvx-bench-", dir="."))
    try:
        for i in range(1 << 12):
            os.makedirs(folder / _SPACE / f"{i:03x}")
        yield folder
    finally:
        shutil.rmtree(folder)


def _row(shape: str, count: int, times: _Times, first: dict[str, Any] | None) -> dict[str, Any]:
    us = {
        name: {f"p{p}": 1e6 * float(np.percentile(seconds, p)) for p in (50, 99)}
        for name, seconds in zip(("save", "lookup", "nothing"), times[:3], strict=True)
    }
    among = us if first is None else first["us"]
    ratio = {name: {p: us[name][p] / among[name][p] for p in us[name]} for name in us}
    loss = {"mean": float(np.mean(times[3])), "most": int(max(times[3]))}
    return {
        "case": f"{shape}, {count:,} entries",
        "shape": shape,
        "entries": count,
        "samples": len(times[0]),
        "us": us,
        "times_100": ratio,
        "tokens_lost": loss,
        "goals": {
            "times_100": _TIMES,
            "tokens_lost_mean": _LOSS_MEAN,
            "tokens_lost_most": CHUNK // 8,
        },
        "met": {
            "times_100": max(ratio["save"]["p50"], ratio["lookup"]["p50"]) <= _TIMES,
            "tokens_lost_mean": loss["mean"] < _LOSS_MEAN,
            "tokens_lost_most": loss["most"] <= CHUNK // 8,
        },
    }


def _print(row: dict[str, Any]) -> None:
    cells = "".join(
        f"{row['us'][name]['p50']:>8.0f}{row['us'][name]['p99']:>7.0f}"
        f"{row['times_100'][name]['p50']:>7.2f}"
        for name in ("save", "lookup")
    )
    nothing, loss = row["us"]["nothing"], row["tokens_lost"]
    missed = ", ".join(name for name, is_met in row["met"].items() if not is_met)
    print(
        f"{row['case']:34}{cells}{nothing['p50']:>9.0f}{nothing['p99']:>7.0f}"
        f"{loss['mean']:>6.2f}{loss['most']:>6}   {f'NOT MET: {missed}' if missed else 'met'}",
        flush=True,
    )
