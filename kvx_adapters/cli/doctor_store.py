"""`kvx doctor --store`: whether engines can use a directory as their store, and what it holds."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvx_adapters.cli.doctor import Check
from kvx_adapters.cli.store_options import size_text
from kvx_core.stores import Directory, StoreError
from kvx_core.stores.config import StoreConfig, check_chunks, read_config
from kvx_core.stores.inventory import Inventory

_LITTLE = 100_000_000  # bytes


def check_store(path: Path) -> Iterator[Check]:
    """Checks a directory: that it is one, access, free space, its format, its entries.

    Changes nothing in it.
    """
    path = path.absolute()
    if not path.exists():
        yield _absent(path)
        return
    if not path.is_dir():
        yield Check("store", f"{path} is a file", "expected a directory: the setting `path`")
        return
    yield Check("store", str(path))
    access = _access(path)
    yield access
    yield _space(path)
    directory = Directory(path)
    try:
        config = read_config(directory)
        yield Check("format", _format(directory, config))
        if config is not None:
            yield Check("entries", _entries(directory))
    except StoreError as error:
        yield Check("format", "cannot be read", str(error))


def _absent(path: Path) -> Check:
    """A store that does not exist is made by the first engine, if it can."""
    parent = next(folder for folder in path.parents if folder.exists())
    text = f"{path} does not exist"
    if not parent.is_dir():
        return Check("store", text, f"{parent} is a file: no directory can be made there")
    problem = _write(parent)
    if problem:
        return Check("store", text, f"no directory can be made in {parent}: {problem}")
    return Check("store", f"{text} yet: the first engine makes it, for its own user")


def _access(path: Path) -> Check:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    text = f"mode {mode:04o}, of user {status.st_uid}; this is user {os.geteuid()}"
    if not os.access(path, os.R_OK | os.X_OK):
        return Check("access", text, "this user cannot read it: chown it, or set `group`")
    problem = _write(path)
    if problem:
        return Check("access", text, f"this user cannot write to it: {problem}")
    if mode & stat.S_IWOTH:
        return Check(
            "access",
            text,
            "every user of this machine can forge what engines load: chmod o-w",
        )
    return Check("access", f"{text}, who can read and write")


def _write(folder: Path) -> str:
    """Writes a file that has no name; "" or why that fails."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


def _space(path: Path) -> Check:
    disk = shutil.disk_usage(path)
    if not disk.total:
        return Check("space", "the file system does not say", "expected one on a disk")
    text = f"{size_text(disk.free)} of {size_text(disk.total)} free"
    if disk.free < _LITTLE:
        way_out = f"almost full: `kvx store trim {path} SIZE` deletes what was not used for longest"
        return Check("space", text, way_out)
    return Check("space", text)


def _format(directory: Directory, config: StoreConfig | None) -> str:
    """Raises StoreError if this version of KVX cannot read it."""
    if config is None:
        return "none yet: the first engine writes kvx-store.json"
    check_chunks(directory, config, None)
    words = " encrypted with AES-256-GCM;" if config.is_encrypted else ""
    limit = "none" if config.max_bytes is None else size_text(config.max_bytes)
    return (
        f"this version of KVX reads it;{words} chunks of {config.chunk_tokens} tokens; limit of "
        f"engines without `max_bytes`: {limit}"
    )


def _entries(directory: Directory) -> str:
    """Raises StoreError."""
    found = Inventory(directory)
    spaces = found.spaces()
    text = (
        f"{sum(space.num_entries for space in spaces):,} entries of "
        f"{len({space.record.fingerprint for space in spaces if space.record}):,} models, "
        f"{size_text(found.num_bytes)}"
    )
    signed = sum(space.num_entries for space in spaces if space.is_signed)
    if signed:
        text += f"; {signed:,} are signed"
    if found.unread:
        text += f"; {len(found.unread):,} folders cannot be read: {', '.join(found.unread[:5])}"
    reasons = [space.reason for space in spaces]
    reasons += [kind.reason for space in spaces for kind in space.kinds.values()]
    bad = [*filter(None, reasons)]
    if bad:
        text += f"; {len(bad):,} records cannot be read: `kvx store verify {directory.root}`"
    if found.num_other_files:
        text += f"; {found.num_other_files:,} files are not KVX's"
    return text
