"""The tensors that say which tokens a forward pass brings, at addresses that never change.

prepare_forward fills them between two captured graphs; a graph reads what lies there when it is
replayed. Tensors over all request slots have their size for ever, those over the requests and
tokens of a step are the beginnings of larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvx_core.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Flush:
    """At most one new entry for each request slot: tokens up to the end of an entry, and the entry.

    token_slots: (tokens,) int32, the request slot of each token; -1: of another flush
    mask:        (R,) bool, slots whose entry is complete
    entry_ids:   (R,) int32, the entry of each slot, counted from the first of its sequence; 0 where
                 the mask is False
    positions:   (R,) int32, the position that the entry is rotated to: that of its first token
    """

    token_slots: Tensor
    mask: Tensor
    entry_ids: Tensor
    positions: Tensor


class Compression:
    """What a step does to layers of one compression ratio. All is by request slot, (R,).

    ratio:      tokens per entry
    valid_lens: int32, complete entries after the step: tokens // ratio
    rounds:     flushes that the step takes, one entry of each request at a time; 1 in decoding
    """

    def __init__(self, ratio: int, max_requests: int, token_slots: Tensor) -> None:
        device = token_slots.device
        self.ratio = ratio
        self.rounds = 0
        self.valid_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._before = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._after = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._first = Flush(
            token_slots,
            torch.zeros(max_requests, dtype=torch.bool, device=device),
            torch.zeros(max_requests, dtype=torch.int32, device=device),
            torch.zeros(max_requests, dtype=torch.int32, device=device),
        )

    def fill(self, before: Tensor, after: Tensor, rounds: int, token_slots: Tensor) -> None:
        """Sets what the next step does.

        before, after: (R,) int32, tokens of every slot
        """
        self._before.copy_(before)
        self._after.copy_(after)
        self.rounds = rounds
        torch.div(self._after, self.ratio, rounding_mode="floor", out=self.valid_lens)
        first = Flush(token_slots, self._first.mask, self._first.entry_ids, self._first.positions)
        self._set(first, 0)
        self._first = first

    def flush(self, index: int, positions: Tensor, token_slots: Tensor) -> Flush:
        """Flush `index` of the step. Allocates nothing if the step has one.

        positions, token_slots: (tokens,), those of the step
        """
        if self.rounds <= 1:
            return self._first
        first_entry = self._before[token_slots.long()] // self.ratio
        in_this = positions // self.ratio - first_entry == index
        found = Flush(
            torch.where(in_this, token_slots, -1).to(torch.int32),
            torch.empty_like(self._first.mask),
            torch.empty_like(self._first.entry_ids),
            torch.empty_like(self._first.positions),
        )
        self._set(found, index)
        return found

    def _set(self, flush: Flush, index: int) -> None:
        torch.div(self._before, self.ratio, rounding_mode="floor", out=flush.entry_ids)
        flush.entry_ids.add_(index)
        torch.lt(flush.entry_ids, self.valid_lens, out=flush.mask)
        flush.entry_ids.mul_(flush.mask)
        torch.mul(flush.entry_ids, self.ratio, out=flush.positions)


class ForwardStep:
    """The requests and tokens of the current forward pass; B requests, R request slots.

    request_slots: (B,) int32
    positions:     (tokens,) int32, of each token in its sequence, the requests one after the other
    request_ids:   (tokens,) int32, the request of each token, an index into request_slots
    token_slots:   (tokens,) int32, the request slot of each token
    all_slots:     (R,) int32, 0 to R - 1: flushes run over all slots, and masks choose
    Raises InvalidArgumentError for a step of more tokens than there is room for.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, ratios: set[int], device: torch.device
    ) -> None:
        def room(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.max_tokens = max_tokens
        self.device = device
        self._slots, self._positions = room(max_requests), room(max_tokens)
        self._request_ids, self._token_slots = room(max_tokens), room(max_tokens)
        self.all_slots = torch.arange(max_requests, dtype=torch.int32, device=device)
        self.compression = {
            ratio: Compression(ratio, max_requests, self._token_slots[:0]) for ratio in ratios
        }
        self._show(0, 0)

    def _show(self, num_requests: int, num_tokens: int) -> None:
        self.request_slots = self._slots[:num_requests]
        self.positions = self._positions[:num_tokens]
        self.request_ids = self._request_ids[:num_tokens]
        self.token_slots = self._token_slots[:num_tokens]

    def fill(self, slots: list[int], before: list[int], after: list[int]) -> None:
        """Sets the requests of the next step, and the tokens that each has before and after."""
        counts = torch.tensor(after) - torch.tensor(before)
        total = int(counts.sum())
        self.require_room(total)
        self._show(len(slots), total)
        rows = torch.repeat_interleave(torch.arange(len(slots)), counts)
        starts = torch.cumsum(counts, 0) - counts
        host_slots = torch.tensor(slots, dtype=torch.int64)
        self.request_slots.copy_(host_slots)
        self.request_ids.copy_(rows)
        self.positions.copy_(torch.arange(total) - starts[rows] + torch.tensor(before)[rows])
        self.token_slots.copy_(host_slots[rows])
        for ratio, compression in self.compression.items():
            first, last = torch.zeros(2, len(self.all_slots), dtype=torch.int32)
            first[host_slots] = torch.tensor(before, dtype=torch.int32)
            last[host_slots] = torch.tensor(after, dtype=torch.int32)
            rounds = max(
                ((b - 1) // ratio - a // ratio + 1 for a, b in zip(before, after, strict=True)),
                default=0,
            )
            compression.fill(first, last, max(rounds, 0), self.token_slots)

    def require_room(self, num_tokens: int) -> None:
        """Raises InvalidArgumentError for a step of more tokens than there is room for."""
        if num_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"the step brings {num_tokens} tokens, expected at most {self.max_tokens}: split "
                "it, or raise max_tokens_per_step of the manager"
            )
