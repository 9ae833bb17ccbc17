"""What must happen before a forward pass: blocks for the entries that it completes.

Runs between two captured graphs. The graph itself takes no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvx_core.argument_checks import bad_argument, instance
from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid._arrays import integer_rows
from kvx_core.hybrid.allocator import require_outside_capture
from kvx_core.hybrid.block_tables import Needs
from kvx_core.hybrid.forward_step import Step
from kvx_core.hybrid.manager import KVCacheManager
from kvx_core.hybrid.schema import LayerCacheSchema


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PreparedForward:
    """What prepare_forward found, by layer_idx and in the order of the requests. Its dicts are made
    when they are asked for.
    """

    _schemas: Mapping[int, LayerCacheSchema]
    _layers: Sequence[int]  # those of _needs
    _step: Step
    _needs: Needs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PreparedForward):
            return NotImplemented
        names = ("new_entries", "new_blocks", "tail_lens")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PreparedForward(new_entries={self.new_entries}, new_blocks={self.new_blocks})"

    @property
    def new_entries(self) -> dict[int, list[int]]:
        """Entries that the step completes."""
        entries = self._step.entries
        counts = {ratio: (valid - made).tolist() for ratio, (made, valid) in entries.items()}
        return self._by_layer(counts)

    @property
    def new_blocks(self) -> dict[int, list[int]]:
        """Blocks that were taken for them."""
        slots = self._step.slots
        found = {layer: [0] * len(slots) for layer in self._schemas}
        places = {slot: i for i, slot in enumerate(slots.tolist())}
        taking = [places[slot] for slot in self._needs.slots.tolist()]
        for layer, counts in zip(self._layers, self._needs.counts.tolist(), strict=True):
            for i, count in zip(taking, counts, strict=True):
                found[layer][i] = count
        return found

    @property
    def tail_lens(self) -> dict[int, list[int]]:
        """Tokens after the step that no entry stands for."""
        step = self._step
        return self._by_layer({ratio: (step.after % ratio).tolist() for ratio in step.entries})

    def _by_layer(self, counts: Mapping[int, list[int]]) -> dict[int, list[int]]:
        none = [0] * len(self._step.slots)
        found = {layer: schema.compression_ratio for layer, schema in self._schemas.items()}
        return {layer: list(counts.get(ratio, none)) for layer, ratio in found.items()}


def prepare_forward(
    manager: KVCacheManager,
    request_slots: Sequence[int],
    num_tokens_before: Sequence[int],
    num_tokens_after: Sequence[int],
) -> PreparedForward:
    """Takes the blocks that a forward pass needs, and says to the caches which tokens it brings.

    request_slots:     slots of admitted requests, each once
    num_tokens_before: tokens of each request in the cache: 0 at first, then num_tokens_after of
                       its last step or, if that step is prepared anew, num_tokens_before. On the
                       host a step is refused if its pass has run and it is prepared anew, or if
                       the pass before has run in some layers only
    num_tokens_after:  tokens of each after the pass; not fewer
    Blocks are those of the entries after the pass that the request does not hold yet, so that a
    second call with the same numbers takes none.
    Mutates the layers' block tables and manager.step. All or nothing: if a layer has not enough
    free blocks, no layer's blocks are taken and the step stays as it was.
    Raises OutOfBlocksError, InvalidArgumentError, and InternalError inside a capture.
    """
    instance("manager", manager, KVCacheManager, "a KVCacheManager")
    named = {
        "request_slots": request_slots,
        "num_tokens_before": num_tokens_before,
        "num_tokens_after": num_tokens_after,
    }
    for name, numbers in named.items():
        if not isinstance(numbers, (list, tuple)):
            raise bad_argument(name, numbers, "a list or tuple of integers, one per request")
        if len(numbers) != len(request_slots):
            raise InvalidArgumentError(
                f"{name} has {len(numbers)} numbers, expected {len(request_slots)}, one per request"
            )
    most = manager.max_requests - 1, manager.max_context_tokens, manager.max_context_tokens
    slots, before, after = integer_rows(named, most)
    manager.require_requests("request_slots", slots)
    for i in np.flatnonzero(after < before):
        raise InvalidArgumentError(
            f"num_tokens_after[{i}] is {after[i]}, expected at least {before[i]}, "
            f"num_tokens_before[{i}]"
        )
    manager.require_follows("num_tokens_before", slots, before)
    manager.step.require_room(int((after - before).sum()))
    require_outside_capture(manager.device)

    step = Step.of(slots, before, after, manager.step.compression)
    needs = manager.tables.missing(slots, {ratio: n for ratio, (_, n) in step.entries.items()})
    # All layers are asked before the first block is taken.
    manager.tables.require_free(needs)
    manager.tables.take(needs)
    manager.step.fill(step)
    manager.keep_steps(slots, before, after)
    return PreparedForward(manager.schemas, manager.tables.layers, step, needs)
