"""A token's keys and values appended to those of a sequence: what a decode step does in each layer.

Per token, from Python: PackedKVCache beside torch.cat, transformers' DynamicCache and numpy's
concatenate, each with the keys and values of all tokens in hand afterwards. And 4096 appends of one
token to an empty cache, growth included, beside one append of all of them. float16, since numpy has
no bfloat16; no way computes with the numbers. Run with `python -m benchmarks packed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.pools import random_numbers
from benchmarks.rounds import Contestant, Goal
from kvx_core import PackedKVCache

_HEADS, _DIM = 8, 128
_HELD = {1: (64, 256, 1024, 4096), 8: (64, 256, 1024)}  # tokens of each sequence, by batch
_STEPS = 16  # timed together
_ALL = 4096  # tokens appended one by one
_COLUMNS = ("torch", "hf", "numpy", "bulk")
_FROM = 256  # tokens from which on the goals hold
_GOALS = (Goal("torch", 1.0), Goal("hf", 1.0))

# Appends tokens, K and V of each (batch, 1, heads * dim); returns all keys and all values.
Append = Callable[[Sequence[tuple[Tensor, Tensor]]], tuple[Any, Any]]
# Begins with keys and values (batch, seq, heads * dim).
Way = Callable[[Tensor, Tensor], Append]


def run(threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_COLUMNS)
    for batch, lengths in _HELD.items():
        for held in lengths:
            name = f"{batch} x 1 token behind {held}"
            if only in name:
                results += _steps(name, batch, held, threads, rounds)
        name = f"{batch} x {_ALL} tokens, one by one"
        if only in name:
            results += _from_nothing(name, batch, threads, rounds)
    return results


def _steps(
    name: str, batch: int, held: int, threads: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    keys, values = _random_tokens(batch, held)
    new = _in_ones(*_random_tokens(batch, _STEPS))
    _verify(name, keys, values, new)
    num_bytes = 2 * keys[:, :1].nbytes
    goals = _GOALS if held >= _FROM else ()

    def timed(way: Way) -> Contestant:
        def work() -> float:
            append = way(keys, values)
            append(new[:1])  # DynamicCache is filled by then, PackedKVCache has made room
            begin = time.perf_counter()
            append(new[1:])
            return (time.perf_counter() - begin) / (_STEPS - 1)

        return work

    contestants = {name_of_way: timed(way) for name_of_way, way in _WAYS.items()}
    return on_threads(name, contestants, threads, rounds, num_bytes, goals, _COLUMNS)


def _from_nothing(
    name: str, batch: int, threads: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    keys, values = _random_tokens(batch, _ALL)
    new = _in_ones(keys, values)

    def one_by_one() -> PackedKVCache:
        cache = PackedKVCache()
        for key, value in new:
            cache.append_packed(key, value)
        return cache

    def bulk() -> PackedKVCache:
        cache = PackedKVCache()
        cache.append_packed(keys, values)
        return cache

    for made in (one_by_one(), bulk()):
        assert torch.equal(_known(made.packed_keys()), keys), name
        assert torch.equal(_known(made.packed_values()), values), name

    def timed(make: Callable[[], PackedKVCache]) -> Contestant:
        def work() -> float:
            begin = time.perf_counter()
            make()
            return time.perf_counter() - begin

        return work

    contestants = {"kvx": timed(one_by_one), "bulk": timed(bulk)}
    num_bytes = keys.nbytes + values.nbytes
    goals = [Goal("bulk", 0.5)]
    return on_threads(name, contestants, threads, rounds, num_bytes, goals, _COLUMNS)


# ---- the ways ----


def _kvx(keys: Tensor, values: Tensor) -> Append:
    cache = PackedKVCache()
    cache.append_packed(keys, values)

    def append(new: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        for key, value in new:
            cache.append_packed(key, value)
            held = cache.packed_keys(), cache.packed_values()
        return held

    return append


def _torch(keys: Tensor, values: Tensor) -> Append:
    held = [keys, values]

    def append(new: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        for key, value in new:
            held[0] = torch.cat((held[0], key), 1)
            held[1] = torch.cat((held[1], value), 1)
        return held[0], held[1]

    return append


def _hf(keys: Tensor, values: Tensor) -> Append:
    cache = transformers.DynamicCache()
    cache.update(_heads(keys).contiguous(), _heads(values).contiguous(), 0)

    def append(new: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        for key, value in new:
            held = cache.update(_heads(key), _heads(value), 0)
        return tuple(half.transpose(1, 2).flatten(2) for half in held)

    return append


def _numpy(keys: Tensor, values: Tensor) -> Append:
    held = [keys.numpy(), values.numpy()]

    def append(new: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        for key, value in new:
            held[0] = np.concatenate((held[0], key.numpy()), axis=1)
            held[1] = np.concatenate((held[1], value.numpy()), axis=1)
        return tuple(torch.from_numpy(half) for half in held)

    return append


_WAYS: dict[str, Way] = {"kvx": _kvx, "torch": _torch, "hf": _hf, "numpy": _numpy}


def _verify(name: str, keys: Tensor, values: Tensor, new: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raises AssertionError unless every way holds the very tokens that it was given."""
    wanted = [
        torch.cat([half, *(token[i] for token in new)], 1) for i, half in enumerate((keys, values))
    ]
    for way, make in _WAYS.items():
        found = make(keys, values)(new)
        same = [torch.equal(*halves) for halves in zip(found, wanted, strict=True)]
        assert all(same), f"{name}: {way} holds other keys or values"


def _in_ones(keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Token by token, each in its own memory as a model hands it over."""
    return [
        (key.contiguous(), value.contiguous())
        for key, value in zip(keys.split(1, 1), values.split(1, 1), strict=True)
    ]


def _heads(packed: Tensor) -> Tensor:
    """(batch, heads, seq, dim), as transformers has it; a view."""
    return packed.view(*packed.shape[:2], _HEADS, _DIM).transpose(1, 2)


def _random_tokens(batch: int, seq_len: int) -> tuple[Tensor, Tensor]:
    numbers = random_numbers(2 * batch * seq_len * _HEADS * _DIM).half()
    keys, values = numbers.view(2, batch, seq_len, _HEADS * _DIM)
    return keys, values


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
