"""Models as GGUF files, by gguf-py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFWriter

from kvx_adapters.cli.engines import Model

Architecture = Literal["llama", "qwen2", "olmo2"]
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OLMO2 = _LAYER | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def head_dim(source: Model) -> int:
    """Olmo3's config has none."""
    config = source.config
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def write(path: Path, source: Model, architecture: Architecture) -> None:
    """Writes the file.

    architecture: "llama" rotates neighbouring dims, so that the rows of its query and key weights
                  are reordered, as conversion does; "qwen2" rotates halves, as transformers does;
                  "olmo2" is for an Olmo3ForCausalLM, whose last layer has no window
    """
    config = source.config
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = head_dim(source)
    windows = architecture == "olmo2"
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(source.rope_theta)
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads, "attn_v": num_kv_heads}
    if windows:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in config.layer_types]
        )
    names = _OLMO2 if windows else _LAYER
    for name, tensor in source.llama.state_dict().items():
        weights = tensor.numpy()
        stored = _TOP.get(name)
        if stored is None:
            _, _, layer, rest = name.split(".", 3)
            kind = names[rest.removesuffix(".weight")]
            stored = f"blk.{layer}.{kind}.weight"
            if architecture == "llama" and kind in ("attn_q", "attn_k"):
                halves = weights.reshape(heads[kind], 2, dim // 2, -1)
                weights = halves.swapaxes(1, 2).reshape(weights.shape)
            if architecture == "qwen2" and kind in heads:
                bias = np.zeros(heads[kind] * dim, np.float32)
                writer.add_tensor(f"blk.{layer}.{kind}.bias", bias)
        writer.add_tensor(stored, np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
