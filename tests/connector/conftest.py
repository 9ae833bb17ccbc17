"""Fixtures of the tests of the connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvx_core.connector.settings import StoreSettings
from tests.connector.serving import Serve
from tests.connector.toy_connector import ToyConnector
from tests.connector.toy_engine import Engine


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts engines on one store; settings: of the connector."""
    connectors: list[ToyConnector] = []

    def start(store: Any = None, **settings: Any) -> Engine:
        engine = Engine()
        path = StoreSettings(path=tmp_path / "store", **{"min_tokens": 4, **settings})
        engine.connector = ToyConnector(engine, path, store)
        connectors.append(engine.connector)
        return engine

    yield start
    for connector in connectors:
        connector.shutdown()
