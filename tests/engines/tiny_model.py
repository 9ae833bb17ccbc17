"""The tiny model that every real engine of the tests runs: one set of weights, exported by each.

Random weights, so that any wrong key or value changes the greedy tokens. Sizes differ from each
other where an exporter tells tensors apart by their size: onnxruntime-genai takes any layer with
vocab_size outputs for the head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from kvx_adapters.cli.engines import Model
from tests.engines.engine import FINGERPRINT

VOCAB_SIZE = 512
HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = 640
NUM_LAYERS = 4
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64
MAX_TOKENS = 2048
ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-5


@cache
def model(dtype: torch.dtype = torch.float32) -> Any:
    """A LlamaForCausalLM without gradients; the same weights in every call and process."""
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    made = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)
    torch.random.set_rng_state(state)
    return made


@cache
def tiny() -> Model:
    """The model in float32, as the engines take it."""
    return Model(model(), FINGERPRINT)


def prompt(num_tokens: int) -> list[int]:
    """Token ids that do not repeat soon."""
    return [(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(num_tokens)]


@cache
def greedy(num_tokens: int, count: int) -> tuple[int, ...]:
    """The `count` greedy tokens after prompt(num_tokens), by transformers alone."""
    ids = torch.tensor([prompt(num_tokens)])
    with torch.inference_mode():
        found = model().generate(ids, max_new_tokens=count, do_sample=False)
    return tuple(found[0, num_tokens:].tolist())
