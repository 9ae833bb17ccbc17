"""A mock of TensorRT-LLM's KV cache, with its memory layout: it allocates pools, assigns blocks,
fills tables, and finds a token from pointers and a table.

TensorRT-LLM itself needs a GPU. This file follows its public sources (main, 2026-09) and uses
nothing of KVX: it computes addresses, reads and writes as the kernels do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

GUARD_BYTES = 256  # CUDA aligns allocations to at least that
UNSET = 0x7FFF_FFFF
SECONDARY_FLAG = -(1 << 31)  # bit 31 of an int32
BAD_PAGE_INDEX = -1


class Allocation:
    """Random bytes, of which `tensor` is the part in the middle."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, seed: int) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        room = torch.empty(size + 3 * GUARD_BYTES, dtype=torch.uint8)
        first = -room.data_ptr() % GUARD_BYTES
        self.bytes = room[first : first + size + 2 * GUARD_BYTES]
        self.bytes.random_(0, 256, generator=torch.Generator().manual_seed(seed))
        self.tensor = self.bytes[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(*shape)


@dataclass
class KvBlockArray:
    """What a kernel gets: the pointers of one layer, and the rows of one batch.

    Source: cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArray
    """

    data: int  # of the table: [batch, beams, 2, max_blocks_per_seq] of int32
    max_blocks_per_seq: int
    tokens_per_block: int
    bytes_per_block: int
    primary_pool: int
    secondary_pool: int
    head_bytes: int  # head_dim elements
    num_heads: int

    def address(self, row: int, kv: int, token: int, head: int) -> int:
        entry = row * self.max_blocks_per_seq * 2 + kv * self.max_blocks_per_seq
        entry += token >> (self.tokens_per_block.bit_length() - 1)
        offset = ctypes.c_int32.from_address(self.data + 4 * entry).value
        pool = self.secondary_pool if offset & SECONDARY_FLAG else self.primary_pool
        block = pool + (offset & 0x7FFF_FFFF) * self.bytes_per_block
        local = head * self.tokens_per_block + (token & (self.tokens_per_block - 1))
        return block + local * self.head_bytes

    def write(self, row: int, kv: int, token: int, values: Tensor) -> None:
        """values: (num_heads, head_dim)"""
        for head, value in enumerate(values.contiguous().view(torch.uint8)):
            to = self.address(row, kv, token, head)
            ctypes.memmove(to, value.data_ptr(), self.head_bytes)

    def read(self, row: int, kv: int, token: int, dtype: torch.dtype) -> Tensor:
        """(num_heads, head_dim)"""
        found = torch.empty(self.num_heads, self.head_bytes, dtype=torch.uint8)
        for head, value in enumerate(found):
            at = self.address(row, kv, token, head)
            ctypes.memmove(value.data_ptr(), at, self.head_bytes)
        return found.view(dtype)


@dataclass(kw_only=True)
class Config:
    """What both managers are made of."""

    num_kv_heads_per_layer: list[int]
    head_dim: int
    tokens_per_block: int
    dtype: torch.dtype
    kv_factor: int = 2
    # Per window, ascending: blocks of the primary and of the secondary pools
    blocks: dict[int, tuple[int, int]]
    max_attention_window_vec: list[int] = field(default_factory=lambda: [4096])
    max_rows: int = 6  # max_batch_size * max_beam_width
    max_blocks_per_seq: int = 8

    @property
    def num_layers(self) -> int:
        return len(self.num_kv_heads_per_layer)

    def window_of(self, layer: int) -> int:
        return self.max_attention_window_vec[layer % len(self.max_attention_window_vec)]

    def sub_block(self, layer: int) -> int:
        """Elements of K or V of one block."""
        return self.num_kv_heads_per_layer[layer] * self.tokens_per_block * self.head_dim


class Manager:
    """What attention gets from either manager, and how it uses that."""

    config: Config
    kv_cache_pool_pointers: Tensor  # (num_pools, 2), int64
    kv_cache_pool_mapping: Tensor  # (num_layers, 2), int32
    allocations: list[Allocation]

    @property
    def raw(self) -> list[Tensor]:
        """Every byte that was allocated, guards included."""
        return [allocation.bytes for allocation in self.allocations]

    def attention(
        self, layer: int, kv_cache_block_offsets: Tensor, seq_offset: int
    ) -> KvBlockArray:
        """Source: cpp/tensorrt_llm/thop/attentionOp.cpp, buildKvCachePoolPointers. It adds the
        offset to the secondary pointer even if that is NULL."""
        config = self.config
        pool, place = self.kv_cache_pool_mapping[layer].tolist()
        bytes_per_block = config.sub_block(layer) * config.dtype.itemsize
        offset = place * config.kv_factor * bytes_per_block
        primary, secondary = self.kv_cache_pool_pointers[pool].tolist()
        return KvBlockArray(
            data=kv_cache_block_offsets[pool, seq_offset].data_ptr(),
            max_blocks_per_seq=kv_cache_block_offsets.shape[-1],
            tokens_per_block=config.tokens_per_block,
            bytes_per_block=bytes_per_block,
            primary_pool=primary + offset,
            secondary_pool=secondary + offset,
            head_bytes=config.head_dim * config.dtype.itemsize,
            num_heads=config.num_kv_heads_per_layer[layer],
        )


@dataclass
class Block:
    """A block object of one window: its id stays, its place in memory moves when it is offloaded.

    Source: cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, KVCacheBlock
    """

    id: int
    index: int
    is_primary: bool


@dataclass
class Pool:
    layers: list[int]
    primary: Allocation
    secondary: Allocation | None


class WindowBlockManager:
    """The blocks of one window, and its pools: one per head count, ascending.

    Source: cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, WindowBlockManager
    """

    def __init__(self, config: Config, window: int, seed: int) -> None:
        self.config, self.window = config, window
        num_primary, num_secondary = config.blocks[window]
        layers = [i for i in range(config.num_layers) if config.window_of(i) == window]
        heads = sorted({config.num_kv_heads_per_layer[i] for i in layers})
        self.pools = []
        for number in heads:
            members = [i for i in layers if config.num_kv_heads_per_layer[i] == number]
            block = (len(members), config.kv_factor, config.sub_block(members[0]))
            primary = Allocation((num_primary, *block), config.dtype, seed + 2 * number)
            secondary = None
            if num_secondary:
                secondary = Allocation((num_secondary, *block), config.dtype, seed + 2 * number + 1)
            self.pools.append(Pool(members, primary, secondary))
        self.blocks = [Block(i, i, True) for i in range(num_primary)]
        self.blocks += [Block(num_primary + i, i, False) for i in range(num_secondary)]
        self.free = list(range(num_primary))

    def offload(self, block_id: int, into: int) -> None:
        """Copies a block, then swaps the two objects' places in memory; their ids stay."""
        block, other = self.blocks[block_id], self.blocks[into]
        assert block.is_primary
        assert not other.is_primary
        for pool in self.pools:
            assert pool.secondary is not None
            pool.secondary.tensor[other.index] = pool.primary.tensor[block.index]
        block.index, other.index = other.index, block.index
        block.is_primary, other.is_primary = False, True

    def set_offsets(self, offsets: Tensor, beam: int, column: int, block_id: int) -> None:
        """offsets: (num_pools, beams, 2, max_blocks_per_seq). The flag is never set: a block has
        been brought to the primary pool before it gets here."""
        block = self.blocks[block_id]
        for pool_idx, pool in enumerate(self.pools):
            for kv in (0, 1):
                field_idx = kv if self.config.kv_factor == 2 else 0
                value = (block.index * len(pool.layers) + 0) * self.config.kv_factor + field_idx
                offsets[pool_idx, beam, kv, column] = value


class Request:
    """A sequence of `beam_width` beams: its block ids and its own table, per window.

    Source: cpp/tensorrt_llm/batch_manager/kvCacheManager.h, GenerationRequest
    """

    def __init__(self, manager: KvCacheManager, beam_width: int) -> None:
        self.beam_width, self.num_tokens = beam_width, 0
        self.block_ids: dict[int, list[list[int]]] = {}
        self.offsets: dict[int, Tensor] = {}
        self.num_front_blocks_removed: dict[int, int] = {}
        for window, blocks in manager.windows.items():
            shape = (len(blocks.pools), beam_width, 2, manager.config.max_blocks_per_seq)
            self.offsets[window] = torch.full(shape, UNSET, dtype=torch.int32)
            self.block_ids[window] = [[] for _ in range(beam_width)]
            self.num_front_blocks_removed[window] = 0


class KvCacheManager(Manager):
    """KVCacheManager, the older of the two.

    Source: cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, BlockManager, KVCacheManager;
    _torch/pyexecutor/resource_manager.py, KVCacheManager
    """

    def __init__(self, config: Config, seed: int = 0) -> None:
        self.config = config
        self.windows = {
            window: WindowBlockManager(config, window, seed + 1000 * i)
            for i, window in enumerate(sorted(set(map(config.window_of, range(config.num_layers)))))
        }
        self.pools = [pool for blocks in self.windows.values() for pool in blocks.pools]
        self.allocations = [
            part for pool in self.pools for part in (pool.primary, pool.secondary) if part
        ]
        self.kv_cache_pool_pointers = torch.tensor(
            [
                [p.primary.tensor.data_ptr(), p.secondary.tensor.data_ptr() if p.secondary else 0]
                for p in self.pools
            ],
            dtype=torch.int64,
        )
        mapping = [[0, 0]] * config.num_layers
        for pool_idx, pool in enumerate(self.pools):
            for place, layer in enumerate(pool.layers):
                mapping[layer] = [pool_idx, place]
        self.kv_cache_pool_mapping = torch.tensor(mapping, dtype=torch.int32)

    def add_sequence(self, num_tokens: int, beam_width: int = 1) -> Request:
        """Blocks for a context: the beams share all of them but one that is partly filled."""
        request = Request(self, beam_width)
        request.num_tokens = num_tokens
        for window in self.windows:
            for column in range(-(-num_tokens // self.config.tokens_per_block)):
                is_full = (column + 1) * self.config.tokens_per_block <= num_tokens
                self._allocate(request, window, share_among_beams=is_full)
        return request

    def add_token(self, request: Request) -> None:
        """Source: KVCacheManager::addToken, WindowBlockManager::adjustBlocksIfNeeded"""
        request.num_tokens += 1
        tokens_per_block = self.config.tokens_per_block
        for window, blocks in self.windows.items():
            removed = request.num_front_blocks_removed
            while request.num_tokens - removed[window] * tokens_per_block >= (
                window + tokens_per_block
            ):
                # The block is free for others; its entry in the table stays.
                (ids,) = request.block_ids[window]  # it refuses beams here
                blocks.free.append(ids[removed[window]])
                removed[window] += 1
            if (request.num_tokens - 1) % tokens_per_block == 0:
                self._allocate(request, window, share_among_beams=request.beam_width == 1)

    def _allocate(self, request: Request, window: int, *, share_among_beams: bool) -> None:
        blocks = self.windows[window]
        block_id = -1
        for beam, ids in enumerate(request.block_ids[window]):
            if beam == 0 or not share_among_beams:
                block_id = blocks.free.pop(len(blocks.free) * 7 // 11)  # in no order
            ids.append(block_id)
            blocks.set_offsets(request.offsets[window], beam, len(ids) - 1, block_id)

    def refresh(self, request: Request) -> None:
        """Writes the table again, after blocks were moved."""
        for window, blocks in self.windows.items():
            for beam, ids in enumerate(request.block_ids[window]):
                for column, block_id in enumerate(ids):
                    blocks.set_offsets(request.offsets[window], beam, column, block_id)

    def block_offsets(self) -> Tensor:
        """kv_cache_block_offsets before its first use: random, since nothing clears it."""
        generator = torch.Generator().manual_seed(11)
        shape = (len(self.pools), self.config.max_rows, 2, self.config.max_blocks_per_seq)
        bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64)
        return bits.to(torch.int32)

    def copy_block_offsets(self, output: Tensor, row: int, request: Request) -> None:
        """Only as many columns as there are blocks. Source: KVCacheManager::copyBlockOffsets"""
        first_pool = 0
        for window, offsets in request.offsets.items():
            for beam, ids in enumerate(request.block_ids[window]):
                for pool in range(len(offsets)):
                    part = output[first_pool + pool, row + beam, :, : len(ids)]
                    part.copy_(offsets[pool, beam, :, : len(ids)])
            first_pool += len(offsets)

    def get_primary_pool_data(self, layer: int) -> Tensor:
        pool, place = self.kv_cache_pool_mapping[layer].tolist()
        return self.pools[pool].primary.tensor[:, place]

    def get_buffers(self, layer: int, kv_layout: str = "NHD") -> Tensor:
        """Only the shape depends on kv_layout. Source: KVCacheManager.get_buffers"""
        return reshaped(self.get_primary_pool_data(layer), self.config, layer, kv_layout)


def reshaped(pages: Tensor, config: Config, layer: int, kv_layout: str) -> Tensor:
    """(pages, kv_factor, elements) as either layout."""
    inner = [config.num_kv_heads_per_layer[layer], config.tokens_per_block]
    if kv_layout == "NHD":
        inner.reverse()
    return pages.reshape(pages.shape[0], config.kv_factor, *inner, config.head_dim)


class KvCacheManagerV2(Manager):
    """KVCacheManagerV2: slots of coalesced buffers; heads are all the same.

    Windows are in the order of their first layers. Those with slots of one size share a pool.
    extra_buffers: per layer, of the size of K, in the slot behind V (such as an index key)
    Source: _torch/pyexecutor/kv_cache/kv_cache_manager_v2.py, KVCacheManagerV2;
    runtime/kv_cache_manager_v2/_core/_kv_cache_manager.py; _life_cycle_registry.py,
    LifeCycleRegistry; _storage/_config.py, create_storage_config
    """

    def __init__(self, config: Config, seed: int = 0, *, extra_buffers: int = 0) -> None:
        self.config = config
        self.windows = list(dict.fromkeys(map(config.window_of, range(config.num_layers))))
        self.groups = [
            [i for i in range(config.num_layers) if config.window_of(i) == window]
            for window in self.windows
        ]
        self.per_layer = config.kv_factor + extra_buffers
        sizes = [len(group) * self.per_layer * config.sub_block(group[0]) for group in self.groups]
        slots = dict.fromkeys(sizes, 0)
        for window, size in zip(self.windows, sizes, strict=True):
            slots[size] += config.blocks[window][0]
        pools = {
            size: Allocation((count, size), config.dtype, seed + i)
            for i, (size, count) in enumerate(slots.items())
        }
        self.allocations = list(pools.values())
        self.num_slots = [slots[size] for size in sizes]  # per group
        self.pools = [pools[size] for size in sizes]  # likewise
        self.kv_cache_pool_pointers = torch.tensor(
            [[self.get_mem_pool_base_address(group[0], 0), 0] for group in self.groups],
            dtype=torch.int64,
        )
        self.index_scales = [self.get_page_index_scale(group[0]) for group in self.groups]
        self.kv_offset = config.kv_factor - 1
        if extra_buffers == 0:
            self.kv_cache_pool_mapping = torch.tensor(
                [self.place_of(layer) for layer in range(config.num_layers)], dtype=torch.int32
            )
        # Slots, unscaled; what is not used is 0, a slot like any other.
        shape = (len(self.groups), config.max_rows, 2, config.max_blocks_per_seq)
        self.host_kv_cache_block_offsets = torch.zeros(shape, dtype=torch.int32)

    def place_of(self, layer: int) -> tuple[int, int]:
        pool = self.windows.index(self.config.window_of(layer))
        return pool, self.groups[pool].index(layer)

    def get_page_stride(self, layer: int) -> int:
        return self.config.sub_block(layer) * self.config.dtype.itemsize

    def get_page_index_scale(self, layer: int) -> int:
        """Buffers of one slot."""
        return len(self.groups[self.place_of(layer)[0]]) * self.per_layer

    def get_mem_pool_base_address(self, layer: int, kv: int, *, per_layer: bool = False) -> int:
        """PageIndexMode.SHARED: of this buffer in slot 0; PER_LAYER: of slot 0 itself."""
        pool, place = self.place_of(layer)
        buffer = 0 if per_layer else place * self.per_layer + kv
        base = self.pools[pool].tensor.data_ptr()
        return base + buffer * self.get_page_stride(layer)

    def get_page_index_upper_bound(self, layer: int, kv: int) -> int:
        pool, place = self.place_of(layer)
        buffers = self.get_page_index_scale(layer) * self.num_slots[pool]
        return buffers - (place * self.per_layer + kv)

    def get_buffers(self, layer: int, kv_layout: str = "NHD") -> Tensor:
        """From the K of this layer to the end of the pool, contiguous."""
        pool, place = self.place_of(layer)
        num_pages = self.get_page_index_upper_bound(layer, 0) // self.config.kv_factor
        elements = self.config.kv_factor * self.config.sub_block(layer)
        first = place * self.per_layer * self.config.sub_block(layer)
        flat = self.pools[pool].tensor.flatten()[first : first + num_pages * elements]
        pages = flat.view(num_pages, self.config.kv_factor, -1)
        return reshaped(pages, self.config, layer, kv_layout)

    def get_batch_cache_indices(self, pool: int, slots: Sequence[Sequence[int]]) -> list[list[int]]:
        scale, factor = self.index_scales[pool], self.config.kv_factor
        return [[s if s == BAD_PAGE_INDEX else s * scale // factor for s in row] for row in slots]

    def copy_batch_block_offsets(self, output: Tensor, copy_index: Sequence[int]) -> None:
        """Source: cpp/tensorrt_llm/batch_manager/kvCacheManagerV2Utils.cu,
        copyBatchBlockOffsetsToDeviceKernel. It copies every column."""
        for pool, scale in enumerate(self.index_scales):
            for row, index in enumerate(copy_index):
                slots = self.host_kv_cache_block_offsets[pool, index, 0]
                for kv in (0, 1):
                    scaled = slots * scale + kv * self.kv_offset
                    output[pool, row, kv] = scaled.where(slots != BAD_PAGE_INDEX, slots)

    def copy_block_offsets_per_layer(self, output: Tensor, copy_index: Sequence[int]) -> None:
        """A table per layer, whose pointer is that of the pool: SWA scratch and several head sizes.

        output: (num_layers, rows, 2, max_blocks_per_seq)
        Source: KVCacheManagerV2._copy_batch_block_offsets_per_layer
        """
        for layer in range(self.config.num_layers):
            pool, place = self.place_of(layer)
            for row, index in enumerate(copy_index):
                slots = self.host_kv_cache_block_offsets[pool, index, 0]
                for kv in (0, 1):
                    layer_offset = place * self.per_layer + kv * self.kv_offset
                    scaled = slots * self.index_scales[pool] + layer_offset
                    output[layer, row, kv] = scaled.where(slots != BAD_PAGE_INDEX, slots)
