"""A tiny Llama of transformers, for tests of its caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


NUM_LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 16


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(name: str = "Llama", **fields: Any) -> Any:
    """A model of random weights; a field that is ... is left to the config's default."""
    torch.manual_seed(0)
    fields = {key: value for key, value in (SIZES | fields).items() if value is not ...}
    config = getattr(transformers, f"{name}Config")(**fields)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()
