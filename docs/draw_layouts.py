"""Draws docs/layouts/*.svg: where the elements of each engine's cache lie in memory.

    python -m docs.draw_layouts

A drawing is made from the addresses, shapes and strides of a CacheView, and from nothing else that
is known of the engine. Engines whose elements lie alike share one, named for the first of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from docs.drawing import both_schemes
from kvx_core import CacheDesc, CacheView, Layout, TensorDesc
from kvx_core.desc.layouts import axes
from tests.engines import ENGINES, Engine, Sizes

FOLDER = Path(__file__).parent / "layouts"
TOKENS = 4  # of each block that are drawn
LAYER, BLOCK, TOKEN = 0, 1, 1  # enlarged, enlarged, marked

WIDTH, MARGIN = 840, 18  # pixels
CELL, GAP = 23, 8  # pixels of an element, and of what is left out
CELLS = 32  # elements in a line
COLOURS = {  # of an element, and of one of the marked token
    ("K", 0): ("#b5d3f3", "#2464ac"),
    ("K", 1): ("#a8dec5", "#14704f"),
    ("V", 0): ("#f9cc96", "#a45a08"),
    ("V", 1): ("#f2b5c4", "#a8324f"),
}


class Element(NamedTuple):
    """One element; sorted, elements are in the order of memory."""

    allocation: int
    offset: int  # bytes
    tensor: str  # "K" or "V"
    layer: int
    block: int
    head: int
    token: int
    dim: int


def steps(tensor: TensorDesc) -> dict[str, tuple[int, int]]:
    """(extent, stride in bytes) of each axis of a K or V tensor. Spec: 4.2"""
    if tensor.layout is Layout.BLOCK_NHD:
        names = ["block", "token", "head", "dim"]
    elif tensor.ndim == 4:
        names = ["block", "head", "token", "dim"]
    else:
        names = ["block", "head", "dim / x" if tensor.shape[4] > 1 else "dim", "token", "dim % x"]
    in_bytes = [stride * tensor.dtype.itemsize for stride in tensor.stride]
    return dict(zip(names, zip(tensor.shape, in_bytes, strict=True), strict=True))


def elements(view: CacheView, raw: Sequence[Tensor]) -> list[Element]:
    """The first `TOKENS` tokens of every block of every layer, in the order of memory."""
    found = []
    for layer, desc in enumerate(view.layers):
        for name, tensor in desc.tensors.items():
            sizes = axes(tensor.layout, tensor.shape)
            tokens = range(min(sizes.block_size, TOKENS))
            for block, head, token, dim in itertools.product(
                range(sizes.num_blocks), range(sizes.num_kv_heads), tokens, range(sizes.head_dim)
            ):
                index = {
                    "block": block,
                    "head": head,
                    "token": token,
                    "dim": dim,
                    "dim / x": dim // sizes.pack,
                    "dim % x": dim % sizes.pack,
                }
                offset = sum(index[axis] * stride for axis, (_, stride) in steps(tensor).items())
                place = locate(tensor.data + offset, raw)
                found.append(Element(*place, name.upper(), layer, block, head, token, dim))
    return sorted(found)


def locate(address: int, raw: Sequence[Tensor]) -> tuple[int, int]:
    """(allocation, offset in bytes) of an address."""
    for allocation, tensor in enumerate(raw):
        if 0 <= address - tensor.data_ptr() < tensor.nbytes:
            return allocation, address - tensor.data_ptr()
    raise ValueError(f"address {address:#x} lies in none of the {len(raw)} allocations")


def order(view: CacheView, raw: Sequence[Tensor]) -> dict[str, list[str]]:
    """Axes from the slowest to the fastest, of "K" and of "V", or of "K and V" if they agree.

    The layer, and K or V, is no axis of memory where each has an allocation of its own.
    """
    first, second = view.layers[:2]

    def apart(one: TensorDesc, other: TensorDesc | None) -> int:
        together = other and locate(one.data, raw)[0] == locate(other.data, raw)[0]
        return abs(other.data - one.data) if other and together else 0

    between = {"layer": (2, apart(first.k, second.k)), "K | V": (2, apart(first.k, first.v))}
    found = {}
    for name, tensor in first.tensors.items():
        all_steps = (steps(tensor) | between).items()
        several = {axis: stride for axis, (extent, stride) in all_steps if extent > 1 and stride}
        found[name.upper()] = sorted(several, key=lambda axis: -several[axis])
    if found["K"] == found.get("V"):
        return {"K and V": found["K"]}
    return found


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """`more`: further attributes, here and in `text`."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def text(x: float, y: float, words: str, size: float = 12, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{more}>{words}</text>'


def overview(found: Sequence[Element], y: float) -> Iterator[str]:
    """Every allocation: a box for each run of one block, striped by K, V and head."""
    boxes = [
        (key, list(box))
        for key, box in itertools.groupby(found, key=lambda e: (e.allocation, e.layer, e.block))
    ]
    allocations = 1 + found[-1].allocation
    between, apart = 3, 12
    room = WIDTH - 2 * MARGIN - between * (len(boxes) - 1) - apart * (allocations - 1)
    pixels = room / len(found)
    x = float(MARGIN)
    named = None
    for (allocation, layer, block), box in boxes:
        if allocation != named:
            x += 0 if named is None else apart
            named = allocation
            name = f"allocation {allocation + 1}" if allocations > 1 else "one allocation"
            yield text(x, y - 7, name, 12, ' fill="#555"')
        start = x
        for (tensor, head), stripe in itertools.groupby(box, key=lambda e: (e.tensor, e.head)):
            width = pixels * len(list(stripe))
            yield rect(x, y, width, 26, COLOURS[tensor, head][0])
            x += width
        more = ' text-anchor="middle"'
        if (layer, block) == (LAYER, BLOCK):
            outline = ' stroke="#111" stroke-width="3"'
            yield rect(start - 1.5, y - 1.5, x - start + 3, 29, "none", outline)
            more += ' font-weight="bold"'
        yield text((start + x) / 2, y + 42, f"layer {layer}", 12, more)
        yield text((start + x) / 2, y + 56, f"block {block}", 12, more)
        x += between


