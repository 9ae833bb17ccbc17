"""Moves the tiny model's cache from each engine to each other one, and tells what they said.

A script, since vLLM changes the process that it runs in: tests/engines/test_engine_pairs.py runs
it. The engines start once. Prints a line of JSON: of each pair and prompt length, the greedy tokens
that the source said alone, those that the destination said behind the hop, and those of a control:
the destination with keys and values of zero.

    python -m tests.engines.pairs COUNT LENGTH... -- NAME...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from tests.engines import tiny_model
from tests.engines.live import hop, live


def pairs(
    names: Sequence[str], lengths: Sequence[int], count: int
) -> dict[str, dict[str, list[int]]]:
    """Tokens by "src -> dst, length": "alone", "moved" and "zeros"."""
    found = {}
    for length in lengths:
        ids = tiny_model.prompt(length)
        controls = {}
        for dst in names:
            control = live(dst)
            control.reserve(length - 1)
            controls[dst] = control.decode(count, after=ids[-1])
            del control
        for src in names:
            source, moved = live(src), {}
            source.prefill(ids[:-1])
            for dst in names:
                if dst != src:
                    there = live(dst)
                    hop(source, there)
                    moved[dst] = there.decode(count, after=ids[-1])
                    del there
            alone = source.decode(count, after=ids[-1])
            del source
            for dst, tokens in moved.items():
                found[f"{src} -> {dst}, {length}"] = {
                    "alone": alone,
                    "moved": tokens,
                    "zeros": controls[dst],
                }
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    at = sys.argv.index("--")
    made = pairs(sys.argv[at + 1 :], [int(n) for n in sys.argv[2:at]], int(sys.argv[1]))
    print(f"\n{json.dumps(made)}", flush=True)
