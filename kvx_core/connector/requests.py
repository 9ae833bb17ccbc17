"""What a Policy knows of a request: while it is looked up, and while it has blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvx_core.connector.epochs import Epoch
from kvx_core.connector.plan import BlockIds, RequestId, Scope
from kvx_core.stores.match import Match


class Request(Protocol):
    """The attributes of an engine's request that a Policy reads."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and the generated tokens; grows as the engine accepts tokens."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...


@dataclass(slots=True)
class Tracked:
    """A request that has blocks."""

    request: Request
    scope: Scope  # of the time when it got its first blocks
    epoch: Epoch  # of the same time
    block_ids: BlockIds
    hold: int  # saves begin when the request has more tokens than this
    saved: int = 0  # as many first tokens are stored or need no save
    has_gap: bool = False  # a sliding window left tokens before they were saved
    is_prepared: bool = False  # a thread was asked to compute its keys
    computed: int = 0  # its tokens after the last planned step: its states are after so many
    stated: int = 0  # states after so many tokens are stored


@dataclass(slots=True)
class Found:
    """The result of a request's lookup, kept until the engine allocates blocks."""

    match: Match
    num_tokens: int  # the request's tokens when it was looked up
    scope: Scope
    start: int = 0  # the number of tokens that the engine already has


def copied(block_ids: Sequence[Sequence[int]]) -> BlockIds:
    """Returns copies of the lists, which the engine extends."""
    return tuple(map(list, block_ids))
