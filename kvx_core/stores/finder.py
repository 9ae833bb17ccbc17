"""Finder: which files of a space hold a prefix, and which of them a reader loads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot import Accept, Precision, StoreError
from kvx_core.stores.entries import Entries
from kvx_core.stores.index import Known
from kvx_core.stores.keys import (
    OPENING_TOKENS,
    EntryFile,
    Ids,
    common_tokens,
    entry_of,
    name_of,
    opening_of,
    parse_name,
    shared_tokens,
)
from kvx_core.stores.pace import Pace, drain

_MAX_OPENED = 64  # files of other sequences that one lookup opens to compare tokens


@dataclass(frozen=True, slots=True)
class Finder:
    """The files of one model and salt, as a reader of some precision sees them.

    entries: on the disk, or those that memory knows; with these every method may raise Unknown
    """

    entries: Entries | Known
    space: str
    shape: tuple[int, int]  # of the model: layers, KV heads
    chunk_tokens: int
    precision: Precision
    accept: Accept
    whole: bool = False  # entries that continue otherwise than the prompt do not count

    @property
    def num_corrupt(self) -> int:
        """How many files were found corrupt until now, by any thread."""
        return self.entries.index.num_corrupt

    def longest(self, node: str, ids: Ids, at_least: int = 1) -> tuple[int, list[EntryFile]]:
        """How many of `ids` the best entry below a node begins with, and that entry's files.

        at_least: entries that share fewer tokens need not be found
        """
        whole = self._whole_file(node, ids)
        if whole is not None:
            return len(ids), [whole]
        best: tuple[int, list[EntryFile]] = (0, [])
        opened = 0
        for folder, bound in self._folders(node, ids, at_least):
            if bound <= best[0]:
                break
            entries = defaultdict[str, list[EntryFile]](list)
            for file in self.parsed(folder):
                if self.accepts(file.precision):
                    entries[file.entry].append(file)
            lengths = {key: files[0].num_tokens for key, files in entries.items()}
            for num_tokens in sorted(set(lengths.values()), reverse=True):
                if best[0] < num_tokens <= len(ids):
                    files = self._good(entries.pop(entry_of(node, ids[:num_tokens]), ()))
                    best = (num_tokens, files) if files else best
            for key in sorted(entries, key=lengths.__getitem__, reverse=True):
                if self.whole or min(lengths[key], bound) <= best[0]:
                    break
                if not all(file.name in self.entries for file in entries[key]):
                    opened += 1
                    if opened > _MAX_OPENED:
                        continue
                files = self._good(entries[key])
                tokens = self.entries.tokens(files[0]) if files else None
                if tokens is not None and shared_tokens(ids, tokens) > best[0]:
                    best = shared_tokens(ids, tokens), files
        return best

    def _whole_file(self, node: str, ids: Ids) -> EntryFile | None:
        """The file of `ids` with all layers and heads, by its name, without listing a folder."""
        layers, heads = tuple(range(self.shape[0])), (0, self.shape[1])
        name = name_of(self.space, node, ids, layers, heads, self.precision)
        folder = name.rpartition("/")[0]
        file = EntryFile(name, folder, len(ids), layers, heads, self.precision)
        try:
            is_there = name not in self.entries or self.entries.is_there(name)
        except StoreError as error:
            self.entries.index.failed(error)
            return None
        return file if is_there and self.entries.tokens(file) is not None else None

    def _folders(self, node: str, ids: Ids, at_least: int) -> Iterator[tuple[str, int]]:
        """Folders below a node whose entries can share some of `ids`, and how many; most first."""
        own = opening_of(node, ids)
        yield f"{self.space}/{node}/{own}", len(ids)
        if at_least >= OPENING_TOKENS == len(own) // 2:
            self.entries.glance(f"{self.space}/{node}")
            return  # entries in other folders share fewer tokens
        names, first = self.entries.names(f"{self.space}/{node}"), own[:2]
        bounds = {
            opening: common_tokens(opening, own)
            for part in drain(names)
            for opening in part
            if opening.startswith(first) and opening != own
        }
        for opening in sorted(bounds, key=bounds.__getitem__, reverse=True):
            yield f"{self.space}/{node}/{opening}", bounds[opening]

    def _good(self, files: Iterable[EntryFile]) -> list[EntryFile]:
        """Good files of an entry that together hold all layers and heads; none if some lack."""
        files = list(files)
        while True:
            held, chosen = self.cover(files)
            if not held.all():
                return []
            bad = [file for file in chosen if self.entries.tokens(file) is None]
            if not bad:
                return chosen
            files = [file for file in files if file not in bad]

    def cover(self, files: Iterable[EntryFile]) -> tuple[npt.NDArray[np.bool_], list[EntryFile]]:
        """The layers and heads that the files hold, and files chosen to hold them: the best ranked
        first, then the largest.
        """
        held = np.zeros(self.shape, np.bool_)
        chosen = []

        def order(file: EntryFile) -> tuple[int, int, int]:
            return *self._rank(file.precision), -len(file.layers) * (file.heads[1] - file.heads[0])

        for file in sorted(files, key=order):
            layers, heads = list(file.layers), slice(*file.heads)
            if not held[layers, heads].all():
                held[layers, heads] = True
                chosen.append(file)
        return held, chosen

    def accepts(self, precision: Precision) -> bool:
        """Whether values of this precision may be loaded here."""
        if self.accept == "lossy":
            return precision.may_become(self.precision)
        return precision.includes(self.precision)

    def _rank(self, precision: Precision) -> tuple[int, int]:
        """The order of loading: this cache's own precision, then precisions that include it, the
        smallest first, then the closest of the others.
        """
        if precision == self.precision:
            return 0, 0
        if precision.includes(self.precision):
            return 1, precision.digits
        return 2, -precision.digits

    def parsed(self, folder: str) -> list[EntryFile]:
        pace, found = Pace(), list[EntryFile]()
        for name in self.entries.names(folder):
            file = self._parse(f"{folder}/{name}")
            if file is not None:
                found.append(file)
            pace.breathe()
        return found

    def file(self, name: str) -> EntryFile:
        file = self._parse(name)
        if file is None:
            raise StoreError(f"{name!r} is not the name of a file of this store")
        return file

    def _parse(self, name: str) -> EntryFile | None:
        """Parses a file's name; None if it is not one of this store."""
        file = parse_name(name, self.shape) if name.startswith(f"{self.space}/") else None
        return file if file is not None and 0 < file.num_tokens <= self.chunk_tokens else None
