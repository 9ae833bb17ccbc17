"""Inventory: lists the spaces, kinds and files of a prefix store, for its operators.

Reads names, sizes and times of files, and the records: kvx-store.json, space.json, model.json and
the record of each kind. Reads entries only in methods that say so. Trusts nothing: a record counts
only if its content agrees with its name. Reading a file here does not mark it as used.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import StoreError
from kvx_core.snapshot.chunk_file import ChunkFile, said_tokens
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.blob_store import ListedStore
from kvx_core.stores.names import (
    is_key,
    is_mark,
    kind_name,
    model_record,
    parse_entry,
    space_record,
)
from kvx_core.stores.space import MAX_BYTES, SpaceRecord
from kvx_core.stores.store_reader import StoreReader
from kvx_core.stores.stored_kind import Lengths, StoredFile, StoredKind
from kvx_core.stores.stored_space import Space
from kvx_core.stores.strict_json import strict_json
from kvx_core.stores.verified import check_file

_MOST_KINDS = 256  # in a space
_MOST_KIND_BYTES = 32 << 20  # of different records of kinds; parsed, they take ten times as much
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgtp", 1)
    for ending, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]{0,3})\s*", re.IGNORECASE)
_KIND = re.compile("[0-9a-f]{32}")
_MAC = re.compile(r"(space|kinds/[0-9a-f]{32})\.[0-9a-f]{16}\.mac")


def num_bytes_of(text: object, name: str = "size") -> int:
    """Returns a number of bytes from a number or a text: "50GB" is 50 * 10**9, "1.5TiB" is
    1.5 * 2**40.

    name: the name of the argument in error messages
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


class Inventory(StoreReader):
    """The files of a store at one moment: other processes may write and delete files later."""

    def __init__(self, blobs: ListedStore, secrets: Secrets | None = None) -> None:
        """Takes the arguments of StoreReader, and raises its errors."""
        super().__init__(blobs, secrets)
        self.num_other_files = 0  # files that are not KVX's
        self.unread: list[str] = []  # folders that cannot be read, each with the reason
        self._spaces: dict[str, Space] = {}
        self._kinds: dict[str, Kind | str] = {}  # by id; a str says why a kind is unusable
        self._kind_bytes = 0
        self._lengths: dict[str, Lengths] = {}  # by the id of the kind
        for used, num_bytes, name in blobs.files(self.unread):
            file = StoredFile(name, num_bytes, used)
            if not self._take(file):
                self.num_other_files += 1
        for space in self._spaces.values():
            self._look_at(space)

    def _take(self, file: StoredFile) -> bool:
        """Adds a file to its space. Returns False if it is not a file of a store."""
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
        """Reads the records of a space and of its kinds."""
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

    def _kind(self, name: str, id: str) -> Kind | str:
        """Returns a kind, or the reason why it cannot be read.

        Parses each record once: spaces of one model have the same kinds.
        """
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

    def opened_entry(self, file: StoredFile) -> AbstractContextManager[ChunkFile]:
        """Opens the file of an entry for the length of a `with` block, and checks its head.

        Raises CorruptError, StoreError.
        """
        return self.opened_chunk(file, self._spaces[file.space].kinds[file.kind])

    # ---- tokens ----

    def tokens(self, space: Space, *, read: bool = False) -> dict[str, int]:
        """Returns the number of tokens of each entry by its key, as far as lengths of files tell.

        read: True: if the length does not tell, since bytes are encoded, reads the number that the
              file itself names
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

    def _exists(self, name: str) -> bool:
        if self.blobs.root is None:
            return self.blobs.is_there(name)
        return os.path.lexists(self.blobs.root / name)

    def _length(self, file: StoredFile) -> int:
        """Returns the length of a file in bytes; 0 if the file is gone."""
        if self.blobs.root is None:
            return file.num_bytes
        try:
            return os.lstat(f"{self.blobs.root}/{file.name}").st_size
        except OSError:
            return 0

    def _said_tokens(self, file: StoredFile) -> int:
        """Returns the number of tokens that an entry's file names; 0 if it cannot be read or the
        number is too large.
        """
        try:
            with self.opened(file.name) as raw:
                said = said_tokens(raw, file.name)
        except (OSError, StoreError):
            return 0
        return said if said <= self.config.chunk_tokens else 0

    # ---- spaces and files ----

    @property
    def num_bytes(self) -> int:
        """The bytes that the files of all spaces take on the disk."""
        return sum(space.num_bytes for space in self._spaces.values())

    def spaces(
        self, *, salt: str | None = None, model: str | None = None, epoch: str | None = None
    ) -> list[Space]:
        """Returns the spaces that match all given arguments, the most recently used first.

        salt:  the salt of the space; "" for requests without a salt
        model: the beginning of the model's fingerprint or of the space's name
        epoch: the beginning of an epoch; "" for the weights in the model's files
        A space whose record cannot be read matches by its name only, and never if `salt` or `epoch`
        is given. Raises InvalidArgumentError.
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
        """Returns the files that match all given arguments, the least recently used first. Also
        returns the spaces that may match, but whose record cannot be read.

        salt, model, epoch: see `spaces`
        before: files must have been last used before this time, in seconds since 1970
        Includes matching records of a space only if all its entries and marks match too.
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
        """Reads every byte of every file of the spaces. Yields each file with its error or None.

        None: the file is good. CorruptError: nobody can use it. Another StoreError: it cannot be
        judged here, for example because it is signed with another key or its kind is not known.
        Leaves out files that others have deleted meanwhile.
        """
        for space in self._spaces.values():
            for file in space.files:
                try:
                    check_file(self, space, file)
                except StoreError as error:
                    if self._exists(file.name):
                        yield file, error
                else:
                    yield file, None

    def delete(self, files: Iterable[StoredFile]) -> Iterator[StoredFile]:
        """Deletes files one by one. Yields each file after it is deleted. Raises StoreError."""
        for file in files:
            self.blobs.delete(file.name)
            yield file


def _has_epoch(record: SpaceRecord, beginning: str) -> bool:
    return record.epoch.startswith(beginning) if beginning else not record.epoch
