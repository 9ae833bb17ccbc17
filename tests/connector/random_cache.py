"""What a random engine has: a store that says what is in it, requests, and a cache of cells.

A cell says what it was computed for: the weights, an image, and all tokens up to its own. So it
shows at once if a connector saves a cell under the name of another, or loads a wrong one. A cell is
None if nobody has written it, or if it was computed from wrong ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvx_core import BlockTable, PrefixStore, Section
from kvx_core.connector.plan import Scope
from tests.connector import toy_engine
from tests.connector.toy_connector import view_of
from tests.stores_memory import InMemory

BLOCK, CHUNK = 4, 8
_draw = random.Random(0)
CONVERSATIONS = [[_draw.randrange(9) for _ in range(80)] for _ in range(2)]
Cell = tuple[int, "str | None", tuple[int, ...]] | None


class Stored:
    """Files of a store, and beside them what they are of."""

    def __init__(self, store: PrefixStore, blobs: InMemory) -> None:
        self.store, self.blobs = store, blobs
        view = view_of(toy_engine.Engine(num_blocks=40))
        table = BlockTable.packed([list(range(1, 40))])
        self.sections = [Section(tuple(range(toy_engine.LAYERS)), view, table)]
        self.entries: dict[str, tuple[Scope, tuple[int, ...], int]] = {}  # and where they begin

    def save(self, store: PrefixStore, scope: Scope, ids: list[int], start: int) -> None:
        """The last chunk of `ids`, which begins at `start`."""
        chunk = store.capture(ids, start, len(ids), self.sections)
        assert chunk is not None
        store.commit(chunk)
        self.entries[store.name_of(chunk)] = scope, tuple(ids), start

    def lose(self, name: str) -> None:
        self.blobs.delete(name)
        self.entries.pop(name, None)

    def longest(self, scope: Scope, ids: list[int]) -> int:
        """How many of the first tokens are stored."""
        for start in range(0, len(ids), CHUNK):
            own = ids[start : start + CHUNK]
            count = max(
                (
                    _common(own, held[start:])
                    for of, held, at in self.entries.values()
                    if (of, at) == (scope, start) and list(held[:start]) == ids[:start]
                ),
                default=0,
            )
            if count < CHUNK:
                return start + count
        return len(ids)

    def has(self, scope: Scope, ids: list[int], start: int) -> bool:
        """Whether the last chunk of `ids`, which begins at `start`, is stored."""
        return any(
            (of, at) == (scope, start) and list(held[: len(ids)]) == ids
            for of, held, at in self.entries.values()
        )


def _common(own: list[int], other: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(own, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    answer: list[int]  # what the engine is going to generate
    salt: str | None = ""  # None: it has an image
    image: str | None = None
    image_at: int = 0  # the first token that sees it
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    told: int | None = None  # how many of them the connector knows; None: it gets all again
    late: list[int] = field(default_factory=list)  # accepted, which the scheduler learns later
    # What the connector ought to do with it:
    scope: Scope | None = None  # when it got its first blocks
    got: Scope | None = None  # when it got those that it has
    is_owed: bool = False  # all of it has to be saved
    stored: int = 0  # tokens that it has loaded, found or saved
    found: int = 0  # that it may have found
    hold: int = 0  # nothing is saved before it has more tokens
    load: tuple[int, int] = (0, 0)
    must_fail: bool = False  # this load
    is_old: bool = False  # it may have had blocks of older weights
    was_given_up: bool = False  # since it has these blocks
    has_loaded: bool = False
    may_load: bool = True  # False: a load of it may have failed
    truths: set[int] = field(default_factory=set)  # what the store has had since it was looked up
    asked: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def ids(self) -> list[int]:
        return self.all_token_ids + self.late

    @property
    def is_over(self) -> bool:
        return len(self.ids) - self.num_prompt_tokens >= len(self.answer)


@dataclass(eq=False)
class Cache:
    """What the cells of blocks were computed for, and which blocks later requests may use."""

    weights: int = 0
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    kept: dict[Any, int] = field(default_factory=dict)  # blocks by their tokens
    num_blocks: int = 0

    def block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks

    def get(self, request: Request, position: int) -> Cell:
        return self.cells.get(self._at(request, position))

    def put(self, request: Request, position: int, cell: Cell) -> None:
        self.cells[self._at(request, position)] = cell

    def right(self, request: Request, position: int) -> Cell:
        """What a cell is to be."""
        image = request.image if position >= request.image_at else None
        return self.weights, image, tuple(request.ids[: position + 1])

    def free(self, blocks: Iterable[int]) -> None:
        """Others may write to blocks now, but for those that are kept."""
        for block in set(blocks) - set(self.kept.values()):
            for offset in range(BLOCK):
                self.cells.pop((block, offset), None)

    def found(self, request: Request) -> list[int]:
        """The blocks that a request's first tokens have already, but for its last token."""
        held = list[int]()
        while (len(held) + 1) * BLOCK < len(request.all_token_ids):
            key = _key(request, len(held) + 1)
            if key not in self.kept:
                break
            held.append(self.kept[key])
        return held

    def keep(self, request: Request, stop: int) -> None:
        """Lets later requests use its full blocks."""
        for count in range(1, stop // BLOCK + 1):
            self.kept.setdefault(_key(request, count), request.block_ids[count - 1])

    def drop_wrong(self) -> None:
        for key, block in tuple(self.kept.items()):
            if any(self.cells.get((block, offset)) is None for offset in range(BLOCK)):
                del self.kept[key]

    def _at(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // BLOCK], position % BLOCK


def _key(request: Request, count: int) -> Any:
    stop = count * BLOCK
    image = request.image if stop > request.image_at else None
    return request.salt or "", image, tuple(request.ids[:stop])
