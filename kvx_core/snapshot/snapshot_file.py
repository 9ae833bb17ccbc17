"""Writes and reads the files of snapshots: they are like entries of stores, and contain their kind.

Format: docs/store_format.md, "Snapshots".
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from binascii import unhexlify
from pathlib import Path
from typing import BinaryIO

from kvx_core._c.os_files import OpenFile, close, read_at, write_all
from kvx_core.argument_checks import bad_argument
from kvx_core.errors import CorruptError, InvalidArgumentError, StoreError
from kvx_core.snapshot.chunk_file import (
    MAX_POSITION,
    ChunkFile,
    file_parts,
    opened_record,
    regular_size,
)
from kvx_core.snapshot.contents import Contents
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.pieces import MOST_BYTES
from kvx_core.snapshot.record import (
    BEGIN_BYTES,
    KIND_TEXT,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    RECORD_AT,
    Form,
    RecordText,
    form_of,
)
from kvx_core.snapshot.secrets import Secrets

_FIRST_BYTES = 16 << 10  # that the first read reads: most headers are shorter
_EARLIER = b'{"__metadata__":{"kvx_snapshot":'  # of format 2
_NO_PARENT = bytes(32)
# Without O_NONBLOCK, opening a FIFO waits for its other end.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_snapshot(target: Path | BinaryIO, snapshot: Contents, secrets: Secrets) -> None:
    """Writes a snapshot to a file. Does not sync the file.

    target: a path, overwritten if it exists, or a new file that is open for writing
    Raises StoreError; InvalidArgumentError if the data of the snapshot is in a file.
    """
    if not isinstance(target, Path) and not hasattr(target, "write"):
        raise bad_argument("target", target, "a pathlib.Path, or a file open for writing")
    try:
        parts = _parts(snapshot, secrets)
        if isinstance(target, Path):
            with io.FileIO(_opened(target, os.O_WRONLY | os.O_CREAT), "w") as file:
                file.truncate(0)
                write_all(file, parts)
        else:
            write_all(target, parts)
    except InvalidArgumentError:
        raise
    except (OSError, ValueError, MemoryError, StoreError) as error:
        what = target if isinstance(target, Path) else "the snapshot"
        raise StoreError(f"{what} cannot be written: {error}") from None


def _parts(snapshot: Contents, secrets: Secrets) -> list[memoryview]:
    """Returns the bytes of the file of a snapshot, as parts that follow one another."""
    header, num_tokens = snapshot.header, len(snapshot.tokens)
    if not 0 <= header.start <= MAX_POSITION or not num_tokens:
        raise StoreError(f"it has {num_tokens} tokens from {header.start} on")
    kind = Kind.of_snapshot(header, snapshot.tensors, num_tokens, keyed=secrets.is_keyed)
    if kind.num_bytes(num_tokens) > MAX_FILE_BYTES:
        raise StoreError(
            f"it has {kind.num_bytes(num_tokens)} bytes, expected {MAX_FILE_BYTES} at most"
        )
    num_bytes = kind.layout(num_tokens).head.num_bytes - 8
    if num_bytes > MAX_HEADER_BYTES:
        raise StoreError(f"its header has {num_bytes} bytes, expected {MAX_HEADER_BYTES} at most")
    return file_parts(snapshot, kind, secrets, _NO_PARENT)


def open_snapshot(
    source: Path | BinaryIO,
    name: str,
    secrets: Secrets,
    max_header_bytes: int,
    num_tokens: int | None,
) -> ChunkFile:
    """Opens the file of a snapshot, and reads and checks its head.

    Arguments and errors are those of Snapshot.open. A file that was opened by path is an OpenFile.
    """
    if not isinstance(source, Path) and not hasattr(source, "fileno"):
        raise bad_argument("source", source, "a pathlib.Path, or a file open for reading")
    file: BinaryIO | OpenFile
    if isinstance(source, Path):
        name = str(source)
        try:
            file = OpenFile(_opened(source, os.O_RDONLY), 0)
        except (OSError, ValueError) as error:
            raise StoreError(f"{source} cannot be read: {error}") from None
    else:
        file, name = source, name or str(source)
    try:
        return _read_head(file, name, secrets, max_header_bytes, num_tokens)
    except BaseException as error:
        if isinstance(file, OpenFile):
            file.close()
        if isinstance(error, EOFError):
            raise CorruptError(f"{name} became shorter while it was read") from None
        if isinstance(error, (OSError, ValueError, MemoryError, RecursionError)):
            raise StoreError(f"{name} cannot be read: {error}") from None
        raise


def _read_head(
    file: BinaryIO | OpenFile, name: str, secrets: Secrets, most: int, num_tokens: int | None
) -> ChunkFile:
    """Reads and checks the head of a file.

    most: bytes that the header may have
    """
    size = regular_size(file, name)
    first = bytearray(min(_FIRST_BYTES, size))
    read_at(file.fileno(), [memoryview(first)], 0)
    stop = 8 + int.from_bytes(first[:8], "little")
    if not 8 < stop <= min(8 + most, size):
        raise CorruptError(
            f"{name} is no snapshot of KVX: it has {size} bytes and a header of {stop - 8}, "
            f"expected one of at most {most}"
        )
    form = _form_of(bytes(first[:BEGIN_BYTES]), name)
    if num_tokens not in (None, form.num_tokens):
        raise CorruptError(f"{name} has {form.num_tokens} tokens, expected {num_tokens}")
    end = RECORD_AT + 2 * form.num_bytes
    if end > stop:
        raise CorruptError(
            f"{name} has {form.num_tokens} tokens and {form.num_pieces} pieces, expected a header "
            f"of at least {end - 8} bytes, and it has {stop - 8}"
        )
    head = first[:stop] + bytes(max(0, stop - len(first)))
    read_at(file.fileno(), [memoryview(head)[len(first) :]], len(first))
    kind = _kind_in(head, end, form, secrets, name)
    num_bytes = kind.num_bytes(form.num_tokens)
    if num_bytes > min(form.num_pieces * MOST_BYTES, MAX_FILE_BYTES):
        raise CorruptError(f"{name} has tensors of {num_bytes} bytes in {form.num_pieces} pieces")
    chunk = ChunkFile(file, kind, secrets, name, kind.layout(form.num_tokens), size)
    chunk.check_size()
    chunk.check_head(head, None)
    return chunk


def _form_of(begin: bytes, name: str) -> Form:
    if begin[8:].startswith(_EARLIER):
        raise StoreError(
            f"{name} is a snapshot of format 2, which an earlier version of KVX has written, "
            "expected format 3. Capture it again"
        )
    form = form_of(begin)
    if form is None:
        raise CorruptError(f"{name} is no snapshot of KVX: it does not begin as one of format 3")
    return form


def _kind_in(head: bytearray, end: int, form: Form, secrets: Secrets, name: str) -> Kind:
    """Returns the kind in the head of a file. Parses it only after the record has confirmed it.

    end: offset behind the record's digits
    """
    try:
        sealed = unhexlify(head[RECORD_AT:end])
    except ValueError:
        raise CorruptError(f"{name} is no snapshot of KVX: its record is no hex") from None
    text = RecordText(form)
    raw, _ = opened_record(sealed, text, secrets, name)
    if not head.startswith(KIND_TEXT + b'"', end):
        raise CorruptError(f"{name} is an entry of a store, expected a snapshot")
    try:
        rest = head[end + len(KIND_TEXT) :].decode("ascii")
        kind, _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        raise CorruptError(f"{name}: its kind has changed since it was written") from None
    found: bytes = kind.encode("utf-8", "surrogatepass")
    if text.unpacked(raw).kind != hashlib.sha256(found).digest():
        raise CorruptError(f"{name}: its kind has changed since it was written")
    return Kind.of_text(found, name, form.num_tokens)


def _opened(path: Path, flags: int) -> int:
    """Opens a regular file. Returns its handle. Raises OSError, ValueError."""
    file = os.open(path, flags | _FLAGS, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("it is no regular file")
    except BaseException:
        close(file)
        raise
    return file
