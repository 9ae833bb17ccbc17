"""An operator's month: a store of 6,000 entries with a limit, real engines, and `kvx store`.

A real vLLM answers two tenants every day. Other servers, which one writer stands for, store entries
like its own, of other tokens. The clock goes a day at a time: what was written or read on a
day gets the time of that day.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from kvx_core import Directory, Snapshot
from kvx_core.snapshot.chunk_file import chunk_parts
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.inventory import Inventory
from kvx_core.stores.names import entry_name, key_of
from tests import faults
from tests.cli.stores import DAY, kvx, listed, totals
from tests.fakes.vllm import needs_cpu_op
from tests.native import ROOT
from tests.vllm_plugin.engine import Engine, EngineProcess, connector
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

DAYS = 30
LENGTH = 48  # tokens of a prompt
FILE_BYTES = 12288  # on the disk, of a chunk of 16 tokens
TENANT = "shop"
STATS = (ROOT / "kvx_adapters/vllm_plugin/stats.py").read_text()
# Requests with images or adapters are in test_scheduler_half.py and test_stats.py.
METRICS = set(re.findall(r'^    "(\w+)": "', STATS, re.M)) - {"unshared_requests"}
GAUGES = {"store_bytes", "store_files"}


class OtherServers:
    """Store entries like those of some spaces, of other tokens, within the limit of the store."""

    def __init__(self, store: Path, max_bytes: int, spaces: list[str]) -> None:
        self._store, self._max_bytes, self._number = store, max_bytes, 0
        inventory = Inventory(Directory(store))
        self._like = []
        for space in inventory.spaces():
            assert space.name in spaces
            with inventory.opened_entry(space.entries[0]) as entry:
                loaded = Snapshot.of_file(entry.read(entry.kind.layers))
                header = replace(loaded.header, start=0, prefix=space.name)
                self._like.append((space.name, entry.kind, replace(loaded, header=header)))

    def write(self, count: int) -> list[Path]:
        """Stores so many files. Servers that have just started: they count what is there."""
        directory = Directory(self._store, self._max_bytes)
        written = []
        for _ in range(count):
            written.append(self._put(directory))
        return written

    def fill(self) -> list[Path]:
        """Stores files until the next one would be too many."""
        directory = Directory(self._store, self._max_bytes)
        written = [self._put(directory)]
        size = written[0].stat().st_blocks * 512
        while directory.usage.now.num_bytes + 2 * size <= self._max_bytes:
            written.append(self._put(directory))
        return written

    def _put(self, directory: Directory) -> Path:
        """Without a mark: nobody asks for these."""
        i, self._number = self._number, self._number + 1
        space, kind, like = self._like[i % len(self._like)]
        ids = np.arange(i, i + len(like.tokens), dtype=np.int64) + (1 << 32)  # no token's
        name = entry_name(space, key_of(space, ids), kind.id)

        def write(file: BinaryIO) -> None:
            file.write(b"".join(chunk_parts(replace(like, tokens=ids), kind, Secrets())))

        assert directory.put(name, write)
        return self._store / name


@contextmanager
def failing(flag: Path) -> Iterator[None]:
    """The file system fails as the flag's rule says."""
    flag.touch()
    yield
    flag.unlink()


class Server:
    """A vLLM that starts anew now and then, whose metrics are added up."""

    def __init__(self, process: EngineProcess, model: Path, config: Any) -> None:
        self._process, self._model, self._config = process, model, config
        self.metrics: Counter[str] = Counter()

    def days(self, number: int) -> Iterator[tuple[int, Engine]]:
        """The engine on each of so many days."""
        with self._process.engine(
            self._model, disable_log_stats=False, kv_transfer_config=self._config
        ) as engine:
            for day in range(number):
                yield day, engine
            found = {
                name.removeprefix("vllm:kvx_").removesuffix("_total"): value
                for name, value in engine.metrics().items()
                if name.startswith("vllm:kvx_")
            }
        for name, value in found.items():
            self.metrics[name] = (
                max(self.metrics[name], value) if name in GAUGES else (self.metrics[name] + value)
            )


def ask(engine: Engine, seed: int, salt: str | None = None) -> int:
    """Asks a prompt, and waits until it is stored; returns how many tokens came from the store."""
    (output,) = engine.generate([prompt(LENGTH, seed=seed)], max_tokens=1, cache_salt=salt)
    assert output.finish_reason == "length"
    assert engine.call("wait_until_saved")
    engine.call("reset_prefix_cache")
    time.sleep(0.3)  # fresh_seconds: then memory does not answer for the disk
    return output.num_cached_tokens or 0


def entries(store: Path) -> set[Path]:
    return set(store.rglob("*.safetensors"))


