"""Parts of `python3 -m benchmarks.gpu`: time limits of steps, runs of tests, finding tools."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import driver, facts, schedule, tools
from benchmarks.gpu.schedule import Request
from benchmarks.gpu.steps import (
    FAILED,
    LEFT_OUT,
    NOT_THERE,
    PASSED,
    RUNNING,
    TIMED_OUT,
    Outcome,
    Step,
    log_of,
    run,
    together,
)
from tests.native import ROOT

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
    assert said.splitlines()[-1] in log_of(tmp_path, "step").read_text()


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
    pids = [line for line in log_of(tmp_path, "step").read_text().splitlines() if line.isdigit()]
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


# ---- Steps side by side ----


def test_steps_run_side_by_side(tmp_path: Path) -> None:
    """Two that wait for each other, and one for which no time is left."""
    wait = (
        "import sys, time; from pathlib import Path\n"
        f"here = Path({str(tmp_path)!r})\n"
        "(here / sys.argv[1]).touch()\n"
        "while not (here / sys.argv[2]).exists(): time.sleep(0.01)\n"
        "print(sys.argv[1])\n"
    )
    names = ("a", "b"), ("b", "a")
    steps = [Step(own, "", [sys.executable, "-c", wait, own, other], 30) for own, other in names]
    steps.append(Step("long", "", ["true"], 900, least=900))
    saved: list[Outcome] = []
    together(steps, tmp_path, 2, time.monotonic() + 60, saved.append)
    assert {o.name: (o.verdict, o.said) for o in saved if o.verdict != RUNNING} == {
        "a": (PASSED, "a"),
        "b": (PASSED, "b"),
        "long": (LEFT_OUT, "no time was left for it"),
    }


# ---- A step of tests ----

PASSES = "def test_passes(): pass\n"


@pytest.fixture
def of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run_tests(text: str, seconds: float = 60, hang: float = 60, **options: Any) -> Outcome:
        file = tmp_path / "test_some.py"
        file.write_text(text)
        command = schedule._pytest(
            "-c", "/dev/null", "--rootdir", str(tmp_path), str(file), hang=hang
        )
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        return run(Step("step", "", command, seconds, tests=True, **options), out)

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
            "killed after 8 s\n1 passed; in test_some.py::test_hangs",
        ),
        (
            PASSES + "def test_crashes(): import os; os.abort()\n",
            FAILED,
            "test_some.py::test_crashes: it ended the process, or took more than 60 s\n"
            "1 passed, 1 failed",
        ),
    ],
)
def test_a_step_of_tests(of_tests: Any, text: str, verdict: str, said: str) -> None:
    outcome = of_tests(text, 8 if verdict == TIMED_OUT else 60)
    assert outcome.verdict == verdict
    assert outcome.said.endswith(said)


FAULTS = """
import os, sys
from types import SimpleNamespace

class Cuda:
    lost = False
    is_initialized = staticmethod(lambda: True)
    def synchronize(self):
        if self.lost: raise RuntimeError("CUDA error: an illegal memory access\\nmore")

torch = sys.modules["torch"] = SimpleNamespace(cuda=Cuda())

def test_one(): pass
def test_fails(): assert 1 == 2
def test_loses_the_device():
    torch.cuda.lost = True
    raise RuntimeError("a launch failed")
def test_two(): assert not torch.cuda.lost
def test_ends_the_process(): os.abort()
def test_three(): pass
def test_hangs():
    import time
    time.sleep(60)
