"""Store: four functions over a directory, which an engine of the suite's own uses.

    python -m kvx_conformance store mymodule:MyStore

A subject is a class. Cases are those of connectors: whatever decides a token's numbers in a real
engine decides them here, so that one wrong number gives another answer.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from kvx_conformance.case import NotApplicable
from kvx_conformance.connector import Answer, Request, Setup, Weights
from kvx_conformance.engine import Floats

LAYERS, HEADS, DIM = 2, 2, 8
_PLACEHOLDERS = (511,) * 4  # of an image


class Store(Protocol):
    """What is stored of one model, in one process of an engine."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Opens the store; the engine's other processes and other engines use the folder, too.

        identity: every field of `Setup`, where "weights" is a digest of the weights as they are,
            and "heads": the first head of this process, and how many it has. Which of these decide
            the numbers is for the store to know
        """

    def match(self, request: Request) -> int:
        """How many of the request's first tokens are stored; 0 if it does not take them. An image's
        tokens, the placeholders, stand in front of the others. What this raises ends the engine.
        """

    def load(self, request: Request, count: int, rows: Floats) -> None:
        """Fills rows[:, :, :count]. Raises if it cannot: the engine then computes them.

        rows: (LAYERS, 2, len(request.tokens), heads, DIM) float32: K and V
        """

    def save(self, request: Request, rows: Floats) -> None:
        """Stores all tokens of the request, of which some may be stored. What this raises ends the
        engine. rows: as above, all of them.
        """

    def close(self) -> None:
        """Everything that was saved can be found when this returns."""


class WithStore:
    """A `Connector`: the suite's engine over a store."""

    def __init__(self, store: Callable[[Path, Mapping[str, Any]], Store]) -> None:
        self._store = store

    def start(self, setup: Setup, store: Path | None, work: Path) -> _Engine:
        if setup.beside:
            raise NotApplicable("the suite's engine has no second store")
        folder = store
        return _Engine(setup, lambda identity: self._store(folder, identity) if folder else None)


class _Engine:
    """Numbers that hashes give, and tokens that hashes of the numbers give.

    What the methods do stands in kvx_conformance.connector.
    """

    def __init__(self, setup: Setup, opened: Callable[[Mapping[str, Any]], Store | None]) -> None:
        self._setup, self._open = setup, opened
        self._weights = _digest(setup.weights)
        self._lost: str | None = None
        self._stores = self._opened()

    def ask(
        self,
        requests: Sequence[Request],
        new_tokens: int,
        abort_at: Mapping[int, int],
        reset_at: Sequence[int],
    ) -> list[Answer]:
        if abort_at or reset_at:
            raise NotApplicable("the suite's engine computes one request after the other")
        return [self._answer(request, new_tokens) for request in requests]

    def settle(self) -> None:
        self._close()
        self._stores = self._opened()

    def forget(self) -> None:
        """Nothing is kept."""

    def replace_weights(self, weights: Weights, how: Literal["files", "tensors"]) -> None:
        self._close()
        self._weights = _digest(weights if how == "files" else "of no file")
        self._stores = self._opened()

    def lose(self, folder: str) -> None:
        self._lost = folder

    def stop(self) -> None:
        self._close()

    def _opened(self) -> list[tuple[slice, Store]]:
        """A store for each process of the engine, with the heads that it has."""
        ranks, found = self._setup.ranks, []
        for rank in range(ranks):
            heads = rank * HEADS // ranks, HEADS // ranks
            identity = asdict(self._setup) | {"weights": self._weights, "heads": heads}
            store = self._open(identity)
            if store is not None:
                found.append((slice(heads[0], sum(heads)), store))
        return found

    def _close(self) -> None:
        for _, store in self._stores:
            store.close()

    def _answer(self, request: Request, new_tokens: int) -> Answer:
        if request.image is not None:
            request = replace(request, tokens=_PLACEHOLDERS + request.tokens)
        rows = np.full(_shape(self._setup, len(request.tokens)), np.nan, np.float32)
        if self._setup.layout:  # another order in memory
            rows = np.ascontiguousarray(rows.transpose(4, 3, 2, 1, 0)).transpose(4, 3, 2, 1, 0)
        count = self._load(request, rows)
        computed = self._numbers(request)
        for stop in range(count, len(request.tokens), self._setup.step_tokens):
            stop = min(stop + self._setup.step_tokens, len(request.tokens))
            rows[:, :, count:stop] = computed[:, :, count:stop]
            self._save(replace(request, tokens=request.tokens[:stop]), rows[:, :, :stop])
        answer, read = list[int](), hashlib.blake2b(rows.tobytes()).digest()
        for _ in range(new_tokens):
            answer.append(1 + int.from_bytes(_hash(read, *answer)[:4], "big") % 510)
        whole = replace(request, tokens=(*request.tokens, *answer[:-1]))
        self._save(whole, np.concatenate([rows, self._numbers(whole)[:, :, rows.shape[2] :]], 2))
        return Answer(tuple(answer), count, "length")

    def _load(self, request: Request, rows: Floats) -> int:
        """Tokens that were loaded; at least one is computed, for its answer."""
        if not self._stores:
            return 0
        count = min(store.match(request) for _, store in self._stores)
        count = min(count, len(request.tokens) - 1)
        if count <= 0:
            return 0
        if self._lost:
            shutil.rmtree(self._lost)
            Path(self._lost).mkdir()
            self._lost = None
        try:
            for heads, store in self._stores:
                store.load(request, count, rows[:, :, :, heads])
        except Exception:
            return 0
        return count

    def _save(self, request: Request, rows: Floats) -> None:
        for heads, store in self._stores:
            store.save(request, rows[:, :, :, heads])

    def _numbers(self, request: Request) -> Floats:
        """K and V of each token: (LAYERS, 2, tokens, HEADS, DIM), 0 to 255."""
        setup = self._setup
        of_model = [setup.family, self._weights, setup.epsilon, setup.theta, setup.dtype]
        of_model += [setup.cache_dtype, setup.quantization]
        if setup.family == "longrope":
            of_model.append(setup.longest)
        state = _hash(*of_model, request.adapter, request.image, request.embeddings)
        rows = np.empty(_shape(setup, len(request.tokens)), np.float32)
        for position, token in enumerate(request.tokens):
            state = _hash(state, token)
            for layer in range(LAYERS):
                of_layer = hashlib.shake_128(state + bytes([layer, layer in setup.skipped]))
                numbers = np.frombuffer(of_layer.digest(2 * HEADS * DIM), np.uint8)
                rows[layer, :, position] = numbers.reshape(2, HEADS, DIM)
        return rows


def _shape(setup: Setup, num_tokens: int) -> tuple[int, ...]:
    if HEADS % setup.ranks:
        raise NotApplicable(f"{HEADS} heads are not split among {setup.ranks}")
    return LAYERS, 2, num_tokens, HEADS, DIM


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
