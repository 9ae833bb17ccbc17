"""kvx_adapters.flashinfer: page tables as FlashInfer means them, restated in torch.

FlashInfer runs on CUDA only, so that its indexing is written out here, from page.py of 0.7.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import flashinfer as fi
from kvx_core import (
    BlockTable,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    KvxError,
    OutOfRangeError,
    describe,
    migrate,
)
from kvx_core.desc.cache import CacheDesc

HEADS, DIM, PAGE = 2, 16, 4
INDPTR = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
INDICES = torch.tensor([7, 0, 5, 3, 9, 1, 99, -4], dtype=torch.int32)  # two that are not used
LAST = torch.tensor([2, 0, 4, 1], dtype=torch.int32)
LENGTHS = [10, 0, 4, 5]
FACTS = CacheFacts(fingerprint="f", rotary="half", rotary_dim=DIM, rope_applied=True)


def pool(kv_layout: str) -> Tensor:
    """(num_pages, 2, ..) in which every number differs."""
    inner = (PAGE, HEADS, DIM) if kv_layout == "NHD" else (HEADS, PAGE, DIM)
    return torch.arange(10 * 2 * PAGE * HEADS * DIM, dtype=torch.float32).view(10, 2, *inner)


def token(cache: Tensor, kv_layout: str, request: int, position: int) -> Tensor:
    """K and V of a token by FlashInfer's own rule: (2, heads, dim)."""
    page = int(INDICES[INDPTR[request] + position // PAGE])
    found = cache[page]
    return found[:, position % PAGE] if kv_layout == "NHD" else found[:, :, position % PAGE]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("apart", [False, True])
def test_tokens_are_where_flashinfer_has_them(kv_layout: str, apart: bool) -> None:
    cache = pool(kv_layout)
    layer = (cache[:, 0].clone(), cache[:, 1].clone()) if apart else cache
    view = fi.cache_view([layer], FACTS, kv_layout)
    table = fi.block_table(INDPTR, INDICES)
    lengths = fi.seq_lens(INDPTR, LAST, PAGE)
    assert lengths.to_numpy().tolist() == LENGTHS
    out = torch.zeros(2, 4, max(LENGTHS), HEADS, DIM)
    dense = CacheDesc.from_kv(*(describe(x, "BLOCK_NHD") for x in out))
    migrate(view.at(table), CacheView((dense,), FACTS, dense=True), lengths)
    for request, length in enumerate(LENGTHS):
        for position in range(length):
            wanted = token(cache, kv_layout, request, position)
            assert torch.equal(out[:, request, position], wanted)
        assert not out[:, request, length:].any()


def test_there_and_back() -> None:
    rows = [[7, 0, 5], [2], [3], [9, 1, 8]]
    indptr, indices, last = fi.page_table(rows, LENGTHS, PAGE)
    assert torch.equal(indptr, INDPTR)
    assert torch.equal(indices, INDICES[:6])
    assert torch.equal(last, LAST)
    assert fi.seq_lens(indptr, last, PAGE).to_numpy().tolist() == LENGTHS
    empty = fi.page_table([], [], PAGE)
    assert fi.block_table(*empty[:2]).seq_count == 0
    one_each = fi.block_table(*fi.page_table([[4], [2]], [1, 3], PAGE)[:2])
    assert one_each.max_blocks_per_seq == 1
    assert fi.seq_lens(empty[0], empty[2], PAGE).to_numpy().tolist() == []


def test_tokens_of_requests_without_pages_are_not_passed_over() -> None:
    """As null blocks, which restores and loads pass over, and tables with holes."""
    table = fi.block_table(ints(0, 0), INDICES).with_holes()
    layer = CacheDesc.from_kv(*(describe(t, "BLOCK_NHD") for t in torch.ones(2, 10, PAGE, 1, 4)))
    view = CacheView((layer,), CacheFacts())
    migrate(view.at([[1]]), view.at(table), [0], same_model=True)
    with pytest.raises(OutOfRangeError, match="expected below num_blocks 10"):
        migrate(view.at([[1]]), view.at(table), [1], same_model=True)


@pytest.mark.parametrize("exact", [True, False])
def test_pages_taken_for_a_ragged_table_are_refused(exact: bool) -> None:
    """It has an entry per token, and these have one per page."""
    cache = pool("NHD")
    view = fi.cache_view([cache], FACTS, "NHD")
    out = torch.full((2, 4, max(LENGTHS), HEADS, DIM), 7.0)
    dense = CacheDesc.from_kv(*(describe(x, "BLOCK_NHD") for x in out))
    ragged = BlockTable.ragged(INDICES[:6], INDPTR, exact=exact)
    with pytest.raises(KvxError, match=r"row 0 (has 3 entries|needs tokens).*RAGGED"):
        migrate(view.at(ragged), CacheView((dense,), FACTS, dense=True), LENGTHS)
    assert (out == 7).all()


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: fi.block_table(ints(0, 3, 2), INDICES), "kv_indptr[2] is 2, expected at l"),
        (lambda: fi.block_table(ints(0, 0, 2, 1), INDICES), "kv_indptr[3] is 1, expected at l"),
        (lambda: fi.block_table(ints(1, 3), INDICES), "kv_indptr begins with [1], expected"),
        (lambda: fi.block_table(ints(), INDICES), "kv_indptr begins with [], expected 0"),
        (lambda: fi.block_table(ints(0, 9), INDICES), "kv_indptr[1] is 9, expected at most"),
        (lambda: fi.block_table(INDPTR, INDICES.float()), "kv_indices is torch.float32 wi"),
        (lambda: fi.block_table(INDPTR[None], INDICES), "kv_indptr is torch.int32 with the"),
        (lambda: fi.seq_lens(INDPTR, LAST[:3], 4), "kv_last_page_len has 3 entries, expec"),
        (lambda: fi.seq_lens(INDPTR, LAST, 3), "kv_last_page_len[2] is 4, expected 1 to p"),
        (lambda: fi.seq_lens(INDPTR, ints(2, 1, 4, 1), 4), "kv_last_page_len[1] is 1, exp"),
        (lambda: fi.seq_lens(INDPTR, ints(0, 0, 4, 1), 4), "kv_last_page_len[0] is 0, exp"),
        (lambda: fi.seq_lens(INDPTR, LAST, 0), "page_size is 0, expected 1 to"),
        (lambda: fi.page_table([[1]], [5], 4), "rows[0] has 1 pages, expected 2 for its 5"),
        (lambda: fi.page_table([[1]], [], 4), "lengths has 0 entries, expected 1, one per"),
        (lambda: fi.cache_desc(pool("NHD"), "TRT"), "kv_layout is 'TRT', expected 'NHD' or"),
        (lambda: fi.cache_desc(pool("NHD"), ["NHD"]), "kv_layout is ['NHD'], expected 'NHD' or"),
        (lambda: fi.cache_desc(pool("NHD")[:, 0], "NHD"), "paged_kv_cache has the shape (1"),
        (lambda: fi.cache_desc(torch.zeros(3, 1, 4, 2, 8), "NHD"), "has the shape (3, 1, 4, 2, 8)"),
        (lambda: fi.cache_desc(torch.zeros(3, 2, 4, 8), "NHD"), "has the shape (3, 2, 4, 8), exp"),
        (lambda: fi.cache_desc(torch.zeros(3, 3, 4, 2, 8), "NHD"), "has the shape (3, 3, 4, 2, 8)"),
    ],
)  # fmt: skip
def test_refusals(call: Any, error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(error)):
        call()