def test_four(): assert not torch.cuda.lost
"""


def test_a_lost_device_costs_one_test(of_tests: Any) -> None:
    """As do a test that ends its process and one that hangs: the rest runs in a new process."""
    outcome = of_tests(FAULTS, hang=1)
    assert outcome.verdict == FAILED
    assert outcome.result["counts"] == {"passed": 4, "failed": 4}
    said = {
        failure["test"].rpartition("::")[2]: failure["said"]
        for failure in outcome.result["failures"]
    }
    assert said["test_fails"].endswith("assert 1 == 2")
    assert said["test_loses_the_device"].endswith(
        "a launch failed\nthe device is lost: CUDA error: an illegal memory access"
    )
    for name in ("test_ends_the_process", "test_hangs"):
        assert said[name] == "it ended the process, or took more than 1 s"


def test_tests_that_only_a_gpu_can_run_are_not_there(of_tests: Any) -> None:
    outcome = of_tests("import pytest\n@pytest.mark.skip\n" + PASSES, device_only=True)
    assert (outcome.verdict, outcome.said) == (NOT_THERE, "1 skipped")


# ---- With a GPU ----


def test_with_a_gpu_libkvx_is_built_for_it(no_tools: Path) -> None:
    nvcc = program(no_tools / "local/cuda/bin/nvcc")
    steps = {s.name: s for s in schedule.steps(Request(no_tools, capability="12.0"))}
    assert "-DCMAKE_CUDA_ARCHITECTURES=120-real" in steps["configure"].command
    assert f"-DCMAKE_CUDA_COMPILER={nvcc}" in steps["configure"].command
    assert "-DKVX_CUDA=ON" in steps["configure"].command
    for step in steps.values():
        if step.name.startswith("test_") and step.name != "test_cuda_graph":
            assert step.command[-2:] == ["-k", "cuda"]
            assert step.part == ("" if step.name == "test_far_offsets" else "tests")
    assert steps["memcheck"].unavailable == ("compute-sanitizer is neither on PATH nor beside nvcc")
    assert "--rehearse" not in steps["write"].command
    assert not steps["test_cuda_graph"].device_only


def test_a_result_names_the_gpu() -> None:
    found = {
        "gpu": {
            "name": "NVIDIA H200",
            "capability": "9.0",
            "multiprocessors": 132,
            "memory_bytes": 139 << 30,
            "l2_bytes": 60 << 20,
        },
        "git_commit": "c0ffee",
        "git_modified": True,
        "date": "today",
        "command": "python3",
        "versions": {"torch": "2.11", "driver": "580.1"},
    }
    assert facts.lines(found) == [
        "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139 GiB, L2 of 60 MiB",
        "commit c0ffee with changes, today, `python3`",
        "torch 2.11, driver 580.1",
    ]


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


def program(path: Path, says: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
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


def test_the_driver_runs_what_the_nvcc_that_is_taken_builds(
    no_tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is newer than the driver, or too old for C++20, is taken if there is no other."""
    monkeypatch.setattr(driver, "cuda_version", lambda: (12, 4))
    newer = program(no_tools / "local/cuda-13.0/bin/nvcc", "release 13.0, V13.0.48")
    assert tools.find_nvcc() == newer
    assert tools.unsuitable(newer) == (
        f"{newer} is of CUDA 13, but this machine's driver runs CUDA 12.4 and earlier: name a "
        "toolkit of CUDA 12 in CUDA_HOME"
    )
    assert tools.unsuitable(newer) in tools.missing(with_nvcc=True)
    older = program(no_tools / "local/cuda-11.8/bin/nvcc", "release 11.8, V11.8.89")
    assert tools.unsuitable(older) == f"{older} is of CUDA 11, expected 12 or later"
    assert tools.find_nvcc() == newer
    assert "KVX_PYPI_NVCC" not in schedule.environment(Request(no_tools))
    wheel = program(no_tools / "site/nvidia/cu12/bin/nvcc", "release 12.9, V12.9.86")
    assert tools.find_nvcc() == wheel
    assert schedule.environment(Request(no_tools))["KVX_PYPI_NVCC"] == "1"
    fits = program(no_tools / "local/cuda-12.6/bin/nvcc", "release 12.6, V12.6.20")
    assert tools.find_nvcc() == fits
    assert "KVX_PYPI_NVCC" not in schedule.environment(Request(no_tools))
    assert not [said for said in tools.missing(with_nvcc=True) if "nvcc" in said]
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    assert tools.find_nvcc() == newer


def test_a_first_import_of_torch_may_take_minutes() -> None:
    """Without the GPU's name nothing is run."""
    assert schedule.machine("", None).seconds >= 300


def test_what_is_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.6.0a0+df5bbc09d1.nv24.12", "pytest": "8.1.1"}
    monkeypatch.setattr(tools, "version", versions.__getitem__)
    assert [said for said in tools.missing(with_nvcc=False) if "or later" in said] == [
        f"torch 2.11 or later: {sys.executable} has 2.6"
    ]


def test_sanitizers_look_at_kernels_not_at_calls(no_tools: Path) -> None:
    program(no_tools / "empty/compute-sanitizer")
    steps = {s.name: s for s in schedule.steps(Request(no_tools, capability="9.0"))}
    for name in ("memcheck", "racecheck", "synccheck"):
        command = steps[name].command
        assert command[command.index("--report-api-errors") + 1] == "no"
        assert (command[command.index("--tool") + 1], steps[name].part) == (name, "sanitizers")


def test_formats_are_tested_where_gguf_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def step_of_formats() -> Step:
        return {s.name: s for s in schedule.steps(Request(tmp_path))}["test_formats"]

    monkeypatch.setattr(tools, "has", lambda name: name != "gguf")
    assert step_of_formats().unavailable == "gguf cannot be imported: pip install gguf"
    monkeypatch.setattr(tools, "has", lambda name: True)
    assert step_of_formats().unavailable is None


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
