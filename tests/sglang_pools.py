"""Pools of the SGLang wheel with every byte a sentinel, and requests that own pages of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import sglang_wheel as wheel

SENTINEL = 0x5A
SEEDS = (0, 1, 2)


def random_rows(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    """Every byte of the allocation behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def buffers(pool: Any) -> list[Tensor]:
    """Every tensor of keys, values or latents of a device pool."""
    latents = getattr(pool, "kv_buffer", None)
    return list(latents) if latents else [*pool.k_buffer, *pool.v_buffer]


def mha(
    *,
    page: int = 16,
    pages: int = 7,
    heads: int = 3,
    dim: int = 80,
    v_dim: int | None = None,
    layers: int = 2,
    dtype: torch.dtype = torch.float16,
    hnd: bool = False,
    start_layer: int | None = None,
) -> Any:
    """An MHATokenToKVPool of `pages` pages beside the padded one."""
    with wheel.envs.SGLANG_USE_HND_KVCACHE.override(hnd):
        pool = wheel.device.MHATokenToKVPool(
            size=pages * page,
            page_size=page,
            dtype=dtype,
            head_num=heads,
            head_dim=dim,
            v_head_dim=v_dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=None if start_layer is None else start_layer + layers - 1,
        )
    return filled(pool)


def mla(
    *,
    page: int = 16,
    pages: int = 7,
    rank: int = 72,
    rope: int = 8,
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """An MLATokenToKVPool."""
    pool = wheel.device.MLATokenToKVPool(
        size=pages * page,
        page_size=page,
        dtype=dtype,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return filled(pool)


def windows(*, page: int = 5, dtype: torch.dtype = torch.float16) -> Any:
    """An SWAKVPool whose layers 0 and 3 see 12 tokens; 1 and 2 see all."""
    pool = wheel.swa.SWAKVPool(
        size=60,
        size_swa=30,
        page_size=page,
        dtype=dtype,
        head_num=2,
        head_dim=24,
        swa_attention_layer_ids=[0, 3],
        full_attention_layer_ids=[1, 2],
        device="cpu",
    )
    filled(pool.full_kv_pool)
    filled(pool.swa_kv_pool)
    return pool


def filled(pool: Any) -> Any:
    for tensor in buffers(pool):
        bytes_of(tensor).fill_(SENTINEL)
    return pool


def store(pool: Any, layer: int, slots: Tensor, key: Tensor, value: Tensor | None = None) -> None:
    """What SGLang's attention calls. It scales in place, so it has copies."""
    if value is None:
        with wheel.parallel().override(dcp_enabled=False):
            pool.set_kv_buffer(None, slots, key.clone(), None, layer_id_override=layer)
        return
    pool.set_kv_buffer(None, slots, key.clone(), value.clone(), layer_id_override=layer)


def scheduled(rows: Tensor | Sequence[int], lengths: Sequence[int]) -> list[Any]:
    """Requests of the scheduler: rows of req_to_token, and tokens that are stored.

    Source: sglang 0.5.23 managers/schedule_batch.py, Req.kv, ReqKvInfo
    """
    kvs = [
        SimpleNamespace(req_pool_idx=int(row), kv_committed_len=length, kv_allocated_len=length + 1)
        for row, length in zip(rows, lengths, strict=True)
    ]
    return [SimpleNamespace(kv=kv) for kv in kvs]


class Requests:
    """Rows of a ReqToTokenPool whose requests own scattered pages."""

    def __init__(
        self, lengths: Sequence[int], *, page: int, pages: int, seed: int, room: int = 96
    ) -> None:
        self.pool = wheel.device.ReqToTokenPool(
            size=len(lengths) + 2,
            max_context_len=room,
            device="cpu",
            enable_memory_saver=False,
        )
        self.lengths = torch.tensor(lengths)
        self.rows = torch.tensor(self.pool.alloc_rows(len(lengths)))
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)) + 1
        self.slots: list[Tensor] = []
        for row, count in zip(self.rows.tolist(), lengths, strict=True):
            own, order = order[: -(-count // page)], order[-(-count // page) :]
            slots = (own[:, None] * page + torch.arange(page)).flatten()[:count]
            self.pool.write((row, slice(0, count)), slots.to(torch.int32))
            self.slots.append(slots)

    @property
    def table(self) -> Tensor:
        return self.pool.req_to_token

    @property
    def all_slots(self) -> Tensor:
        return torch.cat(self.slots)
