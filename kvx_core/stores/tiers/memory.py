"""MemoryStore: a BlobStore in this machine's memory, which processes share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvx_core.argument_checks import bad_argument
from kvx_core.errors import InvalidArgumentError
from kvx_core.stores.blobs import Directory

_SHARED_MEMORY = Path("/dev/shm")  # a tmpfs on every Linux


class MemoryStore(Directory):
    """A Directory on tmpfs: its files are in memory, until they are trimmed or Linux restarts.

    Processes of one user that give the same name share it, also one after another.
    """

    is_volatile = True

    def __init__(self, name: str, max_bytes: int, *, folder: Path = _SHARED_MEMORY) -> None:
        """name: a word
        max_bytes: of memory for all files; the least recently used ones are deleted above it
        folder:    on tmpfs
        Raises InvalidArgumentError, also if tmpfs is smaller than max_bytes.
        """
        own = folder / f"kvx-{os.geteuid()}"
        _check_room(folder, max_bytes)
        _make_own(own)
        super().__init__(own / name, max_bytes)


def _check_room(folder: Path, max_bytes: int) -> None:
    try:
        space = os.statvfs(folder)
    except OSError as error:
        raise InvalidArgumentError(
            f"{folder} cannot be used: {error.strerror}. Expected a tmpfs there, or no memory tier"
        ) from None
    size = space.f_blocks * space.f_frsize
    if size < max_bytes:
        raise bad_argument(
            "the memory tier",
            f"{max_bytes} bytes",
            f"at most {size}, the size of {folder}. Start the container with a larger --shm-size, "
            "or give the tier less",
        )


def _make_own(path: Path) -> None:
    """Makes a folder that no other user can read or write. Raises InvalidArgumentError."""
    try:
        path.mkdir(0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be made: {error.strerror}") from None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise InvalidArgumentError(
            f"{path} belongs to user {status.st_uid} and has mode "
            f"{stat.S_IMODE(status.st_mode):04o}, expected a directory of user {os.geteuid()} "
            "alone. Remove it, or use no memory tier"
        )
