"""Caches of the tests as sections of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvx_core import BlockTable, CacheDesc, CacheFacts, CacheView, ScaleDesc, Section, describe
from kvx_core.types import ScaleGranularity
from tests.caches import Cache
from tests.reference import Half, Layer

FACTS = CacheFacts(
    engine="here 1.0",
    fingerprint="abc",
    rotary="half",
    rotary_dim=4,
    rope_applied=True,
    hadamard=False,
    scale_convention="multiply",
    window=0,
)


def section_of(
    cache: Cache,
    layers: Sequence[int],
    blocks: Sequence[int] | BlockTable | None = None,
    *,
    heads: tuple[int, int] | None = None,
    null_block_id: int = -1,
    at: Sequence[int] | None = None,
    encoding: str = "values",
    **facts: Any,
) -> Section:
    """Some layers of a cache, those at `at`, as `layers` of the model.

    heads: (first one held here, all of the model); None: all are here
    """
    first, total = heads or (0, cache.layers[0].k.num_kv_heads)
    chosen = cache.layers if at is None else [cache.layers[i] for i in at]
    layers_held = tuple(map(_desc, chosen))
    dim = max(layer.head_dim for layer in layers_held)
    facts = {"rotary_dim": min(4, dim - dim % 2)} | facts
    view = CacheView(
        layers=layers_held,
        facts=replace(FACTS, first_kv_head=first, total_kv_heads=total, **facts),
        k_scales=tuple(_scale(layer.k) for layer in chosen),
        v_scales=tuple(_scale(layer.v) for layer in chosen),
        null_block_id=null_block_id,
        dense=blocks is None,
    )
    table = blocks if blocks is None or isinstance(blocks, BlockTable) else [list(blocks)]
    return Section(tuple(layers), view, None if table is None else BlockTable.of(table), encoding)


def _desc(layer: Layer) -> CacheDesc:
    v = None if layer.v is None else describe(layer.v.tensor, layer.v.layout)
    return CacheDesc.from_kv(describe(layer.k.tensor, layer.k.layout), v)


def _scale(half: Half | None) -> ScaleDesc | None:
    if half is None or half.granularity is ScaleGranularity.NONE:
        return None
    return ScaleDesc.of(half.scale, half.granularity)
