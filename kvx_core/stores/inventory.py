"""Inventory: what a directory of a prefix store has, for those who operate it.

Reads names, sizes and times of files, and the header of one file of each space: the entries of one
model, salt, key and lossy format. Files are not trusted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

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
from kvx_core.stores.keys import EntryFile, parse_name, space_of

_ANY_SHAPE = 10**9, 10**9  # layers and heads that no model has
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgtp", 1)
    for ending, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]{0,3})\s*", re.IGNORECASE)


def num_bytes_of(text: str | int, name: str = "size") -> int:
    """A number of bytes, from an int or a text: "50GB" is 50 * 10**9, "1.5TiB" 1.5 * 2**40.

    name: what errors call it
    Raises InvalidArgumentError.
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if type(text) is int:
        number = text
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
    is_signed: bool = False

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
        if self.header is None or fingerprint is None or not self.files:
            return False
        num_layers = 1 + max(layer for file in self.files for layer in file.file.layers)
        facts = self.header.parts[0].facts
        total = facts.total_kv_heads or max(file.file.heads[1] for file in self.files)
        planes: list[PlaneKind] = [kind for part in self.header.parts for kind in part.planes]
        formats = {"", *(word for name in self.precisions for word in name.split("+"))}
        signer = None if key is None else Key(key)
        shape = num_layers, total
        return any(
            space_of(fingerprint, shape, salt, signer, planes, lossy) == self.name
            for lossy in formats
        )


class Inventory:
    """What a directory has. A snapshot of the moment: other processes may write and delete."""

    def __init__(self, directory: Directory, key: bytes | None = None) -> None:
        """key: that files are signed with. Without it signed files are counted, and not read.

        Raises StoreError if the directory cannot be read.
        """
        self.directory, self._key = directory, key
        self.num_other_files = 0  # that are not KVX's
        self._spaces: dict[str, Space] = {}
        for used, num_bytes, name in directory.files():
            file = parse_name(name, _ANY_SHAPE)
            if file is None:
                self.num_other_files += 1
                continue
            space = name.partition("/")[0]
            found = self._spaces.setdefault(space, Space(space))
            found.files.append(StoredFile(file, num_bytes, used))

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk of all spaces."""
        return sum(space.num_bytes for space in self._spaces.values())

    def spaces(self) -> list[Space]:
        """All spaces, the most recently used first; reads a header of each."""
        for space in self._spaces.values():
            if space.header is None:
                self._look_at(space)
        return sorted(self._spaces.values(), key=lambda space: -space.used)

    def chosen(
        self, *, salt: str | None = None, model: str | None = None, before: float | None = None
    ) -> list[StoredFile]:
        """The files to which all that is given applies, the least recently used first.

        salt:   of this salt; "" is that of requests without one
        model:  the beginning of the model's fingerprint or of the space's name
        before: last used before this time, in seconds since 1970
        Raises InvalidArgumentError if nothing is given.
        """
        if salt is None and model is None and before is None:
            raise InvalidArgumentError(
                "salt, model and before are None, expected at least one of them: what is to go"
            )
        found: list[StoredFile] = []
        for space in self.spaces():
            names = (space.name, space.fingerprint or "")
            if model is not None and not any(name.startswith(model) for name in names):
                continue
            if salt is not None and not space.has_salt(salt, self._key):
                continue
            found += (f for f in space.files if before is None or f.used < before)
        return sorted(found, key=lambda file: file.used)

    def delete(self, files: Iterable[StoredFile]) -> Iterator[StoredFile]:
        """Deletes files, one by one, and yields each that is gone. Raises StoreError."""
        for file in files:
            self.directory.delete(file.file.name)
            yield file

    def verify(
        self, saw: Callable[[StoredFile], None] = lambda file: None
    ) -> Iterator[tuple[StoredFile, str]]:
        """Reads every byte of every file; yields those that are not good, and why.

        saw: called after each file
        """
        for space in self._spaces.values():
            for file in space.files:
                try:
                    self._verify(file)
                except StoreError as error:
                    yield file, str(error)
                saw(file)

    def _verify(self, file: StoredFile) -> None:
        path = self.directory.root / file.file.name
        with Snapshot.open(path, name=file.file.name, key=self._key) as found:
            held = tuple(layer for part in found.header.parts for layer in part.layers)
            shown = len(found.tokens), sorted(held), found.header.heads
            expected = file.file.num_tokens, sorted(file.file.layers), file.file.heads
            if shown != expected:
                raise CorruptError(
                    f"{file.file.name} has tokens, layers and heads {shown}, expected {expected} "
                    "as its name says"
                )
            for layer in held:
                found.read([layer])

    def _look_at(self, space: Space) -> None:
        """Reads headers until one is good; the last used files first."""
        for file in list(reversed(space.files))[:8]:
            try:
                with Snapshot.open(self.directory.root / file.file.name, key=self._key) as found:
                    space.header, space.is_signed = found.header, self._key is not None
                return
            except StoreError as error:
                space.is_signed = space.is_signed or isinstance(error, UnsignedError)
