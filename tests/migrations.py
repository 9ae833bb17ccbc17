"""A migration between two caches, compared byte for byte with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests import reference
from tests.caches import (
    Cache,
    assert_same_bytes,
)
from tests.calls import Backend
from tests.reference import End


def check_migrate(
    backend: Backend,
    src: Cache,
    src_end: End,
    dst: Cache,
    dst_end: End,
    lengths: Sequence[int],
    *,
    rows_per_length: int = 1,
    src_starts: Sequence[int] | None = None,
    dst_starts: Sequence[int] | None = None,
    int_dtype: torch.dtype = torch.int32,
    **options: Any,
) -> None:
    """Migrates and compares all of both caches with the reference."""
    row_lens = [n for n in lengths for _ in range(rows_per_length)]
    expected, source = dst.clone(), src.clone()
    reference.migrate(
        source.layers,
        src_end,
        expected.layers,
        dst_end,
        row_lens,
        src_starts=src_starts,
        dst_starts=dst_starts,
        **options,
    )
    backend.migrate(
        src,
        src_end,
        dst,
        dst_end,
        torch.tensor(lengths, dtype=int_dtype),
        src_starts=None if src_starts is None else torch.tensor(src_starts, dtype=torch.int64),
        dst_starts=None if dst_starts is None else torch.tensor(dst_starts, dtype=torch.int32),
        **options,
    )
    assert_same_bytes(dst, expected)
    assert_same_bytes(src, source)
