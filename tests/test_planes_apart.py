"""Planes with tables of their own name memory that others of the call do not. Spec: E.11

Two planes over one memory: what one of them writes, no other may read or write, whatever block ids
call it. The oracle compares sets of byte addresses.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvx_core.errors import InvalidArgumentError
from tests.calls import CPU, Backend
from tests.planes import SENTINEL, Paged, View, migrate, table

AXES = ("block", "token", "dim")
REFUSED = r"^the bytes at 0x[0-9a-f]+ are named by two tables or slots of planes, and the call "


def pages(blocks: int = 4, tokens: int = 2, dim: int = 8) -> torch.Tensor:
    return torch.randint(0, 255, (blocks, tokens, dim), dtype=torch.uint8)


def plane(tensor: torch.Tensor, role: int, rows: list[list[int]] | None, on: Backend) -> Paged:
    """A plane whose tokens are found by a table of its own or, with None, by the span's."""
    made = Paged(tensor, AXES, role)
    if rows is not None:
        made.table, indices = table(on, rows)
        made.kept.append(indices)
    return made


@pytest.mark.parametrize(
    ("moves", "meet"),
    [
        (((0, 1), (1, 2)), True),  # one plane writes what the other reads
        (((1, 2), (0, 1)), True),
        (((0, 2), (1, 2)), True),  # both write it
        (((0, 1), (2, 3)), False),
        (((0, 1), (0, 2)), False),  # both read it
    ],
)
def test_two_planes_of_one_pool(
    backend: Backend, moves: tuple[tuple[int, int]], meet: bool
) -> None:
    memory = pages()
    before = memory.clone()
    ends = [
        View([plane(memory, role, [[move[e]]], backend) for role, move in enumerate(moves)])
        for e in (0, 1)
    ]
    if meet:
        if backend.looks_first:
            with pytest.raises(InvalidArgumentError, match=REFUSED):
                migrate(backend, *ends, [2])
            assert torch.equal(memory, before)
        return
    migrate(backend, *ends, [2])
    expected = before.clone()
    for from_, to in moves:
        expected[to] = before[from_]
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, True)])
def test_two_planes_into_one_block(backend: Backend, own: tuple[bool, bool]) -> None:
    """The sources lie apart; only the destination is one memory. The span has a table for one."""
    if not backend.looks_first:
        return
    sources, memory = [pages(), pages()], pages()
    before = memory.clone()
    tables = [[[2]] if it else None for it in own]
    src = [plane(sources[i], i, tables[i], backend) for i in (0, 1)]
    dst = [plane(memory, i, tables[i], backend) for i in (0, 1)]
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        migrate(backend, View(src, [[2]]), View(dst, [[2]]), [1])
    assert torch.equal(memory, before)


def test_halves_of_a_row_with_tables_of_their_own(backend: Backend) -> None:
    """A latent and its rope part in one row: they interleave and share no byte."""
    src, dst = pages(), torch.full_like(pages(), SENTINEL)
    tables = [[[2, 0]], [[2, 0]]], [[[1, 3]], [[1, 3]]]
    ends = [
        View(
            [plane(part, role, tables[e][role], backend) for role, part in enumerate(parts)],
        )
        for e, parts in enumerate([(t[..., :5], t[..., 5:]) for t in (src, dst)])
    ]
    migrate(backend, *ends, [3])
    expected = torch.full_like(dst, SENTINEL)
    expected[1], expected[3, 0] = src[2], src[0, 0]
    assert torch.equal(dst, expected)


def test_one_table_for_two_planes_over_one_memory(backend: Backend) -> None:
    """V is the beginning of K: both are found alike, so that one table names both."""
    src, dst = pages(), torch.full_like(pages(), SENTINEL)
    ends = []
    for tensor, block in ((src, 1), (dst, 3)):
        found, indices = table(backend, [[block]])
        both = [Paged(tensor, AXES, 0), Paged(tensor[..., :5], AXES, 1)]
        for one in both:
            one.table, one.kept = found, [indices]
        ends.append(View(both))
    migrate(backend, *ends, [2])
    expected = torch.full_like(dst, SENTINEL)
    expected[3] = src[1]
    assert torch.equal(dst, expected)


def test_a_state_and_a_plane_over_one_memory() -> None:
    memory = pages()
    before = memory.clone()

    def view(block: int, slot: int) -> View:
        state = Paged(memory.view(4, 16), ("block", "dim"), 1, tokens_per_entry=0)
        slots = torch.tensor([slot])
        state.slots, state.kept = CPU.slots(slots), [slots]
        return View([plane(memory, 0, [[block]], CPU), state])

    with pytest.raises(InvalidArgumentError, match=REFUSED):
        migrate(CPU, view(0, 2), view(1, 0), [2])
    assert torch.equal(memory, before)
    migrate(CPU, view(0, 1), view(3, 2), [2])
    assert torch.equal(memory, before[[0, 1, 1, 0]])


@pytest.mark.parametrize("seed", range(3))
def test_refused_is_what_meets_and_nothing_else(seed: int) -> None:
    """Planes of odd windows of one memory, each by a table of its own, within it or into it."""
    choose = random.Random(seed)
    refused = 0
    for _ in range(300):
        memory = torch.randint(0, 255, (192,), dtype=torch.uint8)
        within = choose.random() < 0.5
        reads = memory if within else torch.randint(0, 255, (192,), dtype=torch.uint8)
        planes: list[tuple[Paged, Paged]] = []
        addresses: list[tuple[set[int], set[int]]] = []  # what each plane reads and writes
        clash = False
        expected = memory.clone()
        length = choose.randint(1, 3)
        for role in range(2):
            window = choose.choice(["rows", "left", "right", "columns"])
            blocks = [choose.sample(range(6), 2) for _ in "sd"]
            pair = []
            for e, storage in enumerate((reads, memory)):
                view = storage.view(6, 4, 8)
                if window == "left":
                    view = view[..., :4]
                if window == "right":
                    view = view[..., 4:]
                if window == "columns":
                    view = storage.view(6, 8, 4).transpose(1, 2)
                pair.append(plane(view, role, [blocks[e]], CPU))
            spots = torch.arange(192)
            offset = pair[0].tensor.storage_offset()
            named = spots.as_strided(pair[0].tensor.shape, pair[0].tensor.stride(), offset)
            found = [named[torch.tensor(blocks[e])].flatten(0, 1)[:length] for e in (0, 1)]
            expected[found[1]] = reads[found[0]]
            touched = {e: {blocks[e][t // 4] for t in range(length)} for e in (0, 1)}
            clash |= within and bool(touched[0] & touched[1])  # E.3, by ids
            addresses.append((set(found[0].flatten().tolist()), set(found[1].flatten().tolist())))
            planes.append((pair[0], pair[1]))
        for (one_reads, one_writes), (_, writes) in itertools.permutations(addresses, 2):
            clash |= bool(one_writes & writes) or (within and bool(one_reads & writes))
        before = memory.clone()
        ends = [View([pair[e] for pair in planes]) for e in (0, 1)]
        if clash:
            refused += 1
            with pytest.raises(InvalidArgumentError, match=r"spec E\.(3|11)"):
                migrate(CPU, *ends, [length])
            assert torch.equal(memory, before)
        else:
            migrate(CPU, *ends, [length])
            assert torch.equal(memory, expected)
    assert 50 < refused < 250
