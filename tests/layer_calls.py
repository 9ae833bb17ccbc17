"""Writes of all layers at once, and the loop over layers that they are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvx_core._c import abi
from tests.caches import Cache, assert_same_bytes, random_values
from tests.calls import Backend
from tests.reference import Layer

Tokens = list[tuple[Tensor, Tensor | None]]


def tokens_of(layers: Sequence[Layer], count: int, dtype: torch.dtype, seed: int) -> Tokens:
    """key and value of each layer: (count, heads, dim)."""
    found = []
    for i, layer in enumerate(layers):
        pair = [
            random_values((count, half.num_kv_heads, half.head_dim), dtype, 100 * seed + 2 * i + j)
            for j, half in enumerate(layer.halves())
        ]
        found.append((pair[0], pair[1] if len(pair) > 1 else None))
    return found


def some_slots(cache: Cache, count: int, seed: int) -> Tensor:
    """Different slots, one of them skipped."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(cache.num_blocks * cache.block_size, generator=generator)[:count]
    slots[count // 2] = -1
    return slots


class Write:
    """The C arguments of a call; `structs` may be changed before it is made."""

    def __init__(
        self, on: Backend, layers: Sequence[Layer], tokens: Tokens, slots: Tensor, flags: int = 0
    ) -> None:
        self.on, self.flags = on, flags
        self.caches = [on.layer(layer) for layer in layers]
        self.writes = [
            abi.kvx_write_desc_t(
                io=on.io(key, value, slots.numel()),
                slots=on.slots(slots),
                k_scale_desc=on.scale(layer.k),
                v_scale_desc=on.scale(layer.v),
            )
            for layer, (key, value) in zip(layers, tokens, strict=True)
        ]
        self.kept = tokens, slots

    def run(self) -> None:
        on = self.on
        library, mirror = on.library(), on.mirror
        stream = on.stream if mirror is None else mirror.stream
        caches = abi.pointer_array(self.caches, abi.kvx_cache_desc_t)
        writes = abi.pointer_array(self.writes, abi.kvx_write_desc_t)
        options = abi.kvx_write_options_t(flags=self.flags)
        if mirror is not None:
            mirror.upload()
        status = library.kvx_write_layers(
            caches, writes, len(self.caches), ctypes.byref(options), stream
        )
        if mirror is not None:
            mirror.download()
        abi.check(status, library)
        if not on.looks_first:
            abi.check(library.kvx_device_status(stream), library)


def check(on: Backend, cache: Cache, tokens: Tokens, slots: Tensor, flags: int = 0) -> None:
    """One call for all layers, and one call for each in a copy: the same bytes."""
    expected = cache.clone()
    for layer, (key, value) in zip(expected.layers, tokens, strict=True):
        on.write(layer, key, value, slots, flags=flags)
    Write(on, cache.layers, tokens, slots, flags).run()
    on.forget()
    assert_same_bytes(cache, expected)
