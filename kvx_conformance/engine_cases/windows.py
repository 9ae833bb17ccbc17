"""Layers with a sliding window: rings, and positions that do not begin at 0."""

from __future__ import annotations

from dataclasses import replace

from kvx_conformance.case import NotApplicable, Wrong
from kvx_conformance.engine_probe import Probe, engine_case, require_same
from kvx_core import FactsMismatchError, migrate


@engine_case("docs/transformers.md: a dynamic window holds window - 1 tokens, a static one window")
def the_window_holds_the_last_tokens(probe: Probe) -> None:
    """A windowed cache holds all tokens until the window is full and then its last ones, at least
    window - 1, each where the table says."""
    window = _window(probe)
    for step in (3, window - 1, 1, 1, 1, window + 2, 1):
        probe.write(0, step)
        count = len(probe.ids[0])
        table = probe.table(0)
        if table.first + table.length != count:
            raise Wrong(f"the table is {table} after {count} tokens: it does not end there")
        if table.length < min(count, window - 1):
            raise Wrong(f"the table is {table} after {count} tokens, a window is {window}")
        probe.require_as_described([0])


@engine_case("docs/mlx.md: a prompt lies in order in a ring, single tokens go round")
def a_ring_moves_in_order(probe: Probe) -> None:
    """A move out of a ring that has turned gives its tokens in the order of their positions."""
    window = _window(probe)
    for step in (window + 3, 1, 1, 1):
        probe.write(0, step)
        plain = probe.plain([0])
        migrate(probe.span([0]), plain.span, probe.held([0]))
        table = probe.table(0)
        for i in range(table.length):
            read = probe.read(0, table.first + i)
            require_same(f"position {table.first + i}", plain.token(0, i), read, 1e-6)


@engine_case("docs/architecture.md: blocks that a window has left are not read")
def dropped_tokens_cannot_be_read(probe: Probe) -> None:
    """A token that the window has dropped is not read, and the engine says so."""
    first = _turned(probe)
    try:
        probe.read(0, first - 1)
    except LookupError:
        return
    raise Wrong(f"position {first - 1} is read, and the table begins at {first}")


@engine_case("docs/describe.md, Positions and holes: K is rotated for its position")
def tokens_keep_their_positions(probe: Probe) -> None:
    """Tokens of a window go to their own positions: a move to others is refused."""
    first = _turned(probe)
    plain, held = probe.plain([0]), probe.held([0])
    migrate(probe.span([0]), plain.span, held)
    for other in (0, first - 1, first + 1):
        plain.firsts = [other]
        try:
            migrate(probe.span([0]), plain.span, held)
        except FactsMismatchError:
            continue
        raise Wrong(f"tokens from position {first} on moved to position {other}")


@engine_case("docs/describe.md, 2: the window is a fact that a migration compares")
def the_window_is_a_fact(probe: Probe) -> None:
    """A cache that drops tokens says its window, and a cache of another window takes none of it."""
    for sequence in probe.sequences[:1]:
        probe.write(sequence, probe.room - 2)
        if probe.table(sequence).first and not probe.facts().window:
            raise Wrong(f"position 0 was dropped, and facts.window is {probe.facts().window}")
    window = _window(probe)
    plain = probe.plain([0])
    for other in (window + 1, 0):
        view = replace(plain.view, facts=replace(plain.view.facts, window=other))
        try:
            migrate(probe.span([0]), plain.at(view), probe.held([0]))
        except FactsMismatchError:
            continue
        raise Wrong(f"a cache whose window is {window} moved to one of {other}")


def _window(probe: Probe) -> int:
    window = probe.facts().window
    if not window:
        raise NotApplicable("the engine has full attention")
    if 2 * window + 8 > probe.room:
        raise NotApplicable(f"a window of {window} tokens is never full")
    return window


def _turned(probe: Probe) -> int:
    """Writes until the window has dropped tokens; the position of the first that is held."""
    window = _window(probe)
    while not probe.table(0).first and len(probe.ids.get(0, ())) + window + 1 <= probe.room:
        probe.write(0, window)
        probe.write(0, 1)  # a ring takes single tokens otherwise than a prompt
    if not probe.table(0).first:
        raise NotApplicable("the window has dropped no token")
    return probe.table(0).first
