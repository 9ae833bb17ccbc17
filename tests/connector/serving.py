"""Serves requests with toy engines on one store, and says what one alone would have answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvx_core import Directory, PrefixStore
from kvx_core._c.os_files import OpenFile
from kvx_core.snapshot import Precision
from tests.connector.toy_engine import HEADS, LAYERS, VOCAB, Engine

Serve = Callable[..., Engine]


F32 = Precision.of("float32")


def prompt(num_tokens: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCAB, num_tokens).tolist()
    return found


def written(engine: Engine) -> None:
    assert engine.connector.saver._writer.threads.wait(60)


def alone(tokens: list[int], max_tokens: int = 8) -> list[int]:
    return Engine().ask(tokens, max_tokens).answer


class Frozen(Directory):
    """A directory whose file system does not answer while it is frozen."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = threading.Event()
        self.answers.set()
        self.num_calls = 0

    def _wait(self) -> None:
        self.num_calls += 1
        assert self.answers.wait(120)

    def put(self, name: str, write: Callable[[BinaryIO], None], *, durable: bool = True) -> bool:
        self._wait()
        return super().put(name, write, durable=durable)

    def fetch(self, name: str, *rest: Any) -> OpenFile | None:
        self._wait()
        return super().fetch(name, *rest)

    def names(self, folder: str) -> list[str]:
        self._wait()
        return super().names(folder)


def store_in(blobs: Directory, precision: Precision = F32) -> PrefixStore:
    return PrefixStore(
        blobs,
        fingerprint="toy",
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        precision=precision,
        new_chunk_tokens=16,
    )
