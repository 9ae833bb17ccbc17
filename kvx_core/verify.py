"""verify: compares the tokens of two caches through their descriptors. Spec: E.3

Either end is copied, a piece at a time, into a small array by the kvx_migrate_kv that migrate uses.
So whatever can be migrated can be verified, and all that happens here is to compare two arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvx_core.cache import CacheDesc
from kvx_core.errors import InvalidArgumentError, KvxError, OutOfRangeError, UnsupportedError
from kvx_core.facts import CacheFacts, ReorderRotary, compare
from kvx_core.lookup import find_tokens, table_of_plane
from kvx_core.migrate import copy_tokens, rows_per_sequence
from kvx_core.reorder import dims_in_order, reordered
from kvx_core.scales import ScaleDesc
from kvx_core.tables import BlockTableFormat, SeqLens
from kvx_core.tensor_desc import TensorDesc
from kvx_core.tensors import TensorLike, row_major
from kvx_core.types import DType, Layout, Memory
from kvx_core.view import CacheSpan, CacheView
from kvx_core.words import integer, wrong

_PIECE_BYTES = 4 << 20  # of the F32 copy of one tensor of one end: stays in cache


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two caches differ."""

    layer: int
    kv: Literal["K", "V"]
    sequence: int  # row of the table: a sequence, or one beam of it
    token: int  # within the tokens compared of that sequence
    head: int  # within the heads compared
    dim: int  # as the source counts, where K's rotary dims are in another order
    src_value: float  # with its scale; the byte of a U8 cache
    dst_value: float

    def __str__(self) -> str:
        return (
            f"layer {self.layer} {self.kv}, sequence {self.sequence}, token {self.token}, "
            f"head {self.head}, dim {self.dim}: {self.src_value!r} at the source, "
            f"{self.dst_value!r} at the destination"
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """What verify found. True if the caches agree."""

    ok: bool
    num_tokens: int  # stored at both ends
    num_values: int  # compared, in all layers, until the first difference
    difference: Difference | None  # by layer, K before V, sequence, token, head, dim the first

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.difference is not None:
            return f"differs at {self.difference}"
        return f"equal: {self.num_tokens} tokens, {self.num_values} values"


def verify(
    src: CacheView | CacheSpan,
    dst: CacheView | CacheSpan,
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    num_heads: int | None = None,
    tolerance: Literal["exact", "codec"] = "exact",
) -> Verification:
    """Compares what migrate with the same arguments reads with what it writes.

    src, dst, seq_lens, num_heads: as for migrate. Tokens that either end has not (null blocks,
               negative slots) are passed over. K's dims are compared in the order that facts say.
    tolerance: "exact": the same bytes where dtypes are the same and there are no scales, else the
               same values, where NaN equals NaN. "codec": each value is the other one rounded to
               its dtype and scale
    Reads a few MiB at a time. Mutates nothing.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
    Spec: E.3, E.6
    """
    if not isinstance(tolerance, str) or tolerance not in ("exact", "codec"):
        raise wrong("tolerance", tolerance, "'exact' or 'codec'")
    src, dst = CacheSpan.of(src, name="src"), CacheSpan.of(dst, name="dst")
    lens = SeqLens.of(seq_lens)
    if num_heads is not None:
        num_heads = integer("num_heads", num_heads)
    _check_pairs(src, dst, num_heads)
    rows = np.repeat(lens.to_numpy(), rows_per_sequence(src, dst, lens))
    if (rows < 0).any():
        raise OutOfRangeError(f"seq_lens has {rows.min()}, expected at least 0 (spec 5.3)")
    found = compare(src.view.facts, dst.view.facts, same_model=True)
    for transform in found.transforms:
        reordered(src, dst, transform)  # refuses what migrate refuses
    ends = _End("src", src, rows, num_heads), _End("dst", dst, rows, num_heads, found.transforms)
    has_v = any(layer.v is not None for layer in src.view.layers)
    halves: tuple[_Half, ...] = ("K", "V") if has_v else ("K",)
    stored = {kv: ends[0].is_stored(kv) & ends[1].is_stored(kv) for kv in halves}
    num_tokens = int(np.count_nonzero(stored["K"]))
    num_values = 0
    for layer in range(len(src.view.layers)):
        for kv in ends[0].halves(layer):
            for lo, hi in ends[0].pieces(layer, kv):
                differs = _differing(*ends, layer, kv, lo, hi, tolerance)
                differs &= stored[kv][lo:hi, None, None]
                num_values += int(np.count_nonzero(stored[kv][lo:hi])) * differs[0].size
                if differs.any():
                    token, head, dim = map(int, np.unravel_index(differs.argmax(), differs.shape))
                    difference = _difference(*ends, layer, kv, lo + token, head, dim)
                    return Verification(False, num_tokens, num_values, difference)
    return Verification(True, num_tokens, num_values, None)


_Half = Literal["K", "V"]
_Array = npt.NDArray[Any]


def _check_pairs(src: CacheSpan, dst: CacheSpan, num_heads: int | None) -> None:
    """The rules of a migration that need both ends; the others are checked as each is read."""
    at_src, at_dst = src.view.layers, dst.view.layers
    for name, end in (("src", src), ("dst", dst)):
        if end.view.planes:
            raise UnsupportedError(
                f"{name} has {len(end.view.planes)} planes, expected none: verify compares K and V "
                "of layers. Leave the planes out with dataclasses.replace(view, planes=())"
            )
    if not at_src or len(at_src) != len(at_dst):
        raise InvalidArgumentError(
            f"dst has {len(at_dst)} layers, expected as many as src has, {len(at_src)}, and not 0 "
            "(spec E.3)"
        )
    for name, layers in (("src", at_src), ("dst", at_dst)):
        if layers[0].k.memory is Memory.DEVICE:
            raise UnsupportedError(
                f"{name}.layers[0].k.memory is DEVICE, expected HOST, where verify compares. Copy "
                "the cache there first"
            )
    sizes = ["head_dim", "v_head_dim"] if num_heads else ["head_dim", "v_head_dim", "num_kv_heads"]
    for i, (a, b) in enumerate(zip(at_src, at_dst, strict=True)):
        for size in sizes:
            if getattr(a, size) != getattr(b, size):
                raise InvalidArgumentError(
                    f"dst.layers[{i}].{size} is {getattr(b, size)}, expected {getattr(a, size)} as "
                    "at src (spec E.3)"
                )


class _End:
    """One end. Its tokens are numbered through all rows."""

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
        self.ends = rows.cumsum()  # number of the token after each
        self.num_tokens = int(self.ends[-1]) if len(rows) else 0
        self.num_heads = num_heads
        self.transforms = transforms
        if span.slots is not None and span.slots.token_count != self.num_tokens:
            raise InvalidArgumentError(
                f"{name}.slots.token_count is {span.slots.token_count}, expected the sum of "
                f"seq_lens {self.num_tokens} (spec E.3)"
            )
        self.starts = np.zeros_like(rows) if span.starts is None else span.starts.to_numpy()
        if len(self.starts) != len(rows):
            raise InvalidArgumentError(
                f"{name}.starts.seq_count is {len(self.starts)}, expected {len(rows)}, one per row "
                "(spec E.3)"
            )

    def halves(self, layer: int) -> tuple[_Half, ...]:
        return ("K",) if self.span.view.layers[layer].v is None else ("K", "V")

    def pieces(self, layer: int, kv: _Half) -> Iterator[tuple[int, int]]:
        """Ranges that cover all tokens, each small enough to be copied."""
        _, heads, head_dim = self._shape(layer, kv, 0)
        step = max(1, _PIECE_BYTES // (heads * head_dim * 4))
        for lo in range(0, self.num_tokens, step):
            yield lo, min(lo + step, self.num_tokens)

    def dtype(self, layer: int, kv: _Half) -> DType:
        return self._tensor(layer, kv).dtype

    def scale(self, layer: int, kv: _Half) -> ScaleDesc | None:
        scales = self.span.view.k_scales if kv == "K" else self.span.view.v_scales
        return None if scales is None else scales[layer]

    def zero(self, layer: int, kv: _Half) -> ScaleDesc | None:
        zeros = self.span.view.k_zeros if kv == "K" else self.span.view.v_zeros
        return None if zeros is None else zeros[layer]

    def values(self, layer: int, kv: _Half, lo: int, hi: int, *, scaled: bool = True) -> _Array:
        """Tokens lo to hi: (hi - lo, heads, head_dim), float32."""
        scale = self.scale(layer, kv) if scaled else None
        shape = self._shape(layer, kv, hi - lo)
        read = self._read(layer, kv, lo, np.zeros(shape, np.float32), DType.F32, scale)
        return self._in_order(kv, read)

    def stored(self, layer: int, kv: _Half, lo: int, hi: int) -> _Array:
        """Tokens lo to hi: (hi - lo, heads, head_dim), the bytes as unsigned integers.

        Of a format with several numbers in a unit, those of its numbers in float32.
        """
        dtype = _by_number(self.dtype(layer, kv))
        shape = self._shape(layer, kv, hi - lo)
        read = self._read(layer, kv, lo, np.zeros(shape, f"u{dtype.itemsize}"), dtype)
        return self._in_order(kv, read)

    def is_stored(self, kv: _Half) -> npt.NDArray[np.bool_]:
        """Which tokens are stored: the same in all layers, since they share a table."""
        table = self.span.block_table
        span = replace(self.span, block_table=None if table is None else table.of_parts())
        try:
            places = find_tokens(span, SeqLens.of(self.rows), v=kv == "V")
        except KvxError as error:
            raise type(error)(f"verify reads {self.name} as src: {error}") from None
        found: npt.NDArray[np.bool_] = places["block"] >= 0
        return found

    def _in_order(self, kv: _Half, read: _Array) -> _Array:
        """`read` with K's dims in the order of the source."""
        for transform in self.transforms if kv == "K" else ():
            first = dims_in_order(transform.dst, transform.src, transform.rotary_dim)
            others = np.arange(len(first), read.shape[-1])
            read = read[..., np.concatenate([first, others])]
        return read

    def _tensor(self, layer: int, kv: _Half) -> TensorDesc:
        return self.span.view.layers[layer].tensors[kv.lower()]

    def _shape(self, layer: int, kv: _Half, num_tokens: int) -> tuple[int, int, int]:
        cache = self.span.view.layers[layer]
        heads = self.num_heads or cache.num_kv_heads
        return num_tokens, heads, cache.head_dim if kv == "K" else cache.v_head_dim

    def _read(
        self,
        layer: int,
        kv: _Half,
        lo: int,
        out: _Array,
        dtype: DType,
        scale: ScaleDesc | None = None,
    ) -> _Array:
        """Fills `out`, (tokens, heads, head_dim) of `dtype`, with tokens from `lo` on.

        Those that are not stored keep what they held. Returns `out`.
        """
        cache, table = self.span.view.layers[layer], self.span.block_table
        view = replace(self.span.view, k_scales=None, v_scales=None, k_zeros=None, v_zeros=None)
        if kv == "V" and table is not None and table.format is BlockTableFormat.KV_OFFSETS:
            # Such a table finds V only beside K.
            k_shape = (*out.shape[:2], cache.head_dim)
            k_dtype = _by_number(cache.k.dtype)
            k_out = _dense(np.zeros(k_shape, f"u{k_dtype.itemsize}"), k_dtype)
            target = CacheDesc.from_kv(k_out, _dense(out, dtype))
            view = replace(
                view, layers=(cache,), v_scales=(scale,), v_zeros=(self.zero(layer, "V"),)
            )
            if cache.k.dtype.format.affine:
                beside = (self.scale(layer, "K"),), (self.zero(layer, "K"),)
                view = replace(view, k_scales=beside[0], k_zeros=beside[1])
        else:
            alone = CacheDesc.from_kv(self._tensor(layer, kv), pool=cache.pool)
            if table is not None and table.has_planes:
                before = sum(len(one.tensors) for one in self.span.view.layers[:layer])
                table = table_of_plane(table, before + (kv == "V"))
            target = CacheDesc.from_kv(_dense(out, dtype))
            view = replace(
                view, layers=(alone,), k_scales=(scale,), k_zeros=(self.zero(layer, kv),)
            )
        hi = lo + out.shape[0]
        begins = np.clip(lo - (self.ends - self.rows), 0, self.rows)
        lens = np.clip(hi - (self.ends - self.rows), 0, self.rows) - begins
        span = replace(self.span, view=view)
        if self.span.slots is None:
            parts = None if table is None else table.of_parts()
            span = replace(span, block_table=parts, starts=SeqLens.of(self.starts + begins))
        else:
            span = replace(span, slots=self.span.slots.part(lo, hi))
        copy = CacheView(layers=(target,), facts=CacheFacts()).at(slots=np.arange(hi - lo))
        try:
            copy_tokens(span, copy, SeqLens.of(lens), num_heads=out.shape[1])
        except KvxError as error:
            raise type(error)(f"verify reads {self.name} as src: {error}") from None
        return out


def _by_number(dtype: DType) -> DType:
    """`dtype`, or F32 to read a format by whose elements are no numbers by themselves."""
    return DType.F32 if dtype.numbers > 1 or dtype.format.affine else dtype


def _dense(array: _Array, dtype: DType) -> TensorDesc:
    """(tokens, heads, head_dim) as the K or V of a cache of one block."""
    shape = (1, *array.shape)
    address = array.__array_interface__["data"][0]
    return TensorDesc(
        dtype=dtype,
        layout=Layout.BLOCK_NHD,
        memory=Memory.HOST,
        shape=shape,
        stride=row_major(shape),
        data=address,
        owner=array,
    )


def _differing(
    src: _End,
    dst: _End,
    layer: int,
    kv: _Half,
    lo: int,
    hi: int,
    tolerance: Literal["exact", "codec"],
) -> npt.NDArray[np.bool_]:
    """Which values of tokens lo to hi differ: (hi - lo, heads, head_dim)."""
    at = layer, kv, lo, hi
    scales = src.scale(layer, kv), dst.scale(layer, kv)
    if src.dtype(layer, kv) is dst.dtype(layer, kv) and scales == (None, None):
        return np.not_equal(src.stored(*at), dst.stored(*at))
    x, y = src.values(*at), dst.values(*at)
    differs: npt.NDArray[np.bool_] = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if tolerance == "codec" and differs.any():
        differs &= ~_is_rounded(x, y, dst, layer, kv, lo, hi)
        differs &= ~_is_rounded(y, x, src, layer, kv, lo, hi)
    return differs


def _is_rounded(
    exact: _Array, value: _Array, end: _End, layer: int, kv: _Half, lo: int, hi: int
) -> npt.NDArray[np.bool_]:
    """Where `value`, read from `end`, is `exact` rounded to nearest in its codec, saturating."""
    rounding = end.dtype(layer, kv).format.rounding
    if rounding is None:
        return np.zeros(exact.shape, np.bool_)
    mantissa, smallest, largest = rounding
    scale = end.scale(layer, kv)
    stored = value if scale is None else end.values(layer, kv, lo, hi, scaled=False)
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN may signal
        exact, value, stored = (array.astype(np.float64) for array in (exact, value, stored))
        if scale is None:
            factor, slack = np.ones(()), np.zeros(())
        else:
            # A token and head has one scale, which any number but 0 tells; if there is none, the
            # largest scale bounds it. Dividing by the scale and multiplying with it each round.
            told = np.where((stored != 0) & np.isfinite(stored), value / stored, 0.0)
            factor = told.max(axis=-1, keepdims=True)
            factor = np.where(factor == 0, scale.to_numpy().max(), factor)
            slack = np.abs(exact) * 2.0**-22
        # The smaller of the two has the finer step where they lie on both sides of a power of 2.
        finer = np.minimum(np.abs(exact / factor), np.abs(stored))
        exponent = np.where(finer == 0, smallest, np.maximum(np.frexp(finer)[1] - 1, smallest))
        half_step = np.ldexp(factor, exponent - mantissa - 1)
        near = np.abs(exact - value) <= half_step + slack
        reached = np.minimum(np.abs(value), largest * factor)  # F16 and BF16 go on to infinity
        cut = (np.abs(stored) >= largest) & (np.abs(exact) >= reached - slack)
        rounded: npt.NDArray[np.bool_] = near | (cut & (np.sign(exact) == np.sign(value)))
    return rounded


def _difference(
    src: _End, dst: _End, layer: int, kv: _Half, number: int, head: int, dim: int
) -> Difference:
    sequence = int(np.searchsorted(src.ends, number, side="right"))

    def value(end: _End) -> float:
        at = layer, kv, number, number + 1
        array = end.stored(*at) if end.dtype(layer, kv) is DType.U8 else end.values(*at)
        return float(array[0, head, dim])

    return Difference(
        layer=layer,
        kv=kv,
        sequence=sequence,
        token=number - int(src.ends[sequence] - src.rows[sequence]),
        head=head,
        dim=dim,
        src_value=value(src),
        dst_value=value(dst),
    )
