"""The smallest kernels that do what a token's append or an entry's flush cannot do without.

A row goes where a number says that is read where another says: two trips to memory, of which the
second begins when the first has ended. Triton compiles them.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.gpu.places import Call

_ROW, _WINDOW = 512, 128  # numbers of a row, rows of a ring


@triton.jit
def _by_addition(slots, heads, rows, rings, ROW: tl.constexpr, WINDOW: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    at = tl.arange(0, ROW)
    row = tl.load(rows + token * ROW + at)
    head = tl.atomic_add(heads + slot, 1)
    tl.store(rings + (slot * WINDOW + head % WINDOW) * ROW + at, row)


@triton.jit
def _by_table(slots, table, rows, rings, ROW: tl.constexpr, WINDOW: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    at = tl.arange(0, ROW)
    row = tl.load(rows + token * ROW + at)
    block = tl.load(table + slot)
    tl.store(rings + (block * WINDOW + token % WINDOW) * ROW + at, row)


def chains(num_tokens: int, num_layers: int) -> dict[str, list[Call]]:
    """By what is done with the number that is read second; a call per layer, each with tensors of
    its own on the GPU."""
    found: dict[str, list[Call]] = {}
    for name, kernel in (("an atomic addition", _by_addition), ("a table", _by_table)):
        found[name] = []
        for _ in range(num_layers):
            slots = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
            rows = torch.ones(num_tokens, _ROW, dtype=torch.bfloat16, device="cuda")
            rings = torch.zeros(num_tokens * _WINDOW, _ROW, dtype=torch.bfloat16, device="cuda")
            arguments = slots, slots.clone(), rows, rings, _ROW, _WINDOW
            found[name].append(partial(kernel[(num_tokens,)], *arguments))
    return found
