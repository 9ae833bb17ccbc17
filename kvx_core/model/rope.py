"""Rotary parameters in one standard form, whichever version of transformers wrote them.

Up to transformers 4 a config has rope_theta and rope_scaling; since 5 it has rope_parameters, one
set or one per layer type. Equal meanings get equal forms here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# The parameters of each layer type; "": those of all layers, if they do not differ.
Rope = dict[str, dict[str, Any]]

KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_TYPES = {"su": "longrope", "mrope": "default"}
# Types that scale by the length that the model was first trained for. A length given in the config
# itself overrides the one in parameters of all layers, and not those of a type of layer.
# Source: transformers 5.19 modeling_rope_utils.py, RotaryEmbeddingConfigMixin
_BY_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_NOT_APPLIED = ("partial_rotary_factor", "rope_dim", "mrope_section", "mrope_interleaved")


def standard_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary parameters of a decoder's config; {} if it has none.

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
        name: _standard(value, config, is_nested)
        for name, value in (nested if is_nested else {"": found}).items()
    }
    first, *others = rope.values()
    return {"": first} if all(other == first for other in others) else rope


def _standard(
    parameters: Mapping[str, Any], config: Mapping[str, Any], is_nested: bool
) -> dict[str, Any]:
    found = {key: number(value) for key, value in parameters.items() if value is not None}
    kind = found.pop("type", "default")
    kind = found.get("rope_type", kind)
    found["rope_type"] = _TYPES.get(kind, kind) if isinstance(kind, str) else repr(kind)
    if "rope_theta" not in found and config.get("rope_theta") is not None:
        found["rope_theta"] = number(config["rope_theta"])
    factor = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    found.pop("partial_rotary_factor", None)
    if factor not in (None, 1):
        found["partial_rotary_factor"] = number(factor)
    if found["rope_type"] in _BY_ORIGINAL_LENGTH:
        name = "original_max_position_embeddings"
        of_all = None if is_nested else config.get(name)
        length = of_all or found.get(name) or config.get("max_position_embeddings")
        if length is not None:
            found[name] = number(length)
    return found


def number(value: Any) -> Any:
    """Converts integers to floats, also in mappings and lists: 10000 and 10000.0 become equal."""
    if isinstance(value, Mapping):
        return {key: number(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [number(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def as_applied(
    rope: Rope,
    *,
    num_tokens: int,
    max_position_embeddings: float | None,
    is_transformers: bool = False,
) -> Rope:
    """`rope` as an engine applies it to texts of up to `num_tokens` tokens.

    longrope has two lists of factors: the long one is used if num_tokens exceeds the length that
    the model was first trained for.
    is_transformers: scale longrope as transformers does, not as vLLM does
    Leaves out how much of a head rotates (CacheFacts.rotary_dim says it), and the sections of
    multimodal rotation: a text token has the same position in all of them.
    Source: transformers 5.19 modeling_rope_utils.py; vllm 0.32 model_executor/layers/
    rotary_embedding/phi3_long_rope_scaled_rope.py, dynamic_ntk_scaling_rope.py
    """
    found = {}
    for name, parameters in rope.items():
        kept = {key: value for key, value in parameters.items() if key not in _NOT_APPLIED}
        if kept.get("rope_type") == "longrope":
            kept = _longrope(kept, num_tokens, max_position_embeddings, is_transformers)
        elif kept.get("rope_type") == "dynamic":
            kept["max_position_embeddings"] = number(max_position_embeddings)
        found[name] = kept
    return found


def _longrope(
    parameters: dict[str, Any],
    num_tokens: int,
    max_position_embeddings: float | None,
    is_transformers: bool,
) -> dict[str, Any]:
    original = parameters.pop("original_max_position_embeddings")
    lists = {kind: parameters.pop(f"{kind}_factor") for kind in ("short", "long")}
    scales = {kind: parameters.pop(f"{kind}_mscale", None) for kind in ("short", "long")}
    factor, attention = parameters.pop("factor", None), parameters.pop("attention_factor", None)
    used = "long" if num_tokens > original else "short"
    ratio = (max_position_embeddings or original) / original
    if is_transformers:
        ratio = ratio if factor is None else factor
        scaling = attention
    else:
        scaling = scales[used]
    if scaling is None:
        scaling = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    return parameters | {"factors": lists[used], "scaling": scaling}
