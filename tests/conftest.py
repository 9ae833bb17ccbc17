"""Fixtures of all tests: the backend that a call runs on, the wheel, and which tests run when."""

from __future__ import annotations

import ctypes
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Threads of torch that wait for each other sleep: by default they spin, on cores that other tests
# need. OpenMP reads it when torch is imported, here and in every process that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tests.calls import BACKENDS, Backend, hostgrid_library
from tests.checked import Checked
from tests.native import ROOT, alone, run

# Examples differ from run to run only where somebody asks for it: a failure in CI is one here too.
settings.register_profile(
    "kvx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", parent=settings.get_profile("kvx"), derandomize=False)
settings.load_profile(os.environ.get("KVX_HYPOTHESIS_PROFILE", "kvx"))

# Files that take long, the longest first: begun first, none of them keeps a process waiting at the
# end.
LONG = (
    "test_sanitizers.py",
    "conformance/test_connectors.py",
    "conformance/test_connector_faults.py",
    "gpu/test_gpu_harness.py",
    "vllm_plugin/test_hybrid_models.py",
    "engines/test_hybrid_pairs.py",
    "test_hostgrid_mutants.py",
    "vllm_plugin/test_month.py",
    "test_cpu_isa.py",
    "test_fuzz.py",
    "engines/test_engine_matrix.py",
    "vllm_plugin/test_attention.py",
    "cli/test_demo.py",
    "vllm_plugin/test_processes.py",
    "test_cuda_build.py",
    "test_hostgrid_orders.py",
    "engines/test_engine_pairs.py",
    "conformance/test_stores.py",
    "vllm_plugin/test_round_trips.py",
    "vllm_plugin/test_hybrid.py",
    "vllm_plugin/test_failures.py",
    "pages/test_examples.py",
    "test_codecs.py",
    "test_migrate.py",
    "test_write_gather.py",
    "adapters/test_vllm.py",
    "tensorrt_llm_plugin/test_with_vllm.py",
    "tensorrt_llm_plugin/test_connector.py",
)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, for modules whose tensors are too small to share."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _own_cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What KVX remembers of weights, in engines' processes too, is of this run alone."""
    with pytest.MonkeyPatch.context() as patch:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        for name, folder in (("VLLM_CACHE_ROOT", "vllm"), ("HF_HOME", "huggingface")):
            patch.setenv(name, os.environ.get(name, str(home / folder)))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what is marked slow, as CI does")
    parser.addoption("--csrc", action="store_true", help="run what is marked of_csrc in any case")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Checked(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    rank = {ROOT / "tests" / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))


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
    """The wheel of this tree without its CUDA kernels."""
    return _built(tmp_path_factory, "without_cuda", "OFF")


@pytest.fixture(scope="session")
def release_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it is released, for all GPUs: minutes."""
    return _built(tmp_path_factory, "with_cuda", "ON")


def _built(factory: pytest.TempPathFactory, name: str, cuda: str) -> Path:
    """A wheel, built once, by the first process that needs it."""
    base = factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist" / name
    with alone(f"wheel-{name}"):
        if not list(out.glob("*.whl")):
            build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
            build += [f"-Ccmake.define.KVX_CUDA={cuda}", f"-Cbuild-dir=build/{name}"]
            run([*build, "--outdir", out, ROOT], timeout=1800)  # all GPUs, on a slow machine
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as an installer would."""
    return _unpacked(wheel, tmp_path_factory)


@pytest.fixture(scope="session")
def release_library(release_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libkvx.so of the wheel that is released, among its other files."""
    return _unpacked(release_wheel, tmp_path_factory) / "kvx_core/libkvx.so"


def _unpacked(wheel: Path, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def machine() -> Iterator[ctypes.CDLL]:
    """The host grid's library; its machine has one device again afterwards."""
    library = ctypes.CDLL(hostgrid_library()._name)
    library.kvx_hostgrid_give.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_bool,
    )
    yield library
    library.kvx_hostgrid_machine(1, False)
