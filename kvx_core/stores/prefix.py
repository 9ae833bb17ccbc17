"""PrefixStore: which tokens of a prompt have their keys and values in a store, and where.

A sequence is cut into chunks. Each chunk, the last one perhaps not full, is an entry; its key is a
hash of it and all tokens before it, so that sequences with a common prefix share entries. An entry
is one file, or several that each hold some layers and heads, as ranks of an engine write them.

    <space>/<node>/<head>/<num_tokens>-<entry>.l<layers>.h<heads>.safetensors

space: model, salt and format; node: all chunks before this one; head: two digits for each of the
first 8 tokens, so that entries which differ early are not in one folder; layers and heads: ranges
without their end, several joined by "+".
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import (
    FORMAT,
    CorruptError,
    Section,
    Snapshot,
    StoreError,
    host_memory,
    stored_tokens,
    token_ids,
)
from kvx_core.stores.blobs import BlobStore
from kvx_core.types import Memory

_CONFIG = "kvx-store.json"
_HEAD_TOKENS = 8
_MAX_OPENED = 64  # files of other sequences that one lookup opens to compare tokens
_MAX_KNOWN = 16384  # files whose tokens are remembered

_RANGE = "[0-9]{1,9}-[0-9]{1,9}"
_NAME = re.compile(
    r"(?P<folder>[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f]{2,16})/"
    r"(?P<num_tokens>[0-9]{1,9})-(?P<entry>[0-9a-f]{64})"
    rf"\.l(?P<layers>{_RANGE}(\+{_RANGE})*)\.h(?P<heads>{_RANGE})\.safetensors"
)

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Tokens of a prompt that one entry holds."""

    start: int
    stop: int
    num_entry_tokens: int  # of the entry, which may go on with other tokens than the prompt
    names: tuple[str, ...]  # of files that together hold all layers and heads


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a prompt that is stored. Plain data: it may go to another process."""

    num_tokens: int
    spans: tuple[StoredSpan, ...]  # one after the other, from token 0


@dataclass(frozen=True, slots=True)
class _File:
    """What the name of a file says."""

    name: str
    folder: str
    num_tokens: int
    layers: tuple[int, ...]
    heads: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Source:
    """A file of a span, and the sections that take layers from it."""

    name: str
    snapshot: Snapshot
    takers: list[Section]

    @property
    def layers(self) -> list[int]:
        wanted = {layer for section in self.takers for layer in section.layers}
        return [layer for layer in self.snapshot.header.layers if layer in wanted]

    @property
    def num_bytes(self) -> int:
        return self.snapshot.memory_for(self.layers)


class PrefixStore:
    """Keys and values of token prefixes of one model. Threads and processes may share a store."""

    def __init__(
        self,
        blobs: BlobStore,
        *,
        fingerprint: str,
        num_layers: int,
        total_kv_heads: int,
        chunk_tokens: int | None = None,
        new_chunk_tokens: int = 128,
        salt: str = "",
    ) -> None:
        """A store of one model in `blobs`, which other models may use too.

        fingerprint:  of what is computed: ModelRecord.fingerprint, as engines have it
        num_layers:   of the model; an entry is found once it holds layers 0 to num_layers
        total_kv_heads: of the model, in every layer
        chunk_tokens: None: as the store has it, new_chunk_tokens for a new one
        salt:         sequences with another salt are not found
        Raises InvalidArgumentError if the store has other chunks, StoreError if it is no store.
        """
        requested = new_chunk_tokens if chunk_tokens is None else chunk_tokens
        if min(num_layers, total_kv_heads, requested) < 1:
            raise InvalidArgumentError(
                f"num_layers is {num_layers}, total_kv_heads {total_kv_heads}, chunk_tokens "
                f"{requested}, expected at least 1 of each"
            )
        self._blobs = blobs
        self._fingerprint = fingerprint
        self._shape = (num_layers, total_kv_heads)
        self._space = self._space_of(salt)
        self._requested, self._otherwise = chunk_tokens, new_chunk_tokens
        self._chunk_tokens: int | None = None
        self._known: dict[str, _Ids] = {}  # tokens of files that were found good
        self._settle()

    def salted(self, salt: str) -> Self:
        """The same store for sequences with this salt."""
        other = copy.copy(self)
        other._space = self._space_of(salt)
        return other

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""
        if self._chunk_tokens is None:
            self._settle()
        return self._chunk_tokens or self._requested or self._otherwise

    def nodes(self, tokens: Sequence[int] | npt.NDArray[Any]) -> list[str]:
        """The key of the tokens before each chunk: for `node` of capture and missing."""
        ids, step = token_ids(tokens), self.chunk_tokens
        nodes = [self._space]
        for at in range(0, len(ids) - step + 1, step):
            nodes.append(_chain(nodes[-1], ids[at : at + step]))
        return nodes

    def spans(self, num_tokens: int, start: int = 0) -> list[tuple[int, int]]:
        """The chunks (start, stop) that tokens `start` to `num_tokens` lie in, the last one cut."""
        step = self.chunk_tokens
        first = start // step * step if start < num_tokens else num_tokens
        return [(at, min(at + step, num_tokens)) for at in range(first, num_tokens, step)]

    def lookup(self, tokens: Sequence[int] | npt.NDArray[Any]) -> Match:
        """The longest prefix of `tokens` that is stored, to the token.

        An entry counts when its files hold all layers and heads; files that are not what they say
        do not count, and are deleted. Of entries that begin like the prompt and go on differently,
        64 not seen before are looked at in each lookup. Reads no keys or values.
        Raises InvalidArgumentError for what are no tokens.
        """
        ids, step = token_ids(tokens), self.chunk_tokens
        node, at, spans = self._space, 0, list[StoredSpan]()
        while at < len(ids):
            rest = ids[at : at + step]
            shared, files = self._longest(node, rest)
            if not shared:
                break
            names = tuple(file.name for file in files)
            spans.append(StoredSpan(at, at + shared, files[0].num_tokens, names))
            at += shared
            if shared < step:
                break
            node = _chain(node, rest)
        return Match(at, tuple(spans))

    def missing(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        layers: Iterable[int],
        heads: tuple[int, int],
        *,
        node: str | None = None,
    ) -> bool:
        """Whether some of these layers and heads of the entry tokens[start:stop) are not stored.

        start, stop: as `spans` has them
        heads:       first, and one past the last
        node:        nodes(tokens)[start // chunk_tokens], if it is known; then only
                     tokens[start:stop) is read
        Looks at names only. Raises InvalidArgumentError.
        """
        node, ids = self._span(tokens, start, stop, node)
        folder = f"{self._space}/{node}/{_head(node, ids)}"
        key = _key(node, ids) + "."
        names = (name for name in self._blobs.names(folder) if name.startswith(key))
        rows = list(layers)
        return not self._cover(self._parsed(folder, names))[0][rows, slice(*heads)].all()

    def capture(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        node: str | None = None,
    ) -> Snapshot | None:
        """Copies tokens `start` to `stop` of a sequence out of caches, into new memory of the host.

        tokens, start, stop, node: as for `missing`
        sections: what is held here of the sequence; all hold the same heads
        Returns when the caches may change again; None if a block of these tokens is null.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        snapshot = self.reserve(tokens, start, stop, sections, node=node)
        if snapshot is not None:
            for section in sections:
                snapshot.fill(section)
            snapshot.settle(sections)
        return snapshot

    def reserve(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        node: str | None = None,
    ) -> Snapshot | None:
        """What `capture` returns before anything has been copied: see Snapshot.reserve."""
        node, ids = self._span(tokens, start, stop, node)
        sections = [self._of_model(section) for section in sections]
        return Snapshot.reserve(ids, sections, start=start, prefix=node)

    def commit(self, snapshot: Snapshot) -> int:
        """Stores what `capture` of this store returned, from any thread.

        Returns the bytes of its file; 0 if it was there.
        Raises StoreError, and then nothing is stored.
        """
        header, num_bytes = snapshot.header, 0

        def write(path: Path) -> None:
            nonlocal num_bytes
            snapshot.save(path)
            num_bytes = path.stat().st_size

        name = self._name(header.prefix, snapshot.tokens, header.layers, header.heads)
        return num_bytes if self._blobs.put(name, write) else 0

    def load(
        self,
        match: Match,
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        stream: int | None = None,
    ) -> int:
        """Copies tokens `start` to `stop` of a match into caches.

        match:    what `lookup` found, here or in another process
        sections: where the sequence lies; its null blocks are skipped
        Everything of a span is read and checked before the first byte of it is written. A file that
        is not what it says is deleted. Waits for devices.
        Mutates the caches. Returns the bytes of these tokens as the sections store them.
        Raises StoreError naming the file, InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        if not 0 <= start <= stop <= match.num_tokens:
            raise InvalidArgumentError(
                f"start is {start}, stop is {stop}, expected 0 <= start <= stop <= "
                f"{match.num_tokens}, the tokens of the match"
            )
        sections = [self._of_model(section) for section in sections]
        pinned = any(s.view.layers[0].k.memory is not Memory.HOST for s in sections)
        memory = host_memory(0)
        num_bytes = 0
        for span in match.spans:
            lo, hi = max(start, span.start), min(stop, span.stop)
            if lo >= hi:
                continue
            takers = [section for section in sections if not section.null_blocks(lo, hi).all()]
            sources = self._sources(span, takers)
            need = sum(source.num_bytes for source in sources)
            if need > len(memory):
                memory = host_memory(need, pinned=pinned)
            rest, read = memory, []
            for source in sources:
                with self._discarding(source.name):
                    read.append(source.snapshot.read(source.layers, rest))
                rest = rest[source.num_bytes :]
            for source, snapshot in zip(sources, read, strict=True):
                for section in source.takers:
                    num_bytes += snapshot.restore(section, lo, hi, stream=stream)
        return num_bytes

    def _sources(self, span: StoredSpan, sections: Sequence[Section]) -> list[_Source]:
        """The files that the sections need; everything but the data is checked."""
        files = []
        sources = []
        for file in map(self._file, span.names):
            takers = [
                section
                for section in sections
                if set(file.layers) & set(section.layers) and _meet(file.heads, section.heads)
            ]
            if not takers:
                continue
            snapshot = self._open(file)
            if snapshot.header.start != span.start or file.num_tokens < span.stop - span.start:
                raise StoreError(
                    f"{file.name} holds {file.num_tokens} tokens from {snapshot.header.start}, "
                    f"expected {span.start} to {span.stop}"
                )
            for section in takers:
                reasons = snapshot.mismatch(section)
                if reasons:
                    raise StoreError(f"{file.name}: {'; '.join(reasons)}")
            files.append(file)
            sources.append(_Source(file.name, snapshot, takers))
        held, _ = self._cover(files)
        for section in sections:
            if not held[list(section.layers), slice(*section.heads)].all():
                raise StoreError(
                    f"{', '.join(span.names)} do not hold all of layers {section.layers}, heads "
                    f"{section.heads}"
                )
        return sources

    def _open(self, file: _File) -> Snapshot:
        """A file whose content is what its name says. Raises StoreError."""
        with self._discarding(file.name):
            snapshot = Snapshot.open(self._fetch(file))
            header = snapshot.header
            name = self._name(header.prefix, snapshot.tokens, header.layers, header.heads)
            if name != file.name:
                raise CorruptError(f"{file.name} has the content of {name}")
        return snapshot

    def _fetch(self, file: _File) -> Path:
        path = self._blobs.fetch(file.name)
        if path is None:
            raise StoreError(f"{file.name} is not in the store (any more)")
        return path

    @contextmanager
    def _discarding(self, name: str) -> Iterator[None]:
        """Deletes a file that turns out to be of no use, so that it can be stored again."""
        try:
            yield
        except CorruptError:
            self._known.pop(name, None)
            with suppress(StoreError):
                self._blobs.delete(name)
            raise

    def _longest(self, node: str, ids: _Ids) -> tuple[int, list[_File]]:
        """The most of `ids` that an entry below a node begins with, and the files of that entry."""
        whole = self._whole_file(node, ids)
        if whole is not None:
            return len(ids), [whole]
        best: tuple[int, list[_File]] = (0, [])
        opened = 0
        for folder, bound in self._folders(node, ids):
            if bound <= best[0]:
                break
            entries = defaultdict(list)
            for name in self._blobs.names(folder):
                entries[name.partition(".")[0]].append(name)
            lengths = {key: _num_tokens(key) for key in entries}
            for num_tokens in sorted(set(lengths.values()), reverse=True):
                if best[0] < num_tokens <= len(ids):
                    files = self._good(folder, entries.pop(_key(node, ids[:num_tokens]), ()))
                    best = (num_tokens, files) if files else best
            for key in sorted(entries, key=lengths.__getitem__, reverse=True):
                if min(lengths[key], bound) <= best[0]:
                    break
                if not all(f"{folder}/{name}" in self._known for name in entries[key]):
                    opened += 1
                    if opened > _MAX_OPENED:
                        continue
                files = self._good(folder, entries[key])
                tokens = self._tokens(files[0]) if files else None
                if tokens is not None and _shared(ids, tokens) > best[0]:
                    best = _shared(ids, tokens), files
        return best

    def _whole_file(self, node: str, ids: _Ids) -> _File | None:
        """The file of `ids` with all layers and heads: its name is known, nothing is listed."""
        layers, heads = tuple(range(self._shape[0])), (0, self._shape[1])
        name = self._name(node, ids, layers, heads)
        file = _File(name, name.rpartition("/")[0], len(ids), layers, heads)
        is_there = name not in self._known or self._blobs.fetch(name) is not None
        return file if is_there and self._tokens(file) is not None else None

    def _folders(self, node: str, ids: _Ids) -> Iterator[tuple[str, int]]:
        """Folders below a node, and how many of `ids` their entries have at most; most first."""
        own = _head(node, ids)
        yield f"{self._space}/{node}/{own}", len(ids)
        heads = self._blobs.names(f"{self._space}/{node}")
        bounds = {head: _common(head, own) for head in heads if head != own}
        for head in sorted(bounds, key=bounds.__getitem__, reverse=True):
            yield f"{self._space}/{node}/{head}", bounds[head]

    def _good(self, folder: str, names: Iterable[str]) -> list[_File]:
        """Good files of an entry that together hold all layers and heads; none if some miss."""
        files = self._parsed(folder, names)
        while True:
            held, chosen = self._cover(files)
            if not held.all():
                return []
            bad = [file for file in chosen if self._tokens(file) is None]
            if not bad:
                return chosen
            files = [file for file in files if file not in bad]

    def _cover(self, files: Iterable[_File]) -> tuple[npt.NDArray[np.bool_], list[_File]]:
        """Which layers and heads the files hold, and as few of them as hold the same."""
        held = np.zeros(self._shape, np.bool_)
        chosen = []
        for file in sorted(files, key=lambda f: -len(f.layers) * (f.heads[1] - f.heads[0])):
            layers, heads = list(file.layers), slice(*file.heads)
            if not held[layers, heads].all():
                held[layers, heads] = True
                chosen.append(file)
        return held, chosen

    def _tokens(self, file: _File) -> _Ids | None:
        """The tokens of a file; None if it is cut, foreign, or not the entry that its name says."""
        tokens = self._known.get(file.name)
        if tokens is None:
            try:
                with self._discarding(file.name):
                    tokens = stored_tokens(self._fetch(file), file.num_tokens)
                    node, key = file.folder.split("/")[1], file.name.removeprefix(file.folder)[1:]
                    if not key.startswith(_key(node, tokens) + "."):
                        raise CorruptError(f"{file.name} has other tokens than its name says")
            except StoreError:
                return None
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[file.name] = tokens
        return tokens

    def _parsed(self, folder: str, names: Iterable[str]) -> list[_File]:
        found = (self._parse(f"{folder}/{name}") for name in names)
        return [file for file in found if file is not None]

    def _file(self, name: str) -> _File:
        file = self._parse(name)
        if file is None:
            raise StoreError(f"{name!r} is not the name of a file of this store")
        return file

    def _parse(self, name: str) -> _File | None:
        """What a name says; None if it is not one of this store."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        num_layers, total_kv_heads = self._shape
        ranges = [_range(text) for text in found["layers"].split("+")]
        heads = _range(found["heads"])
        num_tokens = int(found["num_tokens"])
        if (
            not name.startswith(self._space)
            or not 0 < num_tokens <= self.chunk_tokens
            or not 0 <= heads[0] < heads[1] <= total_kv_heads
            or any(not 0 <= lo < hi <= num_layers for lo, hi in ranges)
        ):
            return None
        layers = tuple(layer for lo, hi in ranges for layer in range(lo, hi))
        return _File(name, found["folder"], num_tokens, layers, heads)

    def _name(self, node: str, ids: _Ids, layers: Iterable[int], heads: tuple[int, int]) -> str:
        runs: list[list[int]] = []
        for layer in layers:
            if runs and runs[-1][1] == layer:
                runs[-1][1] += 1
            else:
                runs.append([layer, layer + 1])
        ranges = "+".join(f"{lo}-{hi}" for lo, hi in runs)
        return (
            f"{self._space}/{node}/{_head(node, ids)}/{_key(node, ids)}"
            f".l{ranges}.h{heads[0]}-{heads[1]}.safetensors"
        )

    def _span(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        node: str | None,
    ) -> tuple[str, _Ids]:
        """The node of a chunk, and its tokens."""
        step = self.chunk_tokens
        if start % step or not 0 <= start < stop <= min(start + step, len(tokens)):
            raise InvalidArgumentError(
                f"tokens {start} to {stop} of {len(tokens)} are not a chunk of at most {step} "
                f"tokens, expected what spans() returned"
            )
        if node is None:
            node = self.nodes(tokens[:start])[-1]
        return node, token_ids(tokens[start:stop])

    def _of_model(self, section: Section) -> Section:
        """The section with the fingerprint of this store's model, unless it is of another one."""
        num_layers, total_kv_heads = self._shape
        if max(section.layers) >= num_layers or section.heads[1] > total_kv_heads:
            raise InvalidArgumentError(
                f"section has layers {section.layers} and heads {section.heads}, expected them "
                f"within the {num_layers} layers and {total_kv_heads} heads of the store"
            )
        view, facts = section.view, section.view.facts
        for name, expected in (
            ("total_kv_heads", total_kv_heads),
            ("fingerprint", self._fingerprint),
        ):
            if getattr(facts, name) not in (None, expected):
                raise InvalidArgumentError(
                    f"section.view.facts.{name} is {getattr(facts, name)!r}, expected {expected!r} "
                    "as the store has"
                )
        if facts.fingerprint is not None and facts.total_kv_heads is not None:
            return section
        facts = replace(facts, fingerprint=self._fingerprint, total_kv_heads=total_kv_heads)
        return replace(section, view=replace(view, facts=facts))

    def _space_of(self, salt: str) -> str:
        key = json.dumps([FORMAT, self._fingerprint, salt, *self._shape])
        return hashlib.sha256(key.encode()).hexdigest()

    def _settle(self) -> None:
        """Takes chunk_tokens from the store, or gives it to a new one."""
        path = self._blobs.fetch(_CONFIG)
        if path is None:
            wanted = {"format": FORMAT, "chunk_tokens": self._requested or self._otherwise}
            with suppress(StoreError):  # one that is only read may be empty yet
                self._blobs.put(_CONFIG, lambda path: _write_json(path, wanted))
            path = self._blobs.fetch(_CONFIG)
            if path is None:
                return
        try:
            config = json.loads(path.read_bytes())
            found, chunk_tokens = config["format"], config["chunk_tokens"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreError(f"{path} is not the description of a KVX store: {error!r}") from None
        if found != FORMAT or type(chunk_tokens) is not int or chunk_tokens < 1:
            raise StoreError(
                f"{path} has format {found!r} and chunk_tokens {chunk_tokens!r}, expected format "
                f"{FORMAT} and a number of tokens"
            )
        if self._requested not in (None, chunk_tokens):
            raise InvalidArgumentError(
                f"chunk_tokens is {self._requested}, expected {chunk_tokens} as {path} says. "
                "Leave it out, or use another directory"
            )
        self._chunk_tokens = chunk_tokens


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value) + "\n")


