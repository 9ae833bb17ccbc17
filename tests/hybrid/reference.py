"""The kernels of kvx_core.hybrid.ops in torch, slow and obvious: same names, same arguments.

Source: arXiv 2606.19348, eq. 11, 12, 22, 23
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.hybrid_ops import oracle

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3(x: Tensor) -> Tensor:
    """Codes of E4M3, the nearest, ties to even, at most 448."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of a row and its inverse scale, the largest magnitude / 448; 1 for a row of zeros."""
    largest = x.float().abs().amax()
    inv = torch.where(largest > 0, largest / 448.0, torch.ones_like(largest))
    return e4m3(x.float() / inv), inv


def fp8_key(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes, and the power of two at or above the largest magnitude / 448."""
    scale = torch.exp2(torch.ceil(torch.log2(x.float().abs().amax(-1).clamp(min=1e-4) / 448)))
    return e4m3(x.float() / scale), scale


def fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 of a row: two codes in a byte, the even one below; a scale in E4M3 for 16 numbers."""
    groups = x.float().reshape(-1, 16)
    scales = (groups.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    wide = scales.float()[:, None]
    inverse = torch.where(wide > 0, 1 / wide, torch.zeros_like(wide))
    units = (groups * inverse).abs().clamp(max=6)
    step = torch.where(units < 2, 0.5, torch.where(units < 4, 1.0, 2.0))
    nearest = torch.round(units / step) * step
    codes = torch.searchsorted(CODES, nearest).to(torch.uint8)
    codes |= (
        torch.signbit(torch.where(wide > 0, groups, torch.zeros_like(groups))).to(torch.uint8) << 3
    )
    flat = codes.reshape(-1)
    return flat[0::2] | (flat[1::2] << 4), scales.view(torch.uint8)


def write_quantized(
    fp8: Tensor, inv_scale: Tensor | None, at: tuple[int, int], row: Tensor
) -> None:
    """E4M3 with a scale or, where there are no scales, of the numbers themselves."""
    if inv_scale is not None:
        fp8[at], inv_scale[at] = quantized(row)
    else:
        numbers = row.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        fp8[at] = numbers.view(torch.uint8)


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
    one_each: bool,
    spans: Any,
) -> None:
    assert not one_each or len(set(slots.tolist())) == len(slots)
    window, nope = swa_fp8.shape[1:]
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        at = int(swa_head[slot]) % window
        write_quantized(swa_fp8, swa_inv, (slot, at), x[t, :nope])
        swa_rope[slot, at] = x[t, nope:]
        swa_pos[slot, at] = positions[t]
        swa_head[slot] += 1


def append_tail(
    k: Tensor, z: Tensor, slots: Tensor, ka: Tensor, za: Tensor, tail_len: Tensor, *, spans: Any
) -> None:
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        at = int(tail_len[slot])
        assert at < ka.shape[1], "more tokens than the tail has room for"
        ka[slot, at], za[slot, at] = k[t].to(ka.dtype), z[t].to(za.dtype)
        tail_len[slot] += 1


def entry_of(values: Tensor, scores: Tensor) -> Tensor:
    """The sum over tokens, weighted by a softmax over tokens for each number: (tokens, dim)."""
    return (torch.softmax(scores.float(), 0) * values.float()).sum(0)


def normed_and_rotated(
    x: Tensor, norm_weight: Tensor, eps: float, cos_sin: Tensor, position: int
) -> Tensor:
    x = x * torch.rsqrt(x.square().mean() + eps) * norm_weight
    cos, sin = cos_sin[position].chunk(2)
    rope_dim = cos_sin.shape[1]
    even, odd = x[-rope_dim::2].clone(), x[1 - rope_dim :: 2].clone()
    x[-rope_dim::2] = even * cos - odd * sin
    x[1 - rope_dim :: 2] = even * sin + odd * cos
    return x


def compress(
    ka: Tensor,
    za: Tensor,
    kb: Tensor | None,
    zb: Tensor | None,
    ape_a: Tensor,
    ape_b: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    mask: Tensor,
    out: Tensor,
    *,
    row: str = "wide",
) -> None:
    dim = out.shape[1]
    assert ka.shape[2] == (2 * dim if kb is not None and row == "wide" else dim)
    for i in mask.nonzero()[:, 0].tolist():
        values, scores = ka[i][:, -dim:], za[i][:, -dim:] + ape_a
        if kb is not None and zb is not None:
            values = torch.cat((values, kb[i][:, :dim]))
            scores = torch.cat((scores, zb[i][:, :dim] + ape_b))
        entry = entry_of(values, scores)
        out[i] = normed_and_rotated(entry, norm_weight, eps, cos_sin, int(positions[i]))


def compress_bulk(
    k: Tensor,
    z: Tensor,
    ape_a: Tensor,
    ape_b: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    kb: Tensor | None,
    zb: Tensor | None,
    overlap: bool,
    row: str,
) -> None:
    """One entry after the other."""
    ratio = len(k) // len(out)
    every, always = k.view(-1, ratio, k.shape[1]), torch.ones(1, dtype=torch.bool)
    scores = z.view(every.shape)
    for i in range(len(out)):
        if overlap and i:
            kb, zb = every[i - 1], scores[i - 1]
        previous = (None, None) if kb is None or zb is None else (kb[None], zb[None])
        compress(
            *(every[i : i + 1], scores[i : i + 1], *previous, ape_a, ape_b, norm_weight, eps),
            *(cos_sin, positions[i : i + 1], always, out[i : i + 1]),
            row=row,
        )


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
    per_block, nope = entries_fp8.shape[1:]
    for row, at in _places(slots, entry_ids, mask, block_table, per_block):
        write_quantized(entries_fp8, inv_scale, at, entry[row, :nope])
        entries_rope[at] = entry[row, nope:]


def flush_write_csa(
    *,
    entry: Tensor,
    index_key: Tensor,
    indexer_keys: Tensor,
    indexer_scales: Tensor,
    keys: str,
    rounding: str,
    **where: Any,
) -> None:
    flush_write_hca(entry, **where)
    encode = ENCODE[keys, rounding]
    rows = where["slots"], where["entry_ids"], where["mask"], where["block_table"]
    for row, at in _places(*rows, indexer_keys.shape[1]):
        indexer_keys[at], indexer_scales[at] = encode(index_key[row])


def _places(
    slots: Tensor | None,
    entry_ids: Tensor,
    mask: Tensor | None,
    block_table: Tensor,
    per_block: int,
) -> Iterator[tuple[int, tuple[int, int]]]:
    """The rows that are written, with the block and the place in it."""
    for row in range(len(entry_ids)) if mask is None else mask.nonzero()[:, 0].tolist():
        assert slots is None or slots[row] == row, "rows are request slots here"
        number = int(entry_ids[row])
        block = int(block_table[row, number // per_block])
        assert block >= 0
        yield row, (block, number % per_block)


ENCODE: dict[tuple[str, str], Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    ("nvfp4", "nearest_even"): fp4,
    ("fp8", "nearest_even"): fp8_key,
    ("mxfp4", "nearest_even"): oracle.mxfp4,
    ("mxfp4", "thresholds"): partial(oracle.mxfp4, rounding="thresholds"),
}


def csa_rotate_state(
    slots: Tensor, mask: Tensor, ka: Tensor, za: Tensor, kb: Tensor, zb: Tensor, tail_len: Tensor
) -> None:
    rows = slots[mask].long()
    kb[rows], zb[rows] = ka[rows], za[rows]
    hca_reset_state(slots, mask, ka, za, tail_len)


def hca_reset_state(slots: Tensor, mask: Tensor, ka: Tensor, za: Tensor, tail_len: Tensor) -> None:
    rows = slots[mask].long()
    ka[rows], za[rows], tail_len[rows] = 0, 0, 0
