"""`python3 -m benchmarks.gpu` on a machine without a GPU: everything but the GPU's own lines runs.

The rehearsals run in an environment that has what a borrowed machine has (tests/bare.py), from a
copy of the tree without repository and libraries.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import schedule, tools
from benchmarks.gpu.schedule import Request
from benchmarks.gpu.steps import FAILED, NOT_THERE, PASSED, TIMED_OUT, Outcome, Step, run
from tests import bare
from tests.bare import Bare
from tests.calls import HOSTGRID
from tests.native import ROOT

# Rooms of kvx_core that only need to open where pydantic and safetensors are.
WITH_PYDANTIC = {"kvx_core.geometry", "kvx_core.snapshot", "kvx_core.stores"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """A machine with nothing to spare."""
    return bare.make(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def hostgrid() -> Path:
    """A libkvx whose kernels run on the CPU."""
    return Path(HOSTGRID.library()._name)


def rehearse(machine: Bare, out: Path, *arguments: str | Path, timeout: float = 300) -> Any:
    """steps.json of a rehearsal, with what it printed and its exit status."""
    command = ("-m", "benchmarks.gpu", out, "--rehearse", *arguments)
    done = machine.run(*command, timeout=timeout)
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
        assert module in WITH_PYDANTIC, line
        assert needs in ("pydantic", "safetensors"), line


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


def test_every_file_of_the_tests_is_collected_there(machine: Bare, hostgrid: Path) -> None:
    steps = [step for step in schedule.steps(Request(Path("out"))) if step.tests]
    files = {argument for s in steps for argument in s.command if argument.startswith("tests/")}
    assert {"tests/test_write_gather.py", "tests/test_cuda_graph.py"} < files
    collect = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    libraries = {"KVX_LIBRARY": hostgrid, "KVX_HOSTGRID_LIBRARY": hostgrid}
    done = machine.run(*collect, *sorted(files), timeout=60, **libraries)
    assert done.returncode == 0, done.stdout
    for file in files:
        assert f"{file}::" in done.stdout


# ---- Rehearsals ----


def test_a_rehearsal_on_a_bare_machine(machine: Bare, hostgrid: Path, tmp_path: Path) -> None:
    names = ("test_conformance", "test_device_status", "test_cuda_graph", "gather", "memcheck")
    only = ("--only", *names)
    found = rehearse(machine, tmp_path, "--library", hostgrid, *only, "--commit", "c0ffee")
    assert verdicts(found) == {
        "machine": PASSED,
        "test_conformance": PASSED,
        "test_device_status": PASSED,
        "test_cuda_graph": NOT_THERE,
        "gather": PASSED,
        "memcheck": NOT_THERE,
    }, found["printed"]
    assert found["code"] == 0
    assert found["steps"][1]["result"]["counts"]["passed"] > 5
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
    assert {path.name for path in tmp_path.iterdir()} == {
        *("gather.json", "log.txt", "steps.json", "summary.md")
    }


@pytest.mark.slow
def test_the_whole_rehearsal(machine: Bare, tmp_path: Path) -> None:
    """All steps: libkvx is built, for the CPU and by nvcc, and every test and case runs."""
    found = rehearse(machine, tmp_path, timeout=3600)
    elsewhere = {"test_cuda_graph", "memcheck", "racecheck"}
    expected = {s["name"]: NOT_THERE if s["name"] in elsewhere else PASSED for s in found["steps"]}
    assert verdicts(found) == expected, found["printed"]
    assert {"build", "build_nvcc", "test_migrate", "migrate"} < expected.keys()
    assert found["code"] == 0
    passed = [s["result"]["counts"]["passed"] for s in found["steps"] if s["result"]]
    assert sum(passed) > 2000


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


def test_a_kill_leaves_the_steps_before(machine: Bare, hostgrid: Path, tmp_path: Path) -> None:
    names = ("test_conformance", "test_write_gather")
    options = ("--rehearse", "--library", hostgrid, "--only", *names)
    process = subprocess.Popen(
        [str(part) for part in (machine.python, "-m", "benchmarks.gpu", tmp_path, *options)],
        cwd=machine.tree,
        env={"PATH": machine.path},
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # so that its steps are killed with it
    )
    try:
        for _ in range(600):
            running = "| test_write_gather | running" in _text_of(tmp_path / "summary.md")
            if running and (tmp_path / "running.json").exists():
                break
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = json.loads((tmp_path / "steps.json").read_text())
    assert verdicts(found) == {
        "machine": PASSED,
        "test_conformance": PASSED,
        "test_write_gather": "running",
    }
    assert "| test_conformance | passed: 6 passed |" in _text_of(tmp_path / "summary.md")
    running = json.loads((tmp_path / "running.json").read_text())  # what ended of the last step
    assert running["running"]


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


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
    assert names[:5] == ["machine", "configure", "build", "test_conformance", "test_write_gather"]
    assert names[-1] == "test_properties"
    refused = machine.run("-m", "benchmarks.gpu", "--only", "tests", timeout=60)
    assert refused.stdout == f"--only: step is 'tests', expected one of {', '.join(names)}\n"


@pytest.mark.parametrize("memory", ["host", "device"])
def test_every_benchmark_copies_what_torch_does(
    memory: str, hostgrid: Path, tmp_path: Path
) -> None:
    command = ("-m", "benchmarks.gpu.bench", "--rehearse", memory, "--results", str(tmp_path))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | ({"KVX_LIBRARY": str(hostgrid)} if memory == "device" else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in schedule.BENCHMARKS:
        assert f"== {name} ==" in done.stdout
        assert json.loads((tmp_path / f"{name}.json").read_text())["rehearsal"] == memory


# ---- A step ----


def step(code: str, **options: Any) -> Step:
    return Step("step", "", [sys.executable, "-c", code], **{"seconds": 3, **options})


@pytest.mark.parametrize(
    ("code", "verdict", "said"),
    [
        ("print('a'); print('b')", PASSED, "b"),
        ("print('a'); raise SystemExit(3)", FAILED, "a"),
        ("print('no such device'); raise SystemExit(3)", NOT_THERE, "no such device"),
        ("print('a', flush=True); import time; time.sleep(60)", TIMED_OUT, "killed after 3 s\na"),
    ],
)
def test_a_step(code: str, verdict: str, said: str, tmp_path: Path) -> None:
    outcome = run(step(code, absent="no such device"), tmp_path)
    assert (outcome.verdict, outcome.said) == (verdict, said)
    assert said.splitlines()[-1] in (tmp_path / "log.txt").read_text()


def test_a_step_takes_no_more_than_the_time_that_is_left(tmp_path: Path) -> None:
    outcome = run(step("import time; time.sleep(60)", seconds=60), tmp_path, 0.5)
    assert outcome.verdict == TIMED_OUT
    assert outcome.seconds < 5


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "pass"])
def test_no_process_of_a_step_outlives_it(code: str, tmp_path: Path) -> None:
    """One in a process group of its own, as ninja's compilers are, and one in its own session."""
    children = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "for how in ({'process_group': 0}, {'start_new_session': True}):\n"
        "    print(subprocess.Popen(sleep, **how).pid, flush=True)\n"
    )
    run(step(children + code, seconds=2), tmp_path)
    pids = [line for line in (tmp_path / "log.txt").read_text().splitlines() if line.isdigit()]
    assert len(pids) == 2
    assert not [pid for pid in pids if _lives(pid)]


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_step_that_cannot_start(tmp_path: Path) -> None:
    outcome = run(Step("step", "", ["no-such-tool"], 3), tmp_path)
    assert outcome.verdict == FAILED
    assert "No such file or directory: 'no-such-tool'" in outcome.said
    outcome = run(step("pass", needs=(tmp_path / "x.so", "the step build")), tmp_path)
    assert outcome.said == f"{tmp_path}/x.so is not there: the step build makes it"


