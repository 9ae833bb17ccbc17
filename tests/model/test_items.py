"""Digests of images, sounds and embeddings, and the ids of their positions."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import InvalidArgumentError
from kvx_core.model.items import item_digest, item_ids

PIXELS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_every_byte_counts_and_what_it_is() -> None:
    others: list[tuple[str, Any]] = [
        ("image", PIXELS),
        ("video", PIXELS),
        ("image", PIXELS.reshape(3, 2, 4)),
        ("image", PIXELS.astype(np.float64)),
        ("image", PIXELS.view(np.int32)),
        ("image", PIXELS.tobytes()),
        ("image", [PIXELS]),
        ("image", {"": PIXELS}),
        ("image", PIXELS.tolist()),
        ("image", None),
        ("image", "None"),
        ("image", 1),
        ("image", 1.0),
        ("image", True),
        ("image", ["a", "b"]),
        ("image", ["ab"]),
        ("image", [["a"], "b"]),
        ("image", np.zeros((0, 3))),
        ("image", np.zeros((3, 0))),
        ("image", torch.zeros(4, dtype=torch.bfloat16)),
        ("image", torch.zeros(4, dtype=torch.float16)),
        ("image", torch.zeros(())),
    ]
    changed = PIXELS.copy()
    changed[1, 2, 3] += 1
    others.append(("image", changed))
    digests = {item_digest(kind, {"data": data}) for kind, data in others}
    digests |= {item_digest("image", {"pixels": PIXELS}), item_digest("image", {})}
    assert len(digests) == len(others) + 2


def test_what_does_not_count() -> None:
    """Memory order, and which library has the array."""
    first = item_digest("image", {"a": PIXELS, "b": 1})
    turned = np.asfortranarray(PIXELS)
    assert item_digest("image", {"b": 1, "a": turned}) == first
    assert item_digest("image", {"a": torch.from_numpy(PIXELS), "b": 1}) == first
    strided = torch.from_numpy(np.ascontiguousarray(PIXELS.transpose(2, 0, 1))).permute(1, 2, 0)
    assert item_digest("image", {"a": strided, "b": 1}) == first


@pytest.mark.parametrize("value", [object(), np.array(["text"]), np.array([None]), {1, 2}])
def test_values_that_have_no_digest(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="expected arrays, tensors, numbers"):
        item_digest("image", {"data": [value]})


def test_ids() -> None:
    """As docs/store_format.md has them."""
    digest = item_digest("image", {"data": PIXELS})
    ids = item_ids(digest, 1000)
    raw = hashlib.shake_256(b"kvx item ids" + digest).digest(8000)
    expected = [
        int.from_bytes(raw[8 * i : 8 * i + 8], "little") % 2**63 - 2**63 for i in range(1000)
    ]
    assert ids.tolist() == expected
    assert (ids < 0).all()
    assert len(set(expected)) == 1000
    assert item_ids(digest, 5).tolist() == expected[:5]
    assert not set(item_ids(item_digest("image", {"data": 0}), 1000).tolist()) & set(expected)
