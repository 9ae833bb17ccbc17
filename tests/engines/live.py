"""LiveEngine: a real engine with the tiny model loaded, one sequence in its cache.

Each engine has a module tests/engines/live_NAME.py with one class, `Live`, that has the methods of
LiveEngine; NAME is the name of its adapter. Live(num_tokens) loads the model of tiny_model.py in
float32 with an empty cache of at least num_tokens tokens. Whatever is slow (an export, a compiled
graph) the module keeps for the next Live of the process. Modules of an engine import it at their
top; this module imports none.

A hop goes so, and `hop` does it:

    src.prefill(ids[:-1])                    # or a continuation in src
    dst.reserve(len(ids) - 1)                # room, whose keys and values are zeros
    migrate(src.view(), dst.view(), src.lengths)
    dst.decode(16, after=ids[-1])            # 16 greedy tokens

The prompt's last token is not in the cache that moves: the engine that continues computes it, and
so has the logits of the first new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from kvx_core import CacheSpan, migrate, verify
from tests.engines import tiny_model

# Adapters with a module live_NAME.py. Scripts also have live_vllm.py, which changes its process.
NAMES = ("transformers", "llama_cpp", "openvino", "mlx", "onnxruntime")


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
        """The tokens held, by the engine's adapter: facts with FINGERPRINT of engine.py, all others
        as the adapter finds them. Zero-copy, and valid until the next call of another method.
        """

    def decode(self, count: int, *, after: int) -> list[int]:
        """The `count` greedy tokens that follow the tokens held and token `after`.

        `after` and all tokens but the last are then in the cache too.
        """


def live(name: str, num_tokens: int = 256) -> LiveEngine:
    """A new Live of an engine, with an empty cache of at least `num_tokens` tokens."""
    engine: LiveEngine = import_module(f"tests.engines.live_{name}").Live(num_tokens)
    return engine


def hop(src: LiveEngine, dst: LiveEngine) -> None:
    """Moves all tokens of `src` into the empty cache of `dst`, and checks that they are equal."""
    dst.reserve(src.lengths[0])
    assert dst.lengths == src.lengths
    source, destination = src.view(), dst.view()
    migrate(source, destination, src.lengths)
    assert verify(source, destination, src.lengths).ok


def prefilled(name: str, num_tokens: int) -> LiveEngine:
    """An engine that holds all but the last token of tiny_model.prompt(num_tokens)."""
    engine = live(name)
    engine.prefill(tiny_model.prompt(num_tokens)[:-1])
    return engine


def check_there_and_back(there: LiveEngine, num_tokens: int, count: int = 12) -> None:
    """A prompt goes from transformers to an empty engine, says four tokens, and goes back."""
    ids, want = tiny_model.prompt(num_tokens), list(tiny_model.greedy(num_tokens, count))
    back = live("transformers")
    hop(prefilled("transformers", num_tokens), there)
    assert there.decode(4, after=ids[-1]) == want[:4]
    hop(there, back)
    assert back.decode(count - 4, after=want[3]) == want[4:]


def check_alone_and_zeros(name: str, num_tokens: int = 100, count: int = 12) -> None:
    """An engine says transformers' tokens alone, transformers goes on from its cache, and zero keys
    and values give others."""
    ids, want = tiny_model.prompt(num_tokens), list(tiny_model.greedy(num_tokens, count))
    alone, zeros, back = prefilled(name, num_tokens), live(name), live("transformers")
    hop(alone, back)
    assert alone.decode(count, after=ids[-1]) == want
    assert back.decode(count, after=ids[-1]) == want
    zeros.reserve(num_tokens - 1)
    assert zeros.decode(count, after=ids[-1]) != want