def test_a_tool_that_is_not_there_is_no_failure(tmp_path: Path) -> None:
    outcome = run(step("pass", unavailable="compute-sanitizer is not on PATH"), tmp_path)
    assert (outcome.verdict, outcome.said) == (NOT_THERE, "compute-sanitizer is not on PATH")
    assert not outcome.failed


# ---- A step of tests ----

PASSES = "def test_passes(): pass\n"


@pytest.fixture
def of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run_tests(text: str, **options: Any) -> Outcome:
        file = tmp_path / "test_some.py"
        file.write_text(text)
        command = schedule._pytest("-c", "/dev/null", "--rootdir", str(tmp_path), str(file))
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        return run(Step("step", "", command, 6, tests=True, **options), out)

    return run_tests


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        (PASSES, PASSED, "1 passed"),
        (
            PASSES + "def test_fails(): assert 1 == 2\n",
            FAILED,
            "test_some.py::test_fails: assert 1 == 2\n1 passed, 1 failed",
        ),
        ("import no_such_module\n" + PASSES, FAILED, "No module named 'no_such_module'\n1 errors"),
        ("", FAILED, "no test ran"),
        ("import pytest\n@pytest.mark.skip\n" + PASSES, FAILED, "1 skipped"),
        (
            PASSES + "def test_hangs(): import time; time.sleep(60)\n",
            TIMED_OUT,
            "killed after 6 s\n1 passed; in test_some.py::test_hangs",
        ),
        (
            PASSES + "def test_crashes(): import os; os.abort()\n",
            FAILED,
            "ended in test_some.py::test_crashes\n1 passed",
        ),
    ],
)
def test_a_step_of_tests(of_tests: Any, text: str, verdict: str, said: str) -> None:
    outcome = of_tests(text)
    assert outcome.verdict == verdict
    assert outcome.said.endswith(said)


