"""TokenChain: keys of a sequence that grows, each token hashed once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvx_core import InvalidArgumentError
from kvx_core.stores import token_chain
from kvx_core.stores.token_chain import TokenChain
from tests.connector.serving import prompt


def test_each_token_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real, here = token_chain.key_of, threading.get_ident()

    def counted(node: str, ids: Any) -> str:
        if threading.get_ident() == here:  # lookups of earlier tests may still run
            hashed.append(len(ids))
        return real(node, ids)

    monkeypatch.setattr(token_chain, "key_of", counted)
    tokens = prompt(10_000, 1)
    chain = TokenChain(tokens, "0" * 64, 16)
    assert chain.node(600) == TokenChain(np.array(tokens), "0" * 64, 16).node(600)
    assert len(hashed) == 1200
    for i in range(100):
        tokens.append(i)
        chain.node(len(tokens) // 16)
    assert len(hashed) == 1200 + 10_100 // 16 - 600
    assert chain.ids(0, 10_100).tolist() == tokens


def test_a_sequence_that_does_not_only_grow() -> None:
    """vLLM drops the last token of a session when its user goes on."""
    tokens = prompt(40, 15)
    chain = TokenChain(tokens, "0" * 64, 16)
    chain.ids(0, 40)
    tokens[39:] = [tokens[39] ^ 1, 1, 2]
    with pytest.raises(InvalidArgumentError, match="have changed"):
        chain.ids(0, 42)
    with pytest.raises(InvalidArgumentError, match="have changed"):
        TokenChain([5], "0" * 64, 16).ids(0, 8)  # not eight times 5
