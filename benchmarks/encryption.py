"""An encrypted store beside one that is not: files are written, and read and restored.

Chunks of 128 tokens of a prompt, as in `snapshots`, through Directory and through Encrypted, in
memory. A write deletes the files that it replaces. Run with `python -m benchmarks encryption`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.rounds import once
from benchmarks.snapshots import MODELS, Prompt, folder
from kvx_core import BlobStore, Directory, Snapshot
from kvx_core.snapshot import restore_all
from kvx_core.stores.encrypted import Encrypted, Encryption

_VERSUS = ("plain",)


def run(threads: Sequence[int], rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_VERSUS)
    for model, (num_layers, num_heads, num_tokens) in MODELS.items():
        with folder() as path:
            prompt = Prompt(num_layers, num_heads, num_tokens // (4 if quick else 1), path)
            plain = _Files(prompt, Directory(path / "plain"))
            hidden = _Files(prompt, Encrypted(Directory(path / "hidden"), Encryption(bytes(32))))
            for files in (plain, hidden):
                files.write()
                files.read()
            for name in ("write", "read"):
                if only in f"{name}, {model}":
                    results += on_threads(
                        f"{name}, {model}, {prompt.num_tokens} tokens",
                        {"kvx": once(getattr(hidden, name)), "plain": once(getattr(plain, name))},
                        threads,
                        rounds,
                        prompt.num_bytes,
                        (),
                        _VERSUS,
                    )
    return results


class _Files:
    """The chunks of a prompt in a store."""

    def __init__(self, prompt: Prompt, blobs: BlobStore) -> None:
        self._prompt, self._blobs = prompt, blobs

    def write(self) -> None:
        for i, chunk in enumerate(self._prompt.chunks):
            self._blobs.delete(f"chunks/{i}")
            assert self._blobs.put(f"chunks/{i}", chunk.save)

    def read(self) -> None:
        section = self._prompt.section
        for i in range(len(self._prompt.chunks)):
            file = self._blobs.open(f"chunks/{i}")
            assert file is not None
            with file, Snapshot.open(file, name=f"chunks/{i}") as found:
                start = found.header.start
                part = found.read(section.layers)
                restore_all([part], section, start, start + len(found.tokens))