# ---- spans: FlashInfer's own counts ----


def spans() -> tuple[CacheView, dict[str, Tensor], CacheView]:
    """A pool, its page table, and a dense end with room for more."""
    view = fi.cache_view([pool("NHD")], FACTS, "NHD")
    tables = {"kv_indptr": INDPTR, "kv_indices": INDICES, "kv_last_page_len": LAST}
    out = torch.zeros(2, 4, 12, HEADS, DIM)
    dense = CacheDesc.from_kv(*(describe(x, "BLOCK_NHD") for x in out))
    return view, {k: t.clone() for k, t in tables.items()}, CacheView((dense,), FACTS, dense=True)


def test_a_span_holds_what_the_last_pages_hold() -> None:
    """Pages have room for 12, 0, 4 and 8 tokens, and hold 10, 0, 4 and 5."""
    view, tables, dense = spans()
    span = fi.span(view, **tables)
    migrate(span, dense, LENGTHS)
    owner = dense.layers[0].k.owner
    assert torch.equal(owner[3, 4], token(pool("NHD"), "NHD", 3, 4)[0])
    for i, more in ((0, [11, 0, 4, 5]), (1, [10, 1, 4, 5]), (2, [10, 0, 5, 5]), (3, [10, 0, 4, 6])):
        error = f"holds {LENGTHS[i]} tokens? of sequence {i} by its engine's own count"
        for ends in ((span, dense), (dense, span)):
            with pytest.raises(OutOfRangeError, match=error):
                migrate(*ends, more)


@pytest.mark.parametrize(
    ("name", "at", "number"),
    [("kv_indptr", 3, 3), ("kv_indices", 0, 2), ("kv_last_page_len", 0, 3)],
)
def test_a_span_is_refused_once_its_table_is_written(name: str, at: int, number: int) -> None:
    """A wrapper's tables are buffers that the next plan writes."""
    view, tables, dense = spans()
    span = fi.span(view, **tables)
    tables[name][at] = number
    with pytest.raises(InvalidArgumentError, match=f"out of date: {name} was written since"):
        migrate(span, dense, LENGTHS)
    gone = replace(view, outdated=lambda: "the pool is gone")
    with pytest.raises(InvalidArgumentError, match="out of date: the pool is gone"):
        migrate(fi.span(gone, **spans()[1]), dense, LENGTHS)


def test_a_span_checks_its_table() -> None:
    view, tables, _ = spans()
    tables["kv_last_page_len"][2] = 9
    with pytest.raises(
        InvalidArgumentError, match=r"page_len\[2\] is 9, expected 1 to page_size, 4"
    ):
        fi.span(view, **tables)
