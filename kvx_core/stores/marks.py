"""Marks: small files that lead from the first tokens of an entry to the whole entry.

If a chunk of a prompt has no entry, a lookup asks for a few marks by name; it lists no folder. A
lost mark costs a cache hit, and no more. Format: docs/store_format.md, "Marks".
"""

from __future__ import annotations

import hmac
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import numpy as np
from xxhash import xxh3_128_digest

from kvx_core.snapshot import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.secrets import RANDOM_BYTES, TAG_BYTES, Secrets
from kvx_core.stores.blob_store import BlobStore, Content
from kvx_core.stores.index import Index, NotCached
from kvx_core.stores.names import (
    Ids,
    entry_name,
    key_of,
    mark_name,
    rung_of,
    rungs,
    shared_tokens,
)

_MAGIC = b"KVXMARK3"
_SIGNED, _ENCRYPTED = 1, 2
_HEAD = struct.Struct("<8sIIQQ32s32s")  # magic, flags, n, ids of the keys, random bytes, parent
_CLEAR_BYTES = 64  # bytes of the head that stay in the clear if a mark is encrypted
_ID_BYTES, _CHECK_BYTES, _MAC_BYTES = 8, 16, 32
_PURPOSE = b"kvx mark"

_MOST_HELD = 1 << 21  # most tokens of marks that are remembered: 16 MB
_MARK_TOKENS = 64  # each remembered mark counts as so many tokens more than it has
_TAKEN_SECONDS = 30.0  # for so long a writer takes a rung for held without asking again
_GAP = 2  # a lookup stops after so many rungs in a row that have no mark
_TRIES = 3  # at one rung, while other writers change its mark


@dataclass(frozen=True, eq=False)
class Mark:
    """The entry that a mark leads to: the key of all tokens before it, and its own tokens."""

    parent: str
    ids: Ids

    @cached_property
    def key(self) -> str:
        """The key of the entry."""
        return key_of(self.parent, self.ids)

    def begins_with(self, other: Mark) -> bool:
        """True if this entry begins with all tokens of `other`, which has the same parent."""
        return shared_tokens(self.ids, other.ids) == len(other.ids)


_FOREIGN = Mark("", np.zeros(0, np.int64))  # any mark that is written with other keys


def mark_bytes(mark: Mark, secrets: Secrets) -> bytes:
    """Returns the content of the file of a mark."""
    signer, encrypter = secrets.signer, secrets.encrypter
    random = b"" if encrypter is None else os.urandom(RANDOM_BYTES)
    raw = _HEAD.pack(
        _MAGIC,
        (signer is not None) * _SIGNED | (encrypter is not None) * _ENCRYPTED,
        len(mark.ids),
        0 if signer is None else signer.id,
        0 if encrypter is None else encrypter.id,
        random,
        bytes.fromhex(mark.parent),
    )
    raw += mark.ids.tobytes()
    raw += xxh3_128_digest(raw) if signer is None else signer.mac(raw, _PURPOSE)
    if encrypter is None:
        return raw
    clear = raw[:_CLEAR_BYTES]
    return clear + encrypter.encrypted(random, 0, raw[_CLEAR_BYTES:], clear)


def most_bytes(chunk_tokens: int) -> int:
    """Returns the size of the largest mark in bytes."""
    return _HEAD.size + chunk_tokens * _ID_BYTES + _MAC_BYTES + TAG_BYTES


