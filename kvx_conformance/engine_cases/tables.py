"""Tables as the engine keeps them, and tables that lie: a move by them is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvx_conformance.case import Lost, NotApplicable, Wrong
from kvx_conformance.engine import Table
from kvx_conformance.engine_probe import (
    REFUSALS,
    Probe,
    engine_case,
    require_same,
    span_at,
    sub_blocks,
)
from kvx_core import CacheSpan, Memory, migrate


@engine_case("two tokens in one place: the later one wins, and nothing shows it")
def no_place_has_two_tokens(probe: Probe) -> None:
    """No place of the cache belongs to two tokens, of one sequence or of two."""
    view = probe.filled().view()
    owners: dict[tuple[int, int], tuple[int, int]] = {}
    for sequence in probe.ids:
        for position, *place in probe.places(view, sequence):
            at = (place[0], place[1])
            if at in owners:
                raise Wrong(
                    f"block {at[0]}, offset {at[1]} is position {position} of sequence {sequence} "
                    f"and position {owners[at][1]} of sequence {owners[at][0]}"
                )
            owners[at] = sequence, position


@engine_case("kvx_adapters/vllm/live.py: the token that was sampled last is not computed")
def the_length_is_that_of_the_cache(probe: Probe) -> None:
    """After each step the table has the tokens that were computed, in each sequence."""
    for step in (4, 1, 3, 1):
        for sequence in probe.sequences:
            probe.write(sequence, step)
            table = probe.table(sequence)
            if table.first + table.length != len(probe.ids[sequence]):
                raise Wrong(
                    f"sequence {sequence} has {len(probe.ids[sequence])} tokens, the table says "
                    f"{table.length} from position {table.first} on"
                )


@engine_case("an engine goes on writing to the list that it has handed out as a table")
def a_table_stays_as_it_was_given(probe: Probe) -> None:
    """A table that was taken before a step still has the places of the tokens that it had, or a
    move by it is refused."""
    probe.write(0, 5)
    table = probe.table(0)
    before = table.rows, [*(table.slots or ())]
    probe.write(0, 1)
    if (table.rows, [*(table.slots or ())]) != before:
        raise Wrong(f"the table became {table}, expected {before}")


@engine_case("a table that was taken before the step that crossed a block's end")
def a_short_table_is_refused(probe: Probe) -> None:
    """A table with a block less than its tokens need is refused, at either end."""
    probe.filled()
    table = _of_blocks(probe)
    size = probe.view().layers[0].block_size
    needed = -(-(table.first + table.length) // size)
    short = table.with_rows([row[: needed - 1] for row in table.rows])
    _require_refused(probe, "a table that is one block short", short)


@engine_case("docs/describe.md, What is refused: a table with a block that is not there")
def hostile_ids_are_refused(probe: Probe) -> None:
    """A table with an id that the cache does not have, or below 0, is refused, at either end."""
    probe.filled()
    table = probe.table(0)
    blocks = probe.view().layers[0].num_blocks
    size = probe.view().layers[0].block_size
    for bad in (blocks * sub_blocks(probe.view()), 2**31 - 1, -1, -(2**31)):
        for i in {0, _last(probe, table)}:
            if table.slots is not None:
                if bad >= 0:  # a slot below 0 is a token without place: docs/spec.md, 5.2
                    hostile = replace(table, slots=_with(table.slots, i, bad * size))
                    _require_refused(probe, f"slot {bad * size} for token {i}", hostile)
                continue
            rows = table.rows or [[0]]
            for number, row in enumerate(rows):
                changed = [*rows[:number], _with(row, i, bad), *rows[number + 1 :]]
                name = f"block id {bad} in row {number}, column {i}"
                _require_refused(probe, name, table.with_rows(changed))


@engine_case("docs/describe.md: a place that two tokens of a call would overwrite")
def duplicates_are_refused_to_write(probe: Probe) -> None:
    """A table that names a block or slot twice is refused where tokens would be written."""
    probe.filled()
    if probe.view().layers[0].k.memory is Memory.DEVICE:
        raise NotApplicable("docs/spec.md 5.1: a device does not compare a table's entries")
    table = probe.table(0)
    first = _first(probe, table)
    if table.slots is not None:
        twice = replace(table, slots=_with(table.slots, 1, table.slots[0]))
    elif _last(probe, table) > first:
        twice = table.with_rows([_with(row, first + 1, row[first]) for row in table.rows])
    else:
        raise NotApplicable("a sequence lies in one block")
    plain = probe.plain([0])
    migrate(probe.span([0]), plain.span, probe.held([0]))
    there = _at(probe, twice)
    what = f"a destination with {twice}"
    probe.require_refused(what, lambda: migrate(plain.span, there, [table.length]))


@engine_case("docs/describe.md: null_block_id; vLLM's is 0, in the rows of all sequences")
def the_null_block_is_refused(probe: Probe) -> None:
    """A table that has the null block where a token of the call stands is refused."""
    probe.filled()
    table = _of_blocks(probe)
    null = probe.view().null_block_id if table.offsets is None else -1
    if null < 0 and table.offsets is None:
        raise NotApplicable("the cache has no null block")
    for i in {_first(probe, table), _last(probe, table)}:
        with_null = table.with_rows([_with(row, i, null) for row in table.rows])
        _require_refused(probe, f"the null block in column {i}", with_null)


@engine_case("rows of a table are padded with what was there before")
def padding_is_not_read(probe: Probe) -> None:
    """Ids behind the blocks that a sequence needs are not read: any may stand there."""
    probe.filled()
    table = _of_blocks(probe)
    padded = table.with_rows([[*row, 2**31 - 1, -7] for row in table.rows])
    plain = probe.plain([0])
    migrate(_at(probe, padded), plain.span, [table.length])
    for i in range(table.length):
        require_same(f"token {i}", plain.token(0, i), probe.read(0, table.first + i), 1e-6)


@engine_case("kvx_adapters/vllm/live.py: a request is finished, and its blocks are free")
def an_ended_sequence_has_no_table(probe: Probe) -> None:
    """After a sequence has ended its table has no token, and a span that was made before is refused
    or still gives its tokens."""
    end = probe.part("free")
    probe.filled()
    last = probe.sequences[-1]
    span, held, plain = probe.span([last]), probe.held([last]), probe.plain([last])
    before = [probe.read(last, probe.table(last).first + i) for i in range(held[0])]
    end(last)
    if probe.table(last).length:
        raise Wrong(f"sequence {last} has ended, and its table is {probe.table(last)}")
    del probe.ids[last]
    for sequence in probe.ids:
        probe.write(sequence, 3)
    try:
        migrate(span, plain.span, held)
    except REFUSALS:
        return
    for i, token in enumerate(before):
        require_same(f"token {i} of a sequence that has ended", plain.token(0, i), token, 1e-6)


@engine_case("a pool that has served others has their bytes in it; a new one hides it")
def a_used_cache_is_as_good_as_new(probe: Probe) -> None:
    """Tokens of a sequence that takes the blocks of one that has ended stand right."""
    end = probe.part("free")
    probe.filled()
    end(0)
    probe.ids.pop(0)
    probe.given.pop(0, None)
    probe.write(0, min(11, probe.room))
    probe.require_as_described()
    if probe.held([0]) != [min(11, probe.room)]:
        raise Lost(f"the new sequence has {probe.table(0)}")


def _of_blocks(probe: Probe) -> Table:
    table = probe.table(0)
    if not table.rows:
        raise NotApplicable("the engine has no block tables")
    return table


def _first(probe: Probe, table: Table) -> int:
    """The column of the first token held."""
    return table.first // probe.view().layers[0].block_size if table.rows else 0


def _last(probe: Probe, table: Table) -> int:
    """The column, or index among slots, of the last token held."""
    if table.slots is not None:
        return table.length - 1
    if not table.rows:
        return 0
    return (table.first + table.length - 1) // probe.view().layers[0].block_size


def _with(ids: Sequence[int], i: int, one: int) -> list[int]:
    found = [int(each) for each in ids]
    found[i] = one
    return found


def _at(probe: Probe, table: Table) -> CacheSpan:
    """A span of sequence 0 by another table, with the checks of the engine's own view."""
    view: Any = probe.span([0]).view
    return span_at(view, [table], [0])


def _require_refused(probe: Probe, what: str, table: Table) -> None:
    """A move from and to the engine by such a table."""
    plain = probe.plain([0])
    back = np.array([table.length])
    probe.require_refused(
        f"a source with {what}", lambda: migrate(_at(probe, table), plain.span, back)
    )
    probe.require_refused(
        f"a destination with {what}", lambda: migrate(plain.span, _at(probe, table), back)
    )
