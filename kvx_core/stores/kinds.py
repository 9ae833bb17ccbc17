"""Kinds: reads and writes the records of a space's kinds, and chooses kinds for a reader.

A kind is the layout of the files of one writer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from weakref import WeakValueDictionary

from kvx_core.snapshot import Accept, CorruptError, Precision, StoreError
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.blob_store import BlobStore, Content
from kvx_core.stores.covers import Cover
from kvx_core.stores.names import kind_name, kinds_folder, model_record, space_record
from kvx_core.stores.space import MAX_BYTES, SpaceRecord
from kvx_core.stores.windows import Windows

_MOST = 256  # kinds in a space
_MOST_TEXTS = 1024  # of models' records
_MOST_BYTES = 16 << 20  # of records of kinds in all spaces; parsed, they take ten times as much
_SHARED_BYTES = 1 << 16  # spaces share parsed records of at most this size
_REFUSED_SECONDS = 1.0  # before a kind that cannot be taken is read again


class Kinds:
    """The kinds of one space. Threads may share it."""

    def __init__(
        self,
        blobs: BlobStore,
        secrets: Secrets,
        record: SpaceRecord,
        demand: Sequence[Precision],
        accept: Accept,
        clock: Callable[[], float] = time.monotonic,
        has_room: Callable[[int], bool] = lambda num_bytes: True,
        windows: Windows | None = None,
        about: bytes = b"",
    ) -> None:
        """demand:   the precision of each layer of the reader's cache
        has_room: True if so many more bytes of records may be kept, in all spaces together
        windows:  for each layer, how far before the end of a prefix the reader needs it; None: all
                  tokens of every layer
        about:    the text of the model's record, if it is known; ignored unless its SHA-256 is the
                  fingerprint
        """
        self.windows = windows or Windows.of(None, len(record.kv_heads))
        self.record = record
        self._blobs, self._secrets = blobs, secrets
        self.demand, self.accept = tuple(demand), accept
        self._clock, self._has_room = clock, has_room
        is_own = hashlib.sha256(about).hexdigest() == record.fingerprint
        self._about = about if is_own and len(about) <= MAX_BYTES else b""
        self.num_bytes = 0  # of the records that were read from the store
        self._lock = Lock()  # never held while the disk is asked: steps of engines take it
        self._kinds: dict[str, Kind] = {}  # by id: kinds that this process can read
        self.ids = frozenset[str]()  # ids of all kinds, readable here or not
        self._refused: dict[str, float] = {}  # by id: until when other kinds are not read again
        self._all: tuple[Kind, ...] = ()  # kinds of tokens, then kinds of states
        reach = self.windows.reach
        self.tokens = Cover(record.kv_heads, reach, demand)
        self.states = Cover(record.state_heads, reach, demand, is_states=True)
        self._listed = float("-inf")

    # ---- for lookups ----

    def listed_within(self, seconds: float) -> bool:
        """True if the folder of kinds was listed less than `seconds` ago."""
        return self._clock() - self._listed < seconds

    @property
    def all(self) -> tuple[Kind, ...]:
        """The kinds of this model whose files this process can read or writes."""
        return self._all

    def refresh(self, seen: tuple[Kind, ...] = ()) -> bool:
        """Lists the folder of kinds and reads new ones. Returns True if `all` differs from `seen`.

        Other threads may have read kinds since the caller took `seen`.
        """
        listed = self._clock()
        found = self._blobs.names(kinds_folder(self.record.name))
        ids = [name.removesuffix(".json") for name in found if name.endswith(".json")]
        self.ids = frozenset(ids[:_MOST]) | self._kinds.keys()
        for id in sorted(ids)[:_MOST]:
            self.get(id)
        self._listed = listed  # set last: now the kinds are known
        return self._all != seen

    def get(self, id: str) -> Kind | None:
        """Returns the kind with this id; None if there is none that this process can take."""
        found = self._kinds.get(id)
        if found is not None or self._refused.get(id, 0.0) > self._clock():
            return found
        name = kind_name(self.record.name, id)
        kind = None
        with suppress(StoreError):
            raw = self._blobs.read(name, MAX_BYTES)
            if (
                raw is not None
                and self._has_room(len(raw))
                and self._secrets.check(name, raw, self._mac)
            ):
                kind = _parsed(raw, id)
        with self._lock:
            if kind is not None and len(self._kinds) < _MOST and self._fits(kind):
                self._kinds[id] = kind
                self.num_bytes += len(kind.text)
                self._rank()
            else:
                if len(self._refused) >= _MOST:
                    self._refused.clear()
                self._refused[id] = self._clock() + _REFUSED_SECONDS
        return self._kinds.get(id)

    def accepts(self, kind: Kind) -> bool:
        """True if every layer of files of a kind may be loaded here."""
        if self.accept == "same":
            return not self.coarser(kind)
        demand = self.of_sort(kind).demand
        return all(kind.precision_of(i).may_become(demand(kind, i)) for i in kind.layers)

    def coarser(self, kind: Kind) -> set[Precision]:
        """Returns the precisions of a kind that do not include the reader's precision."""
        demand = self.of_sort(kind).demand
        return {
            precision
            for layer in kind.layers
            if not (precision := kind.precision_of(layer)).includes(demand(kind, layer))
        }

    def of_sort(self, kind: Kind) -> Cover:
        """Returns the Cover of the sort of a kind: `states` or `tokens`."""
        return self.states if kind.is_states else self.tokens

    # ---- for writers ----

    def ensure(self, kind: Kind) -> None:
        """Writes the records of a kind, of the space and of its model if they are missing or
        damaged.

        Raises StoreError.
        """
        for name, raw in (
            (space_record(self.record.name), self.record.text),
            (kind_name(self.record.name, kind.id), kind.text),
        ):
            mac = self._secrets.mac(name, raw)
            if mac is not None:  # the MAC comes first, so that nobody sees the record without it
                self._put(mac[0], mac[1].encode())
            self._put(name, raw)
        if self._about:  # it needs no MAC: the space's record has its digest
            self._put(model_record(self.record.name), self._about)

    def know(self, kind: Kind) -> None:
        """Adds a kind whose files this process is going to write."""
        if kind.id not in self._kinds:
            with self._lock:
                self.ids |= {kind.id}
                self._kinds[kind.id] = kind
                self._rank()

    def _put(self, name: str, raw: bytes) -> None:
        found = self._read(name, len(raw))
        if found is None:
            self._blobs.put(name, Content.of(raw))
        elif found != raw:
            self._blobs.replace(name, Content.of(raw))

    def _mac(self, name: str) -> bytes | None:
        return self._read(name, 64)

    def _read(self, name: str, most_bytes: int) -> bytes | None:
        """Returns a record; None if there is none, b"" if it is too long. Raises StoreError."""
        try:
            return self._blobs.read(name, most_bytes)
        except CorruptError:  # it has more than most_bytes
            return b""

    # ---- choice and order of kinds ----

    def _fits(self, kind: Kind) -> bool:
        """True if a kind fits this model and this process can read its files."""
        heads, planes = self.of_sort(kind).heads, self.record.planes_of(kind.is_states)
        return (
            kind.keyed == self._secrets.is_keyed
            and kind.encrypted == self._secrets.is_encrypted
            and all(
                layer < len(heads) and kind.heads_of(layer)[1] <= heads[layer]
                for layer in kind.layers
            )
            and set(kind.planes) == {plane for plane in planes if plane.layer in kind.layers}
        )

    def _rank(self) -> None:
        for cover in (self.tokens, self.states):
            cover.rank(self._kinds.values(), self.accepts)
        self._all = (*self.tokens.all, *self.states.all)


