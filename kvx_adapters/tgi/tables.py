"""Where the tokens of TGI's requests lie: blocks, slots and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx_adapters.tgi.caches import CacheSpec
from kvx_core import (
    BlockTable,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    SeqLens,
    SlotMapping,
    UnsupportedError,
)


def request_slots(
    slots: Tensor, cu_slots: Tensor, ends: Tensor, starts: Tensor | None = None
) -> Tensor:
    """The slots of tokens `starts` to `ends` of each request, one request after the other.

    slots:        (num_slots,), int64: batch.slots, those of all requests
    cu_slots:     (num_requests + 1,), int64, on the host: batch.cu_slots of the same batch
    ends, starts: (num_requests,), int32 or int64; None: 0. Read back from a device
    The slots of shared prefixes are `request_slots(slots, cu_slots, prefix_lens)`. A cyclic window
    holds the tokens from `(seq_lens - window).clamp(min=0)` on.
    Returns (num_tokens,), int64, on the device of `slots`.
    Raises InvalidArgumentError for tokens that have no slot.
    Source: TGI 3.3.7 models/flash_causal_lm.py, FlashCausalLMBatch.from_tokenized;
    backends/v3/src/block_allocator.rs, SimpleAllocator::allocate
    """
    bounds = cu_slots.tolist()
    num_requests = len(bounds) - 1
    if bounds[-1] > len(slots):
        raise InvalidArgumentError(
            f"cu_slots ends at {bounds[-1]}, expected at most {len(slots)}, the number of slots: "
            "give both of one batch"
        )
    for name, found in (("ends", ends), ("starts", starts)):
        if found is not None and len(found) != num_requests:
            raise InvalidArgumentError(
                f"{name} has {len(found)} entries, expected {num_requests}, one per request of "
                "cu_slots"
            )
    firsts = [0] * num_requests if starts is None else starts.tolist()
    parts = []
    for i, (first, end) in enumerate(zip(firsts, ends.tolist(), strict=True)):
        num_slots = bounds[i + 1] - bounds[i]
        if not 0 <= first <= end <= num_slots:
            raise InvalidArgumentError(
                f"tokens of request {i} are {first} to {end}, expected within 0 to {num_slots}, "
                "the slots that it has by cu_slots"
            )
        parts.append(slots[bounds[i] + first : bounds[i] + end])
    return torch.cat(parts) if parts else slots[:0]


def slot_mapping(
    slots: Tensor, slot_indices: Tensor | None = None, *, shared: Tensor | None = None
) -> SlotMapping:
    """The slot of each token; negative slots are skipped.

    slots:        (num_tokens,), int64; or with slot_indices (num_slots,): batch.slots
    slot_indices: (num_tokens,), int64: batch.slot_indices, the tokens of this step
    shared:       (any,), int64: slots of prefixes that other requests read, see `request_slots`;
                  may be empty. If given, `slots` are checked for writing: none is shared, and
                  only slot 0 occurs more than once. Waits for a device
    Raises InvalidArgumentError.
    Source: TGI 3.3.7 models/flash_causal_lm.py, FlashCausalLM.forward;
    backends/v3/src/radix.rs, RadixAllocator::allocate
    """
    if slot_indices is not None:
        slots = slots[slot_indices]
    if shared is not None:
        _check_writable(slots, shared)
    return SlotMapping.of(slots, invalid_slot=-1)


def without_negative_slots(
    key: Tensor, value: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Drops the tokens with negative slots, for which KVCache.store would write elsewhere.

    key, value: (>= num_tokens, num_kv_heads, head_dim), any strides; drops tokens past num_tokens
    slots:      (num_tokens,), int64. Waits for a device
    Returns (key, value, slots): views if no slot is negative, else copies.
    Source: the table _FLAVOURS of caches.py, negative_slots
    """
    key, value = key[: len(slots)], value[: len(slots)]
    keep = slots >= 0
    if bool(keep.all()):
        return key, value, slots
    return key[keep], value[keep], slots[keep]


def block_table(block_tables_tensor: Tensor) -> BlockTable:
    """The blocks of each request, zero-copy.

    block_tables_tensor: (num_requests, max_blocks), int32: batch.block_tables_tensor. Columns past
                         a request's blocks are uninitialised memory, and never read
    Raises InvalidArgumentError, UnsupportedError.
    Source: TGI 3.3.7 models/flash_causal_lm.py, FlashCausalLMBatch.from_tokenized
    """
    return BlockTable.packed(block_tables_tensor)


