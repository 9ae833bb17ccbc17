"""Index: what is known of a store's folders and files without asking its disk."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from kvx_core.snapshot import StoreError
from kvx_core.stores.keys import EntryFile, Ids

_MAX_NAMES = 1 << 18  # of files, of files held, and of folders' entries: at most 100 MB each
_MAX_TOKENS = 1 << 23  # tokens of files that are remembered, 64 MB
_NAME_TOKENS = 64  # what a file's name takes of that
_MAX_LISTED = 1 << 12  # a folder with so many names is large: they are not remembered
_MAX_NOTED = 16  # folders
_MAX_COMPARED = 16  # names that one lookup from memory looks through
_MAX_FAILURES = 16  # that are remembered
_LATELY_SECONDS = 1.0  # see `lately`


class Unknown(Exception):
    """Memory does not have the answer, or had it too long ago. Never leaves kvx_core."""


@dataclass(slots=True)
class _Folder:
    names: dict[str, None]
    seen: float
    is_large: bool  # it has names that are not known


class Index:
    """Remembers what lookups have seen. Threads may share one.

    Other processes write and delete in the same store: what was seen more than `fresh_seconds` ago
    counts as unknown, except for `is_held`. Bounded: the least recently seen is forgotten first.
    """

    def __init__(
        self, fresh_seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fresh_seconds = fresh_seconds
        self._clock = clock
        self._lock = Lock()
        self._files: OrderedDict[str, float] = OrderedDict()  # when each was last seen
        self._held: OrderedDict[str, None] = OrderedDict()  # see `held`
        self._doubted: dict[str, None] = {}  # of these, what to ask the disk about
        self._folders: OrderedDict[str, _Folder] = OrderedDict()
        self._noted: dict[str, None] = {}  # folders to list
        self._tokens: OrderedDict[str, Ids] = OrderedDict()  # of files that were found good
        self._num_names = self._num_tokens = 0
        self._num_corrupt = 0
        self._failures: deque[StoreError] = deque(maxlen=_MAX_FAILURES)

    # ---- what lookups see ----

    def listed(self, folder: str, names: list[str]) -> None:
        """A folder had these names just now."""
        is_large = len(names) >= _MAX_LISTED
        found = {} if is_large else dict.fromkeys(names)
        with self._lock:
            self._forget_folder(folder)
            self._folders[folder] = _Folder(found, self._clock(), is_large)
            self._num_names += 1 + len(found)
            self._forget_folders()

    def saw(self, name: str) -> None:
        """A file was there just now."""
        with self._lock:
            self._saw(name)

    def held(self, name: str) -> None:
        """This process has read all of a file just now, and it was good."""
        with self._lock:
            self._saw(name)
            self._hold(name)

    def expect(self, name: str) -> None:
        """This process is about to write a file: `wrote`, `missed` or `doubt` follows."""
        with self._lock:
            self._hold(name)

    def wrote(self, name: str) -> None:
        """This process has stored a file just now, perhaps in new folders."""
        with self._lock:
            self._saw(name)
            self._hold(name)
            while "/" in name:
                name, _, last = name.rpartition("/")
                if folder := self._folders.get(name):
                    self._num_names += last not in folder.names
                    folder.names[last] = None
            self._forget_folders()

    def missed(self, name: str) -> None:
        """A file was not there just now, or was not good."""
        with self._lock:
            self._forget_file(name)
            if (found := self._tokens.pop(name, None)) is not None:
                self._num_tokens -= len(found) + _NAME_TOKENS
            folder, _, last = name.rpartition("/")
            if listing := self._folders.get(folder):
                self._num_names -= last in listing.names
                listing.names.pop(last, None)

    def corrupt(self, name: str) -> None:
        """A file was corrupt just now, and is deleted."""
        self.missed(name)
        with self._lock:
            self._num_corrupt += 1

    @property
    def num_corrupt(self) -> int:
        """How many files were found corrupt until now."""
        return self._num_corrupt

    def failed(self, error: StoreError) -> None:
        """A file that may be there could not be opened or read just now. For what the file system
        did: a file that has gone, or that is of another version, is no failure.
        """
        if isinstance(error.__cause__ or error.__context__, OSError):
            with self._lock:
                self._failures.append(error)

    def take_failures(self) -> list[StoreError]:
        """What `failed` was called with since the last call: the last 16."""
        with self._lock:
            failures = list(self._failures)
            self._failures.clear()
        return failures

    def doubt(self, name: str) -> None:
        """A file may not be there or not be good: memory does not answer for it any more."""
        with self._lock:
            self._forget_file(name)

    def keep_tokens(self, name: str, tokens: Ids) -> None:
        """A good file has these tokens."""
        with self._lock:
            if name not in self._tokens:
                self._tokens[name] = tokens
                self._num_tokens += len(tokens) + _NAME_TOKENS
            while self._num_tokens > _MAX_TOKENS and len(self._tokens) > 1:
                self._num_tokens -= len(self._tokens.popitem(last=False)[1]) + _NAME_TOKENS

    def tokens_of(self, name: str) -> Ids | None:
        """The tokens of a file, which its name decides for ever; None if they are not known."""
        with self._lock:
            found = self._tokens.get(name)
            if found is not None:
                self._tokens.move_to_end(name)
            return found

    def is_worth_listing(self, folder: str) -> bool:
        """Whether a folder is unknown, and was not large when it was last listed."""
        with self._lock:
            found = self._folders.get(folder)
            if found is None:
                return True
            return not self._is_fresh(found.seen) and not found.is_large

    def note(self, folder: str) -> None:
        """A folder is to be listed soon."""
        with self._lock:
            if len(self._noted) < _MAX_NOTED:
                self._noted[folder] = None

    def take_noted(self) -> list[str]:
        """Folders that were noted since the last call."""
        with self._lock:
            noted, self._noted = self._noted, {}
        return list(noted)

    # ---- what memory answers ----

    def is_seen(self, name: str) -> bool:
        """Whether a file was there when it was last asked for, and not too long ago."""
        with self._lock:
            seen = self._files.get(name)
            return seen is not None and self._is_fresh(seen)

    def is_held(self, name: str) -> bool:
        """Whether this process has loaded or written a file, however long ago, or is about to write
        it.

        Others may have deleted it: see `take_doubted`.
        """
        with self._lock:
            if name not in self._held:
                return False
            if not self._is_fresh(self._files.get(name, float("-inf"))):
                self._doubted[name] = None
            return True

    @property
    def has_doubted(self) -> bool:
        """Whether `take_doubted` has something to return."""
        return bool(self._doubted)

    def take_doubted(self) -> list[str]:
        """Files for which `is_held` was True since the last call although not seen lately."""
        with self._lock:
            doubted, self._doubted = self._doubted, {}
        return list(doubted)

    def is_there(self, name: str) -> bool:
        """Whether a file exists. Raises Unknown."""
        if self.is_seen(name):
            return True
        folder, _, last = name.rpartition("/")
        with self._lock:
            if last not in self._known_names(folder):
                return False
        raise Unknown

    def may_have_names(self, folder: str) -> bool:
        """Whether `names` may know the answer: much quicker than to ask it."""
        return folder in self._folders or folder.rpartition("/")[0] in self._folders

    def names(self, folder: str) -> list[str]:
        """The names in a folder; none if the folder above does not have it. Raises Unknown, also if
        there are many.
        """
        with self._lock:
            names = self._known_names(folder)
            if len(names) > _MAX_COMPARED:
                raise Unknown
            return list(names)

    def lately(self, folder: str) -> list[str] | None:
        """The names in a folder that was listed less than a second ago; None: it was not.

        For those to whom a name that has come since makes no difference.
        """
        with self._lock:
            found = self._folders.get(folder)
            if found is None or found.is_large or self._clock() - found.seen > _LATELY_SECONDS:
                return None
            return list(found.names)

    def _known_names(self, folder: str) -> dict[str, None]:
        names = self._fresh_names(folder)
        if names is not None:
            return names
        above, _, last = folder.rpartition("/")
        names = self._fresh_names(above)
        if names is not None and last not in names:
            return {}
        raise Unknown

    def _fresh_names(self, folder: str) -> dict[str, None] | None:
        found = self._folders.get(folder)
        if found is None or not self._is_fresh(found.seen) or found.is_large:
            return None
        return found.names

    def _is_fresh(self, seen: float) -> bool:
        return self._clock() - seen < self.fresh_seconds

    def _saw(self, name: str) -> None:
        self._files[name] = self._clock()
        self._files.move_to_end(name)
        if len(self._files) > _MAX_NAMES:
            self._files.popitem(last=False)

    def _hold(self, name: str) -> None:
        self._held[name] = None
        self._held.move_to_end(name)
        if len(self._held) > _MAX_NAMES:
            self._held.popitem(last=False)

    def _forget_file(self, name: str) -> None:
        self._files.pop(name, None)
        self._held.pop(name, None)

    def _forget_folders(self) -> None:
        while self._num_names > _MAX_NAMES and len(self._folders) > 1:
            self._forget_folder(next(iter(self._folders)))

    def _forget_folder(self, folder: str) -> None:
        found = self._folders.pop(folder, None)
        if found is not None:
            self._num_names -= 1 + len(found.names)


@dataclass(frozen=True, slots=True)
class Known:
    """Files as the index has them, for a Finder: touches no disk. Every method raises Unknown."""

    index: Index

    def __contains__(self, name: str) -> bool:
        return True  # so that a Finder asks `is_there` first

    def is_there(self, name: str) -> bool:
        return self.index.is_there(name)

    def names(self, folder: str) -> list[str]:
        return self.index.names(folder)

    def glance(self, folder: str) -> None:
        """Does nothing: memory sees nothing new."""

    def tokens(self, file: EntryFile) -> Ids | None:
        tokens = self.index.tokens_of(file.name)
        if tokens is None or not self.index.is_there(file.name):
            raise Unknown
        return tokens
