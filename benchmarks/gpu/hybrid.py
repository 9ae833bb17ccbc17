"""DeepSeek-V4's cache: a decode step's tokens and entries, one layer after the other.

At these sizes a launch takes longer than its work: the goal is the time of a captured copy of as
many bytes, which is little more than its launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu import families
from benchmarks.gpu.cases import Case, Named, Size
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.places import Place
from benchmarks.hybrid import CASES

_ONE_LAUNCH = ("append: rings", "append: pages", "flush: blocks", "flush: rotation")


def cases(place: Place, size: Size, peers: Peers) -> Iterator[Named]:
    """Those whose bytes are torch's, and which are one launch."""
    for tokens in size.decode_tokens:
        for name in _ONE_LAUNCH:
            yield Named(f"{name}, {tokens}", partial(_build, name, tokens, place, size))


def _build(name: str, tokens: int, place: Place, size: Size) -> Case:
    """As many layers as a model has, each with tensors of its own."""
    with torch.device(place.device):
        layers = [CASES[name](tokens) for _ in range(size.num_layers)]
    ways = {way: [layer.ways[way] for layer in layers] for way in ("kvx", "torch")}
    outputs = [output for layer in layers for output in layer.outputs]
    family = families.HYBRID
    num_bytes = layers[0].num_bytes * (1 + layers[0].written) // 2
    return Case(ways, outputs, num_bytes, family, [family.goal])
