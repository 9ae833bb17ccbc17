"""The tensors that say which tokens a forward pass brings, at addresses that never change.

prepare_forward fills them between two captured graphs; a graph reads what lies there when it is
replayed. Tensors over all request slots have their size for ever, those over the requests and
tokens of a step are the beginnings of larger ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid.block_tables import Counts
from kvx_core.hybrid.ops import Spans


@dataclass(frozen=True, slots=True)
class Flush:
    """The entry that each request slot completes in a step, if its tokens are all of one entry.

    valid_mask: (R,) bool, slots whose entry is complete
    entry_ids: (R,) int32, the entry of each slot, counted from the first of its sequence; 0 where
                the mask is False
    positions: (R,) int32, the position that the entry is rotated to: that of its first token
    """

    valid_mask: Tensor
    entry_ids: Tensor
    positions: Tensor


class Compression:
    """What a step does to layers of one compression ratio.

    ratio:        tokens per entry
    valid_lens:   (R,) int32, complete entries after the step of each slot in it: tokens // ratio;
                  0 for other slots
    most_entries: of how many entries the tokens of a request are, at most; 1 in decoding
    flush:        what is complete, if that is 1
    """

    def __init__(self, ratio: int, numbers: Tensor, mask: Tensor) -> None:
        """numbers: (3, R) int32, valid_lens and the numbers of `flush`; mask: (R,) bool."""
        self.ratio = ratio
        self.most_entries = 0
        self.valid_lens, entry_ids, positions = numbers.unbind()
        self.flush = Flush(mask, entry_ids, positions)


class Step(NamedTuple):
    """What a step does, as the host knows it."""

    slots: Counts  # (B,), distinct
    before: Counts  # (B,) tokens of each request before the step
    after: Counts
    entries: Mapping[int, tuple[Counts, Counts]]  # complete ones before and after, by ratio

    @classmethod
    def of(cls, slots: Counts, before: Counts, after: Counts, ratios: Iterable[int]) -> Step:
        """With the entries counted, once for all layers of a ratio."""
        return cls(slots, before, after, {r: (before // r, after // r) for r in ratios})


class ForwardStep:
    """The requests and tokens of the current forward pass; B requests, R request slots.

    request_slots: (B,) int32
    positions:     (tokens,) int32, of each token in its sequence, the requests one after the other
    request_ids:   (tokens,) int32, the request of each token, an index into request_slots
    token_slots:   (tokens,) int32, the request slot of each token
    token_spans:   request_ids, and the first token of each request; None if one_each
    all_slots:     (R,) int32, 0 to R - 1: flushes run over all slots, and masks choose
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
        self._starts = room(max_requests + 1)
        self._request_ids, self._token_slots = room(max_tokens), room(max_tokens)
        self.all_slots = torch.arange(max_requests, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(len(ratios), 3, max_requests, dtype=torch.int32, device=device)
        self._masks = torch.zeros(len(ratios), max_requests, dtype=torch.bool, device=device)
        self.compression = {
            ratio: Compression(ratio, self._numbers[i], self._masks[i])
            for i, ratio in enumerate(sorted(ratios))
        }
        none = np.zeros(0, dtype=np.int64)
        self._step = Step(none, none, none, {})
        self.one_each = True
        self.token_spans: Spans | None = None
        self._shown = -1, -1
        self._show(0, 0)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Slot, tokens before and tokens after the step of each request."""
        columns = (numbers.tolist() for numbers in self._step[:3])
        return list(zip(*columns, strict=True))

    def _show(self, num_requests: int, num_tokens: int) -> None:
        if (num_requests, num_tokens) == self._shown:
            return
        self._shown = num_requests, num_tokens
        self.request_slots = self._slots[:num_requests]
        self.positions = self._positions[:num_tokens]
        self.request_ids = self._request_ids[:num_tokens]
        self.token_slots = self._token_slots[:num_tokens]

    def fill(self, step: Step) -> None:
        """Sets the requests and tokens of the next step."""
        slots, before, after, entries = step
        counts = after - before
        total = int(counts.sum())
        self.require_room(total)
        self._show(len(slots), total)
        self.one_each = total == np.count_nonzero(counts)
        starts = np.arange(len(slots) + 1)
        rows, positions, of_tokens = starts[:-1], before, slots
        if not self.one_each or total < len(slots):  # not the usual step, a token of each request
            rows = np.repeat(rows, counts)
            np.cumsum(counts, out=starts[1:])
            positions, of_tokens = np.arange(total) + (before - starts[:-1])[rows], slots[rows]
        _set(self.request_slots, slots)
        _set(self.request_ids, rows)
        _set(self.positions, positions)
        _set(self.token_slots, of_tokens)
        self._step = step
        self.token_spans = None
        if not self.one_each:
            self.token_spans = Spans(self.request_ids, self._starts[: len(starts)])
            _set(self.token_spans.starts, starts)

        numbers = np.zeros(self._numbers.shape, dtype=np.int32)
        masks = np.zeros(self._masks.shape, dtype=bool)
        for i, (ratio, compression) in enumerate(self.compression.items()):
            made, valid = entries[ratio]
            completes = made < valid
            of_slot = numbers[i]
            of_slot[0, slots] = valid
            of_slot[1, slots] = ids = made * completes
            of_slot[2, slots] = ids * ratio
            masks[i, slots] = completes
            compression.most_entries = int(((after - 1) // ratio - made).max(initial=-1)) + 1
        _set(self._numbers, numbers)
        _set(self._masks, masks)

    def require_room(self, num_tokens: int) -> None:
        """Raises InvalidArgumentError for a step of more tokens than there is room for."""
        if num_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"the step brings {num_tokens} tokens, expected at most {self.max_tokens}: split "
                "it, or raise max_tokens_per_step of the manager"
            )


def _set(tensor: Tensor, numbers: NDArray[Any]) -> None:
    tensor.copy_(torch.from_numpy(numbers))
