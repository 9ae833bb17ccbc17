"""Engines with one thing wrong each: bytes, tables, lengths, growth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvx_conformance.engine import Table
from kvx_core import CacheDesc, describe
from tests.conformance.doubles import (
    DIM,
    HEADS,
    Growing,
    Paged,
    Pooled,
    fault,
)

# ---- bytes ----


@fault("descriptors.tokens_stand_where_described")
@fault("moves.tokens_arrive")
class KAndVSwapped(Paged):
    def layer(self, i: int) -> CacheDesc:
        return CacheDesc.from_kv(describe(self.v[i], "BLOCK_HND"), describe(self.k[i], "BLOCK_HND"))


@fault("descriptors.tokens_stand_where_described")
class HeadAndDimTransposed(Paged):
    def layer(self, i: int) -> CacheDesc:
        shape = (self.num_blocks, DIM, self.block_size, HEADS)
        k, v = (one[i].reshape(shape).transpose(0, 3, 2, 1) for one in (self.k, self.v))
        return CacheDesc.from_kv(describe(k, "BLOCK_HND"), describe(v, "BLOCK_HND"))


@fault("descriptors.tokens_stand_where_described")
class HeadAndTokenTransposed(Paged):
    def layer(self, i: int) -> CacheDesc:
        shape = (self.num_blocks, self.block_size, HEADS, DIM)
        k, v = (one[i].reshape(shape) for one in (self.k, self.v))
        return CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))


@fault("descriptors.tokens_stand_where_described")
class BlockOffByOne(Paged):
    def table(self, sequence: int) -> Table:
        found = super().table(sequence)
        blocks = [block % (self.num_blocks - 1) + 1 for block in found.blocks or ()]
        return replace(found, blocks=blocks)


@fault("descriptors.tokens_stand_where_described")
class EntriesOfKForV(Pooled):
    def table(self, sequence: int) -> Table:
        found = super().table(sequence)
        return replace(found, offsets=(found.rows[0], found.rows[0]))


@fault("descriptors.tokens_stand_where_described")
class EntriesOfLayerOne(Pooled):
    """Base pointers choose the layer: entries are those of layer 0."""

    def table(self, sequence: int) -> Table:
        found = super().table(sequence)
        k, v = ([entry + 2 for entry in row] for row in found.rows)
        return replace(found, offsets=(k, v))


@fault("descriptors.tokens_stand_where_described")
class LayersExchanged(Paged):
    def layer(self, i: int) -> CacheDesc:
        return super().layer(1 - i)


@fault("descriptors.tokens_stand_where_described")
class ReadsWhatItWasNotGiven(Paged):
    def store(self, block: int, offset: int, key: Any, value: Any) -> None:
        super().store(block, offset, key[:, ::-1], value)


@fault("descriptors.odd_lengths")
class BlockBehindItsEnd(Paged):
    """The first token of a block goes into the block before, over its first."""

    def store(self, block: int, offset: int, key: Any, value: Any) -> None:
        blocks = next(b for b in self.blocks.values() if block in b)
        at = blocks.index(block)
        super().store(blocks[at - 1] if offset == 0 and at else block, offset, key, value)


@fault("descriptors.each_step")
class SingleTokensElsewhere(Paged):
    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        super().write(sequence, tokens, keys, values)
        if len(tokens) == 1:
            self.lengths[sequence] -= 1


@fault("descriptors.descriptors_are_valid")
class FewerBlocksOfV(Paged):
    def layer(self, i: int) -> CacheDesc:
        return CacheDesc.from_kv(
            describe(self.k[i], "BLOCK_HND"), describe(self.v[i][:-1], "BLOCK_HND")
        )


@fault("descriptors.no_two_share_memory")
class LayersShare(Paged):
    def layer(self, i: int) -> CacheDesc:
        return super().layer(0)


@fault("descriptors.described_bytes_are_the_engines")
class MoreBlocksThanThereAre(Paged):
    def layer(self, i: int) -> CacheDesc:
        shape = (self.num_blocks + 9, *self.k[i].shape[1:])
        k, v = (as_strided(one[i], shape, one[i].strides) for one in (self.k, self.v))
        return CacheDesc.from_kv(describe(k, "BLOCK_HND"), describe(v, "BLOCK_HND"))

    def memory(self) -> list[Any]:
        return [half.view(np.uint8) for halves in (self.k, self.v) for half in halves]


@fault("descriptors.a_step_writes_its_tokens_only")
class WritesItsNeighbour(Paged):
    """The next token too, as a kernel of full vectors may."""

    def store(self, block: int, offset: int, key: Any, value: Any) -> None:
        super().store(block, offset, key, value)
        if offset + 1 < self.block_size:
            super().store(block, offset + 1, key, value)


@fault("descriptors.a_step_writes_its_tokens_only")
class WritesItsPast(Paged):
    def store(self, block: int, offset: int, key: Any, value: Any) -> None:
        super().store(block, offset, key, value)
        if offset:
            self.v[1][block, 0, offset - 1] *= 2


@fault("descriptors.room_is_not_read")
class SpanOfAnotherTable(Paged):
    def span(self, sequences: Any) -> Any:
        span = super().span(sequences)
        rows = np.array(span.block_table.owner).copy()
        rows[0, 0] = self.unused[0]
        return span.view.at(rows)


# ---- tables ----


@fault("tables.no_place_has_two_tokens")
class HandsOutABlockTwice(Paged):
    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        if sequence and sequence not in self.blocks:
            self.unused.append(self.blocks[0][0])
        super().write(sequence, tokens, keys, values)


@fault("tables.the_length_is_that_of_the_cache")
@fault("lengths.the_token_that_was_sampled_is_not_held")
class CountsTheSampledToken(Paged):
    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        counts, self.lengths = self.lengths, {s: n - 1 for s, n in self.lengths.items()}
        super().write(sequence, tokens, keys, values)
        self.lengths = {s: n + (s == sequence or s in counts) for s, n in self.lengths.items()}
        if self.lengths[sequence] > len(self.blocks[sequence]) * self.block_size:
            self.blocks[sequence].append(self.unused.pop())


@fault("tables.a_table_stays_as_it_was_given")
class TableGrowsLater(Paged):
    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        super().write(sequence, tokens, keys, values)
        if len(tokens) == 1:
            self.blocks[sequence].append(self.unused.pop())

    def table(self, sequence: int) -> Table:
        return Table(self.lengths.get(sequence, 0), blocks=self.blocks.get(sequence, []))


@fault("tables.an_ended_sequence_has_no_table")
class TableOfTheDead(Paged):
    def free(self, sequence: int) -> None:
        self.unused += self.blocks[sequence]


@fault("tables.a_used_cache_is_as_good_as_new")
class FreesABlockTwice(Paged):
    def free(self, sequence: int) -> None:
        last = self.blocks[sequence][-1]
        super().free(sequence)
        self.unused += [last, last]


# ---- lengths ----


@fault("lengths.more_than_is_held_is_refused")
@fault("lengths.the_token_that_was_sampled_is_not_held")
class BelievesTheCaller(Paged):
    def span(self, sequences: Any) -> Any:
        span = super().span(sequences)
        return replace(span, view=replace(span.view, holds=None))


@fault("lengths.dropped_tokens_are_refused")
class DropsNothing(Paged):
    def keep(self, sequence: int, count: int) -> None:
        pass


@fault("lengths.dropped_tokens_are_refused")
class DropsTheFirst(Paged):
    def keep(self, sequence: int, count: int) -> None:
        surplus = self.lengths[sequence] - count
        del self.blocks[sequence][: surplus // self.block_size]
        self.lengths[sequence] = count


@fault("lengths.a_sequence_that_is_not_there_holds_nothing")
class TableOfAnother(Paged):
    def table(self, sequence: int) -> Table:
        return super().table(sequence if sequence in self.lengths else 0)


# ---- growth ----


@fault("growth.described_again_it_is_right")
class DescribesItsFirstMemory(Growing):
    def __init__(self) -> None:
        super().__init__()
        self.first = super().describe()

    def describe(self) -> Any:
        return replace(self.first, outdated=None)


@fault("growth.nothing_is_written_elsewhere")
class GrowsUnseen(Growing):
    def describe(self) -> Any:
        return replace(super().describe(), outdated=None)


@fault("growth.an_old_view_is_refused_or_right")
class MovesTokensInPlace(Growing):
    """When it grows the tokens of before stand in reverse, and a view of before is not refused."""

    def describe(self) -> Any:
        return replace(super().describe(), outdated=None)

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        old = self.tensors
        super().write(sequence, tokens, keys, values)
        if self.tensors is not old:
            for one in old:
                one[...] = one[:, :, ::-1].copy()
