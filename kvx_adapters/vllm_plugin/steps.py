"""What the scheduler's half of KVXConnector tells the workers' halves to do in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvx_core.stores.prefix import Match, PrefixStore

# The blocks of a request, one list per KV cache group. Source: vllm KVCacheBlocks.get_block_ids
BlockIds = tuple[list[int], ...]


class SaltedStores(Protocol):
    """The stores by the salts of saves and loads."""

    def __getitem__(self, salt: str, /) -> PrefixStore:
        """Raises StoreError."""
        ...


@dataclass(frozen=True, slots=True)
class Save:
    """Tokens [start, len(tokens)) of a request, computed by this step or earlier ones."""

    request_id: str
    salt: str
    tokens: npt.NDArray[np.int64]  # of the whole prefix: they are the key
    start: int
    block_ids: BlockIds
    final: bool = False  # the request has finished and its blocks wait for this


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [start, stop) of a request, from the store."""

    request_id: str
    salt: str
    match: Match
    start: int
    stop: int
    block_ids: BlockIds
    wait: bool  # the forward pass of this step reads them


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """The saves and loads of one step."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    is_idle: bool = False  # the step has no forward pass
