"""A tiny model with sliding windows, of the sizes of tiny_model.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from kvx_adapters.cli.engines import Model
from tests.engines import tiny_model as sizes
from tests.engines.engine import FINGERPRINT

WINDOW = 16


@cache
def model() -> Any:
    """An Olmo3ForCausalLM in float32: three layers with a window of WINDOW tokens, then one of full
    attention. The same weights in every call and process."""
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    kinds = ["sliding_attention"] * (sizes.NUM_LAYERS - 1) + ["full_attention"]
    rope = {"rope_type": "default", "rope_theta": sizes.ROPE_THETA}
    config = transformers.Olmo3Config(
        vocab_size=sizes.VOCAB_SIZE,
        hidden_size=sizes.HIDDEN_SIZE,
        intermediate_size=sizes.INTERMEDIATE_SIZE,
        num_hidden_layers=sizes.NUM_LAYERS,
        num_attention_heads=sizes.NUM_HEADS,
        num_key_value_heads=sizes.NUM_KV_HEADS,
        max_position_embeddings=sizes.MAX_TOKENS,
        rms_norm_eps=sizes.RMS_NORM_EPS,
        rope_parameters=dict.fromkeys(kinds, rope),
        layer_types=kinds,
        sliding_window=WINDOW,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    made = transformers.Olmo3ForCausalLM(config).eval().requires_grad_(False)
    torch.random.set_rng_state(state)
    return made


@cache
def windowed() -> Model:
    """The model as the engines take it."""
    return Model(model(), FINGERPRINT)