def parse_mark(
    raw: bytes, name: str, secrets: Secrets, chunk_tokens: int, length: int | None = None
) -> Mark:
    """Parses the file of a mark, which anybody may have written.

    name:   the file's name; the rung in it must be one of the entry's
    length: the number of tokens of the rung; None: any rung of the entry will do
    Raises CorruptError; UnsignedError if it is not written with the keys of this process.
    """
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        raise CorruptError(f"{name} is no mark: it does not begin as one")
    _, flags, count, signer_id, encrypter_id, random, _ = _HEAD.unpack_from(raw)
    signed, encrypted = bool(flags & _SIGNED), bool(flags & _ENCRYPTED)
    if flags & ~(_SIGNED | _ENCRYPTED) or not 1 <= count <= chunk_tokens:
        raise CorruptError(
            f"{name} is no mark: flags {flags:#x} and {count} tokens, expected at most 0x3 and 1 "
            f"to {chunk_tokens}"
        )
    check_bytes = _MAC_BYTES if signed else _CHECK_BYTES
    expected = _HEAD.size + count * _ID_BYTES + check_bytes + TAG_BYTES * encrypted
    if len(raw) != expected:
        raise CorruptError(f"{name} has {len(raw)} bytes, expected {expected} of {count} tokens")
    if (signed, encrypted) != (secrets.is_keyed, secrets.is_encrypted):
        raise UnsignedError(
            f"{name} is {_says(signed, encrypted)}, expected a mark that is "
            f"{_says(secrets.is_keyed, secrets.is_encrypted)}, as this process writes them"
        )
    signer, encrypter = secrets.signer_of(signer_id), secrets.encrypter_of(encrypter_id)
    if (signed and signer is None) or (encrypted and encrypter is None):
        raise UnsignedError(f"{name} is written with keys that this process does not have")
    if encrypter is not None and encrypted:
        clear = raw[:_CLEAR_BYTES]
        rest = encrypter.decrypted(random, 0, raw[_CLEAR_BYTES:], clear)
        if rest is None:
            raise CorruptError(f"{name} cannot be decrypted: its bytes have changed")
        raw = clear + rest
    body, check = raw[:-check_bytes], raw[-check_bytes:]
    own = signer.mac(body, _PURPOSE) if signer and signed else xxh3_128_digest(body)
    if not hmac.compare_digest(own, check):
        raise CorruptError(f"{name} has a wrong check: its bytes have changed")
    if (not signed and signer_id) or (not encrypted and (encrypter_id or any(random))):
        raise CorruptError(f"{name} names keys, and is {_says(signed, encrypted)}")
    parent = body[_CLEAR_BYTES : _HEAD.size].hex()
    mark = Mark(parent, np.frombuffer(body, np.int64, count, _HEAD.size))
    rung = name.rpartition("/")[2].partition(".")[0]
    if length is None:
        own_rungs = [own for _, own in rungs(parent, mark.ids, chunk_tokens)]
    else:
        own_rungs = [rung_of(parent, mark.ids[:length])]
    if rung not in own_rungs or (length or 0) >= count:
        raise CorruptError(f"{name} is the mark of an entry that has other rungs")
    return mark


def _says(signed: bool, encrypted: bool) -> str:
    words = ["signed"] * signed + ["encrypted"] * encrypted
    return " and ".join(words) or "neither signed nor encrypted"


def candidates(
    read: Callable[[int, str], Mark | None], parent: str, rest: Ids, chunk_tokens: int
) -> list[tuple[int, Mark]]:
    """Returns the entries below a parent that begin like a prompt, each with the number of tokens
    that it shares with the prompt: the most first.

    read: returns the mark at a rung of so many tokens, or None; its errors are passed on
    rest: the rest of the prompt, after the tokens of the parent
    Returns at most RUNGS entries. Some of them may have been deleted.
    """
    found, absent = list[tuple[int, Mark]](), 0
    for length, rung in rungs(parent, rest, chunk_tokens):
        mark = read(length, rung)
        if mark is not None:
            found.append((shared_tokens(rest, mark.ids), mark))
        absent = 0 if mark is not None else absent + 1
        if absent == _GAP:  # writers leave no rung out
            break
    found = [one for one in found if one[0]]
    found.sort(key=lambda one: one[0], reverse=True)
    return found


