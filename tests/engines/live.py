"""The engines of kvx_adapters/cli/engines with the tiny model loaded, and what each must do.

`live` makes one. vLLM's, live_vllm.py, is for scripts: it changes the process that it runs in.
"""

from __future__ import annotations

from kvx_adapters.cli import engines
from kvx_adapters.cli.engines import NAMES, LiveEngine
from kvx_core import migrate, verify
from tests.engines import tiny_model

__all__ = ["NAMES", "LiveEngine", "hop", "live"]


def live(name: str, num_tokens: int = 256) -> LiveEngine:
    """A new Live of an engine, with an empty cache of at least `num_tokens` tokens."""
    if name == "vllm":
        from tests.engines.live_vllm import Live

        return Live(num_tokens)
    return engines.live(name, tiny_model.tiny(), num_tokens)


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
