"""A decode step of one token in 32 layers: one call for all layers, and a call for each of them.

Every way leaves the same bytes, is timed in batches on one thread, and stands beside the loop of
memcpy that one would write by hand: 64 rows of 2 KiB. Run with `python -m benchmarks layer_writes`.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvx_core
import kvx_core.ops.torch_ops  # registers torch.ops.kvx
from benchmarks import native
from benchmarks.rounds import batched, compete
from kvx_core import (
    CacheDesc,
    Layout,
    SlotMapping,
    WriteLayersPlan,
    WritePlan,
    describe,
)
from kvx_core._c import abi

_LAYERS, _BLOCKS, _SIZE, _HEADS, _DIM = 32, 64, 16, 8, 128
_SLOT = 37
_MEMCPY = "memcpy of 64 rows"
_IN_C = "32 x kvx_write_kv in C", "kvx_write_layers in C"
_CALLS = {  # a way of writing all layers in Python: its statement
    "32 x WritePlan": "for plan, k, v in each: plan(k, v, slots)",
    "WriteLayersPlan": "layers_plan(keys, values, slots)",
    "32 x torch.ops.kvx.write_kv": (
        "for i in range(32): ops.write_kv(keys[i], values[i], ks[i], vs[i], slots, 'BLOCK_NHD')"
    ),
    "torch.ops.kvx.write_layers": "ops.write_layers(keys, values, ks, vs, slots, 'BLOCK_NHD')",
}
_VERSUS = {  # the calls that one call replaces
    "kvx_write_layers in C": "32 x kvx_write_kv in C",
    "WriteLayersPlan": "32 x WritePlan",
    "torch.ops.kvx.write_layers": "32 x torch.ops.kvx.write_kv",
}


def run(rounds: int) -> list[dict[str, Any]]:
    """Measures every way; prints and returns the results."""
    kvx_core.set_num_threads(1)
    torch.set_num_threads(1)
    pool = torch.zeros(_LAYERS, 2, _BLOCKS, _SIZE, _HEADS, _DIM, dtype=torch.bfloat16)
    tokens = torch.randn(2, _LAYERS, 1, _HEADS, _DIM).bfloat16()
    slots = torch.tensor([_SLOT])
    ks, vs = list(pool[:, 0]), list(pool[:, 1])
    keys, values = map(tuple, tokens)
    caches = [
        CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
        for k, v in zip(ks, vs, strict=True)
    ]
    plans = map(WritePlan, caches, keys, values)
    names = {
        "each": list(zip(plans, keys, values, strict=True)),
        "layers_plan": WriteLayersPlan(caches),
        "ops": torch.ops.kvx,
        "keys": keys,
        "values": values,
        "ks": ks,
        "vs": vs,
        "slots": slots,
    }
    structs = [cache.to_c() for cache in caches]
    writes = [_write(key, value, slots) for key, value in zip(keys, values, strict=True)]
    each, at_once = _IN_C
    contestants: dict[str, Callable[[int], float]] = {
        _MEMCPY: _rows(pool, tokens),
        each: native.timed_layers("kvx_write_kv", "bench_write_each", structs, writes),
        at_once: native.timed_layers("kvx_write_layers", "bench_write_layers", structs, writes),
        **{name: _timed(statement, names) for name, statement in _CALLS.items()},
    }
    expected = torch.zeros_like(pool)
    expected[:, :, _SLOT // _SIZE, _SLOT % _SIZE] = tokens.transpose(0, 1)[:, :, 0]
    for name, contestant in contestants.items():
        pool.zero_()
        contestant(1)
        assert torch.equal(pool, expected), f"{name} leaves other bytes than torch"
    timing = compete({name: batched(c) for name, c in contestants.items()}, rounds)
    kvx_core.set_num_threads(0)

    print(f"\n{'':32} {'us':>8} {'x memcpy':>9} {'one call saves':>15}")
    rows = []
    for name in contestants:
        us = 1e6 * timing.median(name)
        versus = _VERSUS.get(name)
        speedup = None if versus is None else round(timing.speedup(versus, name), 2)
        rows.append(
            {
                "call": name,
                "median_us": round(us, 3),
                "times_memcpy": round(timing.speedup(name, _MEMCPY), 2),
                "versus": versus,
                "speedup": speedup,
                "verified": True,
                "samples_us": [round(1e6 * s, 3) for s in timing.samples[name]],
            }
        )
        saved = "-" if speedup is None else f"{speedup:.2f} x"
        print(f"{name:32} {us:>8.2f} {rows[-1]['times_memcpy']:>9.2f} {saved:>15}")
    return rows


def _timed(statement: str, names: dict[str, Any]) -> Callable[[int], float]:
    timer = timeit.Timer(statement, globals=names)
    return lambda repeats: timer.timeit(repeats) / repeats


def _write(key: Tensor, value: Tensor, slots: Tensor) -> abi.kvx_write_desc_t:
    return abi.kvx_write_desc_t(
        io=abi.kvx_kv_io_desc_t(
            key=describe(key, Layout.BLOCK_CUSTOM).to_c(),
            value=describe(value, Layout.BLOCK_CUSTOM).to_c(),
            num_tokens=1,
            num_kv_heads=_HEADS,
            head_dim=_DIM,
        ),
        slots=SlotMapping.of(slots).to_c(),
    )


def _rows(pool: Tensor, tokens: Tensor) -> native.RowCopy:
    row_bytes = _HEADS * _DIM * pool.element_size()
    to, from_ = torch.tensor([_SLOT * row_bytes]), torch.tensor([0])
    return native.RowCopy(
        [(pool[i, j], tokens[j, i], to, from_) for i in range(_LAYERS) for j in range(2)],
        row_bytes,
    )
