"""Finder: which files of a space hold a prefix. It asks for exact names, and lists nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvx_core.snapshot.kind import Kind
from kvx_core.stores.covers import Cover
from kvx_core.stores.entries import CachedEntries, Entries
from kvx_core.stores.index import NotCached
from kvx_core.stores.kinds import Kinds
from kvx_core.stores.names import RUNGS, Ids, entry_name, key_of
from kvx_core.stores.windows import ALL


class Found(NamedTuple):
    """An entry that begins like a part of a prompt."""

    shared: int  # tokens
    num_tokens: int  # of the entry
    names: tuple[str, ...]  # of files that together hold all layers and heads, or most
    lacking: int = 0  # how far back the reader needs the layers that they do not hold


NOTHING = Found(0, 0, ())


@dataclass(frozen=True, slots=True)
class Finder:
    """The files of one model and salt.

    entries: on the disk, or those that memory knows; with these every method may raise Unknown
    """

    entries: Entries | CachedEntries
    kinds: Kinds
    chunk_tokens: int

    @property
    def num_corrupt(self) -> int:
        """How many files were found corrupt until now, by any thread."""
        return self.entries.index.num_corrupt

    def longest(
        self,
        parent: str,
        ids: Ids,
        at_least: int = 1,
        key: str | None = None,
        *,
        is_whole: bool = False,
    ) -> Found:
        """The entry below a parent that shares most first tokens with `ids`.

        at_least: entries that share fewer tokens need not be found
        key:      of `ids`, if it is known
        is_whole: only entries that lack nothing, also where windows may have left them
        """
        key = key_of(parent, ids) if key is None else key
        while True:
            seen = self.kinds.all
            found = self._longest(parent, ids, at_least, key, is_whole)
            is_all = found.shared == len(ids) and not found.lacking
            if is_all or not self._has_other_kinds(seen):
                return found

    def ends(self, parent: str, ids: Ids, *, is_near: bool, since: int) -> Iterator[int]:
        """How many first tokens of `ids` are asked for states, the most first: all of them, `since`
        or more, and if it is near those of each rung and of entries that go on as `ids` do.
        """
        yield len(ids)
        if not self.kinds.states.asked():
            return
        found = set(range(since, len(ids)))
        if is_near:
            found.update(i * self.chunk_tokens // RUNGS for i in range(RUNGS))
            space = self.kinds.record.name
            for shared, mark in self.entries.marked(space, parent, ids, self.chunk_tokens):
                if shared == len(mark.ids):
                    found.add(shared)
        yield from sorted((each for each in found if 0 < each < len(ids)), reverse=True)

    def states(self, parent: str, ids: Ids, key: str | None = None) -> tuple[str, ...]:
        """Good files that together hold all states of exactly these tokens; none: they do not.

        key: of `ids`, if it is known
        """
        key = key_of(parent, ids) if key is None else key
        while True:
            seen = self.kinds.all
            found, _ = self._files(self.kinds.states, key, len(ids), 1)
            if found or not self._has_other_kinds(seen):
                return found

    def _has_other_kinds(self, seen: tuple[Kind, ...]) -> bool:
        """Whether there are other kinds than the caller has asked for.

        Those that have been listed just now count as all, unless there was none. Another thread may
        have listed them while the caller asked for those that it had found until then.
        """
        if self.kinds.all != seen:
            return True
        if isinstance(self.entries, CachedEntries):
            if not self.kinds.listed_within(self.entries.index.fresh_seconds):
                raise NotCached
            return False
        if self.kinds.all and self.kinds.listed_within(self.entries.index.fresh_seconds):
            return False
        return self.kinds.refresh(seen)

    def _longest(self, parent: str, ids: Ids, at_least: int, key: str, is_whole: bool) -> Found:
        tokens = self.kinds.tokens
        if not tokens.asked():
            return NOTHING
        goes_on = len(ids) == self.chunk_tokens and not is_whole  # windows may have left it
        names, lacking = self._files(tokens, key, len(ids), ALL if goes_on else 1)
        if names:
            return Found(len(ids), len(ids), names, lacking)
        space = self.kinds.record.name
        for shared, mark in self.entries.marked(space, parent, ids, self.chunk_tokens):
            if shared < max(at_least, 1):
                break
            names, _ = self._files(tokens, mark.key, len(mark.ids), 1)
            if names:
                return Found(shared, len(mark.ids), names)
        return NOTHING

    def _files(
        self, cover: Cover, key: str, num_tokens: int, below: int
    ) -> tuple[tuple[str, ...], int]:
        """Good files of an entry that together hold all layers and heads, and how far back the
        reader needs those that lack; no files if that is not `below`.
        """
        space, asked = self.kinds.record.name, dict[str, bool]()

        def is_good(kind: Kind) -> bool:
            if kind.id not in asked:
                asked[kind.id] = self.entries.is_good(space, key, kind, num_tokens)
            return asked[kind.id]

        best: Sequence[Kind] = cover.best
        lacking = 0
        if not (best and all(map(is_good, best))):
            lacking, best = cover.covered(filter(is_good, cover.asked()))
            if lacking >= below:
                return (), lacking
        return tuple(entry_name(space, key, kind.id) for kind in best), lacking
