"""Slots, block tables and lengths of vLLM, which say where the tokens of requests lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx_core import BlockTable, InvalidArgumentError, SeqLens, SlotMapping

# vLLM reserves this block: in a block table it means "no block".
# Source: vllm 0.32 v1/core/block_pool.py, BlockPool.null_block
NULL_BLOCK_ID = 0


def slot_mapping(slots: Tensor) -> SlotMapping:
    """The slot of each new token; negative slots (padding, tokens of another rank) are skipped.

    slots: (num_tokens,), int64, as in CommonAttentionMetadata.slot_mapping
    Source: vllm 0.32 v1/worker/block_table.py, PAD_SLOT_ID
    """
    return SlotMapping.of(slots, invalid_slot=-1)


def block_table(
    table: Tensor | Sequence[Sequence[int]],
    *,
    kernel_blocks_per_block: int = 1,
    kernel_ids: bool = False,
) -> BlockTable:
    """The blocks of each request, as ids into the cache that `cache_desc` described.

    table: (num_reqs, max_num_blocks), int32: the model runner's, or the scheduler's ids, one list
           per request; or the table of attention metadata
    kernel_blocks_per_block: kv_cache.shape[0] / num_blocks: kernel blocks into which vLLM splits a
           block. A tensor is copied unless it is 1
    kernel_ids: the ids count kernel blocks, as in attention metadata; False: they count blocks
    All kernel blocks of the null block become the null block. Of a window the first blocks are
    null: take `with_holes()`, or begin at the first token that lives (`starts` of CacheView.at).
    Raises InvalidArgumentError.
    Source: vllm 0.32 v1/worker/utils.py, AttentionGroup.map_to_kernel_block_table
    """
    n = kernel_blocks_per_block
    if n < 1:
        raise InvalidArgumentError(f"kernel_blocks_per_block is {n}, expected at least 1")
    if n == 1:
        return BlockTable.packed(table)
    if not isinstance(table, Tensor):
        rows = [torch.tensor(row, dtype=torch.int32) for row in table]
        table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    if not kernel_ids:
        within = torch.arange(n, dtype=table.dtype, device=table.device)
        table = (table[..., None] * n + within).flatten(1)
    null = (table >= NULL_BLOCK_ID) & (table < NULL_BLOCK_ID + n)
    return BlockTable.packed(table.masked_fill(null, NULL_BLOCK_ID))


def seq_lens(lengths: Tensor | Sequence[int]) -> SeqLens:
    """Cached tokens of each request: (num_reqs,), int32 or int64, or a list."""
    return SeqLens.of(lengths)
