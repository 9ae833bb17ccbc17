"""Tiered: one store on several levels, such as memory, a disk and an object store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from kvx_core._c.os_files import OpenFile
from kvx_core.errors import CorruptError, InvalidArgumentError, StoreError
from kvx_core.stores.blob_store import BlobStore, Content, Put, Write, check_name
from kvx_core.stores.tiers.copies import Copies
from kvx_core.stores.tiers.remote import written

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

_MOST_RECORDS = 1 << 12  # whose names are remembered
_RECORDS = (".json", ".mac")

Result = TypeVar("Result")


class Tiered(BlobStore):
    """A BlobStore on several levels, the fastest first. Each file is looked for from the first on.

    A file is put on the first level and, if it is durable, on all levels down to the first one that
    survives a failure of the machine; threads copy it to the levels below. A file that is found
    below is copied up when it is loaded. A level that fails costs its files, and nothing else.
    """

    takes_hints = True

    def __init__(self, levels: Sequence[BlobStore]) -> None:
        """levels: at least one. Levels may have files that others do not have.

        Raises InvalidArgumentError.
        """
        if not levels:
            raise InvalidArgumentError("levels is empty, expected at least one BlobStore")
        self.levels = tuple(levels)
        lasting = [i for i, level in enumerate(levels) if not level.is_volatile]
        self._num_sync = lasting[0] + 1 if lasting else len(levels)
        self._num_near = sum(not level.is_far for level in levels)
        if any(level.is_far for level in levels[: self._num_near]):
            raise InvalidArgumentError(
                "levels has a far store before a near one, expected the fastest first"
            )
        self.is_far = self._num_near < len(levels)
        self.is_volatile = not lasting
        self._home = self.levels[self._num_sync - 1]
        self.root, self.usage = self._home.root, self._home.usage
        self._copies = Copies(self.levels)
        self._records = set[str]()  # that this process has copied to all levels

    @property
    def max_bytes(self) -> int | None:  # type: ignore[override]
        """The limit of the first level that lasts, which kvx-store.json keeps."""
        return self._home.max_bytes

    # ---- writing ----

    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """Does what BlobStore.put says."""
        (found,) = self.put_all([(name, write)], durable=durable)
        if isinstance(found, StoreError):
            raise found
        return found

    def put_all(
        self, files: Sequence[tuple[str, Write]], num_bytes: int = 0, *, durable: bool = True
    ) -> list[Put]:
        """Does what BlobStore.put_all says."""
        num_levels = self._num_sync if durable else 1
        if num_levels > 1:
            files = [(name, _kept(write)) for name, write in files]
        results: list[Put] = []
        for level in self.levels[:num_levels]:
            results = level.put_all(files, num_bytes, durable=durable and not level.is_volatile)
        for (name, _), found in zip(files, results, strict=True):
            if found is True:
                self._copies.down(name, num_levels)
        return results

    def replace(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """Does what BlobStore.replace says."""
        check_name(name)
        self._copies.cancel(name)
        num_levels = self._num_sync if durable else 1
        write = _kept(write)
        for level in self.levels[:num_levels]:
            if not level.replace(name, write, durable=durable and not level.is_volatile):
                return False
        self._copies.down(name, num_levels, replaces=True)
        return True

    def delete(self, name: str) -> None:
        """Does what BlobStore.delete says, on every level."""
        check_name(name)
        self._copies.cancel(name)
        self._of_all(lambda level: level.delete(name))

    # ---- reading ----

    def open(self, name: str) -> BinaryIO | None:
        """Does what BlobStore.open says."""
        self._copies.wait_for(name)
        return self._first_of(lambda level: level.open(name))

    def fetch(
        self, name: str, views: tuple[Buffer, ...], least: int = 0, most: int = -1
    ) -> OpenFile | None:
        """Does what BlobStore.fetch says. Waits for a file that is on its way up."""
        self._copies.wait_for(name)
        return self._first_of(lambda level: level.fetch(name, views, least, most))

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Does what BlobStore.read says. Records of spaces and kinds that are read are copied to
        all levels, once.
        """
        found = self._first_of(lambda level: level.read(name, most_bytes))
        if found is not None and "/" in name and name.endswith(_RECORDS):
            self.share(name, found)
        return found

    def share(self, name: str, content: bytes) -> None:
        """Has a record copied to all levels that lack it, if this process has not done so yet."""
        if name in self._records:
            return
        if len(self._records) >= _MOST_RECORDS:
            self._records.clear()
        self._records.add(name)
        for level in self.levels[: self._num_near]:
            with suppress(StoreError):
                level.put(name, Content.of(content))
        self._copies.down(name, self._num_near)

    def is_there(self, name: str) -> bool:
        """Does what BlobStore.is_there says."""
        return self._first_of(lambda level: level.is_there(name) or None) is not None

    def is_near(self, name: str) -> bool:
        """Does what BlobStore.is_near says."""
        with suppress(StoreError):
            return any(level.is_there(name) for level in self.levels[: self._num_near])
        return False

    def are_there(self, names: Sequence[str]) -> list[bool]:
        """Does what BlobStore.are_there says: each level is asked for what those before lack."""
        found = dict.fromkeys(names, False)

        def ask(level: BlobStore) -> None:
            missing = [name for name, is_there in found.items() if not is_there]
            found.update(zip(missing, level.are_there(missing), strict=True))

        self._of_all(ask)
        return [found[name] for name in names]

    def names(self, folder: str) -> list[str]:
        """Does what BlobStore.names says: the names of all levels."""
        return sorted({name for level in self.levels for name in level.names(folder)})

    def folder(self) -> int | None:
        """Does what BlobStore.folder says, of the first level: `fetch` finds what it lacks."""
        return self.levels[0].folder()

    def expect(self, names: Sequence[str], num_bytes: int, *, whole: bool = False) -> None:
        """Does what BlobStore.expect says. Whole files that the first level lacks are copied up."""
        if len(self.levels) == 1:
            self.levels[0].expect(names, num_bytes, whole=whole)
        elif whole:
            for name in names:
                with suppress(StoreError):
                    if not self.levels[0].is_there(name):
                        self._copies.up(name, num_bytes, waits=not self.is_near(name))
        elif self.is_far:
            far = [name for name in names if not self.is_near(name)]
            for level in self.levels[self._num_near :]:
                level.expect(far, num_bytes)

    def path_of(self, name: str) -> str:
        """Does what BlobStore.path_of says, of the first level that lasts."""
        return self._home.path_of(name)

    def settle(self, seconds: float) -> bool:
        """Does what BlobStore.settle says."""
        return self._copies.settle(seconds)

    def _first_of(self, ask: Callable[[BlobStore], Result | None]) -> Result | None:
        """Returns the answer of the first level that has one. Raises StoreError as `_of_all`."""
        answer: Result | None = None

        def first(level: BlobStore) -> None:
            nonlocal answer
            if answer is None:
                answer = ask(level)

        self._of_all(first)
        return answer

    def _of_all(self, call: Callable[[BlobStore], None]) -> None:
        """Makes a call to all levels, one after the other.

        Raises the StoreError of a level that files are put on at once, and the CorruptError of any.
        What copies go to may fail: then it has nothing.
        """
        failure: StoreError | None = None
        for i, level in enumerate(self.levels):
            try:
                call(level)
            except CorruptError:
                raise
            except StoreError as error:
                if i < self._num_sync:
                    failure = failure or error
        if failure is not None:
            raise failure


def _kept(write: Write) -> Content:
    """Returns the same content, which is made once and then written several times."""
    if isinstance(write, Content):
        return Content(cache(write.parts))
    return Content(cache(lambda: [written(write)]))
