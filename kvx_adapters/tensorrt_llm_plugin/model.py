"""Model: describes a model's cache and store, from TensorRT-LLM's arguments and the model's config.

TensorRT-LLM gives a connector the pool as a tensor of flat blocks, which does not show the numbers
of heads, tokens and dims, or their order. A model whose configuration does not show them is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm
from kvx_adapters.tensorrt_llm_plugin import api
from kvx_adapters.tensorrt_llm_plugin.identity import model_record
from kvx_adapters.tensorrt_llm_plugin.settings import Settings
from kvx_core import CacheView, DType, ModelRecord, UnsupportedError
from kvx_core.connector.local_model import local_model
from kvx_core.snapshot import Precision
from kvx_core.stores.prefix import PrefixStore

# Required values of arguments. With other values the cache does not hold each token's keys and
# values at its own place, or the model's files do not determine them.
_PLAIN_ARGS: dict[str, tuple[object, str]] = {
    "pipeline_parallel_size": (1, "a connector is given the layers of its own rank"),
    "context_parallel_size": (1, "ranks share out the tokens of a block"),
    "enable_attention_dp": (False, "ranks hold different requests"),
    "attn_backend": ("TRTLLM", "others may lay out a block differently"),
    "max_beam_width": (1, "blocks of beams are not told apart"),
    "speculative_config": (None, "drafts have layers of their own, and tokens that are rejected"),
    "sparse_attention_config": (None, "it keeps more caches than keys and values"),
}
_PLAIN_KV_CACHE: dict[str, tuple[object, str]] = {
    "enable_block_reuse": (True, "without it TensorRT-LLM computes what a connector has loaded"),
    "max_attention_window": (None, "blocks that leave a window are given to other requests"),
    "sink_token_length": (None, "then tokens are not at their own places"),
    "host_cache_size": (0, "offloaded blocks are not where their ids say"),
}

# is_neox by architecture: True if the halves of a head rotate together. It is the value of
# PositionalEmbeddingParams.is_neox that the modeling file sets, or its default.
# Source: TensorRT-LLM main 2026-09, _torch/models/modeling_{llama,mistral,mixtral,qwen,qwen3,
# deepseekv3}.py; _torch/attention_backend/interface.py
_IS_NEOX = {
    "deepseek_v3": False,
    "llama": True,
    "mistral": True,
    "mixtral": True,
    "qwen2": True,
    "qwen3": True,
}
_DTYPES = {torch.float16: "HALF", torch.bfloat16: "BF16", torch.float32: "FLOAT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that TensorRT-LLM serves. Raises UnsupportedError, InvalidArgumentError."""

    record: ModelRecord
    num_layers: int
    total_kv_heads: int
    head_dim: int
    kv_factor: int  # 1: MLA
    dtype: str  # of the pool: see PoolSpec
    compute_dtype: DType  # of the model's arithmetic
    tokens_per_block: int
    tensor_parallel_size: int
    is_neox: bool
    rotary_dim: int
    kv_scaling_factor: float  # used by an FP8 pool

    @classmethod
    def of(cls, llm_args: Any, settings: Settings) -> Self:
        """Makes a Model. llm_args: TensorRT-LLM's TorchLlmArgs"""
        _check(llm_args, "", _PLAIN_ARGS)
        _check(llm_args.kv_cache_config, "kv_cache_config.", _PLAIN_KV_CACHE)
        revision = getattr(llm_args, "revision", None)
        directory = local_model(str(llm_args.model), revision, "Give the directory of its files")
        config = _config(directory, llm_args)
        is_mla = getattr(config, "kv_lora_rank", None) is not None
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        compute_dtype = _compute_dtype(llm_args, config)
        dtype = _dtype(llm_args, compute_dtype)
        if dtype != "FP8" and settings.kv_scaling_factor != 1:
            raise UnsupportedError(
                f"kv_scaling_factor is {settings.kv_scaling_factor} and the pool is {dtype}, "
                "expected 1.0: only an FP8 pool has a factor. Leave it out"
            )
        is_neox, rotary_dim = _rotary(config, settings, head_dim)
        return cls(
            record=model_record(llm_args, settings, directory, config),
            num_layers=config.num_hidden_layers,
            total_kv_heads=1 if is_mla else heads,
            head_dim=config.kv_lora_rank + config.qk_rope_head_dim if is_mla else head_dim,
            kv_factor=1 if is_mla else 2,
            dtype=dtype,
            compute_dtype=DType.of(compute_dtype),
            tokens_per_block=llm_args.kv_cache_config.tokens_per_block,
            tensor_parallel_size=llm_args.tensor_parallel_size,
            is_neox=is_neox,
            rotary_dim=rotary_dim,
            kv_scaling_factor=settings.kv_scaling_factor,
        )

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model's record."""
        return self.record.fingerprint

    def heads_of(self, rank: int) -> tuple[int, int]:
        """Returns the heads of a rank: first, one past the last. With more ranks than heads, ranks
        share heads.

        Raises UnsupportedError.
        Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/resource_manager.py, KVCacheManager
        """
        total, ranks = self.total_kv_heads, self.tensor_parallel_size
        if max(total, ranks) % min(total, ranks):
            raise UnsupportedError(
                f"tensor_parallel_size is {ranks} with {total} KV heads, expected one to be a "
                "multiple of the other: else ranks hold heads of their own and shares of others"
            )
        first = rank * total // ranks
        return first, first + max(1, total // ranks)

    def spec(self, num_blocks: int, heads: tuple[int, int]) -> tensorrt_llm.PoolSpec:
        """Returns the spec of a pool with all layers and some heads."""
        return tensorrt_llm.PoolSpec(
            layers=tuple(range(self.num_layers)),
            num_blocks=num_blocks,
            tokens_per_block=self.tokens_per_block,
            num_kv_heads=heads[1] - heads[0],
            head_dim=self.head_dim,
            dtype=self.dtype,
            kv_factor=self.kv_factor,
        )

    def view(self, pool: Tensor, heads: tuple[int, int]) -> CacheView:
        """Returns a zero-copy view of a pool with some heads.

        Raises InvalidArgumentError if the pool does not match the model.
        """
        spec = self.spec(max(1, len(pool)), heads)
        facts = tensorrt_llm.cache_facts(
            spec,
            version=api.version,
            fingerprint=self.fingerprint,
            is_neox=self.is_neox,
            rotary_dim=self.rotary_dim,
            total_kv_heads=self.total_kv_heads,
            first_kv_head=heads[0],
            compute_dtype=self.compute_dtype,
        )
        factors = [self.kv_scaling_factor] * self.num_layers if self.dtype == "FP8" else None
        return tensorrt_llm.cache_view(spec, pool, facts, scaling_factors=factors)

    def store(self, settings: Settings) -> PrefixStore:
        """Opens the store that the settings name."""
        return settings.store(
            fingerprint=self.record,
            num_layers=self.num_layers,
            total_kv_heads=self.total_kv_heads,
            precision=Precision.of(self.compute_dtype, self.spec(1, (0, 1)).torch_dtype),
        )


def _check(args: Any, prefix: str, expected: dict[str, tuple[object, str]]) -> None:
    """Raises UnsupportedError for other values. An argument that args lacks has its default."""
    for name, (value, reason) in expected.items():
        found = getattr(args, name, value)
        if (found or None) != (value or None):
            raise UnsupportedError(
                f"{prefix}{name} is {found!r}, expected {value!r} with KVX's connector: {reason}"
            )


def _config(directory: Path, llm_args: Any) -> Any:
    """Returns the model's config. Raises UnsupportedError for images, sounds or windows."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        directory, trust_remote_code=getattr(llm_args, "trust_remote_code", False)
    )
    # Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/model_loader.py, model_kwargs
    config.update(getattr(llm_args, "model_kwargs", None) or {})
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedError(
            f"model is a {config.model_type}, expected a text-only model: a connector is not told "
            "which images or sounds stand behind a token"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds or (window is not None and getattr(config, "layer_types", None) is None):
        raise UnsupportedError(
            f"model is a {config.model_type} with layer_types {sorted(kinds)} and sliding_window "
            f"{window}, expected full attention in every layer"
        )
    return config


def _compute_dtype(llm_args: Any, config: Any) -> torch.dtype:
    """Returns the dtype that the model computes in. Raises UnsupportedError.

    Source: TensorRT-LLM main 2026-09, _torch/model_config.py, ModelConfig.torch_dtype
    """
    dtype = getattr(llm_args, "dtype", "auto")
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype not in _DTYPES:
        raise UnsupportedError(f"dtype is {dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    found: torch.dtype = dtype
    return found


def _dtype(llm_args: Any, compute_dtype: torch.dtype) -> str:
    """Returns the pool's dtype, by PoolSpec's names. register_kv_caches compares the tensor.

    Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/model_loader.py,
    validate_and_set_kv_cache_quant
    """
    asked = str(llm_args.kv_cache_config.dtype).lower()
    return _DTYPES[compute_dtype] if asked == "auto" else asked.upper()


def _rotary(config: Any, settings: Settings, head_dim: int) -> tuple[bool, int]:
    """Returns PositionalEmbeddingParams.is_neox and RopeParams.dim. Raises UnsupportedError.

    Source: TensorRT-LLM main 2026-09, _torch/attention_backend/interface.py, RopeParams.from_config
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    is_mla = getattr(config, "kv_lora_rank", None) is not None
    is_neox = settings.is_neox
    # For yarn, some modeling files set another is_neox.
    if is_neox is None and (is_mla or kind in ("default", "linear", "dynamic", "llama3")):
        is_neox = _IS_NEOX.get(config.model_type)
    if is_neox is None:
        raise UnsupportedError(
            f"model is a {config.model_type} with rope_type {kind!r}, expected one of "
            f"{', '.join(_IS_NEOX)} without rope scaling of its own. For others give the settings "
            "'is_neox' and 'rotary_dim', as TensorRT-LLM's modeling file has them"
        )
    factor = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    found = config.qk_rope_head_dim if is_mla else int(head_dim * (factor or 1))
    return is_neox, found if settings.rotary_dim is None else settings.rotary_dim
