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
def _kernel(
    slots, numbers, rows, rings, ADDS: tl.constexpr, ROW: tl.constexpr, WINDOW: tl.constexpr
):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    at = tl.arange(0, ROW)
    row = tl.load(rows + token * ROW + at)
    if ADDS:
        place = slot * WINDOW + tl.atomic_add(numbers + slot, 1) % WINDOW
    else:
        place = tl.load(numbers + slot) * WINDOW + token % WINDOW
    tl.store(rings + place * ROW + at, row)


def chains(num_tokens: int, num_layers: int, device: str = "cuda") -> dict[str, list[Call]]:
    """By what is done with the number that is read second; a call per layer, each with tensors of
    its own."""
    found: dict[str, list[Call]] = {}
    for name, adds in (("an atomic addition", True), ("a table", False)):
        found[name] = []
        for _ in range(num_layers):
            slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
            rows = torch.ones(num_tokens, _ROW, dtype=torch.bfloat16, device=device)
            rings = torch.zeros(num_tokens * _WINDOW, _ROW, dtype=torch.bfloat16, device=device)
            arguments = slots, slots.clone(), rows, rings, adds, _ROW, _WINDOW
            found[name].append(partial(_kernel[(num_tokens,)], *arguments))
    return found
