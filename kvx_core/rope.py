"""Rotary parameters written one way, whichever version of transformers wrote them.

Until transformers 4 a config has rope_theta and rope_scaling, since 5 rope_parameters, flat or one
per layer type. Both mean the same, and so they become the same here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# The parameters of each layer type; "" is the type of all layers where they do not differ.
Rope = dict[str, dict[str, Any]]

KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_TYPES = {"su": "longrope", "mrope": "default"}
# Types that scale by the length that the model was first trained for. Where it stands beside the
# parameters it goes before theirs.
# Source: transformers 5.19 modeling_rope_utils.py, RotaryEmbeddingConfigMixin
_BY_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


def standard_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary parameters of a decoder's config; {} if it has none of its own.

    config: config.json's object for the decoder, or what to_dict() of a loaded config makes of it
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        return {"": {"rope_type": repr(found)}}
    nested = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    is_nested = bool(nested) and len(nested) == sum(value is not None for value in found.values())
    if not is_nested and not found and config.get("rope_theta") is None:
        return {}
    rope = {
        name: _standard(value, config)
        for name, value in (nested if is_nested else {"": found}).items()
    }
    first, *others = rope.values()
    return {"": first} if all(other == first for other in others) else rope


def longrope_scaling(max_position_embeddings: float, original: float) -> float:
    """What cos and sin of longrope are multiplied by where the config does not say."""
    scale = max_position_embeddings / original
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))


def _standard(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: number(value) for key, value in parameters.items() if value is not None}
    kind = found.pop("type", "default")
    kind = found.get("rope_type", kind)
    found["rope_type"] = _TYPES.get(kind, kind)
    if "rope_theta" not in found and config.get("rope_theta") is not None:
        found["rope_theta"] = number(config["rope_theta"])
    factor = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    found.pop("partial_rotary_factor", None)
    if factor not in (None, 1):
        found["partial_rotary_factor"] = number(factor)
    if found["rope_type"] in _BY_ORIGINAL_LENGTH:
        name = "original_max_position_embeddings"
        length = config.get(name) or found.get(name) or config.get("max_position_embeddings")
        if length is not None:
            found[name] = number(length)
    return found


def number(value: Any) -> Any:
    """Integers as the floats that they are equal to, in lists too: 10000 and 10000.0 are one."""
    if isinstance(value, (list, tuple)):
        return [number(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
