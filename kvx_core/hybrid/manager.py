"""All layers' caches of a model: who has which slot and which blocks.

A request has one slot in the state caches of all layers, and blocks of its own in each layer's
pool, as many as its compressed entries take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx_core.errors import InternalError, InvalidArgumentError
from kvx_core.hybrid.allocator import BlockAllocator, OutOfBlocksError
from kvx_core.hybrid.forward_step import ForwardStep
from kvx_core.hybrid.handle import LayerCacheHandle
from kvx_core.hybrid.paged_cache import IndexKeys, IndexRounding, PagedCache
from kvx_core.hybrid.schema import (
    AttentionType,
    DSV4Config,
    LayerSpec,
    build_schema,
    compute_block_budget,
    specs,
)
from kvx_core.hybrid.state_cache import StateCache, TailRowWidth
from kvx_core.words import instance, integer


class KVCacheManager:
    """The caches of all layers of a model, for requests that come and go.

    config, schedule:         the model; one LayerSpec per layer
    max_concurrent_requests:  R, slots
    max_context_tokens:       tokens that a request may reach
    num_blocks_per_csa_layer, num_blocks_per_hca_layer: blocks of each pool; None: those of
                              compute_block_budget
    device:                   where all tensors lie
    tail_row_width, tail_dtype: see StateCache
    index_keys, index_rounding: how CSA layers keep indexer keys, see PagedCache
    max_tokens_per_step:      tokens that a forward pass may bring; None: max_context_tokens

    Everything is allocated here. schemas, states, allocators, paged, block_tables and block_lens
    are by layer_idx; the last four are None for a layer without compressed entries.
    block_tables:  (R, max_blocks) int32, block ids of each slot; -1 from the last one on
    block_lens:    (R,) int32, blocks of each slot
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
    ) -> None:
        self.config = instance("config", config, DSV4Config, "a DSV4Config")
        specs("schedule", schedule)
        self.max_requests = integer("max_concurrent_requests", max_concurrent_requests, 1, 2**20)
        self.max_context_tokens = integer("max_context_tokens", max_context_tokens, 1, 2**30)
        self.device = torch.device(device)
        self.schemas = {spec.layer_idx: build_schema(config, spec) for spec in schedule}
        if len(self.schemas) != len(schedule) or not schedule:
            raise InvalidArgumentError(
                f"schedule has {len(schedule)} layers of {len(self.schemas)} indices, expected one "
                "or more, each with an index of its own"
            )
        budget = compute_block_budget(config, schedule, self.max_context_tokens, self.max_requests)
        given = {
            AttentionType.CSA: num_blocks_per_csa_layer,
            AttentionType.HCA: num_blocks_per_hca_layer,
        }
        for attn, blocks in given.items():
            if blocks is not None:
                budget[attn] = integer(f"num_blocks_per_{attn}_layer", blocks, 0, 2**31 - 1)

        self.states: dict[int, StateCache] = {}
        self.allocators: dict[int, BlockAllocator | None] = {}
        self.paged: dict[int, PagedCache | None] = {}
        self.block_tables: dict[int, Tensor | None] = {}
        self.block_lens: dict[int, Tensor | None] = {}
        self._held: dict[int, list[list[int]]] = {}  # block ids by layer with blocks, and slot
        for layer, schema in self.schemas.items():
            self.states[layer] = StateCache(
                schema,
                self.max_requests,
                self.device,
                tail_row_width=tail_row_width,
                tail_dtype=tail_dtype,
            )
            self.allocators[layer] = self.paged[layer] = None
            self.block_tables[layer] = self.block_lens[layer] = None
            if schema.entries_per_block:
                blocks = budget[schema.attn_type]
                name = f"{schema.attn_type.name} layer {layer}"
                self.allocators[layer] = BlockAllocator(blocks, self.device, name=name)
                self.paged[layer] = PagedCache(
                    schema,
                    blocks,
                    self.device,
                    index_keys=index_keys,
                    index_rounding=index_rounding,
                )
                shape = self.max_requests, schema.blocks(self.max_context_tokens)
                self.block_tables[layer] = torch.full(
                    shape, -1, dtype=torch.int32, device=self.device
                )
                self.block_lens[layer] = torch.zeros(
                    self.max_requests, dtype=torch.int32, device=self.device
                )
                self._held[layer] = [[] for _ in range(self.max_requests)]

        self._free_slots = list(range(self.max_requests - 1, -1, -1))
        self._promised: dict[int, int] = {}  # tokens that were promised, by slot of a request
        self._steps: dict[int, tuple[int, int]] = {}  # tokens before and after the last step
        most = max_tokens_per_step or max(self.max_context_tokens, self.max_requests)
        ratios = {s.compression_ratio for s in self.schemas.values() if s.compression_ratio}
        self.step = ForwardStep(
            self.max_requests, integer("max_tokens_per_step", most, 1), ratios, self.device
        )
        # Entries on their way from tails to blocks. Layers take turns.
        self._entry = self._scratch(config.head_dim)
        self._index_key = self._scratch(config.indexer_head_dim)
        self._handles = {layer: self._handle(layer) for layer in self.schemas}

    def __repr__(self) -> str:
        return (
            f"KVCacheManager({len(self.schemas)} layers, {len(self._promised)} of "
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
        return sorted(self._promised)

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
        needed = {layer: self.schemas[layer].blocks(num_tokens) for layer in self._held}
        self.require_free(needed)
        self._free_slots.pop()
        self._promised[slot] = num_tokens
        self._steps[slot] = 0, 0
        return slot

    def release_request(self, request_slot: int) -> None:
        """Ends a request: gives its blocks back in every layer and empties its state.

        Raises InvalidArgumentError for a slot that no request has; InternalError inside a capture.
        """
        slot = self.slot("request_slot", request_slot)
        for allocator in self.allocators.values():
            if allocator is not None:
                allocator.require_outside_capture()
        for layer, held in self._held.items():
            self._allocator(layer).release(held[slot])
            held[slot] = []
            self._table(layer)[slot].fill_(-1)
            self._lens(layer)[slot].fill_(0)
        for state in self.states.values():
            state.reset_slot(slot)
        del self._promised[slot], self._steps[slot]
        self._free_slots.append(slot)

    def slot(self, name: str, request_slot: int) -> int:
        """`request_slot` if a request has it. Raises InvalidArgumentError."""
        slot = integer(name, request_slot, 0, self.max_requests - 1)
        if slot not in self._promised:
            raise InvalidArgumentError(f"{name} is {slot}, which no request has: see admit_request")
        return slot

    def require_follows(self, name: str, slot: int, before: int) -> None:
        """Raises InvalidArgumentError unless the next step of a request may begin after `before`
        tokens: after its last step, or where that began, if it is to be repeated.
        """
        first, last = self._steps[slot]
        if before not in (first, last):
            expected = f"{last}" if first == last else f"{last}, or {first} to repeat that step"
            raise InvalidArgumentError(
                f"{name} is {before}, and the last step of slot {slot} had {last} tokens after it, "
                f"expected {expected}: tokens come step by step"
            )

    def keep_steps(self, slots: list[int], before: list[int], after: list[int]) -> None:
        """Takes these as the last steps of requests."""
        self._steps.update(zip(slots, zip(before, after, strict=True), strict=True))

    def tokens(self, name: str, num_tokens: int) -> int:
        """`num_tokens` if a request may have so many. Raises InvalidArgumentError."""
        return integer(name, num_tokens, 0, self.max_context_tokens)

    # --- blocks ---

    def held_blocks(self, layer_idx: int, request_slot: int) -> list[int]:
        """Block ids of a request in a layer, in the order of its entries."""
        return list(self._held[self._with_blocks(layer_idx)][self.slot("slot", request_slot)])

    def num_held(self, layer_idx: int, request_slot: int) -> int:
        """Blocks that a request has in a layer."""
        return len(self._held[self._with_blocks(layer_idx)][self.slot("slot", request_slot)])

    def allocate_block(self, layer_idx: int, request_slot: int) -> int:
        """Takes one more block for a request in one layer; returns its id.

        Mutates the layer's block table. Raises OutOfBlocksError, InvalidArgumentError, and
        InternalError inside a capture; nothing is then taken.
        """
        layer = self._with_blocks(layer_idx)
        slot = self.slot("request_slot", request_slot)
        self.require_free({layer: 1}, {slot: 1})
        self.take_blocks(layer, {slot: 1})
        return self._held[layer][slot][-1]

    def require_free(self, needed: dict[int, int], taken: dict[int, int] | None = None) -> None:
        """Raises OutOfBlocksError unless every layer has the blocks, beside those promised.

        needed: blocks by layer
        taken:  how many of them each slot takes, which then count as part of its promise
        """
        for layer, count in needed.items():
            allocator, schema = self._allocator(layer), self.schemas[layer]
            allocator.require_outside_capture()
            kept = sum(
                max(0, schema.blocks(promised) - len(self._held[layer][slot]) - given)
                for slot, promised in self._promised.items()
                for given in [(taken or {}).get(slot, 0)]
            )
            available = allocator.num_free - kept
            if count > available:
                raise OutOfBlocksError(
                    allocator.name, count, max(0, available), allocator.num_blocks
                )
            self._require_columns(layer, taken or {})

    def _require_columns(self, layer: int, taken: dict[int, int]) -> None:
        columns = self._table(layer).shape[1]
        for slot, count in taken.items():
            if len(self._held[layer][slot]) + count > columns:
                raise InvalidArgumentError(
                    f"slot {slot} would have {len(self._held[layer][slot]) + count} blocks in "
                    f"layer {layer}, expected at most {columns}, those of max_context_tokens "
                    f"{self.max_context_tokens}"
                )

    def take_blocks(self, layer: int, taken: dict[int, int]) -> None:
        """Takes blocks of a layer, `taken` by slot, after require_free."""
        held, table, lens = self._held[layer], self._table(layer), self._lens(layer)
        ids, host_ids = self._allocator(layer).acquire_with_ids(sum(taken.values()))
        rows: list[int] = []
        columns: list[int] = []
        at = 0
        for slot, count in taken.items():
            first = len(held[slot])
            rows += [slot] * count
            columns += range(first, first + count)
            held[slot] += host_ids[at : at + count]
            at += count
        where = torch.tensor([rows, columns], device=self.device)
        table.index_put_((where[0], where[1]), ids)
        slots = list(taken)
        counts = torch.tensor(
            [len(held[slot]) for slot in slots], dtype=torch.int32, device=self.device
        )
        lens.index_copy_(0, torch.tensor(slots, device=self.device), counts)

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
        if layer not in self._held:
            raise InvalidArgumentError(
                f"layer_idx is {layer}, expected a layer with compressed entries: "
                f"{', '.join(map(str, self._held)) or 'there is none'}"
            )
        return layer

    def _allocator(self, layer: int) -> BlockAllocator:
        allocator = self.allocators[layer]
        assert allocator is not None
        return allocator

    def _table(self, layer: int) -> Tensor:
        table = self.block_tables[layer]
        assert table is not None
        return table

    def _lens(self, layer: int) -> Tensor:
        lens = self.block_lens[layer]
        assert lens is not None
        return lens
