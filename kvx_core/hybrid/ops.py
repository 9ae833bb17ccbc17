"""The calls of kvx_hybrid.h on torch tensors: windows, tails, entries; page_records.py has pages.

Tensors are contiguous and on one device. In host memory everything is checked before anything is
written; on a CUDA device calls go to torch's current stream, kernels skip rows whose slots or
blocks are out of range, and a graph may capture them. What is written overlaps nothing else.
Spec: E.22
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvx_core._c import abi_hybrid
from kvx_core.argument_checks import flag, one_of
from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid._arrays import (
    CODES,
    FLOATS,
    MASKS,
    POSITIONS,
    Arrays,
    Spans,
    check_float32,
    dtype_of,
    extents,
    like,
    set_spans,
)
from kvx_core.hybrid.page_records import read_v4_page, v4_page_bytes, write_v4_page

__all__ = [
    "Spans",
    "append_swa",
    "append_tail",
    "compress",
    "compress_bulk",
    "csa_rotate_state",
    "flush_write_csa",
    "flush_write_hca",
    "hca_reset_state",
    "read_v4_page",
    "v4_page_bytes",
    "write_v4_page",
]

# Indexer keys: the number in C, numbers of a byte, numbers of a scale in a byte (0: a float each).
_KEYS = {
    "nvfp4": (abi_hybrid.NVFP4, 2, 16),
    "mxfp4": (abi_hybrid.MXFP4, 2, 32),
    "fp8": (abi_hybrid.FP8, 1, 0),
}
_ROUNDING = {"nearest_even": 0, "thresholds": abi_hybrid.THRESHOLDS}


def append_swa(
    x: Tensor,
    positions: Tensor,
    slots: Tensor,
    swa_fp8: Tensor,
    swa_rope: Tensor,
    swa_inv: Tensor | None,
    swa_pos: Tensor,
    swa_head: Tensor,
    *,
    one_each: bool = False,
    spans: Spans | None = None,
) -> None:
    """Quantises tokens and writes them behind the newest of their requests' rings.

    x:         (tokens, nope + rope) bfloat16
    positions: (tokens,) int32 or int64, 0 to 2^31 - 1
    slots:     (tokens,) int32, the ring of each token; -1: skipped
    swa_fp8:   (R, window, nope) uint8, E4M3 of x / inv
    swa_rope:  (R, window, rope) bfloat16, the last numbers of x
    swa_inv:   (R, window) float32: the largest magnitude / 448, or 1 if that is 0; None: there are
               no scales, inv is 1 for all, and numbers above 448 become 448
    swa_pos:   (R, window) int32
    swa_head:  (R,) int32, tokens that a ring has been given; the next one goes to head % window
    one_each:  no two tokens are of one slot, as in a decode step: one kernel on a device, not two
    spans:     where the tokens of a slot stand; None: anywhere, which a device looks for, for each
               token among all others
    Of more than `window` tokens of a request only the last are written; the head counts all.
    Mutates the swa tensors. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    arrays = Arrays("x", x)
    num_slots, window, nope = extents("swa_fp8", swa_fp8, 3)
    rope = extents("swa_rope", swa_rope, 3)[2]
    tokens = extents("x", x, 2)[0]
    desc = abi_hybrid.kvx_hybrid_append_t(
        memory=arrays.memory,
        num_tokens=tokens,
        num_slots=num_slots,
        window=window,
        nope_dim=nope,
        rope_dim=rope,
        flags=abi_hybrid.ONE_EACH if flag("one_each", one_each) else 0,
        x=arrays.take("x", x, ("bfloat16",), tokens, nope + rope),
        positions=arrays.take("positions", positions, POSITIONS, tokens),
        position_bytes=positions.itemsize,
        slots=arrays.take("slots", slots, ("int32",), tokens),
        fp8=arrays.take("swa_fp8", swa_fp8, CODES, num_slots, window, nope),
        rope=arrays.take("swa_rope", swa_rope, ("bfloat16",), num_slots, window, rope),
        inv_scale=arrays.take_if_given("swa_inv", swa_inv, ("float32",), num_slots, window),
        pos=arrays.take("swa_pos", swa_pos, ("int32",), num_slots, window),
        head=arrays.take("swa_head", swa_head, ("int32",), num_slots),
    )
    set_spans(desc, arrays, spans, tokens)
    arrays.call(abi_hybrid.functions().kvx_hybrid_append_swa, desc)


