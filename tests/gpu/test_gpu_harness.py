"""`python3 -m benchmarks.gpu --rehearse` on a machine without a GPU.

The rehearsals run in an environment that has what a borrowed machine has (tests/bare.py), from a
copy of the tree without repository and libraries.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import schedule, tools
from benchmarks.gpu.schedule import Request
from benchmarks.gpu.steps import FAILED, NOT_THERE, PASSED
from tests import bare
from tests.bare import Bare
from tests.calls import HOSTGRID

pytestmark = pytest.mark.slow  # it builds for minutes

# Rooms of kvx_core that only need to open where pydantic, safetensors and xxhash are.
WITH_PYDANTIC = (
    "kvx_core.desc.geometry",
    "kvx_core.snapshot",
    "kvx_core.stores",
    "kvx_core.connector",
)

# Of the packages that a step can need, those that are not there.
WITHOUT = ("pydantic", "safetensors", "xxhash")

# What `make` sets for builds that take each other's objects, and the compiler, whose name counts.
CACHED = (
    *("CXX", "CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"),
    *("CCACHE_DIR", "CCACHE_NOHASHDIR", "CCACHE_COMPILERCHECK", "CCACHE_SLOPPINESS", "CUDA_ARCHS"),
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """A machine with nothing to spare."""
    return bare.make(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def hostgrid() -> Path:
    """A libkvx whose kernels run on the CPU."""
    return Path(HOSTGRID.library()._name)


def rehearse(
    machine: Bare, out: Path, *arguments: str | Path, timeout: float = 300, **environment: str
) -> Any:
    """steps.json of a rehearsal, with what it printed and its exit status."""
    command = ("-m", "benchmarks.gpu", out, "--rehearse", *arguments)
    done = machine.run(*command, timeout=timeout, **environment)
    assert (out / "steps.json").exists(), done.stdout
    return {
        **json.loads((out / "steps.json").read_text()),
        "printed": done.stdout,
        "code": done.returncode,
    }


def verdicts(found: Any) -> dict[str, str]:
    return {step["name"]: step["verdict"] for step in found["steps"]}


# ---- The environment, and what can be imported there ----


def test_the_environment_has_nothing_but_what_is_said(machine: Bare) -> None:
    code = (
        "import shutil, torch\n"
        "from importlib.util import find_spec\n"
        "names = ('pydantic', 'safetensors', 'transformers', 'vllm', 'pip', 'xdist', 'rich')\n"
        "print([name for name in names if find_spec(name)])\n"
        "print([name for name in ('make', 'git', 'pip', 'curl', 'env') if shutil.which(name)])\n"
        "print(all(map(shutil.which, ('cmake', 'ninja', 'g++'))))\n"
    )
    assert machine.run("-c", code, timeout=60).stdout.split() == ["[]", "[]", "True"]


def test_kvx_core_imports_without_pydantic_and_safetensors(machine: Bare, hostgrid: Path) -> None:
    code = (
        "import importlib, pkgutil, kvx_core\n"
        "names = [m.name for m in pkgutil.walk_packages(kvx_core.__path__, 'kvx_core.',\n"
        "                                               onerror=lambda name: None)]\n"
        "for name in names:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(name, error.name)\n"
        "print(len(names), 'modules')\n"
    )
    done = machine.run("-c", code, timeout=60, KVX_LIBRARY=hostgrid)
    *missing, last = done.stdout.splitlines()
    assert last.endswith(" modules"), done.stdout
    assert int(last.split()[0]) > 10
    for line in missing:
        module, needs = line.split()
        assert module.startswith(WITH_PYDANTIC), line
        assert needs in ("pydantic", "safetensors", "xxhash"), line


def test_kvx_core_needs_pydantic_for_geometry_alone(machine: Bare) -> None:
    said = machine.run(
        "-c",
        "import kvx_core\n"
        "try: kvx_core.CacheGeometry\n"
        "except ImportError as error: print(error.name)\n"
        "try: kvx_core.no_such_name\n"
        "except AttributeError as error: print(error)\n",
        timeout=60,
    )
    assert said.stdout.splitlines() == [
        "pydantic",
        "module 'kvx_core' has no attribute 'no_such_name'",
    ]


def test_every_file_of_the_tests_is_collected_there(
    machine: Bare, hostgrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = ("gguf", *WITHOUT)
    monkeypatch.setattr(tools, "has", lambda name: name not in absent)
    steps = [s for s in schedule.steps(Request(Path("out"))) if s.tests and not s.unavailable]
    files = {argument for s in steps for argument in s.command if argument.startswith("tests/")}
    named = {"tests/test_write_gather.py", "tests/test_cuda_graph.py", "tests/test_far_offsets.py"}
    assert {*named, "tests/hybrid_ops"} < files
    collect = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    libraries = {"KVX_LIBRARY": hostgrid, "KVX_HOSTGRID_LIBRARY": hostgrid}
    done = machine.run(*collect, *sorted(files), timeout=60, **libraries)
    assert done.returncode == 0, done.stdout
    for file in files:
        assert file + ("::" if file.endswith(".py") else "/") in done.stdout


# ---- Rehearsals ----


def test_a_rehearsal_on_a_bare_machine(machine: Bare, hostgrid: Path, tmp_path: Path) -> None:
    there = ("test_conformance", "test_far_offsets", "ceilings", "peers", "gather")
    absent = ("first_capture", "test_cuda_graph", "test_cuda_engine", "memcheck", "synccheck")
    only = ("--only", *there, *absent, "--commit", "c0ffee")
    found = rehearse(machine, tmp_path, *only, KVX_LIBRARY=str(hostgrid))
    assert verdicts(found) == {
        **dict.fromkeys(("machine", *there), PASSED),
        **dict.fromkeys(absent, NOT_THERE),
    }, found["printed"]
    assert found["code"] == 0
    by_name = {step["name"]: step for step in found["steps"]}
    assert by_name["test_conformance"]["result"]["counts"]["passed"] > 5
    assert (found["git_commit"], found["rehearsal"]) == ("c0ffee", True)
    assert {"torch", "numpy", "pytest", "hypothesis", "ml_dtypes"} < found["versions"].keys()
    assert found["printed"].startswith("no GPU\ncommit c0ffee, 20")

    gather = json.loads((tmp_path / "gather.json").read_text())
    assert gather["rehearsal"] == "device"
    assert all(row["median_us"]["kvx"] and not row["failed"] for row in gather["results"])
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("# Rehearsal without a GPU: its times mean nothing\n")
    assert "| memcheck | not there: it needs a GPU | 0 |" in summary
    assert "| split, fp8 |" in summary
    assert "| convert: another dtype | 2 |" in summary
    assert "gather: split, fp8" in (tmp_path / "shares.svg").read_text()
    results = {"ceilings.json", "gather.json", "logs", "shares.svg", "steps.json", "summary.md"}
    assert {path.name for path in tmp_path.iterdir()} == {*results, "all.tgz"}
    with tarfile.open(tmp_path / "all.tgz") as archive:
        packed = {name for name in archive.getnames() if "/" not in name}
        assert packed == results
        log = archive.extractfile("logs/test_conformance.txt")
        assert log
        assert b" passed" in log.read()
    lines = json.loads((tmp_path / "ceilings.json").read_text())
    for what in ("memcpy", "kernel copy", "a kernel of one thread", "host: eager WriteLayersPlan"):
        assert any(line.startswith(what) for line in lines), what
    assert "## Ceilings" in summary


@pytest.mark.of_csrc
def test_a_rehearsal_that_builds(machine: Bare, tmp_path: Path) -> None:
    """For the CPU and by nvcc. What the other files test on the CPU is in the suite as well, and
    what other builds have compiled from the same text is not compiled again."""
    builds = ("configure", "build", "configure_nvcc", "build_nvcc")
    names = (*builds, "test_conformance", "test_find_scales", "write", "migrate")
    cached = {name: os.environ[name] for name in CACHED if name in os.environ}
    cached["CCACHE_BASEDIR"] = str(machine.tree)
    found = rehearse(machine, tmp_path, "--only", *names, timeout=1200, **cached)
    assert verdicts(found) == dict.fromkeys(("machine", *names), PASSED), found["printed"]
    assert found["code"] == 0


def test_one_broken_file_costs_no_other_step(machine: Bare, hostgrid: Path, tmp_path: Path) -> None:
    own = replace(machine, tree=tmp_path / "tree")
    bare.copy_tree(own.tree)
    with (own.tree / "tests/test_conformance.py").open("a") as file:
        file.write("\nimport pydantic\n")
    names = ("test_conformance", "test_device_status")
    found = rehearse(own, tmp_path / "out", "--library", hostgrid, "--only", *names)
    assert found["code"] == 1
    assert verdicts(found) == {
        "machine": PASSED,
        "test_conformance": FAILED,
        "test_device_status": PASSED,
    }
    summary = (tmp_path / "out/summary.md").read_text()
    assert "## test_conformance: failed" in summary
    assert "No module named 'pydantic'" in summary


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_the_steps_before(
    how: signal.Signals, machine: Bare, hostgrid: Path, tmp_path: Path
) -> None:
    """SIGTERM reaches it alone, and it ends its step; SIGKILL its processes as well."""
    names = ("test_conformance", "test_write_gather")
    left = tmp_path / "logs" / f"{names[1]}.json"
    options = ("--rehearse", "--library", hostgrid, "--only", *names)
    process = subprocess.Popen(
        [str(part) for part in (machine.python, "-m", "benchmarks.gpu", tmp_path, *options)],
        cwd=machine.tree,
        env={"PATH": machine.path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(600):
            summary = _text_of(tmp_path / "summary.md")
            others = "| test_conformance | passed: 6 passed |" in summary
            if others and "| test_write_gather | running" in summary and left.exists():
                assert list(_marked(f"{process.pid}-"))
                break
            time.sleep(0.1)
        if how is signal.SIGTERM:
            process.send_signal(how)
            assert process.wait(timeout=30) == 1
            assert not list(_marked(f"{process.pid}-"))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = json.loads((tmp_path / "steps.json").read_text())
    assert verdicts(found) == {
        "machine": PASSED,
        "test_conformance": PASSED,
        "test_write_gather": "running",
    }
    running = json.loads(left.read_text())  # what ended of the last step
    assert running["running"].startswith(("tests/test_write_gather.py::", "collection"))


def _marked(mark: str) -> Iterator[int]:
    """Processes of a run's steps."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"KVX_GPU_STEP={mark}".encode() in path.read_bytes():
                yield int(path.parent.name)


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_what_is_not_built_is_not_tested(machine: Bare, tmp_path: Path) -> None:
    own = replace(machine, tree=tmp_path / "tree")
    bare.copy_tree(own.tree)
    with (own.tree / "CMakeLists.txt").open("a") as file:
        file.write('message(FATAL_ERROR "no kernels today")\n')
    earlier = own.tree / "build/rehearsal/libkvx.so"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("of another version")
    names = ("configure", "build", "test_conformance", "write")
    found = rehearse(own, tmp_path / "out", "--only", *names)
    assert verdicts(found) == {"machine": PASSED, **dict.fromkeys(names, FAILED)}
    summary = _text_of(tmp_path / "out/summary.md")
    assert "no kernels today" in summary
    row = "| write | failed: build/rehearsal/libkvx.so is not there: the step build makes it | 0 |"
    assert row in summary


