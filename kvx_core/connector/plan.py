"""The plan of one step: the saves and loads that a scheduler half sends to its worker halves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvx_core.connector.adapters import NO_ADAPTER, Adapter
from kvx_core.connector.weights import START, Stamp
from kvx_core.stores.match import Match
from kvx_core.stores.prefix import PrefixStore

# A request's block ids from its first token on: one list for each group of layers.
BlockIds = tuple[list[int], ...]
RequestId = str | int


class Scope(NamedTuple):
    """Requests of different scopes share no entries, even if their tokens are equal: only adapters
    with the same name do.
    """

    salt: str = ""  # of the request
    weights: str = ""  # the name of the weights: see epochs.py
    adapter: Adapter = NO_ADAPTER  # that is added to the weights


class ScopedStores(Protocol):
    """Maps the scope of a save or a load to its store."""

    def __getitem__(self, scope: Scope, /) -> PrefixStore:
        """Raises StoreError."""
        ...


@dataclass(frozen=True, slots=True)
class Save:
    """A save of tokens [start, stop) of a request, which this step or earlier steps compute."""

    request_id: RequestId
    scope: Scope
    node: str  # the key of all tokens before `start`, which are not sent
    start: int  # the beginning of a chunk
    tokens: npt.NDArray[np.int64]  # from `start` on
    block_ids: BlockIds
    final: bool = False  # the request has finished; its blocks stay until this save
    has_states: bool = True  # False: the blocks hold the states after other tokens than these

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """A load of tokens [start, stop) of a request from the store."""

    request_id: RequestId
    scope: Scope
    match: Match
    start: int
    stop: int
    block_ids: BlockIds
    wait: bool  # True: the forward pass of this step reads the tokens
    seconds: float | None = None  # after which the load is given up; None: never


@dataclass(slots=True)
class Plan:
    """The saves and loads of one step.

    generation, stamp: of the weights that the step was planned for: see weights.py
    """

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    is_idle: bool = False  # the step has no forward pass
    generation: int = 0
    stamp: Stamp | None = START  # None: unknown to the scheduler
    asks: int = 0  # of LoadedAdapters

    def put(self, save: Save) -> None:
        """Adds a save of states. One of its request that ends there too gets its states."""
        for i, other in enumerate(self.saves):
            if (other.request_id, other.stop) == (save.request_id, save.stop):
                self.saves[i] = replace(other, block_ids=save.block_ids, has_states=True)
                return
        self.saves.append(save)
