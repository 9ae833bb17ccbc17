"""The cost of a call that copies almost nothing: one token, on one thread, of one layer, or of two
where a migration has no number of layers in its name.

Every way of calling is timed in batches, interleaved, beside five `tensor.data_ptr()` calls: the
least that any binding for torch tensors has to do. Run with `python -m benchmarks call_overhead`.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import kvx_core
import kvx_core.ops.torch_ops  # registers torch.ops.kvx
from benchmarks import native
from benchmarks.cases import check
from benchmarks.pools import Pool, Shape, one_layer, random_numbers
from benchmarks.rounds import Contestant, batched, compete
from kvx_core import (
    CacheFacts,
    CacheView,
    GatherPlan,
    Layout,
    Plan,
    SlotMapping,
    WritePlan,
)
from kvx_core._c import abi

_FLOOR = "5 x data_ptr()"
_IN_C = "kvx_write_kv in C"
_RUN = "plan.run({0}, src_block_table={1}, dst_block_table={1})"
_NEW_SPANS = "kvx_core.migrate(here.at(block_table={0}), there.at(block_table={0}), {1}, **same)"
_CALLS = {  # what it is: (statement, the result that is checked)
    "WritePlan": ("write_plan(key, value, slots)", "write"),
    "write_kv": ("kvx_core.write_kv(cache, key, value, slots)", "write"),
    "torch.ops.kvx.write_kv": ("ops.write_kv(key, value, k, v, slots, 'BLOCK_NHD')", "write"),
    "torch: index_copy_ of K and V": (
        "k_rows.index_copy_(0, slots, key); v_rows.index_copy_(0, slots, value)",
        "write",
    ),
    "GatherPlan": ("gather_plan(out_key, out_value, table, lens)", "gather"),
    "gather_kv, out=": (
        "kvx_core.gather_kv(cache, table, lens, out=(out_key, out_value))",
        "gather",
    ),
    "torch.ops.kvx.gather_kv_out": (
        "ops.gather_kv_out(k, v, table, lens, out_key, out_value, 'BLOCK_NHD')",
        "gather",
    ),
    "migrate, 1 layer": ("kvx_core.migrate(src, dst, lens, same_model=True)", "migrate"),
    "migrate, 32 layers": ("kvx_core.migrate(all_src, all_dst, lens, same_model=True)", "migrate"),
    "write_kv, numpy slots": ("kvx_core.write_kv(cache, key, value, slots_np)", "write"),
    "write_kv, a list": ("kvx_core.write_kv(cache, key, value, [37])", "write"),
    "gather_kv, numpy table": (
        "kvx_core.gather_kv(cache, table_np, lens_np, out=(out_key, out_value))",
        "gather",
    ),
    "gather_kv, lists": (
        "kvx_core.gather_kv(cache, [[2, 5]], [1], out=(out_key, out_value))",
        "gather",
    ),
    "migrate, numpy lengths": ("kvx_core.migrate(two_src, two_dst, lens_np, **same)", "migrate"),
    "migrate, a list": ("kvx_core.migrate(two_src, two_dst, [1], **same)", "migrate"),
    "MigratePlan, torch tables": (_RUN.format("lens", "table"), "migrate"),
    "MigratePlan, numpy tables": (_RUN.format("lens_np", "table_np"), "migrate"),
    "MigratePlan, lists": (_RUN.format("[1]", "[[2, 5]]"), "migrate"),
    "migrate, new spans, torch": (_NEW_SPANS.format("table", "lens"), "migrate"),
    "migrate, new spans, numpy": (_NEW_SPANS.format("table_np", "lens_np"), "migrate"),
    "migrate, new spans, lists": (_NEW_SPANS.format("[[2, 5]]", "[1]"), "migrate"),
    _FLOOR: (
        "key.data_ptr(); value.data_ptr(); k.data_ptr(); v.data_ptr(); slots.data_ptr()",
        "",
    ),
}
_AT_MOST_US = {
    "WritePlan": 1.5,
    "GatherPlan": 1.5,
    "migrate, 1 layer": 10,
    "migrate, 32 layers": 15,
    **dict.fromkeys(("write_kv, numpy slots", "write_kv, a list"), 3),
    **dict.fromkeys(("gather_kv, numpy table", "gather_kv, lists"), 3),
    **dict.fromkeys(("migrate, numpy lengths", "migrate, a list"), 3),
    **dict.fromkeys(("MigratePlan, numpy tables", "MigratePlan, lists"), 3),
    **{f"migrate, new spans, {kind}": 10 for kind in ("torch", "numpy", "lists")},
}


def run(rounds: int) -> list[dict[str, Any]]:
    """Measures every way of calling; prints and returns the results."""
    kvx_core.set_num_threads(1)
    torch.set_num_threads(1)
    shape = Shape(num_tokens=1024)
    numbers = random_numbers(2 * shape.elements)
    pool, other = Pool.new(shape, "NHD").fill(numbers), Pool.new(shape, "HND").fill(numbers)
    cache, (k, v) = pool.desc(), pool.tensors
    key, value = random_numbers(2 * shape.token_elements).view(2, 1, *k.shape[2:])
    out_key, out_value = torch.empty(2, 1, 1, *k.shape[2:], dtype=torch.bfloat16)
    slots, table, lens = torch.tensor([37]), torch.tensor([[2, 5]]), torch.tensor([1])
    write_plan = WritePlan(cache, key, value)
    gather_plan = GatherPlan(cache, out_key, out_value)
    src, dst = (one_layer(p.desc()).at(table) for p in (pool, other))
    layers = [
        [first, *(Pool.new(shape, layout) for _ in range(31))]
        for first, layout in ((pool, "NHD"), (other, "HND"))
    ]
    here, there = (CacheView(tuple(p.desc() for p in all_), CacheFacts()) for all_ in layers)
    all_src, all_dst = here.at(table), there.at(table)
    here, there = (replace(view, layers=view.layers[:2]) for view in (here, there))
    two_src, two_dst, same = here.at(table), there.at(table), {"same_model": True}
    plan = Plan.migrate(here.at([]), there.at([]), same_model=True)
    slots_np, table_np, lens_np = slots.numpy(), table.numpy(), lens.numpy()
    ops, first = torch.ops.kvx, table[0, :1] * shape.block_size
    k_rows, v_rows = (t.view(shape.num_tokens, *t.shape[2:]) for t in pool.tensors)
    write = abi.kvx_write_desc_t(
        io=abi.kvx_kv_io_desc_t(
            key=kvx_core.describe(key, Layout.BLOCK_CUSTOM).to_c(),
            value=kvx_core.describe(value, Layout.BLOCK_CUSTOM).to_c(),
            num_tokens=1,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        ),
        slots=SlotMapping.of(slots).to_c(),
    )

    names: dict[str, Any] = globals() | locals()
    expected = {
        "write": "k_rows.index_copy_(0, slots, key); v_rows.index_copy_(0, slots, value)",
        "gather": "torch.index_select(k_rows, 0, first, out=out_key[0]); "
        "torch.index_select(v_rows, 0, first, out=out_value[0])",
        "migrate": "other.k[2, :, 0] = k[2, 0]; other.v[2, :, 0] = v[2, 0]",
    }
    outputs = {
        "write": pool.tensors,
        "gather": (out_key, out_value),
        "migrate": other.tensors,
    }
    for name, (statement, what) in _CALLS.items():
        if what:
            pool.fill(numbers)
            check(
                name, _compiled(statement, names), _compiled(expected[what], names), outputs[what]
            )
    contestants: dict[str, Contestant] = {
        _IN_C: batched(native.timed("write", cache.to_c(), write)),
        **{name: _timed(statement, names) for name, (statement, _) in _CALLS.items()},
    }
    timing = compete(contestants, rounds)
    kvx_core.set_num_threads(0)

    print(f"\n{'':32} {'us':>7} {'x floor':>8}   goal")
    rows = []
    for name in contestants:
        us = 1e6 * timing.median(name)
        at_most = _AT_MOST_US.get(name)
        rows.append(
            {
                "call": name,
                "median_us": round(us, 3),
                "times_floor": round(timing.speedup(name, _FLOOR), 2),
                "verified": bool(_CALLS.get(name, ("", ""))[1]),
                "goal": None if at_most is None else {"at_most_us": at_most, "met": us <= at_most},
                "samples_us": [round(1e6 * s, 3) for s in timing.samples[name]],
            }
        )
        print(f"{name:32} {us:>7.2f} {rows[-1]['times_floor']:>8.2f}   {goal_text(rows[-1])}")
    return rows


def _timed(statement: str, names: dict[str, Any]) -> Contestant:
    """The statement in a loop of its own, as it stands: no function call around it."""
    timer = timeit.Timer(statement, globals=names)
    return batched(lambda repeats: timer.timeit(repeats) / repeats)


def _compiled(statement: str, names: dict[str, Any]) -> Callable[[], object]:
    code = compile(statement, statement, "exec")
    return lambda: exec(code, names)


def goal_text(row: dict[str, Any]) -> str:
    """The goal beside whether it was met."""
    goal = row["goal"]
    if goal is None:
        return "-"
    return f"<= {goal['at_most_us']} us {'met' if goal['met'] else 'NOT MET'}"
