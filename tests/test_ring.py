"""RING tables: the last tokens of a sequence, in blocks that are used again. Spec: E.16"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    describe,
    migrate,
    verify,
)
from kvx_core._c import abi
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.desc.tables import SeqLens
from kvx_core.errors import OutOfRangeError
from kvx_core.types import BlockTableFormat
from tests.calls import Backend

BS, COLUMNS, HEADS, DIM, BLOCKS = 4, 3, 2, 8, 11
RING = BS * COLUMNS
ROWS = 3
SENTINEL = 0x5A5A


class Case:
    """Rings of three sequences at the source, blocks of whole sequences at the destination."""

    def __init__(
        self,
        on: Backend,
        seed: int,
        *,
        ring: bool,
        lens: list[int] | None = None,
        rounds: int = 0,
    ) -> None:
        self.on, self.ring = on, ring
        generator = torch.Generator().manual_seed(seed)
        pick = lambda high: int(torch.randint(high, (), generator=generator))  # noqa: E731
        self.starts = [rounds * RING + pick(5 * RING), 0, rounds * RING + pick(5 * RING) + RING]
        self.lens = lens or [pick(RING - 1) + 1, pick(RING), RING]
        order = torch.randperm(BLOCKS, generator=generator).tolist()
        self.rows = [order[i * COLUMNS : (i + 1) * COLUMNS] for i in range(ROWS)]
        self.pools = [
            torch.randint(-(2**15), 2**15, (BLOCKS, BS, HEADS, DIM), generator=generator).short()
            for _ in range(2)
        ]
        self.kept: list[Any] = []

    def where(self, row: int, token: int) -> tuple[int, int]:
        """Block and offset of a token, by the definition."""
        return self.rows[row][token // BS % COLUMNS], token % BS

    def table(self) -> Any:
        """The ring or, as a PACKED table, the ring written out as often as it goes round."""
        times = (max(self.starts) + RING) // RING + 1
        ids = torch.tensor([row if self.ring else row * times for row in self.rows])
        self.kept.append(ids)
        return abi.kvx_block_table_t(
            format=BlockTableFormat.RING if self.ring else BlockTableFormat.PACKED,
            index_dtype=7,
            seq_count=ROWS,
            max_blocks_per_seq=ids.shape[1],
            indices=self.on.address(ids),
            indices_count=ids.numel(),
        )

    def paged(self) -> abi.kvx_span_t:
        starts = torch.tensor(self.starts)
        table, first = self.table(), self.on.seq_lens(starts)
        layer = self.layer(*self.pools)
        self.kept += [starts, table, first, layer]
        return abi.kvx_span_t(
            num_layers=1,
            layers=abi.pointer_array([layer], abi.kvx_cache_desc_t),
            block_table=ctypes.pointer(table),
            starts=ctypes.pointer(first),
        )

    def dense(self, k: Tensor, v: Tensor) -> abi.kvx_span_t:
        layer = self.layer(k, v)
        self.kept.append(layer)
        return abi.kvx_span_t(num_layers=1, layers=abi.pointer_array([layer], abi.kvx_cache_desc_t))

    def layer(self, *tensors: Tensor) -> abi.kvx_cache_desc_t:
        blocks, size = tensors[0].shape[:2]
        k, v = (
            abi.kvx_tensor_desc_t(
                dtype=2,
                layout=1,
                memory=self.on.memory,
                ndim=4,
                shape=abi.dims(tensor.shape),
                stride=abi.dims(tensor.stride()),
                data=self.on.address(tensor),
            )
            for tensor in tensors
        )
        return abi.kvx_cache_desc_t(
            num_blocks=blocks, block_size=size, num_kv_heads=HEADS, head_dim=DIM, k=k, v=v
        )

    def move(self, src: abi.kvx_span_t, dst: abi.kvx_span_t) -> None:
        lens = torch.tensor(self.lens)
        struct = self.on.seq_lens(lens)
        desc = abi.kvx_migrate_desc_t(
            seq_lens=ctypes.pointer(struct), src=ctypes.pointer(src), dst=ctypes.pointer(dst)
        )
        self.on.call("kvx_migrate_kv", desc)


def sentinels() -> list[Tensor]:
    return [torch.full((ROWS, RING, HEADS, DIM), SENTINEL, dtype=torch.int16) for _ in range(2)]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("ring", [True, False], ids=["ring", "written out"])
def test_out_of_a_ring(backend: Backend, seed: int, ring: bool) -> None:
    case = Case(backend, seed, ring=ring)
    found, expected = sentinels(), sentinels()
    case.move(case.paged(), case.dense(*found))
    for pool, right in zip(case.pools, expected, strict=True):
        for row in range(ROWS):
            for i in range(case.lens[row]):
                right[row, i] = pool[case.where(row, case.starts[row] + i)]
    for one, right in zip(found, expected, strict=True):
        assert torch.equal(one, right)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("ring", [True, False], ids=["ring", "written out"])
def test_into_a_ring(backend: Backend, seed: int, ring: bool) -> None:
    case = Case(backend, seed, ring=ring)
    expected = [pool.clone() for pool in case.pools]
    new = [torch.randint(0, 2**15, (ROWS, RING, HEADS, DIM)).short() for _ in range(2)]
    case.move(case.dense(*new), case.paged())
    for tokens, right in zip(new, expected, strict=True):
        for row in range(ROWS):
            for i in range(case.lens[row]):
                right[case.where(row, case.starts[row] + i)] = tokens[row, i]
    for pool, right in zip(case.pools, expected, strict=True):
        assert torch.equal(pool, right)


WIDE = (2**32 // RING + 1, 2**61 // RING)  # rounds, up to positions of more than 32 bits


@pytest.mark.parametrize("rounds", WIDE)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_starts_of_more_than_32_bits(backend: Backend, seed: int, rounds: int) -> None:
    """Of long streams: the ring's tokens come out, and others go in."""
    case = Case(backend, seed, ring=True, rounds=rounds)
    assert case.starts[0] > 2**32
    found, expected = sentinels(), sentinels()
    case.move(case.paged(), case.dense(*found))
    into = [pool.clone() for pool in case.pools]
    for pool, out, right in zip(case.pools, expected, into, strict=True):
        for row in range(ROWS):
            for i in range(case.lens[row]):
                at = case.where(row, case.starts[row] + i)
                out[row, i] = pool[at]
                right[at] = 1000 * row + i
    for one, right in zip(found, expected, strict=True):
        assert torch.equal(one, right)
    new = 1000 * torch.arange(ROWS).view(ROWS, 1, 1, 1) + torch.arange(RING).view(1, RING, 1, 1)
    new = new.short().expand(ROWS, RING, HEADS, DIM)
    ends = [new.clone(), new.clone()]
    case.move(case.dense(*ends), case.paged())
    for pool, right in zip(case.pools, into, strict=True):
        assert torch.equal(pool, right)


