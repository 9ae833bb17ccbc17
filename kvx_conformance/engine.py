"""Engine: the five functions that an engine gives the suite, and the parts that it may have.

    python -m kvx_conformance engine mymodule:MyEngine

A subject is a class whose constructor takes no argument, or a module with a list ENGINES of such
classes: caches of one engine that differ, such as one of float32 and one of FP8. Each case makes
new ones, for three seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvx_core import CacheDesc, CacheFacts, CacheView

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Table:
    """Where the tokens of a sequence stand now, by the engine's own bookkeeping.

    length: tokens whose keys and values the cache holds
    blocks: ids of the sequence's blocks: position p is in blocks[p // block_size], at offset
            p % block_size. Blocks that a window has left may be null
    offsets: in place of `blocks`, K's and V's entries of a table as TensorRT-LLM has it: the
            sub-block of each block; -1 is null. docs/spec.md, E.8
    slots:  (length,): block * block_size + offset of each token held
    first:  position of the first token held: above 0 where a window has dropped tokens
    Neither blocks, offsets nor slots: sequence s is block s, and position p is at offset p - first.
    """

    length: int
    blocks: Sequence[int] | None = None
    slots: Sequence[int] | None = None
    first: int = 0
    offsets: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def rows(self) -> list[list[int]]:
        """The entries of its blocks: one row, K's and V's, or none."""
        rows = [self.blocks] if self.offsets is None else [*self.offsets]
        return [[int(one) for one in row] for row in rows if row is not None]

    def with_rows(self, rows: Sequence[Sequence[int]]) -> Table:
        """The table with other entries of blocks; rows: as many as it has."""
        if self.offsets is None:
            return replace(self, blocks=rows[0])
        return replace(self, offsets=(rows[0], rows[1]))


@dataclass(frozen=True)
class State:
    """What an engine exports of a sequence that goes on elsewhere.

    position: tokens that it stands for
    data:     its arrays, each a copy
    """

    position: int
    data: Sequence[npt.NDArray[Any]]


class Engine(Protocol):
    """An engine's cache, empty when it is made. Sequences are 0 to `num_sequences` - 1.

    All layers have the same heads and head_dim, and hold the same tokens: give layers that differ
    as another engine of ENGINES.

    Optional attributes, each with its default; a case for a part that is not there is without
    object:

    computes: bool = False           `write` runs the model on token ids: it computes K and V
    num_sequences: int = 3           sequences that the cache holds at once
    max_tokens: int = 40             of each sequence
    span(sequences) -> CacheSpan     as the engine's adapter makes it; else by describe and table
    reserve(sequence, count)         makes an empty sequence hold `count` tokens of zeros
    keep(sequence, count)            drops all tokens of a sequence but its first `count`
    free(sequence)                   ends a sequence: `table` then says length 0, or raises
    operation()                      a context manager: inside it, an operation is under way that
                                     changes the cache, and has not ended
    positions(sequence)              the position of each token held, by the engine's own count
    state(sequence) -> State         what the engine exports
    set_state(sequence, state)       makes an empty sequence one that goes on from there; raises
                                     ValueError for data that is cut
    memory() -> list of uint8 arrays every byte that the engine has allocated for its cache
    """

    def describe(self) -> CacheView | Sequence[CacheDesc]:
        """The cache as it is now, zero-copy: a CacheDesc for each layer or, where it has scales, a
        window or checks of its own, a CacheView, as KVX's adapters make.

        An engine that `computes` is asked after its first step.
        """

    def write(
        self, sequence: int, tokens: Sequence[int], keys: Floats | None, values: Floats | None
    ) -> None:
        """Appends tokens to a sequence by the engine's own code: a step of all of them.

        tokens: their ids, 0 to 99
        keys:   (num_layers, len(tokens), num_kv_heads, head_dim), float32: to store. None if the
                engine computes them
        values: the same with V's head_dim; None too where there is no V
        """

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats | None]:
        """K and V of a token by the engine's own code or indexing, without KVX.

        Returns two arrays (num_layers, num_kv_heads, head_dim), float32: the numbers that its
        attention would use, scales applied. None where there is no V.
        Raises LookupError for a token that the cache does not hold.
        """

    def table(self, sequence: int) -> Table:
        """Where the sequence stands now. Raises LookupError, or says length 0, if there is none."""

    def facts(self) -> CacheFacts:
        """What the bytes mean: model, rotation, heads, layers, window. All that is known."""
