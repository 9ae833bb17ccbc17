"""TGI's caches for the tests: a mock of KVCache with its layout, its batch and its allocators.

TGI is not on PyPI, and needs a GPU for most of these caches. This file has the tensors that it
allocates, the address where its store writes an element, and its tables and slots, without KVX.
Source: TGI 3.3.7, server/text_generation_server unless another path is given
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvx_adapters.tgi import CacheSpec

SENTINEL = 0x5A
# (ATTENTION, SYSTEM, device.type of the cache), all that TGI has
FLAVOURS = [
    ("flashinfer", "cuda", "cuda"),
    ("flashdecoding", "cuda", "cuda"),
    ("flashdecoding", "rocm", "cuda"),
    ("flashdecoding-ipex", "ipex", "xpu"),
    ("flashdecoding-ipex", "ipex", "cpu"),
    ("paged", "cuda", "cuda"),
    ("paged", "rocm", "cuda"),
    ("paged", "ipex", "xpu"),
    ("paged", "ipex", "cpu"),
    ("paged", "hpu", "hpu"),
]


@dataclass
class Cache:
    """One layer: KVCache of layers/attention/kv_cache.py, and of the gaudi server's.

    Its tensors are on the host, over `raw`, which starts as a sentinel.
    """

    attention: str
    system: str
    device: str
    num_blocks: int = 9
    num_heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.float16
    raw: tuple[Tensor, Tensor] = field(init=False)  # uint8, every byte of K and of V
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        k_shape, v_shape = self.shapes()
        self.raw = (self._bytes(k_shape), self._bytes(v_shape))
        self.key, self.value = (
            raw.view(self.dtype).view(shape)
            for raw, shape in zip(self.raw, (k_shape, v_shape), strict=True)
        )

    @property
    def block_size(self) -> int:
        """models/globals.py; gaudi: backends/gaudi/server, the file of that name."""
        if self.system == "hpu":
            return 128
        sizes = {"flashdecoding": 256, "flashinfer": 1, "flashdecoding-ipex": 64}
        return sizes.get(self.attention, 16)

    @property
    def x(self) -> int:
        """KVCache.__init__"""
        if self.system == "ipex" and self.device == "xpu":
            return 1
        return self.block_size // self.dtype.itemsize

    @property
    def order(self) -> str:
        """KVCache.__init__; "flat" is the gaudi server's."""
        if self.system == "hpu":
            return "flat"
        if self.attention in ("flashdecoding", "flashinfer") or (
            self.attention == "flashdecoding-ipex" and self.device == "xpu"
        ):
            return "nhd"
        if self.system == "ipex" and self.device == "cpu":
            return "hnd"
        return "paged"

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """KVCache.__init__, of K and of V."""
        blocks, tokens, x = self.num_blocks, self.block_size, self.x
        heads, dim = self.num_heads, self.head_size
        if self.order == "paged":
            return (blocks, heads, dim // x, tokens, x), (blocks, heads, dim, tokens)
        shape = {
            "flat": (blocks * tokens, heads, dim),
            "nhd": (blocks, tokens, heads, dim),
            "hnd": (blocks, heads, tokens, dim),
        }[self.order]
        return shape, shape

    def elements(self, slot: int) -> tuple[Tensor, Tensor]:
        """Where KVCache.store puts a token: indices (head, dim) into K and V, flat.

        nhd: index_put into .view(-1, heads, dim). paged: reshape_and_cache_kernel of vLLM's
        csrc/cache_kernels.cu; IPEX XPU has the same. hnd: reshape_and_cache_kernel of IPEX's
        csrc/cpu/aten/kernels/PagedAttentionKrnl.cpp. flat: vllm_hpu_extension/cache_ops.py
        """
        heads, dims, tokens, x = self.num_heads, self.head_size, self.block_size, self.x
        block, offset = divmod(slot, tokens)
        h, d = torch.arange(heads)[:, None], torch.arange(dims)[None]
        if self.order == "paged":
            k = block * heads * (dims // x) * tokens * x + h * (dims // x) * tokens * x
            k = k + d // x * tokens * x + offset * x + d % x
            v = block * heads * dims * tokens + h * dims * tokens + d * tokens + offset
            return k, v
        if self.order == "hnd":
            token = block * heads * tokens * dims + h * tokens * dims + offset * dims + d
        else:
            token = slot * heads * dims + h * dims + d
        return token, token

    def store(self, slot: int, key: Tensor, value: Tensor) -> None:
        """One token; key and value: (heads, dim), of the cache's dtype."""
        for flat, at, token in self._flat(slot, key, value):
            flat[at] = token.contiguous().view(flat.dtype)

    def load(self, slot: int) -> tuple[Tensor, Tensor]:
        """One token as (heads, dim) of K and of V."""
        found = [flat[at].view(self.dtype) for flat, at, _ in self._flat(slot)]
        return found[0], found[1]

    def spec(self) -> CacheSpec:
        return CacheSpec(
            attention=self.attention,
            system=self.system,
            device=self.device if self.system == "ipex" else "",
            num_blocks=self.num_blocks,
            num_kv_heads=self.num_heads,
            head_dim=self.head_size,
            dtype=self.dtype,
        )

    def _flat(self, slot: int, *tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """K and V as a list of integers each, so that bits are kept, and where the token lies."""
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        pair = tokens or (torch.empty(0),) * 2
        yield from zip((raw.view(bits) for raw in self.raw), self.elements(slot), pair, strict=True)

    def _bytes(self, shape: Sequence[int]) -> Tensor:
        size = torch.Size(shape).numel() * self.dtype.itemsize
        return torch.full((size,), SENTINEL, dtype=torch.uint8)


@dataclass
class KVScales:
    """layers/attention/kv_cache.py, KVScales"""

    key_scale: Tensor
    value_scale: Tensor

    @classmethod
    def of(cls, key_scale: float, value_scale: float) -> KVScales:
        return cls(torch.tensor(key_scale), torch.tensor(value_scale))

    @property
    def key_scale_cpu(self) -> float:
        return float(self.key_scale)

    @property
    def value_scale_cpu(self) -> float:
        return float(self.value_scale)


@dataclass
class Batch:
    """The tensors of FlashCausalLMBatch that find tokens, models/flash_causal_lm.py."""

    block_tables_tensor: Tensor  # int32; torch.empty in TGI, so poison past each request's blocks
    slots: Tensor  # int64
    cu_slots: Tensor  # int64
    slot_indices: Tensor  # int64, the tokens of this step
    input_lengths: Tensor  # int32
    cache_lengths: Tensor  # int32

    @classmethod
    def of(
        cls,
        requests: Sequence[tuple[Sequence[int], Sequence[int]]],
        input_lengths: Sequence[int],
        cache_lengths: Sequence[int],
    ) -> Batch:
        """from_tokenized, prepare_for_prefill.

        requests: (blocks, slots) of each, from an allocator
        """
        width = max(len(blocks) for blocks, _ in requests)
        poison = (0x7FFFFFFF, -0x80000000, 1, -1, 123456)
        table = torch.tensor(poison, dtype=torch.int32).repeat(len(requests), width)[:, :width]
        table = table.contiguous()
        slots: list[int] = []
        cu_slots = [0]
        indices = []
        for i, (blocks, own) in enumerate(requests):
            table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            first = cu_slots[-1] + cache_lengths[i]
            indices.append(torch.arange(first, first + input_lengths[i]))
            slots += own
            cu_slots.append(len(slots))
        return cls(
            block_tables_tensor=table,
            slots=torch.tensor(slots, dtype=torch.int64),
            cu_slots=torch.tensor(cu_slots, dtype=torch.int64),
            slot_indices=torch.cat(indices),
            input_lengths=torch.tensor(input_lengths, dtype=torch.int32),
            cache_lengths=torch.tensor(cache_lengths, dtype=torch.int32),
        )

    def ragged(self) -> tuple[Tensor, Tensor]:
        """models/metadata_kernels.py, block_tables_to_ragged; common.py, Seqlen.cu_seqlen_k"""
        lengths = (self.input_lengths + self.cache_lengths).tolist()
        rows = [row[:length] for row, length in zip(self.block_tables_tensor, lengths, strict=True)]
        cu_seqlen_k = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return torch.cat(rows), cu_seqlen_k


class SimpleAllocator:
    """backends/v3/src/block_allocator.rs: with a window, slots go round in its blocks."""

    def __init__(self, cache: Cache, window: int | None = None, seed: int = 0) -> None:
        self.free = list(range(1, cache.num_blocks))  # block 0 is reserved
        random.Random(seed).shuffle(self.free)
        self.block_size, self.window = cache.block_size, window

    def allocate(self, tokens: int) -> tuple[list[int], list[int]]:
        """(blocks, slots), a slot for each of `tokens` tokens."""
        held = tokens if self.window is None else min(tokens, self.window)
        count = -(-held // self.block_size)
        assert count <= len(self.free)
        blocks, self.free = self.free[-count:], self.free[:-count]
        ring = [b * self.block_size + i for b in blocks for i in range(self.block_size)]
        return blocks, [ring[token % len(ring)] for token in range(tokens)]
