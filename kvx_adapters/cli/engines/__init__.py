"""Real engines, each with the same Llama loaded and one sequence in its cache.

Each engine has a module live_NAME.py with one class, `Live`, that has the methods of LiveEngine;
NAME is the name of its adapter. Live(model, num_tokens) loads the model in float32 with an empty
cache of at least num_tokens tokens. Whatever is slow (an export, a compiled graph) the module keeps
for the next Live of that model. Modules of an engine import it at their top; this one imports none.

A sequence moves from one to the other so:

    src.prefill(ids[:-1])                    # or a continuation in src
    dst.reserve(len(ids) - 1)                # room, whose keys and values are zeros
    migrate(src.view(), dst.view(), src.lengths)
    dst.decode(16, after=ids[-1])            # 16 greedy tokens

The prompt's last token is not in the cache that moves: the engine that continues computes it, and
so has the logits of the first new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from kvx_core import CacheSpan

NAMES = ("transformers", "llama_cpp", "openvino", "mlx", "onnxruntime")


@dataclass(frozen=True, eq=False)
class Model:
    """What every engine loads. Two are never equal, even with the same weights.

    llama:       transformers' LlamaForCausalLM in float32, without gradients: config and weights.
                 llama.cpp also takes an Olmo3ForCausalLM
    fingerprint: of the weights, in the facts of each engine's cache
    """

    llama: Any
    fingerprint: str

    @property
    def config(self) -> Any:
        """transformers' LlamaConfig."""
        return self.llama.config

    @property
    def rope_theta(self) -> float:
        """The same in all layers."""
        rope = self.config.rope_parameters
        return float(rope.get("full_attention", rope)["rope_theta"])


class LiveEngine(Protocol):
    """A sequence in the cache of a running engine."""

    @property
    def lengths(self) -> list[int]:
        """Tokens whose keys and values the cache holds: [count]."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Computes keys and values of tokens behind those that the cache holds."""

    def reserve(self, num_tokens: int) -> None:
        """Makes an empty cache hold `num_tokens` tokens whose keys and values are all zero, to
        migrate into. A continuation without a migration is then the control that must differ.
        """

    def view(self) -> CacheSpan:
        """The tokens held, by the engine's adapter: facts with the model's fingerprint, all others
        as the adapter finds them. Zero-copy, and valid until the next call of another method.
        """

    def decode(self, count: int, *, after: int) -> list[int]:
        """The `count` greedy tokens that follow the tokens held and token `after`.

        `after` and all tokens but the last are then in the cache too.
        """


def live(name: str, model: Model, num_tokens: int = 256) -> LiveEngine:
    """A new Live of an engine, with an empty cache of at least `num_tokens` tokens.

    name: of NAMES
    Raises ImportError or OSError if the engine is not installed.
    """
    engine: LiveEngine = import_module(f"{__name__}.live_{name}").Live(model, num_tokens)
    return engine
