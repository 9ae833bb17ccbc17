"""Out of and into a cache whose K or V is Hadamard-rotated, by way of float32 in host memory.

A rotation computes numbers, so no stride can describe it, and migrate refuses it: facts.hadamard
differs. These two functions do it for those who ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvx_adapters.llama_cpp.facts import Rotation
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Layout,
    describe,
    migrate,
)
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.tensors import TensorLike
from kvx_core.encodings.hadamard import hadamard


def unrotated(
    src: CacheSpan, seq_lens: SeqLens | TensorLike | Sequence[int], rotation: Rotation
) -> CacheView:
    """A copy of sequences as float32 in host memory, dequantized and without the rotation.

    src:      sequences of a context's cache
    seq_lens: as migrate takes it
    rotation: of that cache, see `rotation`
    Returns a dense view, (sequences, num_kv_heads, longest, head_dim) each. Its facts say that it
    is not rotated and, in `lossy`, which formats have rounded it.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
    """
    _require_rotated("src", src.view.facts, rotation)
    copy, arrays = _dense(src.view, seq_lens, src.view.facts)
    migrate(src, copy, seq_lens, same_model=True)
    _rotate(arrays, rotation)
    return replace(copy, facts=_plain(copy.facts))


def migrate_rotated(
    src: CacheView | CacheSpan,
    dst: CacheSpan,
    seq_lens: SeqLens | TensorLike | Sequence[int],
    rotation: Rotation,
    *,
    same_model: bool = False,
) -> int:
    """migrate from a cache that is not rotated into one that is.

    src, seq_lens, same_model: as migrate takes them
    dst:      cells of a context's cache
    rotation: of that cache, see `rotation`
    Mutates these cells of `dst`, nothing else. Returns their bytes.
    Raises FactsMismatchError, InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing
    was written.
    """
    _require_rotated("dst", dst.view.facts, rotation)
    plain = replace(_plain(dst.view.facts), lossy=None)
    copy, arrays = _dense(dst.view, seq_lens, plain)
    migrate(src, copy, seq_lens, same_model=same_model)
    _rotate(arrays, rotation)
    return migrate(replace(copy, facts=dst.view.facts), dst, seq_lens, same_model=True)


def _plain(facts: CacheFacts) -> CacheFacts:
    """Facts of the same numbers without the rotation."""
    return replace(facts, hadamard=False, hadamard_k=None, hadamard_v=None)


def _require_rotated(name: str, facts: CacheFacts, rotation: Rotation) -> None:
    if facts.hadamard is not bool(rotation.k or rotation.v):
        raise InvalidArgumentError(
            f"{name}.view.facts.hadamard is {facts.hadamard} and rotation is {rotation}, expected "
            "the same of both. Where nothing is rotated, call kvx_core.migrate"
        )
    for half, order in zip("kv", rotation, strict=True):
        known = getattr(facts, f"hadamard_{half}")
        if known is not None and known != order:
            raise InvalidArgumentError(
                f"{name}.view.facts.hadamard_{half} is {known} and rotation is {rotation}, "
                "expected the same of both. Pass the rotation of that cache"
            )


def _dense(
    like: CacheView, seq_lens: SeqLens | TensorLike | Sequence[int], facts: CacheFacts
) -> tuple[CacheView, list[list[np.ndarray]]]:
    """Room for sequences in float32, layers like those of a view: the view and its arrays."""
    lengths = SeqLens.of(seq_lens).to_numpy()
    room = len(lengths), max(int(lengths.max(initial=0)), 1)
    arrays = []
    for layer in like.layers:
        dims = [tensor.shape[3] * tensor.dtype.numbers for tensor in (layer.k, layer.v) if tensor]
        arrays.append([np.zeros((room[0], layer.num_kv_heads, room[1], d), "f4") for d in dims])
    layers = tuple(
        CacheDesc.from_kv(*(describe(array, Layout.BLOCK_HND) for array in pair)) for pair in arrays
    )
    return CacheView(layers, facts, dense=True), arrays


def _rotate(arrays: list[list[np.ndarray]], rotation: Rotation) -> None:
    for pair in arrays:
        for array, order in zip(pair, rotation, strict=True):
            if order:
                hadamard(array, order)
