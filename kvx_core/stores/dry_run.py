"""Checks, without files, that lookups will find what an engine is going to capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvx_core.snapshot import Section
from kvx_core.stores.prefix import PrefixStore


def never_found(
    store: PrefixStore,
    sections: Sequence[Section],
    heads: Sequence[tuple[int, int]] | Mapping[int, Sequence[tuple[int, int]]],
) -> str:
    """Returns why lookups would not find tokens captured from these sections; "" if they would.

    sections: all layers of a worker; their tables may be None
    heads:    the heads of this worker and of each other worker with the same layers, as the first
              head and one past the last; a mapping by layer of the model where layers differ
    Reads and writes no file.
    """
    kind, kinds = store.would_write(sections), store.kinds
    if not kinds.accepts(kind):
        of = ((i, kind.precision_of(i), kinds.tokens.demand(kind, i)) for i in kind.layers)
        layer, has, wanted = next(each for each in of if not each[1].includes(each[2]))
        return (
            f"values of layer {layer} would be stored as {has.name}, expected numbers that include "
            f"those of {wanted.name}, which a lookup asks for"
        )
    for layer in kind.layers:
        ranks = heads[layer] if isinstance(heads, Mapping) else heads
        held = sorted({kind.heads_of(layer), *ranks})
        at, total = 0, kinds.record.kv_heads[layer]
        beyond = [rank for rank in held if rank[1] > total]
        if beyond:
            return (
                f"a rank would store the KV heads {_words(beyond[0])} of layer {layer}, expected "
                f"some of the {total} that the store has there"
            )
        for first, last in held:
            if first <= at:
                at = max(at, last)
        if at < total:
            words = ", ".join(map(_words, held))
            return (
                f"nobody would store head {at} of layer {layer}: all ranks together have the KV "
                f"heads {words} of {total}, and an entry is found when it holds all"
            )
    return ""


def _words(heads: tuple[int, int]) -> str:
    first, last = heads
    return str(first) if last - first == 1 else f"{first} to {last - 1}"
