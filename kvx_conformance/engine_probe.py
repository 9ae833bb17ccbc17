"""Probe: a new engine in the hands of a case, and the checks that cases share."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import product
from typing import Any

import numpy as np

from kvx_conformance import memory
from kvx_conformance.case import Case, Lost, NotApplicable, Wrong, case
from kvx_conformance.engine import Engine, Floats, Table
from kvx_conformance.plain import Plain
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    KvxError,
    Memory,
    device_status,
)

SEEDS = (1, 2, 3)
REFUSALS = KvxError, ValueError
SENTINEL = 0x5A  # as a float a number, so that an engine may read it


class Probe:
    """An engine that no case has used, and what has been written into it.

    ids: the tokens written to each sequence
    given: K and V that the engine was given, of each sequence: (num_layers, num_tokens,
        num_kv_heads, head_dim)
    """

    def __init__(self, make: Callable[[], Engine], seed: int) -> None:
        self._make, self.seed = make, seed
        self.rng = np.random.default_rng(seed)
        self.engine: Any = make()
        self.ids: dict[int, list[int]] = {}
        self.given: dict[int, list[tuple[Floats, Floats | None]]] = {}

    # ---- the engine's parts ----

    @property
    def computes(self) -> bool:
        return bool(getattr(self.engine, "computes", False))

    @property
    def sequences(self) -> range:
        return range(getattr(self.engine, "num_sequences", 3))

    @property
    def room(self) -> int:
        """Tokens of a sequence."""
        return int(getattr(self.engine, "max_tokens", 40))

    def part(self, name: str) -> Any:
        """An optional function. Raises NotApplicable."""
        if not self.has(name):
            raise NotApplicable(f"the engine has no {name}()")
        return getattr(self.engine, name)

    def has(self, name: str) -> bool:
        """Whether the engine has an optional function; an attribute of the name may be its own."""
        return callable(getattr(self.engine, name, None))

    def another(self) -> Probe:
        """A second engine of the kind, with the same numbers to come."""
        return Probe(self._make, self.seed)

    def facts(self) -> CacheFacts:
        found = self.engine.facts()
        if not isinstance(found, CacheFacts):
            raise Wrong(f"facts() is {type(found).__name__}, expected CacheFacts")
        return found

    def view(self) -> CacheView:
        """The cache as the engine describes it now. Keep it over no step."""
        found = self.engine.describe()
        if isinstance(found, CacheView):
            return found
        layers = tuple(found)
        for layer in layers:
            if not isinstance(layer, CacheDesc):
                raise Wrong(f"describe() has {type(layer).__name__}, expected CacheDesc")
        return CacheView(layers, self.facts(), dense=self._table_of_any() is None)

    def _table_of_any(self) -> Table | bool | None:
        """False: nothing is held yet, so that it is not known; None: the engine has no tables."""
        for sequence in self.ids or self.sequences:
            table = self.table(sequence)
            if table.length:
                return table if table.rows or table.slots is not None else None
        return False

    def table(self, sequence: int) -> Table:
        """The engine's table; one of length 0 if it has no such sequence."""
        try:
            found = self.engine.table(sequence)
        except LookupError:
            return Table(0)
        assert isinstance(found, Table)
        return found

    # ---- what a case does ----

    def write(self, sequence: int, count: int, *, ids: Sequence[int] | None = None) -> None:
        """Appends `count` tokens in one step."""
        tokens = [*ids] if ids else self.rng.integers(0, 100, count).tolist()
        keys = values = None
        if not self.computes:
            view = self.view()
            shapes = [(len(view.layers), count, view.layers[0].num_kv_heads)] * 2
            dims = view.layers[0].head_dim, view.layers[0].v_head_dim
            del view
            found = [self._numbers((*shape, dim)) for shape, dim in zip(shapes, dims, strict=True)]
            keys, values = found[0], found[1] if dims[1] else None
        self.engine.write(sequence, tokens, keys, values)
        self.ids.setdefault(sequence, []).extend(tokens)
        if keys is not None:
            self.given.setdefault(sequence, []).append((keys, values))

    def _numbers(self, shape: tuple[int, ...]) -> Floats:
        """Of 3 significant bits and either sign: E4M3, float16 and bfloat16 have all of them."""
        size = self.rng.integers(4, 8, shape) * 2.0 ** self.rng.integers(-5, 4, shape)
        sign = self.rng.integers(0, 2, shape) * 2 - 1
        return np.asarray(size * sign, np.float32)

    def lengths(self) -> list[int]:
        """Odd ones, of all sequences: they fill no block of 2 to 16 tokens."""
        return [min(n, self.room - 6) for n in (19, 7, 1, 23, 5)][: len(self.sequences)]

    def keep(self, sequence: int, count: int) -> None:
        """Has the engine drop all tokens of a sequence but the first `count`."""
        self.part("keep")(sequence, count)
        given: list[tuple[Floats, Floats | None]] = []
        left = count
        for keys, values in self.given.get(sequence, ()):
            given.append((keys[:, :left], None if values is None else values[:, :left]))
            left = max(left - keys.shape[1], 0)
        self.given[sequence] = given
        del self.ids[sequence][count:]

    def filled(self, lengths: Sequence[int] | None = None) -> Probe:
        """Writes to all sequences in turns: a step of several tokens, then single ones."""
        lengths = lengths or self.lengths()
        for sequence, length in enumerate(lengths):
            self.write(sequence, max(length - 2, 1))
        for _ in range(2):
            for sequence, length in enumerate(lengths):
                if len(self.ids[sequence]) < length:
                    self.write(sequence, 1)
        return self

    def span(self, sequences: Sequence[int] | None = None) -> CacheSpan:
        """Sequences, all that were written if none are given, where they stand now."""
        sequences = [*self.ids] if sequences is None else [*sequences]
        if self.has("span"):
            found: CacheSpan = self.engine.span(sequences)
            return found
        view, tables = self.view(), [self.table(sequence) for sequence in sequences]
        if view.holds is None and not isinstance(self.engine.describe(), CacheView):
            view = replace(view, holds=partial(self._holds, view, sequences))
        return span_at(view, tables, sequences)

    def _holds(self, view: CacheView, sequences: Sequence[int]) -> list[int]:
        """Tokens of each row of a table or, in a dense view, of each block."""
        if view.dense:
            return [self.table(block).length for block in range(view.layers[0].num_blocks)]
        tables = [self.table(sequence) for sequence in sequences]
        return [t.length + (0 if t.slots is not None else t.first) for t in tables]

    def held(self, sequences: Sequence[int] | None = None) -> list[int]:
        """How many tokens of sequences the cache holds, by the engine's tables."""
        return [self.table(sequence).length for sequence in self._chosen(sequences)]

    def firsts(self, sequences: Sequence[int] | None = None) -> list[int]:
        """The position of the first token that is held of each."""
        return [self.table(sequence).first for sequence in self._chosen(sequences)]

    def _chosen(self, sequences: Sequence[int] | None) -> list[int]:
        return [*self.ids] if sequences is None else [*sequences]

    def plain(self, sequences: Sequence[int] | None = None, more: int = 0) -> Plain:
        """A plain cache with room for what is held of sequences, and for `more` tokens of each."""
        held = [length + more for length in self.held(sequences)]
        return Plain(self.view(), self.facts(), held, self.firsts(sequences))

    # ---- what a case checks ----

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats | None]:
        """A token by the engine's own code."""
        key, value = self.engine.read(sequence, position)
        return np.asarray(key, np.float32), None if value is None else np.asarray(value, np.float32)

    def require_as_described(self, sequences: Sequence[int] | None = None) -> None:
        """Every token that is held, read by the description, is what the engine reads and, if it
        was given, what it was given."""
        view = self.view()
        for sequence in self._chosen(sequences):
            for position, block, offset in self.places(view, sequence):
                found = self.described(view, block, offset)
                name = f"sequence {sequence}, position {position}"
                require_same(f"{name}, by the description", found, self.read(sequence, position))
                given = self.written(sequence, position)
                if given is not None and not self.rounds(view):
                    require_same(f"{name}, by the engine", self.read(sequence, position), given)

    @staticmethod
    def rounds(view: CacheView) -> bool:
        """Whether the numbers that were given may be stored as others: scales choose them."""
        return view.k_scales is not None or view.layers[0].k.dtype.numbers > 1

    def rounding(self) -> float:
        """The largest error of a number that is stored anew, of the largest of its vector."""
        view = self.view()
        if not self.rounds(view):
            return 0
        return 1 / 50 if view.layers[0].k.dtype.format.affine else 1 / 7

    def described(self, view: CacheView, block: int, offset: int) -> tuple[Floats, Floats | None]:
        """K and V at a place, (num_layers, num_kv_heads, head_dim), by the description alone."""
        layers = range(len(view.layers))
        key = np.stack([memory.numbers(view, i, "K", block, offset) for i in layers])
        if view.layers[0].v is None:
            return key, None
        return key, np.stack([memory.numbers(view, i, "V", block, offset) for i in layers])

    def written(self, sequence: int, position: int) -> tuple[Floats, Floats | None] | None:
        """What the engine was given for a position; None if it computed it."""
        for keys, values in self.given.get(sequence, ()):
            if position < keys.shape[1]:
                return keys[:, position], None if values is None else values[:, position]
            position -= keys.shape[1]
        return None

    def places(self, view: CacheView, sequence: int) -> Iterator[tuple[int, int, int]]:
        """Position, block and offset of each token held, by the engine's table. Checks its ids."""
        table = self.table(sequence)
        size, count = view.layers[0].block_size, view.layers[0].num_blocks
        blocks = _blocks_of(view, table)
        for i in range(table.length):
            position = table.first + i
            if table.slots is not None:
                place = divmod(int(table.slots[i]), size)
            elif blocks is not None:
                if position // size >= len(blocks):
                    raise Lost(
                        f"sequence {sequence} has {table.first + table.length} tokens and "
                        f"{len(blocks)} blocks of {size}: no place for position {position}"
                    )
                place = blocks[position // size], position % size
            else:
                place = sequence, i
            if not (0 <= place[0] < count and place[1] < size) or place[0] == view.null_block_id:
                raise Wrong(
                    f"sequence {sequence}, position {position} is at block {place[0]}, offset "
                    f"{place[1]}, expected one of {count} blocks of {size} that holds tokens"
                )
            yield position, *place

    def bytes(self) -> list[memory.Bytes]:
        """A copy of all bytes that the cache describes, and of all that the engine allocated."""
        more = self.engine.memory() if self.has("memory") else []
        return [*memory.contents(self.view()), *(np.array(one, copy=True) for one in more)]

    def require_refused(self, what: str, call: Callable[[], object]) -> None:
        """Raises Wrong unless KVX refuses the call and every byte of the cache stays.

        On a device an index that the host has not read is refused by `device_status`, and the
        call's other tokens are copied.
        """
        before = self.bytes()
        try:
            call()
        except REFUSALS:
            after = self.bytes()
        else:
            if self.view().layers[0].k.memory is not Memory.DEVICE:
                raise Wrong(f"{what} is not refused")
            try:
                device_status()
            except REFUSALS:
                return
            raise Wrong(f"{what} is not refused, by device_status neither")
        for then, now in zip(before, after, strict=True):
            if not np.array_equal(then, now):
                raise Wrong(f"{what} is refused, and has written")


def _blocks_of(view: CacheView, table: Table) -> list[int] | None:
    """The blocks of a table. Raises Wrong for entries of K or V that name none. Spec: E.8"""
    if table.offsets is None:
        return table.rows[0] if table.rows else None
    layer, per_block = view.layers[0], sub_blocks(view)
    blocks = [entry // per_block for entry in table.rows[0]]
    for kv, row, tensor in zip("KV", table.rows, (layer.k, layer.v), strict=True):
        if tensor is None or layer.pool is None:
            continue
        first = (tensor.data - layer.k.data) // layer.pool.bytes_per_block
        expected = [-1 if block < 0 else block * per_block + first for block in blocks]
        if row != expected:
            raise Wrong(f"the table names {row} for {kv}, expected {expected}: sub-blocks of {kv}")
    return blocks


def sub_blocks(view: CacheView) -> int:
    """Sub-blocks of a block of the pool that table entries number; 1 without a pool. Spec: E.8"""
    layer = view.layers[0]
    if layer.pool is None:
        return 1
    return layer.k.stride[0] * layer.k.dtype.itemsize // layer.pool.bytes_per_block


def span_at(view: CacheView, tables: Sequence[Table], sequences: Sequence[int]) -> CacheSpan:
    """The span of tables: each from the first token that is held, which has its own position."""
    firsts = [table.first for table in tables]
    if tables[0].slots is not None:
        slots = [int(slot) for table in tables for slot in table.slots or ()]
        return view.at(slots=slots, first_positions=firsts)
    if not tables[0].rows:
        return view.at([[sequence] for sequence in sequences], first_positions=firsts)
    width = max(len(row) for table in tables for row in table.rows)
    padded = [[[*row, *[-1] * (width - len(row))] for row in table.rows] for table in tables]
    if tables[0].offsets is None:
        return view.at([row for (row,) in padded], starts=firsts)
    indices = np.array(padded, np.int32)[:, None]
    return view.at(block_table=BlockTable.kv_offsets(indices), starts=firsts)


def require_same(
    what: str,
    found: tuple[Floats, Floats | None],
    expected: tuple[Floats, Floats | None],
    rtol: float = 0,
) -> None:
    """Raises Wrong with the first of the numbers that differ."""
    for kv, here, there in zip("KV", found, expected, strict=True):
        if here is None or there is None:
            if here is not there:
                raise Wrong(f"{what}: V is at one end only")
            continue
        if here.shape != there.shape:
            raise Wrong(f"{what}: {kv} is {here.shape}, expected {there.shape}")
        differ = np.argwhere(~np.isclose(here, there, rtol=rtol, atol=0, equal_nan=True))
        if len(differ):
            layer, head, dim = differ[0]
            raise Wrong(
                f"{what}: {kv} of layer {layer}, head {head}, dim {dim} is "
                f"{here[layer, head, dim]:.9g}, expected {there[layer, head, dim]:.9g}"
            )


def engines_of(subject: Any) -> list[Callable[[], Engine]]:
    """The classes of a subject: ENGINES of a module, its class Engine, or that of an object."""
    found = getattr(subject, "ENGINES", None) or [getattr(subject, "Engine", None) or type(subject)]
    return [*found]


def engine_case(source: str, *, seconds: float = 120) -> Callable[[Callable[[Probe], None]], Case]:
    """A case that runs for each of a subject's engines and three seeds.

    It is without object if it is so for all of them.
    """

    def make(check: Callable[[Probe], None]) -> Case:
        @wraps(check)
        def run(subject: Any) -> None:
            missing: list[str] = []
            ran = False
            for engine, seed in product(engines_of(subject), SEEDS):
                name = getattr(engine, "__name__", str(engine))
                try:
                    check(Probe(engine, seed))
                    ran = True
                except NotApplicable as why:
                    missing.append(str(why))
                except (Wrong, Lost) as finding:
                    raise type(finding)(f"{name}, seed {seed}: {finding}") from finding
                except Exception as error:
                    at = traceback.extract_tb(error.__traceback__)[-1]
                    raise RuntimeError(
                        f"{name}, seed {seed}: {type(error).__name__}: {error} "
                        f"({at.filename}:{at.lineno})"
                    ) from error
            if not ran:
                raise NotApplicable(missing[0])

        return case(source, seconds=seconds)(run)

    return make
