"""Digests of weights files that this user's earlier processes have computed.

    $XDG_CACHE_HOME/kvx/<device>-<inode>.json      one small file per weights file
    $XDG_CACHE_HOME/kvx/<model>.lock               held by the process that reads a model's weights

A digest found here replaces reading the file, so that nobody else may write it: the folder is used
only if it belongs to this user and no one else can write to it. A torn entry, or one for another
state of the file, is not used; the file is then read again. Without a usable folder nothing is
remembered.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvx_core._c.os_files import close

logger = logging.getLogger("kvx")

_MAX_BYTES = 64 << 20
_MAX_FILES = 1000
_DIGEST = re.compile("[0-9a-f]{64}")
# A file that is written again within the resolution of its clock looks the same.
_SETTLED_NS = 2_000_000_000
_LOCK_SECONDS = 600
_ABANDONED_NS = 86400 * 10**9

FileState = tuple[int, int, int, int, int]


def state_of(found: os.stat_result) -> FileState:
    """What changes when the content of a file does.

    Names are no part of it: a Hugging Face cache names its blobs by their content, but saving
    through the link of a snapshot changes a blob and not its name.
    """
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class DigestCache:
    """Digests of tensors by file. Raises nothing: digests it cannot keep are computed again."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None: that of $XDG_CACHE_HOME, else of the home directory"""
        self._folder: int | None = None
        path = Path("its folder")
        try:
            path = folder or _default_folder()
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            self._folder = _open_own(path)
        except (OSError, RuntimeError) as error:
            logger.warning("Digests of weights are not remembered in %s: %s", path, error)

    def close(self) -> None:
        if self._folder is not None:
            close(self._folder)
            self._folder = None

    def get(self, state: FileState, header: bytes) -> dict[str, str] | None:
        """The digest of each tensor of a file in this state, as hex; None if they are not known.

        header: the file's own; its tensors are looked up
        """
        if self._folder is None:
            return None
        try:
            found = json.loads(_read_own(self._folder, _name(state)))
            if not isinstance(found, dict):
                return None
            check = found.pop("check", None)
            digests = found.get("digests")
            if check != _check(found) or found.get("state") != list(state):
                return None
            if found.get("header") != hashlib.sha256(header).hexdigest():
                return None
            if isinstance(digests, dict) and all(map(_is_digest, digests.values())):
                return digests
        except (OSError, ValueError, RecursionError):
            pass
        return None

    def put(self, state: FileState, header: bytes, digests: dict[str, str]) -> None:
        """Remembers the digests of a file whose state was the same before and after it was read."""
        if self._folder is None or not _is_telling(state):
            return
        found: dict[str, Any] = {
            "state": list(state),
            "header": hashlib.sha256(header).hexdigest(),
            "digests": digests,
        }
        text = json.dumps(found | {"check": _check(found)}).encode()
        temporary = f".{secrets.token_hex(8)}.tmp"
        try:
            with self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                view = memoryview(text)
                while view:
                    view = view[os.write(file, view) :]
            os.replace(temporary, _name(state), src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._trim()
        except OSError as error:
            logger.warning("Digests of weights were not remembered: %s", error)
            self._remove(temporary)

    @contextmanager
    def lock(self, states: list[FileState]) -> Iterator[None]:
        """A lock on these files, so that one process reads them for all.

        After ten minutes of waiting a process goes on without it.
        """
        if self._folder is None:
            yield
            return
        name = hashlib.sha256(json.dumps(sorted(states)).encode()).hexdigest()[:32] + ".lock"
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context(self._open(name, os.O_RDWR | os.O_CREAT))
                _wait_for(file)
                stack.callback(self._remove, name)
            yield

    def _trim(self) -> None:
        """Forgets the files that were read the longest time ago if there are too many.

        Locks and temporary files are deleted only when their process must have died long ago.
        """
        with os.scandir(self._folder) as found:
            written = sorted((entry.stat().st_mtime_ns, entry.name) for entry in found)
        digests = [name for _, name in written if name.endswith(".json")]
        abandoned = [
            name
            for time_ns, name in written
            if not name.endswith(".json") and time_ns < time.time_ns() - _ABANDONED_NS
        ]
        for name in digests[:-_MAX_FILES] + abandoned:
            self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    @contextmanager
    def _open(self, name: str, flags: int) -> Iterator[int]:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        try:
            yield file
        finally:
            close(file)


def _wait_for(file: int) -> None:
    """Waits until nobody else holds the lock, ten minutes at most. Raises OSError."""
    until = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)


def _default_folder() -> Path:
    """Raises RuntimeError if there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvx"


def _open_own(path: Path) -> int:
    """Opens a folder that nobody else can write to; returns a handle. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    reason = _not_own(os.fstat(folder))
    if reason:
        close(folder)
        raise PermissionError(f"{reason}. Remove it, or give XDG_CACHE_HOME another folder")
    return folder


def _not_own(found: os.stat_result) -> str:
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, expected {os.geteuid()}"
    if found.st_mode & 0o022:
        return f"its mode is {stat.S_IMODE(found.st_mode):o}, expected that nobody else may write"
    return ""


def _read_own(folder: int, name: str) -> bytes:
    """Raises OSError unless it is a file that only this user can write."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, dir_fd=folder)
    with open(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or _not_own(found) or found.st_size > _MAX_BYTES:
            raise PermissionError(f"{name} is no file of this user's alone")
        return opened.read(_MAX_BYTES + 1)


def _is_telling(state: FileState) -> bool:
    """Whether no file with other content can be in the same state.

    Images and some file systems set times to whole seconds, and number files as they like.
    """
    changed = state[-1]  # set by the system alone, whatever is written
    return changed % 1_000_000_000 != 0 and changed + _SETTLED_NS < time.time_ns()


def _name(state: FileState) -> str:
    return f"{state[0]:x}-{state[1]:x}.json"


def _check(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _is_digest(found: object) -> bool:
    return isinstance(found, str) and _DIGEST.fullmatch(found) is not None