def test_what_there_is_no_time_for_is_named(machine: Bare, hostgrid: Path, tmp_path: Path) -> None:
    some = ("--library", hostgrid, "--minutes", "0.001", "--only", "test_migrate", "write")
    found = rehearse(machine, tmp_path, *some)
    assert verdicts(found) == {
        "machine": PASSED,
        "test_migrate": "left out",
        "write": "left out",
    }
    assert "| write | left out: no time was left for it | 0 |" in _text_of(tmp_path / "summary.md")
    assert found["code"] == 0


def test_without_a_gpu_it_says_so(machine: Bare, tmp_path: Path) -> None:
    done = machine.run("-m", "benchmarks.gpu", tmp_path, timeout=60)
    assert done.returncode == 1
    assert done.stdout.endswith(
        "torch sees no GPU here\nWithout one, rehearse: python3 -m benchmarks.gpu OUT --rehearse\n"
    )


def test_the_steps_are_listed_in_order(machine: Bare) -> None:
    done = machine.run("-m", "benchmarks.gpu", "--list", timeout=60)
    names = [line.split()[0] for line in done.stdout.splitlines()][:-1]
    assert names[:5] == ["machine", "configure", "build", "first_capture", "background"]
    assert names[-1] == "synccheck"
    refused = machine.run("-m", "benchmarks.gpu", "--only", "tests", timeout=60)
    assert refused.stdout == f"--only: step is 'tests', expected one of {', '.join(names)}\n"


@pytest.mark.parametrize("memory", ["host", "device"])
def test_every_benchmark_copies_what_torch_does(
    memory: str, machine: Bare, hostgrid: Path, tmp_path: Path
) -> None:
    command = ("-m", "benchmarks.gpu.bench", "--rehearse", memory, "--results", tmp_path)
    done = machine.run(*command, timeout=300, KVX_LIBRARY=hostgrid)
    assert done.returncode == 0, done.stdout
    for name in schedule.BENCHMARKS:
        assert f"== {name} ==" in done.stdout
        assert json.loads((tmp_path / f"{name}.json").read_text())["rehearsal"] == memory
