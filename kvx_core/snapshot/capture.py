"""Lists the tensors that a snapshot needs, and copies between a cache and a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import bad_argument
from kvx_core.desc.facts import compare
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.tensors import int64_array
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.ops.migrate import copy_tokens
from kvx_core.snapshot.contents import (
    SCALE_KINDS,
    Part,
    Stored,
    coarsest_of,
    group_scale,
    head_dim_of,
    scale_name,
    shape_of_kv,
)
from kvx_core.snapshot.planes import is_kv, kinds_of, name_of, scale_of, shape_of
from kvx_core.snapshot.precision import Precision, Precisions, precision_in
from kvx_core.snapshot.scales import scale_shape, scales_of
from kvx_core.snapshot.section import Section, lossy_of
from kvx_core.snapshot.storage_format import StorageFormat
from kvx_core.types import Axis, DType


def token_ids(tokens: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Returns token ids as an array. Copies a torch tensor from its device to the host.

    Raises InvalidArgumentError if the ids are not integers.
    """
    if is_torch(tokens) and not (tokens.is_floating_point() or tokens.is_complex()):
        tokens = tokens.cpu().numpy()  # one copy: reading id by id waits for the device each time
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidArgumentError(
                f"tokens is an array of {tokens.dtype} with {tokens.ndim} axes, expected integers "
                "with 1 axis"
            )
        if tokens.dtype.kind == "u" and tokens.size and tokens.max() >= 2**63:
            at = int(tokens.argmax())
            raise bad_argument(f"tokens[{at}]", int(tokens[at]), "an integer of 64 bits")
        return tokens.astype("<i8", copy=False)
    return int64_array("tokens", tokens)


def check_sections(sections: Sequence[Section], format: StorageFormat, carried: Precisions) -> None:
    """Raises InvalidArgumentError, UnsupportedError if one snapshot of this format cannot hold all
    these sections, or if `carried` lacks the precision of one of their layers.
    """
    if not sections:
        raise InvalidArgumentError("sections is empty, expected at least 1 section")
    layers = [layer for section in sections for layer in section.layers]
    if len(set(layers)) != len(layers):
        raise InvalidArgumentError(f"sections have the layers {layers}, expected each once")
    if not isinstance(carried, Precision) and max(layers) >= len(carried):
        raise InvalidArgumentError(
            f"precision has {len(carried)} layers, expected one for each layer of the model, and "
            f"layer {max(layers)} is captured"
        )
    for section in sections:
        wrong = compare(section.view.facts, section.view.facts, same_model=True).reasons
        if wrong:
            raise InvalidArgumentError(wrong[0])
        total, (first, end) = section.view.facts.total_kv_heads, section.heads
        if section.view.layers and total is not None and end > total:
            raise InvalidArgumentError(
                f"section.view.facts.total_kv_heads is {total}, expected at least {end}: the view "
                f"has the KV heads {first} to {end - 1} of the model"
            )
        for plane in section.view.planes:
            reason = None if plane.state is None else plane.state.why_not_whole()
            if reason is not None:
                raise UnsupportedError(
                    f"{plane.kind()} {reason}. A PrefixStore takes it so; else migrate it into "
                    "memory of that kind first"
                )
        format.check(section)


def check_span(sections: Sequence[Section], start: int, num_tokens: int) -> None:
    """Raises InvalidArgumentError if these tokens begin inside an entry of a plane, or if a state
    of the sections belongs to a prefix that does not end with these tokens.

    start: position in the sequence of the first token
    """
    for section in sections:
        said = section.view.state_tokens
        counts = set() if said is None else set(np.ravel(said() if callable(said) else said))
        if len(counts) == 1 and counts != {start + num_tokens}:  # else it is of several rows
            raise InvalidArgumentError(
                f"section.view has states of {counts.pop()} tokens by its engine's own count, and "
                f"the tokens to capture end at {start + num_tokens}, expected the same number"
            )
        for kind in kinds_of(section.view):
            if kind.tokens_per_entry and start % kind.tokens_per_entry:
                raise InvalidArgumentError(
                    f"start is {start}, expected a multiple of {kind.tokens_per_entry}: an entry "
                    f"of {kind.words} stands for so many tokens"
                )
            if not kind.tokens_per_entry and section.state_tokens != start + num_tokens:
                raise InvalidArgumentError(
                    f"section.state_tokens is {section.state_tokens}, expected "
                    f"{start + num_tokens}: {kind.words} belongs to a prefix of one length, and "
                    "the tokens end there"
                )


def parts_of(
    sections: Sequence[Section], format: StorageFormat, carried: Precisions
) -> Iterator[Part]:
    """Yields the parts of a header: at least one for each section, one for each precision of its
    layers.

    carried: the coarsest precision that the values had before the capture: one for all layers, or
             one for each layer of the model
    """
    for section in sections:
        for one in section.alike():
            facts, precision = one.view.facts, one.precision
            if format.converts(one):
                if format.rounds(one):
                    facts = replace(facts, lossy=lossy_of(facts).meet(format.precision).name)
                precision = precision.meet(format.precision)
            layers: dict[Precision, list[int]] = {}  # by their precision in `carried`
            for layer in one.layers:
                layers.setdefault(precision_in(carried, layer), []).append(layer)
            kinds = kinds_of(one.view)
            for before, held in layers.items():
                planes = tuple(kind for kind in kinds if kind.layer in held)
                name = precision.meet(before).name
                yield Part(tuple(held), one.heads, facts, one.encoding, name, planes)


