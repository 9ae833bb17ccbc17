"""The tensors that say which tokens a forward pass brings, at addresses that never change.

prepare_forward fills them between two captured graphs; a graph reads what lies there when it is
replayed. Tensors over all request slots have their size for ever, those over the requests and
tokens of a step are the beginnings of larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx_core.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Flush:
    """The entry that each request slot completes in a step, if its tokens are all of one entry.

    mask:      (R,) bool, slots whose entry is complete
    entry_ids: (R,) int32, the entry of each slot, counted from the first of its sequence; 0 where
               the mask is False
    positions: (R,) int32, the position that the entry is rotated to: that of its first token
    """

    mask: Tensor
    entry_ids: Tensor
    positions: Tensor


class Compression:
    """What a step does to layers of one compression ratio.

    ratio:        tokens per entry
    valid_lens:   (R,) int32, complete entries of each slot after the step: tokens // ratio
    most_entries: of how many entries the tokens of a request are, at most; 1 in decoding
    flush:        what is complete, if that is 1
    """

    def __init__(self, ratio: int, max_requests: int, device: torch.device) -> None:
        def by_slot(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_requests, dtype=dtype, device=device)

        self.ratio = ratio
        self.most_entries = 0
        self.valid_lens = by_slot(torch.int32)
        self.flush = Flush(by_slot(torch.bool), by_slot(torch.int32), by_slot(torch.int32))

    def fill(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Sets what the next step does; see ForwardStep.spans."""
        ratio, slots = self.ratio, len(self.valid_lens)
        valid, first = torch.zeros(2, slots, dtype=torch.int32)
        for slot, before, after in spans:
            valid[slot], first[slot] = after // ratio, before // ratio
        mask = first < valid
        self.valid_lens.copy_(valid)
        self.flush.mask.copy_(mask)
        self.flush.entry_ids.copy_(first * mask)
        self.flush.positions.copy_(first * mask * ratio)
        self.most_entries = max(
            ((after - 1) // ratio - before // ratio + 1 for _, before, after in spans), default=0
        )


class ForwardStep:
    """The requests and tokens of the current forward pass; B requests, R request slots.

    request_slots: (B,) int32
    positions:     (tokens,) int32, of each token in its sequence, the requests one after the other
    request_ids:   (tokens,) int32, the request of each token, an index into request_slots
    token_slots:   (tokens,) int32, the request slot of each token
    all_slots:     (R,) int32, 0 to R - 1: flushes run over all slots, and masks choose
    spans:         slot, tokens before and tokens after the step of each request, as the host knows
                   them
    one_each:      no request brings more than one token, as in decoding: a token's place in its
                   window is taken by an atomic addition
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
        self.compression = {ratio: Compression(ratio, max_requests, device) for ratio in ratios}
        self.spans: list[tuple[int, int, int]] = []
        self.one_each = True
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
        self.spans = list(zip(slots, before, after, strict=True))
        self.one_each = all(last - first <= 1 for _, first, last in self.spans)
        for compression in self.compression.values():
            compression.fill(self.spans)

    def require_room(self, num_tokens: int) -> None:
        """Raises InvalidArgumentError for a step of more tokens than there is room for."""
        if num_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"the step brings {num_tokens} tokens, expected at most {self.max_tokens}: split "
                "it, or raise max_tokens_per_step of the manager"
            )
