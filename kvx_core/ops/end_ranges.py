"""One end of a transfer between machines: the ranges of memory that hold some tokens, with offsets
in an order of bytes that both machines share. Spec: E.13

The order is that of a dense cache that has no memory: [chunks, heads, chunk_tokens, dim] per plane,
each sequence beginning a new chunk. So one end is a plan from its cache to this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import integer
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.memory_checks import check_host_memory
from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import TensorLike
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.ops.migrate_plan import MigratePlan
from kvx_core.ops.options import MoveOptions
from kvx_core.types import Layout, Transfer

Ranges = npt.NDArray[np.void]

# dtype of the array that end_ranges returns
END_RANGE = np.dtype(
    [("plane", "u4"), ("reserved", "u4"), ("offset", "u8"), ("address", "u8"), ("bytes", "u8")]
)
# Address of the cache without memory: no process has memory there.
_NOWHERE, _PLANE = 1 << 60, 1 << 50


def end_ranges(
    end: CacheView | CacheSpan,
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    chunk_tokens: int = 1,
    num_heads: int | None = None,
) -> Ranges:
    """Lists the ranges of memory that hold these tokens: an array of END_RANGE, by offset.

    end, seq_lens, num_heads: as an end of kvx_core.migrate; the tables lie where the host can read
    chunk_tokens: tokens of a chunk. Ranges are longest with 1 for caches that keep the heads of a
                  token together, and with the block size for those that keep the tokens of a head
                  together
    plane:   K and V of each layer in turn, K alone where there is no V
    offset:  of the range in its plane; equal for the same token, head and dim at both ends if both
             use the same lengths, chunk_tokens and dtype
    address: of the memory, which is not touched. Tokens in null blocks are left out
    Raises InvalidArgumentError, OutOfRangeError; UnsupportedError for planes beside K and V.
    Scales are not listed: send them as they are.
    """
    span, lens = CacheSpan.of(end), SeqLens.of(seq_lens)
    chunk = integer("chunk_tokens", chunk_tokens)
    if chunk < 1:
        raise InvalidArgumentError(f"chunk_tokens is {chunk}, expected 1 or more")
    if span.view.planes:
        raise UnsupportedError(
            f"end has {len(span.view.planes)} planes beside K and V, which end_ranges does not "
            "list. List them with Plan.ranges against a view that describes the other end"
        )
    for i, layer in enumerate(span.view.layers):
        for kind, tensor in layer.tensors.items():
            if tensor.dtype.format.affine:
                raise UnsupportedError(
                    f"layers[{i}].{kind} is {tensor.dtype.name}, whose scales and zero points "
                    "end_ranges does not list. List them with Plan.ranges against a view that "
                    "describes the other end"
                )
    view = replace(span.view, k_scales=None, v_scales=None)
    span = replace(span, view=view)
    check_host_memory(
        {
            "end.block_table": span.block_table,
            "end.slots": span.slots,
            "end.starts": span.starts,
            "seq_lens": lens,
        }
    )
    lengths = lens.to_numpy()
    rows = span.block_table.num_rows if span.block_table else lens.seq_count
    per_row = np.repeat(-(-np.maximum(lengths, 0) // chunk), rows // max(lens.seq_count, 1))
    ends = np.cumsum(per_row)
    columns = np.arange(max(per_row.max(initial=0), 1))
    table = np.where(columns < per_row[:, None], (ends - per_row)[:, None] + columns, -1)
    num_chunks = max(int(per_row.sum()), 1)
    layers = [
        _virtual_cache(layer, num_heads, num_chunks, chunk, 2 * index)
        for index, layer in enumerate(view.layers)
    ]
    nowhere = CacheSpan(CacheView(tuple(layers), view.facts), BlockTable.of(table))
    # Of all transfers, copy engines' alone has a host that reads the tables of a device.
    options = MoveOptions(num_heads=num_heads, transfer=Transfer.COPY_ENGINE)
    with MigratePlan(span, nowhere, (span, nowhere), lens, options, True) as plan:
        found = plan.ranges()
    ranges = np.zeros(len(found), END_RANGE)
    ranges["plane"] = (found["dst"] - _NOWHERE) // _PLANE
    ranges["offset"] = (found["dst"] - _NOWHERE) % _PLANE
    ranges["address"], ranges["bytes"] = found["src"], found["bytes"]
    if not any(layer.v is not None for layer in view.layers):
        ranges["plane"] //= 2
    return _joined(ranges[np.lexsort((ranges["offset"], ranges["plane"]))])


def cut_of(ranges: Ranges) -> int:
    """The largest number of bytes that divides all offsets and lengths of the ranges; 0: any does.

    Two ends exchange it and cut their lists by the greatest common divisor.
    """
    return int(np.gcd.reduce(np.concatenate([ranges["offset"], ranges["bytes"]]), initial=0))


def cut(ranges: Ranges, cut_bytes: int) -> Ranges:
    """Cuts ranges into ranges of `cut_bytes` each, which begin at multiples of it.

    Two ends that hold every token and cut by the same number have equal lists of lengths, as
    transports want them.
    Raises InvalidArgumentError if a range is no multiple of cut_bytes.
    """
    most = cut_of(ranges)
    if cut_bytes < 1 or most % cut_bytes:
        raise InvalidArgumentError(
            f"cut_bytes is {cut_bytes}, expected a divisor of {most}: the ranges of this end begin "
            "and end at multiples of that. Take math.gcd of both ends' cut_of"
        )
    counts = (ranges["bytes"] // cut_bytes).astype(np.int64)
    pieces = np.repeat(ranges, counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    steps = ((np.arange(len(pieces)) - firsts) * cut_bytes).astype(np.uint64)
    pieces["offset"] += steps
    pieces["address"] += steps
    pieces["bytes"] = cut_bytes
    return pieces


def _virtual_cache(
    layer: CacheDesc, num_heads: int | None, num_chunks: int, chunk: int, plane: int
) -> CacheDesc:
    heads = layer.num_kv_heads if num_heads is None else num_heads

    def tensor(like: TensorDesc, head_dim: int, plane: int) -> TensorDesc:
        dim = head_dim // like.dtype.numbers  # units
        return TensorDesc(
            dtype=like.dtype,
            layout=Layout.BLOCK_HND,
            memory=like.memory,
            shape=(num_chunks, heads, chunk, dim),
            stride=(heads * chunk * dim, chunk * dim, dim, 1),
            data=_NOWHERE + plane * _PLANE,
        )

    v = None if layer.v is None else tensor(layer.v, layer.v_head_dim, plane + 1)
    return CacheDesc.from_kv(tensor(layer.k, layer.head_dim, plane), v)


def _joined(ranges: Ranges) -> Ranges:
    """Joins ranges that continue the one before; `ranges` are in order."""
    if not len(ranges):
        return ranges
    before, after = ranges[:-1], ranges[1:]
    continues = (
        (before["plane"] == after["plane"])
        & (before["offset"] + before["bytes"] == after["offset"])
        & (before["address"] + before["bytes"] == after["address"])
    )
    firsts = np.flatnonzero(np.concatenate([[True], ~continues]))
    joined = ranges[firsts].copy()
    joined["bytes"] = np.add.reduceat(ranges["bytes"], firsts)
    return joined
