"""The facts of a transformers model's cache."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, TypeVar

from kvx_adapters.transformers.rotary import Rotation, rotations
from kvx_adapters.transformers.sizes import kv_layers
from kvx_core import CacheFacts, DType, InvalidArgumentError, UnsupportedError

_T = TypeVar("_T")


def cache_facts(
    model: Any, *, fingerprint: str | None = None, allow_unknown: bool = False
) -> CacheFacts:
    """The facts of a transformers model's cache; None where layers differ, see `layer_groups`.

    model:         a PreTrainedModel with a decoder, alone or in a model of several modalities. Its
                   rotary embedding is run once for each type of layer
    fingerprint:   of the model as it is computed, see `model_record`
    allow_unknown: leave the rotation None where it is not known, instead of raising. Caches of
                   transformers then take each other's keys, and no other engine takes them
    Raises UnsupportedError, which names why the rotation is not known.
    """
    layers = kv_layers(model.config.get_text_config(decoder=True))
    rotation = _shared(list(_rotations(model, allow_unknown).values()))
    order, dim = (None, None) if rotation is None else rotation
    return CacheFacts(
        engine=f"transformers {sys.modules['transformers'].__version__}",
        fingerprint=fingerprint,
        rotary=order,
        rotary_dim=dim,
        rope_applied=None if order is None else True,
        hadamard=False,
        scale_convention="multiply",  # there are no scales
        num_layers=len(layers),
        first_layer=0,
        window=_shared([layer.window for layer in layers]),
        total_kv_heads=_shared([layer.num_kv_heads for layer in layers]),
        first_kv_head=0,
        compute_dtype=_dtype(model),
        negative_slots="wrap",  # -1 indexes the last token
    )


def facts_of_layers(model: Any, facts: CacheFacts) -> dict[int, CacheFacts]:
    """The facts of each layer that keeps keys and values, by its index in the model.

    facts: of all of them, see `cache_facts`: their rotation stays where the model's is not known
    """
    turning = _rotations(model, allow_unknown=True)
    found = {}
    for layer in kv_layers(model.config.get_text_config(decoder=True)):
        own = replace(facts, window=layer.window, total_kv_heads=layer.num_kv_heads)
        # A type that does not turn has the order of those that do.
        rotation = turning.get(layer.kind, turning.get("", _shared(list(turning.values()))))
        if rotation is not None:
            own = replace(own, rotary=rotation.order, rotary_dim=rotation.dim, rope_applied=True)
        found[layer.layer] = own
    return found


def _rotations(model: Any, allow_unknown: bool) -> dict[str, Rotation]:
    try:
        return rotations(model)
    except UnsupportedError:
        if not allow_unknown:
            raise
        return {}


def _shared(values: list[_T]) -> _T | None:
    """What all have in common."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _dtype(model: Any) -> DType | None:
    try:
        return DType.of(getattr(model, "dtype", None))
    except InvalidArgumentError:
        return None
