"""CacheView, all layers of one engine's cache, and CacheSpan, a view with a lookup of sequences.

Spec: E.3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvx_core._c import abi, bound
from kvx_core.argument_checks import (
    bad_argument,
    coerce_fields,
    flag,
    format_repr,
    instance,
    int64,
    integer,
    list_of,
    plural,
)
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.in_place import may_move, moving_owners
from kvx_core.desc.memory_checks import same_memory
from kvx_core.desc.planes import Plane
from kvx_core.desc.pointers import check_blocks
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import Borrowed, TensorLike
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import BlockTableFormat


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class CacheView:
    """All layers of one engine's cache and the meaning of their bytes.

    A dense view is an end of migrate or verify itself: sequence s is block s. A paged one needs a
    block table or slots: see `at`.
    Raises InvalidArgumentError if a list of scales has not one entry per layer.
    """

    layers: tuple[CacheDesc, ...]
    facts: CacheFacts
    k_scales: tuple[ScaleDesc | None, ...] | None = None  # one per layer; None: no scales
    v_scales: tuple[ScaleDesc | None, ...] | None = None
    null_block_id: int = abi.NO_NULL_BLOCK  # block id that holds nothing (vLLM: 0)
    secondary_num_blocks: int = 0  # blocks in the secondary pool; 0: as many as num_blocks
    dense: bool = False  # every block is one sequence, from its first token on
    # Asked before each use: why the engine's cache is no longer the one described; None if it is.
    outdated: Callable[[], str | None] | None = field(default=None, compare=False)
    # Asked before each use: how many tokens of each sequence the engine holds, a number for all or
    # one per sequence: per block of a dense view, else per row of the table or entry of seq_lens.
    # None: every token that the view describes. See kvx_core.ops.holds
    holds: Callable[[], int | Sequence[int]] | None = field(default=None, compare=False)
    planes: tuple[Plane, ...] = ()  # beside the layers, or instead of them
    # Zero points of U8_ZERO and U8_BIAS, or the scale of a tensor of F4_E2M1. Spec: E.14, E.18
    k_zeros: tuple[ScaleDesc | None, ...] | None = None
    v_zeros: tuple[ScaleDesc | None, ...] | None = None
    # How many tokens of each sequence its states stand for: a number for all or one per sequence.
    # A function is asked before each use. Views whose planes have StateFacts need it as a source.
    state_tokens: Callable[[], int | Sequence[int]] | int | Sequence[int] | None = field(
        default=None, compare=False
    )
    _layers: Any = field(init=False, compare=False)  # the C arrays, built once
    _k_scales: Any = field(init=False, compare=False)
    _v_scales: Any = field(init=False, compare=False)
    _k_zeros: Any = field(init=False, compare=False)
    _v_zeros: Any = field(init=False, compare=False)
    _planes: Any = field(init=False, compare=False)
    # Computed once: a migration of few tokens takes less time than a loop over all layers.
    read_only: dict[str, Borrowed] = field(init=False, compare=False)  # by name
    has_states: bool = field(init=False, compare=False)  # planes have StateFacts
    _bytes: dict[int, int] = field(init=False, compare=False)  # by num_heads; 0: all
    _held: bound.Held | None = field(init=False, compare=False, default=None)

    def __post_init__(self) -> None:
        def set_(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_("layers", list_of("layers", self.layers, CacheDesc, "CacheDesc, one per layer"))
        instance("facts", self.facts, CacheFacts, "a CacheFacts: what the bytes mean")
        coerce_fields(self, null_block_id=int64, secondary_num_blocks=integer, dense=flag)
        for name in ("outdated", "holds"):
            asked = getattr(self, name)
            if asked is not None and not callable(asked):
                raise bad_argument(name, asked, "a function or None")
        self._check_rotation()
        structs = [layer.to_c() for layer in self.layers]
        set_("_layers", abi.pointer_array(structs, abi.kvx_cache_desc_t))
        for name in _BESIDE:
            scales = getattr(self, name)
            set_(f"_{name}", None if scales is None else self._scales_to_c(name, scales))
        set_("planes", list_of("planes", self.planes, Plane, "Plane, see Plane.of"))
        set_("has_states", any(plane.state is not None for plane in self.planes))
        planes = [plane.to_c() for plane in self.planes]
        set_("_planes", abi.pointer_array(planes, abi.kvx_plane_t))
        tensors: dict[str, Borrowed] = {
            f"layers[{i}].{name}": tensor
            for i, layer in enumerate(self.layers)
            for name, tensor in layer.tensors.items()
        }
        tensors |= {f"planes[{i}]": plane for i, plane in enumerate(self.planes)}
        tensors |= self._found()
        set_("read_only", {name: t for name, t in tensors.items() if not t.writable})
        set_("_bytes", {})

    def _check_rotation(self) -> None:
        widest = max((layer.head_dim for layer in self.layers), default=0)
        if widest and (self.facts.rotary_dim or 0) > widest:
            raise bad_argument(
                "facts.rotary_dim",
                self.facts.rotary_dim,
                f"at most head_dim, which is {widest}: it counts the dims of a head that rotate",
            )

    def __repr__(self) -> str:
        first = [part for part in self.layers[0].words() if part] if self.layers else []
        if len({layer.words() for layer in self.layers}) > 1:
            first[0] = f"the first of {first[0]}"
        scales = [kind for kind in _BESIDE if getattr(self, kind) is not None]
        null = self.null_block_id
        return format_repr(
            "CacheView",
            plural(len(self.layers), "layer"),
            plural(len(self.planes), "plane") if self.planes else None,
            *first,
            "dense" if self.dense else "paged",
            *scales,
            None if null == abi.NO_NULL_BLOCK else f"null block {null}",
            self.facts.engine,
        )

    def without_scales(self) -> CacheView:
        """The view as one of stored bytes: without scales, but those of U8_ZERO and U8_BIAS, which
        have no numbers without them."""
        if all(getattr(self, name) is None for name in _BESIDE):
            return self

        def kept(name: str) -> tuple[ScaleDesc | None, ...] | None:
            scales = tuple(
                scale if tensor is not None and tensor.dtype.format.affine else None
                for scale, tensor in zip(getattr(self, name) or (), self._of(name), strict=False)
            )
            return scales if any(scales) else None

        return replace(self, k_scales=kept("k_scales"), v_scales=kept("v_scales"))

    def beside(self, planes: CacheView) -> CacheView:
        """This view with the planes of another, so that one call moves both.

        planes: of the same engine and sequences, without layers, such as its states
        What either view asks its engine before each use is asked of both.
        Raises InvalidArgumentError.
        """
        instance("planes", planes, CacheView, "a CacheView of planes")
        if planes.layers or (self.state_tokens is not None and planes.state_tokens is not None):
            raise InvalidArgumentError(
                "planes has layers, or states beside states of this view, expected a view of "
                "planes alone and one with states"
            )
        views = self, planes
        asked = [view.outdated for view in views if view.outdated is not None]
        counts = [view.holds for view in views if view.holds is not None]
        if len(counts) > 1:
            raise InvalidArgumentError(
                "planes.holds is a function beside that of this view, expected one of them to count"
            )

        def outdated() -> str | None:
            return next((reason for ask in asked if (reason := ask()) is not None), None)

        states = self.state_tokens if planes.state_tokens is None else planes.state_tokens
        return replace(
            self,
            planes=(*self.planes, *planes.planes),
            outdated=outdated if asked else None,
            holds=counts[0] if counts else None,
            state_tokens=states,
        )

    def _of(self, name: str) -> list[TensorDesc | None]:
        """K or V of each layer, of which list `name` of scales is."""
        return [layer.tensors.get(name[0]) for layer in self.layers]

    def _found(self) -> dict[str, Borrowed]:
        """Scales and zero points that a migration into this view writes, by name."""
        found: dict[str, Borrowed] = {}
        for name in _BESIDE:
            for i, (scale, tensor) in enumerate(
                zip(getattr(self, name) or (), self._of(name), strict=False)
            ):
                if scale is None or tensor is None or not tensor.dtype.format.affine:
                    continue
                if not (tensor.dtype.format.grouped and name.endswith("zeros")):
                    found[f"{name}[{i}]"] = scale
        for i, plane in enumerate(self.planes):
            if plane.dtype.format.affine:
                grouped = plane.dtype.format.grouped
                parts = {"scale": plane.scale, "zero": None if grouped else plane.zero}
                found |= {f"planes[{i}].{part}": t for part, t in parts.items() if t is not None}
        return found

    def bytes_per_token(self, num_heads: int | None = None) -> int:
        """Bytes of a token in all layers and planes: of `num_heads` heads, or of all.

        An entry that stands for several tokens counts for none of them.
        """
        if num_heads is not None:
            num_heads = integer("num_heads", num_heads)
        found = self._bytes.get(num_heads or 0)
        if found is None:
            found = sum((num_heads or la.num_kv_heads) * la.head_bytes for la in self.layers)
            of_tokens = (plane for plane in self.planes if plane.tokens_per_entry == 1)
            found += sum(plane.entry_bytes(num_heads) for plane in of_tokens)
            self._bytes[num_heads or 0] = found
        return found

    def require_in_place(self, name: str) -> None:
        """Raises InvalidArgumentError if the view's memory has moved since it was described.

        name: what errors call it
        """
        self.require_current(name)
        self.held(name)

    def require_current(self, name: str) -> None:
        """Raises InvalidArgumentError if the engine reports that the view is out of date."""
        reason = None if self.outdated is None else self.outdated()
        if reason is not None:
            raise InvalidArgumentError(f"{name} is out of date: {reason}")

    def held(self, name: str) -> bound.Held:
        """The torch tensors that it describes, after a check that their memory has not moved.

        name: what errors call the view
        Raises InvalidArgumentError.
        """
        if self._held is not None and self._held.is_current():
            return self._held
        owners = []
        for i, layer in enumerate(self.layers):
            layer.require_in_place(f"{name}.layers[{i}]")
            owners += layer.moving_owners
        for kind in _BESIDE:
            for i, scale in enumerate(getattr(self, kind) or ()):
                if scale is not None:
                    scale.require_in_place(f"{name}.{kind}[{i}]")
                    owners += [scale.owner] if may_move(scale.owner) else []
        for i, plane in enumerate(self.planes):
            of_plane: dict[str, Borrowed | None] = {
                "": plane,
                ".scale": plane.scale,
                ".zero": plane.zero,
            }
            for part, tensor in of_plane.items():
                if tensor is not None:
                    tensor.require_in_place(f"{name}.planes[{i}]{part}")
                    owners += [tensor.owner] if may_move(tensor.owner) else []
            for place in ("block_table", "slots"):
                found = getattr(plane, place)
                if found is not None:
                    found.require_in_place(f"{name}.planes[{i}].{place}")
                    owners += moving_owners(found.owner)
        held = bound.Held(owners)
        object.__setattr__(self, "_held", held)
        return held

    def _scales_to_c(self, name: str, scales: Sequence[ScaleDesc | None]) -> Any:
        expected = "a list or tuple with a ScaleDesc or None per layer"
        if not isinstance(scales, (list, tuple)):
            raise bad_argument(name, scales, expected)
        object.__setattr__(self, name, tuple(scales))
        if len(scales) != len(self.layers):
            raise InvalidArgumentError(
                f"{name} has {len(scales)} entries, expected {len(self.layers)}, one per layer "
                "(spec E.3)"
            )
        for i, (layer, scale) in enumerate(zip(self.layers, scales, strict=True)):
            if scale is not None:
                instance(f"{name}[{i}]", scale, ScaleDesc, "a ScaleDesc, see ScaleDesc.of, or None")
                same_memory(f"{name}[{i}]", scale.memory, f"layers[{i}].k is", layer.k.memory)
        structs = [None if scale is None else scale.to_c() for scale in scales]
        return abi.pointer_array(structs, abi.kvx_scale_desc_t)

    def at(
        self,
        block_table: BlockTable | TensorLike | Sequence[Sequence[int]] | None = None,
        slots: SlotMapping | TensorLike | Sequence[int] | None = None,
        starts: SeqLens | TensorLike | Sequence[int] | None = None,
        head_start: int = 0,
        first_positions: TensorLike | Sequence[int] | int | None = None,
    ) -> CacheSpan:
        """A span: this view with the lookup of some sequences.

        block_table: a BlockTable, or block ids as BlockTable.packed takes them
        slots:       (num_tokens,), one per token that moves, the sequences one after the other. A
                     paged view takes one of block_table and slots; a dense one may have neither:
                     sequence s is then block s
        starts:      (seq_count,), the first token of each sequence at this end; None: 0
        head_start:  first head at this end
        first_positions: one for all or (seq_count,): the position of each sequence's token 0 at
                     this end, with slots of the first one that moves; None: 0, with slots not
                     known. Below 0 where padding comes first. Both ends must mean the same
                     positions (`migrate`)
        Raises InvalidArgumentError, UnsupportedError.
        """
        return CacheSpan(
            view=self,
            block_table=None if block_table is None else self.table_of(block_table),
            slots=None if slots is None else SlotMapping.of(slots),
            starts=None if starts is None else SeqLens.of(starts, name="starts"),
            head_start=head_start,
            first_positions=None if first_positions is None else _positions(first_positions),
        )

    def table_of(self, table: BlockTable | TensorLike | Sequence[Sequence[int]]) -> BlockTable:
        """A table of this view, as `at` takes it.

        Raises InvalidArgumentError, UnsupportedError.
        """
        found = BlockTable.of(table)
        if found.blocks:
            planes = [plane for layer in self.layers for plane in (layer.k, layer.v) if plane]
            check_blocks(found.blocks, planes)
        return found


# The format of a table, or a word where there is none (a bool would equal a format), the head that
# it begins with, the block that entries of whole blocks are counted from, whether the table has
# holes, and whether the tokens have other positions than their numbers.
SpanKind = tuple[BlockTableFormat | Literal["slots", "dense"], int, int, bool, bool]


@dataclass(frozen=True, slots=True, repr=False)
class CacheSpan:
    """One end of a migration: a CacheView and the lookup of sequences in it. See CacheView.at.

    Raises InvalidArgumentError for a paged view without block_table or slots.
    """

    view: CacheView
    block_table: BlockTable | None = None
    slots: SlotMapping | None = None
    starts: SeqLens | None = None
    head_start: int = 0
    first_positions: tuple[int, ...] | None = None  # see CacheView.at
    # What ends have in common that one bound migration serves, see bound_migration.py.
    kind: SpanKind = field(init=False, compare=False)

    def __post_init__(self) -> None:
        table = self.block_table
        kinds = type(table), type(self.slots), type(self.starts), type(self.head_start)
        is_usual = type(self.view) is CacheView and kinds in _USUAL  # as in every step of an engine
        if not (is_usual and 0 <= self.head_start < 2**32):
            self._check()
        moves = self.starts is not None or self.first_positions is not None
        if table is None:
            place: Literal["slots", "dense"] = "dense" if self.slots is None else "slots"
            kind: SpanKind = place, self.head_start, 0, False, moves
        else:
            flags = table.flags
            format, described = table.format, table.indptr if flags & abi.FLAG_WHOLE else 0
            kind = format, self.head_start, described, flags & abi.FLAG_HOLES != 0, moves
        object.__setattr__(self, "kind", kind)

    def _check(self) -> None:
        view = instance("view", self.view, CacheView, "a CacheView")
        for name, kind in _PLACES.items():
            found = getattr(self, name)
            if found is not None and not isinstance(found, kind):
                raise bad_argument(name, found, f"a {kind.__name__} or None. Use CacheView.at")
        if self.block_table is None and self.slots is None and not view.dense:
            raise InvalidArgumentError(
                "the view is paged and has neither block_table nor slots, expected one of them: "
                "view.at(block_table=...) or view.at(slots=...). A cache whose block s is sequence "
                "s is described with CacheView(dense=True)"
            )
        coerce_fields(self, head_start=integer)

    def __repr__(self) -> str:
        given = (f"{name}={getattr(self, name)}" for name in _PLACES if getattr(self, name))
        first = f"head_start={self.head_start}" if self.head_start else None
        return format_repr("CacheSpan", repr(self.view), *given, first)

    @classmethod
    def of(cls, end: CacheSpan | CacheView, *, name: str = "end") -> CacheSpan:
        """`end` itself if it is a CacheSpan, else the whole of a dense view.

        name: what errors call it
        Raises InvalidArgumentError.
        """
        if isinstance(end, CacheSpan):
            return end
        if not isinstance(end, CacheView):
            raise bad_argument(name, end, "a CacheView.at(block_table=...) or a dense CacheView")
        try:
            return end.at()
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{name}: {error}") from None

    def held(self, name: str) -> bound.Held:
        """The view's torch tensors and those of slots, tables and starts, with their memory.

        name: what errors call the end
        Raises InvalidArgumentError as `require_in_place`.
        """
        of_view = self.view.held(name)
        places = self._places(name)
        owners = [owner for place in places.values() for owner in moving_owners(place.owner)]
        return bound.Held([*of_view.owners, *owners]) if owners else of_view

    def require_in_place(self, name: str) -> None:
        """Raises InvalidArgumentError if memory has moved since it was described: its storage was
        resized or replaced.

        name: what errors call the end
        """
        self.view.held(name)
        self._places(name)

    def _places(self, name: str) -> dict[str, Any]:
        """Table, slots and starts, as far as there are any, after a check of their memory."""
        found = {f"{name}.{place}": getattr(self, place) for place in _PLACES}
        found = {place: one for place, one in found.items() if one is not None}
        for place, one in found.items():
            one.require_in_place(place)
        return found

    def to_c(self) -> abi.kvx_span_t:
        """A new C struct with these fields."""
        view = self.view
        return abi.kvx_span_t(
            num_layers=len(view.layers),
            layers=view._layers,
            block_table=abi.pointer_to(self.block_table),
            slots=abi.pointer_to(self.slots),
            starts=abi.pointer_to(self.starts),
            head_start=self.head_start,
            secondary_num_blocks=view.secondary_num_blocks,
            null_block_plus_1=abi.null_block_plus_1(view.null_block_id),
            k_scales=view._k_scales,
            v_scales=view._v_scales,
            k_zeros=view._k_zeros,
            v_zeros=view._v_zeros,
            planes=view._planes,
            num_planes=len(view.planes),
        )


_BESIDE = ("k_scales", "v_scales", "k_zeros", "v_zeros")
_PLACES: dict[str, type[Any]] = {"block_table": BlockTable, "slots": SlotMapping, "starts": SeqLens}

# Types of block_table, slots, starts and head_start.
_USUAL = {
    (table, slots, starts, int)
    for table, slots in ((BlockTable, type(None)), (type(None), SlotMapping))
    for starts in (SeqLens, type(None))
}


def _positions(given: Any) -> tuple[int, ...]:
    """Positions, one for all sequences or one of each."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    return tuple(SeqLens.of(given, name="first_positions").to_numpy().tolist())
