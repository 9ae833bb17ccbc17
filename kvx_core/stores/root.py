"""Root: opens or makes the directory of a store, and warns if other users may write there."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvx_core._c.os_files import close
from kvx_core.stores.beneath import make_folders, sync_folder

Group = Literal["none", "read", "write"]

MODES: dict[str, tuple[int, int]] = {  # modes of folders and files, by what the group may do
    "none": (0o700, 0o600),
    "read": (0o2750, 0o640),
    "write": (0o2770, 0o660),
}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC  # follows symbolic links in its path

_logger = logging.getLogger(__name__)


class Root:
    """A directory that may not exist yet, and may be deleted and made again."""

    def __init__(self, path: Path, group: Group) -> None:
        self.path = os.fspath(path)
        self._group = group
        self._has_links = False  # True: its path has symbolic links
        self._looked_at: tuple[int, int, int] | None = None  # mode, user and group when last opened

    def open(self) -> int:
        """Returns a new handle of the directory. Raises OSError."""
        root = os.open(self.path, _DIRECTORY)
        try:
            status = os.fstat(root)
        except OSError:
            return root
        found = status.st_mode, status.st_uid, status.st_gid
        if found != self._looked_at:  # somebody else may have made it again
            self._looked_at = found
            self._has_links = os.path.realpath(self.path) != os.path.abspath(self.path)
            self._look_at(status)
        return root

    def path_of(self, name: str) -> str | None:
        """Returns the path of a file in it; None: it may have links, or was never opened here."""
        return None if self._has_links or self._looked_at is None else f"{self.path}/{name}"

    def make(self) -> None:
        """Makes the directory as `group` says, its parents as the umask says, and syncs them.

        Raises OSError.
        """
        path = os.path.abspath(self.path)
        missing = []
        while not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            parent, name = os.path.split(path)
            handle = os.open(parent, _DIRECTORY)
            try:
                if path == missing[0]:
                    close(make_folders(handle, name, MODES[self._group][0]))
                else:
                    with suppress(FileExistsError):  # another process made it
                        os.mkdir(name, dir_fd=handle)
                    sync_folder(handle)
            finally:
                close(handle)

    def _look_at(self, status: os.stat_result) -> None:
        """Warns if users can write here who get no such access from `group`."""
        if status.st_mode & stat.S_IWOTH:
            _logger.warning(
                "KVX store %s has mode %04o: every user of this machine can forge what engines "
                "load from it. Expected no write access for others: chmod o-w",
                self.path,
                stat.S_IMODE(status.st_mode),
            )
        elif self._group != "write" and status.st_mode & stat.S_IWGRP:
            _logger.warning(
                "KVX store %s has mode %04o: every user of group %d can forge what engines "
                "load from it. Expected no write access for the group: chmod g-w, or `group` "
                "'write'",
                self.path,
                stat.S_IMODE(status.st_mode),
                status.st_gid,
            )
        elif self._group == "none" and status.st_uid not in (0, os.geteuid()):
            _logger.warning(
                "KVX store %s belongs to user %d, who can forge what engines load from it. "
                "Expected a directory of user %d, who runs this process, or `group` set",
                self.path,
                status.st_uid,
                os.geteuid(),
            )
