"""Positions of tokens, and states: what an engine exports of a sequence that goes on elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvx_conformance.case import NotApplicable, Wrong
from kvx_conformance.engine import Floats, State
from kvx_conformance.engine_probe import Probe, engine_case


@engine_case("docs/describe.md, Positions and holes")
def tokens_have_their_own_positions(probe: Probe) -> None:
    """By the engine's own count, the tokens held stand at the positions that the table gives."""
    positions = probe.part("positions")
    for step in (5, 1, 1, 7):
        for sequence in probe.sequences:
            probe.write(sequence, step)
            table = probe.table(sequence)
            wanted = [*range(table.first, table.first + table.length)]
            found = [int(one) for one in positions(sequence)]
            if found != wanted:
                raise Wrong(f"sequence {sequence} is at positions {found}, expected {wanted}")


@engine_case("docs/llama_cpp.md: it rotates neighbouring dims, transformers halves")
def keys_turn_as_the_facts_say(probe: Probe) -> None:
    """K of one token id at three positions, in layer 0, is the same vector turned in the pairs of
    dims that the facts give, by angles that grow with the position; V is the same."""
    if not probe.computes:
        raise NotApplicable("the engine is given its keys")
    facts = probe.facts()
    if facts.window or facts.hadamard:
        raise NotApplicable("its keys are rotated otherwise too, or dropped")
    if facts.first_layer:
        raise NotApplicable("its first keys are computed from more than one token")
    probe.write(0, 9, ids=[7, 3, 5, 1, 7, 2, 9, 4, 7])
    probe.filled([1])
    at = [probe.read(0, position) for position in (0, 4, 8)]
    k = [np.asarray(key[0], np.float64) for key, _ in at]
    v = [value[0] for _, value in at if value is not None]
    tolerance = _rounding(probe)
    scale = float(np.abs(k[0]).max())
    for i in (1, 2):
        if v and np.abs(v[i] - v[0]).max() > tolerance * np.abs(v[0]).max():
            raise Wrong("V of layer 0 depends on the position")
    if facts.rotary == "none" or facts.rope_applied is False:
        if max(np.abs(k[i] - k[0]).max() for i in (1, 2)) > tolerance * scale:
            raise Wrong("K of layer 0 depends on the position, and the facts say it is not rotated")
        return
    dim, half = facts.rotary_dim or 0, (facts.rotary_dim or 0) // 2
    first, second = (
        (np.arange(half), np.arange(half) + half)
        if facts.rotary == "half"
        else (2 * np.arange(half), 2 * np.arange(half) + 1)
    )
    z = [key[:, first] + 1j * key[:, second] for key in k]
    if max(np.abs(np.abs(z[i]) - np.abs(z[0])).max() for i in (1, 2)) > tolerance * scale:
        raise Wrong(f"pairs of K have other lengths at other positions: not {facts.rotary} order")
    if np.abs(z[1] * z[1] - z[0] * z[2]).max() > 4 * tolerance * scale**2:
        raise Wrong("K turns by other angles from position 0 to 4 than from 4 to 8")
    if np.abs(k[1] - k[0]).max() < 10 * tolerance * scale:
        raise Wrong("K of layer 0 does not depend on the position, and the facts say it is rotated")
    if any(
        np.abs(k[i][:, dim:] - k[0][:, dim:]).max(initial=0) > tolerance * scale for i in (1, 2)
    ):
        raise Wrong(f"dims of K behind rotary_dim, {dim}, depend on the position")


@engine_case("a state after N - 1 or N + 1 tokens, taken for one after N, gives other text")
def a_state_stands_for_its_tokens(probe: Probe) -> None:
    """A state stands for exactly the tokens that were computed, after each step."""
    state = probe.part("state")
    for step in (5, 1, 4, 1):
        probe.write(0, step)
        if state(0).position != len(probe.ids[0]):
            raise Wrong(f"the state is at {state(0).position}, expected {len(probe.ids[0])} tokens")


@engine_case("HF and MLX go on writing to the state that they have handed out")
def a_state_that_was_exported_stays(probe: Probe) -> None:
    """A state does not change when the engine goes on."""
    state = probe.part("state")
    probe.write(0, 6)
    found = state(0)
    before = [np.array(one, copy=True) for one in found.data]
    for _ in range(3):
        probe.write(0, 2)
    for then, now in zip(before, found.data, strict=True):
        if not np.array_equal(then, now):
            raise Wrong("the state that was exported after 6 tokens changed in later steps")


@engine_case("llama.cpp #26676: a session is restored with none of its tokens")
def a_state_goes_on_alike(probe: Probe) -> None:
    """An engine that goes on from a state has the state of the one that it came from; one that goes
    on from the state of a token less has not."""
    state = probe.part("state")
    ids = probe.rng.integers(0, 100, 10).tolist()
    states = {}
    for count in (6, 7):
        one = probe.another()
        one.write(0, count, ids=ids[:count])
        states[count] = one.engine.state(0)
        one.write(0, 1)
    probe.write(0, 7, ids=ids[:7])
    probe.write(0, 3, ids=ids[7:])
    wanted = state(0)
    ends = {}
    for count, exported in states.items():
        there = probe.another()
        there.engine.set_state(0, exported)
        there.ids[0] = ids[:count]
        there.write(0, 3, ids=ids[7:])
        ends[count] = there.engine.state(0)
    if ends[7].position != 10 or not _alike(ends[7], wanted):
        raise Wrong("an engine that went on from a state has another one than its source")
    if _alike(ends[6], wanted):
        raise Wrong("the state does not show which tokens it is of: one of a token less is as good")


@engine_case("docs/llama_cpp.md: a state that is cut off")
def a_state_that_is_cut_is_refused(probe: Probe) -> None:
    """A state whose data lack their end is refused."""
    probe.part("set_state")
    probe.write(0, 6)
    found = probe.engine.state(0)
    cut = replace(found, data=[*found.data[:-1], found.data[-1].ravel()[:-1]])
    there = probe.another()
    try:
        there.engine.set_state(0, cut)
    except ValueError:
        return
    raise Wrong("a state whose last array lacks its last number was taken")


def _rounding(probe: Probe) -> float:
    """The largest error of a number, relative to the largest of a vector, that storing it makes."""
    dtype = probe.view().layers[0].k.dtype
    return {"F32": 1e-3, "F16": 5e-3, "BF16": 2e-2}.get(dtype.name, 6e-2)


def _alike(a: State, b: State) -> bool:
    """Equal but for the order in which a float was summed."""
    if a.position != b.position or len(a.data) != len(b.data):
        return False
    return all(_close(x, y) for x, y in zip(a.data, b.data, strict=True))


def _close(x: Floats, y: Floats) -> bool:
    if x.shape != y.shape:
        return False
    if x.dtype.kind != "f":
        return bool(np.array_equal(x, y))
    return bool(np.abs(x - y).max(initial=0) <= 1e-3 * np.abs(y).max(initial=1e-9))
