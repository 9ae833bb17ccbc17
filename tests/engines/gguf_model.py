"""The tiny models as GGUF files, by gguf-py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFWriter

from tests.engines import tiny_model, windows_model

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


def write(path: Path, architecture: Architecture) -> None:
    """Writes the file.

    architecture: "llama" rotates neighbouring dims, so that the rows of its query and key weights
                  are reordered, as conversion does; "qwen2" rotates halves, as transformers does;
                  "olmo2" has the weights of windows_model.py
    """
    model = tiny_model
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(model.MAX_TOKENS)
    writer.add_embedding_length(model.HIDDEN_SIZE)
    writer.add_block_count(model.NUM_LAYERS)
    writer.add_feed_forward_length(model.INTERMEDIATE_SIZE)
    writer.add_head_count(model.NUM_HEADS)
    writer.add_head_count_kv(model.NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(model.RMS_NORM_EPS)
    writer.add_rope_freq_base(model.ROPE_THETA)
    writer.add_rope_dimension_count(model.HEAD_DIM)
    writer.add_vocab_size(model.VOCAB_SIZE)
    writer.add_tokenizer_model("none")
    heads = {"attn_q": model.NUM_HEADS, "attn_k": model.NUM_KV_HEADS, "attn_v": model.NUM_KV_HEADS}
    windows = architecture == "olmo2"
    if windows:
        writer.add_sliding_window(windows_model.WINDOW)
        writer.add_sliding_window_pattern([True] * (model.NUM_LAYERS - 1) + [False])
    names = _OLMO2 if windows else _LAYER
    source = windows_model.model() if windows else model.model()
    for name, tensor in source.state_dict().items():
        weights = tensor.numpy()
        stored = _TOP.get(name)
        if stored is None:
            _, _, layer, rest = name.split(".", 3)
            kind = names[rest.removesuffix(".weight")]
            stored = f"blk.{layer}.{kind}.weight"
            if architecture == "llama" and kind in ("attn_q", "attn_k"):
                halves = weights.reshape(heads[kind], 2, model.HEAD_DIM // 2, -1)
                weights = halves.swapaxes(1, 2).reshape(weights.shape)
            if architecture == "qwen2" and kind in heads:
                bias = np.zeros(heads[kind] * model.HEAD_DIM, np.float32)
                writer.add_tensor(f"blk.{layer}.{kind}.bias", bias)
        writer.add_tensor(stored, np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
