"""Small hybrid models that have learned a text, and the engines whose caches hold rows of it.

Each row is a sequence of ROWS, and what is compared is the text that an engine goes on with: the
best token is far ahead of the second one, so that rounding does not decide. vLLM's engine is in
hybrid_pairs.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import torch
import transformers
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from kvx_adapters import mlx as adapter
from kvx_adapters import transformers as hf
from kvx_core import CacheFacts, CacheSpan, CacheView
from tests.hybrid_models import slowly_decaying
from tests.native import ROOT
from tests.vllm_plugin.hybrids import made, save

PROMPT, ANSWER = 120, 36
_TEXT = (ROOT / "LICENSE").read_bytes()
ROWS = [list(_TEXT[160 * i :][: PROMPT + ANSWER]) for i in range(5)]  # bytes are tokens
# Two layers, one of each kind, learn it in seconds.
_SIZES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {"layer_types": ["linear_attention", "full_attention"]},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"], "mamba_chunk_size": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
}
FAMILIES = tuple(_SIZES)
_LEARNING = {"Qwen3Next": (65, 6e-3), "GraniteMoeHybrid": (100, 4e-3), "Lfm2": (75, 6e-3)}
# What mlx-lm calls otherwise in config.json.
_IN_MLX: dict[str, dict[str, Any]] = {
    "Qwen3Next": {"full_attention_interval": 2},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "nope",
    },
    "Lfm2": {
        "full_attn_idxs": [1],
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
    },
}


def trained(family: str, directory: Path) -> Any:
    """A model of transformers in bfloat16 that has learned ROWS. Saves it for vLLM."""
    torch.manual_seed(0)
    model = made(family, num_hidden_layers=2, initializer_range=0.02, **_SIZES[family])
    with torch.no_grad():
        slowly_decaying(model)
    ids = torch.tensor(ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    steps, rate = _LEARNING[family]
    for step in range(steps):
        part = min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate * max(part, 0.05)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return save(model.requires_grad_(False), directory, family)


class Rows(Protocol):
    """The rows in the cache of a running engine, each as far as the others."""

    def prefill(self, num_tokens: int) -> None:
        """Computes the first tokens of each row."""

    def reserve(self, num_tokens: int, *, zero: bool = False) -> None:
        """Room for so many tokens of each row, to migrate into: full of numbers that are wrong, or
        of zeros.
        """

    def view(self) -> CacheView | CacheSpan:
        """Tokens and states of all rows, valid until the next step."""

    def go_on(self) -> list[list[int]]:
        """The rest of each prompt is computed; returns the ANSWER tokens behind each."""


class InTransformers:
    """Rows of a batch of a DynamicCache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = transformers.DynamicCache(config=model.config)
        self._held = 0

    @torch.inference_mode()
    def _step(self, ids: Sequence[Sequence[int]]) -> list[int]:
        logits = self._model(input_ids=torch.tensor(ids), past_key_values=self._cache).logits
        self._held += len(ids[0])
        found: list[int] = logits[:, -1].argmax(-1).tolist()
        return found

    def prefill(self, num_tokens: int) -> None:
        self._step([row[:num_tokens] for row in ROWS])

    def reserve(self, num_tokens: int, *, zero: bool = False) -> None:
        hf.reserve(self._cache, self._model, batch_size=len(ROWS), num_tokens=num_tokens)
        self._held = num_tokens
        for layer in self._cache.layers if not zero else ():
            if hasattr(layer, "keys"):
                layer.keys.fill_(1e3)
                layer.values.fill_(1e3)
            for part in ("conv_states", "recurrent_states"):
                tensor = getattr(layer, part, {}).get(0)
                if tensor is not None:
                    tensor.fill_(float("nan"))

    def view(self) -> CacheView:
        return hf.hybrid_view(self._cache, self._model, facts_of(self._model))

    def go_on(self) -> list[list[int]]:
        return _answers(self._step, self._held)


class InMlx:
    """Rows of a batch of a prompt cache, in float32: on CPU mlx has experts in no other dtype."""

    def __init__(self, model: Any, in_mlx: Any) -> None:
        self._model, self._in_mlx = model, in_mlx
        self._cache = make_prompt_cache(in_mlx)
        self._held = 0

    def _step(self, ids: Sequence[Sequence[int]]) -> list[int]:
        logits = self._in_mlx(mx.array(ids), cache=self._cache)
        self._held += len(ids[0])
        found: list[int] = mx.argmax(logits[:, -1], -1).tolist()
        return found

    def prefill(self, num_tokens: int) -> None:
        self._step([row[:num_tokens] for row in ROWS])

    def reserve(self, num_tokens: int, *, zero: bool = False) -> None:
        config = self._model.config
        sizes = {"num_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        adapter.reserve_states(self._cache, self._in_mlx.args, batch_size=len(ROWS))
        kv = [layer for layer in self._cache if isinstance(layer, KVCache)]
        adapter.reserve(kv, batch_size=len(ROWS), num_tokens=num_tokens, **sizes)
        self._held = num_tokens
        for layer in self._cache if not zero else ():
            if isinstance(layer, ArraysCache):
                layer.cache = [mx.full(one.shape, mx.nan, one.dtype) for one in layer.cache]
            else:
                layer.keys, layer.values = layer.keys + 1e3, layer.values + 1e3

    def view(self) -> CacheView:
        known = facts_of(self._model)
        own = adapter.cache_facts(
            rotary=known.rotary,
            rotary_dim=known.rotary_dim,
            num_layers=1,
            num_kv_heads=self._model.config.num_key_value_heads,
            fingerprint=known.fingerprint,
        )
        return adapter.hybrid_view(self._cache, self._in_mlx.args, own)

    def go_on(self) -> list[list[int]]:
        return _answers(self._step, self._held)


def in_mlx(model: Any, family: str, saved: Path, directory: Path) -> Any:
    """The model of `trained` in mlx-lm; saved: where it is for vLLM."""
    mx.set_default_device(mx.cpu)
    config = json.loads((saved / "config.json").read_text()) | _IN_MLX[family]
    rope = model.config.rope_parameters or {}
    config["rope_theta"] = rope.get("rope_theta", 1e4)
    (directory / "config.json").write_text(json.dumps(config))
    for file in saved.glob("*.safetensors"):
        (directory / file.name).symlink_to(file)
    found = load_model(directory)[0]
    found.set_dtype(mx.float32)
    return found


def facts_of(model: Any) -> CacheFacts:
    return hf.cache_facts(model, fingerprint="of one model")


def without_states(view: CacheView | CacheSpan) -> CacheView | CacheSpan:
    """Keys and values alone."""
    if isinstance(view, CacheSpan):
        return replace(view, view=replace(view.view, planes=(), state_tokens=None))
    return replace(view, planes=(), state_tokens=None)


def _answers(step: Any, held: int) -> list[list[int]]:
    tokens = [step([row[held:PROMPT] for row in ROWS])]
    while len(tokens) < ANSWER:
        tokens.append(step([[token] for token in tokens[-1]]))
    return [list(row) for row in zip(*tokens, strict=True)]
