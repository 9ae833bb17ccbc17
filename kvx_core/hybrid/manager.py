"""All layers' caches of a model: who has which slot and which blocks.

A request has one slot in the state caches of all layers, and blocks of its own in each layer's
pool, as many as its compressed entries take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx_core.argument_checks import flag, integer
from kvx_core.errors import InternalError, InvalidArgumentError
from kvx_core.hybrid.allocator import BlockAllocator, require_outside_capture
from kvx_core.hybrid.block_tables import BlockTables, Counts
from kvx_core.hybrid.config import DSV4Config
from kvx_core.hybrid.forward_step import ForwardStep
from kvx_core.hybrid.handle import LayerCacheHandle
from kvx_core.hybrid.paged_cache import IndexKeys, IndexRounding, PagedCache
from kvx_core.hybrid.schema import (
    AttentionType,
    LayerSpec,
    build_schema,
    compute_block_budget,
    specs,
)
from kvx_core.hybrid.state_cache import StateCache, TailRowWidth

Heads = NDArray[np.int32]


class _Steps(NamedTuple):
    """The last step of each of some slots."""

    firsts: Counts  # tokens before it
    lasts: Counts  # tokens after it
    goes_on: NDArray[np.bool_]  # whether the next step follows it; else it is repeated


class KVCacheManager:
    """The caches of all layers of a model, for requests that come and go.

    config, schedule:         the model, as build_schema takes it; one LayerSpec per layer
    max_concurrent_requests:  R, slots
    max_context_tokens:       tokens that a request may reach
    num_blocks_per_csa_layer, num_blocks_per_hca_layer: blocks of each pool; None: those of
                              compute_block_budget, or what all requests need at their longest
                              if that is more
    device:                   where all tensors lie
    tail_row_width, tail_dtype: see StateCache
    index_keys, index_rounding: how CSA layers keep indexer keys, see PagedCache
    needs_inv_scale:          False: FP8 numbers have no scales, see LayerCacheSchema
    max_tokens_per_step:      tokens that a forward pass may bring; None: max_context_tokens

    Everything is allocated here. schemas, states, allocators, paged, block_tables and block_lens
    are by layer_idx; the last four are None for a layer without compressed entries.
    block_tables:  (R, max_blocks) int32, block ids of each slot; -1 from the last one on
    block_lens:    (R,) int32, blocks of each slot
    tables:        who holds which block in all layers, see BlockTables
    One thread at a time. Raises InvalidArgumentError.
    """

    def __init__(
        self,
        config: DSV4Config,
        schedule: Sequence[LayerSpec],
        max_concurrent_requests: int,
        max_context_tokens: int = 1_000_000,
        num_blocks_per_csa_layer: int | None = None,
        num_blocks_per_hca_layer: int | None = None,
        device: torch.device | str = "cpu",
        *,
        tail_row_width: TailRowWidth = "wide",
        tail_dtype: torch.dtype = torch.float32,
        max_tokens_per_step: int | None = None,
        index_keys: IndexKeys = "nvfp4",
        index_rounding: IndexRounding = "nearest_even",
        needs_inv_scale: bool = True,
    ) -> None:
        self.config = config
        schedule = specs("schedule", schedule)
        self.max_requests = integer("max_concurrent_requests", max_concurrent_requests, 1, 2**20)
        self.max_context_tokens = integer("max_context_tokens", max_context_tokens, 1, 2**30)
        self.device = torch.device(device)
        scaled = flag("needs_inv_scale", needs_inv_scale)
        self.schemas = {
            spec.layer_idx: replace(build_schema(config, spec), needs_inv_scale=scaled)
            for spec in schedule
        }
        if len(self.schemas) != len(schedule) or not schedule:
            raise InvalidArgumentError(
                f"schedule has {len(schedule)} layers of {len(self.schemas)} indices, expected one "
                "or more, each with an index of its own"
            )
        given = {
            AttentionType.CSA: num_blocks_per_csa_layer,
            AttentionType.HCA: num_blocks_per_hca_layer,
        }
        blocks_of = self._blocks_of_pools(schedule, given)

        # Tokens that the window of each layer was given, by slot: states hold rows of it.
        heads = torch.zeros(len(self.schemas), self.max_requests, dtype=torch.int32, device=device)
        self._heads = heads.numpy() if heads.device.type == "cpu" else None
        # Tokens that wait in the tails of each compressor, by slot, in the same way: those of one
        # ratio follow each other.
        having_tails = [
            (layer, name)
            for layer, schema in sorted(
                self.schemas.items(), key=lambda one: one[1].compression_ratio
            )
            for name, dim in (
                ("tail_len", schema.entry_head_dim),
                ("idx_tail_len", schema.indexer_head_dim),
            )
            if schema.tail_buffer_size_a and dim
        ]
        shape = len(having_tails), self.max_requests
        lens = torch.zeros(shape, dtype=torch.int32, device=device)
        tails = dict(zip(having_tails, lens, strict=True))
        self._tails = lens.numpy() if lens.device.type == "cpu" else None
        self._tails_of = having_tails
        of_tails = [self.schemas[layer].compression_ratio for layer, _ in having_tails]
        ratios, firsts, counts = np.unique(
            np.array(of_tails, dtype=np.int64), return_index=True, return_counts=True
        )
        self._tail_ratios, self._first_tails = ratios[:, None], firsts[:, None]
        self._tail_counts = counts
        self.states: dict[int, StateCache] = {}
        self.allocators: dict[int, BlockAllocator | None] = dict.fromkeys(self.schemas)
        self.paged: dict[int, PagedCache | None] = dict.fromkeys(self.schemas)
        self.block_tables: dict[int, Tensor | None] = dict.fromkeys(self.schemas)
        self.block_lens: dict[int, Tensor | None] = dict.fromkeys(self.schemas)
        for head, (layer, schema) in zip(heads, self.schemas.items(), strict=True):
            self.states[layer] = StateCache(
                schema,
                self.max_requests,
                self.device,
                tail_row_width=tail_row_width,
                tail_dtype=tail_dtype,
            )
            self.states[layer].swa_head = head
            self.states[layer].tail_len = tails.get((layer, "tail_len"))
            self.states[layer].idx_tail_len = tails.get((layer, "idx_tail_len"))
            if schema.entries_per_block:
                self.paged[layer] = PagedCache(
                    schema,
                    blocks_of[schema.attn_type],
                    self.device,
                    index_keys=index_keys,
                    index_rounding=index_rounding,
                )
        having = [schema for schema in self.schemas.values() if schema.entries_per_block]
        self.tables = BlockTables(
            having,
            [blocks_of[schema.attn_type] for schema in having],
            self.max_requests,
            self.max_context_tokens,
            self.device,
        )
        for at, layer in enumerate(self.tables.layers):
            self.allocators[layer] = self.tables.allocators[at]
            self.block_tables[layer] = self.tables.tables[at]
            self.block_lens[layer] = self.tables.lens[at]

        self._free_slots = list(range(self.max_requests - 1, -1, -1))
        self._is_taken = np.zeros(self.max_requests, dtype=bool)
        # Tokens before and after the last step of each slot.
        self._steps: Counts = np.zeros((2, self.max_requests), dtype=np.int64)
        self._heads_then = np.zeros(self.max_requests, dtype=np.int32)
        # Whether windows, and each of the tails, have ever been given tokens: an engine may keep
        # them itself.
        self._has_windows = self._has_tails = False
        self._tails_used = np.zeros(len(having_tails), dtype=bool)
        self._all_tails_used = False
        most = max_tokens_per_step or max(self.max_context_tokens, self.max_requests)
        compressed = {s.compression_ratio for s in self.schemas.values() if s.compression_ratio}
        self.step = ForwardStep(
            self.max_requests, integer("max_tokens_per_step", most, 1), compressed, self.device
        )
        # Entries on their way from tails to blocks. Layers take turns.
        schemas = self.schemas.values()
        self._entry = self._scratch(max(schema.entry_head_dim for schema in schemas))
        self._index_key = self._scratch(max(schema.indexer_head_dim for schema in schemas))
        self._handles = {layer: self._handle(layer) for layer in self.schemas}

    def __repr__(self) -> str:
        return (
            f"KVCacheManager({len(self.schemas)} layers, {len(self.requests)} of "
            f"{self.max_requests} requests, {self.memory_bytes()} bytes)"
        )

    def memory_bytes(self) -> int:
        """Bytes of all pools and states."""
        pools = sum(pool.memory_bytes() for pool in self.paged.values() if pool)
        return pools + sum(state.memory_bytes() for state in self.states.values())

    # --- requests ---

    @property
    def requests(self) -> list[int]:
        """Slots that requests have, in ascending order."""
        slots: list[int] = np.flatnonzero(self._is_taken).tolist()
        return slots

    def admit_request(self, num_tokens: int = 0) -> int:
        """Gives a new request a slot, which it keeps until release_request.

        num_tokens: tokens that the request is sure to have room for. Blocks for them are kept free
                    in every layer, the last one of which they may fill in part
        Raises OutOfBlocksError if a layer has fewer blocks than these tokens and what was promised
        to others take, InternalError, a RuntimeError, if there is no slot; InvalidArgumentError.
        """
        num_tokens = self.tokens("num_tokens", num_tokens)
        if not self._free_slots:
            raise InternalError(
                f"all {self.max_requests} request slots are taken: release_request one, or raise "
                "max_concurrent_requests"
            )
        slot = self._free_slots[-1]
        entries = {ratio: np.array([num_tokens // ratio]) for ratio in self.step.compression}
        needs = self.tables.missing(np.array([slot]), entries)
        self.tables.require_free(needs)
        self.tables.promised[:, needs.slots] = needs.counts
        self._free_slots.pop()
        self._is_taken[slot] = True
        self._steps[:, slot] = 0
        self._heads_then[slot] = 0
        return slot

    def release_request(self, request_slot: int) -> None:
        """Ends a request: gives its blocks back in every layer and empties its state.

        Raises InvalidArgumentError for a slot that no request has; InternalError inside a capture.
        """
        slot = self.slot("request_slot", request_slot)
        require_outside_capture(self.device)
        self.tables.give_back(slot)
        for state in self.states.values():
            state.reset_slot(slot)
        self._is_taken[slot] = False
        self._free_slots.append(slot)

    def slot(self, name: str, request_slot: int) -> int:
        """`request_slot` if a request has it. Raises InvalidArgumentError."""
        slot = integer(name, request_slot, 0, self.max_requests - 1)
        if not self._is_taken[slot]:
            raise InvalidArgumentError(f"{name} is {slot}, which no request has: see admit_request")
        return slot

    def require_requests(self, name: str, slots: Counts) -> None:
        """Raises InvalidArgumentError unless each of these slots is a request's, and once here."""
        for i in np.flatnonzero(~self._is_taken[slots]):
            self.slot(f"{name}[{i}]", int(slots[i]))
        if np.bincount(slots).max(initial=0) > 1:
            raise InvalidArgumentError(f"{name} is {slots.tolist()}, expected each slot once")

    def require_follows(self, name: str, slots: Counts, before: Counts) -> None:
        """Raises InvalidArgumentError unless the next step of each request may begin after `before`
        tokens: after its last step, or where that began, if it is to be repeated. On the host, if
        its tokens are in the caches of some layers only, it can be neither; if they are in those
        of all layers, it cannot be repeated, and if in none, not be passed over. Windows and tails
        that were never given a token are an engine's own, of which nothing is known.
        """
        firsts, lasts = self._steps[:, slots]
        for i in np.flatnonzero((lasts != before) & (firsts != before)):
            first, last = int(firsts[i]), int(lasts[i])
            expected = f"{last}" if first == last else f"{last}, or {first} to repeat that step"
            raise InvalidArgumentError(
                f"{name}[{i}] is {before[i]}, and the last step of slot {slots[i]} had {last} "
                f"tokens after it, expected {expected}: tokens come step by step"
            )
        if self._heads is None or self._tails is None:
            return
        ends = _Steps(firsts, lasts, lasts == before)
        self._has_windows = self._has_windows or bool(self._heads.any())
        if self._has_windows:
            self._require_windows(self._heads, name, slots, before, ends)
        self._has_tails = self._has_tails or bool(self._tails.any())
        if self._has_tails:
            self._require_tails(self._tails, name, slots, before, ends)

    def _require_windows(
        self, heads: Heads, name: str, slots: Counts, before: Counts, steps: _Steps
    ) -> None:
        """require_follows, of windows on the host."""
        firsts, lasts, goes_on = steps
        most = least = heads[0, slots]
        if not _are_alike(heads):
            most, least = heads.max(0)[slots], heads.min(0)[slots]
        given = most - self._heads_then[slots]
        is_whole = (given == lasts - firsts) & (most == least)
        windows_fit = np.where(goes_on, is_whole, given == 0)
        for i in np.flatnonzero(~windows_fit):
            first, last = int(firsts[i]), int(lasts[i])
            has = (heads[:, slots[i]] - self._heads_then[slots[i]] == last - first).sum()
            raise InvalidArgumentError(
                f"{name}[{i}] is {before[i]}, and {has} of {len(self.schemas)} layers hold the "
                f"tokens {first} to {last} of the last step of slot {slots[i]}, expected "
                + (f"{last}, the step after it" if is_whole[i] else "all of them")
                + _COMPUTE_ANEW
            )

    def _require_tails(
        self, tails: Heads, name: str, slots: Counts, before: Counts, steps: _Steps
    ) -> None:
        """The same of tails, by the tokens that wait there."""
        firsts, lasts, goes_on = steps
        waiting = np.where(goes_on, lasts, firsts) % self._tail_ratios
        if not self._all_tails_used:
            self._tails_used |= tails.any(1)
            self._all_tails_used = bool(self._tails_used.all())
        # The usual case of every step, seen in little time: all are used, and those of a ratio are
        # alike and have what they should.
        if self._all_tails_used and (tails[self._first_tails, slots] == waiting).all():
            ends = zip(self._first_tails[:, 0].tolist(), self._tail_counts.tolist(), strict=True)
            if all(_are_alike(tails[at : at + n]) for at, n in ends):
                return
        waiting = waiting.repeat(self._tail_counts, axis=0)
        missed = (tails[:, slots] != waiting) & self._tails_used[:, None]
        for at, i in np.argwhere(missed):
            layer, tail = self._tails_of[at]
            raise InvalidArgumentError(
                f"{name}[{i}] is {before[i]}, and {tail} of layer {layer} has "
                f"{tails[at, slots[i]]} waiting tokens of slot {slots[i]}, expected "
                f"{waiting[at, i]}: the layer's compressor has not taken each step's tokens once"
                + _COMPUTE_ANEW
            )

    def keep_steps(self, slots: Counts, before: Counts, after: Counts) -> None:
        """Takes these as the last steps of requests."""
        self._steps[:, slots] = before, after
        if self._heads is not None:
            self._heads_then[slots] = self._heads[0, slots]

    def tokens(self, name: str, num_tokens: int) -> int:
        """`num_tokens` if a request may have so many. Raises InvalidArgumentError."""
        return integer(name, num_tokens, 0, self.max_context_tokens)

    # --- blocks ---

    def held_blocks(self, layer_idx: int, request_slot: int) -> list[int]:
        """Block ids of a request in a layer, in the order of its entries."""
        return self.tables.held(self._with_blocks(layer_idx), self.slot("slot", request_slot))

    def num_held(self, layer_idx: int, request_slot: int) -> int:
        """Blocks that a request has in a layer."""
        return len(self.held_blocks(layer_idx, request_slot))

    def allocate_block(self, layer_idx: int, request_slot: int) -> int:
        """Takes one more block for a request in one layer; returns its id.

        Mutates the layer's block table. Raises OutOfBlocksError, InvalidArgumentError, and
        InternalError inside a capture; nothing is then taken.
        """
        layer = self._with_blocks(layer_idx)
        slot = self.slot("request_slot", request_slot)
        require_outside_capture(self.device)
        one = self.tables.one_more(layer, slot)
        self.tables.require_free(one)
        self.tables.take(one)
        return self.tables.held(layer, slot)[-1]

    def _blocks_of_pools(
        self, schedule: list[LayerSpec], given: dict[AttentionType, int | None]
    ) -> dict[AttentionType, int]:
        """Blocks of the pools of each type that the schedule has: those given, or as many as
        compute_block_budget says and as all requests need at their longest."""
        budget = compute_block_budget(
            self.config, schedule, self.max_context_tokens, self.max_requests
        )
        blocks_of = {}
        for schema in self.schemas.values():
            attn = schema.attn_type
            if schema.entries_per_block and attn not in blocks_of:
                needed = self.max_requests * schema.blocks(self.max_context_tokens)
                blocks = given[attn]
                blocks = max(budget[attn], needed) if blocks is None else blocks
                blocks_of[attn] = integer(f"num_blocks_per_{attn}_layer", blocks, 0, 2**31 - 1)
        return blocks_of

    # --- a layer's cache in a forward pass ---

    def acquire(self, layer_idx: int) -> LayerCacheHandle:
        """A layer's cache for the step that prepare_forward has prepared.

        Allocates no tensor and runs nothing on a device. The handle of a layer is always the same
        object: it shows the current step.
        Raises InvalidArgumentError.
        """
        layer = layer_idx if type(layer_idx) is int else integer("layer_idx", layer_idx)
        handle = self._handles.get(layer)
        if handle is None:
            raise InvalidArgumentError(
                f"layer_idx is {layer}, expected one of the schedule's {len(self.schemas)}"
            )
        return handle

    def _handle(self, layer: int) -> LayerCacheHandle:
        return LayerCacheHandle(
            layer_idx=layer,
            schema=self.schemas[layer],
            state=self.states[layer],
            paged=self.paged[layer],
            block_table=self.block_tables[layer],
            block_lens=self.block_lens[layer],
            step=self.step,
            entry=self._entry,
            index_key=self._index_key,
        )

    def _scratch(self, dim: int) -> Tensor:
        return torch.zeros(self.max_requests, dim, dtype=torch.bfloat16, device=self.device)

    def _with_blocks(self, layer_idx: int) -> int:
        layer = layer_idx if type(layer_idx) is int else integer("layer_idx", layer_idx)
        if self.paged.get(layer) is None:
            having = [str(layer) for layer, pool in self.paged.items() if pool]
            raise InvalidArgumentError(
                f"layer_idx is {layer}, expected a layer with compressed entries: "
                f"{', '.join(having) or 'there is none'}"
            )
        return layer


_COMPUTE_ANEW = ". Release the request and compute it anew if that pass has failed"


def _are_alike(rows: Heads) -> bool:
    """Whether all rows have the same numbers."""
    return bool(rows.tobytes() == rows[0].tobytes() * len(rows))
