"""Makes the ModelRecord of a model that TensorRT-LLM serves, under which its tokens are stored.

An argument of the engine either does not matter, or is mapped to a field of the record. Any other
argument, unless it has its default, salts the record together with TensorRT-LLM's version. If it
is in none of the lists, it is logged too.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvx_adapters.tensorrt_llm_plugin import api
from kvx_core import ModelRecord, UnsupportedError, model_files_digest
from kvx_core.model.config_values import as_json, changed, values
from kvx_core.model.files import model_config_digest
from kvx_core.model.rope import Rope, as_applied, standard_rope

if TYPE_CHECKING:
    from kvx_adapters.tensorrt_llm_plugin.settings import Settings

logger = logging.getLogger("kvx")

# Source: TensorRT-LLM main 2026-09, llmapi/llm_args.py, BaseLlmArgs, TorchLlmArgs
DO_NOT_MATTER: dict[str, str] = {
    "token ids are the key, whoever made them": (
        "tokenizer tokenizer_mode tokenizer_revision custom_tokenizer skip_tokenizer_init "
        "num_postprocess_workers postprocess_tokenizer_dir"
    ),
    "what is asked of the logits comes after the keys and values": (
        "guided_decoding_backend batched_logits_processor gather_generation_logits "
        "reasoning_parser decoding_config sampler_type sampler_force_async_worker"
    ),
    "how one computation is shared out": (
        "tensor_parallel_size gpus_per_node moe_cluster_parallel_size moe_tensor_parallel_size "
        "moe_expert_parallel_size enable_lm_head_tp_in_adp attention_dp_config allreduce_strategy "
        "orchestrator_type mpi_session"
    ),
    "which tokens are computed when, in which batch": (
        "enable_chunked_prefill scheduler_config max_batch_size max_input_len max_num_tokens "
        "disable_overlap_scheduler batch_wait_timeout_ms batch_wait_timeout_iters "
        "batch_wait_max_tokens_ratio stream_interval"
    ),
    "how the same operations are run": (
        "cuda_graph_config moe_config nvfp4_gemm_config torch_compile_config enable_autotuner "
        "enable_min_latency garbage_collection_gen0_threshold backend enable_sleep"
    ),
    "what is observed": (
        "iter_stats_max_iterations request_stats_max_iterations otlp_traces_endpoint "
        "return_perf_metrics perf_metrics_max_requests enable_iter_perf_stats "
        "enable_iter_req_stats print_iter_log enable_layerwise_nvtx_marker"
    ),
    "requests with LoRA are neither stored nor loaded, and others are as without it": (
        "enable_lora lora_config peft_cache_config"
    ),
    "code that is run is in the model's files, and counts": "trust_remote_code revision",
    "this connector's own, and others'": "kv_connector_config cache_transceiver_config",
    "how blocks are kept; caches that hold something else are refused": (
        "kv_cache_config fail_fast_on_attention_window_too_large"
    ),
}
MAPPED: dict[str, str] = {
    "refused, see model.py": (
        "pipeline_parallel_size context_parallel_size enable_attention_dp attn_backend "
        "max_beam_width speculative_config sparse_attention_config pp_partition cp_config"
    ),
    "ModelRecord.files, weights, quantization, overrides": (
        "model load_format quant_config model_kwargs"
    ),
    "ModelRecord.rope": "max_seq_len",
    "CacheFacts.compute_dtype": "dtype",
}
COUNT: dict[str, str] = {
    "weights or activations may be quantised otherwise": "force_dynamic_quantization",
    "files may be read otherwise": "checkpoint_format checkpoint_loader",
}
_KNOWN = {
    name
    for judged in (DO_NOT_MATTER, MAPPED)
    for names in judged.values()
    for name in names.split()
}
_COUNTS = {name for names in COUNT.values() for name in names.split()}


def model_record(llm_args: Any, settings: Settings, directory: Path, config: Any) -> ModelRecord:
    """Returns the ModelRecord of an engine with these arguments.

    config: the model's config, with model_kwargs applied
    Raises UnsupportedError if the weights do not come from the model's files. Logs
    arguments in none of the lists above, unless they have their defaults.
    """
    engine = f"tensorrt_llm {api.version}"
    salts = changed(llm_args, [name for name in values(llm_args) if name not in _KNOWN])
    rope, as_others = _rope(llm_args, config)
    if not as_others:
        salts["rope"] = True
    unjudged = sorted(salts.keys() - _COUNTS - {"rope"})
    if unjudged:
        _warn(", ".join(f"{name}={salts[name]!r}" for name in unjudged))
    return ModelRecord(
        files=settings.fingerprint or _files(llm_args, settings, directory),
        architecture=config.model_type,
        rope=rope,
        latent=getattr(config, "kv_lora_rank", None) is not None,
        weights=_weights(llm_args, engine),
        quantization=_quantization(llm_args, directory, config, engine),
        overrides=as_json(getattr(llm_args, "model_kwargs", None) or {}),
        salts={"engine": engine, **salts} if salts else {},
    )


@functools.cache
def _warn(arguments: str) -> None:
    """Logs the arguments, once per process."""
    logger.warning(
        "KVX does not know whether %s matter to keys and values: this engine shares them only with "
        "engines of the same settings",
        arguments,
    )


def _load_format(llm_args: Any) -> str:
    return str(getattr(llm_args, "load_format", "auto")).lower().rpartition(".")[2]


def _files(llm_args: Any, settings: Settings, directory: Path) -> str:
    load_format = _load_format(llm_args)
    if load_format == "dummy":
        return model_config_digest(directory)
    if load_format not in ("0", "auto"):
        raise UnsupportedError(
            f"load_format is {llm_args.load_format!r}, so the weights are not those of "
            f"{directory}/*.safetensors. Give the settings a 'fingerprint' of your own, the same "
            "for all engines that serve these weights and for no others"
        )
    return model_files_digest(directory, sample=settings.fingerprint_sampling)


def _weights(llm_args: Any, engine: str) -> str:
    """Returns "files", or a text on random weights, which depend on rank, shape and dtype."""
    if _load_format(llm_args) != "dummy":
        return "files"
    dtype = getattr(llm_args, "dtype", "auto")
    return f"dummy of {engine}, {dtype}, {llm_args.tensor_parallel_size} ranks"


def _quantization(
    llm_args: Any, directory: Path, config: Any, engine: str
) -> dict[str, Any] | None:
    """Returns the quantisation done while loading; None: none, or the files are quantised.

    TensorRT-LLM fills quant_config from the files as well.
    """
    is_quantized = (
        getattr(config, "quantization_config", None) is not None
        or (directory / "hf_quant_config.json").is_file()
    )
    quant_config = getattr(llm_args, "quant_config", None)
    if is_quantized or getattr(quant_config, "quant_algo", None) is None:
        return None
    found = getattr(quant_config, "__dict__", quant_config)
    return {"engine": engine, "config": as_json(found)}


def _rope(llm_args: Any, config: Any) -> tuple[Rope, bool]:
    """Returns the rotary parameters as applied, and True if other engines apply them alike.

    They differ with a dynamic embedding if sequences can be longer than the config's length: the
    angles then depend on the length. It is not known which factors TensorRT-LLM uses for longrope.
    Source: TensorRT-LLM main 2026-09, _torch/attention_backend/interface.py, RopeParams
    """
    rope = standard_rope(config.to_dict())
    kinds = {parameters["rope_type"] for parameters in rope.values()}
    length = getattr(config, "max_position_embeddings", None)
    longest = getattr(llm_args, "max_seq_len", None)
    is_short = longest is not None and length is not None and longest <= length
    plain = {"default", "linear", "llama3", "yarn"} | ({"dynamic"} if is_short else set())
    if kinds <= plain:
        return as_applied(rope, num_tokens=0, max_position_embeddings=length), True
    for parameters in rope.values():
        parameters["max_seq_len"] = longest
    return rope, False
