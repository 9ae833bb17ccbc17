"""The paged cache of continuous batching as KVX views.

All layers live in one tensor of bytes. A block of an attention type is [K page | V page] of its
first layer, [K page | V page] of its second, and so on; block ids count from the beginning of the
tensor, whose two first sectors are nobody's. Full attention keeps all tokens, a sliding window is a
ring of `window` tokens in the blocks of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Layout,
    SlotMapping,
    UnsupportedError,
    describe,
)
from kvx_core.argument_checks import integer
from kvx_core.desc.facts import first_layer_of

_ALLOCATORS = ("FullAttentionCacheAllocator", "SlidingAttentionCacheAllocator")


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers of one attention type.

    layers: their indices in the model
    view:   of these layers: pages [block, token, head, dim] at the blocks that block_table names
    window: in tokens; 0 for full attention
    """

    layers: tuple[int, ...]
    view: CacheView
    window: int
    _allocator: Any

    def span(
        self, requests: Sequence[Any], first_tokens: Sequence[int], seq_lens: Sequence[int]
    ) -> CacheSpan:
        """Tokens of requests as they are allocated now: one end of a migration with `seq_lens`.

        requests:     their ids, or their RequestStates: these count the tokens that a request has
                      computed, and more are refused. Give ids of requests to migrate into
        first_tokens: position of the first token of each that moves; a window holds its last tokens
                      only
        seq_lens:     tokens of each that move
        The span is refused once a request has other blocks. Blocks that requests share (prefix
        caching) hold the tokens of all of them: never migrate into these.
        Raises InvalidArgumentError for tokens without a place.
        """
        lists = len(requests), len(first_tokens), len(seq_lens)
        if len(set(lists)) != 1:
            raise InvalidArgumentError(
                f"requests, first_tokens and seq_lens have {lists} entries, expected one per "
                "request in each"
            )
        firsts = [integer("first_tokens", first) for first in first_tokens]
        counts = [integer("seq_lens", count) for count in seq_lens]
        names = [_id(request) for request in requests]
        slots: list[int] = []
        for name, first, count in zip(names, firsts, counts, strict=True):
            slots += self._slots(name, first, count)
        taken = [list(self._allocator.block_table[name]) for name in names]

        def moved_on() -> str | None:
            for request, name, first, blocks in zip(requests, names, firsts, taken, strict=True):
                now = self._allocator.block_table.get(name, ())
                if list(now[: len(blocks)]) != blocks:
                    return (
                        f"request {name!r} has the blocks {list(now)}, expected {blocks} as "
                        "described. Call span again"
                    )
                held = _num_held(request)
                if held is not None and self.window and first < held - self.window:
                    return (
                        f"request {name!r} holds {held} tokens, and a window the last "
                        f"{self.window} of them, expected those from token {first} on"
                    )
            return None

        def holds() -> list[int]:
            held = map(_num_held, requests)
            wanted = zip(held, firsts, counts, strict=True)
            return [count if n is None else n - first for n, first, count in wanted]

        counted = any(_num_held(request) is not None for request in requests)
        view = replace(self.view, outdated=moved_on, holds=holds if counted else None)
        return view.at(slots=SlotMapping.of(slots))

    def _slots(self, request_id: str, first: int, count: int) -> list[int]:
        blocks = self._allocator.block_table.get(request_id)
        if blocks is None:
            raise InvalidArgumentError(
                f"request {request_id!r} has no blocks of the layers {self.layers}, expected some. "
                "Allocate them: PagedAttentionCache.can_store_request_tokens"
            )
        page = self._allocator.tokens_per_page
        room = min(len(blocks) * page, self.window or len(blocks) * page)
        if count > room or (room != self.window and first + count > room):
            raise InvalidArgumentError(
                f"request {request_id!r} has room for {room} tokens, expected it for {count} from "
                f"token {first} on"
            )
        places = (token % room for token in range(first, first + count))
        return [blocks[place // page] * page + place % page for place in places]


def _id(request: Any) -> str:
    name: str = getattr(request, "request_id", request)
    return name


def _num_held(request: Any) -> int | None:
    """The tokens that a request has computed; None for an id, which does not say.

    Source: transformers 5.19 generation/continuous_batching/requests.py, RequestState
    """
    count = getattr(request, "position_offset", None)
    return None if count is None else int(count)


def paged_groups(cache: Any, facts: CacheFacts) -> tuple[PagedGroup, ...]:
    """The attention types of a PagedAttentionCache, zero-copy.

    cache: transformers.generation.continuous_batching's, whose memory stays where it is
    facts: of the model, see `cache_facts`; each group has its own window and number of layers
    Raises UnsupportedError for other attention types, InvalidArgumentError.
    Source: transformers 5.19 generation/continuous_batching/cache_allocators/, cache_allocator.py,
            full_attention.py, sliding_attention.py
    """
    return tuple(_group(allocator, facts) for allocator in cache.cache_allocators.values())


def _group(allocator: Any, facts: CacheFacts) -> PagedGroup:
    kind = type(allocator).__name__
    if kind not in _ALLOCATORS:
        raise UnsupportedError(
            f"cache has a {kind}, expected {' or '.join(_ALLOCATORS)}: the pages of others are not "
            "known"
        )
    layers = tuple(allocator.layer_indices)
    tensor, page = allocator.cache_tensor, allocator.tokens_per_page
    tokens, _, heads, dim = tensor.shape
    num_blocks = tokens // (page * len(layers))
    blocks = tensor.flatten()[: num_blocks * len(layers) * 2 * page * heads * dim]
    pages = blocks.view(num_blocks, len(layers), 2, page, heads, dim)
    described = tuple(
        CacheDesc.from_kv(
            describe(pages[:, i, 0], Layout.BLOCK_NHD), describe(pages[:, i, 1], Layout.BLOCK_NHD)
        )
        for i in range(len(layers))
    )
    window = int(getattr(allocator, "sliding_window", 0))
    own = replace(
        facts,
        num_layers=len(layers),
        first_layer=first_layer_of(layers),
        window=window,
    )
    return PagedGroup(layers, CacheView(described, own), window, allocator)