def append_tail(
    k: Tensor,
    z: Tensor,
    slots: Tensor,
    ka: Tensor,
    za: Tensor,
    tail_len: Tensor,
    *,
    spans: Spans | None = None,
) -> None:
    """Writes rows behind those that the tails of their requests have.

    k, z:     (tokens, row) float32 or bfloat16, values and scores
    slots:    (tokens,) int32, the tail of each token; -1: skipped
    ka, za:   (R, m, row) float32 or bfloat16
    tail_len: (R,) int32, rows that a tail has
    spans:    as for `append_swa`
    A tail that would have more than m rows is an OutOfRangeError; on a device these are skipped.
    Mutates ka, za and tail_len. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    arrays = Arrays("k", k)
    tokens, row = extents("k", k, 2)
    num_slots, ratio, _ = extents("ka", ka, 3)
    desc = abi_hybrid.kvx_hybrid_tail_t(
        memory=arrays.memory,
        num_tokens=tokens,
        num_slots=num_slots,
        ratio=ratio,
        row=row,
        k=arrays.take("k", k, FLOATS, tokens, row),
        z=arrays.take("z", z, like(k), tokens, row),
        slots=arrays.take("slots", slots, ("int32",), tokens),
        ka=arrays.take("ka", ka, FLOATS, num_slots, ratio, row),
        za=arrays.take("za", za, like(ka), num_slots, ratio, row),
        tail_len=arrays.take("tail_len", tail_len, ("int32",), num_slots),
        dtype=dtype_of(k),
        state=dtype_of(ka),
    )
    set_spans(desc, arrays, spans, tokens)
    arrays.call(abi_hybrid.functions().kvx_hybrid_append_tail, desc)


def compress(
    ka: Tensor,
    za: Tensor,
    kb: Tensor | None,
    zb: Tensor | None,
    ape_a: Tensor | None,
    ape_b: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    *,
    slots: Tensor | None = None,
    row: Literal["wide", "single"] = "wide",
) -> None:
    """Entries of full tails: softmax over their tokens, weighted sum, RMSNorm, rotation.

    ka, za:       (R, m, row) float32 or bfloat16: values and scores of the current tokens
    kb, zb:       the same of the previous tokens (CSA); None: there are none (HCA)
    ape_a, ape_b: (m, head_dim) float32, added to the scores; None: nothing
    norm_weight:  (head_dim,) float32; None: no norm
    eps:          of the norm
    cos_sin:      (max_position, rope) float32, cosines and then sines; None: no rotation. The last
                  `rope` numbers are rotated, neighbours together
    positions:    (rows,) int32 or int64, of the first token of each entry: m * i
    mask:         (rows,) bool or uint8, False: the row of out is left as it is; None: all are made
    out:          (rows, head_dim) float32 or bfloat16
    slots:        (rows,) int32, the tail of each row, -1: skipped; None: row i is tail i
    row:          "wide": rows of CSA are [b | a], 2 * head_dim wide, the halves of the next and of
                  this entry; "single": head_dim wide, and the previous tokens keep the projection
                  of this entry, which is not what DeepSeek-V4 computes
    Mutates out. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    arrays = Arrays("ka", ka)
    num_slots, ratio, _ = extents("ka", ka, 3)
    rows, dim = extents("out", out, 2)
    if slots is None and rows > num_slots:
        raise InvalidArgumentError(
            f"out.shape[0] is {rows}, expected at most {num_slots}, the tails of ka; or pass slots "
            "(spec E.22)"
        )
    shape = num_slots, ratio, _row_width(row, dim, kb is not None)
    desc = abi_hybrid.kvx_hybrid_compress_t(
        num_slots=num_slots,
        ka=arrays.take("ka", ka, FLOATS, *shape),
        za=arrays.take("za", za, like(ka), *shape),
        kb=arrays.take_if_given("kb", kb, like(ka), *shape),
        zb=arrays.take_if_given("zb", zb, like(ka), *shape),
        slots=arrays.take_if_given("slots", slots, ("int32",), rows),
        mask=arrays.take_if_given("mask", mask, MASKS, rows),
        flags=abi_hybrid.SINGLE_ROW if row == "single" else 0,
    )
    _compress(
        arrays,
        desc,
        state=ka,
        ratio=ratio,
        out=out,
        ape_a=ape_a,
        ape_b=ape_b,
        norm_weight=norm_weight,
        eps=eps,
        cos_sin=cos_sin,
        positions=positions,
    )


