"""Reads the tokens of one end of verify, a piece at a time, through kvx_migrate_kv. Spec: E.3"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts, ReorderRotary
from kvx_core.desc.find_tokens import find_tokens, num_entries
from kvx_core.desc.landing import Landing
from kvx_core.desc.planes import Plane
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import own, row_major
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import InvalidArgumentError, KvxError
from kvx_core.ops.holds import require_holds
from kvx_core.ops.migrate import copy_tokens
from kvx_core.ops.narrow import narrowed
from kvx_core.ops.reorder import dims_in_order
from kvx_core.types import Axis, BlockTableFormat, DType, Layout, ScaleGranularity

PIECE_BYTES = 4 << 20  # of the F32 copy of one tensor of one end: stays in cache

Array = npt.NDArray[Any]


class End:
    """One end: a span, and the tokens of it that are read."""

    def __init__(
        self,
        name: str,
        span: CacheSpan,
        rows: npt.NDArray[np.int64],
        num_heads: int | None,
        transforms: Sequence[ReorderRotary] = (),  # that this end's K is put through when read
    ) -> None:
        self.name = name
        self.span = span
        self.rows = rows  # tokens of each
        self.num_tokens = int(rows.sum())
        self.num_heads = num_heads
        self.transforms = transforms
        self._blocks: dict[tuple[bool, int, int | None], npt.NDArray[np.int64]] = {}
        with self.named():
            span.view.require_current("src")
            span.require_in_place("src")
        if span.slots is not None and span.slots.token_count != self.num_tokens:
            raise InvalidArgumentError(
                f"{name}.slots.token_count is {span.slots.token_count}, expected the sum of "
                f"seq_lens {self.num_tokens} (spec E.3)"
            )
        with self.named():
            require_holds(name, span, rows)
        self.starts = np.zeros_like(rows) if span.starts is None else span.starts.to_numpy()
        if len(self.starts) != len(rows):
            raise InvalidArgumentError(
                f"{name}.starts.seq_count is {len(self.starts)}, expected {len(rows)}, one per row "
                "(spec E.3)"
            )

    @property
    def table(self) -> BlockTable | None:
        """The table of the span, for calls that each move some of its tokens."""
        table = self.span.block_table
        return None if table is None else table.of_parts().with_holes()

    def reader(self, layer: int, kv: str) -> Reader:
        """Of K or V, "k" or "v", of a layer of the span."""
        return KvReader(self, layer, kv)

    def plane_reader(self, plane: Plane) -> Reader:
        """Of a plane of the span."""
        return _PlaneReader(self, plane)

    def blocks(self, v: bool, layer: int, plane: int | None) -> npt.NDArray[np.int64]:
        """The block of each token, or entry, of K, V or a plane; -1: it is not stored."""
        table = self.span.block_table
        if table is None or not table.has_planes:
            layer = 0  # one table for all layers
        if (v, layer, plane) not in self._blocks:
            # All rows at once: a table that is exact has no entries to spare.
            whole = None if table is None else table.with_holes()
            span = replace(self.span, block_table=whole)
            with self.named():
                places = find_tokens(span, SeqLens.of(self.rows), v=v, layer=layer, plane=plane)
            self._blocks[v, layer, plane] = places["block"]
        return self._blocks[v, layer, plane]

    def named(self) -> _Named:
        """Errors of calls in this context name the end that they read."""
        return _Named(self.name)


class _Named:
    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if isinstance(error, KvxError):
            raise type(error)(f"verify reads {self._name} as src: {error}") from None


class Reader(ABC):
    """Reads K, V or a plane. Its entries, tokens mostly, are numbered through all rows."""

    dtype: DType
    scale: ScaleDesc | None
    zero: ScaleDesc | None
    heads: int
    dim: int
    first_head: int  # of the end

    def __init__(self, end: End, tokens_per_entry: int) -> None:
        self.end = end
        self.rows = num_entries(end.rows, tokens_per_entry)  # entries of each
        self.ends = self.rows.cumsum()  # number of the entry after each
        self.num_entries = int(self.rows.sum())

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges that cover all entries, each small enough to be copied."""
        step = self._step()
        for lo in range(0, self.num_entries, step):
            yield lo, min(lo + step, self.num_entries)

    def values(self, lo: int, hi: int, *, scaled: bool = True) -> Array:
        """Entries lo to hi: (hi - lo, heads, dim), float32."""
        out = np.zeros((hi - lo, self.heads, self.dim), np.float32)
        return self._read(lo, out, DType.F32, scaled=scaled)

    def stored(self, lo: int, hi: int) -> Array:
        """Entries lo to hi: (hi - lo, heads, dim), the bytes as unsigned integers.

        Of a format with several numbers in a unit, those of its numbers in float32.
        """
        dtype = _by_number(self.dtype)
        out = np.zeros((hi - lo, self.heads, self.dim), f"u{dtype.itemsize}")
        return self._read(lo, out, dtype, scaled=False)

    def rounded(self, values: Array) -> Array | None:
        """Float32 `values`, (entries, heads, dim), as this end stores them: encoded in its format,
        and decoded. None if its units cover several tokens.

        Only of a format whose numbers share what is stored with them.
        """
        values = np.ascontiguousarray(self.in_order(values, back=True))
        n, heads, dim = values.shape
        dtype, scale = self.dtype, self.scale
        if dtype.format.affine and (scale is None or self.covers_tokens):
            return None
        units = np.zeros((n, heads, dim // dtype.numbers), f"V{dtype.itemsize}")
        fields: dict[str, Any] = {}
        if scale is not None and dtype.format.affine:
            groups = scale.shape[3] if len(scale.shape) == 4 else None
            fields["k_scales"] = (_like(scale, (1, n, heads, groups)),)
            zero = self.zero
            if zero is not None and not dtype.format.grouped:
                zero = _like(zero, (1, n, heads, groups))
            fields["k_zeros"] = None if zero is None else (zero,)
        here = _of_one_block(values, DType.F32)
        there = replace(_of_one_block(units, dtype), **fields)
        again = np.zeros_like(values)
        back = _of_one_block(again, DType.F32)
        lens = SeqLens.of([n])
        copy_tokens(here.at(), there.at(), lens)
        copy_tokens(there.at(), back.at(), lens)
        return self.in_order(again)

    @property
    def covers_tokens(self) -> bool:
        """Whether a scale covers the tokens of a block (PER_CHANNEL)."""
        return self.scale is not None and self.scale.granularity is ScaleGranularity.PER_CHANNEL

    def half_steps(self, lo: int, hi: int) -> Array:
        """How far a number of units that cover tokens may be from what was encoded: (hi - lo,
        heads, dim), float64: half a step, and the rounding of scale and zero point."""
        assert self.scale is not None
        assert self.zero is not None
        blocks = np.maximum(self.blocks()[lo:hi], 0)
        scale, zero = (
            np.abs(each.to_numpy().astype(np.float64)[blocks, self.first_head :][:, : self.heads])
            for each in (self.scale, self.zero)
        )
        digits = 22 if {self.scale.dtype, self.zero.dtype} == {DType.F32} else 7
        if self.dtype is DType.U8_ZERO:  # whose zero point counts steps
            zero = zero * scale
        return self.in_order(scale / 2 + (255 * scale + zero) * 2.0**-digits)

    def in_order(self, read: Array, *, back: bool = False) -> Array:
        """`read` with its dims in the order of the source; back: from it into that of this end."""
        del back
        return read

    def place(self, number: int) -> tuple[int, int]:
        """Row of an entry, and which one of it this is."""
        row = int(np.searchsorted(self.ends, number, side="right"))
        return row, number - int(self.ends[row] - self.rows[row])

    def cut(self, lo: int, hi: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each row, the first of its entries among lo to hi, and how many there are."""
        first = self.ends - self.rows
        begins = np.clip(lo - first, 0, self.rows)
        return begins, np.clip(hi - first, 0, self.rows) - begins

    def _step(self) -> int:
        return max(1, PIECE_BYTES // (self.heads * self.dim * 4))

    def is_stored(self) -> npt.NDArray[np.bool_]:
        """Which entries are stored."""
        return self.blocks() >= 0

    @property
    @abstractmethod
    def may_leave_out(self) -> bool:
        """Whether entries that are not stored are meant to be left out: slots name them, or a table
        has holes."""

    @abstractmethod
    def blocks(self) -> npt.NDArray[np.int64]:
        """The block of each entry; -1: it is not stored."""

    @abstractmethod
    def _read(self, lo: int, out: Array, dtype: DType, *, scaled: bool) -> Array:
        """Fills `out`, (entries, heads, dim) of `dtype`, with entries from `lo` on.

        Those that are not stored keep what they held. Returns `out`.
        """


class KvReader(Reader):
    """K or V of a layer."""

    def __init__(self, end: End, layer: int, kv: str) -> None:
        super().__init__(end, 1)
        view = end.span.view
        self.layer, self.kv = layer, kv
        self.cache = cache = view.layers[layer]
        self.dtype = cache.tensors[kv].dtype
        scales, zeros = (getattr(view, f"{kv}_{name}") for name in ("scales", "zeros"))
        self.scale = None if scales is None else scales[layer]
        self.zero = None if zeros is None else zeros[layer]
        self.heads, self.first_head = end.num_heads or cache.num_kv_heads, end.span.head_start
        self.dim = cache.head_dim if kv == "k" else cache.v_head_dim

    @property
    def may_leave_out(self) -> bool:
        table = self.end.span.block_table
        return table is None or table.has_holes

    def blocks(self) -> npt.NDArray[np.int64]:
        return self.end.blocks(self.kv == "v", self.layer, None)

    def in_order(self, read: Array, *, back: bool = False) -> Array:
        """`read` with K's dims in the order of the source; back: from it into that of this end."""
        for transform in self.end.transforms if self.kv == "k" else ():
            first = dims_in_order(transform.dst, transform.src, transform.rotary_dim)
            first = np.argsort(first) if back else first
            others = np.arange(len(first), read.shape[-1])
            read = read[..., np.concatenate([first, others])]
        return read

    def _read(self, lo: int, out: Array, dtype: DType, *, scaled: bool) -> Array:
        cache, table = self.cache, self.end.table
        scale, zero = (self.scale if scaled else None,), (self.zero,)
        beside = self.kv == "v" and table is not None and _is_offsets(table)
        fields: dict[str, Any] = {"k_scales": scale, "k_zeros": zero}
        landing = Landing(out, cache.k)
        target = CacheDesc.from_kv(_dense(landing, dtype))
        if beside:  # such a table finds V only beside K
            k_dtype = _by_number(cache.k.dtype)
            k_out = np.zeros((*out.shape[:2], cache.head_dim), f"u{k_dtype.itemsize}")
            k = _dense(Landing(k_out, cache.k), k_dtype)
            target = CacheDesc.from_kv(k, _dense(landing, dtype))
            fields = {"v_scales": scale, "v_zeros": zero}
            if cache.k.dtype.format.affine:
                keys = self.end.reader(self.layer, "k")
                fields |= {"k_scales": (keys.scale,), "k_zeros": (keys.zero,)}
        chosen = [(self.layer, "kv" if beside else self.kv)]
        view, table = narrowed(self.end.span.view, table, chosen, **fields)
        span = replace(self.end.span, view=view, block_table=table)
        begins, lens = self.cut(lo, lo + len(out))
        if span.slots is None:
            span = replace(span, starts=SeqLens.of(own(self.end.starts + begins)))
        else:
            span = replace(span, slots=span.slots.part(lo, lo + len(out)))
        copy = CacheView(layers=(target,), facts=CacheFacts()).at(slots=own(np.arange(len(out))))
        with self.end.named():
            copy_tokens(span, copy, SeqLens.of(own(lens)), num_heads=out.shape[1])
        landing.read_back()
        return self.in_order(out)


class _PlaneReader(Reader):
    """A plane, alone: with its own table or slots, or with those of the span."""

    def __init__(self, end: End, plane: Plane) -> None:
        super().__init__(end, plane.tokens_per_entry)
        self.plane = plane
        self.dtype, self.scale, self.zero = plane.dtype, plane.scale, plane.zero
        self.heads = plane.extent(Axis.HEAD)
        self.first_head = 0 if plane.replicated else end.span.head_start
        if end.num_heads and not plane.replicated:
            self.heads = end.num_heads
        self.dim = plane.extent(Axis.DIM) * plane.dtype.numbers

    @property
    def may_leave_out(self) -> bool:
        plane = self.plane
        if plane.tokens_per_entry == 0 or plane.slots is not None:
            return True
        table = plane.block_table or self.end.span.block_table
        return table is None or table.has_holes

    def blocks(self) -> npt.NDArray[np.int64]:
        return self.end.blocks(False, 0, self.end.span.view.planes.index(self.plane))

    def _step(self) -> int:
        # `_target` has a table of as many columns as entries of a row are read at once.
        return max(1, min(super()._step(), PIECE_BYTES // (8 * max(len(self.rows), 1))))

    def _read(self, lo: int, out: Array, dtype: DType, *, scaled: bool) -> Array:
        begins, counts = self.cut(lo, lo + len(out))
        span = self._alone(lo, lo + len(out), begins, scaled=scaled)
        tokens = counts * max(self.plane.tokens_per_entry, 1)
        cut = None if self.plane.replicated else out.shape[1]
        landing = Landing(out, self.plane)
        target = self._target(landing, dtype, counts)
        with self.end.named():
            copy_tokens(span, target, SeqLens.of(own(tokens)), num_heads=cut)
        landing.read_back()
        return out

    def _alone(self, lo: int, hi: int, begins: npt.NDArray[np.int64], *, scaled: bool) -> CacheSpan:
        """The plane without its view's layers, from these entries on."""
        end, n = self.end, self.plane.tokens_per_entry
        plane = self.plane.of_parts()
        if plane.block_table is not None:
            plane = replace(plane, block_table=plane.block_table.with_holes())
        if not scaled:
            plane = replace(plane, scale=None)
        is_own = n == 0 or plane.block_table is not None or plane.slots is not None
        slots = plane.slots if is_own else end.span.slots
        if n == 1 and slots is not None:
            slots = slots.part(lo, hi)
        if is_own:
            plane = replace(plane, slots=slots)
        view = replace(
            end.span.view,
            layers=(),
            planes=(plane,),
            k_scales=None,
            v_scales=None,
            k_zeros=None,
            v_zeros=None,
            dense=is_own or end.span.view.dense,
        )
        return CacheSpan(
            view=view,
            block_table=None if is_own else end.table,
            slots=None if is_own else slots,
            starts=None if n == 0 or slots else SeqLens.of(own(end.starts + begins * n)),
            head_start=0 if plane.replicated else end.span.head_start,
        )

    def _target(self, out: Landing, dtype: DType, counts: npt.NDArray[np.int64]) -> CacheSpan:
        """`out` as the plane of a cache whose blocks have one entry each."""
        n, num_rows = self.plane.tokens_per_entry, len(counts)
        first = counts.cumsum() - counts
        columns = np.arange(max(1, counts.max(initial=0)))
        ids = np.where(columns < counts[:, None], first[:, None] + columns, -1)
        plane = Plane(
            axes=(Axis.BLOCK, Axis.HEAD, Axis.DIM),
            role=self.plane.role,
            layer=self.plane.layer,
            tokens_per_entry=n,
            replicated=self.plane.replicated,
            slots=SlotMapping.of(own(ids[:, 0].copy())) if n == 0 else None,
            **out.fields(dtype),
        )
        if n == 0:
            return CacheView((), CacheFacts(), planes=(plane,), dense=True).at()
        view = CacheView((), CacheFacts(), planes=(plane,))
        return view.at(block_table=own(ids.reshape(num_rows, len(columns))))


def _is_offsets(table: BlockTable) -> bool:
    return table.format is BlockTableFormat.KV_OFFSETS


def _by_number(dtype: DType) -> DType:
    """`dtype`, or F32 to read a format by whose elements are no numbers by themselves."""
    return DType.F32 if dtype.numbers > 1 or dtype.format.affine else dtype


def _like(scale: ScaleDesc, shape: tuple[int | None, ...]) -> ScaleDesc:
    """Room for other scales of the same dtype, of units within a token and head."""
    extents = [extent for extent in shape if extent is not None]
    kind = ScaleGranularity.PER_GROUP if len(extents) == 4 else ScaleGranularity.PER_TOKEN_HEAD
    room = np.zeros(extents, f"u{scale.dtype.itemsize}")
    return ScaleDesc(granularity=kind, **Landing(room).fields(scale.dtype))


def _dense(landing: Landing, dtype: DType) -> TensorDesc:
    """(tokens, heads, head_dim) as the K or V of a cache of one block."""
    fields = landing.fields(dtype)
    shape = (1, *fields["shape"])
    fields |= {"shape": shape, "stride": row_major(shape)}
    return TensorDesc(layout=Layout.BLOCK_NHD, **fields)


def _of_one_block(array: Array, dtype: DType) -> CacheView:
    k = _dense(Landing(array), dtype)
    return CacheView((CacheDesc.from_kv(k),), CacheFacts(), dense=True)
