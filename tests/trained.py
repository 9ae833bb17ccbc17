"""A small Llama that has learned, and the keys and values that it computes.

Random weights make random keys and values. Those of a trained model have what encodings meet:
channels of different sizes, and many numbers near zero. It learns the bytes of this repository's
license, a text that never changes, in a few seconds.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.native import ROOT

STEPS, ROWS, LENGTH = 200, 4, 48  # of training
TOKENS = 1024  # in the cache


class Trained(NamedTuple):
    """What a trained model leaves in its cache."""

    first_loss: float  # per byte, in nats, before the first step
    last_loss: float  # after the last
    entropy: float  # of a byte of the text, if nothing before it is known
    keys: list[Tensor]  # of each layer: (heads, tokens, dim) bfloat16, after the rotary embedding
    values: list[Tensor]


@cache
def trained() -> Trained:
    """Trains the model and lets it read text that it has not seen."""
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that share cores with other tests wait for each other
    try:
        return _trained(transformers)
    finally:
        torch.set_num_threads(threads)


def _trained(transformers: Any) -> Trained:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=TOKENS,
        )
    )
    license = torch.tensor(list((ROOT / "LICENSE").read_bytes()))
    text, unseen = license[:-TOKENS], license[-TOKENS:]
    steps = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses: list[float] = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (ROWS,)).tolist()
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.detach()))
        steps.zero_grad()
        loss.backward()
        steps.step()
    model = model.to(torch.bfloat16).eval()
    with torch.inference_mode():
        cached: Any = model(input_ids=unseen[None]).past_key_values
    layers = cached.layers
    return Trained(
        losses[0],
        sum(losses[-10:]) / 10,
        float(torch.distributions.Categorical(torch.bincount(text).float()).entropy()),
        [layer.keys[0].clone() for layer in layers],
        [layer.values[0].clone() for layer in layers],
    )
