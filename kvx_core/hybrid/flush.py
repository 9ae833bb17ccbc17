"""Tokens to compressed entries: they wait in a tail until an entry is complete.

Every call runs its kernels whether or not an entry is complete: masks on the device say which
requests they are for, so that a captured graph does the right thing at every replay.
"""

from __future__ import annotations

from torch import Tensor

from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid import ops
from kvx_core.hybrid.compressor import Compressor
from kvx_core.hybrid.forward_step import Flush
from kvx_core.hybrid.handle import LayerCacheHandle
from kvx_core.hybrid.prefill import Stream, prefill
from kvx_core.hybrid.schema import AttentionType
from kvx_core.hybrid.state_cache import Tails


def maybe_flush_csa(handle: LayerCacheHandle, compressor: Compressor, indexer: Compressor) -> None:
    """Writes the entries and indexer keys that are complete, and makes room in their tails.

    handle:     of a CSA layer, whose tails have the step's tokens; at most one entry of each
                request is complete
    compressor: of the entries
    indexer:    of the indexer keys
    Per request whose entry is complete: compressor, entry and key into the block, tails rotated (b
    is what a was, a is empty). Mutates the pool, the tails and their lengths; nothing of others.
    Graph-capture safe: no branch on data, no allocation.
    Raises InvalidArgumentError.
    """
    _require(handle, AttentionType.CSA)
    view, keys = handle.read_classical_view(), handle.read_indexer_view()
    slots, at = handle.step.all_slots, _one_flush(handle)
    both = handle.state.tails(), handle.state.tails(indexer=True)
    _compress(handle, compressor, both[0], at, handle.entry)
    _compress(handle, indexer, both[1], at, handle.index_key)
    ops.flush_write_csa(
        entry=handle.entry,
        index_key=handle.index_key,
        slots=slots,
        entry_ids=at.entry_ids,
        mask=at.valid_mask,
        block_table=view.block_table,
        entries_fp8=view.entries_fp8,
        entries_rope=view.entries_rope,
        inv_scale=view.inv_scale,
        indexer_keys=keys.keys,
        indexer_scales=keys.scales,
        keys=keys.form,
        rounding=keys.rounding,
    )
    for ka, za, kb, zb, tail_len in both:
        assert kb is not None
        assert zb is not None
        ops.csa_rotate_state(slots, at.valid_mask, ka, za, kb, zb, tail_len)


def maybe_flush_hca(handle: LayerCacheHandle, compressor: Compressor) -> None:
    """The same for an HCA layer, which has no indexer, and whose tails are emptied.

    Raises InvalidArgumentError.
    """
    _require(handle, AttentionType.HCA)
    tails, view = handle.state.tails(), handle.read_classical_view()
    slots, at = handle.step.all_slots, _one_flush(handle)
    _compress(handle, compressor, tails, at, handle.entry)
    ops.flush_write_hca(
        entry=handle.entry,
        slots=slots,
        entry_ids=at.entry_ids,
        mask=at.valid_mask,
        block_table=view.block_table,
        entries_fp8=view.entries_fp8,
        entries_rope=view.entries_rope,
        inv_scale=view.inv_scale,
    )
    ops.hca_reset_state(slots, at.valid_mask, tails.ka, tails.za, tails.tail_len)


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

    k, z:             (tokens, row) values and scores, contiguous, rows as StateCache has them
    index_k, index_z: the same of the indexer's compressor
    A step in which a request's tokens are all of one entry, as in decoding, allocates nothing and
    may be captured. Others go through prefill.py.
    Mutates the pool and the tails. Raises InvalidArgumentError.
    """
    _require(handle, AttentionType.CSA)
    if not _is_decode(handle):
        tails = handle.state.tails(), handle.state.tails(indexer=True)
        both = Stream(tails[0], k, z, compressor), Stream(tails[1], index_k, index_z, indexer)
        prefill(handle, both)
        return
    _append(handle, handle.state.tails(), k, z)
    _append(handle, handle.state.tails(indexer=True), index_k, index_z)
    maybe_flush_csa(handle, compressor, indexer)


def compress_hca(handle: LayerCacheHandle, k: Tensor, z: Tensor, compressor: Compressor) -> None:
    """The same for an HCA layer."""
    _require(handle, AttentionType.HCA)
    if not _is_decode(handle):
        prefill(handle, [Stream(handle.state.tails(), k, z, compressor)])
        return
    _append(handle, handle.state.tails(), k, z)
    maybe_flush_hca(handle, compressor)


def _is_decode(handle: LayerCacheHandle) -> bool:
    return handle.step.compression[handle.schema.compression_ratio].most_entries <= 1


def _one_flush(handle: LayerCacheHandle) -> Flush:
    """Raises InvalidArgumentError if an entry is complete before the last token of a request: its
    tail would not hold the tokens after it."""
    if not _is_decode(handle):
        raise InvalidArgumentError(
            f"tokens of a request are of several entries in layer {handle.layer_idx}, expected one "
            "in a step: use compress_csa or compress_hca"
        )
    return handle.step.compression[handle.schema.compression_ratio].flush


def _append(handle: LayerCacheHandle, tails: Tails, k: Tensor, z: Tensor) -> None:
    step = handle.step
    ops.append_tail(
        k, z, step.token_slots, tails.ka, tails.za, tails.tail_len, spans=step.token_spans
    )


def _compress(
    handle: LayerCacheHandle, weights: Compressor, tails: Tails, flush: Flush, out: Tensor
) -> None:
    ops.compress(
        ka=tails.ka,
        za=tails.za,
        kb=tails.kb,
        zb=tails.zb,
        ape_a=weights.ape_a,
        ape_b=weights.ape_b,
        norm_weight=weights.norm_weight,
        eps=weights.eps,
        cos_sin=weights.cos_sin,
        positions=flush.positions,
        mask=flush.valid_mask,
        out=out,
        row=handle.state.tail_row_width,
    )


def _require(handle: LayerCacheHandle, attn: AttentionType) -> None:
    if handle.schema.attn_type is not attn:
        raise InvalidArgumentError(
            f"layer {handle.layer_idx} is of type {handle.schema.attn_type.name}, expected "
            f"{attn.name}"
        )
