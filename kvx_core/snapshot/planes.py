"""Gives planes of a section names and shapes in a snapshot, checks them, and makes views of them.

K and V in tiles are planes with these roles, and are stored as any K and V. Other planes are stored
unchanged, and can be loaded into planes of the same dtype alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from operator import is_
from typing import Any

from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.planes import Plane
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.states import stored_heads
from kvx_core.desc.tensors import row_major
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot.contents import KV_DTYPES, SCALED, PlaneKind, Stored, scale_name
from kvx_core.snapshot.precision import VALUES
from kvx_core.types import Axis, DType, Memory, Role, ScaleGranularity

_SCALES = (ScaleGranularity.PER_TENSOR, ScaleGranularity.PER_HEAD)


def is_kv(plane: Plane) -> bool:
    """True if the plane is K or V in tiles."""
    return plane.role in (Role.K, Role.V)


def name_of(plane: Plane) -> str:
    """Returns the name of the plane's tensor in a snapshot."""
    if is_kv(plane):
        return f"layers.{plane.layer}.{plane.role_name.lower()}"
    return PlaneKind.of(plane).name


def kinds_of(view: CacheView) -> tuple[PlaneKind, ...]:
    """Returns the planes of a view beside K and V, sorted."""
    return tuple(sorted(PlaneKind.of(plane) for plane in view.planes if not is_kv(plane)))


def stored_kinds(view: CacheView) -> tuple[PlaneKind, ...]:
    """Returns the planes of a view beside K and V as a store has them, sorted."""
    kept = stored_planes(plane for plane in view.planes if not is_kv(plane))
    return tuple(sorted(map(PlaneKind.of, kept)))


def shape_of(plane: Plane, num_tokens: int) -> tuple[int, int, int]:
    """Returns the shape of a plane in a snapshot: entries, heads, units. 0 entries: not stored."""
    entries = PlaneKind.of(plane).num_entries(num_tokens)
    return entries, plane.extent(Axis.HEAD), plane.extent(Axis.DIM)


def scale_of(plane: Plane) -> ScaleDesc | None:
    """Returns the scale of a plane of FP8 or S8; None for other planes."""
    return plane.scale if plane.dtype in SCALED else None


def num_heads_of(planes: Sequence[Plane]) -> int:
    """Returns the number of heads of the planes that ranks split; 1 if they split no plane."""
    return next((plane.extent(Axis.HEAD) for plane in planes if not plane.replicated), 1)


def stored_planes(planes: Iterable[Plane]) -> list[Plane]:
    """Returns planes as a store has them: the states of recurrent layers cut into heads, which
    ranks share, see Plane.by_heads.
    """
    found, of_layer = [], dict[int, list[Plane]]()
    for plane in planes:
        if plane.state is None:
            found.append(plane)
        else:
            of_layer.setdefault(plane.layer, []).append(plane)
    for states in of_layer.values():
        heads = stored_heads(plane.state for plane in states if plane.state is not None)
        found += [part for plane in states for part in plane.by_heads(heads)]
    return found


def first_state_head(planes: Iterable[Plane], stored: Sequence[Plane]) -> int:
    """Returns the first head that a rank has of the states of a layer.

    planes, stored: the states, as they are and as `stored_planes` returns them
    Raises InvalidArgumentError for states of several ranks.
    """
    states = [plane.state for plane in planes if plane.state is not None]
    ranks = {(state.rank, state.num_ranks) for state in states}
    if len(ranks) > 1:
        words = " and ".join(f"rank {rank} of {count}" for rank, count in sorted(ranks))
        raise InvalidArgumentError(
            f"the states of a section are of {words}, expected all of one. Make a section of each"
        )
    if all(plane.replicated for plane in stored):
        return 0
    return sum(rank for rank, _ in ranks) * num_heads_of(stored)


def by_entry(planes: Sequence[Plane]) -> list[list[Plane]]:
    """Groups planes by the tokens of an entry: one call can copy each group."""

    def key(plane: Plane) -> int:
        return plane.tokens_per_entry

    return [list(group) for _, group in groupby(sorted(planes, key=key), key)]


