"""A dry run of a store: would lookups find what is going to be captured?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvx_core.snapshot import Section
from kvx_core.stores.keys import parse_name
from kvx_core.stores.prefix import PrefixStore


def never_found(
    store: PrefixStore, sections: Sequence[Section], heads: Iterable[tuple[int, int]]
) -> str:
    """Why a lookup finds nothing of what is captured from these sections; "" if it finds it.

    sections: all layers of a worker, with a table or without
    heads:    of this worker and of the others with the same layers: first, and one past the last
    Reads and writes no file.
    """
    heads = list(heads)
    held = sorted({section.heads for section in sections})
    if len(held) > 1:
        return (
            f"layers have the KV heads {' and '.join(map(_words, held))}, expected the same in "
            "all: a store of layers that differ in their number of heads is not there yet"
        )
    finder, files = store.finder, []
    for of in {*held, *heads}:
        name = store.would_write(sections, of)
        file = parse_name(name, finder.shape)
        if file is None:
            return (
                f"{name.rpartition('/')[2]!r} would be stored, expected a name of a model of "
                f"{finder.shape[0]} layers and {finder.shape[1]} KV heads"
            )
        if not finder.accepts(file.precision):
            return (
                f"values would be stored as {file.precision.name}, expected numbers that include "
                f"those of {finder.precision.name}, which a lookup asks for"
            )
        files.append(file)
    layers = [layer for section in sections for layer in section.layers]
    missing = np.argwhere(~finder.cover(files)[0][layers])
    if len(missing):
        layer, head = int(layers[missing[0][0]]), int(missing[0][1])
        ranges = ", ".join(map(_words, sorted({*held, *heads})))
        return (
            f"nobody would store head {head} of layer {layer}: all ranks together have the KV "
            f"heads {ranges} of {finder.shape[1]}, and an entry is found when it holds all"
        )
    return ""


def _words(heads: tuple[int, int]) -> str:
    first, last = heads
    return str(first) if last - first == 1 else f"{first} to {last - 1}"
