"""Pools of several kinds of layers: sliding windows beside full attention, or recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx_adapters.sglang.pools import Scales, cache_view, loading
from kvx_core import (
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    SlotMapping,
    UnsupportedError,
)
from kvx_core.argument_checks import integer
from kvx_core.desc.facts import first_layer_of


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one pool, whose tokens lie at the same slots.

    layers: their indices in the model
    view:   of these layers
    window: in tokens; 0 for full attention
    """

    layers: tuple[int, ...]
    view: CacheView
    window: int
    _pool: Any  # SWAKVPool whose window this is; None: slots are those of req_to_token

    def slots(self, slots: Tensor) -> SlotMapping:
        """The slots of tokens in these layers, for view.at(slots=...).

        slots: (num_tokens,), int64, of req_to_token: see `request_slots`. Of a window only the last
               tokens are there, at slots of their own. Waits for a device
        Raises InvalidArgumentError for tokens that the window has left behind.
        Source: sglang 0.5.23 mem_cache/swa_memory_pool.py, translate_loc_from_full_to_swa
        """
        if self._pool is None:
            return SlotMapping.of(slots)
        mapping = self._pool.full_to_swa_index_mapping
        if mapping is None:
            raise InvalidArgumentError(
                "pool.full_to_swa_index_mapping is None, expected the table of its allocator. "
                "Make the SWATokenToKVPoolAllocator first: it calls register_mapping"
            )
        outside = ((slots < 0) | (slots >= len(mapping))).nonzero()
        found = mapping[slots.clamp(0, len(mapping) - 1)].to(torch.int64)
        missing = outside if outside.numel() else (found < 1).nonzero()
        if missing.numel():
            i = int(missing[0])
            raise InvalidArgumentError(
                f"slots[{i}] is {int(slots[i])}, which has no slot in the window of the layers "
                f"{self.layers}. Give the last {self.window} tokens of each request: "
                "request_slots(..., starts=...)"
            )
        return SlotMapping.of(found)


def layer_groups(
    pool: Any,
    facts: CacheFacts,
    *,
    window: int = 0,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[LayerGroup, ...]:
    """The attention layers of a pool by where their tokens lie, zero-copy, full attention first.

    pool:   SWAKVPool, HybridLinearKVPool, or one that `cache_view` takes
    facts:  of the whole pool; the layers of each group and its window are filled in
    window: of the sliding layers, in tokens; SWAKVPool needs it
    k_scales, v_scales: as in `cache_view`, per layer of the model that has attention, in order
    The recurrent states beside HybridLinearKVPool are not in the views: see `state_view`.
    Raises UnsupportedError, InvalidArgumentError.
    Source: sglang 0.5.23 mem_cache/swa_memory_pool.py, SWAKVPool; memory_pool.py,
    HybridLinearKVPool
    """
    kind, width = type(pool).__name__, integer("window", window)
    if kind == "SWAKVPool":
        if width < 1:
            raise InvalidArgumentError(
                "window is 0, expected the tokens of the sliding layers: the model's "
                "sliding_window_size"
            )
        places = pool.layers_mapping
        full = _ordered({layer: at for layer, (at, swa) in places.items() if not swa})
        sliding = _ordered({layer: at for layer, (at, swa) in places.items() if swa})
        parts = [(pool.full_kv_pool, full, 0), (pool.swa_kv_pool, sliding, width)]
    elif kind == "HybridLinearKVPool":
        parts = [(pool.full_kv_pool, _ordered(pool.full_attention_layer_id_mapping), width)]
    else:
        first = integer("pool.start_layer", getattr(pool, "start_layer", 0))
        count = integer("pool.layer_num", getattr(pool, "layer_num", 0))
        parts = [(pool, tuple(range(first, first + count)), width)]
    attention = sorted(layer for _, layers, _ in parts for layer in layers)
    groups = []
    for part, layers, of_window in parts:
        if not layers:
            continue
        own = [
            _part(name, given, attention, layers)
            for name, given in (("k_scales", k_scales), ("v_scales", v_scales))
        ]
        of_group = replace(
            facts,
            num_layers=len(layers),
            first_layer=first_layer_of(layers),
            window=of_window,
        )
        view = cache_view(part, of_group, k_scales=own[0], v_scales=own[1])
        if part is not pool:
            view = replace(view, outdated=partial(_outdated, pool, view.outdated))
        swa = pool if kind == "SWAKVPool" and part is pool.swa_kv_pool else None
        groups.append(LayerGroup(layers, view, of_window, swa))
    return tuple(groups)


def _outdated(pool: Any, of_part: Callable[[], str | None] | None) -> str | None:
    """Why a group cannot be used: its own pool, or what is loaded into the pools together."""
    return (None if of_part is None else of_part()) or loading(pool)


def _ordered(places: dict[int, int]) -> tuple[int, ...]:
    """Layers of the model in the order of their places in a pool."""
    if sorted(places.values()) != list(range(len(places))):
        raise UnsupportedError(
            f"the layers of a pool are at {sorted(places.values())}, expected 0 to "
            f"{len(places) - 1}: pools of shared layers are not described"
        )
    return tuple(sorted(places, key=lambda layer: places[layer]))


def _part(
    name: str, given: Scales | None, attention: list[int], layers: tuple[int, ...]
) -> Scales | None:
    if given is None:
        return None
    if len(given) != len(attention):
        raise InvalidArgumentError(
            f"{name} has {len(given)} entries, expected {len(attention)}, one per layer of "
            "attention"
        )
    return [given[attention.index(layer)] for layer in layers]
