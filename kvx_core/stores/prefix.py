"""PrefixStore: finds, loads and stores the keys and values of prefixes of prompts.

A sequence is cut into chunks; the last one may not be full. Each chunk is an entry, whose key is a
hash of its tokens and all tokens before it: sequences with a common prefix share entries. An entry
is one file, or several that each hold some layers and heads, as ranks of an engine write them, in
one or more precisions. Format of the files: docs/store_format.md.
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
from kvx_core.stores.loads import Fitting, Loads, Progress
from kvx_core.stores.marks import Marks
from kvx_core.stores.match import Match as Match
from kvx_core.stores.match import StoredSpan as StoredSpan
from kvx_core.stores.model_sections import ModelPlanes, ModelSections
from kvx_core.stores.names import Ids, entry_name, key_of
from kvx_core.stores.own_kinds import OwnKinds
from kvx_core.stores.rooms import Rooms
from kvx_core.stores.space import SpaceRecord, salt_digest
from kvx_core.stores.stale_entries import StaleEntries
from kvx_core.stores.token_chain import TokenChain
from kvx_core.stores.usage import Used
from kvx_core.stores.walk import Walk
from kvx_core.stores.windows import Windows
from kvx_core.types import DType

_LISTED_SECONDS = 1.0  # for so long writers rely on a list of kinds


class PrefixStore:
    """Keys and values of token prefixes of one model. Threads and processes may share a store.

    With accept "same", an entry is found and loaded if its values are at least as precise as those
    of the reader's own cache. With "lossy", coarser entries are found and loaded too. Once one is
    loaded, all that this object (or one related by `salted`) captures counts as that coarse, and
    readers that ask for more precision do not find it.

    Entries in a lossy format have other keys than exact entries, and other keys than entries in
    another lossy format: each of these is stored and found apart.
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
        """Opens the store of one model in `blobs`, which other models may use too.

        fingerprint:  of the model as it is computed; or its record, which people can then read
        num_layers:   of the model; an entry is found if it holds all of them
        total_kv_heads: of the model, in every layer; or a list; 0: the layer has states alone
        precision:    of the reader's cache: Precision.of(dtype of the computation, dtype of K and
                      V); or a list with the precision of each layer
        chunk_tokens: None: that of the store, or new_chunk_tokens (at least 16) for a new store
        salt:         sequences with another salt are not found
        accept:       "same" or "lossy", see above
        key:          at least 32 bytes: files are signed with it, and only files signed with it are
                      found. A list: the first key signs, and files signed with any of them are
                      found. None: files are not signed
        encryption_key: the same for keys that encrypt files, with AES-256-GCM
        planes:       of all layers, beside K and V; entries with other planes are not found
        format:       of K and V in files, such as "q8_0", see StorageFormat; None: as in the cache
        windows:      for each layer, how many tokens before the end of a prefix are loaded, 0 for
                      all; the rest are null blocks. None: all tokens of every layer
        state_heads:  heads of the states that ranks split, in every layer; or a list; None: as many
                      as KV heads
        Raises InvalidArgumentError; StoreError if `blobs` holds no store that can be used with
        these keys, or has another chunk_tokens.
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
        self._spaces = Spaces(blobs, self._secrets, own, accept, self.windows)
        self._spaces.tell(fingerprint, about)
        index = Index()
        marks = Marks(blobs, self._secrets, index, self._spaces.ids, states=self._spaces.states)
        self._entries = Entries(blobs, self._secrets, marks, index)
        self._stale_entries = StaleEntries(blobs, marks, index)
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
        self._rooms, self._fitting = Rooms(), Fitting()

    def salted(self, salt: str) -> Self:
        """Returns the same store for sequences with this salt."""
        instance("salt", salt, str, "a string")
        return self._of_record(self._record.salted(salt))

    def of_weights(self, fingerprint: str | ModelRecord, epoch: str = "") -> Self:
        """Returns the same store for the model with other weights, and sequences without a salt.
        epoch: names the weights if they are not those of the model's files
        """
        fingerprint, about = arguments.model(fingerprint)
        instance("epoch", epoch, str, "a string")
        self._spaces.tell(fingerprint, about)
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
        """The fingerprint of the model as it is computed: see ModelRecord.fingerprint."""
        return self._record.fingerprint

    @property
    def is_lossy(self) -> bool:
        """True if values are rounded when they are stored here."""
        return bool(self._record.lossy)

    @property
    def has_states(self) -> bool:
        """True if the model has states, which belong to all tokens of a prefix together."""
        return bool(self._planes.states)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk. Raises StoreError if kvx-store.json cannot be read now."""
        if self._config is None:
            wanted = self._requested, self._otherwise
            self._config = stored_config(self._blobs, self._secrets, *wanted, waits=False)
        if self._config is None:
            return self._requested or self._otherwise
        return self._config.chunk_tokens

    @property
    def accept(self) -> Accept:
        """The argument that says which entries are found: see the class."""
        return self._kinds.accept

    @property
    def carried(self) -> Precision:
        """The coarsest of the loaded precisions that are coarser than this cache's own."""
        return self._carried.precision

    @takes(precision=arguments.PRECISION)
    def carry(self, precision: Precision) -> None:
        """Makes all that is captured from now on count as at most this precise: the `carried` of
        another process, whose tokens this one has got.
        """
        self._carried.take(precision)

    @property
    def index(self) -> Index:
        """The index of files in memory; stores related by `salted` share it."""
        return self._entries.index

    @property
    def kinds(self) -> Kinds:
        """The kinds of this space: how its files are laid out."""
        return self._kinds

    @property
    def finder(self) -> Finder:
        """A Finder that asks the disk for files."""
        return Finder(self._entries, self._kinds, self.chunk_tokens)

    @property
    def known(self) -> Finder:
        """A Finder that asks memory alone for files; its methods raise index.NotCached."""
        known = CachedEntries(self.index, self._entries.marks)
        return Finder(known, self._kinds, self.chunk_tokens)

    @takes(tokens=items)
    def nodes(self, tokens: Sequence[int] | npt.NDArray[Any]) -> list[str]:
        """Returns the key of the tokens before each chunk: `node` of `capture` and `missing`."""
        chain = self.chain_of(tokens)
        return [chain.node(i) for i in range(len(tokens) // self.chunk_tokens + 1)]

    @takes(num_tokens=int64, start=integer)
    def spans(self, num_tokens: int, start: int = 0) -> list[tuple[int, int]]:
        """Returns the chunks (start, stop) of tokens `start` to `num_tokens`; the last is cut."""
        step = self.chunk_tokens
        arguments.check_spans(num_tokens, step)
        first = start // step * step if start < num_tokens else num_tokens
        return [(at, min(at + step, num_tokens)) for at in range(first, num_tokens, step)]

    @takes(tokens=items)
    def lookup(self, tokens: Sequence[int] | npt.NDArray[Any]) -> Match:
        """Returns the longest prefix of `tokens` that is stored, exact to the token.

        An entry counts if accepted files together hold all its layers and heads; before the last
        chunks, layers with a window may be missing. Files in the cache's own precision are chosen
        first, then finer ones, then coarser ones. If the model has states, the prefix is the
        longest that has states too. Corrupt files do not count and are deleted, also those behind
        the first one. Files that cannot be read now, or are not signed with the store's key, do not
        count. Marks lead to entries that begin like the rest of the prompt: of those that part in
        the same eighth of a chunk a lookup may miss up to an eighth. Reads no keys or values.
        Raises InvalidArgumentError if `tokens` are not integers.
        """
        walk = self.walk(self.chain_of(tokens), len(tokens))
        walk.resume(self.finder)
        walk.check_rest(self.finder)
        return walk.match

    def chain_of(
        self, tokens: Sequence[int] | npt.NDArray[Any], node: str | None = None
    ) -> TokenChain:
        """Returns the keys of a sequence that may grow at its end; they are computed on demand.

        node: the key of all tokens before the sequence; None: the sequence is whole
        """
        return TokenChain(tokens, self._record.name if node is None else node, self.chunk_tokens)

    def walk(self, tokens: TokenChain, num_tokens: int, at_least: int = 1) -> Walk:
        """Returns a Walk over the first `num_tokens` tokens, to go on with `finder` or `known`.

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
        """True if some of these layers and heads of the entry tokens[start:stop) are not stored
        with the precision that they have here.

        start, stop: as `spans` returns them
        heads:       first, and one past the last; or a list of such pairs, one for each layer
        node:        nodes(tokens)[start // chunk_tokens], if it is known; then only
                     tokens[start:stop) is read
        base:        with `node`, the position of tokens[0]: earlier tokens can be left out
        from_memory: True: does not ask the disk. Returns False for what was loaded or stored here,
                     however long ago (see `confirm`), and True for what memory does not know
        states:      True: asks for states of the first `stop` tokens; else for all but states
        Looks at names only; in stores with keys, also at the keys that a file was written with.
        Raises InvalidArgumentError.
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
        """Asks the disk for files that `missing` took for stored from memory, if they were not seen
        lately. Files that others have deleted are missing from now on; the rest count as used now.

        This includes the files of stores related by `salted`. Raises StoreError; the files that are
        left then are asked for after the next `missing`.
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
        """Copies tokens `start` to `stop` of a sequence from caches into host memory.

        tokens, start, stop, node, base, states: as for `missing`
        sections: the parts of the sequence that caches hold here
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
        """Returns a Chunks, to capture chunks of tokens `start` to `stop` of a sequence.

        sections: see `capture`; their tables must not change until chunks are captured
        states:   see `capture`
        pool:     lends the memory of the chunks as long as they live; None: new memory
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        held, precision, kind = self._captured(sections, states)
        self._kinds.know(kind)
        return Chunks(
            held, start, stop, precision=precision, format=self.format, pool=pool, kind=kind
        )

    @takes(sections=arguments.SECTIONS, states=flag)
    def would_write(self, sections: Sequence[Section], *, states: bool = False) -> Kind:
        """Returns the kind of files that are captured from such sections. Raises as `chunks`."""
        return self._captured(sections, states)[2]

    def _captured(
        self, sections: Iterable[Section], states: bool
    ) -> tuple[list[Section], Precisions, Kind]:
        """Returns the sections to capture, the upper bound of their precision, and their kind."""
        held = self._sections.all_of(sections, states=states, captured=True)
        at_most = self._own_kinds.at_most(held, states=states)
        return held, at_most, self._own_kinds.of(held, at_most, self.chunk_tokens)

    def commit(self, snapshot: Snapshot) -> int:
        """Stores a snapshot that `capture` of this store returned. Any thread may call it.

        Returns the bytes of its file; 0 if the file existed already. Shorter entries whose tokens
        it begins with are deleted half a minute later, by the next commits.
        Raises StoreError if nothing was stored.
        """
        (stored,) = self.commit_all([snapshot])
        if isinstance(stored, StoreError):
            raise stored
        return stored

    @takes(snapshots=arguments.SNAPSHOTS)
    def commit_all(self, snapshots: Sequence[Snapshot]) -> list[int | StoreError]:
        """Commits several snapshots. Returns for each what `commit` returns or raises.

        On a disk of this machine they are synced together; more than 64 are no quicker.
        """
        commits = Commits(self._entries, self._kinds, self._stale_entries, self.chunk_tokens)
        return commits.commit_all(snapshots)

    def settle(self, seconds: float) -> bool:
        """Waits until all that was stored is on all tiers: see BlobStore.settle."""
        return self._blobs.settle(seconds)

    @property
    def used(self) -> Used:
        """The counts in memory of the directory's files; Used() for blobs that do not count."""
        return Used() if self._blobs.usage is None else self._blobs.usage.now

    @takes(snapshot=arguments.SNAPSHOT)
    def name_of(self, snapshot: Snapshot) -> str:
        """Returns the name of the file that `commit` writes."""
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

        match:    what `lookup` returned, here or in another process
        sections: where the sequence lies; its null blocks are skipped
        progress: tells another thread how far the load is, and can cancel it
        If the model has states, `stop` must be the end of the match; states are loaded first.
        All files of a span are read and checked before the first byte of the span is written. If
        one is bad, the spans before it are loaded, as `progress` says, and all later files are
        checked: corrupt ones are deleted at once. Waits for devices.
        Mutates the caches. Returns the bytes of these tokens as the sections store them.
        Raises StoreError naming the file, InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        arguments.check_range(start, stop, match.num_tokens)
        tokens = self._sections.all_of(sections)
        states = self._sections.all_of(sections, states=True)
        self._planes.check_load(sections, states, stop, match.num_tokens)
        step, num_bytes = self.chunk_tokens, 0
        kept = self._carried, self.format, self._rooms, self._fitting
        loads = Loads(self._entries, self._kinds, step, *kept)
        if states and stop:  # first: tokens are no use without them
            span = match.span_of_states(step)
            beside = None if progress is None else progress.beside()
            num_bytes = loads.load([span], span.start, stop, states, stream, beside)
        return num_bytes + loads.load(match.spans, start, stop, tokens, stream, progress)

    def _span(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        node: str | None,
        base: int,
    ) -> tuple[str, Ids]:
        """Returns the node of a chunk, and the chunk's tokens."""
        step = self.chunk_tokens
        arguments.check_chunk(start, stop, base, base + len(tokens), step)
        if node is None:
            node = self.chain_of(token_ids(tokens[:start])).node(start // step)
        return node, token_ids(tokens[start - base : stop - base])
