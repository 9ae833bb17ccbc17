"""A Section describes the layers and blocks of one sequence that one engine holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi
from kvx_core.argument_checks import coerce_fields, int64s, integer, is_a, or_none, text
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.find_tokens import find_tokens, null_blocks
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.planes import Plane
from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.tensors import Borrowed, read_array
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.ops.holds import require_holds
from kvx_core.ops.narrow import narrowed
from kvx_core.snapshot.contents import PlaneKind
from kvx_core.snapshot.planes import (
    check_planes,
    first_state_head,
    is_kv,
    num_heads_of,
    stored_planes,
    view_of_planes,
)
from kvx_core.snapshot.precision import VALUES, Precision
from kvx_core.snapshot.scales import has_vector_scales
from kvx_core.types import BlockTableFormat, DType, Memory

BlockIds = npt.NDArray[np.integer[Any]]
_NO_BLOCKS: BlockIds = np.empty(0, np.int64)
_WITH_V = (BlockTableFormat.KV_OFFSETS, BlockTableFormat.POINTERS)  # have separate entries for V


@dataclass(frozen=True, slots=True)
class Section:
    """Some layers of one sequence that one engine holds.

    The layers share a block table and facts; an engine with hybrid groups has several sections. A
    view may have planes of these layers beside K and V, or in their place.
    Raises InvalidArgumentError, UnsupportedError.
    """

    layers: tuple[int, ...]  # indices in the model of view.layers, or else of the view's planes
    view: CacheView  # view.facts.first_kv_head must be set
    block_table: BlockTable | None  # the row of the sequence, from its token 0; None: block 0
    encoding: str = VALUES
    # The number of tokens that the states stand for, from token 0 on. Needed to capture states.
    state_tokens: int | None = None

    def __post_init__(self) -> None:
        coerce_fields(
            self, layers=_in_order, view=is_a(CacheView), block_table=or_none(is_a(BlockTable))
        )
        coerce_fields(self, encoding=text, state_tokens=or_none(integer))
        view = self.view
        if len(set(self.layers)) != len(self.layers) or (
            view.layers and len(self.layers) != len(view.layers)
        ):
            raise InvalidArgumentError(
                f"section.layers is {self.layers}, expected one index for each of the "
                f"{len(view.layers)} layers of its view"
            )
        if not self.layers or min(self.layers) < 0:
            raise InvalidArgumentError(
                f"section.layers is {self.layers}, expected indices of layers of the model"
            )
        if not view.layers and {plane.layer for plane in view.planes} != set(self.layers):
            raise InvalidArgumentError(
                f"section.layers is {self.layers}, expected those of the planes of its view, which "
                "has no layers"
            )
        if view.facts.first_kv_head is None:
            raise InvalidArgumentError(
                "section.view.facts.first_kv_head is None, expected the index in the model of the "
                "first head held here"
            )
        if len({layer.num_kv_heads for layer in view.layers}) > 1:
            raise InvalidArgumentError(
                f"section.view has layers with {[layer.num_kv_heads for layer in view.layers]} "
                "heads, expected the same number in all. Make a section of each"
            )
        self._check_rows()
        for layer, cache in zip(self.layers, view.layers, strict=False):
            for name, tensor in cache.tensors.items():
                if (tensor.dtype is DType.U8) is (self.encoding == VALUES):
                    raise InvalidArgumentError(
                        f"section.encoding is {self.encoding!r} and {name} of layer {layer} is "
                        f"{tensor.dtype.name}, expected U8 for opaque bytes and only for them"
                    )
        if view.has_states:
            name = "section.view.planes"
            planes = tuple(p.as_stored(f"{name}[{i}]") for i, p in enumerate(view.planes))
            if any(one is not other for one, other in zip(planes, view.planes, strict=True)):
                view = replace(view, planes=planes)
                object.__setattr__(self, "view", view)
        check_planes(view, self.layers, self.encoding)

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of the model that the section has: first, and one past the last."""
        first, layers = self.view.facts.first_kv_head or 0, self.view.layers
        return first, first + (layers[0].num_kv_heads if layers else num_heads_of(self.view.planes))

    @property
    def precision(self) -> Precision:
        """The precision of K and V, as facts.compute_dtype, facts.lossy and their dtypes show it.

        Other planes are stored unchanged: they count only in a section without K.
        """
        if self.encoding != VALUES:
            return Precision.of(opaque=self.encoding)
        view = self.view
        dtypes: set[DType] = {t.dtype for layer in view.layers for t in layer.tensors.values()}
        dtypes |= {plane.dtype for plane in view.planes if is_kv(plane)}
        dtypes = dtypes or {plane.dtype for plane in view.planes}
        if view.facts.compute_dtype is not None:
            dtypes.add(view.facts.compute_dtype)
        found = Precision.of(*dtypes, vector_scales=has_vector_scales(view))
        return found.meet(lossy_of(view.facts))

    def alike(self) -> list[Section]:
        """Returns a section for each set of layers with the same dtypes of K and V.

        Other planes count only in a layer without K, as in `precision`.
        """
        view = self.view
        dtypes: dict[int, set[tuple[DType, bool]]] = {layer: set() for layer in self.layers}
        for layer, cache in zip(self.layers, view.layers, strict=False):
            dtypes[layer] |= {(tensor.dtype, True) for tensor in cache.tensors.values()}
        for plane in view.planes:
            dtypes[plane.layer].add((plane.dtype, is_kv(plane)))
        groups: dict[frozenset[DType], list[int]] = {}
        for layer, found in dtypes.items():
            kv = frozenset(dtype for dtype, counts in found if counts)
            groups.setdefault(kv or frozenset(dtype for dtype, _ in found), []).append(layer)
        return [self.of(layers) for layers in groups.values()]

    @property
    def precisions(self) -> dict[int, Precision]:
        """The `precision` of each layer."""
        return {layer: one.precision for one in self.alike() for layer in one.layers}

    def num_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of num_tokens tokens in this cache. Counts only complete entries."""
        return num_tokens * self.view.bytes_per_token() + sum(
            PlaneKind.of(plane).num_entries(num_tokens) * plane.entry_bytes()
            for plane in self.view.planes
            if plane.tokens_per_entry != 1
        )

    @property
    def first_tensor(self) -> Borrowed:
        """K of the first layer or, without layers, the first plane. Copies run on its device."""
        return self.view.layers[0].k if self.view.layers else self.view.planes[0]

    @property
    def tokens(self) -> Section | None:
        """The section without its states; None if it has states alone."""
        planes = tuple(plane for plane in self.view.planes if plane.tokens_per_entry)
        if len(planes) == len(self.view.planes):
            return self
        if self.view.layers:
            return replace(self, view=replace(self.view, planes=planes))
        return self._of_planes(planes)

    @property
    def states(self) -> Section | None:
        """The section with its states alone, as a store has them: planes of one entry per sequence,
        cut into heads. None without any.

        Raises UnsupportedError for states that a store cannot cut so.
        """
        planes = tuple(plane for plane in self.view.planes if not plane.tokens_per_entry)
        if any(plane.state is not None for plane in planes):
            stored = tuple(stored_planes(planes))
            first = first_state_head(planes, stored)
            facts = replace(self.view.facts, first_kv_head=first, total_kv_heads=None)
            return self._of_planes(stored, facts)
        is_whole = not self.view.layers and len(planes) == len(self.view.planes)
        return self if is_whole else self._of_planes(planes)

    def _of_planes(
        self, planes: tuple[Plane, ...], facts: CacheFacts | None = None
    ) -> Section | None:
        layers = {plane.layer for plane in planes}
        held = tuple(layer for layer in self.layers if layer in layers)
        view = view_of_planes(self.view, planes)
        if facts is not None:
            view = replace(view, facts=facts)
        return replace(self, layers=held, view=view) if held else None

    def of(self, layers: Sequence[int]) -> Section:
        """Returns the section with some of its layers alone."""
        if tuple(layers) == self.layers:
            return self
        view, table = self.view, self.block_table
        planes = tuple(plane for plane in view.planes if plane.layer in layers)
        if not view.layers:
            view = view_of_planes(view, planes)
        else:
            at = [self.layers.index(layer) for layer in layers]
            beside: dict[str, Any] = {
                name: None if given is None else tuple(given[i] for i in at)
                for name in ("k_scales", "v_scales", "k_zeros", "v_zeros")
                for given in (getattr(view, name),)
            }
            chosen = [(i, "kv") for i in at]
            view, table = narrowed(view, table, chosen, planes=planes, **beside)
        return replace(self, layers=tuple(layers), view=view, block_table=table)

    def of_sequence(
        self, block_table: BlockTable | None, state_tokens: int | None = None
    ) -> Section:
        """Returns the section with the table of another sequence, whose states are after so many
        tokens. Checks the table alone.

        Raises InvalidArgumentError.
        """
        found, put = object.__new__(Section), object.__setattr__
        for name in Section.__slots__:
            put(found, name, getattr(self, name))
        put(found, "block_table", block_table)
        put(found, "state_tokens", state_tokens)
        found._check_rows()
        return found

    def has_null(self, start: int, stop: int) -> bool:
        """True if K, V or a plane of some of tokens `start` to `stop` lies in a null block.

        Raises OutOfRangeError if a table is too short, or has block ids that are out of range.
        """
        return any(null.any() for null in self.nulls(start, stop))

    def check_tables(self, start: int, stop: int) -> None:
        """Checks the tables of all tensors, and reads nothing else.

        Raises OutOfRangeError as `has_null`.
        """
        for _ in self.nulls(start, stop):
            pass

    def is_null(self, start: int, stop: int) -> bool:
        """True if all tensors of tokens `start` to `stop` lie in null blocks.

        Raises OutOfRangeError as `has_null`.
        """
        return all(null.all() for null in self.nulls(start, stop))

    def nulls(self, start: int, stop: int) -> Iterator[npt.NDArray[np.bool_]]:
        """Yields masks of the tokens or entries in null blocks, for each tensor that may differ.

        Raises OutOfRangeError as `has_null`.
        """
        for places in self._places(start, stop):
            yield places["block"] < 0

    def check_apart(self, start: int, stop: int) -> None:
        """Checks that tokens `start` to `stop` overwrite no other of them: for copies of parts.

        A copy checks its own tokens alone.
        Raises InvalidArgumentError, OutOfRangeError as `has_null`.
        """
        if self.block_table is None or start >= stop:
            return
        blocks = None if self.view.planes else row_on_host(self.block_table)
        if blocks is not None:  # unless a block stands twice, no two tokens have one place
            self.check_reach(stop)
            size = self.view.layers[0].block_size
            blocks = blocks[start // size : -(-stop // size)]
            if len(set(blocks.tolist())) == len(blocks):
                return
            blocks = blocks[~null_blocks(self.view, blocks)]
            if len(set(blocks.tolist())) == len(blocks):
                return
        for places in self._places(start, stop):
            stored = places[places["block"] >= 0]
            found, counts = np.unique(stored, return_counts=True)
            if len(found) < len(stored):
                block = int(found["block"][counts > 1][0])
                raise InvalidArgumentError(
                    f"section.block_table names block {block} for two of the tokens {start} to "
                    f"{stop - 1}, which would overwrite each other; expected a block for each"
                )

    def _places(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """Yields what find_tokens finds of the tokens, for each tensor that may differ."""
        self.check_reach(stop)
        table = None if self.block_table is None else self.block_table.of_parts()
        planes = tuple(plane.of_parts() for plane in self.view.planes)
        are_own = all(one is plane for one, plane in zip(planes, self.view.planes, strict=True))
        view = self.view if are_own else replace(self.view, planes=planes)
        span, lens = view.at(block_table=table, starts=[start]), SeqLens.of([stop - start])
        pointers = table is not None and table.has_planes
        apart = table is not None and table.format in _WITH_V  # else V has the blocks of K
        for layer, cache in enumerate(view.layers if pointers else view.layers[:1]):
            yield find_tokens(span, lens, layer=layer)
            if apart and cache.v is not None:
                yield find_tokens(span, lens, v=True, layer=layer)
        seen = set()
        for i, plane in enumerate(planes):
            key = plane.tokens_per_entry, id(plane.block_table), id(plane.slots)
            if key not in seen:
                seen.add(key)
                yield find_tokens(span, lens, plane=i)

    def _check_rows(self) -> None:
        table = self.block_table
        if table is not None and table.num_rows != 1:
            raise InvalidArgumentError(
                f"section.block_table has {table.num_rows} rows, expected the one of the sequence"
            )

    def check_reach(self, stop: int) -> None:
        """Raises OutOfRangeError if the table of K and V is too short for tokens 0 to `stop`, or if
        the engine holds fewer tokens.
        """
        table = self.block_table
        if self.view.holds is not None:
            require_holds("section.view", self.view.at(block_table=table), [stop])
        if not self.view.layers:
            return  # find_tokens checks planes
        num_tokens = self.view.layers[0].block_size
        if table is not None and table.format is BlockTableFormat.RAGGED:
            num_tokens = table.indices_count
        elif table is not None:
            num_tokens *= table.max_blocks_per_seq
        if stop > num_tokens:
            raise OutOfRangeError(
                f"section.block_table holds {num_tokens} tokens, expected at least {stop}"
            )


def _in_order(name: str, value: Any) -> tuple[int, ...]:
    """Returns indices of layers. Raises InvalidArgumentError, for a set too: it has no order."""
    return int64s(name, None if isinstance(value, (set, frozenset)) else value)


def lossy_of(facts: CacheFacts) -> Precision:
    """Returns the precision that facts.lossy names. Raises InvalidArgumentError."""
    if facts.lossy is None:
        return Precision()
    try:
        return Precision.parse(facts.lossy)
    except (ValueError, AttributeError, TypeError):
        raise InvalidArgumentError(
            f"facts.lossy is {facts.lossy!r}, expected None or Precision.name of formats, such as "
            "'q8_0'"
        ) from None


def device_of(sections: Sequence[Section]) -> Any:
    """Returns the torch device on which copies of these caches run; None: the host.

    Raises UnsupportedError if memory on a device does not belong to a torch tensor.
    """
    first = sections[0].first_tensor
    if first.memory is Memory.HOST:
        return None
    if not is_torch(first.owner):
        raise UnsupportedError(
            f"the cache's memory belongs to a {type(first.owner).__name__} on a device, expected a "
            "torch.Tensor there"
        )
    return first.owner.device


def ints_on(numbers: Sequence[int], device: Any) -> SeqLens:
    """Returns numbers in memory that a copy on this device can read."""
    if device is None:
        return _ints_on_host(tuple(numbers))
    import torch

    return SeqLens.of(torch.tensor(numbers, dtype=torch.int64, device=device))


@lru_cache(maxsize=64)  # most chunks have the same length
def _ints_on_host(numbers: tuple[int, ...]) -> SeqLens:
    return SeqLens.of(numbers)


def row_on_host(table: BlockTable | None) -> BlockIds | None:
    """Returns the block ids of a row without a copy; None if not PACKED, or if on a device."""
    if table is None or table.format is not BlockTableFormat.PACKED:
        return None
    if table.memory is not Memory.HOST:
        return None
    owner = table.owner
    if isinstance(owner, np.ndarray) and owner.size == table.indices_count:
        blocks: BlockIds = owner.reshape(-1)
        if blocks.__array_interface__["data"][0] == table.indices:
            return blocks  # the fast path of every step
    table.require_in_place("section.block_table")
    num_bytes = table.indices_count * table.index_dtype.itemsize
    dtype = table.index_dtype.array_name
    return np.frombuffer(abi.read(table.indices, num_bytes), dtype) if num_bytes else _NO_BLOCKS


def table_on(table: BlockTable | None, device: Any) -> BlockTable | None:
    """Returns the table in memory that a copy on this device can read.

    Raises UnsupportedError for a table on the host that is not PACKED, if the cache is on a device.
    """
    if table is None or device is None or table.memory is not Memory.HOST:
        return None if table is None else table.of_parts()
    import torch

    if table.format is not BlockTableFormat.PACKED:
        raise UnsupportedError(
            f"section.block_table is {table.format.name} on the host, expected it on the device "
            "as the cache is"
        )
    indices = read_array(
        "block_table.indices",
        table.indices,
        (1, table.indices_count),
        (table.indices_count, 1),
        table.index_dtype,
        table.memory,
    )
    return BlockTable.packed(torch.from_numpy(indices).to(device))