def span(view: CacheView, batch: Any) -> CacheSpan:
    """The requests of a batch between two steps, whole: one end of a migration of
    batch.cache_lengths_tensor tokens.

    view:  see `cache_view`
    batch: FlashCausalLMBatch. generate_token has added what it stored to cache_lengths_tensor; its
           input_lengths are then those of the next step, whose tokens are not there yet
    At each use more tokens than that are refused, and a request whose slots have gone round its
    blocks: see `request_slots`. Waits for a device. Raises InvalidArgumentError.
    Source: TGI 3.3.7 models/flash_causal_lm.py, FlashCausalLM.generate_token;
    backends/v3/src/block_allocator.rs, SimpleAllocator::allocate
    """
    held = replace(view, holds=partial(_held, batch, view.layers[0].block_size))
    return held.at(block_table(batch.block_tables_tensor))


def _held(batch: Any, block_size: int) -> list[int]:
    """The tokens of each request, all of which its table has."""
    lengths: list[int] = batch.cache_lengths_tensor.tolist()
    table, bounds = batch.block_tables_tensor, batch.cu_slots.tolist()
    for i, length in enumerate(lengths):
        slots = batch.slots[bounds[i] : bounds[i] + length]
        tokens = torch.arange(len(slots), device=slots.device)
        columns = (tokens // block_size).clamp(max=table.shape[1] - 1)
        places = table[i][columns].long() * block_size + tokens % block_size
        other = (slots != places).nonzero()
        if other.numel():
            raise InvalidArgumentError(
                f"request {i} has {length} tokens in blocks for {int(other[0])}, expected blocks "
                "for all: its window is a ring, which a block table cannot describe. Give the "
                "slots of the tokens that it still has: request_slots(slots, cu_slots, ends, "
                "starts)"
            )
    return lengths


def ragged(block_tables_ragged: Tensor, cu_seqlen: Tensor, spec: CacheSpec) -> BlockTable:
    """The table that TGI gives FlashInfer, one entry per token, zero-copy.

    block_tables_ragged: (num_tokens,), int32: what block_tables_to_ragged returns
    cu_seqlen:           (num_requests + 1,), int32: Seqlen.cu_seqlen_k
    TGI copies the first seq_len entries of each row of the block table: one per token only if a
    block holds one token.
    Raises UnsupportedError for other blocks, InvalidArgumentError.
    Source: TGI 3.3.7 models/metadata_kernels.py, block_tables_to_ragged
    """
    if spec.block_size != 1:
        raise UnsupportedError(
            f"block_size is {spec.block_size} for {spec.name}, expected 1: block_tables_ragged has "
            "the first seq_len blocks of a row, not a block per token. Use block_table"
        )
    return BlockTable.ragged(block_tables_ragged, cu_seqlen)


def seq_lens(
    input_lengths: Tensor | Sequence[int], cache_lengths: Tensor | Sequence[int]
) -> SeqLens:
    """Tokens of each request in the cache within a step, once it has stored its own.

    Between steps they are cache_lengths alone: see `span`.
    input_lengths: (num_requests,): tokens of this step. batch.input_lengths_tensor, int32, or the
                   list batch.input_lengths
    cache_lengths: (num_requests,), likewise: tokens before it
    Raises InvalidArgumentError.
    Source: TGI 3.3.7 layers/attention/common.py, Seqlen; models/flash_causal_lm.py,
    FlashCausalLMBatch
    """
    new, before = (
        torch.as_tensor(lengths, dtype=torch.int64) for lengths in (input_lengths, cache_lengths)
    )
    if new.shape != before.shape:
        raise InvalidArgumentError(
            f"input_lengths has {len(new)} entries, expected {len(before)}, those of cache_lengths"
        )
    return SeqLens.of(new + before)


def _check_writable(slots: Tensor, shared: Tensor) -> None:
    taken = torch.isin(slots, shared).nonzero()
    if taken.numel():
        i = int(taken[0])
        raise InvalidArgumentError(
            f"slots[{i}] is {int(slots[i])}, in a prefix that other requests read too, expected a "
            "slot of one request alone. Write its tokens from prefix_len on"
        )
    ordered, order = slots.sort(stable=True)
    twice = ((ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)).nonzero()
    if twice.numel():
        i = int(twice[0])
        raise InvalidArgumentError(
            f"slots[{int(order[i])}] and slots[{int(order[i + 1])}] are both {int(ordered[i])}, "
            "expected each slot once: a window is cyclic. Write its last tokens alone"
        )
