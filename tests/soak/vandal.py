"""Damages a store's files while it is in use, and makes the file system fail."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tests import faults
from tests.hostile_entries import hostile_entries

CONFIG = "kvx-store.json"
# Of the file system, while the file of that name exists: what the store's calls meet.
PHASES = {
    "errors": (
        "call=read,error=EIO,chance=0.05,seed=1",
        "call=open,error=ESTALE,chance=0.05,seed=2",
        "call=stat,error=ESTALE,chance=0.05,seed=3",
        "call=write,error=ENOSPC,chance=0.1,seed=4",
        "call=sync+link+rename+mkdir,error=EIO,chance=0.1,seed=5",
        "call=list+unlink+utime,error=EIO,chance=0.05,seed=6",
        "call=open,error=EMFILE,chance=0.02,seed=7",
        "call=close,error=EIO,chance=0.1,seed=10",
    ),
    "full": ("call=write+mkdir,error=ENOSPC",),
    "short": ("call=read+write,short=1,chance=0.3,seed=8",),
    "slow": ("call=read+write+open+list+sync,delay=20,chance=0.3,seed=9",),
    "stale": ("call=open+read+list,error=ESTALE",),
}


def environment(store: Path, flags: Path) -> dict[str, str]:
    """Of a process that has the faults of the phases; their files lie in `flags`."""
    return faults.environment(
        *(
            f"{rule},path={store}/,if={flags / phase}"
            for phase, rules in PHASES.items()
            for rule in rules
        )
    )


class Phases:
    """Faults on and off: a phase, then calm for as long."""

    def __init__(self, flags: Path, seconds: float) -> None:
        flags.mkdir()
        self._flags, self._seconds = flags, seconds
        self.now = "calm"

    def run(self, ended: threading.Event) -> None:
        chance = random.Random(5)
        while not ended.is_set():
            self.now = "calm"
            if ended.wait(self._seconds):
                return
            self.now = chance.choice(sorted(PHASES))
            flag = self._flags / self.now
            flag.touch()
            ended.wait(self._seconds)
            flag.unlink()


class Vandal:
    """Damages files of a store: as disks, administrators and attackers without a key do."""

    def __init__(self, store: Path, seed: int) -> None:
        self._store, self._chance = store, random.Random(seed)
        self._hostile: Iterator[tuple[str, bytes]] = iter(())
        self.counts: Counter[str] = Counter()

    def run(self, ended: threading.Event) -> None:
        acts: list[Callable[[Path], None]] = [
            *(self.replace_by_hostile, self.add_hostile) * 4,
            *(self.truncate, self.grow, self.flip_a_bit) * 3,
            *(self.delete, self.swap, self.replace_by_link, self.replace_by_pipe),
            *(self.damage_a_mark, self.damage_a_record),
            *(self.replace_by_folder, self.delete_folder, self.garble_config),
        ]
        while not ended.wait(self._chance.uniform(0.1, 1.5)):
            with suppress(OSError, ValueError):  # an engine was faster
                self._repair()
                files = _files(self._store)
                if files:
                    act = self._chance.choice(acts)
                    act(self._chance.choice(files))
                    self.counts[act.__name__.replace("_", " ")] += 1

    def _repair(self) -> None:
        """Takes the oldest of what is no file away, so that its entry can be stored again."""
        others = set(self._store.rglob("*.safetensors")).difference(_files(self._store))
        if len(others) > 8:
            path = min(others, key=lambda path: path.lstat().st_mtime)
            if stat.S_ISDIR(path.lstat().st_mode):
                path.rmdir()
            else:
                path.unlink()

    def truncate(self, path: Path) -> None:
        os.truncate(path, self._chance.randrange(path.stat().st_size))

    def grow(self, path: Path) -> None:
        """By a hole, which takes no disk."""
        os.truncate(path, path.stat().st_size + (64 << 20))

    def flip_a_bit(self, path: Path) -> None:
        with path.open("r+b") as file:
            at = self._chance.randrange(path.stat().st_size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._chance.randrange(8)]))

    def replace_by_hostile(self, path: Path) -> None:
        """As a whole, or written over what is there."""
        content = self._next_hostile(path)
        if self._chance.random() < 0.5:
            path.write_bytes(content)
        else:
            temporary = path.with_name(".hostile")
            temporary.write_bytes(content)
            temporary.replace(path)

    def add_hostile(self, path: Path) -> None:
        """Beside it: another entry, or one of another kind."""
        key, kind, ending = path.name.split(".")
        if self._chance.random() < 0.5:
            key = f"{self._chance.getrandbits(256):064x}"
        else:
            kind = f"{self._chance.getrandbits(128):032x}"
        path.with_name(f"{key}.{kind}.{ending}").write_bytes(self._next_hostile(path))

    def damage_a_mark(self, path: Path) -> None:
        """Or has another one in its place."""
        marks = [file for file in path.parents[1].rglob("*.mark") if _is_file(file)]
        self._change(self._chance.choice(marks), marks)

    def damage_a_record(self, path: Path) -> None:
        """Of a kind, or of the space; or has another one in its place."""
        records = [file for file in path.parents[1].rglob("*.json") if _is_file(file)]
        self._change(self._chance.choice(records), records)

    def _change(self, path: Path, others: list[Path]) -> None:
        acts = (self.truncate, self.grow, self.flip_a_bit, self.delete)
        if self._chance.random() < 0.8:
            self._chance.choice(acts)(path)
        else:
            path.write_bytes(self._chance.choice(others).read_bytes())

    def delete(self, path: Path) -> None:
        path.unlink()

    def swap(self, path: Path) -> None:
        """The content of another entry."""
        path.write_bytes(self._chance.choice(_files(self._store)).read_bytes())

    def replace_by_link(self, path: Path) -> None:
        path.unlink()
        path.symlink_to(self._chance.choice(["/dev/zero", "/etc/passwd", path.name, "/nowhere"]))

    def replace_by_pipe(self, path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def replace_by_folder(self, path: Path) -> None:
        path.unlink()
        path.mkdir()

    def delete_folder(self, path: Path) -> None:
        shutil.rmtree(path.parents[self._chance.randrange(2)])

    def garble_config(self, path: Path) -> None:
        """For a moment: an engine that starts then has no store."""
        config = self._store / CONFIG
        good = config.read_bytes()
        config.write_bytes(good[: self._chance.randrange(len(good))])
        threading.Event().wait(1)
        config.write_bytes(good)

    def _next_hostile(self, path: Path) -> bytes:
        """One after the other, each made from a file that is good as far as we know."""
        for name, content in self._hostile:
            if not name.startswith("forged"):  # those are right in every way: a key tells
                return content
        good = path.read_bytes()
        if good[8:9] != b"{":
            raise OSError
        with suppress(Exception):  # made from what has been damaged already
            self._hostile = hostile_entries(good)
            return next(self._hostile)[1]
        self._hostile = iter(())
        raise OSError


def _files(store: Path) -> list[Path]:
    """Regular files alone: to read a pipe, or a link to a device, would take for ever."""
    found = []
    for path in store.rglob("*.safetensors"):
        if _is_file(path):
            found.append(path)
    return found


def _is_file(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False
