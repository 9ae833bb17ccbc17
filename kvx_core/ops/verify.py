"""verify: compares the tokens of two caches through their descriptors. Spec: E.3

kvx_migrate_kv copies both ends, piece by piece, into small arrays (readers.py), which are compared
here. So every cache that can be migrated can be verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import bad_argument, integer
from kvx_core.desc.facts import compare
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.planes import Plane, role_name
from kvx_core.desc.state_pieces import matched_states, require_state_tokens
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.tensors import Borrowed, TensorLike, tensor_of
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.ops.migrate import rows_per_sequence
from kvx_core.ops.readers import Array, End, Reader
from kvx_core.ops.reorder import reordered
from kvx_core.types import Axis, DType, Memory


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two caches differ."""

    layer: int  # of the view; of a plane, its own number
    kv: str  # "K", "V" or, of a plane, the name of its role
    sequence: int  # row of the table: a sequence, or one beam of it
    token: int  # within the tokens compared of that sequence; of a plane, which entry
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
    """The result of verify. True if the caches agree."""

    ok: bool
    num_tokens: int  # stored at both ends: of K or, in a view of planes, entries of the first
    num_values: int  # compared, in all layers, until the first difference
    # By layer, K before V, then planes, sequence, token, head, dim the first.
    difference: Difference | None
    # Tokens, or entries, that were not compared: an end has no place for them. If its table is not
    # one with holes, `ok` is False.
    num_left_out: int = 0
    max_error: float = 0.0  # the largest distance of finite values that were compared
    mean_squared_error: float = 0.0  # of all of these

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.difference is not None:
            return f"differs at {self.difference}"
        found = f"{self.num_tokens} tokens, {self.num_values} values"
        if self.max_error:
            found += f", the largest error {self.max_error:.3g}, its mean square "
            found += f"{self.mean_squared_error:.3g}"
        if self.num_left_out:
            found += f"; {self.num_left_out} tokens have no place at one of the ends"
        return f"{'equal' if self.ok else 'incomplete'}: {found}"


