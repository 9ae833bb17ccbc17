"""Facts: what strides do not show, and what a move is refused for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from kvx_conformance.case import Wrong
from kvx_conformance.engine_probe import Probe, engine_case
from kvx_core import CacheFacts, FactsMismatchError, migrate

# Each with another value, for `another_model_is_refused`.
_OTHERS: dict[str, Any] = {
    "fingerprint": "of another model",
    "rope_applied": False,
    "num_layers": 77,
    "first_layer": 5,
    "window": 4097,
    "total_kv_heads": 99,
    "first_kv_head": 3,
    "hadamard": True,
}
_NEEDED = (
    "engine",
    "fingerprint",
    "rotary",
    "rotary_dim",
    "rope_applied",
    "num_layers",
    "first_layer",
    "window",
    "total_kv_heads",
    "first_kv_head",
)


@engine_case("docs/describe.md, 2: a fact that only one end knows is refused")
def facts_are_complete(probe: Probe) -> None:
    """An engine says which model, rotation, layers, heads and window its cache has, and its own
    version: none of these is unknown."""
    found = probe.filled().facts()
    unknown = [name for name in _NEEDED if getattr(found, name) is None]
    if unknown:
        raise Wrong(f"facts say nothing of {', '.join(unknown)}")
    words = (found.engine or "").split()
    if len(words) < 2:
        raise Wrong(f"facts.engine is {found.engine!r}, expected a name and a version")


@engine_case("docs/describe.md, 2: a migration compares the facts of two ends, at any time")
def facts_are_stable(probe: Probe) -> None:
    """Facts are the same before and after steps, in a second engine, and in its views."""
    probe.filled()
    first = probe.facts()
    probe.write(0, 2)
    other = probe.another()
    other.filled()
    for what, found in (
        ("after a step", probe.facts()),
        ("in a second engine", other.facts()),
        ("in describe()", probe.view().facts),
        ("in a span", probe.span().view.facts),
    ):
        differ = _differing(found, first)
        if differ:
            raise Wrong(
                f"{what}, {differ[0]} is {getattr(found, differ[0])!r}, expected "
                f"{getattr(first, differ[0])!r}"
            )


@engine_case("tensor and pipeline parallel: a rank holds some heads, and some layers")
def facts_fit_the_descriptors(probe: Probe) -> None:
    """Facts agree with the layers: how many, their heads, the dims that rotate."""
    found, view = probe.filled().facts(), probe.view()
    layer = view.layers[0]
    if found.num_layers is not None and found.num_layers != len(view.layers):
        raise Wrong(f"facts.num_layers is {found.num_layers}, described are {len(view.layers)}")
    last = (found.first_kv_head or 0) + layer.num_kv_heads
    if found.total_kv_heads is not None and last > found.total_kv_heads:
        raise Wrong(f"head {last - 1} is held, of total_kv_heads {found.total_kv_heads}")
    if (found.rotary_dim or 0) > layer.head_dim:
        raise Wrong(f"facts.rotary_dim is {found.rotary_dim}, head_dim {layer.head_dim}")
    if (found.rotary == "none") != (found.rotary_dim == 0):
        raise Wrong(f"facts.rotary is {found.rotary!r} and rotary_dim {found.rotary_dim}")


@engine_case("docs/describe.md, 2: two caches of one shape can mean different numbers")
def another_model_is_refused(probe: Probe) -> None:
    """A move to a cache of another model, rotation, window, layer, head or Hadamard rotation is
    refused, at either end."""
    probe.filled()
    plain, held, own = probe.plain(), probe.held(), probe.facts()
    migrate(probe.span(), plain.span, held)
    others = [
        replace(plain.view.facts, **{name: value})
        for name, value in _OTHERS.items()
        if getattr(own, name) not in (None, value)
    ]
    if own.rotary_dim:
        others.append(replace(plain.view.facts, rotary_dim=own.rotary_dim - 2))
    for facts in others:
        there = plain.at(replace(plain.view, facts=facts))
        for src, dst in ((probe.span(), there), (there, probe.span())):
            try:
                migrate(src, dst, held)
            except FactsMismatchError:
                continue
            differ = _differing(facts, plain.view.facts)
            raise Wrong(f"a move between caches whose {differ[0]} differs was taken")


def _differing(a: CacheFacts, b: CacheFacts) -> list[str]:
    """The names of the facts that differ."""
    return [f.name for f in fields(CacheFacts) if getattr(a, f.name) != getattr(b, f.name)]
