"""A running conversation moves from one engine to another: most of it while it runs.

Keys and values of a token never change once they are written, so blocks that are full are copied
while the first engine goes on; what is left is copied in a pause that does not grow with the
conversation. Spec: E.3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from time import perf_counter
from typing import Unpack

from kvx_core.argument_checks import flag, integer
from kvx_core.desc import facts
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import InvalidArgumentError, KvxError, UnsupportedError
from kvx_core.ops.holds import require_holds
from kvx_core.ops.migrate import migrate
from kvx_core.ops.options import MoveKeywords, MoveOptions
from kvx_core.ops.reorder import describe_destination
from kvx_core.types import BlockTableFormat

_UNPAGED = 16  # tokens that are copied together if neither end has blocks

# By layer, half (1: V) and pool: numbers of blocks or, without blocks, of tokens in the pool.
_Places = dict[tuple[int, int, int], set[int]]
_OF_TOKENS = (None, BlockTableFormat.RAGGED)  # no table: slots
_WITH_V = (BlockTableFormat.KV_OFFSETS, BlockTableFormat.POINTERS)  # have separate entries for V


@dataclass(frozen=True, slots=True)
class Copied:
    """Tokens that calls have copied; a token that is copied again after `rewind` counts again."""

    num_tokens: int = 0
    num_bytes: int = 0  # as the destination stores them
    num_calls: int = 0  # that copied something
    seconds: float = 0.0  # of these calls; on a device, until the copies are queued

    def __add__(self, other: Copied) -> Copied:
        return Copied(
            self.num_tokens + other.num_tokens,
            self.num_bytes + other.num_bytes,
            self.num_calls + other.num_calls,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What a finished LiveMigration has done."""

    num_tokens: int  # that the destination holds now
    running: Copied  # while the source went on
    paused: Copied  # by `finish`: its seconds are KVX's share of the pause


