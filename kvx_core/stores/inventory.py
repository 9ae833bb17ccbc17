"""Inventory: what a directory of a prefix store has, for those who operate it.

Reads names, sizes and times of files, and the records that say what they are: kvx-store.json, each
space.json, each kind. Entries themselves only where it is said. Nothing is trusted: a record counts
if it is what its name says. What is read here counts as no use of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from kvx_core.errors import InvalidArgumentError
from kvx_core.files import ReadFile, close
from kvx_core.snapshot import CorruptError, StoreError
from kvx_core.snapshot.chunk_file import ChunkFile, open_chunk, said_tokens
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.snapshot.text import strict_json
from kvx_core.stores.beneath import FILE, open_beneath
from kvx_core.stores.blobs import Directory
from kvx_core.stores.config import StoreConfig, read_config
from kvx_core.stores.names import (
    is_key,
    is_mark,
    kind_name,
    model_record,
    parse_entry,
    space_record,
)
from kvx_core.stores.space import MAX_BYTES, SpaceRecord
from kvx_core.stores.stored_kind import Lengths, StoredKind
from kvx_core.stores.verified import check_file, secrets_for

_MOST_KINDS = 256  # of a space
_MOST_KIND_BYTES = 32 << 20  # of records of kinds, each once: parsed, they take ten times as much
_MAC_BYTES = 64
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgtp", 1)
    for ending, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]{0,3})\s*", re.IGNORECASE)
_KIND = re.compile("[0-9a-f]{32}")
_MAC = re.compile(r"(space|kinds/[0-9a-f]{32})\.[0-9a-f]{16}\.mac")


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
    """A file of a space."""

    name: str
    num_bytes: int  # on the disk
    used: float  # when it was last used, in seconds since 1970

    @property
    def space(self) -> str:
        """The space that it is of."""
        return self.name.partition("/")[0]

    @property
    def key(self) -> str:
        """The key of an entry, or the rung of a mark."""
        return self.name.rpartition("/")[2].partition(".")[0]

    @property
    def kind(self) -> str:
        """Of an entry, the id of its kind."""
        return self.name.split(".")[1]

    @property
    def is_entry(self) -> bool:
        """Whether it is a file of an entry: no mark, and no record."""
        return parse_entry(self.name) is not None


@dataclass(slots=True)
class Space:
    """What a store has of one model, epoch of its weights, and salt."""

    name: str
    record: SpaceRecord | None = None
    reason: str = ""  # why there is no record
    model: dict[str, Any] = field(default_factory=dict)  # ModelRecord's fields, if known
    kinds: dict[str, StoredKind] = field(default_factory=dict)  # by id
    marks: list[StoredFile] = field(default_factory=list)
    records: list[StoredFile] = field(default_factory=list)  # and their MACs

    @property
    def entries(self) -> list[StoredFile]:
        """The files of entries, the least recently used first."""
        found = [file for kind in self.kinds.values() for file in kind.files]
        return sorted(found, key=lambda file: file.used)

    @property
    def files(self) -> list[StoredFile]:
        """All files."""
        return [*self.entries, *self.marks, *self.records]

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def num_entries(self) -> int:
        """Chunks of prompts, whose layers and heads may lie in several files."""
        return len({file.key for kind in self.of_tokens for file in kind.files})

    @property
    def num_states(self) -> int:
        """Prefixes of prompts that have states."""
        states = (kind for kind in self.kinds.values() if kind.is_states)
        return len({file.key for kind in states for file in kind.files})

    @property
    def of_tokens(self) -> list[StoredKind]:
        """The kinds that are not of states alone."""
        return [kind for kind in self.kinds.values() if not kind.is_states]

    @property
    def used(self) -> float:
        """When one of its files was last used, in seconds since 1970."""
        return max((file.used for file in self.entries or self.files), default=0.0)

    @property
    def precisions(self) -> list[str]:
        """The precisions of its files, by name."""
        return sorted({name for kind in self._known for name in kind.precisions})

    @property
    def is_signed(self) -> bool:
        """Whether entries are signed."""
        return any(kind.kind.keyed for kind in self._known if kind.kind)

    @property
    def is_encrypted(self) -> bool:
        """Whether entries are encrypted."""
        return any(kind.kind.encrypted for kind in self._known if kind.kind)

    @property
    def _known(self) -> list[StoredKind]:
        return [kind for kind in self.kinds.values() if kind.kind is not None]

    def is_model(self, beginning: str) -> bool:
        """Whether the model's fingerprint, or the space's name, begins so."""
        fingerprint = self.record.fingerprint if self.record else ""
        return self.name.startswith(beginning) or fingerprint.startswith(beginning)


class Inventory:
    """What a directory has. A snapshot of the moment: other processes may write and delete."""

    def __init__(self, directory: Directory, secrets: Secrets | None = None) -> None:
        """secrets: that files are signed and encrypted with. Without them records are read, and
                 what needs them is not

        Raises StoreError if it is no store of this format, has other keys, or cannot be read.
        """
        self.directory, self.secrets = directory, secrets or Secrets()
        self.config = self._config()
        self.num_other_files = 0  # that are not KVX's
        self.unread: list[str] = []  # folders that cannot be read, each with the reason
        self._spaces: dict[str, Space] = {}
        self._kinds: dict[str, Kind | str] = {}  # by id; or why there is none
        self._kind_bytes = 0
        self._lengths: dict[str, Lengths] = {}  # of kinds, by id
        for used, num_bytes, name in directory.files(self.unread):
            file = StoredFile(name, num_bytes, used)
            if not self._take(file):
                self.num_other_files += 1
        for space in self._spaces.values():
            self._look_at(space)

    def _config(self) -> StoreConfig:
        has_keys = self.secrets.is_keyed or self.secrets.is_encrypted
        config = read_config(self.directory, self.secrets if has_keys else None)
        if config is None:
            root = self.directory.root
            raise StoreError(
                f"{root} is no store: it has no kvx-store.json, which the first engine writes. "
                "Expected `path` of the connector's settings"
            )
        return config

    def _take(self, file: StoredFile) -> bool:
        """Puts a file where it belongs; False: it is none of a store."""
        entry = parse_entry(file.name)
        name, _, rest = file.name.partition("/")
        if not is_key(name):
            return False
        if entry is not None:
            kinds = self._space(name).kinds
            kinds.setdefault(entry.kind, StoredKind(entry.kind)).files.append(file)
        elif is_mark(file.name):
            self._space(name).marks.append(file)
        elif (
            file.name in (space_record(name), model_record(name))
            or _MAC.fullmatch(rest)
            or self._is_kind(file.name)
        ):
            self._space(name).records.append(file)
        else:
            return False
        return True

    def _is_kind(self, name: str) -> bool:
        space, id = name.partition("/")[0], name.rpartition("/")[2].removesuffix(".json")
        return bool(_KIND.fullmatch(id)) and name == kind_name(space, id)

    def _space(self, name: str) -> Space:
        return self._spaces.setdefault(name, Space(name))

    # ---- records ----

    def _look_at(self, space: Space) -> None:
        """Reads the records of a space."""
        name = space_record(space.name)
        try:
            space.record = SpaceRecord.parse(self.read(name, MAX_BYTES), space.name)
        except StoreError as error:
            space.reason = str(error)
        for file in space.records:
            if file.name == model_record(space.name):
                with suppress(StoreError, ValueError, TypeError, RecursionError):
                    space.model = dict(strict_json(self.model_text(space))[1])
            elif self._is_kind(file.name):
                id = file.name.rpartition("/")[2].removesuffix(".json")
                space.kinds.setdefault(id, StoredKind(id))
        for number, kind in enumerate(
            sorted(space.kinds.values(), key=lambda kind: -len(kind.files))
        ):
            if number >= _MOST_KINDS:
                kind.reason = f"{space.name} has more than {_MOST_KINDS} kinds"
                continue
            found = self._kind(kind_name(space.name, kind.id), kind.id)
            if isinstance(found, Kind):
                kind.kind = found
            else:
                kind.reason = found

    def model_text(self, space: Space) -> bytes:
        """The record of a space's model. Raises CorruptError, StoreError."""
        name = model_record(space.name)
        raw = self.read(name, MAX_BYTES)
        if space.record is None:
            raise StoreError(f"{name} cannot be judged: {space.reason}")
        if hashlib.sha256(raw).hexdigest() != space.record.fingerprint:
            raise CorruptError(f"{name} is not the record of model {space.record.fingerprint}")
        return raw

    def _kind(self, name: str, id: str) -> Kind | str:
        """A kind, or why it cannot be read. Spaces of one model have the same kinds."""
        try:
            raw = self.read(name, MAX_BYTES)
        except StoreError as error:
            return str(error)
        if hashlib.sha256(raw).hexdigest()[:32] != id:
            return f"{name} is not what its name says"
        if id not in self._kinds:
            self._kind_bytes += len(raw)
            if self._kind_bytes > _MOST_KIND_BYTES:
                return f"{name} is not read: kinds of this store have more than 32 MiB in all"
            try:
                self._kinds[id] = Kind.parse(raw, id)
            except StoreError as error:
                self._kinds[id] = f"{name}: {error}"
        return self._kinds[id]

    def opened(self, name: str) -> BinaryIO:
        """A regular file, unbuffered; its time of last use stays.

        Raises StoreError if it does not exist (any more) or cannot be read.
        """
        try:
            root = os.open(self.directory.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                handle = open_beneath(root, name, FILE)
            finally:
                close(root)
            file = ReadFile(handle)
        except OSError as error:
            raise StoreError(f"{name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            file.close()
            raise StoreError(f"{name} is no regular file, expected one")
        return file

    @contextmanager
    def opened_entry(self, file: StoredFile) -> Iterator[ChunkFile]:
        """The file of an entry, open as long as the context; its head has been checked.

        Raises CorruptError, StoreError.
        """
        stored = self._spaces[file.space].kinds[file.kind]
        if stored.kind is None:
            raise StoreError(f"{file.name} cannot be read without its kind: {stored.reason}")
        secrets = secrets_for(self.secrets, stored.kind, file.name)
        with self.opened(file.name) as raw:
            chunk = open_chunk(raw, stored.kind, secrets, name=file.name, key=file.key)
            if chunk.num_tokens > self.config.chunk_tokens:
                raise CorruptError(
                    f"{file.name} has {chunk.num_tokens} tokens, expected at most chunk_tokens "
                    f"{self.config.chunk_tokens}"
                )
            yield chunk

    def read(self, name: str, most_bytes: int) -> bytes:
        """The bytes of a file. Raises StoreError; CorruptError if there are more."""
        with self.opened(name) as file:
            try:
                raw = file.read(most_bytes + 1)
            except OSError as error:
                raise StoreError(f"{name} cannot be read: {error.strerror}") from None
        if len(raw) > most_bytes:
            raise CorruptError(f"{name} has more than {most_bytes} bytes")
        return raw

    # ---- tokens ----

    def tokens(self, space: Space, *, read: bool = False) -> dict[str, int]:
        """How many tokens each entry has, by its key, as far as lengths of files tell.

        read: where they do not, since bytes are encoded, reads what the files themselves say
        """
        found: dict[str, int] = {}
        for kind in space.of_tokens:
            lengths = self._lengths_of(kind)
            for file in kind.files:
                said = lengths.tokens(self._length(file)) if lengths else 0
                said = said or (self._said_tokens(file) if read else 0)
                if said:
                    found[file.key] = max(said, found.get(file.key, 0))
        return found

    def _lengths_of(self, kind: StoredKind) -> Lengths | None:
        if kind.kind is not None and kind.id not in self._lengths:
            self._lengths[kind.id] = Lengths(kind.kind, self.config.chunk_tokens)
        return self._lengths.get(kind.id)

    def _length(self, file: StoredFile) -> int:
        """Bytes from the first to the last one; 0 if the file is gone."""
        try:
            return os.lstat(f"{self.directory.root}/{file.name}").st_size
        except OSError:
            return 0

    def _said_tokens(self, file: StoredFile) -> int:
        """The number of tokens that an entry says it has; 0: it says none that it can have."""
        try:
            with self.opened(file.name) as raw:
                said = said_tokens(raw, file.name)
        except (OSError, StoreError):
            return 0
        return said if said <= self.config.chunk_tokens else 0

    # ---- what there is ----

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk of all spaces."""
        return sum(space.num_bytes for space in self._spaces.values())

    def spaces(
        self, *, salt: str | None = None, model: str | None = None, epoch: str | None = None
    ) -> list[Space]:
        """The spaces to which all that is given applies, the most recently used first.

        salt:  of this salt; "" is that of requests without one
        model: the beginning of the model's fingerprint or of the space's name
        epoch: the beginning of an epoch; "" is that of the weights in the model's files
        Those whose record cannot be read count if they are asked for by their name alone.
        Raises InvalidArgumentError.
        """
        if model == "":
            raise InvalidArgumentError(
                "model is '', expected the beginning of a model or of a space; every name begins so"
            )
        found = [
            space
            for space in self._spaces.values()
            if (model is None or space.is_model(model))
            and (salt is None or (space.record is not None and space.record.has_salt(salt)))
            and (epoch is None or (space.record is not None and _has_epoch(space.record, epoch)))
        ]
        return sorted(found, key=lambda space: -space.used)

    def chosen(
        self,
        *,
        salt: str | None = None,
        model: str | None = None,
        epoch: str | None = None,
        before: float | None = None,
    ) -> tuple[list[StoredFile], list[Space]]:
        """The files to which all that is given applies, the least recently used first; and the
        spaces whose record cannot be read, of which it is therefore not known.

        salt, model, epoch: see `spaces`
        before: last used before this time, in seconds since 1970
        The records of a space are among the files if nothing else of it stays.
        Raises InvalidArgumentError if nothing is given.
        """
        if salt is None and model is None and epoch is None and before is None:
            raise InvalidArgumentError(
                "salt, model, epoch and before are None, expected at least one of them: what is to "
                "go"
            )
        found: list[StoredFile] = []
        for space in self.spaces(salt=salt, model=model, epoch=epoch):
            held = [*space.entries, *space.marks]
            old = [file for file in held if before is None or file.used < before]
            if len(old) == len(held):
                old += [file for file in space.records if before is None or file.used < before]
            found += old
        unknown = []
        if salt is not None or model is not None or epoch is not None:
            unknown = [
                space
                for space in self._spaces.values()
                if space.record is None
                and not (salt is None and epoch is None and model and space.is_model(model))
            ]
        return sorted(found, key=lambda file: file.used), unknown

    def verify(self) -> Iterator[tuple[StoredFile, StoreError | None]]:
        """Reads every byte of every file; yields each, and what is wrong with it.

        None: it is good. CorruptError: nobody can use it. Another StoreError: it cannot be judged
        here, such as a file that is signed with another key, or whose kind is not known.
        Files that others have deleted meanwhile are left out.
        """
        for space in self._spaces.values():
            for file in space.files:
                try:
                    check_file(self, space, file)
                except StoreError as error:
                    if os.path.lexists(self.directory.root / file.name):
                        yield file, error
                else:
                    yield file, None

    def delete(self, files: Iterable[StoredFile]) -> Iterator[StoredFile]:
        """Deletes files, one by one, and yields each that is gone. Raises StoreError."""
        for file in files:
            self.directory.delete(file.name)
            yield file


def _has_epoch(record: SpaceRecord, beginning: str) -> bool:
    return record.epoch.startswith(beginning) if beginning else not record.epoch
