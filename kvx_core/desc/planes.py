"""Plane: a tensor of a layer beside K and V, or K or V in tiles that no layout has. Spec: E.11"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, TypeVar

from kvx_core._c import abi
from kvx_core.argument_checks import coerce_fields, flag, instance, integer
from kvx_core.desc.beside import put_beside
from kvx_core.desc.layouts import named_axes, named_axis
from kvx_core.desc.memory_checks import same_memory
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.states import StateFacts, state_axes
from kvx_core.desc.tables import BlockTable, SlotMapping
from kvx_core.desc.tensor_desc import stored_as
from kvx_core.desc.tensors import Borrowed, TensorLike, borrowed_fields
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.formats import ELEMENTS
from kvx_core.types import Axis, DType, Memory, Role

_Own = TypeVar("_Own", BlockTable, SlotMapping)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Plane(Borrowed):
    """A tensor of a layer that tokens index, zero-copy. Shape in the order of `axes`.

    Raises InvalidArgumentError for fields of other types, and for more or fewer axes than the
    tensor has.
    Spec: E.11
    """

    takes: ClassVar[Collection[DType] | None] = ELEMENTS

    axes: tuple[Axis, ...]
    role: int  # a Role, or a number of the caller's own below 2**31
    layer: int = 0  # of the model: the same number at both ends
    tokens_per_entry: int = 1
    replicated: bool = False  # the same numbers on every rank: num_heads does not cut it
    scale: ScaleDesc | None = None
    block_table: BlockTable | None = None  # of this plane alone; None: as the view's K and V
    slots: SlotMapping | None = None
    zero: ScaleDesc | None = None  # zero points, where the dtype has them
    state: StateFacts | None = None  # what a state means; see Plane.of_state

    def __post_init__(self) -> None:
        coerce_fields(
            self,
            role=_role,
            layer=integer,
            tokens_per_entry=integer,
            replicated=flag,
            axes=named_axes,
        )
        Borrowed.__post_init__(self)
        if len(self.axes) != len(self.shape) or not self.axes:
            raise InvalidArgumentError(
                f"axes has {len(self.axes)} names, expected {len(self.shape)}, one per axis of the "
                "tensor, and not 0 (spec E.11)"
            )
        if len(self.axes) > abi.MAX_PLANE_AXES:
            raise InvalidArgumentError(
                f"axes has {len(self.axes)} names, expected at most {abi.MAX_PLANE_AXES} "
                "(spec E.11)"
            )
        for name, kind in (
            ("scale", ScaleDesc),
            ("zero", ScaleDesc),
            ("block_table", BlockTable),
            ("slots", SlotMapping),
        ):
            given = getattr(self, name)
            if given is not None:
                instance(name, given, kind, f"a {kind.__name__} or None")
                same_memory(name, given.memory, "the plane is", self.memory)
        if self.state is not None:
            instance("state", self.state, StateFacts, "a StateFacts or None")
            self.state.check(self.axes, self.shape, self.tokens_per_entry)

    @classmethod
    def of(
        cls,
        tensor: TensorLike,
        axes: Sequence[Axis | str],
        role: Role | str | int,
        layer: int = 0,
        *,
        dtype: DType | str | None = None,
        tokens_per_entry: int = 1,
        replicated: bool = False,
        scale: ScaleDesc | TensorLike | float | None = None,
        block_table: BlockTable | TensorLike | Sequence[Sequence[int]] | None = None,
        slots: SlotMapping | TensorLike | Sequence[int] | None = None,
        zero: ScaleDesc | TensorLike | float | None = None,
        name: str = "tensor",
    ) -> Plane:
        """Describes a tensor, zero-copy.

        tensor:      shape in the order of `axes`; any strides >= 0, library and device
        axes:        the name of each axis of the tensor: "block", "token", "head" or "dim". A split
                     axis is named for each of its parts, from the outermost to the innermost: tiles
                     of 16 tokens x 2 numbers are ("block", "head", "token", "dim", "token", "dim")
        role, layer: a migration pairs planes of the same role and layer. A Role or its name in any
                     case, such as "index_k", or a number of the caller's own
        dtype:       of the elements, if the tensor stores them as another dtype of the same size,
                     such as FP8 in uint8; as `describe` takes it
        tokens_per_entry: tokens that an entry stands for
        replicated:  every rank holds the same numbers: num_heads of a migration does not select any
        scale, zero: as ScaleDesc.of takes it; zero points are those of U8_ZERO and U8_BIAS
        block_table, slots: this plane's own, if it does not use those of K and V; as CacheView.at
                     takes them. A list is copied to the tensor's device
        name:        what errors call the tensor
        Raises InvalidArgumentError, UnsupportedError.
        """
        fields = borrowed_fields(name, tensor, ELEMENTS)
        counted = named_axes("axes", axes)
        if dtype is not None:
            fields |= stored_as(name, fields, dtype, counted)
        return cls(
            axes=counted,
            role=_role("role", role),
            layer=layer,
            tokens_per_entry=tokens_per_entry,
            replicated=replicated,
            scale=None if scale is None else ScaleDesc.of(scale),
            zero=None if zero is None else ScaleDesc.of(zero, name="zero"),
            block_table=None if block_table is None else _near(BlockTable.of(block_table), fields),
            slots=None if slots is None else _near(SlotMapping.of(slots), fields),
            **fields,
        )

    @classmethod
    def of_state(
        cls,
        tensor: TensorLike,
        axes: Sequence[str],
        state: StateFacts,
        layer: int = 0,
        *,
        role: Role | str | int | None = None,
        dtype: DType | str | None = None,
        slots: SlotMapping | TensorLike | Sequence[int] | None = None,
        name: str = "tensor",
    ) -> Plane:
        """Describes one part of a layer's state, zero-copy: one entry per sequence.

        tensor: shape in the order of `axes`; any strides >= 0, library and device
        axes:   the name of each axis of the tensor: "block" and, of a convolution, "channel" and
                "time"; of a recurrent state those that its kind has: "head", "key", "value" of gdn,
                kda and lightning, "head", "head_dim", "state" of mamba2, "channel", "state" of
                mamba1. So a [V, K] state is named ("block", "head", "value", "key")
        state:  what the numbers mean
        layer:  of the model
        role:   None: CONV_STATE or STATE. A layer with several convolutions has a number for each
        dtype, slots, name: as for `of`
        Raises InvalidArgumentError, UnsupportedError. Spec: E.24
        """
        instance("state", state, StateFacts, "a StateFacts")
        order, counted = state_axes("axes", axes, state)
        fields = borrowed_fields(name, tensor, ELEMENTS)
        if len(fields["shape"]) != len(axes):
            raise InvalidArgumentError(
                f"{name} has {len(fields['shape'])} axes, expected {len(axes)}, as axes names"
            )
        if dtype is not None:
            named = tuple(counted[order.index(i)] for i in range(len(order)))
            fields |= stored_as(name, fields, dtype, named)
        fields |= {part: tuple(fields[part][i] for i in order) for part in ("shape", "stride")}
        if role is None:
            role = Role.CONV_STATE if state.is_conv else Role.STATE
        return cls(
            axes=tuple(counted),
            role=_role("role", role),
            layer=layer,
            tokens_per_entry=0,
            replicated=True,  # num_heads counts heads of K and V; sections say what a rank has
            state=state,
            slots=None if slots is None else _near(SlotMapping.of(slots), fields),
            **fields,
        )

    def kind(self) -> str | None:
        axes = "[" + ", ".join(axis.name.lower() for axis in self.axes) + "]"
        return f"{self.role_name} of layer {self.layer} {axes}"

    def as_stored(self, name: str) -> Plane:
        """The plane that files have: of a convolution the columns that count.

        name: what errors call it
        Raises UnsupportedError for states that files do not have so.
        """
        state = self.state
        if state is None:
            return self
        reason = state.why_not_stored()
        if reason is not None:
            raise UnsupportedError(
                f"{name} ({self.role_name}) {reason}. Migrate it into memory of that kind first"
            )
        time = self.axes.index(Axis.DIM)
        if state.num_columns in (None, self.shape[time]):
            return self
        shape = (*self.shape[:time], state.num_columns, *self.shape[time + 1 :])
        skipped = state.first_column * self.stride[time] * self.dtype.itemsize
        facts = replace(state, first_column=0)
        return replace(self, shape=shape, data=self.data + skipped, state=facts)

    def by_heads(self, num_heads: int) -> Iterator[Plane]:
        """Yields the sections of a state, as a store has them: planes cut into heads.

        num_heads: of the states of the layer, over all ranks: `stored_heads`
        A section that every rank has whole is a plane that is replicated.
        Raises UnsupportedError if the ranks do not divide the heads, or the heads a section.
        """
        state = self.state
        if state is None:
            yield self
            return
        if num_heads % state.num_ranks:
            raise UnsupportedError(
                f"{self.kind()} is split over {state.num_ranks} ranks, expected a divisor of "
                f"{num_heads}, the heads into which a store cuts the states of such a layer"
            )
        for section in state.sections:
            if not section.replicated and section.width % num_heads:
                raise UnsupportedError(
                    f"section {section.name} of {self.kind()} has {section.width} channels or "
                    f"heads, expected a multiple of num_heads {num_heads}"
                )
        at = self.axes.index(Axis.HEAD)
        for section, held in zip(state.sections, state.held(), strict=True):
            count, step = held.end - held.begin, self.stride[at]
            heads = count if section.replicated else num_heads // state.num_ranks
            # The parts of the axis: heads, and what each has of the section.
            shape, stride = (heads, count // heads), (count // heads * step, step)
            parts = 1 if count == heads else 2
            axes = (Axis.HEAD, Axis.DIM)[:parts]
            yield replace(
                self,
                axes=(*self.axes[:at], *axes, *self.axes[at + 1 :]),
                shape=(*self.shape[:at], *shape[:parts], *self.shape[at + 1 :]),
                stride=(*self.stride[:at], *stride[:parts], *self.stride[at + 1 :]),
                data=self.data + held.offset * step * self.dtype.itemsize,
                role=state.stored_role(held.name),
                replicated=section.replicated,
                state=None,
            )

    def in_memory(self, data: int, owner: object) -> Plane:
        """The same plane in other memory of the same sort. Checks nothing.

        data: the address of its first element; owner: keeps the memory alive
        """
        found, put = object.__new__(Plane), object.__setattr__
        for name in _SLOTS:
            put(found, name, getattr(self, name))
        put(found, "data", data)
        put(found, "owner", owner)
        return found

    def of_parts(self) -> Plane:
        """The same plane, its table not `exact`, for calls that each move some of its entries."""
        if self.block_table is None:
            return self
        return replace(self, block_table=self.block_table.of_parts())

    @property
    def role_name(self) -> str:
        """ "INDEX_K", or "role 40" of a caller's own; of a state with one section, that too."""
        if self.state is None:
            return role_name(self.role)
        part = Role.CONV_STATE if self.state.is_conv else Role.STATE
        names = [section.name for section in self.state.sections]
        return f"{part.name} {names[0]}" if len(names) == 1 else part.name

    @property
    def key(self) -> tuple[int, int]:
        """Layer and role, by which a migration pairs planes."""
        return self.layer, self.role

    def extent(self, axis: Axis | str) -> int:
        """Extents of all parts of an axis together; 1 if it has none."""
        wanted = named_axis("axis", axis)
        parts = zip(self.shape, self.axes, strict=True)
        return prod(extent for extent, found in parts if found is wanted)

    def entry_bytes(self, num_heads: int | None = None) -> int:
        """Bytes of an entry: of `num_heads` heads, or of all."""
        heads = self.extent(Axis.HEAD) if self.replicated or not num_heads else num_heads
        return heads * self.extent(Axis.DIM) * self.dtype.itemsize

    def to_c(self) -> abi.kvx_plane_t:
        """A new C struct with these fields."""
        struct = abi.kvx_plane_t(
            role=self.role,
            layer=self.layer,
            dtype=self.dtype,
            memory=self.memory,
            tokens_per_entry=self.tokens_per_entry,
            flags=abi.PLANE_REPLICATED * self.replicated,
            num_axes=len(self.axes),
            data=self.data,
            scale=abi.pointer_to(self.scale),
            zero=abi.pointer_to(self.zero),
            block_table=abi.pointer_to(self.block_table),
            slots=abi.pointer_to(self.slots),
        )
        for part, axis, extent, stride in zip(
            struct.axes, self.axes, self.shape, self.stride, strict=False
        ):
            part.axis, part.extent, part.stride_bytes = axis, extent, stride * self.dtype.itemsize
        return struct


_SLOTS = (*Borrowed.__slots__, *Plane.__slots__)


def _near(index: _Own, plane: dict[str, Any]) -> _Own:
    """A plane's own table or slots, given as a list or not."""
    if plane["memory"] is Memory.DEVICE and index.memory is Memory.HOST:
        return put_beside(index, plane["owner"])
    return index


@lru_cache(maxsize=256)
def role_name(role: int) -> str:
    """ "INDEX_K", or "role 40" of a caller's own."""
    return Role(role).name if role in list(Role) else f"role {role}"


def _role(name: str, role: Any) -> int:
    if isinstance(role, str):
        return Role.of(role, name)
    return integer(name, role, 0, 2**31 - 1)
