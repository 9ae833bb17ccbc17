"""Saver: copies tokens out of an engine's blocks. A Writer then writes them to the store.

A save copies to host memory before its step ends, because the engine may give the blocks to other
requests afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvx_core.connector.boundary import Boundary, Guard
from kvx_core.connector.counts import Counts
from kvx_core.connector.plan import BlockIds, RequestId, Save, Scope, ScopedStores
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.writer import Writer
from kvx_core.snapshot import Chunks, MemoryPool, Section, Snapshot, StoreError
from kvx_core.stores.commits import kind_of
from kvx_core.stores.covers import Heads, heads_of
from kvx_core.stores.prefix import PrefixStore

# Makes the sections of a request's first tokens from its blocks and the number of tokens.
Sections = Callable[[BlockIds, int], list[Section]]


@dataclass(slots=True, eq=False)
class _Part:
    """Layers of this worker that share files.

    states: True: the files hold the layers' states; False: all but their states
    """

    layers: tuple[int, ...]
    heads: Heads
    states: bool = False
    chunks: Chunks | None = None  # source of the copies; None: nothing is copied
    snapshots: list[Snapshot] = field(default_factory=list)

    def of(self, sections: Iterable[Section]) -> list[Section]:
        """Returns the sections, cut to the layers of this part."""
        mine = [s.states if self.states else s.tokens for s in sections]
        held = [(s, [layer for layer in s.layers if layer in self.layers]) for s in mine if s]
        return [s if len(ls) == len(s.layers) else s.of(ls) for s, ls in held if ls]


@dataclass(slots=True)
class _Copied:
    """The copies of the chunks of one save."""

    store: PrefixStore
    missing: set[int]  # layers that have not been copied
    parts: Sequence[_Part] = ()
    num_bytes: int = 0  # of all snapshots
    refused: StoreError | None = None  # why later chunks are not copied

    @property
    def snapshots(self) -> list[Snapshot]:
        return [snapshot for part in self.parts for snapshot in part.snapshots]

    def fill(self, layers: Collection[int]) -> None:
        for part in self.parts:
            for section in () if part.chunks is None else part.chunks.sections:
                if held := [layer for layer in section.layers if layer in layers]:
                    Snapshot.fill_all(part.snapshots, section.of(held))
        self.missing = self.missing.difference(layers)

    def settle(self) -> None:
        """Completes the snapshots after all layers are copied."""
        for part in self.parts:
            for snapshot in part.snapshots:
                assert part.chunks is not None  # the snapshot is one of these chunks
                snapshot.settle(part.chunks.sections)


class Saver:
    """Saves tokens of one worker. A failed save affects no other. `shutdown` ends its threads."""

    def __init__(
        self,
        stores: ScopedStores,
        settings: StoreSettings,
        boundary: Boundary,
        counts: Counts,
        sections: Sections,
        layers: Sequence[int],
        heads: Heads,
        state_heads: Heads | None = None,
    ) -> None:
        """layers, heads: this worker's layers and heads, as PrefixStore.missing takes them
        sections:    makes sections of these layers. The `state_tokens` of a section with states
                     says after how many tokens they are: states are stored if a save ends there
        state_heads: the heads of the layers' states; None: as `heads`
        """
        self._stores, self._settings, self._boundary = stores, settings, boundary
        self._counts, self._sections = counts, sections
        self._layers, self._heads = layers, heads
        self._state_heads = heads if state_heads is None else state_heads
        self._writer = Writer(settings, boundary, counts, self._is_stored)
        self._pool: MemoryPool | None = None  # made by the first save
        self._open_step: object = None  # the step that save_layer was called for
        self._open: dict[RequestId, _Copied] = {}  # by request, copies of that step
        self._open_bytes = 0  # of these copies
        self._lock = threading.Lock()  # guards _saved
        self._saved: set[RequestId] = set()

    def save_layer(self, step: object, saves: Sequence[Save], layer: int) -> None:
        """Copies one layer of a step's saves. `save` copies the remaining layers.

        step: an object that differs from step to step
        """
        if self._open_step is not step:
            self._open_step, self._open, self._open_bytes = step, {}, 0
            for save in saves:
                with self._saving(save):
                    copied = self._open[save.request_id] = self._reserve(save)
                    self._open_bytes += copied.num_bytes
        for save in saves:
            with self._saving(save):
                found = self._open.get(save.request_id)
                if found is not None and layer in found.missing:
                    found.fill([layer])

    def save(self, step: object, saves: Sequence[Save]) -> None:
        """Copies the tokens of a step's saves. Threads write the files later."""
        opened = self._open if self._open_step is step else {}
        self._open_step, self._open, self._open_bytes = None, {}, 0
        for save in saves:
            begin, num_tokens = time.perf_counter(), 0
            with self._saving(save):
                copied = opened.get(save.request_id) or self._reserve(save)
                copied.fill(copied.missing)
                copied.settle()
                for snapshot in copied.snapshots:
                    self._writer.add(copied.store, snapshot)
                num_tokens = _num_tokens(copied.snapshots)
                if copied.refused is not None:
                    raise copied.refused
                self._confirm_later(self._stores[save.scope])
            if num_tokens:
                seconds = time.perf_counter() - begin
                self._counts.add(saved_tokens=num_tokens, save_seconds=seconds)
            if save.final:
                with self._lock:
                    self._saved.add(save.request_id)
        with self._boundary.guard("did not save", count="dropped_saves"):
            self._writer.start()

    def refuse(self, saves: Sequence[Save], reason: str) -> None:
        """Drops the saves of a step, and reports final saves as done: their blocks may be freed."""
        self._open_step, self._open, self._open_bytes = None, {}, 0
        for save in saves:
            with self._saving(save):
                raise StoreError(reason)
            if save.final:
                with self._lock:
                    self._saved.add(save.request_id)

    def save_now(self, save: Save) -> bool:
        """Stores tokens of a running request before it returns, and all chunks that wait.

        It waits for these chunks at most shutdown_seconds. Returns True if all tokens of `save` are
        stored and no chunk waits any more; False if tokens have left a sliding window unsaved.
        """
        begin = time.perf_counter()
        with self._saving(save):
            copied = self._reserve(save)
            copied.fill(copied.missing)
            copied.settle()
            for error in self._writer.commit(copied.store, copied.snapshots):
                if error is not None:
                    raise error
            seconds, stored = time.perf_counter() - begin, _num_tokens(copied.snapshots)
            self._counts.add(saved_tokens=stored, save_seconds=seconds)
            if copied.refused is not None:
                raise copied.refused
        return self._writer.threads.wait(self._settings.shutdown_seconds) and self._has(save)

    def _has(self, save: Save) -> bool:
        """True if all tokens of a save are stored, by this engine or another. Asks the disk."""
        with self._saving(save):
            store = self._stores[save.scope]
            chain = store.chain_of(save.tokens, save.node)
            return not any(
                self._is_missing(
                    store,
                    part,
                    save.tokens[start - save.start : stop - save.start],
                    start,
                    stop,
                    chain.node((start - save.start) // store.chunk_tokens),
                    from_memory=False,
                )
                for start, stop in store.spans(save.stop, save.start)
                for part in self._parts(store)
                if stop == save.stop or not part.states
            )
        return False

    def take_saved(self) -> set[RequestId]:
        """Returns the requests whose final save was copied, or dropped, since the last call."""
        with self._lock:
            saved, self._saved = self._saved, set()
        return saved

    def shutdown(self) -> bool:
        """Waits at most shutdown_seconds until all files are written, and copied to all tiers.

        Returns True if all are.
        """
        until = time.monotonic() + self._settings.shutdown_seconds
        is_written = self._writer.threads.shutdown(self._settings.shutdown_seconds)
        with suppress(StoreError):  # the store was broken from the start
            left = max(0.0, until - time.monotonic())
            return self._stores[Scope()].settle(left) and is_written
        return is_written

    def _reserve(self, save: Save) -> _Copied:
        """Reserves memory for the chunks of a save that are not stored yet. Copies nothing."""
        store = self._stores[save.scope]
        copied = _Copied(store, set(self._layers), self._parts(store))
        if self._pool is None:
            self._pool = MemoryPool(store.chunk_tokens, self._settings.max_pending_bytes // 4)
        chain = store.chain_of(save.tokens, save.node)
        limit, sections = self._settings.max_pending_bytes, None
        pending = self._writer.pending_bytes + self._open_bytes
        for start, stop in store.spans(save.stop, save.start):
            node = chain.node((start - save.start) // store.chunk_tokens)
            ids = save.tokens[start - save.start : stop - save.start]
            for part in copied.parts:
                if part.states and (stop != save.stop or not save.has_states):
                    continue
                if not self._is_missing(store, part, ids, start, stop, node):
                    continue
                if pending + copied.num_bytes > limit:
                    copied.refused = StoreError(
                        f"{pending + copied.num_bytes} bytes wait to be written, expected at most "
                        f"{limit}, as max_pending_bytes says"
                    )
                    return copied
                if part.chunks is None:
                    if sections is None:
                        sections = self._sections(save.block_ids, save.stop)
                    held = part.of(sections)
                    if part.states and any(section.state_tokens != stop for section in held):
                        continue  # the states are after other tokens, or unknown
                    part.chunks = store.chunks(
                        held, start, save.stop, pool=self._pool, states=part.states
                    )
                snapshot = Snapshot.reserve_of(part.chunks, ids, start=start, prefix=node)
                if snapshot is not None:  # None: some of these tokens have left a sliding window
                    part.snapshots.append(snapshot)
                    copied.num_bytes += snapshot.num_bytes
        return copied

    def _parts(self, store: PrefixStore) -> list[_Part]:
        """Returns this worker's layers, grouped by the files that they share."""
        layers, states = self._layers, tuple[int, ...]()
        if store.has_states:
            tokens, state_heads = store.kinds.tokens.heads, store.kinds.states.heads
            layers = [layer for layer in layers if tokens[layer]]
            states = tuple(layer for layer in self._layers if state_heads[layer])
        parts = store.windows.split(layers)
        if len(parts) == 1 and not store.has_states:
            return [_Part(parts[0], self._heads)]
        found = [_Part(part, self._heads_in(part, self._heads)) for part in parts]
        if states:
            heads = self._heads_in(states, self._state_heads)
            whole = [state_heads[layer] == 1 for layer in states]  # every rank has them
            heads = tuple((0, 1) if one else h for h, one in zip(heads, whole, strict=True))
            found.append(_Part(states, heads, states=True))
        return found

    def _heads_in(self, layers: Sequence[int], heads: Heads) -> tuple[tuple[int, int], ...]:
        """Returns the heads of some of this worker's layers."""
        each = dict(zip(self._layers, heads_of(heads, len(self._layers)), strict=True))
        return tuple(each[layer] for layer in layers)

    def _is_missing(
        self,
        store: PrefixStore,
        part: _Part,
        ids: npt.NDArray[np.int64],
        start: int,
        stop: int,
        node: str,
        *,
        from_memory: bool = True,
    ) -> bool:
        """True if a part of a chunk has to be stored.

        ids:         the chunk's tokens, from `start` to `stop`
        from_memory: asks memory only, as a step does; False: asks the disk
        """
        return store.missing(
            ids,
            start,
            stop,
            part.layers,
            part.heads,
            node=node,
            base=start,
            from_memory=from_memory,
            states=part.states,
        )

    def _is_stored(self, store: PrefixStore, snapshot: Snapshot) -> bool:
        """True if a copied chunk is already stored. Asks the disk."""
        header, tokens = snapshot.header, snapshot.tokens
        start, stop, node = header.start, header.start + len(tokens), header.prefix
        held = {layer for part in header.parts for layer in part.layers}
        return not any(
            self._is_missing(store, part, tokens, start, stop, node, from_memory=False)
            for part in self._parts(store)
            if held.issuperset(part.layers) and part.states == kind_of(snapshot).is_states
        )

    def _confirm_later(self, store: PrefixStore) -> None:
        """Has a thread ask the disk for files that memory took for stored, so that chunks that
        others have deleted are saved again the next time.
        """
        if store.index.has_doubted:
            self._writer.threads.submit(lambda: self._confirm(store))

    def _confirm(self, store: PrefixStore) -> None:
        """Runs in a thread."""
        with self._boundary.guard("does not know what is stored"):
            store.confirm()

    def _saving(self, save: Save) -> Guard:
        """Guards a save. An error costs a later cache hit, nothing else."""
        return self._boundary.guard(
            "did not save", f"request {save.request_id}", count="dropped_saves"
        )


def _num_tokens(snapshots: Iterable[Snapshot]) -> int:
    """Returns the number of tokens in these chunks. Several snapshots of a chunk count once."""
    return sum({s.header.start: len(s.tokens) for s in snapshots}.values())
