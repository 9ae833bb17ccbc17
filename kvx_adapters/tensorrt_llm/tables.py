"""Reads and makes TensorRT-LLM's block tables and ids, which say where sequences lie in a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvx_adapters.tensorrt_llm.index import NULL_INDEX, UNSET, PoolIndex, encode
from kvx_adapters.tensorrt_llm.spec import PoolSpec
from kvx_core import (
    BlockTable,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    OutOfRangeError,
    SeqLens,
    UnsupportedError,
)


def block_table(
    kv_cache_block_offsets: Tensor,
    pool_idx: int,
    *,
    rows: slice | None = None,
    beam_width: int = 1,
) -> BlockTable:
    """The blocks of sequences in one pool, zero-copy.

    kv_cache_block_offsets: (num_pools, max_batch_size * max_beam_width, 2, max_blocks_per_seq),
              int32, contiguous; or a request's own, whose rows are its beams
    pool_idx: layer_to_pool_mapping[layer, 0]
    rows:     which of them; None: all. A batch has one row for each context request, and after
              them beam_width rows for each generation request
    Use it only with the view of that pool. Entries past a sequence's blocks and before `starts` are
    stale, and not read. host_kv_cache_block_offsets of KVCacheManagerV2 is another table: its
    [pool_idx, :, 0] are slots, for `id_table`.
    Raises InvalidArgumentError.
    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/thop/attentionOp.cpp, block_offsets;
    _torch/pyexecutor/resource_manager.py, KVCacheManager.copy_batch_block_offsets
    """
    table = kv_cache_block_offsets
    if table.ndim != 4 or table.shape[2] != 2 or table.dtype != torch.int32:
        raise InvalidArgumentError(
            f"kv_cache_block_offsets is {tuple(table.shape)} of {table.dtype}, expected "
            "(num_pools, rows, 2, max_blocks_per_seq) of torch.int32"
        )
    if not 0 <= pool_idx < table.shape[0]:
        raise InvalidArgumentError(
            f"pool_idx is {pool_idx}, expected one of the {table.shape[0]} pools of "
            "kv_cache_block_offsets"
        )
    chosen = table[pool_idx] if rows is None else table[pool_idx, rows]
    if beam_width < 1 or chosen.shape[0] % beam_width:
        raise InvalidArgumentError(
            f"beam_width is {beam_width}, expected a divisor of the {chosen.shape[0]} rows"
        )
    if not chosen.is_contiguous():
        raise InvalidArgumentError(
            f"the rows of kv_cache_block_offsets[{pool_idx}] have strides {chosen.stride()}, "
            "expected contiguous. Pass the whole table, and rows without a step"
        )
    num_seqs = len(chosen) // beam_width
    return BlockTable.kv_offsets(chosen.view(num_seqs, beam_width, *chosen.shape[1:]))


def block_offsets(
    blocks: Sequence[Sequence[PoolIndex | int | None]],
    spec: PoolSpec,
    *,
    max_blocks_per_seq: int,
    beam_width: int = 1,
) -> Tensor:
    """Makes a table, on the CPU, of sequences whose blocks the caller has chosen.

    blocks: per row (the beams of a sequence one after the other) its blocks by their memory index,
            which differs from the block id after offloading. int: in the primary pool; None: no
            block
    Returns (num_seqs, beam_width, 2, max_blocks_per_seq), int32, for BlockTable.kv_offsets; flatten
    the first two axes for rows of kv_cache_block_offsets[pool_idx].
    Raises InvalidArgumentError, OutOfRangeError.
    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp,
    WindowBlockManager::setOffsets
    """
    if beam_width < 1 or len(blocks) % beam_width:
        raise InvalidArgumentError(
            f"beam_width is {beam_width}, expected a divisor of the {len(blocks)} rows of blocks"
        )
    table = torch.full((len(blocks), 2, max_blocks_per_seq), UNSET, dtype=torch.int32)
    for r, row in enumerate(blocks):
        if len(row) > max_blocks_per_seq:
            raise InvalidArgumentError(
                f"blocks[{r}] has {len(row)} blocks, expected at most max_blocks_per_seq "
                f"{max_blocks_per_seq}"
            )
        for kv in (0, 1):
            # Without V, the row of V repeats that of K.
            field = kv if spec.kv_factor == 2 else 0
            entries = [
                encode(_sub_block(f"blocks[{r}][{column}]", block, spec, field))
                for column, block in enumerate(row)
            ]
            table[r, kv, : len(row)] = torch.tensor(entries, dtype=torch.int32)
    return table.view(len(blocks) // beam_width, beam_width, 2, max_blocks_per_seq)


def id_table(block_ids: Tensor | Sequence[Sequence[int]], spec: PoolSpec) -> BlockTable:
    """The blocks of sequences by ids, as TensorRT-LLM's connectors and managers give them.

    block_ids: one list per sequence, or (num_seqs, max_blocks), int32: get_cache_block_ids,
               get_batch_cache_indices of KVCacheManager, or slots of KVCacheManagerV2
               (get_aggregated_page_indices); negative: no block
    Raises UnsupportedError if there is a secondary pool: offloading swaps the memory of blocks, so
    that ids no longer say where blocks are.
    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp,
    WindowBlockManager::getFreeBlock (swapMemoryPoolBlockOffset)
    """
    if spec.num_secondary_blocks:
        raise UnsupportedError(
            f"num_secondary_blocks is {spec.num_secondary_blocks}, expected 0 for block ids: once "
            "blocks were offloaded, an id is not a place in memory. Use block_table"
        )
    return BlockTable.packed(block_ids)


def page_table(pages: Sequence[Sequence[int]], spec: PoolSpec) -> BlockTable:
    """The blocks of sequences by pages of KVCacheManagerV2, which count each layer's K and V.

    pages: one list per sequence, as KVCacheManagerV2.get_batch_cache_indices gives them: slot *
           index_scale / kv_factor, the first axis of its get_buffers; -1: no block
    A manager whose slots hold other buffers too may give slots instead (MiniMax-M3's): `id_table`.
    Raises InvalidArgumentError for other numbers.
    Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/kv_cache/kv_cache_manager_v2.py,
    KVCacheManagerV2._get_batch_cache_indices_by_pool_id
    """
    scale = spec.sub_blocks_per_block
    for r, row in enumerate(pages):
        for column, page in enumerate(row):
            if page != NULL_INDEX and (page < 0 or page * spec.kv_factor % scale):
                raise InvalidArgumentError(
                    f"pages[{r}][{column}] is {page}, expected -1 or a multiple of "
                    f"{scale} / {spec.kv_factor}, pages of one slot. Give block ids to id_table"
                )
    return BlockTable.packed(
        [
            [page if page == NULL_INDEX else page * spec.kv_factor // scale for page in row]
            for row in pages
        ]
    )


def span(
    view: CacheView,
    table: BlockTable,
    lengths: Callable[[], Tensor | Sequence[int]],
    *,
    window: int = 0,
) -> CacheSpan:
    """Sequences of one pool: one end of a migration of `seq_lens(lengths(), window)` tokens.

    view:    of the pool, see `cache_view`
    table:   of this pool: `block_table`, `id_table` or `page_table`
    lengths: returns (num_seqs,), the tokens in the cache now. It is asked at each use, and more are
             refused. A block has room behind them; the last sampled token is not in the cache yet
    window:  PoolSpec.window
    Raises InvalidArgumentError.
    """
    held = replace(view, holds=partial(_held, lengths))
    return held.at(table, starts=starts(lengths(), window) if window else None)


def _held(lengths: Callable[[], Tensor | Sequence[int]]) -> list[int]:
    return [int(length) for length in _tensor(lengths())]


def seq_lens(lengths: Tensor | Sequence[int], window: int = 0) -> SeqLens:
    """The tokens of each sequence that its pool must hold: those that the next token attends to.

    lengths: (num_seqs,), int32 or int64, or a list: tokens in the cache
    window:  PoolSpec.window; 0: full attention. It counts the next token too
    """
    if window == 0:
        return SeqLens.of(lengths)
    return SeqLens.of(_tensor(lengths).clamp(max=window - 1))


def starts(lengths: Tensor | Sequence[int], window: int = 0) -> SeqLens:
    """The first token of each sequence that its pool must hold: `starts` of CacheView.at.

    lengths, window: as in `seq_lens`. TensorRT-LLM frees the blocks before it but leaves their
    entries in the table: another sequence may own them now.
    Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp,
    WindowBlockManager::adjustBlocksIfNeeded; runtime/kv_cache_manager_v2/_life_cycle_registry.py,
    AttnLifeCycle.get_stale_range
    """
    if window == 0:
        return SeqLens.of(torch.zeros_like(_tensor(lengths)))
    return SeqLens.of((_tensor(lengths) + 1 - window).clamp(min=0))


def _tensor(lengths: Tensor | Sequence[int]) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)


def _sub_block(
    name: str, block: PoolIndex | int | None, spec: PoolSpec, field: int
) -> PoolIndex | None:
    if block is None:
        return None
    place = block if isinstance(block, PoolIndex) else PoolIndex(block)
    pool = "secondary" if place.is_secondary else "primary"
    num_blocks = spec.num_secondary_blocks if place.is_secondary else spec.num_blocks
    if not 0 <= place.index < num_blocks:
        raise OutOfRangeError(
            f"{name} is {place.index} in the {pool} pool, expected one of its {num_blocks} blocks"
        )
    return replace(place, index=place.index * spec.sub_blocks_per_block + field)
