"""The ModelRecord of the model that vLLM serves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from kvx_adapters.vllm.salts import salts
from kvx_core import ModelRecord
from kvx_core.model.config_values import as_json
from kvx_core.model.record import without_rope
from kvx_core.model.rope import KEYS, Rope, as_applied, standard_rope

logger = logging.getLogger("vllm.kvx")

# Values of load_format that load the tensors of *.safetensors; bitsandbytes quantises them.
_SAFETENSORS = (
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
)
# Rotary types whose angles depend on the config alone, and longrope and dynamic, which as_applied
# knows. Source: vllm 0.32 model_executor/layers/rotary_embedding/__init__.py, get_rope
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
# Fields that a model sets in its config when it is made: in workers, not in the scheduler.
# Source: vllm 0.32 model_executor/models/{deepseek_v2,AXK1,openpangu,interns1_pro}.py
_WRITTEN_TYPES = {
    "deepseek_llama_scaling": "yarn",
    "deepseek_yarn": "yarn",
    "openpangu": "default",
}
_WRITTEN = ("fope_init_factor", "fope_sep_head", "num_inv_freq", "num_key_value_heads", "use_fope")
# By a checkpoint's own method: vLLM's methods that implement the same.
# Source: vllm 0.32 model_executor/layers/quantization/*.py, override_quantization_method
_SAME_METHOD = {
    "awq": ("auto_awq", "awq_marlin"),
    "gptq": ("auto_gptq", "gptq_marlin"),
    "mxfp4": ("gpt_oss_mxfp4",),
}


def model_record(
    vllm_config: Any, files: str, environment: Mapping[str, str], *, version: str
) -> ModelRecord:
    """The ModelRecord of an engine with this configuration.

    files:       the digest of the model's files, or the user's own name for them; with
                 load_format "dummy" the digest of its config alone
    environment: os.environ
    version:     vllm.__version__
    Logs settings that are in none of the lists of judged_fields.py.
    """
    model = vllm_config.model_config
    found, unjudged = salts(vllm_config, environment, version=version)
    if unjudged:
        _warn(", ".join(f"{name}={found[name]!r}" for name in unjudged))
    own = _own_class(model)
    if own is not None:
        found = {"engine": f"vllm {version}", "model class": own, **found}
    if model.is_hybrid:  # a state is rounded in every step, and all that follows depends on it
        cache = vllm_config.cache_config
        found["states"] = f"{cache.mamba_cache_dtype}, {cache.mamba_ssm_cache_dtype}"
    text = model.hf_text_config
    return ModelRecord(
        files=files,
        architecture=text.model_type,
        rope=_rope(model),
        latent=bool(model.use_mla),
        weights=_weights(vllm_config, version),
        quantization=_quantization(model, version),
        overrides=_overrides(model),
        salts=found,
    )


@functools.cache
def _warn(settings: str) -> None:
    """Logs once per process: one process may run both halves of a connector."""
    logger.warning(
        "KVX does not know whether %s matter to keys and values: this engine shares them only with "
        "engines of the same settings",
        settings,
    )


def loads_files(vllm_config: Any) -> bool:
    """Whether the weights are the tensors of the directory's *.safetensors."""
    load_format = vllm_config.load_config.load_format
    return getattr(load_format, "value", load_format) in _SAFETENSORS


def _weights(vllm_config: Any, version: str) -> str:
    """ "files", or how random weights were made: by rank, from their shapes and dtype.

    Source: vllm 0.32 model_executor/model_loader/weight_utils.py, initialize_dummy_weights
    """
    load_format = vllm_config.load_config.load_format
    if getattr(load_format, "value", load_format) != "dummy":
        return "files"
    parallel, dtype = vllm_config.parallel_config, vllm_config.model_config.dtype
    ranks = f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}"
    return f"dummy of vllm {version}, {dtype}, {ranks} ranks"


def _own_class(model: Any) -> str | None:
    """The class that computes the model, if it is not vLLM's own for this architecture.

    A plugin or a setting may have replaced it. vLLM does not know how transformers' classes rotate
    keys, so that their caches cannot be compared with those of vLLM's own classes.
    Source: vllm 0.32 model_executor/models/registry.py, _LazyRegisteredModel, _RegisteredModel
    """
    entry = model.registry.models.get(model.architecture)
    kind = getattr(entry, "model_cls", None)
    module = str(getattr(entry, "module_name", None) or getattr(kind, "__module__", "vllm."))
    name = getattr(entry, "class_name", None) or getattr(kind, "__qualname__", "")
    is_own = module.startswith("vllm.") and ".transformers" not in module
    return None if is_own else f"{module}:{name}"


def _rope(model: Any) -> Rope:
    text = model.hf_text_config
    length = getattr(text, "max_position_embeddings", None)
    found = standard_rope(text.to_dict())
    for parameters in found.values():
        kind = parameters["rope_type"]
        parameters["rope_type"] = _WRITTEN_TYPES.get(kind, kind)
        by_length = parameters.get("use_fope", False)
        for name in _WRITTEN:
            parameters.pop(name, None)
        if by_length or parameters["rope_type"] not in _ROPE_TYPES:
            parameters["max_model_len"] = float(model.max_model_len)
    return as_applied(found, num_tokens=model.max_model_len, max_position_embeddings=length)


def _quantization(model: Any, version: str) -> dict[str, Any] | None:
    """Quantisation that the files do not describe; None if there is none.

    Versions may quantise differently, so the version is part of it.
    """
    method, online = model.quantization, model.quantization_config
    method = getattr(method, "value", method)
    stored = _stored_method(model)
    if online is None and (method is None or _runs(method, stored)):
        return None
    return {
        "engine": f"vllm {version}",
        "method": method,
        "stored": stored,
        "config": as_json(online),
    }


def _stored_method(model: Any) -> str | None:
    """The quantisation method of the files."""
    config = model.model_arch_config.quantization_config
    return None if config is None else str(config.get("quant_method", "")).lower()


def _runs(method: str, stored: str | None) -> bool:
    if stored is None:
        return False
    # A method may have variants for what it quantises: modelopt and modelopt_fp4.
    kernels = _SAME_METHOD.get(stored, ())
    return method in (stored, *kernels) or method.startswith(f"{stored}_")


def _overrides(model: Any) -> dict[str, Any]:
    """The fields in which the config differs from the file that it was read from."""
    overrides = model.hf_overrides
    found: dict[str, Any]
    if callable(overrides):
        found = {"config": without_rope(as_json(model.hf_config.to_dict()))}
    else:
        found = dict(overrides)
        if "rope_parameters" in found and _is_applied(found, model.hf_text_config):
            found = without_rope(found)
    text = model.hf_text_config
    if text.model_type.startswith("llama4"):
        # Source: vllm 0.32 model_executor/models/llama4.py, Llama4ForCausalLM.__init__
        generation = dict(model.try_get_generation_config()) | model.override_generation_config
        # A length that vLLM determines itself changes after the model is made.
        is_found_out = getattr(model, "original_max_model_len", None) == -1
        by_length = "by length" if is_found_out else model.max_model_len > 32768
        found["attn_temperature_tuning"] = generation.get("attn_temperature_tuning", by_length)
    plain: dict[str, Any] = as_json(found)
    return plain


def _is_applied(overrides: Mapping[str, Any], text: Any) -> bool:
    """Whether the rotary parameters that were set are the config's, which the record has."""
    if any(name in overrides for name in KEYS if name != "rope_parameters"):
        return False
    config = text.to_dict()
    return standard_rope(config | {"rope_parameters": overrides["rope_parameters"]}) == (
        standard_rope(config)
    )
