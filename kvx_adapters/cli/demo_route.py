"""The second half of the demo: one conversation through all engines that are here.

A chat prompt starts in vLLM. After some words its cache moves to the next engine, which goes on in
the middle of the sentence, and so on to transformers. All of them run in this process, each with
the demo's model; vLLM meanwhile says the whole answer alone, to compare with.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from kvx_adapters.cli.demo_engines import ChatInVLLM
from kvx_adapters.cli.demo_hops import TIMED_CALLS
from kvx_adapters.cli.demo_model import ANSWER
from kvx_adapters.cli.demo_packages import DemoError
from kvx_adapters.cli.doctor_engines import LLAMA_CPP
from kvx_adapters.cli.engines import LiveEngine, Model, live, llama_cpp_library
from kvx_adapters.cli.extras import pip_install
from kvx_core import CacheSpan, Plan, Verification, migrate, verify


@dataclass(frozen=True)
class Station:
    """An engine of the route."""

    name: str  # of its module in kvx_adapters/cli/engines
    title: str
    distribution: str  # of Python, which has its version; empty: none
    install: str  # the line that installs it

    @property
    def version(self) -> str:
        return version(self.distribution) if self.distribution else LLAMA_CPP


STATIONS = (
    Station(
        "llama_cpp",
        "llama.cpp",
        "",
        f"pip install 'gguf>=0.19' && python -m {llama_cpp_library.__name__}",
    ),
    Station("openvino", "OpenVINO", "openvino", pip_install("openvino")),
    Station("mlx", "MLX", "mlx", pip_install("mlx")),
    Station(
        "onnxruntime",
        "ONNX Runtime",
        "onnxruntime",
        pip_install("onnxruntime", more="onnx==1.23.2"),
    ),
    Station("transformers", "HF transformers", "transformers", pip_install("transformers")),
)


class Source(Protocol):
    """An engine that a cache leaves."""

    @property
    def lengths(self) -> list[int]: ...

    def view(self) -> CacheSpan: ...


@dataclass(frozen=True)
class Flip:
    """One bit of a destination, flipped and flipped back."""

    layer: int
    kv: str  # "K" or "V"
    found: Verification  # with the bit flipped
    mended: Verification  # and flipped back

    @property
    def is_found(self) -> bool:
        """Whether verify has named the layer, K or V, and has nothing to say afterwards."""
        place = self.found.difference
        return (
            place is not None
            and (place.layer, place.kv) == (self.layer, self.kv)
            and self.mended.ok
        )


@dataclass(frozen=True)
class Arrival:
    """A cache that has come to the next engine."""

    num_tokens: int
    num_bytes: int
    room: float  # seconds in which the engine made room
    moved: float  # seconds in which KVX described both ends, compared their facts and copied
    again: float  # median seconds of TIMED_CALLS more, of the same two ends
    verification: Verification
    flip: Flip


@dataclass(frozen=True)
class Leg:
    """What one engine says of the answer."""

    title: str
    tokens: list[int]
    spoke: float  # seconds; vLLM's with its prefill
    arrival: Arrival | None  # None where the conversation starts
    from_zeros: list[int]  # what it says of as many tokens if keys and values are zeros


def installed(model: Model, num_tokens: int) -> tuple[list[Station], dict[Station, str]]:
    """The engines that are here, started once, and why each of the others is not."""
    here, absent = [], {}
    for station in STATIONS:
        try:
            live(station.name, model, num_tokens)
        except (ImportError, OSError) as error:
            absent[station] = str(error)
        else:
            here.append(station)
    return here, absent


def load(directory: Path, fingerprint: str) -> Model:
    """The demo's model in float32, which every engine of the route computes in."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Model(llama.eval().requires_grad_(False), fingerprint)


def shares(tokenizer: Any, count: int) -> list[int]:
    """How many tokens of the answer each of `count` engines says: as many words as the others, and
    the last one the end of the text, too."""
    words = [f" {word}" for word in ANSWER.split()]
    ends = [round(i * len(words) / count) for i in range(count + 1)]
    parts = ["".join(words[ends[i] : ends[i + 1]]) for i in range(count)]
    found = [len(tokenizer(part)["input_ids"]) for part in parts]
    found[-1] += 1
    return found


def travel(
    chat: ChatInVLLM, stations: Sequence[Station], model: Model, counts: Sequence[int]
) -> Iterator[Leg]:
    """Lets vLLM and each station say their share of the answer, with the cache of the one before.

    counts: of tokens, vLLM's first
    """
    num_tokens = len(chat.prompt) + sum(counts)
    start = time.perf_counter()
    said = chat.decode(counts[0])
    yield Leg("vLLM", said, time.perf_counter() - start, None, [])
    if chat.finished:
        raise DemoError("vLLM's answer has ended, so its blocks are freed. Try another --seed")
    src: Source = chat
    for station, count in zip(stations, counts[1:], strict=True):
        after = said[-1]
        dst = live(station.name, model, num_tokens)
        arrival = _hop(src, dst)
        control = live(station.name, model, num_tokens)
        control.reserve(arrival.num_tokens)
        from_zeros = control.decode(count, after=after)
        start = time.perf_counter()
        said = dst.decode(count, after=after)
        spoke = time.perf_counter() - start
        yield Leg(station.title, said, spoke, arrival, from_zeros)
        src = dst


def _hop(src: Source, dst: LiveEngine) -> Arrival:
    """Moves all tokens of `src` into the empty cache of `dst` in one call, repeats the call for
    timing, and verifies the tokens."""
    (num_tokens,) = src.lengths
    start = time.perf_counter()
    dst.reserve(num_tokens)
    made_room = time.perf_counter()
    source, destination = src.view(), dst.view()
    num_bytes = migrate(source, destination, [num_tokens])
    moved = time.perf_counter()
    seconds = []
    for _ in range(TIMED_CALLS):
        begun = time.perf_counter()
        migrate(source, destination, [num_tokens])
        seconds.append(time.perf_counter() - begun)
    return Arrival(
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        room=made_room - start,
        moved=moved - made_room,
        again=statistics.median(seconds),
        verification=verify(source, destination, [num_tokens]),
        flip=_flip(source, destination, num_tokens),
    )


def _flip(src: CacheSpan, dst: CacheSpan, num_tokens: int) -> Flip:
    """Flips a bit of what `migrate` has written and lets verify find it; then flips it back."""
    chance = random.Random(num_tokens)
    with Plan.migrate(src, dst, [num_tokens]) as plan:
        written = plan.ranges()
    run = written[chance.randrange(len(written))]
    plane, at = int(run["plane"]), int(run["dst"]) + chance.randrange(int(run["bytes"]))
    byte, bit = ctypes.c_uint8.from_address(at), 1 << chance.randrange(8)
    byte.value ^= bit
    found = verify(src, dst, [num_tokens])
    byte.value ^= bit
    return Flip(plane // 2, "KV"[plane % 2], found, verify(src, dst, [num_tokens]))