class LiveMigration:
    """Moves one sequence into `dst` while its engine goes on: `copy` now and then, then `finish`.

    dst:          room for the sequence at the end of the move, one sequence: CacheView.at(...), or
                  a dense CacheView of one block. Its engine must not compute this sequence before
                  `finish`, and must not move this memory
    block_tokens: copies begin and end at multiples of it; a multiple of the block size of each end
                  that has a block table. None: their least common multiple, 16 if neither has one
    same_model, options: as for `migrate`
    Not for several threads at a time; one thread may copy while another computes, if the source's
    memory stays where it is (a paged cache, not a DynamicCache).
    Raises InvalidArgumentError, UnsupportedError: for several sequences, sliding windows, rings,
    and planes, whose parts of a sequence change while it runs.
    Spec: E.3
    """

    __slots__ = (
        "_block_tokens",
        "_copied",
        "_dst",
        "_finished",
        "_is_described",
        "_options",
        "_running",
        "_same_model",
        "_unit",
        "_written",
    )

    def __init__(
        self,
        dst: CacheView | CacheSpan,
        *,
        block_tokens: int | None = None,
        same_model: bool = False,
        **options: Unpack[MoveKeywords],
    ) -> None:
        self._dst = _one_sequence("dst", dst)
        self._block_tokens = (
            None if block_tokens is None else integer("block_tokens", block_tokens, 1)
        )
        self._same_model = flag("same_model", same_model)
        MoveOptions.of(options)
        self._options = options
        self._unit = self._unit_of([("dst", self._dst)])
        self._copied = 0
        self._written = _WrittenPlaces(self._dst)
        self._running = Copied()
        self._finished = False
        self._is_described = False

    def __repr__(self) -> str:
        state = "finished" if self._finished else "running"
        return f"LiveMigration({self._copied} tokens copied, {state})"

    @property
    def copied(self) -> int:
        """The tokens that `dst` holds: the first ones of the sequence."""
        return self._copied

    @property
    def running(self) -> Copied:
        """What `copy` has copied so far."""
        return self._running

    def copy(
        self, src: CacheView | CacheSpan, written: int, *, most_tokens: int | None = None
    ) -> Copied:
        """Copies the blocks of the source that are full and not copied yet, in one call.

        src:         the sequence as it is now, one sequence. It may be another object each time, as
                     tables grow and a DynamicCache moves
        written:     tokens whose keys and values are in the cache for good: without drafts that may
                     be rejected
        most_tokens: at most so many of them, down to whole blocks; at least one block
        Mutates these tokens of the destination. Returns what this call has copied.
        Raises FactsMismatchError, InvalidArgumentError, UnsupportedError, OutOfRangeError; then
        nothing was written, and the source can go on.
        """
        source, written = self._checked(src, written)
        last = written // self._unit * self._unit
        if most_tokens is not None:
            most = integer("most_tokens", most_tokens, 1)
            last = min(last, self._copied + max(most // self._unit, 1) * self._unit)
        done = self._move(source, last, written)
        self._running += done
        return done

    def rewind(self, written: int) -> None:
        """Says that the source holds `written` tokens only, and computes the others anew.

        Blocks with a token behind them are copied again: 0 after the source was preempted.
        Raises InvalidArgumentError.
        """
        self._require_running()
        kept = integer("written", written)
        self._copied = min(self._copied, kept // self._unit * self._unit)
        self._written.rewind(self._copied)

    def finish(self, src: CacheView | CacheSpan, written: int) -> LiveReport:
        """Copies the rest, while the source pauses: less than a block, if `copy` was called before.

        src, written: as for `copy`; the source computes this sequence no more
        Mutates these tokens of the destination, which then holds `written` tokens.
        Raises as `copy` does; then nothing was written, and the source can go on.
        """
        begin = perf_counter()
        source, written = self._checked(src, written)
        done = self._move(source, written, written)
        self._finished = True
        paused = replace(done, seconds=perf_counter() - begin)
        return LiveReport(num_tokens=written, running=self._running, paused=paused)

    def _checked(self, src: CacheView | CacheSpan, written: int) -> tuple[CacheSpan, int]:
        """The source and its tokens, if this state can move. Sets the unit of copies."""
        self._require_running()
        source = _one_sequence("src", src)
        written = integer("written", written)
        if written < self._copied:
            raise InvalidArgumentError(
                f"written is {written}, expected at least {self._copied}, the tokens that were "
                f"copied. If the source has dropped tokens, call rewind({written}) first"
            )
        unit = self._unit_of([("dst", self._dst), ("src", source)])
        if self._copied % unit:
            raise InvalidArgumentError(
                f"src has blocks that make copies of {unit} tokens, expected blocks as in the "
                f"calls before, which have copied {self._copied} tokens. Call rewind(0) first"
            )
        for name, end in (("src", source), ("dst", self._dst)):
            if end.slots is not None and end.slots.token_count < written:
                raise InvalidArgumentError(
                    f"{name}.slots has {end.slots.token_count} tokens, expected at least "
                    f"{written}, as written says. " + _ROOM[name]
                )
            # Of a part, slots do not say how many tokens are before it.
            if end.slots is not None:
                require_holds(name, replace(end, slots=end.slots.part(0, written)), [written])
        if source.slots is None:
            require_holds("src", source, [written])
        self._unit = unit
        return source, written

    def _require_running(self) -> None:
        if self._finished:
            raise InvalidArgumentError(
                f"the migration is finished with {self._copied} tokens, expected one that runs. "
                "Make a LiveMigration for each move"
            )

    def _unit_of(self, ends: list[tuple[str, CacheSpan]]) -> int:
        """Tokens that are copied together."""
        sizes = {name: _block_size(end) for name, end in ends}
        if self._block_tokens is None:
            found = lcm(*filter(None, sizes.values()))
            return found if any(sizes.values()) else _UNPAGED
        for name, size in sizes.items():
            if size and self._block_tokens % size:
                raise InvalidArgumentError(
                    f"block_tokens is {self._block_tokens}, expected a multiple of {size}, the "
                    f"block size of {name}. Leave it out to take the best"
                )
        return self._block_tokens

    def _move(self, source: CacheSpan, last: int, written: int) -> Copied:
        """Copies the tokens from those that were copied to `last`, of `written`."""
        if not self._is_described:
            self._describe(source)
        first, count = self._copied, max(0, last - self._copied)
        begin = perf_counter()
        places = self._written.take(source, first, count, written)
        num_bytes = migrate(
            _part(source, first, count),
            _part(self._dst, first, count),
            [count],
            same_model=self._same_model,
            **self._options,
        )
        if not count:  # the ends were compared
            return Copied()
        self._written.add(places)
        self._copied = last
        return Copied(count, num_bytes, 1, perf_counter() - begin)

    def _describe(self, source: CacheSpan) -> None:
        """Describes the destination in the source's order of K's dims, once: the source is another
        object in each call.
        """
        view = self._dst.view
        found = facts.compare(source.view.facts, view.facts, same_model=self._same_model)
        for transform in found.transforms:
            describe_destination(
                view, transform, find_scales=self._options.get("find_scales", False)
            )
        self._is_described = not found.reasons


_ROOM = {
    "src": "Describe the source after each of its steps",
    "dst": "Reserve room for the sequence as it is at the end of the move",
}


def _one_sequence(name: str, end: CacheView | CacheSpan) -> CacheSpan:
    """An end that holds one sequence, each token at its own place for good.

    name: what errors call it
    Raises InvalidArgumentError, UnsupportedError.
    """
    span = CacheSpan.of(end, name=name)
    view, table = span.view, span.block_table
    way_out = "Pause the source and call migrate"
    if view.planes or not view.layers:
        raise UnsupportedError(
            f"{name} has {len(view.planes)} planes beside {len(view.layers)} layers, expected "
            f"layers alone: states and compressed entries change while a sequence runs. {way_out}"
        )
    if view.facts.window:
        raise UnsupportedError(
            f"{name}.facts.window is {view.facts.window}, expected 0: tokens leave the window "
            f"while a sequence runs. {way_out}"
        )
    if table is not None and table.format is BlockTableFormat.RING:
        raise UnsupportedError(
            f"{name}.block_table.format is RING, expected a table of all tokens: a ring is "
            f"written over while a sequence runs. {way_out}"
        )
    dense = table is None and span.slots is None
    rows = view.layers[0].num_blocks if dense else 1 if table is None else table.num_rows
    starts = 1 if span.starts is None else span.starts.seq_count
    if (rows, starts) != (1, 1):
        raise InvalidArgumentError(
            f"{name} has {rows} sequences and {starts} starts, expected 1. Make a LiveMigration "
            "for each sequence: view.at(block_table=[[...]]), whose blocks in a dense cache are "
            "its rows"
        )
    return span


def _block_size(span: CacheSpan) -> int:
    """Tokens of a block; 0 for an end whose tokens lie in one row or at slots."""
    if span.view.dense or span.block_table is None:
        return 0
    return lcm(*(layer.block_size for layer in span.view.layers))


def _part(span: CacheSpan, first: int, count: int) -> CacheSpan:
    """The span from token `first` on, for a call that moves `count` tokens."""
    if span.slots is not None:
        positions = span.first_positions and tuple(at + first for at in span.first_positions)
        slots = span.slots.part(first, first + count)
        return replace(span, slots=slots, first_positions=positions)
    begin = 0 if span.starts is None else int(span.starts.to_numpy()[0])
    table = None if span.block_table is None else span.block_table.of_parts()
    return replace(span, block_table=table, starts=SeqLens.of([begin + first], name="starts"))


class _WrittenPlaces:
    """Places of the first tokens of a sequence in `dst`, so that no later call overwrites them.

    migrate checks the tokens of one call against each other; a live migration has several calls.
    """

    __slots__ = ("_dst", "_places")

    def __init__(self, dst: CacheSpan) -> None:
        self._dst = dst
        self._places: _Places = {}

    def take(self, source: CacheSpan, first: int, count: int, written: int) -> _Places:
        """The places of tokens from `first` on, after a check that they are no others'.

        written: tokens of the source
        Raises InvalidArgumentError for a place that an earlier token has, or one of the source.
        """
        new = _places(self._dst, first, count)
        twice = _block_in_both(self._dst, new, self._places)
        if twice is not None:
            raise InvalidArgumentError(
                f"dst has tokens {first} to {first + count - 1} where tokens before them are, as "
                f"its table or slots say: block {twice}, expected a place of its own for each "
                "token. Reserve other blocks, and begin anew"
            )
        if _is_same_pool(source, self._dst):
            held = _places(source, 0, written)
            both = _block_in_both(source, held, self._places)
            if both is None:
                both = _block_in_both(source, held, new)
            if both is not None:
                raise InvalidArgumentError(
                    f"block {both} is one of src's tokens 0 to {written - 1} and a "
                    "destination in the same pool, expected disjoint blocks: the source goes on. "
                    "Reserve other blocks, and begin anew"
                )
        return new

    def add(self, places: _Places) -> None:
        """Keeps what `take` returned, for tokens that have been written."""
        for part, numbers in places.items():
            self._places.setdefault(part, set()).update(numbers)

    def rewind(self, kept: int) -> None:
        """Forgets all but the first `kept` tokens."""
        self._places = _places(self._dst, 0, kept)


def _is_same_pool(src: CacheSpan, dst: CacheSpan) -> bool:
    here, there = src.view.layers[0].k, dst.view.layers[0].k
    return (here.memory, here.data) == (there.memory, there.data)


def _block_in_both(span: CacheSpan, one: _Places, other: _Places) -> int | None:
    """The first block, of the first layer that has one, of which both have tokens; None: no block.

    span: whose places they are
    """
    for part in sorted(one.keys() & other.keys()):
        both = one[part] & other[part]
        if both:
            return min(both) // _tokens_per_number(span, part[0])
    return None


def _tokens_per_number(span: CacheSpan, layer: int) -> int:
    format = None if span.block_table is None else span.block_table.format
    return span.view.layers[layer].block_size if format in _OF_TOKENS else 1


def _places(span: CacheSpan, first: int, count: int) -> _Places:
    """The place of each block that begins in these tokens, or with the first token of all; of each
    token where a block does not hold tokens in a row.

    Nothing of a dense cache, whose tokens lie in one row, nor where the call itself is refused.
    """
    table = span.block_table
    if count <= 0 or (table is None and span.slots is None):
        return {}
    format = None if table is None else table.format
    has_planes = table is not None and table.has_planes
    lens, part = SeqLens.of([count]), _part(span, first, count)
    found: _Places = {}
    for i, layer in enumerate(span.view.layers if has_planes else span.view.layers[:1]):
        for v in (0, 1) if layer.v is not None and format in _WITH_V else (0,):
            try:
                places = find_tokens(part, lens, v=bool(v), layer=i)
            except KvxError:  # the call itself says what is wrong, of the right end
                return {}
            kept = places["block"] >= 0
            if format not in _OF_TOKENS:
                begins = places["offset"] == 0
                begins[0] |= first == 0
                kept &= begins
            for pool in (0, 1):
                here = places[kept & (places["pool"] == pool)]
                numbers = here["block"]
                if format in _OF_TOKENS:
                    numbers = numbers * layer.block_size + here["offset"]
                if len(here):
                    found[i, v, pool] = set(numbers.tolist())
    return found
