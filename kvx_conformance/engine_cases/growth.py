"""A cache that grows or moves after it was described."""

from __future__ import annotations

import numpy as np

from kvx_conformance import memory
from kvx_conformance.case import Wrong
from kvx_conformance.engine_probe import REFUSALS, Probe, engine_case, require_same
from kvx_core import CacheView, migrate


@engine_case("docs/transformers.md: each step of a DynamicCache makes new tensors; docs/mlx.md")
def described_again_it_is_right(probe: Probe) -> None:
    """However much a cache has grown since it was described, described again it is right."""
    probe.write(0, 2)
    while len(probe.ids[0]) + 5 <= probe.room:
        probe.write(0, 5)
        probe.require_as_described([0])
    if probe.table(0).first + probe.held([0])[0] != len(probe.ids[0]):
        raise Wrong(f"the table is {probe.table(0)} after {len(probe.ids[0])} tokens")


@engine_case("docs/mlx.md: while a view is kept, the next step copies the whole cache elsewhere")
def an_old_view_is_refused_or_right(probe: Probe) -> None:
    """A move out of a span that was made before the cache grew is refused, or gives its tokens."""
    probe.write(0, 3)
    kept, plain, held = probe.span([0]), probe.plain([0]), probe.held([0])
    while len(probe.ids[0]) + 3 <= probe.room:
        probe.write(0, 3)
        try:
            migrate(kept, plain.span, held)
        except REFUSALS:
            continue
        for i in range(held[0]):
            first = plain.firsts[0]
            if first + i >= probe.table(0).first:
                read = probe.read(0, first + i)
                require_same(f"position {first + i}, by an old view", plain.token(0, i), read, 1e-6)


@engine_case("docs/transformers.md: a view is valid until the next forward pass")
def nothing_is_written_elsewhere(probe: Probe) -> None:
    """A move into a span that was made before the cache grew is refused, or the engine reads what
    it has written."""
    probe.write(0, 3)
    kept, plain, held = probe.span([0]), probe.plain([0]), probe.held([0])
    migrate(probe.span([0]), plain.span, held)
    _change(plain.view)
    probe.write(0, probe.room - len(probe.ids[0]) - 2)
    try:
        migrate(plain.span, kept, held)
    except REFUSALS:
        return
    first = plain.firsts[0]
    for i in range(held[0]):
        if first + i < probe.table(0).first:
            continue
        written, read = plain.token(0, i)[0], probe.read(0, first + i)[0]
        if (np.abs(written - read) > probe.rounding() * np.abs(read).max()).any():
            raise Wrong("a move into a span of before the cache grew went where the engine is not")


def _change(view: CacheView) -> None:
    """Exchanges neighbouring heads, or else dims, so that the numbers are others of the kind."""
    for tensor in memory.tensors(view).values():
        found = memory.elements(tensor)
        axis = 2 if found.shape[2] > 1 else 3
        found[...] = np.flip(np.array(found), axis)
