"""TensorDesc: the memory of a K, V, key or value tensor and the meaning of its axes. Spec: 6.2"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvx_core._c import abi
from kvx_core.argument_checks import coerce_fields
from kvx_core.desc.layouts import named_axes, order_of
from kvx_core.desc.tensors import Borrowed, TensorLike, borrowed_fields
from kvx_core.errors import InvalidArgumentError
from kvx_core.formats import ELEMENTS, Formats
from kvx_core.types import Axis, DType, Layout


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TensorDesc(Borrowed):
    """One K, V, key or value tensor. Shape in the order of `layout`, strides in elements.

    libkvx validates it in every call and in CacheDesc.validate.
    Raises InvalidArgumentError for fields of other types.
    Spec: 6.2
    """

    takes: ClassVar[Collection[DType] | None] = ELEMENTS

    layout: Layout

    def __post_init__(self) -> None:
        if type(self.layout) is not Layout:
            coerce_fields(self, layout=Layout.called)
        Borrowed.__post_init__(self)

    def kind(self) -> str | None:
        return self.layout.name

    def to_c(self) -> abi.kvx_tensor_desc_t:
        """A new C struct with these fields."""
        return abi.kvx_tensor_desc_t(
            layout=self.layout, memory=self.memory, **self.c_fields("tensor")
        )


def describe(
    tensor: TensorLike,
    layout: Layout | str | Sequence[Axis | str],
    *,
    dtype: DType | str | None = None,
    name: str = "tensor",
) -> TensorDesc:
    """Describes a K or V tensor, zero-copy.

    tensor: shape in the order of `layout`; any strides, dtype, library and device
    layout: which axis is which, never guessed from the shape: a Layout or its name, or the name of
            each axis in any order, such as ("block", "head", "dim", "token"), with "dim" twice
            where it is split. The description then has the order of BLOCK_HND or BLOCK_HND_PACKED.
            BLOCK_CUSTOM is for axes of different extents alone
    dtype:  of the elements, if the tensor stores them as another dtype of the same size, such as
            FP8 in uint8; or a format with several numbers in a unit, such as Q8_0, if the tensor is
            uint8 and its last axis holds the bytes of units
    name:   what errors call the tensor
    Raises InvalidArgumentError, UnsupportedError.
    Spec: 4.2, 6.2
    """
    fields = borrowed_fields(name, tensor, ELEMENTS)
    axes = named_axes("layout", layout) if isinstance(layout, (list, tuple)) else ()
    if dtype is not None:
        fields |= stored_as(name, fields, dtype, axes)
    if not axes:
        return TensorDesc(layout=Layout.of(layout, "layout"), **fields)
    called, order = order_of(axes)
    if len(axes) != len(fields["shape"]):
        raise InvalidArgumentError(
            f"layout names {len(axes)} axes, expected {len(fields['shape'])}, those of {name} "
            "(spec 4.2)"
        )
    sorted_ = {key: tuple(fields[key][axis] for axis in order) for key in ("shape", "stride")}
    return TensorDesc(layout=called, **(fields | sorted_))


def _may_be(stored: DType) -> Formats:
    """The formats that the elements of a tensor may be which stores them as `stored`."""
    return Formats(
        lambda: (
            one
            for one in ELEMENTS
            if one.itemsize == stored.itemsize or (one.numbers > 1 and stored is DType.U8)
        )
    )


def stored_as(
    name: str, fields: dict[str, Any], dtype: DType | str, axes: Sequence[Axis] = ()
) -> dict[str, Any]:
    """The `fields` of a tensor that change if its elements are of `dtype`.

    dtype: has the size of the stored elements, or its units are bytes of the last axis
    axes:  of the tensor, if they are named
    Raises InvalidArgumentError, which calls the tensor `name`.
    """
    stored = fields["dtype"]
    wanted = DType.of(dtype, takes=_may_be(stored))
    if wanted.numbers > 1 and axes and axes[-1] is not Axis.DIM:
        raise InvalidArgumentError(
            f"axes[{len(axes) - 1}] is {axes[-1].name.lower()}, expected dim: the last axis of the "
            f"tensor holds units of {wanted.name}, which are numbers along dim (spec E.10)"
        )
    if wanted.numbers > 1 and stored is DType.U8:
        return _in_units(name, fields, wanted)
    if wanted.itemsize != stored.itemsize:
        raise InvalidArgumentError(
            f"dtype is {wanted.name} of {wanted.itemsize} bytes, expected one of the "
            f"{stored.itemsize} bytes that the tensor's {stored.name} elements have"
        )
    return {"dtype": wanted}


def _in_units(name: str, fields: dict[str, Any], dtype: DType) -> dict[str, Any]:
    """The fields that change if the last axis of a tensor of bytes holds units of `dtype`."""
    size = dtype.itemsize
    *shape, num_bytes = fields["shape"] or (0,)
    *stride, step = fields["stride"] or (0,)
    if num_bytes % size or step != 1:
        raise InvalidArgumentError(
            f"{name}.shape[-1] is {num_bytes} bytes with stride {step}, expected whole units of "
            f"{size} bytes ({dtype.name}) with stride 1 (spec E.10)"
        )
    for axis, (extent, along) in enumerate(zip(shape, stride, strict=True)):
        if extent > 1 and along % size:
            raise InvalidArgumentError(
                f"{name}.stride[{axis}] is {along} bytes, expected a multiple of the {size} bytes "
                f"of a unit ({dtype.name}, spec E.10)"
            )
    return {
        "dtype": dtype,
        "shape": (*shape, num_bytes // size),
        "stride": (*(along // size for along in stride), 1),
    }
