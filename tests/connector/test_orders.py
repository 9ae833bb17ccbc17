"""A Policy in orders that nobody has thought of: random engines, which check what it plans."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvx_core import PrefixStore
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import Scope
from kvx_core.connector.policy import Policy
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.spread import SaveBudget
from kvx_core.snapshot import Precision
from tests.connector.random_cache import CHUNK, CONVERSATIONS, Stored
from tests.connector.random_engine import RandomEngine
from tests.connector.toy_engine import HEADS, LAYERS
from tests.stores_memory import InMemory


class Salted(Policy):
    """A Policy of requests that have a salt, or an image: then it is None."""

    __slots__ = ()

    def salt_of(self, request: Any) -> str | None:
        salt: str | None = request.salt
        return salt


def engine(seed: int, options: dict[str, Any]) -> RandomEngine:
    blobs, boundary = InMemory(), Boundary(pytest.fail)
    store = PrefixStore(
        blobs,
        fingerprint="toy",
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        precision=Precision.of("float32"),
        chunk_tokens=CHUNK,
    )
    own = {name: options.pop(name) for name in ("ahead", "drafts") if name in options}
    policy = Salted(
        Scoped(store),
        boundary,
        Lookups(boundary, seconds=60),
        CHUNK,
        **{"asynchronous": True} | options,
    )
    stored = Stored(store, blobs)
    for start in range(0, 40, CHUNK):  # as another engine has stored them
        stored.save(store, Scope(), CONVERSATIONS[0][: start + CHUNK], start)
    return RandomEngine(policy, stored, random.Random(seed), others=policy.others_fill, **own)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"asynchronous": False},
        {"others_fill": True, "min_tokens": 1},
        {"others_fill": True, "asynchronous": False},
        {"spread": SaveBudget(CHUNK)},
        {"window": 10},
        {"window": 6, "others_fill": True},
        {"save_generated": False, "asynchronous": False},
        {"ahead": True, "spread": SaveBudget(CHUNK), "drafts": True},
        {"drafts": True, "asynchronous": False},
        {"consumes": False, "ahead": True},
        {"produces": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_is_stored_and_loaded_is_what_it_is_called(options: dict[str, Any]) -> None:
    seen = Counter[str]()
    for seed in range(4):
        one = engine(seed, dict(options))
        for _ in range(40):
            one.step()
        one.finish_all()
        one.policy.lookups.shutdown()
        seen += one.seen
    expected = {"saves"} if one.policy.produces else set()
    if one.policy.produces and not one.policy.window:
        expected |= {"handed over", "stored to the end"}
    if one.policy.consumes:
        expected |= {"loads", "failed loads"}
    assert seen.keys() >= expected
