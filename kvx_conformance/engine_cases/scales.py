"""FP8, int8 and other formats whose numbers are made with scales beside them."""

from __future__ import annotations

import numpy as np

from kvx_conformance import memory
from kvx_conformance.case import NotApplicable, Wrong
from kvx_conformance.engine_probe import REFUSALS, Probe, engine_case, require_same
from kvx_core import CacheView, migrate


@engine_case("docs/spec.md 6.6: which scale is whose")
def each_number_has_its_scale(probe: Probe) -> None:
    """Stored number times the scale that the description gives is what the engine reads, in each
    layer, K and V, head and token."""
    _scaled(probe.filled())
    probe.require_as_described()


@engine_case("docs/spec.md 6.6: value = stored * scale; some engines keep the inverse")
def numbers_are_near_those_given(probe: Probe) -> None:
    """What the engine reads back is what it was given, but for its rounding."""
    if probe.computes:
        raise NotApplicable("the engine computes its numbers")
    _scaled(probe.filled())
    for sequence in probe.ids:
        table = probe.table(sequence)
        for position in range(table.first, table.first + table.length):
            given = probe.written(sequence, position)
            assert given is not None
            for kv, read, wanted in zip("KV", probe.read(sequence, position), given, strict=True):
                if read is None or wanted is None:
                    continue
                allowed = np.abs(wanted).max(-1, keepdims=True) / 7
                if (np.abs(read - wanted) > allowed).any():
                    raise Wrong(f"{kv} of sequence {sequence}, position {position} is far off")


@engine_case("docs/spec.md 6.6: the shapes of scales")
def scales_are_of_this_cache(probe: Probe) -> None:
    """Scales have the shape of the cache: one for all, or one for each block, head or token; they
    are finite and, but for scales with a zero point or bias, not negative."""
    view = _scaled(probe.filled())
    for name in ("k_scales", "v_scales"):
        for i, scale in enumerate(getattr(view, name) or ()):
            if scale is None:
                continue
            found = scale.to_numpy().astype(np.float32)
            if not np.isfinite(found).all() or ((found < 0).any() and view.k_zeros is None):
                raise Wrong(f"{name}[{i}] has {found.min()} to {found.max()}")
    for i, layer in enumerate(view.layers):
        layer.validate()
        if (view.k_scales or ())[i] is None:
            raise Wrong(f"layer {i} has no scale of K, and others have")


@engine_case("docs/openvino.md: a token added to a block changes the scales of all tokens in it")
def scales_are_read_when_used(probe: Probe) -> None:
    """A view that is kept while the engine goes on is refused, or has the scales of now."""
    probe.filled()
    _scaled(probe)
    kept, held = probe.span([0]), probe.held([0])
    probe.write(0, 1)
    plain = probe.plain([0])
    try:
        migrate(kept, plain.span, held)
    except REFUSALS:
        return
    for i in range(held[0]):
        position = probe.table(0).first + i
        require_same(f"position {position}", plain.token(0, i), probe.read(0, position), 1e-6)


@engine_case("docs/spec.md 6.6: value = stored * scale; some engines keep the inverse")
def the_convention_is_said(probe: Probe) -> None:
    """The facts of a cache with scales say that a value is stored * scale, as KVX reads it."""
    _scaled(probe.filled())
    if probe.facts().scale_convention != "multiply":
        raise Wrong(f"scale_convention is {probe.facts().scale_convention!r}, expected 'multiply'")


@engine_case("docs/spec.md E.6: what a number becomes in FP8, and back")
def fp8_goes_and_comes_back(probe: Probe) -> None:
    """Tokens that go to float32 and back are the same bytes, by the same scales."""
    view = _scaled(probe.filled())
    if view.layers[0].k.dtype.format.affine:
        raise NotApplicable("its scales are found anew where tokens are written")
    plain, held = probe.plain(), probe.held()
    before = memory.contents(view)
    migrate(probe.span(), plain.span, held)
    for sequence in probe.ids:
        for _, block, offset in probe.places(view, sequence):
            for tensor in memory.tensors(view).values():
                memory.elements(tensor)[block, offset] = 0
    migrate(plain.span, probe.span(), held)
    for then, now in zip(before, memory.contents(view), strict=True):
        if not np.array_equal(then, now):
            raise Wrong("tokens that went to float32 came back as other bytes")


def _scaled(probe: Probe) -> CacheView:
    view = probe.view()
    if view.k_scales is None:
        raise NotApplicable("the cache has no scales")
    return view
