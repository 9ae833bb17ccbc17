"""Entries as records in the pages of vLLM and SGLang, and back. Spec: E.22"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvx_core._c import abi_hybrid
from kvx_core.argument_checks import integer
from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid._arrays import FLOATS, Arrays, dtype_of, extents

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["read_v4_page", "v4_page_bytes", "write_v4_page"]

PAGE_DIM = 512  # numbers of an entry: 448 in E4M3, 64 in BF16


def v4_page_bytes(entries_per_page: int) -> int:
    """Bytes of vLLM's and SGLang's page: 584 for each entry, rounded up to a multiple of 576."""
    entries = integer("entries_per_page", entries_per_page, 1, 1 << 20)
    return -(-584 * entries // 576) * 576


def write_v4_page(entries: Tensor, slots: Tensor, pages: Tensor, *, entries_per_page: int) -> None:
    """Writes entries as records into pages of vLLM and SGLang.

    entries: (rows, 512) float32 or bfloat16: 448 numbers become E4M3, 64 bfloat16
    slots:   (rows,) int64, page * entries_per_page + entry; -1: skipped
    pages:   (pages, bytes) uint8; pages may lie apart. A page has the records of its entries, 576
             bytes each, then 8 bytes of each: E8M0 scales of 64 numbers and a zero
    Mutates pages. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    Source: vLLM 0.32, models/deepseek_v4; sglang 0.5.23, DeepSeekV4SingleKVPool
    """
    arrays, desc = _pages(entries, "entries", slots, pages, entries_per_page)
    arrays.call(abi_hybrid.functions().kvx_hybrid_write_pages, desc)


def read_v4_page(pages: Tensor, slots: Tensor, out: Tensor, *, entries_per_page: int) -> None:
    """Reads the values of records. Arguments as for `write_v4_page`; out is (rows, 512).

    Rows whose slot is -1 are left as they are.
    Mutates out. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    arrays, desc = _pages(out, "out", slots, pages, entries_per_page)
    arrays.call(abi_hybrid.functions().kvx_hybrid_read_pages, desc)


def _pages(
    entries: Tensor, name: str, slots: Tensor, pages: Tensor, entries_per_page: int
) -> tuple[Arrays, abi_hybrid.kvx_hybrid_pages_t]:
    arrays = Arrays(name, entries)
    rows = extents(name, entries, 2)[0]
    num_pages, page_bytes = extents("pages", pages, 2)
    per_page = integer("entries_per_page", entries_per_page, 1, 1 << 20)
    if page_bytes < 584 * per_page:
        raise InvalidArgumentError(
            f"pages.shape[1] is {page_bytes}, expected at least {584 * per_page}: 584 bytes for "
            f"each of the {per_page} entries (spec E.22)"
        )
    desc = abi_hybrid.kvx_hybrid_pages_t(
        memory=arrays.memory,
        num_rows=rows,
        num_pages=num_pages,
        entries_per_page=per_page,
        page_stride=pages.stride(0) if num_pages > 1 else 584 * per_page,
        slots=arrays.take("slots", slots, ("int64",), rows),
        rows=arrays.take(name, entries, FLOATS, rows, PAGE_DIM),
        pages=arrays.take("pages", pages, ("uint8",), num_pages, page_bytes, strided_rows=True),
        dtype=dtype_of(entries),
    )
    return arrays, desc
