"""The record of a transformers model: what it computes, as ModelRecord says it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from kvx_core import InvalidArgumentError, ModelRecord, UnsupportedError, model_files_digest
from kvx_core.model.config_values import as_json
from kvx_core.model.record import without_rope
from kvx_core.model.rope import Rope, as_applied, standard_rope

# Fields of a loaded config that change how the model is called, not what it computes.
_CALLING = (
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "eos_token_id",
    "experts_implementation",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "quantization_config",
    "return_dict",
    "use_cache",
)


def model_record(
    model: Any,
    directory: Path | str,
    *,
    files: str | None = None,
    num_tokens: int | None = None,
) -> ModelRecord:
    """The ModelRecord of a model loaded from a directory, with the config that it has now.

    model:      a PreTrainedModel whose weights are those of the files
    directory:  the model's files
    files:      the caller's own name for them; None: model_files_digest(directory)
    num_tokens: of the longest sequence, computed in one forward pass. Needed for rotary types that
                depend on it: longrope, dynamic
    Raises UnsupportedError for changes that files and config do not show, such as adapters;
    InvalidArgumentError.
    """
    if getattr(model, "peft_config", None):
        raise UnsupportedError(
            f"model has the adapters {sorted(model.peft_config)}, expected none: keys and values "
            "depend on them. Merge them, save the model and load it from there"
        )
    saved = type(model.config).from_pretrained(directory)
    text = model.config.get_text_config(decoder=True)
    overrides = dict(_changes(saved, model.config))
    if text.model_type.startswith("llama4"):
        overrides["attn_temperature_tuning"] = bool(text.attn_temperature_tuning)
    return ModelRecord(
        files=model_files_digest(directory) if files is None else files,
        architecture=text.model_type,
        rope=_rope(model, text, num_tokens),
        quantization=_quantization(saved, model.config),
        overrides=overrides,
    )


def _changes(saved: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """The fields in which a config differs from its file."""
    before, now = (without_rope(found.to_dict()) for found in (saved, config))
    for key in sorted(before.keys() | now.keys()):
        if key not in _CALLING and before.get(key) != now.get(key):
            yield key, as_json(now.get(key))


def _quantization(saved: Any, config: Any) -> dict[str, Any] | None:
    """Quantisation done while loading; None if the files say all of it.

    What the files leave open has its default there, and may have been chosen otherwise: dequantize.
    """
    said, now = (getattr(c, "quantization_config", None) or {} for c in (saved, config))
    if said and isinstance(said, Mapping) and not isinstance(now, Mapping):
        said = type(now).from_dict(dict(said))
    before, fields = _fields(said), _fields(now)
    if not fields or before == fields:
        return None
    return {
        "engine": f"transformers {sys.modules['transformers'].__version__}",
        "config": fields,
    }


def _fields(quantization: Any) -> dict[str, Any]:
    """Those of a quantization_config, a dict or an object of transformers, some of whose `to_dict`
    leave out what is chosen while loading."""
    found = quantization if isinstance(quantization, Mapping) else vars(quantization)
    plain = {name: one.value if isinstance(one, Enum) else one for name, one in found.items()}
    json: dict[str, Any] = as_json(plain)
    return json


def _rope(model: Any, config: Any, num_tokens: int | None) -> Rope:
    """The rotary parameters as applied. Raises UnsupportedError, InvalidArgumentError.

    Source: transformers 5.19 modeling_rope_utils.py, dynamic_rope_update
    """
    found = standard_rope(config.to_dict())
    kinds = {parameters["rope_type"] for parameters in found.values()}
    length = getattr(config, "max_position_embeddings", None)
    if kinds & {"longrope", "dynamic"} and num_tokens is None:
        raise InvalidArgumentError(
            f"num_tokens is None and the rotary embedding is of type {', '.join(sorted(kinds))}, "
            "expected the length of the longest sequence: its angles depend on it"
        )
    if "dynamic" in kinds and length is not None and (num_tokens or 0) > length:
        raise UnsupportedError(
            f"num_tokens is {num_tokens}, expected at most max_position_embeddings, {length}: "
            "beyond it the angles of a dynamic rotary embedding depend on the sequence's length"
        )
    for name, part in model.named_modules():
        is_fixed = not kinds & {"longrope", "dynamic"}
        if name.endswith("rotary_emb") and not _is_of_config(part, is_fixed):
            raise UnsupportedError(
                f"{name} is not what model.config says. Load the model with the rope_parameters "
                "that it should have: from_pretrained(directory, rope_parameters=...)"
            )
    return as_applied(
        found,
        num_tokens=num_tokens or 0,
        max_position_embeddings=length,
        is_transformers=True,
    )


def _is_of_config(embedding: Any, is_fixed: bool) -> bool:
    """Whether a rotary embedding has the frequencies that its config gives a new one.

    is_fixed: they do not change with the length of a sequence. Else only the original ones are
              compared
    """
    try:
        new = dict(type(embedding)(embedding.config).named_buffers())
    except (TypeError, AttributeError):
        return True  # its class is not made from a config
    own = dict(embedding.named_buffers())
    names = [name for name in new if name.endswith("inv_freq")]
    originals = [name for name in names if name.endswith("original_inv_freq")]
    return all(
        torch.equal(own[name].cpu().float(), new[name].cpu().float())
        for name in (names if is_fixed or not originals else originals)
    )
