"""Inventory: what a directory of a prefix store has, for those who operate it.

Reads names, sizes and times of files, and a few headers of each space: the entries of one model,
salt, key and lossy format. Files are not trusted: neither their names nor their headers.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import (
    CorruptError,
    Header,
    Key,
    PlaneKind,
    Snapshot,
    StoreError,
    UnsignedError,
)
from kvx_core.stores.blobs import Directory
from kvx_core.stores.config import check_key, read_config
from kvx_core.stores.encrypted import Encrypted, Encryption, is_encrypted
from kvx_core.stores.keys import EntryFile, heads_of, parse_name, space_of

_MOST_LAYERS = 1024  # of a model: a name could claim billions, and each is a number in memory
_ANY_SHAPE = _MOST_LAYERS, 1 << 20  # layers and heads that no model has
_SALTED_LAYERS = 256  # models of so many layers are tried when a salt is looked for
_HEADERS = 8  # that are tried until one can be read
_KINDS = 16  # of files with other layers, each of whose planes are looked for
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgtp", 1)
    for ending, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]{0,3})\s*", re.IGNORECASE)


def num_bytes_of(text: object, name: str = "size") -> int:
    """A number of bytes, from a number or a text: "50GB" is 50 * 10**9, "1.5TiB" 1.5 * 2**40.

    name: what errors call it
    Raises InvalidArgumentError.
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if type(text) is int or (type(text) is float and text.is_integer()):
        number = int(text)
    elif found is not None and found[2].lower() in _UNITS:
        number = int(float(found[1]) * _UNITS[found[2].lower()])
    else:
        number = 0
    if number <= 0:
        raise InvalidArgumentError(
            f"{name} is {text!r}, expected a number of bytes greater than 0, such as 50000000000, "
            "'50GB' or '1.5TiB'"
        )
    return number


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of an entry."""

    file: EntryFile
    num_bytes: int  # on the disk
    used: float  # when it was last used, in seconds since 1970


@dataclass(slots=True)
class Space:
    """The entries of one model, salt, key and lossy format."""

    name: str
    files: list[StoredFile] = field(default_factory=list)  # the least recently used first
    header: Header | None = None  # of one file that could be read; None: of none
    planes: tuple[PlaneKind, ...] = ()  # of the headers that were read
    is_signed: bool = False
    reason: str = ""  # why no header could be read

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def num_entries(self) -> int:
        """Chunks of prompts, whose layers and heads may lie in several files."""
        return len({(file.file.folder, file.file.entry) for file in self.files})

    @property
    def num_tokens(self) -> int:
        """Tokens of all entries."""
        entries = {(f.file.folder, f.file.entry): f.file.num_tokens for f in self.files}
        return sum(entries.values())

    @property
    def used(self) -> float:
        """When one of its files was last used, in seconds since 1970."""
        return max((file.used for file in self.files), default=0.0)

    @property
    def precisions(self) -> list[str]:
        """The precisions of its files, by name."""
        return sorted({file.file.precision.name for file in self.files})

    @property
    def fingerprint(self) -> str | None:
        """Of the model; None if no file could be read."""
        return self.header.parts[0].facts.fingerprint if self.header else None

    def has_salt(self, salt: str, key: bytes | None = None) -> bool:
        """Whether these are the entries of a salt, as far as its files tell of which model.

        key: that its files are signed with
        """
        fingerprint = self.fingerprint
        if self.header is None or fingerprint is None:
            return False
        # Files may be those of some stages of a pipeline only, or have wrong names.
        counts = {file.file.layers[-1] + 1 for file in self.files} | set(range(1, _SALTED_LAYERS))
        facts = self.header.parts[0].facts
        total = facts.total_kv_heads or max(file.file.heads[1] for file in self.files)
        formats = {"", *(word for name in self.precisions for word in name.split("+"))}
        signer = None if key is None or not self.is_signed else Key(key)
        return any(
            space_of(fingerprint, (count, total), salt, signer, self.planes, lossy) == self.name
            for lossy in formats
            for count in counts
        )


class Inventory:
    """What a directory has. A snapshot of the moment: other processes may write and delete."""

    def __init__(
        self,
        directory: Directory,
        key: bytes | None = None,
        encryption: Encryption | None = None,
    ) -> None:
        """key:        that files are signed with. Without it signed files are counted, and not read
        encryption: of an encrypted store. Without it files are counted, and not read

        Raises StoreError if the directory cannot be read, if `encryption` has another key than the
        store, or if the store is not encrypted.
        """
        self.directory, self._key, self._encryption = directory, key, encryption
        if encryption is not None:
            config = read_config(directory)
            if config is not None:
                check_key(Encrypted(directory, encryption), config)
        self.num_other_files = 0  # that are not KVX's
        self.unread: list[str] = []  # folders that cannot be read, each with the reason
        self._spaces: dict[str, Space] = {}
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # so that files share their layers
        for used, num_bytes, name in directory.files(self.unread):
            file = parse_name(name, _ANY_SHAPE)
            if file is None or len(file.layers) > _MOST_LAYERS:
                self.num_other_files += 1
                continue
            space = name.partition("/")[0]
            found = self._spaces.setdefault(space, Space(space))
            shared = replace(file, layers=known.setdefault(file.layers, file.layers))
            found.files.append(StoredFile(shared, num_bytes, used))

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk of all spaces."""
        return sum(space.num_bytes for space in self._spaces.values())

    def spaces(self) -> list[Space]:
        """All spaces, the most recently used first; reads headers of each."""
        for space in self._spaces.values():
            if space.header is None and not space.reason:
                self._look_at(space)
        return sorted(self._spaces.values(), key=lambda space: -space.used)

    def has_model(self, beginning: str) -> bool:
        """Whether the fingerprint of a model, or the name of a space, begins so."""
        return any(
            name.startswith(beginning)
            for space in self.spaces()
            for name in (space.name, space.fingerprint or "")
        )

    def chosen(
        self, *, salt: str | None = None, model: str | None = None, before: float | None = None
    ) -> tuple[list[StoredFile], list[Space]]:
        """The files to which all that is given applies, the least recently used first; and the
        spaces that could not be read, whose salt or model is therefore not known.

        salt:   of this salt; "" is that of requests without one
        model:  the beginning of the model's fingerprint or of the space's name
        before: last used before this time, in seconds since 1970
        Raises InvalidArgumentError if nothing is given.
        """
        if salt is None and model is None and before is None:
            raise InvalidArgumentError(
                "salt, model and before are None, expected at least one of them: what is to go"
            )
        if model == "":
            raise InvalidArgumentError(
                "model is '', expected the beginning of a model or of a space; every name begins so"
            )
        found: list[StoredFile] = []
        unknown: list[Space] = []
        for space in self.spaces():
            is_named = model is None or space.name.startswith(model)
            if space.header is None and (salt is not None or not is_named):
                unknown.append(space)
                continue
            if not is_named and not (space.fingerprint or "").startswith(model or ""):
                continue
            if salt is not None and not space.has_salt(salt, self._key):
                continue
            found += (f for f in space.files if before is None or f.used < before)
        return sorted(found, key=lambda file: file.used), unknown

    def delete(self, files: Iterable[StoredFile]) -> Iterator[StoredFile]:
        """Deletes files, one by one, and yields each that is gone. Raises StoreError."""
        for file in files:
            self.directory.delete(file.file.name)
            yield file

    def verify(self) -> Iterator[tuple[StoredFile, StoreError | None]]:
        """Reads every byte of every file; yields each, and what is wrong with it.

        None: it is good. CorruptError: nobody can use it. Another StoreError: it cannot be judged
        here, such as a file that is signed with another key, or was written by a newer version.
        Files that others have deleted meanwhile are left out.
        """
        for space in self._spaces.values():
            for file in space.files:
                try:
                    self._verify(file)
                except StoreError as error:
                    if os.path.lexists(self.directory.root / file.file.name):
                        yield file, error
                else:
                    yield file, None

    def _verify(self, file: StoredFile) -> None:
        path = self.directory.root / file.file.name
        with self._opened(path, file, self._key) as found:
            held = tuple(layer for part in found.header.parts for layer in part.layers)
            shown = len(found.tokens), sorted(held), heads_of(found.header)
            expected = file.file.num_tokens, sorted(file.file.layers), file.file.heads
            if shown != expected:
                raise CorruptError(
                    f"{file.file.name} has tokens, layers and heads {shown}, expected {expected} "
                    "as its name says"
                )
            for layer in held:
                found.read([layer])

    @contextmanager
    def _opened(
        self, path: Path, file: StoredFile, key: bytes | None, name: str = ""
    ) -> Iterator[Snapshot]:
        """The snapshot in a file, decrypted. Its time of last use stays. Raises StoreError.

        name: for messages; "": that of the file
        """
        name = name or file.file.name
        try:
            raw: BinaryIO = io.FileIO(
                os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            )
        except OSError as error:
            raise StoreError(f"{name} cannot be read: {error.strerror}") from None
        with raw:
            if self._encryption is not None:
                raw = self._encryption.opened(file.file.name, raw, name)
            elif is_encrypted(raw):
                raise StoreError(f"{name} is encrypted. Give its key: --encryption-key-file")
            num_tokens = file.file.num_tokens
            with raw, Snapshot.open(raw, name=name, key=key, num_tokens=num_tokens) as found:
                yield found

    def _look_at(self, space: Space) -> None:
        """Reads headers of the last used files: one that is good, and one for each other layers."""
        newest: dict[tuple[int, ...], list[StoredFile]] = {}
        for file in reversed(space.files):
            if len(newest) < _KINDS or file.file.layers in newest:
                newest.setdefault(file.file.layers, []).append(file)
        planes: set[PlaneKind] = set()
        for files in newest.values():
            for file in files[:_HEADERS]:
                header = self._header(space, file)
                if header is not None:
                    space.header = space.header or header
                    planes.update(kind for part in header.parts for kind in part.planes)
                    break
        space.planes = tuple(sorted(planes))

    def _header(self, space: Space, file: StoredFile) -> Header | None:
        """The header of a file, signed with the key or not at all; None if it cannot be read."""
        path = self.directory.root / file.file.name
        for key in (None,) if self._key is None else (self._key, None):
            try:
                with self._opened(path, file, key, name=str(path)) as found:
                    space.is_signed = key is not None
                    return found.header
            except StoreError as error:
                space.reason = str(error).removeprefix(f"{path}").lstrip(": ")
                if key is None and isinstance(error, UnsignedError):
                    space.is_signed = True
        return None
