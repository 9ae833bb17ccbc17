"""PrefixStore: finds, loads and stores the keys and values of prefixes of prompts.

A sequence is cut into chunks. Each chunk, the last one perhaps not full, is an entry; its key is a
hash of it and all tokens before it, so that sequences with a common prefix share entries. An entry
is one file, or several that each hold some layers and heads, as ranks of an engine write them, in
one precision or more. docs/store_format.md has the format of files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy.typing as npt

from kvx_core.argument_checks import flag, instance, int64, int64s, integer, items, takes
from kvx_core.desc.planes import Plane
from kvx_core.errors import InvalidArgumentError
from kvx_core.model.record import ModelRecord
from kvx_core.snapshot import (
    Accept,
    Chunks,
    MemoryPool,
    PlaneKind,
    Precision,
    Precisions,
    Section,
    Snapshot,
    StorageFormat,
    StoreError,
    token_ids,
)
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores import arguments
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.commits import Commits, name_in
from kvx_core.stores.config import stored_config
from kvx_core.stores.covers import Heads
from kvx_core.stores.entries import CachedEntries, Entries, LoadedPrecision
from kvx_core.stores.finder import Finder
from kvx_core.stores.index import Index
from kvx_core.stores.kinds import Kinds, Spaces
from kvx_core.stores.loads import Loads, Progress
from kvx_core.stores.marks import Marks
from kvx_core.stores.match import Match as Match
from kvx_core.stores.match import StoredSpan as StoredSpan
from kvx_core.stores.model_planes import ModelPlanes
from kvx_core.stores.model_sections import ModelSections
from kvx_core.stores.names import Ids, entry_name, key_of
from kvx_core.stores.own_kinds import OwnKinds
from kvx_core.stores.rooms import Rooms
from kvx_core.stores.space import SpaceRecord, salt_digest
from kvx_core.stores.superseded import StaleEntries
from kvx_core.stores.token_chain import TokenChain
from kvx_core.stores.usage import Used
from kvx_core.stores.walk import Walk
from kvx_core.stores.windows import Windows
from kvx_core.types import DType

_LISTED_SECONDS = 1.0  # that writers take a list of kinds for right


class PrefixStore:
    """Keys and values of token prefixes of one model. Threads and processes may share a store.

    With accept "same", an entry is found and loaded if its values are at least as precise as those
    of the reader's own cache. With "lossy", every entry is. Once a coarser entry was loaded,
    everything that this object (and those it was `salted` from) captures counts as that coarse, and
    readers that ask for more precision do not find it.

    With a lossy format, everything is stored and found apart from what is exact and from what other
    formats have rounded: its entries have other keys.
    """

    @takes(blobs=arguments.BLOBS, accept=arguments.accept)
    def __init__(
        self,
        blobs: BlobStore,
        *,
        fingerprint: str | ModelRecord,
        num_layers: int,
        total_kv_heads: int | Sequence[int],
        precision: Precision | Sequence[Precision],
        chunk_tokens: int | None = None,
        new_chunk_tokens: int = 128,
        salt: str = "",
        accept: Accept = "same",
        key: bytes | Sequence[bytes] | None = None,
        encryption_key: bytes | Sequence[bytes] | None = None,
        planes: Iterable[Plane | PlaneKind] = (),
        format: StorageFormat | DType | str | None = None,
        windows: Sequence[int] | None = None,
        state_heads: int | Sequence[int] | None = None,
    ) -> None:
        """A store of one model in `blobs`, which other models may use too.

        fingerprint:  of the model as it is computed; or its record, which people can then read
        num_layers:   of the model; an entry is found once it holds all of them
        total_kv_heads: of the model, in every layer; or of each layer, 0: it has states alone
        precision:    of the reader's cache: Precision.of(dtype of the computation, dtype of K and
                      V); or that of each layer
        chunk_tokens: None: as the store has it, new_chunk_tokens, at least 16, for a new one
        salt:         sequences with another salt are not found
        accept:       "same" or "lossy", see above
        key:          at least 32 bytes: signs files, and only files signed with it are found; of
                      several the first signs, and what any of them has signed is found. None:
                      nothing is signed
        encryption_key: the same for keys that files are encrypted with, with AES-256-GCM
        planes:       beside K and V, of all layers of the model: entries with others are not found
        format:       what K and V are stored in, such as "q8_0", see StorageFormat; None: as the
                      cache has them
        windows:      of each layer, how many tokens before the end of a prefix are loaded, the
                      others being null blocks; 0: all. None: all of every layer
        state_heads:  of the states of the model that ranks split, in every layer or of each; None:
                      as many as KV heads
        Raises InvalidArgumentError; StoreError if it is no store, or has another chunk_tokens.
        """
        num_layers = integer("num_layers", num_layers, 1)
        kv_heads = arguments.of_layers("total_kv_heads", total_kv_heads, num_layers)
        requested = new_chunk_tokens if chunk_tokens is None else chunk_tokens
        requested = integer("chunk_tokens", requested, 1)
        fingerprint, about = arguments.model(fingerprint)
        instance("salt", salt, str, "a string")
        demand = arguments.precisions(precision, num_layers)
        self._blobs = blobs
        self._secrets = Secrets.of(key, encryption_key)
        self.format = StorageFormat.of(format)
        is_lossy = any(map(self.format.is_lossy_for, demand))
        own = tuple(each.meet(self.format.precision) for each in demand)
        self._carried = LoadedPrecision()
        self._planes = ModelPlanes.of(planes)
        self._record = SpaceRecord(
            fingerprint,
            kv_heads,
            planes=tuple(sorted(self._planes.kinds)),
            lossy=self.format.name if is_lossy else "",
            salt=salt_digest(salt),
            state_heads=self._planes.state_heads(state_heads, kv_heads),
        )
        of_model = fingerprint, kv_heads, self._record.state_heads, self._planes, self.format
        self._sections = ModelSections(*of_model, self.is_lossy)
        self.windows = Windows.of(windows, num_layers)
        self._spaces = Spaces(blobs, self._secrets, own, accept, self.windows, about)
        spaces, index = self._spaces, Index()
        marks = Marks(blobs, self._secrets, index, spaces.ids, states=spaces.states)
        self._entries = Entries(blobs, self._secrets, marks, index)
        self._superseded = StaleEntries(blobs, marks, index)
        self._kinds = self._spaces.kinds(self._record)
        self._own_kinds = OwnKinds(self.format, self._secrets, own, self._carried)
        self._requested, self._otherwise = chunk_tokens, new_chunk_tokens
        self._config = stored_config(blobs, self._secrets, chunk_tokens, new_chunk_tokens)
        try:
            self._planes.check_chunks(self.chunk_tokens)
        except InvalidArgumentError as error:
            if self.chunk_tokens == requested:
                raise
            raise StoreError(f"{error}. The store was made with these chunk_tokens") from None
        self._rooms = Rooms()

    def salted(self, salt: str) -> Self:
        """The same store for sequences with this salt."""
        instance("salt", salt, str, "a string")
        return self._of_record(self._record.salted(salt))

    def of_weights(self, fingerprint: str, epoch: str = "") -> Self:
        """The same store for the model with other weights, and sequences without a salt.

        epoch: names the weights where they are not those of the model's files
        """
        for name, value in {"fingerprint": fingerprint, "epoch": epoch}.items():
            instance(name, value, str, "a string")
        record = replace(self._record, fingerprint=fingerprint, epoch=epoch, salt="")
        other = self._of_record(record)
        other._sections = replace(self._sections, fingerprint=fingerprint)
        return other

    def _of_record(self, record: SpaceRecord) -> Self:
        other = copy.copy(self)
        other._record, other._kinds = record, self._spaces.kinds(record)
        return other

    @property
    def fingerprint(self) -> str:
        """Of the model as it is computed: see ModelRecord.fingerprint."""
        return self._record.fingerprint

    @property
    def is_lossy(self) -> bool:
        """Whether values are rounded when they are stored here."""
        return bool(self._record.lossy)

    @property
    def has_states(self) -> bool:
        """Whether a prefix has states, which belong to all of its tokens together."""
        return bool(self._planes.states)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""
        if self._config is None:
            wanted = self._requested, self._otherwise
            self._config = stored_config(self._blobs, self._secrets, *wanted, waits=False)
        if self._config is None:
            return self._requested or self._otherwise
        return self._config.chunk_tokens

    @property
    def accept(self) -> Accept:
        """Which entries are found: see the class."""
        return self._kinds.accept

    @property
    def carried(self) -> Precision:
        """The coarsest precision that was loaded here and is coarser than this cache's own."""
        return self._carried.precision

    @takes(precision=arguments.PRECISION)
    def carry(self, precision: Precision) -> None:
        """Makes all that is captured from now on count as at most this precise.

        A process that gets what another one has loaded passes the other's `carried`.
        """
        self._carried.take(precision)

    @property
    def index(self) -> Index:
        """What is known of the files without the disk; those that this was salted from share it."""
        return self._entries.index

    @property
    def kinds(self) -> Kinds:
        """How the files of this space are laid out."""
        return self._kinds

    @property
    def finder(self) -> Finder:
        """Finds files on the disk."""
        return Finder(self._entries, self._kinds, self.chunk_tokens)

    @property
    def known(self) -> Finder:
        """Finds files in memory, without the disk; raises index.Unknown."""
        known = CachedEntries(self.index, self._entries.marks)
        return Finder(known, self._kinds, self.chunk_tokens)

    @takes(tokens=items)
    def nodes(self, tokens: Sequence[int] | npt.NDArray[Any]) -> list[str]:
        """The key of the tokens before each chunk: the argument `node` of capture and missing."""
        chain = self.chain_of(tokens)
        return [chain.node(i) for i in range(len(tokens) // self.chunk_tokens + 1)]

    @takes(num_tokens=int64, start=integer)
    def spans(self, num_tokens: int, start: int = 0) -> list[tuple[int, int]]:
        """The chunks (start, stop) that tokens `start` to `num_tokens` lie in, the last one cut."""
        step = self.chunk_tokens
        arguments.check_spans(num_tokens, step)
        first = start // step * step if start < num_tokens else num_tokens
        return [(at, min(at + step, num_tokens)) for at in range(first, num_tokens, step)]

    @takes(tokens=items)
    def lookup(self, tokens: Sequence[int] | npt.NDArray[Any]) -> Match:
        """The longest prefix of `tokens` that is stored, exact to the token.

        An entry counts if accepted files together hold all its layers and heads, but for those that
        `windows` leaves out before the last chunks; the most precise files are chosen. Where the
        model has states, the prefix is the longest that has them too. Corrupt files do not count,
        and are deleted, those behind the first one too. Files that cannot be read now, or are not
        signed with the store's key, do not count. Entries that begin like the rest of the prompt
        are found by their marks: a lookup may miss an eighth of a chunk where very many differ
        late. Reads no keys or values. Raises InvalidArgumentError if `tokens` are no integers.
        """
        walk = self.walk(self.chain_of(tokens), len(tokens))
        walk.go_on(self.finder)
        walk.check_rest(self.finder)
        return walk.match

    def chain_of(
        self, tokens: Sequence[int] | npt.NDArray[Any], node: str | None = None
    ) -> TokenChain:
        """The keys of a sequence that may grow at its end, computed in pieces when asked for.

        node: the key of all tokens before it; None: it is a whole sequence
        """
        return TokenChain(tokens, self._record.name if node is None else node, self.chunk_tokens)

    def walk(self, tokens: TokenChain, num_tokens: int, at_least: int = 1) -> Walk:
        """A lookup of the first `num_tokens` tokens that goes on with `finder` or `known`.

        at_least: shorter matches need not be found
        """
        return Walk(tokens, num_tokens, at_least, self.has_states)

    @takes(**arguments.CHUNK, layers=int64s, heads=arguments.heads)
    def missing(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        layers: Iterable[int],
        heads: Heads,
        *,
        node: str | None = None,
        base: int = 0,
        from_memory: bool = False,
        states: bool = False,
    ) -> bool:
        """Whether some of these layers and heads of the entry tokens[start:stop) are not stored
        with the precision that they have here.

        start, stop: as `spans` has them
        heads:       first, and one past the last; or a list of these, one for each of `layers`
        node:        nodes(tokens)[start // chunk_tokens], if it is known; then only
                     tokens[start:stop) is read
        base:        with `node`, the position of tokens[0]: what is before it can be left out
        from_memory: does not ask the disk; False for what was loaded or stored here, however long
                     ago (see `confirm`); else True if memory does not know
        states:      means the states of the first `stop` tokens; else all but states
        Looks at names only; in stores with keys, also at who has written a file. Raises
        InvalidArgumentError.
        """
        node, ids = self._span(tokens, start, stop, node, base)
        held = tuple(layers)
        arguments.check_part(self._record.heads(states), held, heads)
        key = key_of(node, ids)

        def is_there(kind: Kind) -> bool:
            name = entry_name(self._record.name, key, kind.id)
            if from_memory:
                return self.index.has(name)
            has = self._entries.is_there(name)
            return has and not self._entries.has_other_keys(name, kind, len(ids))

        if not from_memory and not self._kinds.listed_within(_LISTED_SECONDS):
            self._kinds.refresh()
        cover = self._kinds.states if states else self._kinds.tokens
        return not cover.hold(held, heads, self.carried, is_there)

    def confirm(self) -> None:
        """Asks the disk for the files that `missing` took for stored from memory, and which were
        not seen lately. Those that others have deleted are missing from now on; the others count as
        used just now.

        Of all stores that this was salted from. Raises StoreError; what it has not asked for is
        asked for after the next `missing`.
        """
        for name in self.index.take_doubted():
            self._entries.is_there(name)

    @takes(**arguments.CHUNK, sections=arguments.SECTIONS)
    def capture(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        node: str | None = None,
        base: int = 0,
        states: bool = False,
    ) -> Snapshot | None:
        """Copies tokens `start` to `stop` of a sequence out of caches, into memory of the host.

        tokens, start, stop, node, base, states: as for `missing`
        sections: what is held here of the sequence
        Returns when the caches may change again; None if a block of these tokens is null.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        node, ids = self._span(tokens, start, stop, node, base)
        pool = self._rooms.pool(sections, self.chunk_tokens)
        chunks = self.chunks(sections, start, stop, pool=pool, states=states)
        snapshot = Snapshot.reserve_of(chunks, ids, start=start, prefix=node)
        if snapshot is not None:
            for section in chunks.sections:
                snapshot.fill(section)
            snapshot.settle(chunks.sections)
        return snapshot

    def chunks(
        self,
        sections: Sequence[Section],
        start: int,
        stop: int,
        *,
        pool: MemoryPool | None = None,
        states: bool = False,
    ) -> Chunks:
        """What is held here of tokens `start` to `stop` of a sequence, to capture chunks of it.

        sections: their tables must not change until chunks are captured
        states:   see `capture`
        pool:     whose memory the chunks have as long as they live; None: new memory
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        held, precision, kind = self._captured(sections, states)
        self._kinds.know(kind)
        return Chunks(
            held, start, stop, precision=precision, format=self.format, pool=pool, kind=kind
        )

    @takes(sections=arguments.SECTIONS, states=flag)
    def would_write(self, sections: Sequence[Section], *, states: bool = False) -> Kind:
        """The kind of the files that are captured from sections like these. Raises as `chunks`."""
        return self._captured(sections, states)[2]

    def _captured(
        self, sections: Iterable[Section], states: bool
    ) -> tuple[list[Section], Precisions, Kind]:
        """What is captured of sections, the precision that it counts as at most, and its kind."""
        held = self._sections.all_of(sections, states=states, captured=True)
        at_most = self._own_kinds.at_most(held, states=states)
        return held, at_most, self._own_kinds.of(held, at_most, self.chunk_tokens)

    def commit(self, snapshot: Snapshot) -> int:
        """Stores what `capture` of this store returned. May be called from any thread.

        Returns the bytes of its file; 0 if the file existed already. snapshot.cache_bytes is what K
        and V take without a format. Entries whose tokens it begins with are deleted half a minute
        later, by the next commits.
        Raises StoreError if nothing was stored.
        """
        (stored,) = self.commit_all([snapshot])
        if isinstance(stored, StoreError):
            raise stored
        return stored

    @takes(snapshots=arguments.SNAPSHOTS)
    def commit_all(self, snapshots: Sequence[Snapshot]) -> list[int | StoreError]:
        """`commit` for each of these, and what it returns or raises.

        On a disk of this machine they are synced together, in a fraction of the time. All files are
        open meanwhile: 64 are as quick as more.
        """
        commits = Commits(self._entries, self._kinds, self._superseded, self.chunk_tokens)
        return commits.commit_all(snapshots)

    @property
    def used(self) -> Used:
        """What is known in memory of the directory's files; also of those of other models.

        Used() for blobs that do not count. Stores made by `salted` have the same.
        """
        return Used() if self._blobs.usage is None else self._blobs.usage.now

    @takes(snapshot=arguments.SNAPSHOT)
    def name_of(self, snapshot: Snapshot) -> str:
        """The name of the file that `commit` writes."""
        return name_in(self._record.name, snapshot)

    @takes(match=arguments.MATCH, start=int64, stop=int64, sections=arguments.SECTIONS)
    def load(
        self,
        match: Match,
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        stream: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Copies tokens `start` to `stop` of a match into caches.

        match:    what `lookup` found, here or in another process
        sections: where the sequence lies; its null blocks are skipped
        progress: tells another thread how far the load is, and can cancel it
        Where the model has states, `stop` is the end of the match, and they are loaded first.
        All of a span is read and checked before the first byte of it is written. If a file of one
        is bad, the spans before it are loaded, as `progress` says, and all after it are checked:
        corrupt files are deleted at once. Waits for devices.
        Mutates the caches. Returns the bytes of these tokens as the sections store them.
        Raises StoreError naming the file, InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        arguments.check_range(start, stop, match.num_tokens)
        tokens = self._sections.all_of(sections)
        states = self._sections.all_of(sections, states=True)
        self._planes.check_load(sections, states, stop, match.num_tokens)
        step, num_bytes = self.chunk_tokens, 0
        loads = Loads(self._entries, self._kinds, step, self._carried, self.format, self._rooms)
        if states and stop:  # first: tokens are no use without them
            span = match.span_of_states(step)
            num_bytes = loads.load([span], span.start, stop, states, stream, Progress())
        progress = progress or Progress()
        return num_bytes + loads.load(match.spans, start, stop, tokens, stream, progress)

    def _span(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        node: str | None,
        base: int,
    ) -> tuple[str, Ids]:
        """The node of a chunk, and its tokens."""
        step = self.chunk_tokens
        arguments.check_chunk(start, stop, base, base + len(tokens), step)
        if node is None:
            node = self.chain_of(token_ids(tokens[:start])).node(start // step)
        return node, token_ids(tokens[start - base : stop - base])
