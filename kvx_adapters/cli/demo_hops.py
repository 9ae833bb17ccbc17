"""The caches of the demo, and the migration from one to the next.

TensorRT-LLM and TGI do not run here: the demo allocates caches with their layouts and block tables.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvx_adapters import tensorrt_llm, tgi
from kvx_core import (
    BlockTable,
    CacheSpan,
    CacheView,
    DType,
    SeqLens,
    Verification,
    migrate,
    verify,
)

TIMED_CALLS = 20


@dataclass(frozen=True)
class Stop:
    """A cache of the demo, with the prompts in it."""

    cache_of: str  # the engine; with an asterisk if it is not running
    found_by: str  # how the engine finds a token
    span: CacheSpan


@dataclass(frozen=True)
class Hop:
    """A migration from one cache to the next."""

    num_bytes: int
    first: float  # seconds of the first call
    again: float  # median seconds of TIMED_CALLS more
    arrived: Verification


def hop(src: Stop, dst: Stop, seq_lens: SeqLens) -> Hop:
    """Migrates K and V of all layers and prompts in one call, repeats it for timing, verifies."""
    seconds = []
    for _ in range(1 + TIMED_CALLS):
        start = time.perf_counter()
        num_bytes = migrate(src.span, dst.span, seq_lens)
        seconds.append(time.perf_counter() - start)
    return Hop(
        num_bytes=num_bytes,
        first=seconds[0],
        again=statistics.median(seconds[1:]),
        arrived=verify(src.span, dst.span, seq_lens),
    )


def trtllm_pool(like: CacheView, prompt_lens: Sequence[int], chance: random.Random) -> Stop:
    """A pool laid out as TensorRT-LLM's for the model of `like`, with its blocks in random order.

    It is filled with NaN, since new device memory may hold anything.
    """
    layer = like.layers[0]
    spec = tensorrt_llm.PoolSpec(
        layers=tuple(range(len(like.layers))),
        num_blocks=16,
        tokens_per_block=64,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        dtype={DType.F32: "FLOAT", DType.BF16: "BF16"}[layer.k.dtype],
    )
    pool = torch.full(spec.pool_shape, math.nan, dtype=spec.torch_dtype)
    free = chance.sample(range(spec.num_blocks), spec.num_blocks)
    offsets = tensorrt_llm.block_offsets(
        [_take(free, length, spec.tokens_per_block) for length in prompt_lens],
        spec,
        max_blocks_per_seq=8,
    )
    # No engine runs here that knows its facts; the model is the same, so its facts are too.
    view = tensorrt_llm.cache_view(spec, pool, replace(like.facts, engine="TensorRT-LLM"))
    return Stop("TensorRT-LLM *", "KV_OFFSETS", view.at(BlockTable.kv_offsets(offsets)))


def tgi_cache(like: CacheView, prompt_lens: Sequence[int], chance: random.Random) -> Stop:
    """A cache laid out as TGI's for paged attention on CUDA, for the model of `like`, likewise."""
    layer = like.layers[0]
    spec = tgi.CacheSpec(
        attention="paged",
        system="cuda",
        num_blocks=64,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        dtype=getattr(torch, layer.k.dtype.array_name),
    )
    kv_cache = [
        (torch.zeros(spec.k_shape, dtype=spec.dtype), torch.zeros(spec.v_shape, dtype=spec.dtype))
        for _ in like.layers
    ]
    free = chance.sample(range(tgi.RESERVED_BLOCK_ID + 1, spec.num_blocks), spec.num_blocks - 1)
    within = torch.arange(spec.block_size)
    slots = []
    for length in prompt_lens:
        blocks = torch.tensor(_take(free, length, spec.block_size))
        slots.append((blocks[:, None] * spec.block_size + within).flatten()[:length])
    view = tgi.cache_view(kv_cache, spec, replace(like.facts, engine="TGI"))
    return Stop("TGI *", "slots", view.at(slots=tgi.slot_mapping(torch.cat(slots))))


def _take(free: list[int], num_tokens: int, block_size: int) -> list[int]:
    return [free.pop() for _ in range(0, num_tokens, block_size)]
