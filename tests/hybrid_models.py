"""Tiny hybrid models of transformers, whose states decay slowly.

With the usual random numbers a state forgets within a few tokens, and proves nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_CONV = ["conv", "full_attention"] * 2

# The configuration of each family beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**_GDN, **_EXPERTS, "layer_types": _LINEAR},
    "Qwen3_5": {**_GDN, "layer_types": _LINEAR},
    "Qwen3_5Moe": {**_GDN, **_EXPERTS, "layer_types": _LINEAR},
    "OlmoHybrid": {**_GDN, "layer_types": _LINEAR},
    "GraniteMoeHybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "Bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 128},
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 12,
        "conv_kernel": 4,
    },
    "Zamba2": {
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "use_mem_rope": False,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
    },
    "Jamba": {
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
    },
    "KimiLinear": {
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "layer_types": _LINEAR,
        "mlp_layer_types": ["dense"] * 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "Lfm2": {"conv_L_cache": 3, "layer_types": _CONV, "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": {**_EXPERTS, "conv_L_cache": 3, "layer_types": _CONV, "num_dense_layers": 4},
}


@cache
def hybrid_model(family: str) -> Any:
    """A model in float32."""
    torch.manual_seed(3)
    kind = "TextConfig" if family.startswith("Qwen3_5") else "Config"
    sizes = SIZES | FAMILIES[family]
    if "kv_lora_rank" in sizes:
        del sizes["head_dim"]
    config = getattr(transformers, f"{family}{kind}")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    return slowly_decaying(model)


def slowly_decaying(model: Any) -> Any:
    """The model, its decays changed: states keep 0.98 to 0.9998 of themselves per token."""
    for name, weight in model.state_dict().items():
        if name.endswith("A_log"):
            decays = torch.logspace(-3.7, -1.7, weight.numel()).log()
            weight.copy_(decays.view(weight.shape))
        if name.endswith("dt_bias"):
            weight.zero_()
    return model


def prompt(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=generator)
