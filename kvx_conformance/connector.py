"""Connector: an engine with what stores its KV cache, as the suite starts it and asks it.

    python -m kvx_conformance connector mymodule:MyConnector

A subject is a class whose constructor takes no argument. The suite starts engines by it, each with
a `Setup`, in processes that it may kill, and compares their answers with those of an engine without
a store. `kvx_conformance.connectors.vllm` starts vLLM with any of its KV connectors;
`kvx_conformance.store` makes a subject of a small store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

Weights: TypeAlias = Literal["first", "layer", "rows", "random"]
Family: TypeAlias = Literal[
    "llama", "longrope", "windows", "latents", "images", "convolutions", "states"
]


@dataclass(frozen=True)
class Setup:
    """What an engine is started with. The cases say which engines share what is stored.

    family:        "llama"; "longrope": its rotation depends on `longest`; "windows": some layers
                   see the last tokens only; "latents": MLA; "images": prompts may have an image;
                   "convolutions", "states": hybrid, every other layer has attention and the others
                   short convolutions, or Mamba 2
    weights:       "first"; "layer": one layer's output projection differs, and no other tensor,
                   config or name; "rows": some rows of the embedding differ; "random": those of the
                   files are not loaded, the engine makes its own
    place:         name of the directory of the model's files. Its files are replaced when another
                   engine is started with other weights in the same place
    name:          under which the engine serves the model; None: its own
    epsilon:       of the norms, in the model's config; None: the config as it is
    theta:         of the rotation, given to the engine beside the model; None: that of the config
    longest:       tokens of a sequence, at most
    dtype:         of the computation, and of the cache if `cache_dtype` is "auto"
    cache_dtype:   of the cache: "auto" or "fp8"
    skipped:       layers whose cache is of `dtype` all the same
    quantization:  of the weights when they are loaded; None: none
    block_size:    tokens of a block of the cache
    layout:        of the cache, by the engine's own names; None: its own choice
    ranks:         processes among which the heads are split
    draft:         how tokens are drafted; None: they are not. "ngram": from the prompt
    step_tokens:   that a step computes, at most
    num_blocks:    of the cache
    prefix_caching: the engine keeps blocks of earlier requests itself
    adapters, embeddings: requests may have them
    beside:        a second connector whose loads all fail stands "before" or "behind" the subject;
                   "apart": before it, and it loads beside the engine's steps
    """

    family: Family = "llama"
    weights: Weights = "first"
    place: str = "model"
    name: str | None = None
    epsilon: float | None = None
    theta: float | None = None
    longest: int = 512
    dtype: Literal["float32", "bfloat16"] = "float32"
    cache_dtype: Literal["auto", "fp8"] = "auto"
    skipped: tuple[int, ...] = ()
    quantization: str | None = None
    block_size: int = 32
    layout: str | None = None
    ranks: int = 1
    draft: str | None = None
    step_tokens: int = 1024
    num_blocks: int = 128
    prefix_caching: bool = True
    adapters: bool = False
    embeddings: bool = False
    beside: Literal["before", "behind", "apart"] | None = None


@dataclass(frozen=True)
class Request:
    """A prompt, and what comes with it.

    tokens:     ids, each 1 to 510
    salt:       requests share with those of the same salt
    adapter:    "one" or "two": other weights under one name and number; None: none
    image:      the seed of an image's pixels, which stands in front of the tokens; None: none
    embeddings: the first layer's input is given in place of ids: what these ids would give, times
                this number; None: ids are given
    takes_stored: False: nothing of what is stored is to be used (vLLM: skip_reading_prefix_cache)
    """

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: Literal["one", "two"] | None = None
    image: int | None = None
    embeddings: float | None = None
    takes_stored: bool = True


@dataclass(frozen=True)
class Answer:
    """What became of a request.

    tokens: new ones, greedily chosen
    reused: tokens of the prompt that the engine has not computed
    ended:  "length": as many tokens as were asked for; "abort"; "error": the engine says that it
            failed
    """

    tokens: tuple[int, ...]
    reused: int
    ended: Literal["length", "abort", "error"]


class Engine(Protocol):
    """A running engine. What it cannot do, a method says by raising `NotApplicable`."""

    def ask(
        self,
        requests: Sequence[Request],
        new_tokens: int,
        abort_at: Mapping[int, int],
        reset_at: Sequence[int],
    ) -> list[Answer]:
        """Runs the requests at once, until all have ended and nothing of them is to be copied.

        abort_at: a request, by its index, is aborted as soon as so many of its tokens are computed
            or are being loaded; at 0, it is before its first step
        reset_at: steps before which all requests lose their blocks, and are computed again
        """

    def settle(self) -> None:
        """Returns when all that was saved can be found by another engine."""

    def forget(self) -> None:
        """Empties the engine's own cache of prefixes: what is reused then comes from the store."""

    def stop(self) -> None:
        """Ends the engine; all that it was given to save is saved."""


class WholeEngine(Engine, Protocol):
    """An engine with what some cases need; a case is n/a for an engine without a method."""

    def free_blocks(self) -> int:
        """Blocks that no request holds."""

    def replace_weights(self, weights: Weights, how: Literal["files", "tensors"]) -> None:
        """Other weights take the place of these: from files, or "tensors" of no file."""

    def sleep(self) -> None:
        """Sleeps and wakes up."""

    def scribble(self) -> None:
        """Fills all blocks, which no request holds, with bytes that are no numbers."""

    def lose(self, folder: str) -> None:
        """Deletes all files of a folder between the next lookup that hits and its load."""

    def longest_step(self) -> float:
        """Seconds of the longest step of the last `ask`."""


class Connector(Protocol):
    """What starts engines. An object is made in each process in which engines are started."""

    def start(self, setup: Setup, store: Path | None, work: Path) -> Engine:
        """Starts an engine. One runs in this process at a time.

        store: a directory for all that is stored; None: the engine runs without
        work:  a directory for models and the like, which the subject's processes share
        Raises `NotApplicable` if the engine has no such setup.
        """
