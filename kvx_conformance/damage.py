"""Damage of a store's files, as disks, administrators and attackers without a key do it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Act: TypeAlias = Callable[[Path, random.Random], None]  # on one file


def files(store: Path) -> list[Path]:
    """All regular files, in an order that does not change."""
    return sorted(path for path in store.rglob("*") if path.is_file() and not path.is_symlink())


def numbers(store: Path) -> list[Path]:
    """Files that are large enough for numbers, in an order that does not change."""
    return [path for path in files(store) if path.stat().st_size >= 4096]


def delete_half(store: Path, chance: random.Random) -> None:
    """Each file is gone with a chance of one half."""
    for path in files(store):
        if chance.random() < 0.5:
            path.unlink()


def flip(path: Path, chance: random.Random) -> None:
    """One bit, in the second half of the file, where numbers are."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(at := chance.randrange(size // 2, size))
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def flip_many(path: Path, chance: random.Random) -> None:
    """The same of many bytes: a bit that makes a number much larger or smaller, in some of them."""
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2 + chance.randrange(61), len(content), 61):
        content[at] ^= 0x40
    path.write_bytes(content)


def overwrite(path: Path, chance: random.Random) -> None:
    """A page of other bytes, anywhere in the file."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(chance.randrange(0, max(size - 4096, 1)))
        file.write(chance.randbytes(min(4096, size)))


def cut(path: Path, chance: random.Random) -> None:
    """Anywhere."""
    os.truncate(path, chance.randrange(path.stat().st_size))


def grow(path: Path, chance: random.Random) -> None:
    """By a hole, which takes no disk."""
    os.truncate(path, path.stat().st_size + (2 << 30))


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def replace_by_no_file(path: Path, chance: random.Random) -> None:
    """A link to a device, a loop of links, a pipe that nobody writes to, or a folder."""
    path.unlink()
    match chance.randrange(4):
        case 0:
            path.symlink_to("/dev/zero")
        case 1:
            path.symlink_to(path.name)
        case 2:
            os.mkfifo(path)
        case _:
            path.mkdir()


def replace_by_another(path: Path, chance: random.Random) -> None:
    """The content of another file of its folder."""
    others = [other for other in files(path.parent) if other.stat().st_size < 1 << 28]
    path.write_bytes(chance.choice(others).read_bytes())


def delete_folder(path: Path, chance: random.Random) -> None:
    shutil.rmtree(path.parent)


ACTS: tuple[Act, ...] = (
    *(flip, flip_many, overwrite, cut, grow),
    *(delete, replace_by_no_file, replace_by_another, delete_folder),
)
