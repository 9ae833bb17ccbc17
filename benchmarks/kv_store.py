"""KvCacheStore beside plain torch: a decode step in a layer whose keys and values are compressed.

Append a token, read the last 128 tokens, attend to all of them. torch keeps float32 tensors for as
many tokens, which it slices; "decode" reads all keys and values of the same store and attends to
them with torch. A time that does not grow with the tokens held is flat: `x 1k` is the time at 1024
tokens divided by the time here. Run with `python -m benchmarks kv_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.cases import on_threads
from benchmarks.pools import random_numbers
from benchmarks.rounds import Goal, repeated
from kvx_core import KvCacheStore

_HEADS, _REPEATS, _DIM = 8, 4, 128
_HELD = (1024, 4096, 32768)
_FORMATS = (
    ("Q8_0", "Q4_0"),
    ("Q8_0", "Q8_0"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("bfloat16",) * 2,
    ("float32",) * 2,
)
_READ = 128
_FLAT = 0.5  # of the speed at 1024 tokens; a cost that grows with them would be 1/32
_BOUND = 1e-5
_VERSUS = ("torch", "1k", "decode")

Calls = dict[str, Callable[[], object]]


def run(threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_VERSUS)
    for key, value in _FORMATS:
        stores = {held: _filled(key, value, held) for held in _HELD}
        for held in _HELD:
            name = f"{_short(key)} + {_short(value)}, {held}"
            cases = _cases(stores, held)
            for what, (calls, num_bytes, goals) in cases.items():
                if only in f"{what} {name}":
                    work = {n: repeated(call) for n, call in calls.items()}
                    results += on_threads(
                        f"{what} {name}", work, threads, rounds, num_bytes, goals, _VERSUS
                    )
    return results


def _cases(
    stores: dict[int, KvCacheStore], held: int
) -> dict[str, tuple[Calls, int, Sequence[Goal]]]:
    store, first = stores[held], stores[_HELD[0]]
    per_token = store.memory_report().key_bytes_per_token
    per_token += store.memory_report().value_bytes_per_token
    is_first = held == _HELD[0]
    flat = () if is_first else (Goal("1k", _FLAT),)
    query = random_numbers(_HEADS * _REPEATS * _DIM).float().view(-1, _DIM) / 8
    keys, values = (read(0).contiguous() for read in (store.read_keys, store.read_values))
    _verify(store, query, keys, values)

    def with_1k(calls: Calls, at_1k: Callable[[], object]) -> Calls:
        return calls if is_first else calls | {"1k": at_1k}

    append: Calls = {"kvx": _append(store), "torch": _append_to_floats(held)}
    read: Calls = {
        "kvx": _read(store),
        "torch": lambda: (keys[:, held - _READ :].clone(), values[:, held - _READ :].clone()),
    }
    attend: Calls = {
        "kvx": lambda: store.attend(0, query),
        "torch": lambda: _attend(query, keys, values),
        "decode": lambda: _attend(query, store.read_keys(0), store.read_values(0)),
    }
    return {
        "append": (with_1k(append, _append(first)), per_token, flat),
        "read": (with_1k(read, _read(first)), _READ * per_token, flat),
        "attend": (attend, held * per_token, (Goal("decode", 1.0),)),
    }


def _filled(key: str, value: str, held: int) -> KvCacheStore:
    """A store of one layer with room for the tokens that the benchmark appends and evicts."""
    store = KvCacheStore(1, _HEADS, _DIM, held + 1, key_encoding=key, value_encoding=value)
    keys, values = random_numbers(2 * held * _HEADS * _DIM).view(2, held, _HEADS, _DIM)
    store.append(0, keys, values)
    return store


def _append(store: KvCacheStore) -> Callable[[], object]:
    key, value = random_numbers(2 * _HEADS * _DIM).view(2, _HEADS, _DIM)
    held = store.current_seq_len

    def call() -> None:
        store.append_token(0, key, value)
        store.evict(held)

    return call


def _append_to_floats(held: int) -> Callable[[], object]:
    key, value = random_numbers(2 * _HEADS * _DIM).view(2, _HEADS, _DIM)
    keys, values = torch.zeros(2, held + 1, _HEADS, _DIM)

    def call() -> None:
        keys[held] = key
        values[held] = value

    return call


def _read(store: KvCacheStore) -> Callable[[], object]:
    begin = store.current_seq_len - _READ
    return lambda: (store.read_keys(0, begin), store.read_values(0, begin))


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """keys, values: (heads, tokens, dim)"""
    scores = query.view(_HEADS, _REPEATS, _DIM) @ keys.transpose(1, 2) * _DIM**-0.5
    return (scores.softmax(-1) @ values).view(-1, _DIM)


def _verify(store: KvCacheStore, query: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raises AssertionError unless attend computes what torch does in float64."""
    wanted = _attend(query.double(), keys.double(), values.double()).float()
    error = float((store.attend(0, query) - wanted).abs().max())
    assert error < _BOUND, f"attend is wrong by {error}"


def _short(encoding: str) -> str:
    return {"float8_e4m3fn": "FP8", "bfloat16": "BF16"}.get(encoding, encoding)
