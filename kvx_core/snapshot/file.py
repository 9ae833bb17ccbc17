"""Files of snapshots: reads untrusted files in parts, and writes tensors from their memory."""

from __future__ import annotations

import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from kvx_core.files import ReadFile, close, read_at, write_all
from kvx_core.snapshot.coding import CODINGS
from kvx_core.snapshot.contents import Header, Stored
from kvx_core.snapshot.errors import CorruptError, StoreError
from kvx_core.snapshot.header import CRC32, XXH3, header_body, in_file_order, parse_header
from kvx_core.snapshot.memory import Bytes, in_threads
from kvx_core.snapshot.seal import check_seal, sealed, sealed_counts
from kvx_core.snapshot.signing import Key
from kvx_core.words import wrong

MAX_HEADER_BYTES = 16 << 20
MAX_TOKENS = 1 << 24  # of a file, which may have holes: what it says takes no disk
_MOST_BYTES = 1 << 20  # of tensors that are read with one call
_FIRST_BYTES = 16 << 10  # of the first read: most headers are shorter
# Without O_NONBLOCK, opening a FIFO waits for its other end.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Sealed:
    """Header and tokens of a file, whose seal has been checked."""

    raw: bytes  # the header
    tokens: npt.NDArray[np.int64]
    num_data_bytes: int  # with the tokens


class SnapshotFile:
    """An open file of a snapshot. `close` closes it if it was opened by path, else not."""

    def __init__(self, file: BinaryIO, name: str, key: Key | None) -> None:
        self.file = file
        self.name = name  # for messages
        self._key = key
        self._opened: _OwnFile | None = None
        self._kind, self._checksums = "", dict[str, str]()  # of the tensors, from `header`

    @classmethod
    def of(cls, path: Path, key: Key | None) -> SnapshotFile:
        """Opens a regular file. Raises StoreError."""
        try:
            file = _OwnFile(_opened(path, os.O_RDONLY))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from None
        found = cls(file, str(path), key)
        found._opened = file
        return found

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def sealed(self, max_header_bytes: int, num_tokens: int | None = None) -> Sealed:
        """Header and tokens, checked to be unchanged since they were written. Parses no header.

        num_tokens: how many tokens are expected; None: any number
        Raises CorruptError, UnsignedError, StoreError.
        """
        try:
            status = os.fstat(self.file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"{self.name} is no regular file, expected one")
            num_bytes = status.st_size
            first = bytearray(min(_FIRST_BYTES, num_bytes))
            read_at(self.file.fileno(), [memoryview(first)], 0)
            length = int.from_bytes(first[:8], "little")
            if num_bytes < 8 or not 2 <= length <= min(max_header_bytes, num_bytes - 8):
                raise CorruptError(
                    f"{self.name} is not a safetensors file of KVX: it has {num_bytes} bytes and a "
                    f"header of {length}, expected one of at most {max_header_bytes}"
                )
            found, num_data_bytes = sealed_counts(bytes(first[8 : 8 + length]), self.name)
            stop = 8 + length + 8 * found
            if 8 + length + num_data_bytes != num_bytes or 8 * found > num_data_bytes:
                raise CorruptError(
                    f"{self.name} has {num_bytes} bytes, expected {8 + length + num_data_bytes} "
                    "as its header says"
                )
            if num_tokens not in (None, found):
                raise CorruptError(f"{self.name} has {found} tokens, expected {num_tokens}")
            if found > MAX_TOKENS:
                raise CorruptError(f"{self.name} has {found} tokens, expected at most {MAX_TOKENS}")
            whole = first[:stop]
            if len(whole) < stop:
                whole += bytes(stop - len(whole))
                rest = memoryview(whole)[len(first) :]
                read_at(self.file.fileno(), [rest], len(first))
            raw, tokens = bytes(whole[8 : 8 + length]), bytes(whole[8 + length :])
            check_seal(raw, tokens, num_data_bytes, self.name, self._key)
            return Sealed(raw, np.frombuffer(tokens, "<i8"), num_data_bytes)
        except EOFError:
            raise CorruptError(f"{self.name} is shorter than its header says") from None
        except (OSError, ValueError, MemoryError) as error:
            # An error of the system: wrong bytes of a file raise CorruptError.
            raise StoreError(f"{self.name} cannot be read: {error}") from None

    def header(self, found: Sealed) -> tuple[Header, dict[str, Stored]]:
        """What the file contains; every field has been checked. Called before `read`.

        Raises CorruptError, StoreError.
        """
        try:
            content = parse_header(
                found.raw,
                len(found.tokens),
                found.num_data_bytes,
                self.name,
                is_signed=self._key is not None,
            )
        except (MemoryError, RecursionError) as error:
            raise StoreError(f"{self.name} cannot be read: {error}") from None
        self._kind, self._checksums = content.kind, content.checksums
        return content.header, content.tensors

    def read(self, tensors: Mapping[str, Stored], parts: Mapping[str, Bytes]) -> None:
        """Fills each of `parts` with the tensor of its name, and checks every byte.

        Raises CorruptError if the data is not what was written, StoreError if it cannot be read.
        """

        def read(names: list[str]) -> list[str]:
            """Reads tensors that follow one another; the names of those that have changed."""
            data = [
                np.empty(tensors[name].coded_bytes, np.uint8)
                if tensors[name].coding
                else parts[name]
                for name in names
            ]
            offset = tensors[names[0]].offset
            read_at(self.file.fileno(), [each.data for each in data], offset)
            return [
                name
                for name, each in zip(names, data, strict=True)
                if not self._is_good(name, tensors[name], each, parts[name])
            ]

        groups = _groups(tensors, parts)
        try:
            bad = in_threads(read, groups, sum(len(part) for part in parts.values()))
        except EOFError:
            raise CorruptError(f"{self.name} is shorter than its header says") from None
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            raise StoreError(f"{self.name} cannot be read: {error}") from None
        for name in chain.from_iterable(bad):
            raise CorruptError(
                f"{self.name}: the bytes of {name} have changed since they were written"
            )

    def _is_good(self, name: str, stored: Stored, data: Bytes, part: Bytes) -> bool:
        """Whether the bytes of a tensor are those that were written; decodes them into `part`."""
        if digest(data.data, self._kind, self._key) != self._checksums[name]:
            return False
        return not stored.coding or CODINGS[stored.coding].decode(part, data)