def dated(files: Iterable[Path], days_ago: float) -> None:
    """As if these files were last used so many days ago."""
    for file in files:
        with suppress(FileNotFoundError):  # deleted meanwhile
            os.utime(file, (time.time() - days_ago * DAY,) * 2)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where there is such a file system: all files are to be synced."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="kvx-month-", dir=shared if shared.is_dir() else None))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize("num_entries", [6_000])
def test_a_month(num_entries: int, llama: Path, folder: Path, tmp_path: Path) -> None:
    store, backup = folder / "store", folder / "backup"
    broken = {call: tmp_path / call for call in ("open", "list", "write")}
    rules = (f"call={call},error=EIO,path={store}/,if={flag}" for call, flag in broken.items())
    process = EngineProcess(tmp_path / "log", **faults.environment(*rules))
    max_bytes = num_entries * FILE_BYTES

    def config(path: Path) -> Any:
        settings = {"chunk_tokens": 16, "format": "q4_0", "save_generated": False}
        return connector(path, "kv_both", "recompute", max_bytes=max_bytes, **settings)

    server = Server(process, llama, config(store))
    try:
        # Four days of a new store: it works, is damaged, and lies on a disk that fails.
        for day, engine in server.days(4):
            if day == 0:
                assert [ask(engine, 1), ask(engine, 1, TENANT)] == [0, 0]
                assert [ask(engine, 1), ask(engine, 1, TENANT)] == [LENGTH - 1] * 2
            elif day == 1:  # somebody deletes what is about to be loaded
                engine.call("on_next_load", delete=str(store))
                assert ask(engine, 1) == 0
            elif day == 2:
                with failing(broken["write"]):
                    assert ask(engine, 2) == 0
                assert ask(engine, 2) == 0
                for _ in range(2):  # the first finds that it is gone, the second stores it again
                    assert ask(engine, 1, TENANT) == 0
            else:
                with failing(broken["list"]):
                    ask(engine, 2)
            dated(entries(store), DAYS - day)
        spaces = [space["space"] for space in listed(store)]
        assert len(spaces) == 2
        assert {file.stat().st_blocks * 512 for file in entries(store)} == {FILE_BYTES}
        others = OtherServers(store, max_bytes, spaces)

        # Four weeks: other servers bring a tenth more than the store may hold.
        for day, engine in server.days(DAYS - 6):
            if day == 0:
                with failing(broken["open"]):
                    assert ask(engine, 1, TENANT) == 0
                for method in ("walk", "check_rest"):
                    engine.call("fail_once", method=method)
                    ask(engine, 50)
            begun = time.time() - 1
            ask(engine, 100 + day)
            assert ask(engine, 1, TENANT) == LENGTH - 1
            written = others.write(num_entries * 11 // 10 // (DAYS - 6))
            if day % 4 == 0 or day > 20:
                assert totals(store)["bytes"] <= max_bytes
            used = (f for f in entries(store) if f.stat().st_mtime > begun)
            dated([*written, *used], DAYS - 4 - day)

        # Two days of a full store: the engine itself makes room.
        dated(others.fill(), 2)
        full = totals(store)
        assert 0.99 * num_entries <= full["num_entries"] <= num_entries
        for day, engine in server.days(2):
            for expected in (0, LENGTH - 1):
                assert ask(engine, 200 + day) == ask(engine, 300 + day, TENANT) == expected
            assert totals(store)["bytes"] <= max_bytes
            shutil.copytree(store, backup, dirs_exist_ok=True)  # while the engine runs

        moved = {name.removesuffix("_count") for name, value in server.metrics.items() if value > 0}
        assert METRICS - moved == set()

        # What the operator sees, and does.
        assert totals(store)["least_recently_used_seconds"] > 20 * DAY
        assert [space["num_entries"] > num_entries // 3 for space in listed(store)] == [True, True]
        kvx("rm", store, "--older", "15d")
        assert totals(store)["least_recently_used_seconds"] < 15 * DAY
        kvx("trim", store, max_bytes // 10)
        assert 0.99 * max_bytes // 10 < totals(store)["bytes"] <= max_bytes // 10
        num_files = totals(store)["num_files"]
        assert kvx("verify", store).stdout == f"{num_files:,} of {num_files:,} files are good.\n"
        kvx("rm", store, "--salt", TENANT)
        (space,) = listed(store)
        assert space["salt"] == ""
        kvx("rm", store, "--salt", "")
        assert entries(store) == set()

        # The backup is a store.
        restored = Server(process, llama, config(backup))
        for _, engine in restored.days(1):
            assert ask(engine, 201) == ask(engine, 301, TENANT) == LENGTH - 1
    finally:
        process.close()
