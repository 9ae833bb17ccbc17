"""Reorders K's rotary dims, zero-copy: one end of a migration is described with strides that step
through its dims in the order of the other end. See kvx_core.desc.facts.ReorderRotary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvx_core.desc.by_view import ByView
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import ReorderRotary
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import FactsMismatchError, KvxError
from kvx_core.types import DType, Layout

Order = Literal["half", "interleaved"]
Dims = npt.NDArray[np.int64]

# Views with K's dims in another order; a string says why a view cannot be described so.
_in_orders: ByView[tuple[object, ...], CacheView | str] = ByView()


def dims_in_order(held: Order, wanted: Order, rotary_dim: int) -> Dims:
    """For each rotary dim in order `wanted`: its index in a head that is held in order `held`."""
    dims = np.arange(rotary_dim)
    if held == wanted:
        return dims
    pairs = dims.reshape(2, -1) if held == "half" else dims.reshape(-1, 2)
    return pairs.T.reshape(-1)


def reordered(
    src: CacheSpan, dst: CacheSpan, transform: ReorderRotary, *, find_scales: bool = False
) -> tuple[CacheSpan, CacheSpan]:
    """Describes one of the ends anew so that migrating between them does `transform`; returns both.

    If only some dims of a head rotate, each layer gets a second layer, behind all others: the other
    dims of its K, without V. These descriptions are kept for the next call.
    find_scales: whether the migration finds the scales of `dst`
    Copies nothing. Raises FactsMismatchError if strides cannot describe it.
    """
    head_dims = ([layer.head_dim for layer in end.view.layers] for end in (src, dst))
    if next(head_dims) != next(head_dims):
        return src, dst  # migrate rejects them, with an error from libkvx
    if src.view.planes or dst.view.planes:
        raise FactsMismatchError(
            [
                f"{transform.difference}: the views have planes, which are not reordered. Migrate "
                "planes that do not rotate apart, with rotary 'none' at both ends"
            ]
        )
    reasons: dict[str, None] = {}
    # Either end can be described anew. An end with packed dims often cannot, so both are tried.
    orders = [transform.dst, transform.src]
    key = ("dst", transform.dst, transform.src, transform.rotary_dim, find_scales)
    if isinstance(_in_orders.of(dst.view).get(key), CacheView):
        orders.reverse()  # the destination is described already
    for order in orders:
        asked = order, transform.rotary_dim, find_scales
        from_view = _in_order("src", src.view, transform.src, *asked)
        to_view = _in_order("dst", dst.view, transform.dst, *asked)
        if isinstance(from_view, CacheView) and isinstance(to_view, CacheView):
            return replace(src, view=from_view), replace(dst, view=to_view)
        reasons |= dict.fromkeys(found for found in (from_view, to_view) if isinstance(found, str))
    raise FactsMismatchError(f"{transform.difference}: {reason}" for reason in reasons)


def describe_destination(
    dst: CacheView, transform: ReorderRotary, *, find_scales: bool = False
) -> None:
    """Describes `dst` anew now, so that `reordered` takes it for sources that change every time.

    Where strides cannot describe it, `reordered` takes the source.
    """
    _in_order("dst", dst, transform.dst, transform.src, transform.rotary_dim, find_scales)


def _in_order(
    name: str, view: CacheView, held: Order, wanted: Order, rotary_dim: int, find_scales: bool
) -> CacheView | str:
    """`view` with the rotary dims of K in order `wanted`, or why it cannot be described so."""
    key = (name, held, wanted, rotary_dim, find_scales)
    in_orders = _in_orders.of(view)
    found = in_orders.get(key)
    if found is None:
        is_same = held == wanted and all(la.head_dim == rotary_dim for la in view.layers)
        reason = next(_cannot(name, view, rotary_dim, find_scales), "")
        dims = dims_in_order(held, wanted, rotary_dim)
        found = reason if reason or is_same else _described(name, view, dims)
        in_orders[key] = found
    return found or view  # "": the view itself, which must not refer to itself


def _cannot(name: str, view: CacheView, rotary_dim: int, find_scales: bool) -> Iterator[str]:
    """Why dims of this K cannot be reordered, whatever the other end is; None if they can."""
    for i, layer in enumerate(view.layers):
        at = f"{name}.layers[{i}]"
        dims = f"rotary_dim is {rotary_dim} and {at}.head_dim is {layer.head_dim}"
        if layer.k.dtype is DType.U8:
            yield f"{at}.k is U8, opaque bytes, whose dims cannot be told apart"
        if layer.k.dtype.format.affine:
            yield (
                f"{at}.k is {layer.k.dtype.name}, whose scales belong to groups of dims in their "
                "order. Migrate by way of a float16 or bfloat16 cache in the order of dst"
            )
        if layer.shared_kv:
            yield f"{at} has K and V in the same memory, and only dims of K change places"
        if rotary_dim > layer.head_dim:
            yield f"{dims}, expected at least as many"
        if rotary_dim >= layer.head_dim:
            continue
        if layer.v is None:
            yield f"{dims} without a V, as in a latent of MLA, whose first dims do not rotate"
        if layer.pool is not None:
            yield (
                f"{dims}, so that K moves in two parts, which a pool cannot be described by. "
                "Migrate by way of a cache without one"
            )
        if find_scales:
            yield (
                f"{dims}, so that K moves in two parts, and find_scales would find a scale for "
                "each. Migrate by way of a float16 or bfloat16 cache in the order of dst"
            )


def _described(name: str, view: CacheView, dims: Dims) -> CacheView | str:
    """`view` with `dims` as the first dims of K, and the other dims appended as extra layers."""
    others = [i for i, layer in enumerate(view.layers) if layer.head_dim > len(dims)]
    parts = [(i, dims) for i in range(len(view.layers))]
    parts += [(i, np.arange(len(dims), view.layers[i].head_dim)) for i in others]
    layers: list[CacheDesc] = []
    for i, part in parts:
        layer = view.layers[i]
        _validate(f"{name}.layers[{i}]", layer)
        k = picked(layer.k, part)
        if k is None:
            return f"{name}.layers[{i}].k is {_fixed(layer.k)}"
        v = layer.v if part is dims else None
        layers.append(replace(layer, k=k, v=v, head_dim=len(part)))
    k_scales, v_scales = view.k_scales, view.v_scales
    if k_scales is not None:
        k_scales += tuple(k_scales[i] for i in others)
    if v_scales is not None:
        v_scales += (None,) * len(others)
    facts = view.facts.of_parts()
    return replace(view, layers=tuple(layers), facts=facts, k_scales=k_scales, v_scales=v_scales)


def _fixed(k: TensorDesc) -> str:
    """The sentence that says why dims of K cannot be reordered, with the way out."""
    if k.dtype.numbers > 1:
        return (
            f"{k.dtype.name}, units of {k.dtype.numbers} dims, which are not taken apart. Migrate "
            "by way of a float32 cache"
        )
    return (
        f"packed by {k.shape[-1]}, and no strides step through its dims in another order. Migrate "
        "by way of a cache that is not packed"
    )


def _validate(name: str, layer: CacheDesc) -> None:
    """Validates a layer first: new shapes would hide shapes that do not match its sizes."""
    try:
        layer.validate()
    except KvxError as error:
        raise type(error)(f"{name}: {error}") from None


def picked(tensor: TensorDesc, dims: Dims) -> TensorDesc | None:
    """`dims` of each head of a K or V tensor, in this order; None if no strides say that.

    dims: (head_dim of the result,), int64, at least one
    """
    numbers = tensor.dtype.numbers
    units = dims[::numbers] // numbers
    if not np.array_equal(dims, np.add.outer(units * numbers, np.arange(numbers)).reshape(-1)):
        return None  # not whole units of the format
    is_nhd, is_packed = tensor.layout is Layout.BLOCK_NHD, tensor.ndim == 5
    if is_packed:
        block, head, outer, token, inner = range(5)
        pack = tensor.shape[inner]
        at = units // pack * tensor.stride[outer] + units % pack * tensor.stride[inner]
    else:
        block, token, head, inner = (0, 1, 2, 3) if is_nhd else (0, 2, 1, 3)
        at = units * tensor.stride[inner]
    split = _two_loops(at)
    if split is None:
        return None
    (outer_extent, outer_stride), (inner_extent, inner_stride) = split
    shape, stride = tensor.shape, tensor.stride
    return replace(
        tensor,
        layout=Layout.BLOCK_HND_PACKED,
        shape=(shape[block], shape[head], outer_extent, shape[token], inner_extent),
        stride=(stride[block], stride[head], outer_stride, stride[token], inner_stride),
        data=tensor.data + int(at[0]) * tensor.dtype.itemsize,
    )


def _two_loops(at: Dims) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(extent, stride) of an outer and an inner loop that visit these positions in this order.

    None if no two loops with strides >= 0 do.
    """
    at = at - at[0]
    if len(at) == 1:
        return (1, 0), (1, 1)
    inner_stride = int(at[1])
    # The inner loop is as long as its step stays the same.
    is_next = at == np.arange(len(at)) * inner_stride
    inner_extent = len(at) if is_next.all() else int(is_next.argmin())
    outer_extent, rest = divmod(len(at), inner_extent)
    outer_stride = int(at[inner_extent]) if outer_extent > 1 else 0
    visited = np.add.outer(
        np.arange(outer_extent) * outer_stride, np.arange(inner_extent) * inner_stride
    )
    if rest or min(outer_stride, inner_stride) < 0 or not np.array_equal(visited.reshape(-1), at):
        return None
    return (outer_extent, outer_stride), (inner_extent, inner_stride)
