"""rotate_keys: keys in place, from the positions that they were computed for to others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import bad_argument, flag
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.tensor_desc import describe
from kvx_core.desc.tensors import TensorLike
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.ops.holds import require_holds
from kvx_core.ops.migrate import copy_tokens
from kvx_core.ops.migrate_plan import MigratePlan
from kvx_core.ops.narrow import narrowed
from kvx_core.ops.options import MoveOptions
from kvx_core.ops.reorder import dims_in_order
from kvx_core.types import DType, Layout, Memory

_PIECE = 1024  # tokens


def rotate_keys(
    span: CacheSpan | CacheView,
    seq_lens: SeqLens | TensorLike | Sequence[int],
    by: TensorLike | Sequence[int],
    inv_freq: TensorLike | Sequence[float],
    *,
    lossy: bool = False,
) -> None:
    """Rotates the keys of some tokens for positions that are `by` later: after a migration with
    new_positions, whose tokens were computed for others.

    span, seq_lens: the tokens, as the destination of the migration
    by:       (seq_count,), the new position of each sequence less the old one
    inv_freq: (rotary_dim / 2,), float64 or float32: the angle per position of each pair of dims, as
              the model applies it to all layers of the span
    lossy:    K is not float32: it is rounded once more, with its dtype, scales or units
    The facts have to say rotary "half" or "interleaved" and rotary_dim, the first dims of a head.
    Angles, sines and products are float64, and are rounded to float32 once: K in float32 is exact
    but for that. Mutates K of these tokens, V never.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    """
    span = CacheSpan.of(span, name="span")
    lens = SeqLens.of(seq_lens)
    lengths, shifts = lens.to_numpy(), SeqLens.of(by, name="by").to_numpy()
    try:
        angles = np.asarray(inv_freq, np.float64)
    except (TypeError, ValueError):
        raise bad_argument(
            "inv_freq", inv_freq, "numbers, one for each pair of rotary_dim"
        ) from None
    _check(span, angles, lossy=flag("lossy", lossy))
    table = span.block_table
    rows = len(lengths) if table is None else table.num_rows
    lengths = np.repeat(lengths, rows // max(len(lengths), 1))
    if len(shifts) not in (1, len(lengths)):
        raise InvalidArgumentError(f"by has {len(shifts)} entries, expected {len(lengths)}")
    shifts = np.broadcast_to(shifts, lengths.shape)
    require_holds("span", span, lens)
    for i in range(len(span.view.layers)):
        _check_places(span, i, lengths)
    for i in range(len(span.view.layers)):
        for part, count, row in _parts(span, i, lengths):
            _rotate(part, count, int(shifts[row]) * angles)


def _check(span: CacheSpan, angles: npt.NDArray[np.float64], *, lossy: bool) -> None:
    facts = span.view.facts
    if facts.rotary not in ("half", "interleaved") or facts.rotary_dim is None:
        raise InvalidArgumentError(
            f"span.view.facts has rotary {facts.rotary!r} and rotary_dim {facts.rotary_dim}, "
            "expected 'half' or 'interleaved' and a number: they say which dims rotate"
        )
    if angles.shape != (facts.rotary_dim // 2,):
        raise InvalidArgumentError(
            f"inv_freq has the shape {angles.shape}, expected ({facts.rotary_dim // 2},), one for "
            "each pair of rotary_dim"
        )
    if facts.hadamard and facts.hadamard_k != 0:
        raise UnsupportedError("span.view.facts.hadamard is True, and K's dims are mixed by it")
    for i, layer in enumerate(span.view.layers):
        k = layer.k
        if k.memory is Memory.DEVICE or k.dtype is DType.U8 or k.dtype.format.affine:
            raise UnsupportedError(
                f"span.layers[{i}].k is {k.dtype.name} in {k.memory.name} memory, expected numbers "
                "without zero points in HOST memory. Rotate them on the way, in a float32 cache"
            )
        if layer.shared_kv or layer.head_dim < (facts.rotary_dim or 0):
            raise UnsupportedError(
                f"span.layers[{i}] has {layer.head_dim} dims of K, of which the last rotate or V "
                "has some: this function rotates the first dims of a K of its own"
            )
        k.require_writable(f"span.layers[{i}].k")
        if k.dtype is not DType.F32 and not lossy:
            raise InvalidArgumentError(
                f"span.layers[{i}].k is {k.dtype.name}, which a rotation rounds once more, with a "
                "loss: give lossy=True, or rotate in a float32 cache"
            )
        first = next(j for j, other in enumerate(span.view.layers) if other.k.data == k.data)
        if first != i and k.data:
            raise InvalidArgumentError(
                f"span.layers[{i}].k is that of layers[{first}], expected memory of its own: its "
                "keys would be rotated twice. Pass a view of one of the layers that share K"
            )


def _check_places(span: CacheSpan, layer: int, lengths: npt.NDArray[np.int64]) -> None:
    """Refuses, before a part is written, what a write of all tokens of a layer would refuse: places
    that are not there, and those that two tokens have, which would be rotated twice."""
    whole = _of_keys(span, layer, span.block_table)
    cache = whole.view.layers[0]
    heads = cache.num_kv_heads - whole.head_start
    lens = SeqLens.of(lengths)
    find_tokens(whole, lens)  # refuses lengths that the table has no places for
    num_tokens = int(np.maximum(lengths, 0).sum())
    if not num_tokens:
        return
    keys = np.empty((1, num_tokens, heads, cache.head_dim), np.float32)  # never touched
    copy = CacheView((CacheDesc.from_kv(describe(keys, Layout.BLOCK_NHD)),), CacheFacts())
    src = copy.at(slots=np.arange(num_tokens))
    options = MoveOptions(num_heads=heads)
    with MigratePlan(src, whole, (src, whole), lens, options, new_positions=True) as plan:
        plan.describe()


def _of_keys(span: CacheSpan, layer: int, table: BlockTable | None) -> CacheSpan:
    """K of a layer, alone, with this table."""
    view, scales = span.view, span.view.k_scales
    fields = {} if scales is None else {"k_scales": (scales[layer],)}
    view, table = narrowed(view, table, [(layer, "k")], **fields)
    return replace(span, view=replace(view, holds=None), block_table=table)


def _parts(
    span: CacheSpan, layer: int, lengths: npt.NDArray[np.int64]
) -> Iterator[tuple[CacheSpan, npt.NDArray[np.int64], int]]:
    """K of a layer, some tokens of one row at a time, with the lengths of a call."""
    table = None if span.block_table is None else span.block_table.of_parts()
    span = _of_keys(span, layer, table)
    ends = lengths.cumsum()
    starts = np.zeros_like(lengths) if span.starts is None else span.starts.to_numpy()
    for row, length in enumerate(lengths.tolist()):
        for first in range(0, length, _PIECE):
            count = np.zeros_like(lengths)
            count[row] = min(_PIECE, length - first)
            if span.slots is not None:
                at = int(ends[row]) - length + first
                slots = span.slots.part(at, at + int(count[row]))
                yield replace(span, slots=slots, first_positions=None), count, row
                continue
            begin = np.where(count > 0, starts + first, 0)
            yield replace(span, starts=SeqLens.of(begin)), count, row


def _rotate(part: CacheSpan, count: npt.NDArray[np.int64], angles: npt.NDArray[np.float64]) -> None:
    """Reads, rotates and writes K of one part."""
    facts, layer = part.view.facts, part.view.layers[0]
    heads = layer.num_kv_heads - part.head_start
    tokens = np.zeros((1, int(count.sum()), heads, layer.head_dim), np.float32)
    copy = CacheView((CacheDesc.from_kv(describe(tokens, Layout.BLOCK_NHD)),), CacheFacts())
    dense, lens = copy.at(slots=np.arange(tokens.shape[1])), SeqLens.of(count)
    copy_tokens(part, dense, lens, num_heads=heads)
    assert facts.rotary in ("half", "interleaved")
    dims = dims_in_order(facts.rotary, "half", 2 * len(angles))
    turned = tokens[..., dims].astype(np.float64)
    a, b = turned[..., : len(angles)], turned[..., len(angles) :]
    cos, sin = np.cos(angles), np.sin(angles)
    tokens[..., dims] = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    copy_tokens(dense, part, lens, num_heads=heads)
