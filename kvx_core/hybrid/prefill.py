"""Many tokens of a request at once: all entries that they complete, without a step for each.

The same entries, bit for bit, as token by token. Not for captured graphs: the host knows how many
entries each request completes, and tensors are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvx_core.hybrid import ops
from kvx_core.hybrid.compressor import Compressor
from kvx_core.hybrid.handle import LayerCacheHandle
from kvx_core.hybrid.schema import AttentionType
from kvx_core.hybrid.state_cache import Tails


class Stream(NamedTuple):
    """What one compressor of a layer makes entries of: all tokens of the step."""

    tails: Tails
    k: Tensor  # (tokens, row) values
    z: Tensor  # (tokens, row) scores
    compressor: Compressor


def prefill(handle: LayerCacheHandle, streams: Sequence[Stream]) -> None:
    """Takes the step's tokens into the tails and blocks of a layer.

    streams: of the entries and, for CSA, of the indexer keys
    Mutates the pool and the tails of the step's requests.
    """
    first = 0
    ratio = handle.schema.compression_ratio
    for slot, before, after in handle.step.spans:
        last = first + after - before
        made = [_entries(handle, stream, slot, before, first, last) for stream in streams]
        if after // ratio > before // ratio:
            _write(handle, slot, before // ratio, made)
        first = last


def _entries(
    handle: LayerCacheHandle, stream: Stream, slot: int, before: int, first: int, last: int
) -> Tensor:
    """The entries of one request, (entries, dim), and what is left in its tails.

    before: tokens of the request before the step; first, last: those of the step
    """
    weights, ratio = stream.compressor, stream.tails.ratio
    ka, za, kb, zb, tail_len = stream.tails
    waiting = before % ratio
    k = torch.cat((ka[slot, :waiting], stream.k[first:last].to(ka.dtype)))
    z = torch.cat((za[slot, :waiting], stream.z[first:last].to(za.dtype)))
    count = len(k) // ratio
    whole, dim = count * ratio, len(weights.norm_weight)
    out = torch.empty(count, dim, dtype=handle.entry.dtype, device=ka.device)
    if count:
        start = before - waiting
        ops.compress_bulk(
            k=k[:whole],
            z=z[:whole],
            ape_a=weights.ape_a,
            ape_b=weights.ape_b,
            norm_weight=weights.norm_weight,
            eps=weights.eps,
            cos_sin=weights.cos_sin,
            positions=torch.arange(
                start, start + whole, ratio, dtype=torch.int32, device=ka.device
            ),
            out=out,
            kb=None if kb is None else kb[slot],
            zb=None if zb is None else zb[slot],
            overlap=kb is not None,
            row=handle.state.tail_row_width,
        )
        if kb is not None and zb is not None:
            kb[slot], zb[slot] = k[whole - ratio : whole], z[whole - ratio : whole]
        ka[slot].fill_(0)
        za[slot].fill_(0)
    rest = len(k) - whole
    ka[slot, :rest], za[slot, :rest] = k[whole:], z[whole:]
    tail_len[slot].fill_(rest)
    return out


def _write(handle: LayerCacheHandle, slot: int, first: int, made: Sequence[Tensor]) -> None:
    """Writes entries `first` and those after it into the blocks of a slot."""
    view = handle.read_classical_view()
    per_block = handle.schema.entries_per_block
    numbers = torch.arange(first, first + len(made[0]), device=made[0].device)
    # A row's table has only the block of its entry.
    blocks = view.block_table[slot][numbers // per_block].unsqueeze(1)
    ids = (numbers % per_block).to(torch.int32)
    if handle.schema.attn_type is AttentionType.CSA:
        keys = handle.read_indexer_view()
        ops.flush_write_csa(
            entry=made[0],
            index_key=made[1],
            slots=None,
            entry_ids=ids,
            mask=None,
            block_table=blocks,
            entries_fp8=view.entries_fp8,
            entries_rope=view.entries_rope,
            inv_scale=view.inv_scale,
            indexer_keys=keys.keys,
            indexer_scales=keys.scales,
            keys=keys.form,
            rounding=keys.rounding,
        )
    else:
        ops.flush_write_hca(
            entry=made[0],
            slots=None,
            entry_ids=ids,
            mask=None,
            block_table=blocks,
            entries_fp8=view.entries_fp8,
            entries_rope=view.entries_rope,
            inv_scale=view.inv_scale,
        )