class KnownMarks:
    """Remembers marks that were seen lately. Threads may share it.

    Bounded: it forgets first the mark that was seen first.
    """

    def __init__(
        self, fresh_seconds: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """fresh_seconds: returns for how many seconds memory answers for the disk"""
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._lock = Lock()
        self._seen: OrderedDict[tuple[str, str], tuple[float, Mark | None]] = OrderedDict()
        self._num_held = 0

    def saw(self, space: str, rung: str, mark: Mark | None) -> None:
        """Remembers that a rung had this mark just now; None: it had no mark."""
        with self._lock:
            self._forget((space, rung))
            self._seen[space, rung] = self._clock(), mark
            self._num_held += _weight(mark)
            while self._num_held > _MOST_HELD:
                self._forget(next(iter(self._seen)))

    def forget(self, space: str, rung: str) -> None:
        """Forgets what is known of a rung."""
        with self._lock:
            self._forget((space, rung))

    def known(self, space: str, rung: str) -> Mark | None:
        """Returns the mark at a rung, or None if the rung has none. Raises NotCached."""
        found = self._seen.get((space, rung))
        if found is None or self._clock() - found[0] >= self._fresh_seconds():
            raise NotCached
        return found[1]

    def is_known(self, space: str, rung: str) -> bool:
        """True if `known` raises nothing."""
        with suppress(NotCached):
            self.known(space, rung)
            return True
        return False

    def candidates(
        self, space: str, parent: str, rest: Ids, chunk_tokens: int
    ) -> list[tuple[int, Mark]]:
        """As Marks.candidates. Raises NotCached."""
        return candidates(lambda _, rung: self.known(space, rung), parent, rest, chunk_tokens)

    def _forget(self, place: tuple[str, str]) -> None:
        found = self._seen.pop(place, None)
        if found is not None:
            self._num_held -= _weight(found[1])


def _weight(mark: Mark | None) -> int:
    return _MARK_TOKENS + (0 if mark is None else len(mark.ids))


class Marks:
    """The marks of a store. Threads may share it.

    known: the marks that lookups from memory may rely on
    """

    def __init__(
        self,
        blobs: BlobStore,
        secrets: Secrets,
        index: Index,
        kinds: Callable[..., Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
        states: Callable[[str], Iterable[str]] = lambda space: (),
    ) -> None:
        """index:  is told of files that are corrupt or cannot be read
        kinds:  returns the ids of all kinds that files of a space may have, as far as this process
                knows; with lists=True it lists the folder of kinds first
        states: returns the ids of the kinds of states of a space; marks do not lead to states
        """
        self._blobs, self._secrets, self._index = blobs, secrets, index
        self._kinds, self._states = kinds, states
        self.known = KnownMarks(lambda: index.fresh_seconds, clock)
        self._taken = KnownMarks(lambda: _TAKEN_SECONDS, clock)  # their entries were there
        self._lock = Lock()  # held while a mark is replaced

    def read(
        self, space: str, rung: str, chunk_tokens: int, length: int | None = None
    ) -> Mark | None:
        """Returns the mark at a rung: from memory if it was seen lately, else from the disk.

        length: the number of tokens of the rung, if it is known
        Returns None if there is no mark that this process can use now. Deletes a corrupt mark.
        """
        try:
            mark = self.known.known(space, rung)
        except NotCached:
            mark = None
        if mark is not None:  # else a mark may have been made since
            return mark
        try:
            mark = self._read(space, rung, chunk_tokens, length)
        except StoreError as error:
            self._index.failed(error)
            return None
        return None if mark is _FOREIGN else mark

    def candidates(
        self, space: str, parent: str, rest: Ids, chunk_tokens: int
    ) -> list[tuple[int, Mark]]:
        """Returns the entries below a parent that begin like a prompt, each with the number of
        tokens that it shares with the prompt: the most first.
        """

        def read(length: int, rung: str) -> Mark | None:
            return self.read(space, rung, chunk_tokens, length)

        if self._blobs.is_far:
            names = [mark_name(space, rung) for _, rung in rungs(parent, rest, chunk_tokens)]
            self._blobs.expect(names, most_bytes(chunk_tokens) + 1)
        return candidates(read, parent, rest, chunk_tokens)

    def publish_all(
        self, space: str, entries: Sequence[Mark], chunk_tokens: int
    ) -> list[Mark | None]:
        """Does what `publish` does for several entries. Returns for each what `publish` returns.

        Most entries are the first at their first rung: their marks are written together.
        """
        firsts = dict[str, Mark]()
        for own in entries:
            rung = rung_of(own.parent, own.ids[:0])
            if not self._taken.is_known(space, rung):
                firsts.setdefault(rung, own)
        files = [(mark_name(space, rung), self._content(own)) for rung, own in firsts.items()]
        found, done = self._blobs.put_all(files, durable=False), set[Mark]()
        for (rung, own), is_new in zip(firsts.items(), found, strict=True):
            if isinstance(is_new, StoreError):  # the entry is stored all the same
                self._index.failed(is_new)
            else:
                self._note(space, rung, own, is_new=is_new)
            if is_new:
                done.add(own)
        return [
            None if own in done else self.publish(space, own.parent, own.ids, chunk_tokens)
            for own in entries
        ]

    def publish(
        self,
        space: str,
        parent: str,
        ids: Ids,
        chunk_tokens: int,
        *,
        from_memory: bool = True,
    ) -> Mark | None:
        """Makes the mark of an entry that is on the disk, unless all its rungs are held.

        The mark replaces that of a shorter entry if the new entry begins with all tokens of the
        shorter one, and has files of all its kinds.

        from_memory: True: a rung that was held lately counts as held
        Returns the shorter entry whose mark was replaced: nobody needs it any more. Else None.
        """
        own = Mark(parent, ids.copy())  # a copy, since a view would keep a larger array
        try:
            for length, rung in rungs(parent, ids, chunk_tokens):
                if not from_memory:
                    self._taken.forget(space, rung)
                for _ in range(_TRIES):
                    held = self._holder(space, rung, chunk_tokens, length)
                    if held is None:
                        if self._put(space, rung, own, self._blobs.put):
                            return None
                        continue  # another writer was first
                    if held is _FOREIGN or not own.begins_with(held):
                        is_useless = held is _FOREIGN
                    elif len(held.ids) == len(ids):
                        return None
                    else:
                        is_useless = self.has_kinds(space, own, held)
                    if not is_useless:
                        break
                    if self._replace(space, rung, held, own, chunk_tokens):
                        return None if held is _FOREIGN else held
        except StoreError as error:  # the entry is stored all the same
            self._index.failed(error)
        return None

    def _holder(self, space: str, rung: str, chunk_tokens: int, length: int) -> Mark | None:
        """Returns the mark at a rung, as a writer saw it lately or from the disk; None: the rung is
        free.

        Deletes the mark of an entry that is gone. Raises StoreError.
        """
        try:
            return self._taken.known(space, rung)
        except NotCached:
            mark = self._read(space, rung, chunk_tokens, length)
        if mark is None or mark is _FOREIGN:
            return mark
        if not self._is_there(space, mark):
            self._delete(space, rung)
            return None
        self._taken.saw(space, rung, mark)
        return mark

    def kinds_of(self, space: str, mark: Mark, *, lists: bool = False) -> list[str]:
        """Returns the kinds of the files that an entry has. Raises StoreError.

        lists: also asks for files of kinds that others have made since this process looked
        """
        is_there, kinds = self._blobs.is_there, self._kinds(space, lists=lists)
        return [kind for kind in kinds if is_there(entry_name(space, mark.key, kind))]

    def has_tokens(self, space: str, mark: Mark) -> bool:
        """True if an entry has a file that holds no states. Raises StoreError."""
        return any(
            self._blobs.is_there(name)
            for lists in (False, True)
            for name in self._tokens_of(space, mark, lists=lists)
        )

    def _tokens_of(self, space: str, mark: Mark, *, lists: bool = False) -> list[str]:
        """Returns the names that files of an entry may have, without the files of states."""
        kinds, states = self._kinds(space, lists=lists), set(self._states(space))
        return [entry_name(space, mark.key, kind) for kind in kinds if kind not in states]

    def has_kinds(self, space: str, mark: Mark, other: Mark) -> bool:
        """True if an entry has files of all kinds of another entry, and the other has no states.

        Nobody can use a state for other tokens than its own. Raises StoreError.
        """
        own = set(self.kinds_of(space, mark))
        for lists in (False, True):
            others = set(self.kinds_of(space, other, lists=lists))
            if not others.isdisjoint(self._states(space)):
                return False
            if not others <= own and not others <= set(self.kinds_of(space, mark)):
                return False
        return True

    def _is_there(self, space: str, mark: Mark) -> bool:
        """True if a file of an entry's tokens may exist. Raises StoreError."""
        return self.has_tokens(space, mark) or not self._tokens_of(space, mark)

    def _replace(self, space: str, rung: str, held: Mark, own: Mark, chunk_tokens: int) -> bool:
        """Replaces the mark `held` by `own`; False if `held` is not at the rung any more."""
        with self._lock:
            now = self._read(space, rung, chunk_tokens)
            if now is None or now.key != held.key:
                self._taken.forget(space, rung)
                return False
            return self._put(space, rung, own, self._blobs.replace)

    def _read(
        self, space: str, rung: str, chunk_tokens: int, length: int | None = None
    ) -> Mark | None:
        """Reads a mark from the disk. Returns _FOREIGN for a mark of other keys, None if there is
        no good mark. Deletes a corrupt mark. Raises StoreError.
        """
        name = mark_name(space, rung)
        mark = None
        try:
            raw = self._blobs.read(name, most_bytes(chunk_tokens))
            if raw is not None:
                mark = parse_mark(raw, name, self._secrets, chunk_tokens, length)
        except UnsignedError:
            self.known.saw(space, rung, None)
            return _FOREIGN
        except CorruptError:
            self._index.corrupt(name)
            self._delete(space, rung)
            return None
        self.known.saw(space, rung, mark)
        return mark

    def _put(self, space: str, rung: str, mark: Mark, put: Callable[..., bool]) -> bool:
        is_new = put(mark_name(space, rung), self._content(mark), durable=False)
        self._note(space, rung, mark, is_new=is_new)
        return is_new

    def _content(self, mark: Mark) -> Content:
        return Content.of(mark_bytes(mark, self._secrets))

    def _note(self, space: str, rung: str, mark: Mark, *, is_new: bool) -> None:
        """Remembers that a mark was written, or forgets what is at its rung."""
        for memory in (self.known, self._taken):
            if is_new:
                memory.saw(space, rung, mark)
            else:
                memory.forget(space, rung)

    def _delete(self, space: str, rung: str) -> None:
        self.known.saw(space, rung, None)
        self._taken.forget(space, rung)
        self._blobs.delete(mark_name(space, rung))
