"""Draws docs/hybrid.svg: a prefix of 41 tokens in vLLM's pages, keys, values and a state.

    python -m docs.draw_hybrid

The drawing is made from the addresses, shapes and strides of descriptors. The pool is as vLLM has
it on CUDA: pages of all groups of layers have one size; that of a state has its convolution, then
the state, then padding.
Source: vllm 0.32 v1/kv_cache_interface.py, MambaSpec; v1/worker/gpu_model_runner.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from docs.draw_layouts import COLOURS, MARGIN, WIDTH, rect, text
from docs.drawing import PAPER, both_schemes
from kvx_adapters.vllm.states import STATE_AXES
from kvx_core import CacheDesc, Layout, Plane, describe
from kvx_core.model.recurrent import recurrent_state
from kvx_core.types import Axis

FILE = Path(__file__).parent / "hybrid.svg"
CONFIG = {
    "model_type": "qwen3_next",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
TOKENS, BLOCK = 41, 24  # of the prefix; of a block of keys and values
HEADS, DIM = 2, 8  # of keys and values
BLOCKS, ATTENTION, STATE = 5, (3, 1), 4  # the pool; blocks of the prefix in each group of layers

_COLOURS = {
    "K": COLOURS["K", 0][0],
    "V": COLOURS["V", 0][0],
    "q": COLOURS["V", 1][0],
    "k": COLOURS["K", 0][0],
    "v": COLOURS["V", 0][0],
    "heads": COLOURS["K", 1][0],
}
_PADDING = "#e4e6ea"


class Run(NamedTuple):
    """Bytes of one part that lie side by side; sorted, runs are in the order of memory."""

    begin: int  # from the beginning of its page
    end: int
    name: str  # K, V, a section of the convolution, or "heads"
    number: int  # the token, the column, oldest first, or the head


class Hybrid:
    """A pool of vLLM, and what it holds: keys and values of one layer, the state of another."""

    def __init__(self) -> None:
        sizes = recurrent_state(CONFIG)
        channels = sum(width for _, width in sizes.conv)
        heads, keys, values = sizes.state
        conv_bytes = 2 * sizes.num_columns * channels
        self.page_bytes = 2 * BLOCK * HEADS * DIM * 2
        self.pool = torch.zeros(BLOCKS, self.page_bytes, dtype=torch.uint8)
        pages = self.pool.view(torch.bfloat16)
        self.kv = pages.view(BLOCKS, 2, BLOCK, HEADS, DIM)
        shape, page = (BLOCKS, sizes.num_columns, channels), pages.shape[1]
        self.conv = pages.as_strided(shape, (page, channels, 1))
        self.state = self.pool.view(torch.float32).as_strided(
            (BLOCKS, heads, values, keys),
            (self.page_bytes // 4, values * keys, keys, 1),
            conv_bytes // 4,
        )
        k, v = (describe(self.kv[:, half], Layout.BLOCK_NHD) for half in (0, 1))
        self.desc = CacheDesc.from_kv(k, v)
        self.planes = (
            Plane.of_state(
                self.conv, ("block", "time", "channel"), sizes.conv_facts(), slots=[STATE]
            ),
            Plane.of_state(self.state, STATE_AXES[sizes.kind], sizes.state_facts(), slots=[STATE]),
        )

    def page(self, block: int) -> int:
        """The address of a page."""
        return self.pool.data_ptr() + block * self.page_bytes


def runs_of_tokens(cache: Hybrid, block: int, num_tokens: int) -> list[Run]:
    """The first tokens of a block of keys and values."""
    found = []
    for name, tensor in cache.desc.tensors.items():
        steps = [stride * tensor.dtype.itemsize for stride in tensor.stride]
        token_bytes = HEADS * steps[2]
        for token in range(num_tokens):
            begin = tensor.data + block * steps[0] + token * steps[1] - cache.page(block)
            found.append(Run(begin, begin + token_bytes, name.upper(), token))
    return sorted(found)


def runs_of_state(cache: Hybrid) -> list[Run]:
    """Sections of each column of the convolution, and heads of the state."""
    found = []
    for plane in cache.planes:
        assert plane.state is not None
        steps = dict(zip(plane.axes, (s * plane.dtype.itemsize for s in plane.stride), strict=True))
        sizes = dict(zip(plane.axes, plane.shape, strict=True))
        base = plane.data + STATE * steps[Axis.BLOCK] - cache.page(STATE)
        if plane.state.is_conv:
            width = steps[Axis.HEAD]
            for column, part in itertools.product(range(sizes[Axis.DIM]), plane.state.held()):
                begin = base + column * steps[Axis.DIM] + part.offset * width
                found.append(Run(begin, begin + (part.end - part.begin) * width, part.name, column))
        else:
            for head in range(sizes[Axis.HEAD]):
                begin = base + head * steps[Axis.HEAD]
                found.append(Run(begin, begin + steps[Axis.HEAD], "heads", head))
    return sorted(found)


def bar(cache: Hybrid, runs: Sequence[Run], x: float, y: float, width: float) -> Iterator[str]:
    """A page, true to scale: what is in no run is grey."""
    scale = width / cache.page_bytes
    yield rect(x, y, width, 26, _PADDING)
    for run in runs:
        begin, end = x + run.begin * scale, x + run.end * scale
        yield rect(begin, y, end - begin, 26, _COLOURS[run.name])


def overview(cache: Hybrid, y: float) -> Iterator[str]:
    """All pages of the pool."""
    shown: dict[int, tuple[list[Run], str]] = {0: ([], "nobody's")}
    for block, begin in zip(ATTENTION, range(0, TOKENS, BLOCK), strict=True):
        end = min(begin + BLOCK, TOKENS)
        runs = runs_of_tokens(cache, block, end - begin)
        shown[block] = runs, f"K, V of {begin} to {end - 1}"
    shown[STATE] = runs_of_state(cache), f"state after {TOKENS}"
    between = 8
    width = (WIDTH - 2 * MARGIN - between * (BLOCKS - 1)) / BLOCKS
    for block in range(BLOCKS):
        x = MARGIN + block * (width + between)
        runs, words = shown.get(block, ([], "free"))
        yield from bar(cache, runs, x, y, width)
        middle = ' text-anchor="middle"'
        yield text(x + width / 2, y + 42, f"block {block}", 12, middle)
        bold = middle + ' font-weight="bold"' * bool(runs)
        yield text(x + width / 2, y + 57, words, 12, bold)


def enlarged(cache: Hybrid, runs: Sequence[Run], first: int, y: float) -> Iterator[str]:
    """A page, and what its runs are. Above those of several sections, the token.

    first: the position of the token, or of the column, whose number is 0
    """
    scale = _scale(cache)
    yield from bar(cache, runs, MARGIN, y, WIDTH - 2 * MARGIN)
    for run in runs:
        x, middle = MARGIN + (run.begin + run.end) / 2 * scale, ' text-anchor="middle"'
        label = run.name if run.name in "qkv" else str(first + run.number)
        if run.name == "heads":
            label = f"head {run.number}"
        yield text(x, y + 17, label, 11, middle)
        if run.begin:
            yield rect(MARGIN + run.begin * scale - 0.5, y, 1, 26, PAPER[0])
    for name, part in itertools.groupby(runs, key=lambda run: (run.name in "qkv", run.number)):
        if name[0]:
            begin = next(part).begin
            yield text(MARGIN + begin * scale + 1, y - 5, f"token {first + name[1]}", 11)


def draw() -> str:
    """The text of the SVG."""
    cache = Hybrid()
    conv, state = cache.planes
    assert conv.state is not None
    columns = conv.state.num_columns or 0
    block, begin = ATTENTION[-1], BLOCK * (len(ATTENTION) - 1)
    tokens = runs_of_tokens(cache, block, TOKENS - begin)
    in_rows = state.stride[2] < state.stride[3]  # its axes are head, key, value
    titles = [
        (26, f"One pool; every group of layers takes pages of {cache.page_bytes:,} bytes"),
        (136, f"Block {block}, a layer with attention: {TOKENS - begin} of {BLOCK} tokens"),
        (
            224,
            f"Block {STATE}, a gated delta net: the inputs of its convolution for {columns} "
            f"tokens, and the state after exactly {TOKENS}",
        ),
    ]
    out = [text(MARGIN, y, words, 13, ' font-weight="bold"') for y, words in titles]
    out += overview(cache, 40)
    for name in "KV":
        x = MARGIN + next(run.begin for run in tokens if run.name == name) * _scale(cache)
        out.append(text(x + 1, 156, f"{name} of token", 11))
    out += enlarged(cache, tokens, begin, 161)
    out += enlarged(cache, runs_of_state(cache), TOKENS - columns, 249)
    legend = (
        f"q, k, v: sections, which ranks split one by one; a head is "
        f"{'[value, key]' if in_rows else '[key, value]'} in float32; grey: padding, and room for "
        "other tokens"
    )
    out.append(text(MARGIN, 296, legend, 12, ' fill="#555"'))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 312" '
        'font-family="Helvetica, Arial, sans-serif" fill="#222">',
        rect(0, 0, WIDTH, 312, "#fff", ' rx="8"'),
        *out,
        "</svg>\n",
    ]
    return both_schemes("\n".join(lines))


def _scale(cache: Hybrid) -> float:
    """Pixels of a byte of an enlarged page."""
    return (WIDTH - 2 * MARGIN) / cache.page_bytes


if __name__ == "__main__":
    FILE.write_text(draw())
