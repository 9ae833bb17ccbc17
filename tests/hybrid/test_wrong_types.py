"""Arguments of kvx_core.hybrid, given values of other types: errors name the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvx_core import InvalidArgumentError, UnsupportedError
from kvx_core.hybrid import (
    AttentionType,
    BlockAllocator,
    DSV4Config,
    IndexerPages,
    KVCacheManager,
    LayerSpec,
    PagedCache,
    RecordPages,
    StateCache,
    build_schema,
    byte_pages,
    bytes_per_token,
    compute_block_budget,
    gqa_bytes_per_token,
    migrate_pages,
    migrate_pending,
    ops,
    page_bytes,
    pending_to_tails,
    pending_tokens,
    prepare_forward,
    requantize_entries,
    requantize_keys,
    schedule_of,
    tails_to_pending,
)

CONFIG, SPEC = DSV4Config(), LayerSpec(0, AttentionType.CSA)
SCHEMA = build_schema(CONFIG, SPEC)
CACHES = KVCacheManager(CONFIG, [SPEC], 1, 128)
BYTES = torch.zeros(1, 37440, dtype=torch.uint8)
PAGES, KEYS = RecordPages(BYTES, 0, 64, 4), IndexerPages(BYTES, 0, 64, "fp8", hadamard=False)
STATE = StateCache(SCHEMA, 1)
ROWS, AT = torch.zeros(1, 4, 8), torch.zeros(1, dtype=torch.int64)

# A call, its arguments by name, and those that are given other values.
CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (DSV4Config, {"head_dim": 512}, "head_dim"),
    (LayerSpec, {"layer_idx": 0, "attn": AttentionType.CSA}, "layer_idx attn"),
    (build_schema, {"config": CONFIG, "spec": SPEC}, "config spec"),
    (schedule_of, {"compress_ratios": [4], "num_layers": 1}, "compress_ratios num_layers"),
    (
        compute_block_budget,
        {
            "config": CONFIG,
            "schedule": [SPEC],
            "max_context_tokens": 1,
            "max_concurrent_requests": 1,
        },
        "schedule max_context_tokens max_concurrent_requests",
    ),
    (
        bytes_per_token,
        {"schedule": [SPEC], "entry_bytes": 1, "indexer_bytes": 1},
        "schedule entry_bytes indexer_bytes",
    ),
    (gqa_bytes_per_token, {"num_layers": 1}, "num_layers"),
    (BlockAllocator, {"num_blocks": 1}, "num_blocks"),
    (BlockAllocator(1).acquire, {"count": 1}, "count"),
    (BlockAllocator(1).release, {"block_ids": []}, "block_ids"),
    (PagedCache, {"schema": SCHEMA, "num_blocks": 1}, "schema num_blocks"),
    (StateCache, {"schema": SCHEMA, "max_requests": 1}, "schema max_requests"),
    (
        KVCacheManager,
        {
            "config": CONFIG,
            "schedule": [SPEC],
            "max_concurrent_requests": 1,
            "max_context_tokens": 128,
        },
        "config schedule max_concurrent_requests max_context_tokens",
    ),
    (CACHES.admit_request, {"num_tokens": 0}, "num_tokens"),
    (CACHES.release_request, {"request_slot": 0}, "request_slot"),
    (
        prepare_forward,
        {"manager": CACHES, "request_slots": [], "num_tokens_before": [], "num_tokens_after": []},
        "manager request_slots num_tokens_before num_tokens_after",
    ),
    (page_bytes, {"entries": 1}, "entries"),
    (byte_pages, {"tensor": BYTES, "num_bytes": 1}, "tensor num_bytes"),
    (
        RecordPages,
        {"pages": BYTES, "layer": 0, "entries": 64, "tokens_per_entry": 4},
        "pages layer entries tokens_per_entry",
    ),
    (
        IndexerPages,
        {"pages": BYTES, "layer": 0, "entries": 64, "encoding": "fp8", "hadamard": False},
        "pages layer entries encoding hadamard",
    ),
    (
        migrate_pages,
        {"src": [PAGES], "dst": [PAGES], "src_table": [[0]], "dst_table": [[0]], "seq_lens": [0]},
        "src dst",
    ),
    (
        requantize_entries,
        {"src": PAGES, "dst": PAGES, "src_blocks": [], "dst_blocks": [], "num_entries": 0},
        "src dst num_entries",
    ),
    (
        requantize_keys,
        {"src": KEYS, "dst": KEYS, "src_blocks": [], "dst_blocks": [], "num_entries": 0},
        "src dst",
    ),
    (pending_tokens, {"num_tokens": 1, "ratio": 4, "overlap": True}, "num_tokens ratio"),
    (
        migrate_pending,
        {
            "src": ROWS,
            "dst": ROWS,
            "src_rows": AT,
            "dst_rows": AT,
            "positions": AT,
            "src_has_ape": True,
            "dst_has_ape": True,
        },
        "src dst",
    ),
    (
        pending_to_tails,
        {
            "state": STATE,
            "slot": 0,
            "src": ROWS,
            "src_rows": AT[:0],
            "num_tokens": 0,
            "src_has_ape": False,
            "indexer": False,
        },
        "state slot src src_rows num_tokens indexer",
    ),
    (
        tails_to_pending,
        {
            "state": STATE,
            "slot": 0,
            "dst": ROWS,
            "dst_rows": AT[:0],
            "num_tokens": 0,
            "dst_has_ape": False,
            "indexer": False,
        },
        "state slot dst dst_rows num_tokens indexer",
    ),
]


@pytest.mark.parametrize(
    ("call", "given", "name"),
    [
        pytest.param(call, given, name, id=f"{call.__name__}-{name}")
        for call, given, names in CALLS
        for name in names.split()
    ],
)
@pytest.mark.parametrize(
    "value", [None, 1.5, "x", object(), {"a": [1]}], ids=lambda v: type(v).__name__
)
def test_values_of_other_types(
    call: Callable[..., Any], given: dict[str, Any], name: str, value: object
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"\b{name}\b"):
        call(**{**given, name: value})


OPS: list[tuple[Callable[..., None], dict[str, torch.Tensor]]] = [
    (
        ops.append_swa,
        {
            "x": torch.ones(2, 12, dtype=torch.bfloat16),
            "positions": torch.tensor([5, 6]),
            "slots": torch.tensor([0, 1], dtype=torch.int32),
            "swa_fp8": torch.zeros(2, 4, 8, dtype=torch.uint8),
            "swa_rope": torch.zeros(2, 4, 4, dtype=torch.bfloat16),
            "swa_inv": torch.zeros(2, 4),
            "swa_pos": torch.zeros(2, 4, dtype=torch.int32),
            "swa_head": torch.zeros(2, dtype=torch.int32),
        },
    ),
    (
        ops.hca_reset_state,
        {
            "slots": torch.tensor([0, 1], dtype=torch.int32),
            "mask": torch.ones(2, dtype=torch.bool),
            "ka": torch.ones(2, 4, 8),
            "za": torch.ones(2, 4, 8),
            "tail_len": torch.zeros(2, dtype=torch.int32),
        },
    ),
]


@pytest.mark.parametrize(
    ("call", "tensors", "name"),
    [pytest.param(c, t, n, id=f"{c.__name__}-{n}") for c, t in OPS for n in t],
)
def test_tensors_whose_memory_is_not_what_they_say(
    call: Callable[..., None], tensors: dict[str, torch.Tensor], name: str
) -> None:
    """A shrunk storage would be read or written past its end; torch's negative bit is not seen."""
    given = {field: tensor.clone() for field, tensor in tensors.items()}
    call(*given.values())
    before = {field: tensor.clone() for field, tensor in given.items()}
    storage = given[name].untyped_storage()
    storage.resize_(storage.nbytes() - 1)
    with pytest.raises(InvalidArgumentError, match=f"^{name} has a storage of .* bytes, expected"):
        call(*given.values())
    if given[name].is_floating_point():
        given[name] = torch._neg_view(before[name].clone())
        with pytest.raises(UnsupportedError, match=rf"^{name}.is_neg\(\) is True"):
            call(*given.values())
    for field, tensor in given.items():
        assert field == name or torch.equal(tensor, before[field])


def test_extents_that_a_field_of_c_does_not_hold() -> None:
    """2**32 + 2 rows would be 2 of them."""
    tails, none = [torch.ones(2, 4, 16)] * 4, torch.zeros(2**32 + 2, 0)
    with pytest.raises(
        InvalidArgumentError, match=r"^out.shape is .* expected extents below 2\^31"
    ):
        ops.compress(*tails, None, None, None, 0.0, None, None, None, none)
    for eps in (1 << 2000, 1e39):
        with pytest.raises(
            InvalidArgumentError, match=r"^eps is .* expected a number that float32"
        ):
            ops.compress(*tails, None, None, None, eps, None, None, None, torch.zeros(2, 8))
