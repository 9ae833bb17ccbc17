"""Copies rows: K or V of all heads of a token in units that span heads, such as units of Q4_K.

A copy needs the same heads at both ends, and a row has no heads. So numbers pass through a buffer
of float32, a few tokens at a time. In the buffer the heads of a token follow one another, so that
they can be read as a row too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from kvx_core.desc.planes import Plane
from kvx_core.desc.view import CacheView
from kvx_core.ops.write_gather import device_status
from kvx_core.snapshot.capture import Copy
from kvx_core.snapshot.contents import NOTHING, Stored, is_row
from kvx_core.snapshot.dense import Dense
from kvx_core.snapshot.memory import host_memory, laid_out
from kvx_core.snapshot.planes import is_kv, name_of, view_of_planes
from kvx_core.snapshot.scales import has_vector_scales
from kvx_core.snapshot.section import Section, device_of, ints_on, table_on
from kvx_core.types import DType

_BUFFER_BYTES = 4 << 20  # so large that a call costs little beside its copy


class _Buffer:
    """A buffer for float32 numbers of some tokens of one layer, and views for copies.

    heads:  the buffer as a cache with the heads of the layer
    rows:   the buffer as a cache with one head
    stored: the rows of the snapshot as a cache with one head
    """

    __slots__ = ("heads", "num_tokens", "rows", "stored")

    def __init__(
        self, dense: Dense, layer: int, num_heads: int, tiles: list[Plane], *, pinned: bool
    ) -> None:
        names = [n for n in (f"layers.{layer}.k", f"layers.{layer}.v") if n in dense.tensors]
        stored = {name: dense.tensors[name] for name in names}
        numbers = {name: prod(s.shape[1:]) * s.dtype.numbers for name, s in stored.items()}
        most = max(_BUFFER_BYTES // (DType.F32.itemsize * sum(numbers.values())), 1)
        self.num_tokens = min(most, stored[names[0]].shape[0])
        tensors, num_bytes = laid_out(
            (name, Stored(DType.F32, (self.num_tokens, num_heads, count // num_heads)))
            for name, count in numbers.items()
        )
        memory = host_memory(num_bytes, pinned=pinned)
        here = Dense(tensors, memory)
        self.heads = here.planes(tiles, scales=False) if tiles else here.view([layer], scales=False)
        self.rows = _as_one_head(here).view([layer], scales=False)
        self.stored = _as_one_head(Dense(stored, dense.memory)).view([layer], scales=False)


def _as_one_head(dense: Dense) -> Dense:
    tensors = {
        name: replace(stored, shape=(stored.shape[0], 1, prod(stored.shape[1:])))
        for name, stored in dense.tensors.items()
    }
    return Dense(tensors, dense.memory)


def _kv_of(section: Section) -> tuple[CacheView, list[Plane]]:
    """Returns a view of K and V of a section without other planes, and the planes of K and V.

    The second list is empty unless K and V are in tiles.
    """
    tiles = [plane for plane in section.view.planes if is_kv(plane)]
    if tiles:
        return view_of_planes(section.view, tiles), tiles
    return replace(section.view, planes=()), []


def rows_of(
    tensors: Mapping[str, Stored], layers: Iterable[int], heads: tuple[int, int]
) -> list[int]:
    """Returns the layers whose units of K or V span heads.

    heads: of the tensors: first, and one past the last
    """
    return [
        layer
        for layer in layers
        if any(
            is_row(tensors.get(f"layers.{layer}.{kind}", NOTHING), heads[1] - heads[0])
            for kind in "kv"
        )
    ]


def unlike_rows(
    section: Section, layers: Sequence[int], tensors: Mapping[str, Stored]
) -> list[str]:
    """Returns why K and V of these layers, which have rows, do not fit into the section.

    A cache with the dtype of the rows is refused: float32 in between would change the units.
    """
    reasons = []
    for layer in layers:
        view, tiles = _kv_of(section.of([layer]))
        found = {name_of(plane): plane.dtype for plane in tiles}
        for cache in view.layers:
            found |= {f"layers.{layer}.{kind}": t.dtype for kind, t in cache.tensors.items()}
        reasons += [
            f"{name} is {dtype.name} as in the cache, and units of this format span heads beside "
            "it. Expected another dtype in the cache"
            for name, dtype in found.items()
            if dtype.numbers > 1 and name in tensors and tensors[name].dtype is dtype
        ]
    return reasons


def capture_rows(section: Section, dense: Dense, first_token: int) -> None:
    """Copies K and V of all tokens of a snapshot out of a section's cache.

    dense:       the snapshot, which has rows of these layers
    first_token: position in the sequence of the snapshot's first token
    Mutates the snapshot. Waits for a device.
    """
    device = device_of([section])
    num_heads = section.heads[1] - section.heads[0]
    for layer in section.layers:
        one = section.of([layer])
        view, tiles = _kv_of(one)
        table = table_on(one.block_table, device)
        buffer = _Buffer(dense, layer, num_heads, tiles, pinned=device is not None)
        end = dense.tensors[f"layers.{layer}.k"].shape[0]
        for at in range(0, end, buffer.num_tokens):
            count = min(buffer.num_tokens, end - at)
            gather = Copy(
                lens=ints_on([count], device),
                src_starts=ints_on([first_token + at], device),
                table=table,
            )
            gather.run(view, buffer.heads, into_table=False)
            if device is not None:
                device_status()  # the host reads the buffer now
            encode = Copy(
                lens=ints_on([count], None),
                src_starts=ints_on([0], None),
                dst_starts=ints_on([at], None),
                table=None,
            )
            encode.run(buffer.rows, buffer.stored)


def restore_rows(
    section: Section,
    dense: Dense,
    heads: tuple[int, int],
    tokens: tuple[int, int],
    first_token: int,
    stream: int | None,
) -> None:
    """Copies K and V of tokens into a section's cache, for the heads that both have.

    dense:       the snapshot, which has rows of these layers
    heads:       the snapshot's heads of the model: first, and one past the last
    tokens:      positions in the sequence: the first, and one past the last
    first_token: position of the snapshot's first token
    Mutates the section's cache. Waits for a device.
    """
    device = device_of([section])
    first = max(heads[0], section.heads[0])
    num_heads = min(heads[1], section.heads[1]) - first
    start, stop = tokens
    for layer in section.layers:
        one = section.of([layer])
        view, tiles = _kv_of(one)
        table = table_on(one.block_table, device)
        find_scales = bool(view.layers) and has_vector_scales(view)
        buffer = _Buffer(dense, layer, heads[1] - heads[0], tiles, pinned=device is not None)
        for at in range(start, stop, buffer.num_tokens):
            count = min(buffer.num_tokens, stop - at)
            decode = Copy(
                lens=ints_on([count], None),
                src_starts=ints_on([at - first_token], None),
                dst_starts=ints_on([0], None),
                table=None,
            )
            decode.run(buffer.stored, buffer.rows)
            scatter = Copy(
                lens=ints_on([count], device),
                src_starts=ints_on([0], device),
                dst_starts=ints_on([at], device),
                src_head=first - heads[0],
                dst_head=first - section.heads[0],
                num_heads=num_heads,
                table=table,
                stream=stream,
            )
            scatter.run(buffer.heads, view, find_scales=find_scales)
            if device is not None:
                device_status(stream)  # the next tokens overwrite the buffer