def held_planes(view: CacheView, tensors: Mapping[str, Stored], rows: Sequence[int]) -> list[Plane]:
    """Returns the planes of a view that are among `tensors`, without K and V of layers `rows`."""
    held = (plane for plane in view.planes if name_of(plane) in tensors)
    return [plane for plane in held if not (is_kv(plane) and plane.layer in rows)]


def view_of_planes(view: CacheView, planes: Sequence[Plane]) -> CacheView:
    """Returns the view with these of its planes alone, without layers: itself if it has no other.

    So what libkvx and migrations remember of the view serves the next call.
    """
    if not view.layers and len(planes) == len(view.planes) and all(map(is_, planes, view.planes)):
        return view
    none: dict[str, Any] = dict.fromkeys(("k_scales", "v_scales", "k_zeros", "v_zeros"))
    return replace(view, layers=(), planes=tuple(planes), **none)


def dense_view(
    planes: Sequence[Plane],
    tensors: dict[str, Stored],
    address_of: Callable[[str], int],
    owner: object,
    scale_of: Callable[[str], ScaleDesc | None],
) -> CacheView:
    """Returns the tensors that a snapshot has of these planes, as a dense cache of one block.

    address_of, scale_of: return the address and the scale of a tensor, by its name
    """

    def dense(plane: Plane) -> Plane:
        name = name_of(plane)
        stored = tensors[name]
        like = _dense(PlaneKind.of(plane), stored.dtype, stored.shape)
        scale, data = scale_of(name), address_of(name)
        if scale is not None:
            return replace(like, scale=scale, data=data, owner=owner)
        return like.in_memory(data, owner)

    return CacheView((), CacheFacts(), planes=tuple(map(dense, planes)), dense=True)


@lru_cache(maxsize=1024)
def _dense(kind: PlaneKind, dtype: DType, stored_shape: tuple[int, ...]) -> Plane:
    """Returns a plane as a snapshot has it, in no memory."""
    shape = stored_shape if kind.tokens_per_entry else stored_shape[1:]
    return Plane(
        axes=(*((Axis.TOKEN,) if kind.tokens_per_entry else ()), Axis.HEAD, Axis.DIM),
        role=kind.role,
        layer=kind.layer,
        tokens_per_entry=kind.tokens_per_entry,
        replicated=kind.replicated,
        dtype=dtype,
        memory=Memory.HOST,
        shape=shape,
        stride=row_major(shape),
        data=0,
    )


def unlike_planes(
    view: CacheView,
    stored: Sequence[PlaneKind],
    layers: Sequence[int],
    tensors: dict[str, Stored],
) -> list[str]:
    """Returns why the stored planes of these layers do not fit into the planes of a view.

    stored, tensors: of the snapshot
    """
    here = {PlaneKind.of(p): p for p in view.planes if not is_kv(p) and p.layer in layers}
    reasons = [
        f"{kind.words} is {there}: an entry for {kind.tokens_per_entry} tokens, "
        f"{'whole on every rank' if kind.replicated else 'split by heads'}. Expected the same "
        "planes at both ends"
        for kinds, there in (
            (set(stored) - here.keys(), "stored, and the cache does not have it so"),
            (here.keys() - set(stored), "in the cache, and is not stored so"),
        )
        for kind in sorted(kinds)
    ]
    for kind, plane in here.items():
        found = tensors.get(kind.name)
        if found is None:
            continue
        heads = plane.extent(Axis.HEAD) if plane.replicated else found.shape[1]
        wanted = plane.dtype, (heads, plane.extent(Axis.DIM))
        if (found.dtype, found.shape[1:]) != wanted:
            reasons.append(
                f"{kind.name} is {found.dtype.name} {found.shape[1:]}, expected "
                f"{plane.dtype.name} {wanted[1]} as the cache has: planes are loaded as they were "
                "stored"
            )
        elif (scale_of(plane) is None) is (scale_name(kind.name) in tensors):
            reasons.append(
                f"{kind.name} has a scale at one end alone, expected it at both ends or at neither"
            )
    return reasons


