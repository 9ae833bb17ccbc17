"""A little engine: a decoder over pages, a scheduler, and the hooks of a KV connector.

It computes one token of a sequence at a time, so that keys and values have the same bits however
they came about: computed, in any order, or loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LAYERS, HEADS, DIM, VOCAB, BLOCK_SIZE = 2, 2, 8, 64, 4


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    max_tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_computed_here: int = 0  # not loaded
    block_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def answer(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]


class Decoder:
    """Random weights. caches: K and V of each layer, (num_blocks, HEADS, BLOCK_SIZE, DIM)."""

    def __init__(self, num_blocks: int) -> None:
        generator = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        self.embedding, self.head = torch.randn(2, VOCAB, width, generator=generator)
        self.positions = torch.randn(512, width, generator=generator)
        self.weights = torch.randn(LAYERS, 4, width, width, generator=generator) * 2 / width**0.5
        self.caches = torch.full((LAYERS, 2, num_blocks, HEADS, BLOCK_SIZE, DIM), torch.nan)

    def next_token(self, token: int, position: int, block_ids: Sequence[int]) -> int:
        """Computes a token, of which it writes K and V. Returns the most likely next one."""
        x = self.embedding[token] * 0.3 + self.positions[position] * 0.3
        blocks = torch.tensor(block_ids[: position // BLOCK_SIZE + 1])
        for weights, cache in zip(self.weights, self.caches, strict=True):
            q, k, v = (weights[:3] @ torch.tanh(x)).view(3, HEADS, DIM)
            cache[:, block_ids[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = torch.stack(
                (k, v)
            )
            keys, values = self._rows(cache[:, blocks], position + 1)
            scores = torch.softmax((keys @ q[:, :, None])[..., 0] / DIM**0.5, dim=-1)
            x = x + weights[3] @ (scores[:, None] @ values)[:, 0].flatten()
        return int((self.head @ torch.tanh(x)).argmax())

    def _rows(self, blocks: Tensor, num_tokens: int) -> Tensor:
        """(2, blocks, heads, tokens, dim) -> (2, heads, num_tokens, dim)."""
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]


class Engine:
    """Requests run side by side; a prompt is computed `budget` tokens a step."""

    def __init__(self, num_blocks: int = 200, budget: int = 32) -> None:
        self.decoder = Decoder(num_blocks)
        self.budget = budget
        self.connector: Any = None
        self.free = list(range(1, num_blocks))  # block 0 is nobody's
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}  # finished; their blocks are being saved
        self.num_requests = self.num_steps = 0

    def add(self, tokens: Sequence[int], max_tokens: int = 8) -> Request:
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", list(tokens), max_tokens)
        self.waiting.append(request)
        return request

    def ask(self, tokens: Sequence[int], max_tokens: int = 8) -> Request:
        request = self.add(tokens, max_tokens)
        self.finish_all()
        return request

    def finish_all(self) -> None:
        while self.waiting or self.loading or self.running or self.held:
            self.step()

    def abort(self, request: Request) -> None:
        """Its blocks stay while it loads: the load may still write to them."""
        if self.connector is not None:
            self.connector.aborted(request)
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request.request_id in self.loading:
            request.max_tokens = 0

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < 10_000, "a request waits for ever"
        connector = self.connector
        for _ in range(len(self.waiting)):
            self._admit(self.waiting.popleft())
        stops = {}
        for request in self.running:
            start = request.num_computed_tokens
            stops[request.request_id] = min(start + self.budget, len(request.all_token_ids))
        if connector is not None:
            connector.begin_step(self.running, stops)
        for request in self.running:
            self._compute(request, stops[request.request_id])
        if connector is not None:
            connector.end_step()
            self._take_reports()
        for request in [r for r in self.running if len(r.answer) >= r.max_tokens]:
            self.running.remove(request)
            if connector is not None and connector.finished(request):
                self.held[request.request_id] = request
            else:
                self._free(request)

    def _admit(self, request: Request) -> None:
        """Looks a request up, and gives it blocks for its prompt and its answer."""
        count = 0 if self.connector is None else self.connector.lookup(request)
        num_blocks = -(-(request.num_prompt_tokens + request.max_tokens) // BLOCK_SIZE)
        if count is None or num_blocks > len(self.free):
            self.waiting.append(request)
            return
        request.block_ids, self.free = self.free[:num_blocks], self.free[num_blocks:]
        if self.connector is not None:
            self.connector.allocated(request, count)
        if count:
            request.num_computed_tokens = count
            self.loading[request.request_id] = request
        else:
            self.running.append(request)

    def _compute(self, request: Request, stop: int) -> None:
        for position in range(request.num_computed_tokens, stop):
            token = request.all_token_ids[position]
            following = self.decoder.next_token(token, position, request.block_ids)
            request.num_computed_here += 1
        request.num_computed_tokens = stop
        if stop == len(request.all_token_ids):
            request.all_token_ids.append(following)

    def _take_reports(self) -> None:
        """Requests that were saved, and those that were loaded, with how many tokens."""
        saved, loaded = self.connector.reports()
        for request_id in saved:
            self._free(self.held.pop(request_id))
        for request_id, num_tokens in loaded.items():
            request = self.loading.pop(request_id)
            if request.max_tokens == 0:
                self._free(request)
            else:
                request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
                self.running.append(request)

    def _free(self, request: Request) -> None:
        self.free += request.block_ids
