"""Finder: finds the files of a space that hold a prefix.

It asks for files by their exact names, and lists no folder of entries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvx_core.snapshot.kind import Kind
from kvx_core.stores.covers import Cover
from kvx_core.stores.entries import CachedEntries, Entries
from kvx_core.stores.index import NotCached
from kvx_core.stores.kinds import Kinds
from kvx_core.stores.match import Match
from kvx_core.stores.names import RUNGS, Ids, entry_name, key_of, parse_entry
from kvx_core.stores.token_chain import TokenChain
from kvx_core.stores.windows import ALL

_AHEAD_STEP = 16  # chunks between those that a lookup in a far store asks for first
_MOST_AHEAD = 4096  # chunks that it asks for together


class Found(NamedTuple):
    """An entry that begins with the same tokens as a part of a prompt."""

    shared: int  # the number of tokens that both begin with
    num_tokens: int  # the number of tokens of the entry
    names: tuple[str, ...]  # of the files that together hold all layers and heads, or most of them
    lacking: int = 0  # tokens before the end of a prefix that the reader needs of missing layers


NOTHING = Found(0, 0, ())


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds files of one space.

    entries: Entries asks the disk; CachedEntries asks memory, and every method may raise NotCached
    """

    entries: Entries | CachedEntries
    kinds: Kinds
    chunk_tokens: int

    @property
    def num_corrupt(self) -> int:
        """The number of corrupt files that any thread has come across so far."""
        return self.entries.index.num_corrupt

    def look_ahead(self, chain: TokenChain, start: int, num_tokens: int) -> None:
        """Has a store that is far asked for the full chunks of a prompt from token `start` on,
        before `longest` is called for one after the other: in two round trips for any number.

        The first asks for every sixteenth chunk, the second for all up to where those end.
        """
        if isinstance(self.entries, CachedEntries) or not self.entries.are_far:
            return
        if not self.kinds.all:
            self.kinds.refresh()
        first, last = start // chain.chunk_tokens, num_tokens // chain.chunk_tokens
        keys = [chain.node(i + 1) for i in range(first, min(last, first + _MOST_AHEAD))]
        best, space = self.kinds.tokens.best, self.kinds.record.name
        if not best or not keys:
            return
        steps = self.entries.num_first(space, keys[::_AHEAD_STEP], best[0])
        self.entries.expect(space, keys[: steps * _AHEAD_STEP], best, chain.chunk_tokens)

    def look_back(self, chain: TokenChain, num_chunks: int) -> None:
        """Has a store that is far asked for the states at the ends of a match's last chunks."""
        best = self.kinds.states.best
        if isinstance(self.entries, CachedEntries) or not self.entries.are_far or not best:
            return
        nodes = [chain.node(i) for i in range(num_chunks, max(0, num_chunks - _MOST_AHEAD), -1)]
        self.entries.expect(self.kinds.record.name, nodes, best, chain.chunk_tokens)

    def is_far(self, match: Match) -> bool:
        """True if files of a match have to come over a network."""
        if isinstance(self.entries, CachedEntries) or not self.entries.are_far:
            return False
        return not all(map(self.entries.blobs.is_near, match.names))

    def probe(self, match: Match) -> tuple[int, float] | None:
        """Reads one file of a match: one that has to come over a network, if there is any.

        Returns its tokens, and the seconds that it took; None: it is not there any more.
        Raises StoreError.
        """
        if isinstance(self.entries, CachedEntries) or not match.spans:
            return None
        blobs = self.entries.blobs
        far = (span for span in match.spans if not blobs.is_near(span.names[0]))
        span = next(far, match.spans[0])
        name = parse_entry(span.names[0])
        kind = None if name is None else self.kinds.get(name.kind)
        if kind is None:
            return None
        most, begin = kind.layout(span.num_entry_tokens).most_bytes, time.monotonic()
        if blobs.read(span.names[0], most) is None:
            return None
        return span.stop - span.start, time.monotonic() - begin

    def longest(
        self,
        parent: str,
        ids: Ids,
        at_least: int = 1,
        key: str | None = None,
        *,
        is_whole: bool = False,
    ) -> Found:
        """Returns the entry of this parent that shares the most first tokens with `ids`.

        at_least: entries that share fewer tokens may be left out
        key:      the key of `ids`, if the caller knows it
        is_whole: True: only entries that lack no layer or head. False: a full chunk may lack layers
                  that the reader needs only near the end of a prefix
        """
        key = key_of(parent, ids) if key is None else key
        while True:
            seen = self.kinds.all
            found = self._longest(parent, ids, at_least, key, is_whole)
            is_all = found.shared == len(ids) and not found.lacking
            if is_all or not self._has_other_kinds(seen):
                return found

    def ends(self, parent: str, ids: Ids, *, is_near: bool, since: int) -> Iterator[int]:
        """Yields the lengths of prefixes of `ids` whose states a lookup asks for, longest first.

        Yields len(ids) first. If readable kinds of states exist, yields the shorter lengths from
        `since` on. With `is_near` also yields the length of each rung, and of each marked entry
        that has no other tokens than `ids`.
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
        """Returns the names of good files that together hold all states after exactly these tokens.

        key: the key of `ids`, if the caller knows it
        Returns an empty tuple if no such files are stored.
        """
        key = key_of(parent, ids) if key is None else key
        while True:
            seen = self.kinds.all
            found, _ = self._files(self.kinds.states, key, len(ids), 1)
            if found or not self._has_other_kinds(seen):
                return found

    def _has_other_kinds(self, seen: tuple[Kind, ...]) -> bool:
        """True if the space has other kinds than `seen`, the kinds that the caller has asked for.

        Lists the folder of kinds, unless it was listed a moment ago and this process knows a kind.
        Another thread may have listed it while the caller asked for files. With CachedEntries lists
        nothing, and raises NotCached if the last listing is too old.
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
        goes_on = len(ids) == self.chunk_tokens and not is_whole  # it may lack layers with windows
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
        """Returns the names of good files that together hold an entry's layers and heads, and how
        far before the end of a prefix the reader needs the layers that they lack.

        below: if that distance is `below` or more, no names are returned
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
