"""Fixtures of all tests: the backend that a call runs on."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.calls import BACKENDS, Backend
from tests.native import ROOT, alone, run

# Examples differ from run to run only where somebody asks for it: a failure in CI is one here too.
settings.register_profile(
    "kvx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", parent=settings.get_profile("kvx"), derandomize=False)
settings.load_profile(os.environ.get("KVX_HYPOTHESIS_PROFILE", "kvx"))


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def built_backend(request: pytest.FixtureRequest) -> Backend:
    """cpu, hostgrid and, where the build and the machine have it, cuda."""
    request.param.library()  # if it does not build, it does so once
    return request.param


@pytest.fixture
def backend(built_backend: Backend) -> Iterator[Backend]:
    """The backend that a call runs on."""
    yield built_backend
    built_backend.forget()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built as for a release: once, by the first process that needs it."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist"
    with alone("wheel"):
        if not list(out.glob("*.whl")):
            build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
            run([*build, "--outdir", out, ROOT])
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
