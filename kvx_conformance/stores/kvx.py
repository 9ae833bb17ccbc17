"""KVX's PrefixStore on a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvx_conformance.connector import Request
from kvx_conformance.engine import Floats
from kvx_conformance.store import HEADS, LAYERS
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    Directory,
    Layout,
    PrefixStore,
    StoreError,
    describe,
)
from kvx_core.snapshot import Precision, Section

# Where or how fast an engine works changes no number: engines that differ in these alone share.
_OF_NO_NUMBER = {
    *("place", "name", "heads", "block_size", "layout", "ranks", "draft", "step_tokens"),
    *("num_blocks", "prefix_caching", "adapters", "embeddings", "beside"),
}


class Store:
    """What decides all numbers names the model; what decides those of a request, its salt."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        ignored = _OF_NO_NUMBER if identity["family"] == "longrope" else {*_OF_NO_NUMBER, "longest"}
        of_model = {name: value for name, value in identity.items() if name not in ignored}
        self._first_head, _ = identity["heads"]
        self._store: PrefixStore | None = None
        with suppress(StoreError):  # its config is damaged: the engine runs without
            self._store = PrefixStore(
                Directory(folder),
                fingerprint=json.dumps(of_model, sort_keys=True),
                num_layers=LAYERS,
                total_kv_heads=HEADS,
                precision=Precision.of("float32"),
                new_chunk_tokens=32,
            )

    def match(self, request: Request) -> int:
        store = self._of(request)
        if store is None or not request.takes_stored:
            return 0
        with suppress(StoreError):  # it cannot be read
            return store.lookup(request.tokens).num_tokens
        return 0

    def load(self, request: Request, count: int, rows: Floats) -> None:
        store = self._of(request)
        assert store is not None
        store.load(store.lookup(request.tokens), 0, count, [self._section(rows)])

    def save(self, request: Request, rows: Floats) -> None:
        store, section = self._of(request), self._section(rows)
        if store is None:
            return
        heads = self._first_head, self._first_head + rows.shape[3]
        for start, stop in store.spans(len(request.tokens)):
            with suppress(StoreError):  # a full disk, say
                if store.missing(request.tokens, start, stop, range(LAYERS), heads):
                    snapshot = store.capture(request.tokens, start, stop, [section])
                    assert snapshot is not None  # no block is null
                    store.commit(snapshot)

    def close(self) -> None:
        """Each chunk is stored when it is committed."""

    def _of(self, request: Request) -> PrefixStore | None:
        alone = [request.salt, request.adapter, request.image, request.embeddings]
        if self._store is None or not any(one is not None for one in alone):
            return self._store
        return self._store.salted(json.dumps(alone))

    def _section(self, rows: Floats) -> Section:
        """A block of all tokens. rows: (LAYERS, 2, tokens, heads, DIM)."""
        layers = tuple(
            CacheDesc.from_kv(*(describe(half[None], Layout.BLOCK_NHD) for half in layer))
            for layer in rows
        )
        facts = CacheFacts(
            num_layers=LAYERS,
            total_kv_heads=HEADS,
            first_kv_head=self._first_head,
            window=0,
            rotary="none",
            rotary_dim=0,
            rope_applied=True,
        )
        return Section(
            tuple(range(LAYERS)), CacheView(layers=layers, facts=facts, dense=True), None
        )