def cut(kind: PlaneKind, start: int, stop: int, end: int) -> str | None:
    """Returns why tokens `start` to `stop` of a plane cannot be loaded, or None.

    end: where the snapshot ends
    """
    n = kind.tokens_per_entry
    if n and start % n:
        return (
            f"start is {start}, expected a multiple of {n}: an entry of {kind.words} stands for "
            "so many tokens"
        )
    if n == 0 and stop != end:
        return (
            f"stop is {stop}, expected {end}: {kind.words} is stored as it was after {end} tokens, "
            "and belongs to no other prefix"
        )
    return None


def check_planes(view: CacheView, layers: Sequence[int], encoding: str) -> None:
    """Raises InvalidArgumentError, UnsupportedError if a section cannot have the view's planes."""
    num_heads = view.layers[0].num_kv_heads if view.layers else num_heads_of(view.planes)
    k_layers = {plane.layer for plane in view.planes if plane.role == Role.K}
    for i, plane in enumerate(view.planes):
        name, role = f"section.view.planes[{i}]", plane.role_name
        if plane.layer not in layers:
            raise InvalidArgumentError(
                f"{name}.layer is {plane.layer}, expected one of section.layers {tuple(layers)}"
            )
        if plane.dtype not in KV_DTYPES:
            raise UnsupportedError(
                f"{name} ({role}) is {plane.dtype.name}, expected one of "
                f"{', '.join(dtype.name for dtype in KV_DTYPES)}, which files hold"
            )
        if is_kv(plane):
            _check_kv(name, plane, view, k_layers, encoding)
        elif plane.dtype is DType.U8 and encoding == VALUES:
            raise InvalidArgumentError(
                f"{name} ({role}) is U8 and section.encoding is {encoding!r}, expected the dtype "
                "of its numbers, see Plane.of(..., dtype=...), or the name of opaque bytes"
            )
        if not plane.replicated and plane.extent(Axis.HEAD) != num_heads:
            raise InvalidArgumentError(
                f"{name} ({role}) has {plane.extent(Axis.HEAD)} heads, expected {num_heads} as the "
                "section has, or replicated=True where every rank holds it whole"
            )
        if plane.block_table is not None and plane.block_table.num_rows != 1:
            raise InvalidArgumentError(
                f"{name}.block_table has {plane.block_table.num_rows} rows, expected the one of "
                "the sequence"
            )
        if plane.slots is not None and plane.tokens_per_entry:
            raise UnsupportedError(
                f"{name} ({role}) has slots, expected a block_table: a section has to find every "
                "token of the sequence"
            )
        if plane.slots is not None and plane.slots.token_count != 1:
            raise InvalidArgumentError(
                f"{name}.slots has {plane.slots.token_count} entries, expected the one of the "
                "sequence"
            )
        scale = scale_of(plane)
        if scale is not None and scale.granularity not in _SCALES:
            raise UnsupportedError(
                f"{name}.scale is {scale.granularity.name}, expected PER_TENSOR or PER_HEAD. Give "
                "scales of tokens as a plane of their own"
            )


def _check_kv(name: str, plane: Plane, view: CacheView, k_layers: set[int], encoding: str) -> None:
    """Checks a K or V in tiles. Raises InvalidArgumentError."""
    if view.layers:
        raise InvalidArgumentError(
            f"{name} is {plane.role_name} of layer {plane.layer}, expected it in a view without "
            "layers, which have K and V. Make a section of each"
        )
    if plane.tokens_per_entry != 1 or plane.replicated or plane.layer not in k_layers:
        raise InvalidArgumentError(
            f"{name} is {plane.role_name} of layer {plane.layer}, expected an entry per token that "
            "ranks split by heads, and a K beside each V"
        )
    if (plane.dtype is DType.U8) is (encoding == VALUES):
        raise InvalidArgumentError(
            f"section.encoding is {encoding!r} and {name} is {plane.dtype.name}, expected U8 for "
            "opaque bytes and only for them"
        )
