"""Fixtures of all tests: the backend that a call runs on."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.calls import BACKENDS, Backend

# Examples differ from run to run only where somebody asks for it: a failure in CI is one here too.
settings.register_profile(
    "kvx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", parent=settings.get_profile("kvx"), derandomize=False)
settings.load_profile(os.environ.get("KVX_HYPOTHESIS_PROFILE", "kvx"))


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """cpu everywhere; hostgrid and cuda where the build and the machine have them."""
    return request.param
