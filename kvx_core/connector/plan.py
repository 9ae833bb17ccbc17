"""What a connector's scheduler half tells its workers' halves to do in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvx_core.connector.weights import START, Stamp
from kvx_core.stores.match import Match
from kvx_core.stores.prefix import PrefixStore

# The blocks of a request from its first token on, one list per group of layers that shares them.
BlockIds = tuple[list[int], ...]
RequestId = str | int


class Scope(NamedTuple):
    """Requests of different scopes share nothing, even if their tokens are equal."""

    salt: str = ""  # of the request
    weights: str = ""  # their name: see epochs.py


class ScopedStores(Protocol):
    """The stores by the scopes of saves and loads."""

    def __getitem__(self, scope: Scope, /) -> PrefixStore:
        """Raises StoreError."""
        ...


@dataclass(frozen=True, slots=True)
class Save:
    """Tokens [start, stop) of a request, computed by this step or earlier ones."""

    request_id: RequestId
    scope: Scope
    node: str  # the key of all tokens before `start`: these are not sent
    start: int  # the beginning of a chunk
    tokens: npt.NDArray[np.int64]  # from `start` on
    block_ids: BlockIds
    final: bool = False  # the request has finished and its blocks wait for this

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [start, stop) of a request, from the store."""

    request_id: RequestId
    scope: Scope
    match: Match
    start: int
    stop: int
    block_ids: BlockIds
    wait: bool  # the forward pass of this step reads them


@dataclass(slots=True)
class Plan:
    """The saves and loads of one step.

    generation, stamp: of the weights that they were planned for: see weights.py
    """

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    is_idle: bool = False  # the step has no forward pass
    generation: int = 0
    stamp: Stamp | None = START  # None: the scheduler did not know it
