"""Fixtures of the tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stores import two_models


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of two models."""
    return two_models(tmp_path / "store")