def verify(
    src: CacheView | CacheSpan,
    dst: CacheView | CacheSpan,
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    num_heads: int | None = None,
    tolerance: Literal["exact", "codec"] | float = "exact",
) -> Verification:
    """Compares what migrate with the same arguments reads with what it writes.

    src, dst, seq_lens, num_heads: as for migrate, planes included. Tokens that are null at either
               end (null blocks, negative slots) are counted and not compared; where a table is not
               one with holes, the result is False. K's dims are compared in the order that the
               facts give.
    tolerance: "exact": the same bytes where dtypes are the same and there are no scales, else the
               same values, where NaN equals NaN. "codec": each value is the other one as its
               format stores it: rounded to its dtype and scale or, in units of several numbers,
               encoded with the others. A number: how far two values may be apart
    Reads a few MiB at a time, and back from a device. Mutates nothing.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
    Spec: E.3, E.6
    """
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    is_word = isinstance(tolerance, str) and tolerance in ("exact", "codec")
    if not (is_number and 0 <= float(tolerance) < np.inf) and not is_word:
        raise bad_argument(
            "tolerance", tolerance, "'exact', 'codec' or a finite number of at least 0"
        )
    src, dst = CacheSpan.of(src, name="src"), CacheSpan.of(dst, name="dst")
    src, dst = matched_states(src, dst, convert=True)
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
    require_state_tokens(src, dst, lens)
    ends = End("src", src, rows, num_heads), End("dst", dst, rows, num_heads, found.transforms)
    num_tokens, num_values, num_left_out, complete = None, 0, 0, True
    max_error = sum_of_squares = 0.0
    difference: Difference | None = None
    for of in _compared(*ends):
        stored = of.is_stored()
        if num_tokens is None:
            num_tokens = int(np.count_nonzero(stored))
        num_left_out = max(num_left_out, int(np.count_nonzero(~stored)))
        complete &= of.is_complete()
        for lo, hi in of.src.pieces():
            differs, errors = _differing(of, lo, hi, tolerance)
            differs &= stored[lo:hi, None, None]
            num_values += int(np.count_nonzero(stored[lo:hi])) * differs[0].size
            if errors is not None:
                errors = errors[stored[lo:hi]]
                max_error = max(max_error, float(errors.max(initial=0.0)))
                sum_of_squares += float(np.square(errors).sum())
            if differs.any():
                token, head, dim = map(int, np.unravel_index(differs.argmax(), differs.shape))
                difference = _difference(of, lo + token, head, dim)
                break
        if difference is not None:
            break
    return Verification(
        ok=difference is None and complete,
        num_tokens=num_tokens or 0,
        num_values=num_values,
        difference=difference,
        num_left_out=num_left_out,
        max_error=max_error,
        mean_squared_error=sum_of_squares / max(num_values, 1),
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """K, V or a plane, at both ends."""

    layer: int
    kv: str
    src: Reader
    dst: Reader

    def is_stored(self) -> npt.NDArray[np.bool_]:
        """Which entries both ends have."""
        found: npt.NDArray[np.bool_] = self.src.is_stored() & self.dst.is_stored()
        return found

    def is_complete(self) -> bool:
        """Whether only entries that are meant to be left out are not stored."""
        return all(end.may_leave_out or bool(end.is_stored().all()) for end in (self.src, self.dst))


def _compared(src: End, dst: End) -> Iterator[_Compared]:
    """All planes to compare: layer by layer K and V, then the planes of the source."""
    for i, cache in enumerate(src.span.view.layers):
        for kv in cache.tensors:
            yield _Compared(i, kv.upper(), src.reader(i, kv), dst.reader(i, kv))
    there = {plane.key: plane for plane in dst.span.view.planes}
    for plane in src.span.view.planes:
        readers = src.plane_reader(plane), dst.plane_reader(there[plane.key])
        yield _Compared(plane.layer, plane.role_name, *readers)


def _check_pairs(src: CacheSpan, dst: CacheSpan, num_heads: int | None) -> None:
    """Checks the rules that need both ends; reading each end checks the others."""
    at_src, at_dst = src.view.layers, dst.view.layers
    if len(at_src) != len(at_dst) or not (at_src or src.view.planes):
        raise InvalidArgumentError(
            f"dst has {len(at_dst)} layers, expected as many as src has, {len(at_src)}, and not 0; "
            "describe at each end the layers that both hold (spec E.3)"
        )
    for name, end in (("src", src), ("dst", dst)):
        tensors: dict[str, Borrowed] = {f"planes[{i}]": p for i, p in enumerate(end.view.planes)}
        if end.view.layers:
            tensors = {"layers[0].k": end.view.layers[0].k} | tensors
        for field, tensor in tensors.items():
            if tensor.memory is Memory.DEVICE and not is_torch(tensor.owner):
                kind = type(tensor_of(tensor.owner)).__name__
                raise UnsupportedError(
                    f"{name}.{field} is on a device and belongs to a {kind}, expected a "
                    "torch.Tensor, beside which verify can allocate. Copy the cache to the host "
                    "first"
                )
        held = [layer.num_kv_heads for layer in end.view.layers]
        held += [plane.extent(Axis.HEAD) for plane in end.view.planes]
        if num_heads is not None and num_heads > max(held):  # before there is memory for so many
            raise InvalidArgumentError(
                f"num_heads is {num_heads}, expected at most {max(held)} as {name} has (spec E.3)"
            )
    sizes = ["head_dim", "v_head_dim"] if num_heads else ["head_dim", "v_head_dim", "num_kv_heads"]
    for i, (a, b) in enumerate(zip(at_src, at_dst, strict=True)):
        for size in sizes:
            if getattr(a, size) != getattr(b, size):
                way_out = (
                    "give num_heads to compare a range"
                    if size == "num_kv_heads"
                    else "describe a head without padding, and K and V of one tensor apart"
                )
                raise InvalidArgumentError(
                    f"dst.layers[{i}].{size} is {getattr(b, size)}, expected {getattr(a, size)} as "
                    f"at src; {way_out} (spec E.3)"
                )
    _check_planes(src.view.planes, dst.view.planes, num_heads)


def _check_planes(at_src: Sequence[Plane], at_dst: Sequence[Plane], num_heads: int | None) -> None:
    there = {plane.key: plane for plane in at_dst}
    missing = {plane.key for plane in at_src} ^ there.keys()
    if missing:
        layer, role = min(missing)
        raise InvalidArgumentError(
            f"one of src and dst has a plane {role_name(role)} of layer {layer}, expected both to "
            "have it, or neither (spec E.11)"
        )
    for a in at_src:
        b = there[a.key]
        sizes = {
            "tokens_per_entry": (a.tokens_per_entry, b.tokens_per_entry),
            "replicated": (a.replicated, b.replicated),
            "numbers in DIM": tuple(p.extent(Axis.DIM) * p.dtype.numbers for p in (a, b)),
        }
        if not num_heads or a.replicated:
            sizes["heads"] = a.extent(Axis.HEAD), b.extent(Axis.HEAD)
        for size, (of_src, of_dst) in sizes.items():
            if of_src != of_dst:
                raise InvalidArgumentError(
                    f"{a.role_name} of layer {a.layer} has {size} {of_dst} at dst, expected "
                    f"{of_src} as at src; describe both alike, or leave the plane out at both ends "
                    "(spec E.11)"
                )


def _differing(
    of: _Compared, lo: int, hi: int, tolerance: Literal["exact", "codec"] | float
) -> tuple[npt.NDArray[np.bool_], Array | None]:
    """Which values of entries lo to hi differ: (hi - lo, heads, dim); and how far they are apart,
    None if all bytes are the same or they are no numbers. What is not finite counts as 0."""
    src, dst = of.src, of.dst
    differs: npt.NDArray[np.bool_]
    are_alike = src.dtype is dst.dtype and src.scale is None and dst.scale is None
    if are_alike:
        differs = np.not_equal(src.stored(lo, hi), dst.stored(lo, hi))
        if src.dtype is DType.U8 or not differs.any():
            return differs, None
    x, y = src.values(lo, hi), dst.values(lo, hi)
    with np.errstate(invalid="ignore"):
        errors = np.abs(x.astype(np.float64) - y)
    errors[~np.isfinite(errors)] = 0.0
    if are_alike and isinstance(tolerance, str):
        return differs, errors
    differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if not isinstance(tolerance, str):
        differs &= ~(np.isfinite(x) & np.isfinite(y) & (errors <= tolerance))
    elif tolerance == "codec" and differs.any():
        differs &= ~_is_rounded(x, y, dst, lo, hi)
        differs &= ~_is_rounded(y, x, src, lo, hi)
    return differs, errors


def _is_rounded(exact: Array, value: Array, end: Reader, lo: int, hi: int) -> npt.NDArray[np.bool_]:
    """Where `value`, read from `end`, is `exact` as its format stores it: rounded to nearest,
    saturating, or encoded in units."""
    rounding = end.dtype.format.rounding
    if rounding is None:
        return _is_encoded(exact, value, end, lo, hi)
    mantissa, smallest, largest = rounding
    scale = end.scale
    stored = value if scale is None else end.values(lo, hi, scaled=False)
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
        # If a power of 2 is between the two, the smaller one has the finer step.
        finer = np.minimum(np.abs(exact / factor), np.abs(stored))
        exponent = np.where(finer == 0, smallest, np.maximum(np.frexp(finer)[1] - 1, smallest))
        half_step = np.ldexp(factor, exponent - mantissa - 1)
        near = np.abs(exact - value) <= half_step + slack
        reached = np.minimum(np.abs(value), largest * factor)  # F16 and BF16 go on to infinity
        cut = (np.abs(stored) >= largest) & (np.abs(exact) >= reached - slack)
        rounded: npt.NDArray[np.bool_] = near | (cut & (np.sign(exact) == np.sign(value)))
    return rounded


def _is_encoded(exact: Array, value: Array, end: Reader, lo: int, hi: int) -> npt.NDArray[np.bool_]:
    """Where `value`, read from `end`, is `exact` encoded in units of its format."""
    if end.dtype is DType.U8:
        return np.zeros(exact.shape, np.bool_)
    again = end.rounded(exact)
    found: npt.NDArray[np.bool_]
    if again is not None:
        found = (again == value) | (np.isnan(again) & np.isnan(value))
    elif end.covers_tokens:
        found = np.abs(exact.astype(np.float64) - value) <= end.half_steps(lo, hi)
    else:
        found = np.zeros(exact.shape, np.bool_)
    return found


def _difference(of: _Compared, number: int, head: int, dim: int) -> Difference:
    sequence, token = of.src.place(number)

    def value(end: Reader) -> float:
        at = number, number + 1
        array = end.stored(*at) if end.dtype is DType.U8 else end.values(*at)
        return float(array[0, head, dim])

    return Difference(
        layer=of.layer,
        kv=of.kv,
        sequence=sequence,
        token=token,
        head=head,
        dim=dim,
        src_value=value(of.src),
        dst_value=value(of.dst),
    )