def fastest(tensor: TensorDesc) -> str:
    """Which of token and dim moves by the smallest step."""
    several = {axis: stride for axis, (extent, stride) in steps(tensor).items() if extent > 1}
    return min(several, key=lambda axis: several[axis]).split()[0]


def enlarged(block: Sequence[Element], desc: CacheDesc, y: float) -> tuple[list[str], float]:
    """The elements of one block, in lines, and the y below them.

    A run in which only the fastest axis moves has a name above it.
    """
    fast = {name.upper(): fastest(tensor) for name, tensor in desc.tensors.items()}
    places = {(e.allocation, e.offset) for e in block}
    last = {e.allocation: e for e in block}

    def run(e: Element) -> str:
        rest = f"dim {e.dim}" if fast[e.tensor] == "token" else f"token {e.token}"
        return f"{e.tensor} h{e.head} {rest}"

    def is_cut_after(e: Element) -> bool:
        if e == last[e.allocation]:
            return desc.block_size > TOKENS
        return (e.allocation, e.offset + desc.k.dtype.itemsize) not in places

    out = []
    for line in lines(block):
        x = MARGIN
        y += 46
        for name, cells in itertools.groupby(line, key=run):
            out.append(text(x + 1, y - 5, name, 11))
            for e in cells:
                marked = e.token == TOKEN
                more = ' text-anchor="middle"' + ' fill="#fff" font-weight="bold"' * marked
                label = f"{fast[e.tensor][0]}{getattr(e, fast[e.tensor])}"
                out.append(rect(x, y, CELL - 1, 24, COLOURS[e.tensor, e.head][marked]))
                out.append(text(x + CELL / 2 - 0.5, y + 16, label, 11, more))
                x += CELL
                if is_cut_after(e):
                    out.append(text(x + 1, y + 16, "⋮", 13, ' fill="#777"'))
                    x += GAP
    return out, y + 24


def lines(block: Sequence[Element]) -> Iterator[list[Element]]:
    """Elements of one allocation, `CELLS` to a line."""
    for _, run in itertools.groupby(block, key=lambda e: e.allocation):
        rest = list(run)
        yield from (rest[i : i + CELLS] for i in range(0, len(rest), CELLS))


def draw(view: CacheView, raw: Sequence[Tensor]) -> str:
    """The drawing of one cache: the text of an SVG."""
    desc = view.layers[LAYER]
    found = elements(view, raw)
    out = []
    y = 0.0
    for names, path in order(view, raw).items():
        y += 24
        out.append(text(MARGIN, y, f"{names}, slowest axis first:", 13))
        out.append(text(MARGIN + 185, y, " → ".join(path), 14, ' font-weight="bold"'))
    y += 36
    out += overview(found, y)
    y += 84
    tokens = min(TOKENS, desc.block_size)
    what = f"its first {tokens} tokens" if tokens > 1 else "its only token"
    title = f"Layer {LAYER}, block {BLOCK}: {what}, element by element"
    out.append(text(MARGIN, y, title, 13, ' font-weight="bold"'))
    block = [e for e in found if (e.layer, e.block) == (LAYER, BLOCK)]
    cells, y = enlarged(block, desc, y - 20)
    out += cells
    y += 26
    legend = "h head, d dim, t token"
    if tokens > 1:
        legend += f"; bold: token {TOKEN}, wherever it lies"
    if desc.block_size > TOKENS:
        legend += "; ⋮ other tokens, blocks or layers"
    out.append(text(MARGIN, y, legend, 12, ' fill="#555"'))
    y += 16
    svg = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" '
            'font-family="Helvetica, Arial, sans-serif" fill="#222">',
            rect(0, 0, WIDTH, y, "#fff", ' rx="8"'),
            *out,
            "</svg>\n",
        ]
    )
    return both_schemes(svg)


def sizes_of(engine: Engine) -> Sizes:
    """The cache that is drawn."""
    return Sizes(
        num_layers=2,
        num_blocks=3,
        block_size=engine.block_size,
        num_kv_heads=1 if engine.mla else 2,
        head_dim=8,
        dtype=torch.float32,  # so that what is packed by 16 bytes has 4 elements side by side
    )


def drawings() -> dict[str, tuple[str, list[str]]]:
    """By the name of its file: each drawing, and the engines that it is of."""
    found: dict[str, tuple[str, list[str]]] = {}
    for name, engine in ENGINES.items():
        cache = engine.build(sizes_of(engine))
        svg = draw(cache.view, cache.raw)
        shared = next((names for other, names in found.values() if other == svg), None)
        if shared is None:
            found[re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".svg"] = (svg, [name])
        else:
            shared.append(name)
    return found


def main() -> None:
    """Writes every drawing and removes those that no engine has any more."""
    made = drawings()
    for path in FOLDER.glob("*.svg"):
        if path.name not in made:
            path.unlink()
    for name, (svg, _) in made.items():
        (FOLDER / name).write_text(svg)


if __name__ == "__main__":
    main()
