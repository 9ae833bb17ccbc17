"""docs/layouts.md: its drawings are those of the descriptors, its numbers those of the tensors."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from docs import draw_layouts
from kvx_core import Layout, TensorDesc
from kvx_core._c import abi
from tests.engines import ENGINES, EngineCache, Sizes

TEXT = (Path(draw_layouts.__file__).parent / "layouts.md").read_text()
SIZES = {"L": 3, "B": 11, "H": 6, "D": 156, "x": 4}
SLOTS = {"skip": "skipped", "wrap": "wraps", "undefined": "undefined"}


def rows(heading: str) -> dict[str, list[str]]:
    """The rows of a table, by the code in their first cell."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    assert lines, heading
    return {first.strip(" `"): [cell.strip() for cell in rest] for first, *rest in lines}


@cache
def made(name: str) -> EngineCache:
    engine = ENGINES[name]
    return engine.build(
        Sizes(
            num_layers=SIZES["L"],
            num_blocks=SIZES["B"],
            block_size=engine.block_size,
            num_kv_heads=1 if engine.mla else SIZES["H"],
            head_dim=SIZES["D"],
            dtype=torch.float32,
        )
    )


def value(name: str, term: str) -> int:
    """What a term such as 2NHD or D/x is for the cache of an engine."""
    view = made(name).view
    first = view.layers[0]
    sizes = SIZES | {"N": first.block_size, "H": first.num_kv_heads, "S": view.secondary_num_blocks}
    above, _, below = term.partition("/")
    assert re.fullmatch(r"\d*[LBSNHDx]*", above), term
    factors = [int(f) if f.isdigit() else sizes[f] for f in re.findall(r"\d+|\w", above)]
    return math.prod(factors) // (sizes[below] if below else 1)


def values(name: str, cell: str) -> list[tuple[int, ...]]:
    """The tuples of terms in a cell."""
    return [
        tuple(value(name, term.strip()) for term in inner.split(","))
        for inner in re.findall(r"`\((.+?)\)`", cell)
    ]


def test_committed_drawings_are_those_of_the_descriptors() -> None:
    made_now = {name: svg for name, (svg, _) in draw_layouts.drawings().items()}
    committed = {path.name: path.read_text() for path in draw_layouts.FOLDER.iterdir()}
    assert committed.keys() == made_now.keys(), "run: python -m docs.draw_layouts"
    differ = [name for name, svg in made_now.items() if committed[name] != svg]
    assert not differ, "run: python -m docs.draw_layouts"


# Where blocks were offloaded, a block's id is not its place.
@pytest.mark.parametrize("name", [name for name in ENGINES if not name.endswith("offloaded")])
def test_elements_are_where_the_engine_writes_them(name: str) -> None:
    """Its own indexing stores a number in each element, and memory in order is the drawing."""
    sizes = draw_layouts.sizes_of(ENGINES[name])
    cache = ENGINES[name].build(sizes)
    shown = min(cache.block_size, draw_layouts.TOKENS)
    places = torch.cartesian_prod(torch.arange(sizes.num_blocks), torch.arange(shown))
    halves = 1 if ENGINES[name].mla else 2
    shape = (sizes.num_layers, halves, len(places), sizes.num_kv_heads, sizes.head_dim)
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    for layer in range(sizes.num_layers):
        key, value = (*numbers[layer], None)[:2]
        cache.write(layer, places[:, 0], places[:, 1], key, value)
    found = draw_layouts.elements(cache.view, cache.raw)
    assert len(found) == numbers.numel()
    for e in found:
        stored = cache.raw[e.allocation][e.offset : e.offset + 4].view(torch.float32)
        token = e.block * shown + e.token
        assert stored.item() == numbers[e.layer, "KV".index(e.tensor), token, e.head, e.dim], e


def test_drawings_are_small() -> None:
    for path in draw_layouts.FOLDER.iterdir():
        assert path.stat().st_size < 60_000, path.name


def test_every_drawing_is_shown_with_its_engines() -> None:
    section = TEXT.partition("\n## Drawings\n")[2]
    shown = {}
    for part in section.split("\n### ")[1:]:
        (picture,) = re.findall(r"!\[.+?\]\(layouts/(.+?)\)", part)
        (line,) = re.findall(r"^(?:`[^`]+`(?:, )?)+$", part, re.M)
        shown[picture] = re.findall(r"`([^`]+)`", line)
    assert shown == {name: names for name, (_, names) in draw_layouts.drawings().items()}


def test_every_engine_has_a_row_that_links_to_its_drawing() -> None:
    table = rows("Where K and V lie")
    assert list(table) == list(ENGINES)
    parts = TEXT.partition("\n## Drawings\n")[2].split("\n### ")[1:]
    at = {re.sub(r"[^\w -]", "", p.splitlines()[0].lower()).replace(" ", "-"): p for p in parts}
    assert len(at) == len(parts)
    for name, cells in table.items():
        (anchor,) = re.findall(r"\[drawing\]\(#(.+)\)", cells[-1])
        assert f"`{name}`" in at[anchor], name


@pytest.mark.parametrize("name", ENGINES)
def test_tensors_of_the_engine(name: str) -> None:
    """Their shapes, of one layer or of all, hold as many bytes as the engine allocated."""
    cell = rows("Where K and V lie")[name][0]
    shapes = values(name, cell)
    layers = 1 if "L" in cell else SIZES["L"]
    raw = sum(tensor.nbytes for tensor in made(name).raw)
    assert layers * sum(map(math.prod, shapes)) * 4 == raw


@pytest.mark.parametrize("name", ENGINES)
def test_views(name: str) -> None:
    _, k_cell, v_cell, distance, *_ = rows("Where K and V lie")[name]
    desc = made(name).view.layers[1]
    check_view(name, k_cell, desc.k)
    if desc.v is None:
        assert (v_cell, distance) == ("none", "")
        return
    check_view(name, v_cell, desc.v)
    if distance == "apart":
        starts = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in made(name).raw]
        lies_in = [
            next(i for i, (low, high) in enumerate(starts) if low <= tensor.data < high)
            for tensor in (desc.k, desc.v)
        ]
        assert lies_in[0] != lies_in[1]
    else:
        assert desc.v.data - desc.k.data == value(name, distance.strip("`")) * 4


def check_view(name: str, cell: str, tensor: TensorDesc) -> None:
    layout, _, _ = cell.partition(" ")
    assert tensor.layout is Layout[f"BLOCK_{layout}"]
    assert values(name, cell) == [tensor.stride]


def row_of(name: str) -> str:
    """The longest key that an engine's name begins with."""
    return max(filter(name.startswith, rows("What else differs")), key=len)


def test_every_row_is_of_an_engine() -> None:
    assert set(rows("What else differs")) == set(map(row_of, ENGINES))


@pytest.mark.parametrize("name", ENGINES)
def test_what_else_differs(name: str) -> None:
    _, block_size, null_block, slots, _ = rows("What else differs")[row_of(name)]
    view = made(name).view
    if block_size.isdigit():
        assert int(block_size) == view.layers[0].block_size
    null = view.null_block_id
    assert null_block == ("none" if null == abi.NO_NULL_BLOCK else str(null))
    assert slots == SLOTS.get(view.facts.negative_slots or "", "no slots")