def precision_of(
    sections: Sequence[Section], format: StorageFormat, carried: Precisions
) -> Precision:
    """Returns the coarsest precision in a snapshot of these sections. Arguments: see `parts_of`."""
    return coarsest_of(parts_of(sections, format, carried))


def to_capture(
    section: Section, num_tokens: int, format: StorageFormat
) -> Iterator[tuple[str, Stored]]:
    """Yields the name and description of each tensor that a snapshot needs for a section."""
    into = format.dtype if format.converts(section) else None

    def kv(dtype: DType, num_heads: int, head_dim: int) -> Stored:
        stored = into or dtype
        shape = shape_of_kv(stored, num_tokens, num_heads, head_dim)
        original = None if into is None else dtype
        return Stored(stored, shape, original=original, coding=format.coding)

    for layer, cache in zip(section.layers, section.view.layers, strict=False):
        dims = {"k": cache.head_dim, "v": cache.v_head_dim}
        for kind, tensor in cache.tensors.items():
            stored = kv(tensor.dtype, cache.num_kv_heads, dims[kind])
            yield f"layers.{layer}.{kind}", stored
            if stored.dtype.format.grouped:
                yield f"layers.{layer}.{kind}_scale", group_scale(stored)
            if into is not None and into.format.scaled:
                shape = num_tokens, cache.num_kv_heads
                yield f"layers.{layer}.{kind}_scale", Stored(DType.F32, shape)
    if into is None:
        for kind in SCALE_KINDS:
            for layer, scale in zip(section.layers, scales_of(section.view, kind), strict=False):
                if scale is not None:
                    name = f"layers.{layer}.{kind}"
                    yield name, Stored(DType.F32, scale_shape(scale, num_tokens))
    for plane in section.view.planes:
        found, scale = shape_of(plane, num_tokens), scale_of(plane)
        if not found[0]:
            continue
        if is_kv(plane):
            head_dim = plane.extent(Axis.DIM) * plane.dtype.numbers
            stored = kv(plane.dtype, plane.extent(Axis.HEAD), head_dim)
            yield name_of(plane), stored
            if stored.dtype.format.grouped:
                yield scale_name(name_of(plane)), group_scale(stored)
        else:
            yield name_of(plane), Stored(plane.dtype, found)
        if scale is not None and not (is_kv(plane) and into is not None):
            yield scale_name(name_of(plane)), Stored(DType.F32, scale_shape(scale, num_tokens))


def to_capture_all(
    sections: Sequence[Section], num_tokens: int, format: StorageFormat
) -> Iterator[tuple[str, Stored]]:
    """Yields the name and description of each tensor that a snapshot of these sections needs."""
    for section in sections:
        yield from to_capture(section, num_tokens, format)


def head_dims(section: Section, layers: Sequence[int]) -> dict[str, int]:
    """Returns the head_dim of K and V of these layers, by the names of their tensors in a snapshot.

    The head_dim is 0 for a K or V that the section lacks: a layer may have planes alone.
    """
    wanted = set(layers)
    dims = {f"layers.{layer}.{kind}": 0 for layer in layers for kind in ("k", "v")}
    for layer, cache in zip(section.layers, section.view.layers, strict=False):
        if layer in wanted:
            dims |= {f"layers.{layer}.k": cache.head_dim, f"layers.{layer}.v": cache.v_head_dim}
    for plane in section.view.planes:
        if is_kv(plane) and plane.layer in wanted:
            dims[name_of(plane)] = plane.extent(Axis.DIM) * plane.dtype.numbers
    return dims


def unlike_head_dims(
    section: Section,
    layers: Sequence[int],
    tensors: Mapping[str, Stored],
    heads: tuple[int, int],
) -> Iterator[str]:
    """Yields a reason for each K and V of these layers whose head_dim differs from the section's.

    tensors, heads: of the snapshot
    """
    for name, head_dim in head_dims(section, layers).items():
        tensor = tensors.get(name)
        stored = 0 if tensor is None else head_dim_of(tensor, heads[1] - heads[0])
        if stored != head_dim:
            yield f"{name} has head_dim {stored}, expected {head_dim} as the cache has"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies one sequence from one view to another. `table` is the block table of the cache."""

    lens: SeqLens
    src_starts: SeqLens
    table: BlockTable | None
    dst_starts: SeqLens | None = None
    src_head: int = 0
    dst_head: int = 0
    num_heads: int | None = None
    stream: int | None = None

    def run(
        self,
        src: CacheView,
        dst: CacheView,
        *,
        into_table: bool = True,
        find_scales: bool = False,
    ) -> None:
        """Copies the tokens. Compares no facts: the caller has compared them for each layer.

        into_table: the cache is `dst`; False: it is `src`
        """
        copy_tokens(
            src.at(
                block_table=None if into_table else self.table,
                starts=self.src_starts,
                head_start=self.src_head,
            ),
            dst.at(
                # The copy skips null blocks of the section that it restores.
                block_table=self.table and self.table.with_holes() if into_table else None,
                starts=self.dst_starts,
                head_start=self.dst_head,
            ),
            self.lens,
            num_heads=self.num_heads,
            find_scales=find_scales,
            stream=self.stream,
        )
