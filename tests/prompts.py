"""Prompts of one chat template, in shapes that a store meets, and the best entry by an oracle.

Used by tests of marks, and by benchmarks/store_names.py. Each shape is what one node of a store
has: entries of at most CHUNK tokens, all with the same parent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

import numpy as np

from kvx_core.stores.names import Ids

CHUNK = 128
TEMPLATE = np.arange(30)  # tokens that all prompts begin with
_KEPT = 20_000  # entries that later prompts may go on from

Draw = Callable[[np.random.Generator, list[Ids]], Ids]  # a new prompt, from those before


class Prompts:
    """A stream of prompts of a shape, always the same for a seed."""

    def __init__(self, draw: Draw, seed: int) -> None:
        self._draw, self._rng = draw, np.random.default_rng(seed)
        self._kept: list[Ids] = []

    def entry(self) -> Ids:
        """The next prompt that is stored."""
        ids = self.query()
        self._kept.append(ids)
        if len(self._kept) > _KEPT:
            del self._kept[0]
        return ids

    def query(self) -> Ids:
        """A prompt of the same shape that is not stored."""
        return self._draw(self._rng, self._kept)


class Best:
    """How many tokens the best of some entries shares with a prompt: the closest in their order."""

    def __init__(self, entries: Iterable[Ids]) -> None:
        self._sorted = sorted(map(_in_order, entries))

    def shared(self, ids: Ids) -> int:
        own = _in_order(ids)
        at = bisect_left(self._sorted, own)
        beside = self._sorted[max(0, at - 1) : at + 1]
        return max((_common_bytes(own, one) // 4 for one in beside), default=0)


def _common_bytes(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _in_order(ids: Ids) -> bytes:
    """Bytes that are ordered as tokens are."""
    return ids.astype(">u4").tobytes()


def _text(rng: np.random.Generator, count: int, vocabulary: int = 30_000) -> Ids:
    return rng.integers(1_000, 1_000 + vocabulary, count)


def _edited(rng: np.random.Generator, kept: list[Ids], length: int) -> Ids:
    """Half of all prompts begin as an earlier one does, the others with the template alone."""
    begin = TEMPLATE
    if kept and rng.random() < 0.5:
        other = kept[rng.integers(len(kept))]
        begin = other[: rng.integers(1, len(other) + 1)]
    begin = begin[:length]
    return np.concatenate([begin, _text(rng, length - len(begin))])


def full_chunks(rng: np.random.Generator, kept: list[Ids]) -> Ids:
    """Chunks of CHUNK tokens."""
    return _edited(rng, kept, CHUNK)


def ends(rng: np.random.Generator, kept: list[Ids]) -> Ids:
    """Ends of prompts, of fewer."""
    return _edited(rng, kept, int(rng.integers(len(TEMPLATE) + 1, CHUNK)))


def last_tokens(rng: np.random.Generator, kept: list[Ids]) -> Ids:
    """Ends that differ in their last token only."""
    return np.concatenate([np.arange(100), _text(rng, 1, 10_000_000)])


def sessions(rng: np.random.Generator, kept: list[Ids]) -> Ids:
    """Ends of conversations that grow: four of five turns go on from one of the last."""
    if kept and rng.random() < 0.8:
        last = kept[-50:]
        begin = last[rng.integers(len(last))]
    else:
        begin = TEMPLATE
    return np.concatenate([begin, _text(rng, int(rng.integers(1, 30)))])[:CHUNK]


def small_edits(rng: np.random.Generator, kept: list[Ids]) -> Ids:
    """Prompts in a language of four words, each an edit of another: as hard as it gets."""
    begin = TEMPLATE
    if kept and rng.random() < 0.7:
        other = kept[rng.integers(len(kept))]
        begin = other[: rng.integers(1, len(other) + 1)]
    return np.concatenate([begin, _text(rng, int(rng.integers(1, 60)), 4)])[:CHUNK]


SHAPES: dict[str, Draw] = {
    "full chunks": full_chunks,
    "ends": ends,
    "last tokens": last_tokens,
    "sessions": sessions,
}
