"""States of recurrent layers: 32 layers of 64 sequences, moved in one call.

A layer has the sizes of Qwen3-Next's or Granite 4's on a rank of several, so that both ends take
2 GB: a convolution in bfloat16 and a state in float32. One end is vLLM's, pages of other sequences
in between, the other dense, as that of transformers. Beside KVX one memcpy, and streaming stores,
of as many bytes; a memcpy of each part where it lies ("rows"); torch's copy_.
Run with `python -m benchmarks states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.cases import check, on_threads
from benchmarks.native import PlainCopy
from benchmarks.rounds import Contestant, Goal, once
from kvx_core import CacheFacts, CacheView, Plane, migrate
from kvx_core.model.recurrent import RecurrentState, recurrent_state

_LAYERS, _SEQUENCES, _TOKENS = 32, 64, 1000
_QUICK_LAYERS = 4
_VERSUS = ("memcpy", "rows", "stream", "torch")
_FACTS = CacheFacts(
    engine="a rank", fingerprint="model", rotary="none", rotary_dim=0, rope_applied=False
)
# Heads as the models have them, fewer of them: those of a rank.
_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-Next": {
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "Granite 4": {
        "model_type": "granitemoehybrid",
        "hidden_size": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
}
_DENSE = {"gdn": ("head", "key", "value"), "mamba2": ("head", "head_dim", "state")}
_CASES = (
    ("Qwen3-Next", False),
    ("Granite 4", False),
    ("Qwen3-Next", True),
)


def run(threads: Sequence[int], rounds: int, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    results = []
    report.print_head(_VERSUS)
    layers = _QUICK_LAYERS if quick else _LAYERS
    for model, turned in _CASES:
        name = f"{model}, {layers} x {_SEQUENCES}{', [value, key]' if turned else ''}"
        if only in name:
            results += _move(name, recurrent_state(_MODELS[model]), layers, threads, rounds, turned)
    return results


def _move(
    name: str,
    sizes: RecurrentState,
    layers: int,
    threads: Sequence[int],
    rounds: int,
    turned: bool,
) -> list[dict[str, Any]]:
    """turned: the destination has the last two axes of a state the other way round"""
    channels = sum(width for _, width in sizes.conv)
    conv, state = (sizes.num_columns, channels), sizes.state
    to = (*state[:-2], state[-1], state[-2]) if turned else state
    axes = _DENSE[sizes.kind]
    to_axes = (*axes[:-2], axes[-1], axes[-2]) if turned else axes
    blocks = [2 * i + 1 for i in range(_SEQUENCES)]  # every second one is another's
    pages, dense, planes, dense_planes = [], [], [], []
    for layer in range(layers):
        page = _of(2 * _SEQUENCES + 1, conv, torch.bfloat16), _of(2 * _SEQUENCES + 1, state)
        rows = _of(_SEQUENCES, conv, torch.bfloat16), _of(_SEQUENCES, to)
        facts = sizes.conv_facts(), sizes.state_facts()
        named = ("block", "time", "channel"), ("block", *axes)
        there = named[0], ("block", *to_axes)
        for part in range(2):
            planes.append(Plane.of_state(page[part], named[part], facts[part], layer, slots=blocks))
            dense_planes.append(Plane.of_state(rows[part], there[part], facts[part], layer))
        pages.append(page)
        dense.append(rows)
    counts = [_TOKENS] * _SEQUENCES
    src = CacheView((), _FACTS, planes=tuple(planes), dense=True, state_tokens=counts)
    dst = CacheView((), _FACTS, planes=tuple(dense_planes), dense=True, state_tokens=counts)

    def by_torch() -> None:
        for page, rows in zip(pages, dense, strict=True):
            for from_page, row in zip(page, rows, strict=True):
                found = from_page[1::2]
                row.copy_(found.transpose(-1, -2) if turned and row.ndim > 3 else found)

    def by_kvx() -> None:
        migrate(src, dst, counts)

    written = [tensor for rows in dense for tensor in rows]
    check(name, by_kvx, by_torch, written)
    num_bytes = sum(tensor.nbytes for tensor in written)
    plain = torch.empty(num_bytes, dtype=torch.uint8), _of(num_bytes, (), torch.uint8)
    parts = [
        (row[i], page[block])
        for pair, rows in zip(pages, dense, strict=True)
        for page, row in zip(pair, rows, strict=True)
        for i, block in enumerate(blocks)
    ]
    contestants: dict[str, Contestant] = {"kvx": once(by_kvx), "torch": once(by_torch)}
    results = []
    for count in threads:
        contestants["memcpy"] = PlainCopy([plain], "memcpy", count)
        if not turned:
            contestants["rows"] = PlainCopy(parts, "memcpy", count)
            contestants["stream"] = PlainCopy([plain], "stream", count)
        goals = () if turned else (Goal("memcpy", 0.9),)
        results += on_threads(name, contestants, [count], rounds, num_bytes, goals, _VERSUS)
    return results


def _of(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that differ, in memory that was touched."""
    size = count
    for extent in shape:
        size *= extent
    numbers = torch.arange(size, dtype=torch.int32) % 251
    return numbers.to(dtype).view(count, *shape)