def _chain(node: str, ids: _Ids) -> str:
    """The key of `ids` and everything before them; that of a full chunk is the next node."""
    return hashlib.sha256(bytes.fromhex(node) + ids.tobytes()).hexdigest()


def _key(node: str, ids: _Ids) -> str:
    """How the name of a file begins."""
    return f"{len(ids)}-{_chain(node, ids)}"


def _head(node: str, ids: _Ids) -> str:
    """Two digits for each of the first tokens; they differ from some token on if the tokens do."""
    data, crc, digits = ids[:_HEAD_TOKENS].tobytes(), zlib.crc32(node.encode()), ""
    for at in range(0, len(data), ids.itemsize):
        crc = zlib.crc32(data[at : at + ids.itemsize], crc)
        digits += f"{crc & 0xFF:02x}"
    return digits


def _common(head: str, other: str) -> int:
    """The tokens that two heads may have in common at most."""
    count = min(len(head), len(other)) // 2
    differs = (i for i in range(count) if head[2 * i : 2 * i + 2] != other[2 * i : 2 * i + 2])
    return next(differs, count)


def _shared(ids: _Ids, others: _Ids) -> int:
    """The length of the common prefix."""
    count = min(len(ids), len(others))
    differs = ids[:count] != others[:count]
    return int(differs.argmax()) if differs.any() else count


def _num_tokens(key: str) -> int:
    """Of the first word of a file's name; 0 if it is none."""
    digits = key.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


def _range(text: str) -> tuple[int, int]:
    lo, hi = text.split("-")
    return int(lo), int(hi)


def _meet(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return max(one[0], two[0]) < min(one[1], two[1])
