"""Where the tokens of requests lie: rows of req_to_token as slots, blocks and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    SeqLens,
    SlotMapping,
)
from kvx_core.argument_checks import integer

# The page of slot 0, to which padded tokens are written; no request owns it.
# Source: sglang 0.5.23 mem_cache/memory_pool.py, MHATokenToKVPool._create_buffers_normal
PADDED_PAGE = 0

Rows = Tensor | Sequence[int]


def request_slots(
    req_to_token: Tensor, req_pool_indices: Rows, ends: Rows, starts: Rows | None = None
) -> Tensor:
    """The slots of tokens `starts` to `ends` of each request, one request after the other.

    req_to_token:     (num_rows, max_context_len), int32: ReqToTokenPool.req_to_token
    req_pool_indices: (num_requests,): the row of each request, from 1 on
    ends, starts:     (num_requests,); None: 0. Read back from a device
    Requests share the slots of a common prefix: to write, begin behind it, at
    starts=forward_batch.extend_prefix_lens.
    Returns (num_tokens,), int64, on the device of req_to_token.
    Raises InvalidArgumentError for tokens that have no slot.
    Source: sglang 0.5.23 mem_cache/memory_pool.py, ReqToTokenPool
    """
    rows, last = numbers("req_pool_indices", req_pool_indices), numbers("ends", ends)
    first = [0] * len(rows) if starts is None else numbers("starts", starts)
    num_rows, room = req_to_token.shape
    for name, counts in (("ends", last), ("starts", first)):
        if len(counts) != len(rows):
            raise InvalidArgumentError(
                f"{name} has {len(counts)} entries, expected {len(rows)}, one per request of "
                "req_pool_indices"
            )
    parts = []
    for i, (row, begin, end) in enumerate(zip(rows, first, last, strict=True)):
        if not 1 <= row < num_rows:
            raise InvalidArgumentError(
                f"req_pool_indices[{i}] is {row}, expected 1 to {num_rows - 1}: row 0 is that of "
                "padded requests"
            )
        if not 0 <= begin <= end <= room:
            raise InvalidArgumentError(
                f"tokens of request {i} are {begin} to {end}, expected within 0 to {room}, the "
                "columns of req_to_token"
            )
        parts.append(req_to_token[row, begin:end])
    found = torch.cat(parts).long() if parts else req_to_token[:0, 0].long()
    unowned = (found < 1).nonzero()
    if unowned.numel():
        i = int(unowned[0])
        raise InvalidArgumentError(
            f"the slot of token {i} of {len(found)} is {int(found[i])}, expected at least 1: slot "
            "0 is that of padded tokens. Give rows that are allocated, and lengths up to the "
            "tokens that they hold"
        )
    return found


def slot_mapping(out_cache_loc: Tensor) -> SlotMapping:
    """The slot of each new token. Slot 0, that of padded tokens, is skipped, as negative slots are:
    nobody reads it, and no two tokens of a call go to one slot.

    out_cache_loc: (num_tokens,), int32 or int64: ForwardBatch.out_cache_loc, or `request_slots`
    Raises InvalidArgumentError.
    """
    return SlotMapping.of(out_cache_loc, invalid_slot=0)


def block_table(
    req_to_token: Tensor, req_pool_indices: Rows, lengths: Rows, *, page_size: int
) -> BlockTable:
    """The pages of each request as a PACKED table. A copy, checked: waits for a device.

    lengths:   (num_requests,): tokens of each request, as in `seq_lens`
    page_size: of the pool
    The other arguments are those of `request_slots`.
    Raises InvalidArgumentError for tokens that have no slot, or do not lie in pages.
    Source: sglang 0.5.23 mem_cache/allocator/paged.py, PagedTokenToKVPoolAllocator
    """
    page, counts = integer("page_size", page_size, 1), numbers("lengths", lengths)
    ids = _page_ids(req_to_token, req_pool_indices, counts, page)
    rows = torch.split(ids, counts)
    width = max((-(-count // page) for count in counts), default=0)
    shape = len(counts), max(width, 1)  # at least a column (spec 7.1), here of ids that no pool has
    none = -1 if width else torch.iinfo(torch.int32).max
    table = torch.full(shape, none, dtype=torch.int32, device=req_to_token.device)
    for row, of_tokens in zip(table, rows, strict=True):
        blocks = of_tokens[::page]
        row[: len(blocks)] = blocks
    return BlockTable.packed(table)


def span(
    view: CacheView, req_to_token: Tensor, requests: Sequence[Any], *, page_size: int
) -> CacheSpan:
    """Whole requests, as SGLang's scheduler counts their tokens: one end of a migration.

    view:         see `cache_view`
    req_to_token: as in `request_slots`
    requests:     Req objects of the scheduler, whose kv says their rows and tokens. Between steps:
                  within one it counts the tokens that the step will store
    page_size:    of the pool
    At each use more tokens than a request has are refused. `committed` says how many they are.
    Raises InvalidArgumentError, as `block_table`.
    Source: sglang 0.5.23 managers/schedule_batch.py, ReqKvInfo; mem_cache/allocation.py
    """
    rows = [request.kv.req_pool_idx for request in requests]
    for i, row in enumerate(rows):
        if row is None:
            raise InvalidArgumentError(
                f"requests[{i}].kv.req_pool_idx is None, expected a row of req_to_token: the "
                "request is waiting, retracted or finished"
            )
    table = block_table(req_to_token, rows, committed(requests), page_size=page_size)
    return replace(view, holds=partial(committed, tuple(requests))).at(table)


def committed(requests: Sequence[Any]) -> list[int]:
    """The tokens of each request that its pages hold; 0 for one without a row.

    requests: as in `span`
    """
    return [
        0
        if (kv := request.kv).req_pool_idx is None
        else min(int(kv.kv_committed_len), int(kv.kv_allocated_len))
        for request in requests
    ]


def ragged(
    req_to_token: Tensor, req_pool_indices: Rows, lengths: Rows, *, page_size: int
) -> BlockTable:
    """The page of each token as a RAGGED table: with page_size 1 its slot. A copy, checked.

    Arguments and errors are those of `block_table`.
    """
    page, counts = integer("page_size", page_size, 1), numbers("lengths", lengths)
    ids = _page_ids(req_to_token, req_pool_indices, counts, page)
    ends = torch.tensor([0, *counts]).cumsum(0).int().to(ids.device)
    return BlockTable.ragged(ids, ends)


def seq_lens(lengths: Rows) -> SeqLens:
    """Tokens of each request in the cache: ForwardBatch.seq_lens, int32 or int64, or a list.

    It counts the tokens of the step, once the step has stored them.
    Raises InvalidArgumentError.
    """
    return SeqLens.of(lengths)


def numbers(name: str, given: Rows) -> list[int]:
    """Integers of at least 0, read back from a device. Raises InvalidArgumentError."""
    found = given.tolist() if isinstance(given, Tensor) else list(given)
    return [integer(f"{name}[{i}]", number) for i, number in enumerate(found)]


def _page_ids(req_to_token: Tensor, rows: Rows, counts: list[int], page: int) -> Tensor:
    """The page of each token, int32, after a check that token t is in place t % page of its.

    None is in the padded page, whose first place is slot 0.
    """
    slots = request_slots(req_to_token, rows, counts)
    ids = slots // page
    places = [torch.arange(count, device=slots.device) for count in counts]
    tokens = torch.cat(places) if places else slots
    wrong = (slots % page != tokens % page) | ((tokens % page > 0) & (ids != ids.roll(1)))
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise InvalidArgumentError(
            f"token {int(tokens[i])} of a request has slot {int(slots[i])}, expected place "
            f"{int(tokens[i]) % page} of its page of {page} tokens. Give the page_size of the "
            "pool, or move by slots: request_slots"
        )
    return ids.int()
