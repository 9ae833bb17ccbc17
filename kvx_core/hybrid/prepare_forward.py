"""What must happen before a forward pass: blocks for the entries that it completes.

Runs between two captured graphs. The graph itself takes no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid.manager import KVCacheManager
from kvx_core.words import instance, wrong


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """What prepare_forward found, by layer_idx and in the order of the requests."""

    new_entries: dict[int, list[int]]  # entries that the step completes
    new_blocks: dict[int, list[int]]  # blocks that were taken for them
    tail_lens: dict[int, list[int]]  # tokens after the step that no entry stands for


def prepare_forward(
    manager: KVCacheManager,
    request_slots: Sequence[int],
    num_tokens_before: Sequence[int],
    num_tokens_after: Sequence[int],
) -> PreparedForward:
    """Takes the blocks that a forward pass needs, and says to the caches which tokens it brings.

    request_slots:     slots of admitted requests, each once
    num_tokens_before: tokens of each request in the cache: 0 at first, then num_tokens_after of
                       its last step or, if that step is prepared anew, num_tokens_before
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
            raise wrong(name, numbers, "a list or tuple of integers, one per request")
        if len(numbers) != len(request_slots):
            raise InvalidArgumentError(
                f"{name} has {len(numbers)} numbers, expected {len(request_slots)}, one per request"
            )
    slots = [manager.slot(f"request_slots[{i}]", slot) for i, slot in enumerate(request_slots)]
    if len(set(slots)) < len(slots):
        raise InvalidArgumentError(f"request_slots is {slots}, expected each slot once")
    before = _tokens(manager, "num_tokens_before", num_tokens_before)
    after = _tokens(manager, "num_tokens_after", num_tokens_after)
    for i, (first, last) in enumerate(zip(before, after, strict=True)):
        if last < first:
            raise InvalidArgumentError(
                f"num_tokens_after[{i}] is {last}, expected at least {first}, "
                f"num_tokens_before[{i}]"
            )
        manager.require_follows(f"num_tokens_before[{i}]", slots[i], first)
    manager.step.require_room(sum(after) - sum(before))

    taken: dict[int, dict[int, int]] = {}
    for layer, schema in manager.schemas.items():
        taken[layer] = {}
        if not schema.entries_per_block:
            continue
        for i, slot in enumerate(slots):
            count = schema.blocks(after[i]) - manager.num_held(layer, slot)
            if count > 0:
                taken[layer][slot] = count
    # All layers are asked before the first block is taken.
    for layer, counts in taken.items():
        if counts:
            manager.require_free({layer: sum(counts.values())}, counts)
    for layer, counts in taken.items():
        if counts:
            manager.take_blocks(layer, counts)
    manager.step.fill(slots, before, after)
    manager.keep_steps(slots, before, after)
    schemas = manager.schemas.items()
    return PreparedForward(
        new_entries={
            layer: [s.entries(b) - s.entries(a) for a, b in zip(before, after, strict=True)]
            for layer, s in schemas
        },
        new_blocks={layer: [taken[layer].get(slot, 0) for slot in slots] for layer, _ in schemas},
        tail_lens={
            layer: [b % s.compression_ratio if s.compression_ratio else 0 for b in after]
            for layer, s in schemas
        },
    )


def _tokens(manager: KVCacheManager, name: str, numbers: Sequence[Any]) -> list[int]:
    return [manager.tokens(f"{name}[{i}]", number) for i, number in enumerate(numbers)]