class Spaces:
    """The Kinds of each space of a store, kept while somebody uses them. Threads may share it."""

    def __init__(
        self,
        blobs: BlobStore,
        secrets: Secrets,
        demand: Sequence[Precision],
        accept: Accept,
        windows: Windows | None = None,
    ) -> None:
        """Takes the arguments of the same names of Kinds."""
        self._arguments = blobs, secrets, demand, accept
        self.windows = windows
        self._texts: dict[str, bytes] = {}  # of models' records, by fingerprint
        self._known = WeakValueDictionary[str, Kinds]()

    def kinds(self, record: SpaceRecord) -> Kinds:
        """Returns the Kinds of a space: the same object for all callers."""
        blobs, secrets, demand, accept = self._arguments
        new = Kinds(
            *(blobs, secrets, record, demand, accept),
            has_room=self._has_room,
            about=self._texts.get(record.fingerprint, b""),
            windows=self.windows,
        )
        return self._known.setdefault(record.name, new)

    def tell(self, fingerprint: str, text: bytes) -> None:
        """Notes the text of a model's record, for the spaces opened later; b"": it is unknown."""
        if text:
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            self._texts[fingerprint] = text

    def _has_room(self, num_bytes: int) -> bool:
        return (
            num_bytes + sum(kinds.num_bytes for kinds in list(self._known.values())) < _MOST_BYTES
        )

    def ids(self, space: str, *, lists: bool = False) -> Iterable[str]:
        """Returns the ids of the kinds that files of a space may have, as this process knows them.

        lists: True: lists the folder of kinds first
        Returns no ids for a space whose Kinds nobody uses.
        """
        found = self._known.get(space)
        if found is None:
            return ()
        if lists:
            found.refresh()
        return found.ids

    def states(self, space: str) -> Iterable[str]:
        """Returns the ids of those kinds whose files have states."""
        found = self._known.get(space)
        return () if found is None else [kind.id for kind in found.states.all]


@lru_cache(maxsize=256)
def _shared(raw: bytes, id: str) -> Kind:
    return Kind.parse(raw, id)


def _parsed(raw: bytes, id: str) -> Kind:
    """Parses a record. Shares the kinds of small records, since spaces of a model have the same."""
    return _shared(raw, id) if len(raw) <= _SHARED_BYTES else Kind.parse(raw, id)
