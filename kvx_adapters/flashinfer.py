"""FlashInfer's paged KV cache and page tables as KVX descriptors. Imports no flashinfer.

FlashInfer names the pages of a batch in compressed rows: the pages of request i are
kv_indices[kv_indptr[i] : kv_indptr[i + 1]], and the last of them holds kv_last_page_len[i] tokens.
A RAGGED table of KVX looks alike and means something else, a block for every token. libkvx refuses
pages given as such a table, since it has too few entries for the tokens: `block_table` converts
them.
Source: flashinfer 0.7 page.py, append_paged_kv_cache, get_seq_lens; utils.py,
        _unpack_paged_kv_cache
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import kvx_core.needs_torch  # noqa: F401

# isort: split
import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Layout,
    SeqLens,
    describe,
)
from kvx_core.argument_checks import integer

_LAYOUTS = {"NHD": Layout.BLOCK_NHD, "HND": Layout.BLOCK_HND}


def cache_desc(paged_kv_cache: Tensor | tuple[Tensor, Tensor], kv_layout: str) -> CacheDesc:
    """One layer's cache, zero-copy.

    paged_kv_cache: (num_pages, 2, page_size, num_kv_heads, head_dim) with kv_layout "NHD",
                    (num_pages, 2, num_kv_heads, page_size, head_dim) with "HND"; or a tuple of K
                    and V without the axis of 2
    kv_layout:      as the wrapper was made with
    Raises InvalidArgumentError, UnsupportedError.
    """
    layout = _LAYOUTS.get(kv_layout) if isinstance(kv_layout, str) else None
    if layout is None:
        raise InvalidArgumentError(f"kv_layout is {kv_layout!r}, expected 'NHD' or 'HND'")
    if isinstance(paged_kv_cache, tuple):
        key, value = paged_kv_cache
    elif paged_kv_cache.ndim == 5 and paged_kv_cache.shape[1] == 2:
        key, value = paged_kv_cache.unbind(1)
    else:
        raise InvalidArgumentError(
            f"paged_kv_cache has the shape {tuple(paged_kv_cache.shape)}, expected five axes, the "
            "second of 2, or a tuple of K and V"
        )
    return CacheDesc.from_kv(
        describe(key, layout, name="paged_kv_cache K"),
        describe(value, layout, name="paged_kv_cache V"),
    )


def cache_view(
    caches: Sequence[Tensor | tuple[Tensor, Tensor]], facts: CacheFacts, kv_layout: str
) -> CacheView:
    """All layers, zero-copy.

    caches, kv_layout: as `cache_desc` takes them, one cache per layer
    facts:             of the engine that calls FlashInfer, which rotates and scales
    Raises InvalidArgumentError, UnsupportedError.
    """
    return CacheView(tuple(cache_desc(cache, kv_layout) for cache in caches), facts)


def span(
    view: CacheView, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
) -> CacheSpan:
    """The requests of a page table, whole: one end of a migration of `seq_lens` tokens.

    view:             see `cache_view`
    The other arguments: as in `block_table` and `seq_lens`
    At each use more tokens than the last pages hold are refused, and a table that was written anew.
    Reads the tables back from a device, at each use too. Raises InvalidArgumentError.
    """
    tables = {
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_len": kv_last_page_len,
    }
    then = {name: tensor.clone() for name, tensor in tables.items()}
    page_size = view.layers[0].block_size
    seq_lens(kv_indptr, kv_last_page_len, page_size)
    held = replace(
        view,
        outdated=partial(_rewritten, view, tables, then),
        holds=partial(_held, kv_indptr, kv_last_page_len, page_size),
    )
    return held.at(block_table(kv_indptr, kv_indices))


def _rewritten(view: CacheView, now: dict[str, Tensor], then: dict[str, Tensor]) -> str | None:
    """Why requests lie no longer where they did; None if they do."""
    gone = None if view.outdated is None else view.outdated()
    if gone is not None:
        return gone
    for name, tensor in now.items():
        if not torch.equal(tensor, then[name]):
            return f"{name} was written since, expected as when the span was made. Make a new span"
    return None


def _held(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> list[int]:
    return [int(n) for n in seq_lens(kv_indptr, kv_last_page_len, page_size).to_numpy()]


def block_table(kv_indptr: Tensor, kv_indices: Tensor) -> BlockTable:
    """A PACKED table of the same pages, a copy on the same device.

    kv_indptr:  (batch + 1,), int32 or int64, running page counts
    kv_indices: (at least kv_indptr[-1],), int32 or int64, page ids; what follows is not read
    Reads kv_indptr back from a device. Raises InvalidArgumentError.
    """
    counts = _page_counts(kv_indptr)
    ids = _indices("kv_indices", kv_indices)
    total = int(counts.sum())
    if total > len(ids):
        raise InvalidArgumentError(
            f"kv_indptr[{len(counts)}] is {total}, expected at most {len(ids)}, the entries of "
            "kv_indices"
        )
    width = int(counts.max()) if len(counts) else 0
    shape = len(counts), max(width, 1)  # at least a column (spec 7.1), here of ids that no pool has
    none = -1 if width else torch.iinfo(ids.dtype).max
    table = torch.full(shape, none, dtype=ids.dtype, device=ids.device)
    held = torch.arange(table.shape[1])[None] < counts[:, None]
    table[held.to(ids.device)] = ids[:total]
    return BlockTable.packed(table)


def seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> SeqLens:
    """The tokens of each request, in host memory.

    kv_indptr:        as in `block_table`
    kv_last_page_len: (batch,), tokens in the last page: 1 to page_size, 0 for a request without
                      pages
    Raises InvalidArgumentError.
    """
    size = integer("page_size", page_size, 1)
    counts = _page_counts(kv_indptr)
    last = _indices("kv_last_page_len", kv_last_page_len).cpu().long()
    if len(last) != len(counts):
        raise InvalidArgumentError(
            f"kv_last_page_len has {len(last)} entries, expected {len(counts)}, one fewer than "
            "kv_indptr"
        )
    wrong = ((last < 1) | (last > size)).where(counts > 0, last != 0).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise InvalidArgumentError(
            f"kv_last_page_len[{i}] is {int(last[i])}, expected "
            + (f"1 to page_size, {size}" if counts[i] > 0 else "0: the request has no pages")
        )
    return SeqLens.of((counts - 1).clamp(min=0) * size + last)


def page_table(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """kv_indptr, kv_indices and kv_last_page_len of sequences, int32 in host memory: what a wrapper
    plans with.

    rows:    the pages of each sequence; those past its length are left out
    lengths: its tokens
    Raises InvalidArgumentError.
    """
    size = integer("page_size", page_size, 1)
    if len(rows) != len(lengths):
        raise InvalidArgumentError(
            f"lengths has {len(lengths)} entries, expected {len(rows)}, one per row"
        )
    indptr, indices, last = [0], list[int](), list[int]()
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        count = -(-integer(f"lengths[{i}]", length) // size)
        if count > len(row):
            raise InvalidArgumentError(
                f"rows[{i}] has {len(row)} pages, expected {count} for its {length} tokens"
            )
        indices += row[:count]
        indptr.append(len(indices))
        last.append(length - (count - 1) * size if count else 0)
    first, second, third = (torch.tensor(x, dtype=torch.int32) for x in (indptr, indices, last))
    return first, second, third


def _page_counts(kv_indptr: Tensor) -> Tensor:
    """Pages of each request: (batch,) int64 on the host."""
    ends = _indices("kv_indptr", kv_indptr).cpu().long()
    if len(ends) == 0 or int(ends[0]) != 0:
        raise InvalidArgumentError(
            f"kv_indptr begins with {ends[:1].tolist()}, expected 0: running counts of all requests"
        )
    counts = ends.diff()
    if (counts < 0).any():
        i = int((counts < 0).nonzero()[0])
        raise InvalidArgumentError(
            f"kv_indptr[{i + 1}] is {int(ends[i + 1])}, expected at least kv_indptr[{i}], "
            f"{int(ends[i])}"
        )
    return counts


def _indices(name: str, tensor: Tensor) -> Tensor:
    if tensor.ndim != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(
            f"{name} is {tensor.dtype} with the shape {tuple(tensor.shape)}, expected one axis of "
            "int32 or int64"
        )
    return tensor
