"""The axes of each layout. Spec: 4.2"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvx_core.argument_checks import bad_argument, integer, sizes
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Axis, Layout

_WITH_SHAPE = (Layout.BLOCK_NHD, Layout.BLOCK_HND, Layout.BLOCK_HND_PACKED)


class Axes(NamedTuple):
    """The sizes that a cache tensor's shape states."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    pack: int  # elements of a head stored side by side before the next token; 1 if not packed


def axes(layout: Layout, shape: Sequence[int]) -> Axes:
    """Reads the sizes of a cache from the shape of its K or V tensor.

    layout: a Layout or its name; BLOCK_CUSTOM reads as BLOCK_HND with 4 axes and as
            BLOCK_HND_PACKED with 5.
    Raises InvalidArgumentError if the layout has another number of axes.
    Spec: 4.2
    """
    shape = sizes("shape", shape)
    ndim = len(shape)
    layout = Layout.of(layout, "layout")
    if layout is Layout.BLOCK_NHD and ndim == 4:
        num_blocks, block_size, num_kv_heads, head_dim = shape
        return Axes(num_blocks, block_size, num_kv_heads, head_dim, 1)
    if layout in (Layout.BLOCK_HND, Layout.BLOCK_CUSTOM) and ndim == 4:
        num_blocks, num_kv_heads, block_size, head_dim = shape
        return Axes(num_blocks, block_size, num_kv_heads, head_dim, 1)
    if layout in (Layout.BLOCK_HND_PACKED, Layout.BLOCK_CUSTOM) and ndim == 5:
        num_blocks, num_kv_heads, chunks, block_size, pack = shape
        return Axes(num_blocks, block_size, num_kv_heads, chunks * pack, pack)
    expected = {Layout.BLOCK_HND_PACKED: "5", Layout.BLOCK_CUSTOM: "4 or 5"}.get(layout, "4")
    raise InvalidArgumentError(
        f"tensor.ndim is {ndim}, expected {expected} ({layout.name}, spec 4.2)"
    )


def named_axis(name: str, axis: Any) -> Axis:
    """An Axis or its name in any case. Raises InvalidArgumentError."""
    return Axis.of(axis.upper() if isinstance(axis, str) else axis, name)


def named_axes(name: str, axes: Any) -> tuple[Axis, ...]:
    """What each axis of a tensor is. Raises InvalidArgumentError."""
    if not isinstance(axes, (list, tuple)):
        raise bad_argument(
            name, axes, "a list or tuple with the name of each axis: block, token, head, dim"
        )
    return tuple(named_axis(f"{name}[{i}]", axis) for i, axis in enumerate(axes))


def order_of(axes: Sequence[Axis]) -> tuple[Layout, list[int]]:
    """The layout in which named axes have another order, and the axes in the order of this layout.

    axes: block, token and head once each, dim once or, split, twice
    Raises InvalidArgumentError. Spec: 4.2
    """
    at: dict[Axis, list[int]] = {axis: [] for axis in Axis}
    for i, axis in enumerate(axes):
        at[axis].append(i)
    if [len(at[axis]) for axis in Axis] not in ([1, 1, 1, 1], [1, 1, 1, 2]):
        named = ", ".join(axis.name.lower() for axis in axes) or "no axes"
        raise InvalidArgumentError(
            f"layout is {named}, expected block, token and head once each and dim once or twice. "
            "Other splits of axes are planes (spec 4.2)"
        )
    (block,), (token,), (head,), (*outer, inner) = at.values()
    layout = Layout.BLOCK_HND_PACKED if outer else Layout.BLOCK_HND
    return layout, [block, head, *outer, token, inner]


def shape(
    layout: Layout,
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    pack: int = 1,
) -> tuple[int, ...]:
    """The shape of a K or V tensor of `layout`; `axes` is its inverse.

    pack: of BLOCK_HND_PACKED only; it divides head_dim.
    Raises InvalidArgumentError.
    Spec: 4.2
    """
    layout = Layout.of(layout, "layout", takes=_WITH_SHAPE)
    if layout is Layout.BLOCK_NHD:
        return (num_blocks, block_size, num_kv_heads, head_dim)
    if layout is Layout.BLOCK_HND:
        return (num_blocks, num_kv_heads, block_size, head_dim)
    if layout is Layout.BLOCK_HND_PACKED:
        if integer("pack", pack) < 1 or head_dim % pack:
            raise InvalidArgumentError(
                f"pack is {pack}, expected a divisor of head_dim {head_dim} "
                "(BLOCK_HND_PACKED, spec 4.2)"
            )
        return (num_blocks, num_kv_heads, head_dim // pack, block_size, pack)
    raise InvalidArgumentError(
        f"layout is {layout.name}, expected one with a shape of its own: BLOCK_NHD, BLOCK_HND or "
        "BLOCK_HND_PACKED (spec 4.2)"
    )
