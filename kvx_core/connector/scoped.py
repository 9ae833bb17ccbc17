"""Scoped: the stores of a model by scope."""

from __future__ import annotations

from dataclasses import replace

from kvx_core.connector.plan import Scope
from kvx_core.model.record import ModelRecord
from kvx_core.stores.prefix import PrefixStore

_MAX_SCOPES = 1024
_MAX_NAMES = 4096


class Scoped:
    """The stores of a model by scope. Different scopes share no entries."""

    def __init__(self, store: PrefixStore, record: ModelRecord | None = None) -> None:
        """record: of the model that `store` is for; None: its requests have no adapters"""
        self._store, self._record = store, record
        self._stores: dict[Scope, PrefixStore] = {}
        self._names: dict[tuple[str, str], str] = {}

    @property
    def chunk_tokens(self) -> int:
        return self._store.chunk_tokens

    def __getitem__(self, scope: Scope) -> PrefixStore:
        store = self._stores.get(scope)
        if store is None:
            if len(self._stores) >= _MAX_SCOPES:
                self._stores.clear()
            store = self._of_weights(scope).salted(scope.salt)
            self._stores[scope] = store
        return store

    def adapted(self, weights: str, adapter: str) -> str:
        """Returns the name of weights with an adapter added: see connector/epochs.py.

        weights, adapter: the names of both
        """
        found = self._names.get((weights, adapter))
        if found is None:
            if len(self._names) >= _MAX_NAMES:
                self._names.clear()
            record = self.record_of(weights)
            if record is None:
                found = f"{weights} with {adapter}"
            else:
                found = f"files:{replace(record, adapters=(adapter,)).fingerprint}"
            self._names[weights, adapter] = found
        return found

    def record_of(self, weights: str) -> ModelRecord | None:
        """Returns the record of a model with weights of this name; None: it is not known."""
        return None if weights else self._record

    def _of_weights(self, scope: Scope) -> PrefixStore:
        name = scope.weights
        if not name:
            return self._store
        kind, _, fingerprint = name.partition(":")
        if kind != "files":
            return self._store.of_weights(self._store.fingerprint, name)
        if self._record is not None and scope.adapter.name:
            record = replace(self._record, adapters=(scope.adapter.name,))
            if record.fingerprint == fingerprint:  # the weights are those of the start
                return self._store.of_weights(record)
        return self._store.of_weights(fingerprint)