def test_tests_that_only_a_gpu_can_run_are_not_there(of_tests: Any) -> None:
    outcome = of_tests("import pytest\n@pytest.mark.skip\n" + PASSES, device_only=True)
    assert (outcome.verdict, outcome.said) == (NOT_THERE, "1 skipped")


# ---- Tools ----


@pytest.fixture
def no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any, and a folder on Python's path."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "prefix/bin/python"))
    monkeypatch.setattr(tools, "_SYSTEM", tmp_path / "local")
    for name in ("nvidia", *tools.MODULES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    importlib.invalidate_caches()
    return path


def test_nvcc_is_found_where_it_is_not_on_path(
    no_tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tools.find_nvcc() is None
    wheel = program(no_tools / "site/nvidia/cu13/bin/nvcc")
    assert tools.find_nvcc() == wheel
    assert schedule._nvcc() == [f"-DPython_EXECUTABLE={sys.executable}"]
    program(no_tools / "local/cuda-12.8/bin/nvcc")
    newest = program(no_tools / "local/cuda-13.0/bin/nvcc")
    assert tools.find_nvcc() == newest
    assert schedule._nvcc() == [f"-DCMAKE_CUDA_COMPILER={newest}"]
    sanitizer = program(newest.with_name("compute-sanitizer"))
    assert tools.find_sanitizer() == sanitizer
    named = program(no_tools / "toolkit/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(no_tools / "toolkit"))
    assert tools.find_nvcc() == named
    on_path = program(no_tools / "empty/nvcc")
    assert tools.find_nvcc() == on_path


def test_tools_of_packages_are_found(no_tools: Path) -> None:
    """Where pip put them with --target."""
    cmake = program(no_tools / "site/cmake/data/bin/cmake")
    ninja = program(no_tools / "site/bin/ninja")
    assert (tools.find("cmake"), tools.find("ninja")) == (cmake, ninja)


def test_what_is_missing_is_said_in_a_sentence_each(no_tools: Path) -> None:
    sentences = tools.missing(with_nvcc=True)
    for name, sentence in zip(
        (*tools.MODULES, "cmake", "neither ninja nor make", "no C++ compiler", "nvcc"),
        sentences,
        strict=True,
    ):
        assert sentence.startswith(name)
    assert sentences[-1] == (
        "nvcc is not there: put the bin folder of CUDA's toolkit on PATH, name the toolkit in "
        "CUDA_HOME, or carry PyPI's nvidia-cuda-nvcc, -crt, -runtime, -cccl and nvidia-nvvm"
    )
