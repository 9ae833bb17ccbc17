"""The connector's classes against TensorRT-LLM's interface, and where there is none."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes import tensorrt_llm_executor as fake

ROOT = Path(__file__).parents[2]
CLASSES = {
    "KVXConnectorScheduler": "KvCacheConnectorScheduler",
    "KVXConnectorWorker": "KvCacheConnectorWorker",
}


@pytest.mark.parametrize("trtllm", ["main", "1.2"], indirect=True)
@pytest.mark.parametrize("name", CLASSES)
def test_every_method_is_there_with_its_arguments(trtllm: ModuleType, name: str) -> None:
    base = getattr(sys.modules[fake.place()], CLASSES[name])
    made = getattr(import_module(fake.PLUGIN), name)
    assert issubclass(made, base)
    assert not made.__abstractmethods__
    for method, function in inspect.getmembers(base, inspect.isfunction):
        override = getattr(made, method)
        assert list(inspect.signature(override).parameters) == list(
            inspect.signature(function).parameters
        ), method
    assert list(inspect.signature(made).parameters) == ["llm_args"]


def run(code: str, path: Path) -> str:
    """What Python says last of an import that fails."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1  # no chain of errors
    return result.stderr.splitlines()[-1]


def test_without_tensorrt_llm(tmp_path: Path) -> None:
    assert run(f"import {fake.PLUGIN}", tmp_path) == (
        "ImportError: kvx_adapters.tensorrt_llm_plugin runs inside TensorRT-LLM, and there is no "
        "module tensorrt_llm here. Install it, or use kvx_adapters.tensorrt_llm, which describes "
        "its caches without it"
    )


def test_a_version_without_connectors(tmp_path: Path) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.20.0'; logger = None; mpi_rank = None\n")
    assert run(f"import {fake.PLUGIN}", tmp_path) == (
        "ImportError: tensorrt_llm is 0.20.0 and has neither "
        f"{' nor '.join(fake.PLACES.values())}, expected one of them: KV cache connectors came "
        "with 1.1"
    )


def test_an_installation_that_is_broken(tmp_path: Path) -> None:
    """Its own error says more than ours could."""
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("import a_library_that_it_needs\n")
    assert run(f"import {fake.PLUGIN}", tmp_path) == (
        "ModuleNotFoundError: No module named 'a_library_that_it_needs'"
    )


def test_an_interface_that_is_broken(tmp_path: Path) -> None:
    folder = tmp_path
    for name in fake.PLACES["main"].split(".")[:-1]:
        folder = folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text("__version__ = logger = mpi_rank = None\n")
    (folder / "kv_cache_connector.py").write_text("import a_library_that_it_needs\n")
    assert run(f"import {fake.PLUGIN}", tmp_path) == (
        "ModuleNotFoundError: No module named 'a_library_that_it_needs'"
    )
