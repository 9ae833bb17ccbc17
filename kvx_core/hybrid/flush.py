"""Tokens to compressed entries: they wait in a tail until an entry is complete.

Every call runs its kernels whether or not an entry is complete: masks on the device say which
requests they are for, so that a captured graph does the right thing at every replay.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid._kernels import kernels
from kvx_core.hybrid.forward_step import Flush
from kvx_core.hybrid.handle import LayerCacheHandle
from kvx_core.hybrid.schema import AttentionType


@dataclass(frozen=True, slots=True)
class Compressor:
    """The weights that turn the tokens of an entry into the entry; dim numbers, ratio tokens.

    Source: arXiv 2606.19348, eq. 11, 12, 22, 23
    """

    ape_a: Tensor  # (ratio, dim) float32, added to the scores of the entry's tokens
    ape_b: Tensor | None  # the same for the tokens of the entry before; None for HCA
    norm_weight: Tensor  # (dim,) float32, of the RMSNorm
    cos_sin: Tensor  # (positions, rope_dim) float32, cosines and then sines
    eps: float = 1e-6  # of the RMSNorm


def maybe_flush_csa(
    handle: LayerCacheHandle,
    compressor: Compressor,
    indexer: Compressor,
    flush: Flush | None = None,
) -> None:
    """Writes the entries and indexer keys that are complete, and makes room in their tails.

    handle:     of a CSA layer, whose tails have the tokens up to the end of each entry
    compressor: of the entries
    indexer:    of the indexer keys
    flush:      which requests; None: those of the step, which then completes at most one entry of
                each request
    Per request whose mask is set: compressor, entry and key into the block, tails rotated (b is
    what a was, a is empty). Mutates the pool, the tails and their lengths; nothing of others.
    Graph-capture safe: no branch on data, no allocation.
    Raises InvalidArgumentError.
    """
    _require(handle, AttentionType.CSA)
    state, view, keys = handle.state, handle.read_classical_view(), handle.read_indexer_view()
    slots, at = handle.step.all_slots, flush or one_flush(handle)
    _compress(handle, compressor, "", at, handle.entry)
    _compress(handle, indexer, "idx_", at, handle.index_key)
    kernels().flush_write_csa(
        handle.entry,
        handle.index_key,
        slots,
        at.entry_ids,
        at.mask,
        view.block_table,
        view.entries_fp8,
        view.entries_rope,
        view.inv_scale,
        keys.keys_fp4,
        keys.scales,
    )
    for ka, za, kb, zb, tail_len in (
        (state.ka, state.za, state.kb, state.zb, state.tail_len),
        (state.idx_ka, state.idx_za, state.idx_kb, state.idx_zb, state.idx_tail_len),
    ):
        kernels().csa_rotate_state(slots, at.mask, ka, za, kb, zb, tail_len)


def maybe_flush_hca(
    handle: LayerCacheHandle, compressor: Compressor, flush: Flush | None = None
) -> None:
    """The same for an HCA layer, which has no indexer, and whose tails are emptied.

    Raises InvalidArgumentError.
    """
    _require(handle, AttentionType.HCA)
    state, view = handle.state, handle.read_classical_view()
    slots, at = handle.step.all_slots, flush or one_flush(handle)
    _compress(handle, compressor, "", at, handle.entry)
    kernels().flush_write_hca(
        handle.entry,
        slots,
        at.entry_ids,
        at.mask,
        view.block_table,
        view.entries_fp8,
        view.entries_rope,
        view.inv_scale,
    )
    kernels().hca_reset_state(slots, at.mask, state.ka, state.za, state.tail_len)


def compress_csa(
    handle: LayerCacheHandle,
    k: Tensor,
    z: Tensor,
    index_k: Tensor,
    index_z: Tensor,
    compressor: Compressor,
    indexer: Compressor,
) -> None:
    """Takes the step's tokens into a CSA layer: tails, and every entry that they complete.

    k, z:             (tokens, row) values and scores, rows as StateCache has them
    index_k, index_z: the same of the indexer's compressor
    A step that completes several entries of a request takes as many rounds. One round, as in
    decoding, allocates nothing and may be captured.
    Mutates the pool and the tails. Raises InvalidArgumentError.
    """
    _require(handle, AttentionType.CSA)
    state = handle.state
    for at in _flushes(handle):
        kernels().append_tail(k, z, at.token_slots, state.ka, state.za, state.tail_len)
        kernels().append_tail(
            index_k, index_z, at.token_slots, state.idx_ka, state.idx_za, state.idx_tail_len
        )
        maybe_flush_csa(handle, compressor, indexer, at)


def compress_hca(handle: LayerCacheHandle, k: Tensor, z: Tensor, compressor: Compressor) -> None:
    """The same for an HCA layer."""
    _require(handle, AttentionType.HCA)
    state = handle.state
    for at in _flushes(handle):
        kernels().append_tail(k, z, at.token_slots, state.ka, state.za, state.tail_len)
        maybe_flush_hca(handle, compressor, at)


def one_flush(handle: LayerCacheHandle) -> Flush:
    """The step's only flush. Raises InvalidArgumentError if an entry is complete before the last
    token of a request: its tail would not hold the tokens after it."""
    compression = handle.step.compression[handle.schema.compression_ratio]
    if compression.rounds > 1:
        raise InvalidArgumentError(
            f"the step takes {compression.rounds} flushes in layer {handle.layer_idx}: use "
            "compress_csa or compress_hca"
        )
    return compression.flush(0, handle.step.positions, handle.step.token_slots)


def _flushes(handle: LayerCacheHandle) -> list[Flush]:
    step = handle.step
    compression = step.compression[handle.schema.compression_ratio]
    return [
        compression.flush(index, step.positions, step.token_slots)
        for index in range(compression.rounds)
    ]


def _compress(
    handle: LayerCacheHandle, weights: Compressor, prefix: str, flush: Flush, out: Tensor
) -> None:
    state = handle.state
    kernels().compress(
        getattr(state, f"{prefix}ka"),
        getattr(state, f"{prefix}za"),
        getattr(state, f"{prefix}kb"),
        getattr(state, f"{prefix}zb"),
        weights.ape_a,
        weights.ape_b,
        weights.norm_weight,
        weights.eps,
        weights.cos_sin,
        flush.positions,
        flush.mask,
        out,
        row=state.tail_row_width,
    )


def _require(handle: LayerCacheHandle, attn: AttentionType) -> None:
    if handle.schema.attn_type is not attn:
        raise InvalidArgumentError(
            f"layer {handle.layer_idx} is of type {handle.schema.attn_type.name}, expected "
            f"{attn.name}"
        )
