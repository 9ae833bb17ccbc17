"""Lengths that the engine does not hold are refused, whatever the caller says."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvx_conformance import memory
from kvx_conformance.case import NotApplicable, Wrong
from kvx_conformance.engine_probe import Probe, engine_case
from kvx_conformance.plain import Plain
from kvx_core import CacheSpan, migrate


@engine_case("docs/describe.md: a cache with room to spare shows no bytes that tell where it ends")
def more_than_is_held_is_refused(probe: Probe) -> None:
    """A move of a token more than the engine holds is refused, at either end, and so is one of as
    many as there is room."""
    probe.filled()
    room = probe.view().layers[0].block_size * probe.view().layers[0].num_blocks
    for sequence in probe.ids:
        (held,) = probe.held([sequence])
        for length in (held + 1, max(room, held + 2)):
            plain = probe.plain([sequence], more=length - held)
            _require_refused(probe, plain, sequence, length)


@engine_case("docs/transformers.md: the last token was sampled and has no keys yet")
def the_token_that_was_sampled_is_not_held(probe: Probe) -> None:
    """The token after the last that was computed is refused after each step, too."""
    probe.write(0, 4)
    for _ in range(3):
        probe.write(0, 1)
        computed = len(probe.ids[0]) - probe.table(0).first
        _require_refused(probe, probe.plain([0], more=1), 0, computed + 1)


@engine_case("docs/llama_cpp.md: cells of llama_memory_seq_rm keep their numbers")
def dropped_tokens_are_refused(probe: Probe) -> None:
    """After the engine has dropped a sequence's last tokens it holds the others, and no more; a
    span that was made before is refused for more, too."""
    probe.part("keep")
    probe.filled()
    before = probe.read(0, 2)
    (held,) = probe.held([0])
    kept, plain = probe.span([0]), probe.plain([0])
    probe.keep(0, held - 4)
    what = "with tokens that were dropped since"
    probe.require_refused(f"a source {what}", partial(migrate, kept, plain.span, [held]))
    probe.require_refused(f"a destination {what}", partial(migrate, plain.span, kept, [held]))
    del kept
    if probe.held([0]) != [held - 4]:
        raise Wrong(f"the table is {probe.table(0)} after a drop to {held - 4} tokens")
    probe.require_as_described([0])
    if not np.array_equal(before[0], probe.read(0, 2)[0]):
        raise Wrong("a drop of the last tokens changed position 2")
    _require_refused(probe, probe.plain([0], more=1), 0, held - 3)
    probe.write(0, 3)
    probe.require_as_described([0])


@engine_case("docs/spec.md 5.3: lengths of 0")
def no_tokens_move_nothing(probe: Probe) -> None:
    """A move of no tokens is taken, and changes no byte."""
    probe.filled()
    if probe.span([0]).slots is not None:
        raise NotApplicable("its spans name the slot of each token that moves")
    before, plain = probe.bytes(), probe.plain([0])
    there = memory.contents(plain.view)
    migrate(probe.span([0]), plain.span, [0])
    migrate(plain.span, probe.span([0]), [0])
    for then, now in zip(
        [*before, *there], [*probe.bytes(), *memory.contents(plain.view)], strict=True
    ):
        if not np.array_equal(then, now):
            raise Wrong("a move of no tokens has written")


@engine_case("a sequence that was never begun, or has ended")
def a_sequence_that_is_not_there_holds_nothing(probe: Probe) -> None:
    """Before its first token, a sequence has no token in the table."""
    if len(probe.sequences) > 1:
        probe.write(0, 3)
        other = probe.sequences[-1]
        if probe.table(other).length:
            raise Wrong(f"sequence {other} has no token, and its table is {probe.table(other)}")
    elif probe.table(0).length:
        raise Wrong(f"a new cache has {probe.table(0)}")


def _require_refused(probe: Probe, plain: Plain, sequence: int, length: int) -> None:
    what = f"a length of {length}, where sequence {sequence} holds {probe.held([sequence])[0]},"
    probe.require_refused(
        f"{what} at the source",
        lambda: migrate(_longer(probe, sequence, length), plain.span, [length]),
    )
    probe.require_refused(
        f"{what} at the destination",
        lambda: migrate(plain.span, _longer(probe, sequence, length), [length]),
    )


def _longer(probe: Probe, sequence: int, length: int) -> CacheSpan:
    """The engine's span of a sequence; if it names slots, with unused ones for the other tokens."""
    span = probe.span([sequence])
    if span.slots is None:
        return span
    view = span.view
    size = view.layers[0].block_size
    places = [block * size + offset for _, block, offset in probe.places(view, sequence)]
    spare = [slot for slot in range(view.layers[0].num_blocks * size) if slot not in places]
    if not spare:
        return span
    slots = [*places, *spare * length][:length]
    return view.at(slots=slots, first_positions=span.first_positions)
