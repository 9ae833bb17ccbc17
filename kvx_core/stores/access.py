"""Checks, before an engine starts, that this process can use a directory as a store.

Writes nothing. Ignores failures that may pass, such as a server that does not answer.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from kvx_core._c.os_files import close
from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import StoreError
from kvx_core.stores.blobs import Directory

_RIGHTS = (errno.EACCES, errno.EPERM)


def check_access(directory: Directory, *, writes: bool) -> None:
    """Checks a directory, or the nearest folder above it that exists.

    writes: True if this process will store files there, False if it only reads
    Raises InvalidArgumentError if `directory` is not a directory or this user may not read it.
    With `writes`, also if this user may not write there, or if the disk is full and the store has
    no file to delete.
    """
    root = above = os.path.abspath(directory.root)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    where = "which" if above == root else f"made below {above}, which"
    try:
        close(os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except NotADirectoryError:
        raise InvalidArgumentError(
            f"path is {root}, {where} is a file, expected a directory. Name another path"
        ) from None
    except OSError as error:
        if error.errno in (*_RIGHTS, errno.ELOOP, errno.ENOENT):  # ENOENT: a link to nothing
            raise InvalidArgumentError(
                f"path is {root}, {where} cannot be read by user {os.geteuid()}: {error.strerror}. "
                "Expected a directory that this user can read"
            ) from None
        return
    if not writes:
        return
    if not os.access(
        above, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    ):
        with suppress(OSError):
            is_mounted = bool(os.statvfs(above).f_flag & os.ST_RDONLY)
            reason = "it is mounted read-only" if is_mounted else "this user has no right to"
            raise InvalidArgumentError(
                f"path is {root}, {where} cannot be written by user {os.geteuid()}: {reason}. "
                "Expected a directory that this user can write, or an engine that only loads "
                "(kv_role 'kv_consumer' in vLLM)"
            )
    with suppress(StoreError):
        if directory.free_bytes() == 0 and not directory.files():
            raise InvalidArgumentError(
                f"path is {root}, {where} is on a full disk, and no files of the store can be "
                "deleted. Expected free bytes. Free space there, or use another directory"
            )