def _groups(tensors: Mapping[str, Stored], names: Iterable[str]) -> list[list[str]]:
    """Names of tensors that follow one another in a file and are read with one call: so few bytes
    that they are still in the processor's cache when they are checked.
    """
    groups: list[list[str]] = []
    stop = num_bytes = 0
    for name in sorted(names, key=lambda name: tensors[name].offset):
        offset, more = tensors[name].offset, tensors[name].file_bytes
        if not groups or offset != stop or num_bytes + more > _MOST_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += more
        stop = offset + more
    return groups


class _OwnFile(ReadFile):
    """Closes itself when it is no longer referenced. FileIO would warn."""

    def __del__(self) -> None:
        self.close()


def write(
    target: Path | BinaryIO,
    header: Header,
    tensors: Mapping[str, Stored],
    data_of: Callable[[str], Bytes],
    key: Key | None,
) -> None:
    """Writes a file, which is not synced. Raises StoreError.

    target: a path, overwritten if it is there, or a new file that is open for writing
    """
    if not isinstance(target, Path) and not hasattr(target, "write"):
        raise wrong("target", target, "a pathlib.Path, or a file open for writing")
    is_coded = any(tensor.coding for tensor in tensors.values())
    try:
        data = {name: data_of(name) for name in tensors}
        # Encoding and signing take longer than starting threads.
        num_bytes = sum(map(len, data.values())) if is_coded or key is not None else 0
        if is_coded:
            names = list(tensors)
            coded = in_threads(lambda name: _coded(tensors[name], data[name]), names, num_bytes)
            tensors = {name: stored for name, (stored, _) in zip(names, coded, strict=True)}
            data = {name: found for name, (_, found) in zip(names, coded, strict=True)}
        names = in_file_order(tensors)
        ordered = [data[name] for name in names]
        sums = in_threads(lambda each: digest(each.data, XXH3, key), ordered, num_bytes)
        checksums = dict(zip(names, sums, strict=True))
        body, num_data_bytes = header_body(header, tensors, checksums, is_signed=key is not None)
        tokens = data["tokens"].tobytes() if "tokens" in tensors else b""
        first = sealed(body.encode(), tokens, num_data_bytes, key)
        if len(first) > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {len(first)} bytes, of {MAX_HEADER_BYTES} at most")
        parts = [memoryview(first), *(each.data for each in ordered)]
        if isinstance(target, Path):
            with io.FileIO(_opened(target, os.O_WRONLY | os.O_CREAT), "w") as file:
                file.truncate(0)
                write_all(file, parts)
        else:
            write_all(target, parts)
    except (OSError, ValueError, MemoryError) as error:
        what = target if isinstance(target, Path) else "the snapshot"
        raise StoreError(f"{what} cannot be written: {error}") from None


def _coded(stored: Stored, data: Bytes) -> tuple[Stored, Bytes]:
    """A tensor as the file has it: encoded, unless that saves nothing."""
    if not stored.coding:
        return stored, data
    encoded = CODINGS[stored.coding].encode(data)
    if len(encoded) < len(data):
        return replace(stored, coded_bytes=len(encoded)), encoded
    return replace(stored, coding=""), data


def _opened(path: Path, flags: int) -> int:
    """A handle of a regular file. Raises OSError, ValueError."""
    file = os.open(path, flags | _FLAGS, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("it is no regular file")
    except BaseException:
        close(file)
        raise
    return file


def digest(data: bytes | memoryview, kind: str, key: Key | None) -> str:
    """A checksum of the data: keyed BLAKE2b if there is a key, else XXH3 or CRC-32.

    XXH3 finds faults of disks and networks at the speed of memory. CRC-32 is that of older files.
    """
    if key is not None:
        return key.digest(data, b"kvx tensor")
    return f"{zlib.crc32(data):08x}" if kind == CRC32 else xxh3_128_hexdigest(data)


def file_of(source: Path | BinaryIO, name: str, key: bytes | None) -> SnapshotFile:
    """The file at a path, or one that is open. Arguments and errors are those of Snapshot.open."""
    signer = None if key is None else Key(key)
    if isinstance(source, Path):
        return SnapshotFile.of(source, signer)
    if not hasattr(source, "fileno"):
        raise wrong("source", source, "a pathlib.Path, or a file open for reading")
    return SnapshotFile(source, name or str(source), signer)
