"""Calls that are large enough for several threads write the bytes of one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import kvx_core
from kvx_core.hybrid import ops


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    yield
    kvx_core.set_num_threads(0)


def append() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 512, generator=made).to(torch.bfloat16)
    slots = torch.randint(-1, 7, (3000,), generator=made, dtype=torch.int32)
    rings = [
        torch.zeros(7, 128, 448, dtype=torch.uint8),
        torch.zeros(7, 128, 64, dtype=torch.bfloat16),
        torch.zeros(7, 128),
        torch.zeros(7, 128, dtype=torch.int32),
        torch.zeros(7, dtype=torch.int32),
    ]
    ops.append_swa(x, torch.arange(3000), slots, *rings)
    return rings


def pages() -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    rows = torch.randn(3000, 512, generator=made)
    written = torch.zeros(50, ops.v4_page_bytes(64), dtype=torch.uint8)
    slots = torch.randperm(3200, generator=made)[:3000]
    ops.write_v4_page(rows, slots, written, entries_per_page=64)
    out = torch.zeros(3000, 512)
    ops.read_v4_page(written, slots, out, entries_per_page=64)
    return [written, out]


def compress() -> list[Tensor]:
    made = torch.Generator().manual_seed(2)
    k, z = torch.randn(2, 400, 1024, generator=made).unbind()
    out = torch.zeros(100, 512)
    ops.compress_bulk(k, z, None, None, torch.ones(512), 1e-6, None, None, out)
    return [out]


@pytest.mark.parametrize("call", [append, pages, compress])
def test_threads_do_not_change_a_byte(call: Callable[[], list[Tensor]]) -> None:
    kvx_core.set_num_threads(1)
    expected = call()
    kvx_core.set_num_threads(3)
    for got, wanted in zip(call(), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
