"""Keywords that no call has are named, with those that it has."""

from __future__ import annotations

import re

import pytest

from kvx_core.ops.options import GatherOptions, MoveOptions, WriteOptions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (MoveOptions, "num_heads, zero_fill, find_scales, requantize, hadamard_k, hadamard_v"),
        (WriteOptions, "k_scale, v_scale, find_scales, transfer"),
        (GatherOptions, "k_scale, v_scale, null_block_id, zero_fill, secondary_num_blocks"),
    ],
    ids=["migrate", "write_kv", "gather_kv"],
)
def test_unknown_keywords(options: type[MoveOptions], expected: str) -> None:
    for name in ("heads", "key"):  # `key` is a field, but no keyword
        sentence = f"unexpected keyword {name!r}, expected {expected}"
        with pytest.raises(TypeError, match=re.escape(sentence)):
            options.of({name: 1})
