"""Loads of a store's files, from 1 to 32 layers, beside the work that they cannot do without.

16 chunks of 128 tokens, dim 128, bfloat16, in memory: a store reads and checks their files,
and copies them into paged caches. `plain` reads as many bytes into memory that is there, takes
their XXH3 at once, as long as they are in the processor's cache, and makes one migration of all
tokens; `unchecked` is that without XXH3: what lies between these two is the price of the check.
`encrypted` and `signed` are loads of the same chunks from such stores. Run with `python -m
benchmarks chunk_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_digest

from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.rounds import Goal, once
from benchmarks.snapshots import Prompt, folder
from kvx_core import Directory, PrefixStore
from kvx_core.snapshot import Precision

_SIZES = ((1, 1), (4, 1), (8, 2), (16, 4), (32, 8))  # layers and heads: files of 64 KiB to 16 MiB
_TOKENS = 2048
_READ_BYTES = 1 << 20  # with one call, as the store does
_VERSUS = ("plain", "unchecked", "encrypted", "signed")
_LEAST, _SMALL, _SMALL_BYTES = 0.85, 0.7, 256 << 10  # times as fast as `plain`; in smaller files
_ENCRYPTED = 1.5  # times as long as what is not
_SECRET = bytes(range(32))


def run(threads: Sequence[int], rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_VERSUS)
    for num_layers, num_heads in _SIZES:
        size = num_layers * num_heads * 64 << 10
        name = f"{num_layers} layers, files of {size >> 10} KiB"
        if only not in name:
            continue
        with folder() as path:
            files = _Files(num_layers, num_heads, _TOKENS // (4 if quick else 1), path)
            files.verify()
            results += on_threads(
                name,
                {way: once(call) for way, call in files.ways().items()},
                threads,
                rounds,
                files.prompt.num_bytes,
                (Goal("plain", _SMALL if size < _SMALL_BYTES else _LEAST),),
                _VERSUS,
            )
            taken = results[-1]["kvx_speedup"]["encrypted"]
            verdict = "met" if taken <= _ENCRYPTED else "NOT MET"
            print(f"{'':30} encrypted takes {taken:.2f} <= {_ENCRYPTED} {verdict}")
    return results


class _Files:
    """The chunks of a prompt in stores of every sort, and their bytes in plain files."""

    def __init__(self, num_layers: int, num_heads: int, num_tokens: int, path: Path) -> None:
        self.prompt = Prompt(num_layers, num_heads, num_tokens, path)
        self._num_heads, self._path = num_heads, path
        self._stores = {
            "kvx": self._store("plain"),
            "encrypted": self._store("encrypted", encryption_key=_SECRET),
            "signed": self._store("signed", key=_SECRET),
        }
        self.prompt.write()

    def _store(
        self, name: str, *, key: bytes | None = None, encryption_key: bytes | None = None
    ) -> Callable[[], object]:
        """What loads the prompt from a new store that has its chunks."""
        prompt = self.prompt
        num_layers = len(prompt.section.layers)
        store = PrefixStore(
            Directory(self._path / name),
            fingerprint=prompt.store.fingerprint,
            num_layers=num_layers,
            total_kv_heads=self._num_heads,
            precision=Precision.of("bfloat16"),
            chunk_tokens=prompt.store.chunk_tokens,
            key=key,
            encryption_key=encryption_key,
        )
        store.commit_all(prompt.captured_for(store))
        match = store.lookup(prompt.ids)
        assert match.num_tokens == prompt.num_tokens
        return lambda: store.load(match, 0, prompt.num_tokens, [prompt.section])

    def ways(self) -> dict[str, Callable[[], object]]:
        return {**self._stores, "plain": self._plain, "unchecked": self._unchecked}

    def _plain(self, *, checked: bool = True) -> None:
        for i, data in enumerate(self.prompt.memory):
            with (self._path / f"{i}.plain").open("rb", buffering=0) as file:
                for at in range(0, len(data), _READ_BYTES):
                    part = data[at : at + _READ_BYTES].data
                    file.readinto(part)
                    if checked:
                        xxh3_128_digest(part)
        self.prompt.migrate(self.prompt.dense, self.prompt.paged)

    def _unchecked(self) -> None:
        self._plain(checked=False)

    def verify(self) -> None:
        """Raises AssertionError unless loads leave the bytes that were captured."""
        caches: list[Any] = [
            tensor.owner
            for layer in self.prompt.section.view.layers
            for tensor in layer.tensors.values()
        ]
        whole = [cache.view(torch.int16).numpy().copy() for cache in caches]
        for load in self._stores.values():
            for cache in caches:
                cache.view(torch.int16).numpy()[:] = 0x5A5A
            load()
            for cache, expected in zip(caches, whole, strict=True):
                assert np.array_equal(cache.view(torch.int16).numpy(), expected)
