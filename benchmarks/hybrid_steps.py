"""The host's work before a decode step of DeepSeek-V4 Pro: prepare_forward, between two graphs.

Requests are at different tokens of their blocks, so that some take blocks at every step. A sample
is the mean of 128 steps, in which each request takes one block in each layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks import report
from benchmarks.cases import row
from benchmarks.hybrid_bytes import PRO
from benchmarks.rounds import Goal, compete
from kvx_core.hybrid import DSV4Config, KVCacheManager, prepare_forward, schedule_of

REQUESTS = (16, 64, 256)
_BUDGET, _SECONDS = "0.3 ms", 0.3e-3
_STEPS, _CONTEXT = 128, 4096
# What the host does depends on no dim of the model; these take little memory.
_CONFIG = DSV4Config(head_dim=2, rope_dim=1, indexer_head_dim=16, sliding_window=1)


class Steps:
    """Decode steps of R requests in all layers of Pro."""

    def __init__(self, requests: int) -> None:
        self.caches = KVCacheManager(
            _CONFIG, schedule_of(PRO, len(PRO)), requests, _CONTEXT, max_tokens_per_step=2**17
        )
        self.slots: list[int] = []
        self.counts: list[int] = []
        self._begin()

    def _begin(self) -> None:
        for slot in self.slots:
            self.caches.release_request(slot)
        self.slots = [self.caches.admit_request() for _ in range(self.caches.max_requests)]
        self.counts = [37 * i % _STEPS for i in range(len(self.slots))]
        prepare_forward(self.caches, self.slots, [0] * len(self.slots), self.counts)

    def __call__(self) -> float:
        """Processor seconds of a step, the mean of 128."""
        if max(self.counts) + _STEPS > _CONTEXT:
            self._begin()
        counts = [[count + i for count in self.counts] for i in range(_STEPS + 1)]
        begin = time.thread_time()
        for before, after in pairwise(counts):
            prepare_forward(self.caches, self.slots, before, after)
        seconds = time.thread_time() - begin
        self.counts = counts[-1]
        return seconds / _STEPS


def run(rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures steps of 16, 64 and 256 requests; prints and returns the results."""
    torch.set_num_threads(1)
    rows = []
    for requests in REQUESTS:
        case = f"prepare_forward, {requests}"
        if only not in case:
            continue
        timing = compete({"kvx": Steps(requests), _BUDGET: lambda: _SECONDS}, rounds, case=case)
        goals: Sequence[Goal] = (Goal(_BUDGET, 1.0),) if requests == max(REQUESTS) else ()
        rows.append(row(case, 1, 0, timing, goals))
        if len(rows) == 1:
            report.print_head((_BUDGET,))
        report.print_row(rows[-1], (_BUDGET,))
    return rows
