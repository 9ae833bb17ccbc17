"""Copies tokens of a snapshot into layers of a cache: K, V, scales, planes and rows."""

from __future__ import annotations

from dataclasses import replace

from kvx_core.ops.write_gather import device_status
from kvx_core.snapshot.capture import Copy
from kvx_core.snapshot.contents import PlaneKind
from kvx_core.snapshot.dense import Dense
from kvx_core.snapshot.planes import by_entry, held_planes, view_of_planes
from kvx_core.snapshot.rows import restore_rows, rows_of
from kvx_core.snapshot.scales import bare, has_vector_scales, scales_as_cache
from kvx_core.snapshot.section import Section, device_of, ints_on, table_on


def check_places(section: Section, start: int, stop: int) -> None:
    """Raises the errors of copies into a section before the first copy writes.

    start, stop: the tokens, as positions in the sequence
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
    """
    has_vector_scales(section.view)
    section.view.require_in_place("section.view")
    for name, tensor in section.view.read_only.items():
        tensor.require_writable(f"section.view.{name}")
    section.check_tables(start, stop)


def restore_layers(
    section: Section,
    dense: Dense,
    heads: tuple[int, int],
    tokens: tuple[int, int],
    first_token: int,
    stream: int | None,
) -> int:
    """Copies tokens of a snapshot into a section's cache: see Snapshot.restore.

    dense:       the snapshot, which has all layers of the section
    heads:       the snapshot's heads of the model in these layers; the section has some of them
    tokens:      positions in the sequence: the first, and one past the last
    first_token: position of the snapshot's first token
    Mutates the section's cache. Waits for a device. Returns the bytes of these tokens in the cache.
    """
    (start, stop), view, device = tokens, section.view, device_of([section])
    first = max(heads[0], section.heads[0])
    num_heads = min(heads[1], section.heads[1]) - first
    rows = rows_of(dense.tensors, section.layers, heads)
    planes = held_planes(view, dense.tensors, rows)
    if planes or rows:
        check_places(section, start, stop)
    copy = Copy(
        lens=ints_on([stop - start], device),
        src_starts=ints_on([start - first_token], device),
        dst_starts=ints_on([start], device),
        src_head=first - heads[0],
        dst_head=first - section.heads[0],
        num_heads=num_heads,
        table=table_on(section.block_table, device),
        stream=stream,
    )
    for group in by_entry(planes):
        copy.run(dense.planes(group), view_of_planes(view, group))
    num_bytes = (stop - start) * view.bytes_per_token(num_heads)
    num_bytes += sum(
        PlaneKind.of(plane).num_entries(stop - start) * plane.entry_bytes(num_heads)
        for plane in planes
        if plane.tokens_per_entry != 1
    )
    layers = section.layers
    if rows:
        restore_rows(section.of(rows), dense, heads, tokens, first_token, stream)
        layers = tuple(layer for layer in layers if layer not in rows)
        view = section.of(layers).view if layers else view_of_planes(view, ())
    view = replace(view, planes=()) if view.planes else view
    per_vector = has_vector_scales(view)
    if not view.layers:
        pass
    elif per_vector and dense.has_vector_scales(layers, view):
        copy.run(dense.view(layers, scales=False), bare(view))
        copy.run(scales_as_cache(dense.view(layers)), scales_as_cache(view))
    else:
        copy.run(dense.view(layers), view, find_scales=per_vector)
    if device is not None:
        device_status(stream)  # waits: tables and memory that the device reads are freed next
    return num_bytes