def compress_bulk(
    k: Tensor,
    z: Tensor,
    ape_a: Tensor | None,
    ape_b: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    out: Tensor,
    *,
    kb: Tensor | None = None,
    zb: Tensor | None = None,
    overlap: bool = True,
    row: Literal["wide", "single"] = "wide",
) -> None:
    """Entries of many tokens of one request at once, the bits of `compress` step by step.

    k, z:    (entries * m, row) float32 or bfloat16, in the order of positions
    out:     (entries, head_dim) float32 or bfloat16; m is k.shape[0] / entries
    kb, zb:  (m, row), the tokens before k; None: there are none
    overlap: whether entries have previous tokens (CSA)
    Else as for `compress`. Mutates out. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    arrays = Arrays("k", k)
    tokens, _ = extents("k", k, 2)
    rows, dim = extents("out", out, 2)
    if rows == 0 or tokens % rows:
        raise InvalidArgumentError(
            f"k.shape[0] is {tokens}, expected a multiple of the {rows} entries of out, at least "
            "one (spec E.22)"
        )
    ratio = tokens // rows
    overlaps = flag("overlap", overlap)
    if not overlaps and kb is not None:
        raise InvalidArgumentError("kb is given and overlap False, expected no kb (spec E.22)")
    width = _row_width(row, dim, overlaps)
    flags = abi_hybrid.BULK | (0 if overlaps else abi_hybrid.NO_OVERLAP)
    desc = abi_hybrid.kvx_hybrid_compress_t(
        num_slots=rows,
        ka=arrays.take("k", k, FLOATS, tokens, width),
        za=arrays.take("z", z, like(k), tokens, width),
        kb=arrays.take_if_given("kb", kb, like(k), ratio, width),
        zb=arrays.take_if_given("zb", zb, like(k), ratio, width),
        flags=flags | (abi_hybrid.SINGLE_ROW if row == "single" else 0),
    )
    _compress(
        arrays,
        desc,
        state=k,
        ratio=ratio,
        out=out,
        ape_a=ape_a,
        ape_b=ape_b,
        norm_weight=norm_weight,
        eps=eps,
        cos_sin=cos_sin,
        positions=positions,
    )


def flush_write_csa(
    entry: Tensor,
    index_key: Tensor,
    slots: Tensor | None,
    entry_ids: Tensor,
    mask: Tensor | None,
    block_table: Tensor,
    entries_fp8: Tensor,
    entries_rope: Tensor,
    inv_scale: Tensor | None,
    indexer_keys: Tensor,
    indexer_scales: Tensor,
    *,
    keys: Literal["nvfp4", "mxfp4", "fp8"] = "nvfp4",
    rounding: Literal["nearest_even", "thresholds"] = "nearest_even",
) -> None:
    """Quantises entries and their indexer keys and writes them into blocks.

    index_key:      (rows, key_dim), of entry's dtype
    indexer_keys:   (blocks, epb, key_dim / 2) uint8, E2M1, the even number in the low half; of
                    "fp8" (blocks, epb, key_dim) uint8, E4M3
    indexer_scales: (blocks, epb, groups) uint8; of "fp8" (blocks, epb) float32
    keys:           "nvfp4": groups of 16 with E4M3 scales; "mxfp4": groups of 32 with E8M0 scales;
                    "fp8": one scale for a key, a power of two, as vLLM and SGLang have it
    rounding:       of E2M1: "nearest_even", as vLLM; "thresholds", as SGLang: a tie goes to the
                    smaller magnitude, 0 has no sign, and E8M0 scales are 2^-13 at least
    The others as for `flush_write_hca`.
    Mutates entries_fp8 to indexer_scales. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    arrays, desc = _flush(
        entry,
        slots=slots,
        entry_ids=entry_ids,
        mask=mask,
        block_table=block_table,
        pool=(entries_fp8, entries_rope, inv_scale),
    )
    one_of("keys", keys, *_KEYS)
    desc.flags = _ROUNDING[one_of("rounding", rounding, *_ROUNDING)]
    desc.key_dim = key_dim = extents("index_key", index_key, 2)[1]
    desc.keys, halves, group = _KEYS[keys]
    blocks = desc.num_blocks, desc.entries_per_block
    desc.index_key = arrays.take("index_key", index_key, like(entry), desc.num_rows, key_dim)
    desc.key_codes = arrays.take("indexer_keys", indexer_keys, CODES, *blocks, key_dim // halves)
    kinds = ("uint8", "float8_e4m3fn", "float8_e8m0fnu") if group else ("float32",)
    groups = (key_dim // group,) if group else ()
    desc.key_scales = arrays.take("indexer_scales", indexer_scales, kinds, *blocks, *groups)
    arrays.call(abi_hybrid.functions().kvx_hybrid_flush_write, desc)


def flush_write_hca(
    entry: Tensor,
    slots: Tensor | None,
    entry_ids: Tensor,
    mask: Tensor | None,
    block_table: Tensor,
    entries_fp8: Tensor,
    entries_rope: Tensor,
    inv_scale: Tensor | None,
) -> None:
    """Quantises entries and writes them into blocks.

    entry:        (rows, nope + rope) float32 or bfloat16
    slots:        (rows,) int32, -1: skipped; None: no row is
    entry_ids:    (rows,) int32, the number of each entry in its request
    mask:         (rows,) bool or uint8, False: skipped; None: no row is
    block_table:  (rows, max_blocks) int32: entry e of row i goes to place e % epb of block
                  block_table[i, e // epb]
    entries_fp8:  (blocks, epb, nope) uint8, E4M3 of number / inv_scale
    entries_rope: (blocks, epb, rope) bfloat16
    inv_scale:    (blocks, epb) float32 or None, as for `append_swa`
    Rows that are skipped change no byte. No two rows have one place.
    Mutates the last three. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    arrays, desc = _flush(
        entry,
        slots=slots,
        entry_ids=entry_ids,
        mask=mask,
        block_table=block_table,
        pool=(entries_fp8, entries_rope, inv_scale),
    )
    arrays.call(abi_hybrid.functions().kvx_hybrid_flush_write, desc)


def csa_rotate_state(
    slots: Tensor,
    mask: Tensor | None,
    ka: Tensor,
    za: Tensor,
    kb: Tensor,
    zb: Tensor,
    tail_len: Tensor,
) -> None:
    """After a flush of CSA: the current tokens become the previous ones.

    slots:    (rows,) int32, distinct, the tails; -1: skipped
    mask:     (rows,) bool or uint8, False: skipped; None: no row is
    ka to zb: (R, m, row) float32 or bfloat16: kb and zb become ka and za, and these 0
    tail_len: (R,) int32, becomes 0
    Mutates ka to tail_len. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    _rotate(slots, mask, ka=ka, za=za, previous=(kb, zb), tail_len=tail_len)


def hca_reset_state(
    slots: Tensor, mask: Tensor | None, ka: Tensor, za: Tensor, tail_len: Tensor
) -> None:
    """After a flush of HCA: ka, za and tail_len become 0. Arguments as for `csa_rotate_state`.

    Mutates ka, za and tail_len. Raises InvalidArgumentError, OutOfRangeError. Spec: E.22
    """
    _rotate(slots, mask, ka=ka, za=za, previous=None, tail_len=tail_len)


def _row_width(row: str, dim: int, overlaps: bool) -> int:
    one_of("row", row, "wide", "single")
    return 2 * dim if overlaps and row == "wide" else dim


def _compress(
    arrays: Arrays,
    desc: abi_hybrid.kvx_hybrid_compress_t,
    *,
    state: Tensor,
    ratio: int,
    out: Tensor,
    ape_a: Tensor | None,
    ape_b: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor | None,
) -> None:
    """Fills in what both ways to compress share, and calls it."""
    rows, dim = out.shape
    check_float32("eps", eps)
    desc.memory, desc.num_rows, desc.ratio, desc.head_dim = arrays.memory, rows, ratio, dim
    desc.eps, desc.state, desc.position_bytes = eps, dtype_of(state), 8
    desc.out, desc.out_dtype = arrays.take("out", out, FLOATS, rows, dim), dtype_of(out)
    desc.ape_a = arrays.take_if_given("ape_a", ape_a, ("float32",), ratio, dim)
    desc.ape_b = arrays.take_if_given("ape_b", ape_b, ("float32",), ratio, dim)
    desc.norm_weight = arrays.take_if_given("norm_weight", norm_weight, ("float32",), dim)
    if cos_sin is not None:
        desc.num_positions, desc.rope_dim = extents("cos_sin", cos_sin, 2)
        desc.cos_sin = arrays.take("cos_sin", cos_sin, ("float32",), None, None)
        desc.positions = arrays.take("positions", positions, POSITIONS, rows)
        if positions is not None:
            desc.position_bytes = positions.itemsize
    arrays.call(abi_hybrid.functions().kvx_hybrid_compress, desc)


def _flush(
    entry: Tensor,
    *,
    slots: Tensor | None,
    entry_ids: Tensor,
    mask: Tensor | None,
    block_table: Tensor,
    pool: tuple[Tensor, Tensor, Tensor | None],
) -> tuple[Arrays, abi_hybrid.kvx_hybrid_flush_t]:
    arrays = Arrays("entry", entry)
    entries_fp8, entries_rope, inv_scale = pool
    rows = extents("entry", entry, 2)[0]
    blocks, per_block, nope = extents("entries_fp8", entries_fp8, 3)
    rope = extents("entries_rope", entries_rope, 3)[2]
    desc = abi_hybrid.kvx_hybrid_flush_t(
        memory=arrays.memory,
        num_rows=rows,
        num_blocks=blocks,
        entries_per_block=per_block,
        nope_dim=nope,
        rope_dim=rope,
        max_blocks=extents("block_table", block_table, 2)[1],
        entry=arrays.take("entry", entry, FLOATS, rows, nope + rope),
        slots=arrays.take_if_given("slots", slots, ("int32",), rows),
        entry_ids=arrays.take("entry_ids", entry_ids, ("int32",), rows),
        mask=arrays.take_if_given("mask", mask, MASKS, rows),
        block_table=arrays.take("block_table", block_table, ("int32",), rows, None),
        fp8=arrays.take("entries_fp8", entries_fp8, CODES, blocks, per_block, nope),
        rope=arrays.take("entries_rope", entries_rope, ("bfloat16",), blocks, per_block, rope),
        inv_scale=arrays.take_if_given("inv_scale", inv_scale, ("float32",), blocks, per_block),
        dtype=dtype_of(entry),
    )
    return arrays, desc


def _rotate(
    slots: Tensor,
    mask: Tensor | None,
    *,
    ka: Tensor,
    za: Tensor,
    previous: tuple[Tensor, Tensor] | None,
    tail_len: Tensor,
) -> None:
    arrays = Arrays("ka", ka)
    rows = extents("slots", slots, 1)[0]
    shape = num_slots, ratio, row = extents("ka", ka, 3)
    desc = abi_hybrid.kvx_hybrid_state_t(
        memory=arrays.memory,
        num_rows=rows,
        num_slots=num_slots,
        ratio=ratio,
        row=row,
        slots=arrays.take("slots", slots, ("int32",), rows),
        mask=arrays.take_if_given("mask", mask, MASKS, rows),
        ka=arrays.take("ka", ka, FLOATS, *shape),
        za=arrays.take("za", za, like(ka), *shape),
        tail_len=arrays.take("tail_len", tail_len, ("int32",), num_slots),
        state=dtype_of(ka),
    )
    if previous is not None:
        desc.kb = arrays.take("kb", previous[0], like(ka), *shape)
        desc.zb = arrays.take("zb", previous[1], like(ka), *shape)
    arrays.call(abi_hybrid.functions().kvx_hybrid_rotate_state, desc)
