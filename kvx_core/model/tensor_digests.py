"""A digest of each tensor in safetensors files, as fast as the disk.

The digest of a tensor is the SHA-256 of the SHA-256 of each 64 MiB of its bytes. So threads share a
large tensor, and the digest does not depend on their number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvx_core._c.os_files import close, tells_of_mapped_writes
from kvx_core.errors import InvalidArgumentError
from kvx_core.model.digest_cache import DigestCache, FileState, state_of

logger = logging.getLogger("kvx")

# Called with bytes read and bytes to read, now and then.
Progress = Callable[[int, int], None]

PIECE_BYTES = 64 << 20
SAMPLE_BYTES = 4096  # out of the middle of a tensor
_READ_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # as safetensors has it
_MAX_THREADS = 16
_FIRST_SECONDS, _NEXT_SECONDS = 2.0, 10.0  # between reports of progress


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    file: str  # its name
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(slots=True)
class _File:
    path: Path
    handle: int
    state: FileState
    header: bytes
    entries: dict[str, tuple[str, tuple[int, ...], int, int]]  # name: dtype, shape, begin, end
    is_told: bool  # whether its state changes with every later write

    def tensors(self, digests: dict[str, str]) -> Iterator[Tensor]:
        for name, (dtype, shape, _, _) in self.entries.items():
            yield Tensor(self.path.name, name, dtype, shape, digests[name])


def digests(
    paths: Sequence[Path], *, sample: bool = False, progress: Progress | None = None
) -> list[Tensor]:
    """Every tensor of the files, with the digest of all its bytes.

    sample: digest 4 KiB out of its middle instead
    Digests of whole files are remembered, see DigestCache, where the file system tells of all that
    changes them. Raises InvalidArgumentError for a file that is no safetensors file or changes
    meanwhile, OSError.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_opened(path)) for path in paths]
        if sample:
            known = _read(files, True, None)
        else:
            cache = DigestCache()
            stack.callback(cache.close)
            known = _remembered(files, cache)
            if len(known) < len(files):
                with cache.lock([file.state for file in files]):
                    known = _remembered(files, cache)
                    rest = [file for file in files if id(file) not in known]
                    found = _read(rest, False, progress)
                    for file in rest:
                        if file.is_told:
                            cache.put(file.state, file.header, found[id(file)])
                    if not all(file.is_told for file in rest):
                        logger.info(
                            "Digests of the weights in %s are not remembered: its file system may "
                            "not tell of every write, so that each start reads them",
                            rest[0].path.parent,
                        )
                    known |= found
        return [tensor for file in files for tensor in file.tensors(known[id(file)])]


def tensor_types(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor of a file. Raises InvalidArgumentError, OSError."""
    with _opened(path) as file:
        return {name: (dtype, shape) for name, (dtype, shape, _, _) in file.entries.items()}


def metadata(path: Path) -> dict[str, Any]:
    """The metadata in a file's header. Raises InvalidArgumentError, OSError."""
    with _opened(path) as file:
        found = json.loads(file.header).get("__metadata__")
    return found if isinstance(found, dict) else {}


def _remembered(files: Sequence[_File], cache: DigestCache) -> dict[int, dict[str, str]]:
    found = {}
    for file in files:
        known = cache.get(file.state, file.header) if file.is_told else None
        if known is not None and known.keys() == file.entries.keys():
            found[id(file)] = known
    return found


def _read(
    files: Sequence[_File], sample: bool, progress: Progress | None
) -> dict[int, dict[str, str]]:
    """The digests of all tensors of some files. Raises InvalidArgumentError."""
    pieces = [
        (file, name, begin, end)
        for file in files
        for name, (_, _, first, last) in file.entries.items()
        for begin, end in _pieces(first, last, sample)
    ]
    teller = _Teller(sum(end - begin for _, _, begin, end in pieces), progress)
    memory = threading.local()

    def digest(piece: tuple[_File, str, int, int]) -> bytes:
        file, _, begin, end = piece
        buffer = getattr(memory, "buffer", None)
        if buffer is None:
            buffer = memory.buffer = bytearray(_READ_BYTES)
        return _digest(file, begin, end, memoryview(buffer), teller)

    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="kvx-digest") as pool:
        try:
            found = list(pool.map(digest, pieces))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for file in files:
        if state_of(os.fstat(file.handle)) != file.state:
            raise InvalidArgumentError(
                f"{file.path} changed while it was read. Wait until the model is written"
            )
    whole: dict[int, dict[str, list[bytes]]] = {
        id(file): {name: [] for name in file.entries} for file in files
    }
    for (file, name, _, _), part in zip(pieces, found, strict=True):
        whole[id(file)][name].append(part)
    return {
        key: {name: hashlib.sha256(b"".join(parts)).hexdigest() for name, parts in of.items()}
        for key, of in whole.items()
    }


def _pieces(begin: int, end: int, sample: bool) -> Iterator[tuple[int, int]]:
    if sample and end - begin > SAMPLE_BYTES:
        begin += (end - begin - SAMPLE_BYTES) // 2
        end = begin + SAMPLE_BYTES
    for at in range(begin, end, PIECE_BYTES):
        yield at, min(at + PIECE_BYTES, end)


def _digest(file: _File, begin: int, end: int, buffer: memoryview, teller: _Teller) -> bytes:
    digest = hashlib.sha256()
    while begin < end:
        count = os.preadv(file.handle, [buffer[: min(len(buffer), end - begin)]], begin)
        if count == 0:
            raise InvalidArgumentError(
                f"{file.path} ends at byte {begin}, expected at least {end}: it changed while it "
                "was read. Wait until the model is written"
            )
        digest.update(buffer[:count])
        begin += count
        teller.add(count)
    return digest.digest()


class _Teller:
    """Reports progress if reading takes long; any reading thread may call it."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._read = total, progress, 0
        self._next = time.monotonic() + _FIRST_SECONDS
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._read += count
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + _NEXT_SECONDS
                self._progress(self._read, self._total)


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    """Reads the header of a safetensors file. Raises InvalidArgumentError, OSError.

    Source: safetensors, README.md, "Format"
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state, is_told = state_of(os.fstat(handle)), False
        with suppress(OSError):  # a dirty page may change without a new time of the file
            os.fsync(handle)  # after its state was read: a page that gets dirty between has changed
            is_told = tells_of_mapped_writes(handle)
        try:
            size = state[2]
            first = 8 + int.from_bytes(os.pread(handle, 8, 0), "little")
            if first > size or first > _MAX_HEADER_BYTES:
                raise ValueError(f"its header ends at byte {first}")
            header = os.pread(handle, first - 8, 8)
            entries = {}
            for name, entry in json.loads(header).items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                if not (type(begin) is int and type(end) is int and 0 <= begin <= end):
                    raise ValueError(f"{name} has the bytes {begin} to {end}")
                if first + end > size:
                    raise ValueError(f"it has {size} bytes, expected at least {first + end}")
                shape = tuple(map(int, entry["shape"]))
                entries[name] = str(entry["dtype"]), shape, first + begin, first + end
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidArgumentError(f"{path} is not a safetensors file: {error!r}") from None
        yield _File(path, handle, state, header, entries, is_told)
    finally:
        close(handle)
