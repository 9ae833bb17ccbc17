"""A Llama of random weights, the same in every process, which each engine loads in its own form."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from kvx_adapters.cli.engines import Model

WINDOW = 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(kind: Any, config: Any) -> Any:
    torch.manual_seed(1)
    return kind(config).eval().requires_grad_(False)


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@cache
def llama() -> Model:
    """Three layers of two KV heads of 32, float32."""
    return Model(
        made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)), "tiny llama"
    )


@cache
def mistral() -> Model:
    """The same with a window of 9 tokens in all layers."""
    config = transformers.MistralConfig(**SIZES, sliding_window=WINDOW)
    return Model(made(transformers.MistralForCausalLM, config), "tiny mistral")