def test_more_tokens_than_a_ring_keeps_are_refused(backend: Backend) -> None:
    case = Case(backend, 4, ring=True, lens=[1, RING + 1, 2])
    before = sentinels()
    found = [tensor.repeat(1, 2, 1, 1) for tensor in before]
    with pytest.raises(OutOfRangeError) as caught:
        case.move(case.paged(), case.dense(*found))
    assert str(caught.value).startswith(
        f"row 1 needs tokens [0, 0 + {RING + 1}), but src.block_table holds {RING} per row"
    )
    if backend.name == "cpu":
        assert all((tensor == SENTINEL).all() for tensor in found)
    else:  # a device skips the tokens that the ring does not hold
        assert all((tensor[1, RING:] == SENTINEL).all() for tensor in found)


def test_a_sentence_names_the_tokens_that_were_asked_for(backend: Backend) -> None:
    case = Case(backend, 5, ring=True, lens=[RING + 3, 1, 1])
    first = case.starts[0]
    found = [tensor.repeat(1, 2, 1, 1) for tensor in sentinels()]
    with pytest.raises(OutOfRangeError) as caught:
        case.move(case.paged(), case.dense(*found))
    assert f"row 0 needs tokens [{first}, {first} + {RING + 3})" in str(caught.value)


def test_an_entry_past_the_cache_is_found_wherever_a_row_uses_it() -> None:
    """The row's tokens begin in its last block and go on in its first one."""
    pool = torch.zeros(BLOCKS, BS, HEADS, DIM)
    view = CacheView((CacheDesc.from_kv(describe(pool, "BLOCK_NHD"), None),), CacheFacts())
    for bad in range(COLUMNS):
        ids = [[0, 1, 2]]
        ids[0][bad] = BLOCKS
        span = view.at(BlockTable.ring(ids), starts=[2 * RING - 1])
        with pytest.raises(OutOfRangeError, match=rf"indices\[{bad}\] is {BLOCKS}"):
            find_tokens(span, SeqLens.of([RING]))


def test_from_python_with_verify() -> None:
    window = torch.randn(BLOCKS, BS, HEADS, DIM)
    whole = torch.zeros(BLOCKS, BS, HEADS, DIM)
    rings, blocks = (
        CacheView((CacheDesc.from_kv(describe(pool, "BLOCK_NHD"), None),), CacheFacts())
        for pool in (window, whole)
    )
    table, length, total = [[7, 2, 5]], RING - 2, 31
    src = rings.at(BlockTable.ring(table), starts=[total - length])
    dst = blocks.at([list(range(8))], starts=[total - length])
    migrate(src, dst, [length], same_model=True)
    for t in range(total - length, total):
        assert torch.equal(whole[t // BS, t % BS], window[table[0][t // BS % COLUMNS], t % BS])
    assert verify(src, dst, [length])
    whole[(total - 1) // BS, (total - 1) % BS, 0, 0] += 1
    assert not verify(src, dst, [length])
