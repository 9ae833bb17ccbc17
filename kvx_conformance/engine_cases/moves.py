"""Tokens go to another cache and come back, and the engine goes on with them."""

from __future__ import annotations

import numpy as np

from kvx_conformance import memory
from kvx_conformance.case import NotApplicable, Wrong
from kvx_conformance.engine_probe import REFUSALS, SENTINEL, Probe, engine_case, require_same
from kvx_core import ScaleGranularity, migrate, verify


@engine_case("docs/spec.md E.3: a copy is exact")
def tokens_arrive(probe: Probe) -> None:
    """A move to a plain cache gives each number that the engine reads."""
    probe.filled()
    plain, rtol = probe.plain(), 1e-6 if probe.rounds(probe.view()) else 0
    migrate(probe.span(), plain.span, probe.held())
    for row, sequence in enumerate(probe.ids):
        table = probe.table(sequence)
        for i in range(table.length):
            name = f"sequence {sequence}, position {table.first + i}"
            require_same(name, plain.token(row, i), probe.read(sequence, table.first + i), rtol)


@engine_case("docs/spec.md E.3: a copy is exact")
def tokens_come_back(probe: Probe) -> None:
    """Tokens that went to a plain cache, were wiped and came back are the same bytes, and every
    byte around them has stayed."""
    probe.filled()
    if probe.view().layers[0].k.dtype.format.affine:
        raise NotApplicable("its scales are found anew where tokens are written")
    plain, held, before = probe.plain(), probe.held(), probe.bytes()
    migrate(probe.span(), plain.span, held)
    view = probe.view()
    for sequence in probe.ids:
        for _, block, offset in probe.places(view, sequence):
            for tensor in memory.tensors(view).values():
                memory.elements(tensor)[block, offset] = SENTINEL
    del view
    migrate(plain.span, probe.span(), held)
    for then, now in zip(before, probe.bytes(), strict=True):
        if not np.array_equal(then, now):
            raise Wrong(f"{int((then != now).sum())} bytes differ after tokens went and came back")


@engine_case("docs/spec.md E.14: a block of units that cover its tokens is written as one")
def tokens_behind_stay(probe: Probe) -> None:
    """A move into the first tokens of a sequence leaves those behind them as they are, or is
    refused."""
    probe.write(0, 9)
    scales = probe.view().k_scales
    if scales and scales[0] and scales[0].granularity is ScaleGranularity.PER_CHANNEL:
        raise NotApplicable("spec E.14: tokens behind those that move hold nothing afterwards")
    table = probe.table(0)
    if table.first or probe.span([0]).slots is not None:
        raise NotApplicable("its spans name the slot of each token that moves")
    before = [probe.read(0, position) for position in range(9)]
    plain = probe.plain([0])
    migrate(probe.span([0]), plain.span, [9])
    try:
        migrate(plain.span, probe.span([0]), [4])
    except REFUSALS:
        return
    for position in range(4, 9):
        key, was = probe.read(0, position)[0], before[position][0]
        if not np.array_equal(key, was):
            raise Wrong(f"K of position {position} changed in a move of the four first tokens")


@engine_case("a cache of zeros says tokens, too: only keys and values tell")
def the_engine_goes_on(probe: Probe) -> None:
    """An engine that computes the next token on tokens that moved into its cache computes the keys
    and values that their source does; on a cache of zeros it does not."""
    if not probe.computes:
        raise NotApplicable("the engine is given its keys and values")
    probe.part("reserve")
    count = min(17, probe.room - 4, (probe.facts().window or 99) - 1)
    ids = probe.rng.integers(0, 100, count + 1).tolist()
    probe.write(0, count, ids=ids[:count])
    moved, zeros = probe.another(), probe.another()
    for there in (moved, zeros):
        there.engine.reserve(0, count)
        there.ids[0] = ids[:count]
    migrate(probe.span([0]), moved.span([0]), [count])
    found = []
    for one in (probe, moved, zeros):
        one.write(0, 1, ids=ids[count:])
        found.append(one.read(0, count)[0])
    size = float(np.abs(found[0]).max())
    errors = [float(np.abs(other - found[0]).max()) / size for other in found[1:]]
    rounds = probe.view().layers[0].k.dtype.format.affine
    if errors[0] > (0.1 if rounds else 1e-3):
        raise Wrong(f"K of the next token differs by {errors[0]:.3g} of its size after a move")
    if errors[1] < 0.01:
        raise Wrong("K of the next token is the same on a cache of zeros: it shows nothing")


@engine_case("docs/describe.md, 4: verify reads both ends through their descriptions")
def verify_finds_a_byte(probe: Probe) -> None:
    """A bit that flips in the engine's memory is found, and its layer, K or V, token and head
    named."""
    probe.filled()
    plain, held = probe.plain(), probe.held()
    migrate(probe.span(), plain.span, held)
    _require_equal(probe, plain.span, held)
    view = probe.view()
    for (layer, kv), tensor in memory.tensors(view).items():
        sequence = int(probe.rng.choice([*probe.ids]))
        places = [*probe.places(view, sequence)]
        token = int(probe.rng.integers(len(places)))
        head = int(probe.rng.integers(view.layers[layer].num_kv_heads))
        _, block, offset = places[token]
        elements = memory.elements(tensor)
        *dims, size = elements.shape[3:]
        last = size - 1 if tensor.dtype.numbers > 1 else 0
        at = (block, offset, head, *(int(probe.rng.integers(n)) for n in dims), last)
        elements[at] ^= 1
        found = verify(probe.span(), plain.span, held)
        elements[at] ^= 1
        if found.ok or found.difference is None:
            raise Wrong(
                f"a bit of layer {layer} {kv}, token {token} flipped, and verify says {found}"
            )
        got = found.difference
        row = [*probe.ids].index(sequence)
        wanted = (layer, kv, row, token, head)
        if (got.layer, got.kv, got.sequence, got.token, got.head) != wanted:
            raise Wrong(f"a bit of {wanted} flipped, and verify {found}")
    _require_equal(probe, plain.span, held)


def _require_equal(probe: Probe, other: object, held: list[int]) -> None:
    found = verify(probe.span(), other, held)  # type: ignore[arg-type]
    if not found.ok or found.num_tokens != sum(held):
        raise Wrong(f"verify says {found}, expected {sum(held)} equal tokens")
