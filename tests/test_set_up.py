"""`make setup`: some lines and progress on the screen, everything else in a file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import CXX, ROOT
from tests.terminal import run_on_terminal

SET_UP = ROOT / "cmake" / "set_up.py"
LONG = "a line of pip that is longer than the terminal, which has room for sixty columns"
STEPS = f"""
import sys, time
print("[1/4] tools", flush=True)
print("{LONG}", flush=True)
time.sleep(1.2)
print("an error", file=sys.stderr, flush=True)
print("[2/4] packages", flush=True)
"""


def quietly(log: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SET_UP, log, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_only_steps_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "build" / "setup.log"
    done = quietly(log, STEPS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[1/4] tools\n[2/4] packages\n"
    assert log.read_text() == f"[1/4] tools\n{LONG}\nan error\n[2/4] packages\n"


def test_a_terminal_shows_progress(tmp_path: Path) -> None:
    done = run_on_terminal(
        [sys.executable, SET_UP, tmp_path / "log", sys.executable, "-c", STEPS], columns=60
    )
    assert done.returncode == 0
    assert done.lines == ["[1/4] tools", "[2/4] packages", ""]
    assert "      0:01  a line of pip that is longer than the terminal,\r" in done.output


def test_a_failure_shows_the_end_of_its_step(tmp_path: Path) -> None:
    program = """
import sys
print(*(f"line {i}" for i in range(100)), sep="\\n")
print("make: *** [Makefile:9: stamp] Error 1")
print("make: *** Waiting for unfinished jobs....")
print("the other job goes on")
sys.exit(2)
"""
    log = tmp_path / "log"
    done = quietly(log, program)
    assert (done.returncode, done.stdout) == (2, "")
    _, said, *shown, last = done.stderr.splitlines()
    assert said == "Set-up has failed. The last lines of the step:"
    assert shown[0] == "    line 81"
    assert shown[-2:] == ["    line 99", "    make: *** [Makefile:9: stamp] Error 1"]
    assert last == f"The whole log: {log}. The next make repeats the step."
    assert "the other job goes on" in log.read_text()


@pytest.mark.skipif(
    not all(map(shutil.which, ("make", CXX))), reason="make or the C++ compiler is missing"
)
def test_make_setup_without_an_index(tmp_path: Path) -> None:
    """pip finds no package: the reason is on the screen, and the file is named."""
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "cmake").mkdir()
    shutil.copy(SET_UP, tmp_path / "cmake")
    for package in ("kvx_core", "kvx_conformance"):
        (tmp_path / package).mkdir()
    engines = Path("kvx_adapters/cli/engines")
    shutil.copytree(ROOT / engines, tmp_path / engines)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "PIP_", "CMAKE_", "PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}", f"CXX={CXX}"],
        cwd=tmp_path,
        env=environment | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith("[1/4] Python 3.")
    assert "ERROR: No matching distribution found for scikit-build-core>=0.12" in done.stderr
    log = tmp_path / "build" / "setup.log"
    assert f"The whole log: {log}. The next make repeats the step." in done.stderr
    assert log.read_text().startswith(line)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_a_dry_run_shows_the_commands() -> None:
    done = subprocess.run(
        ["make", "-n", "setup", "VENV=/nowhere", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "-m venv /nowhere" in done.stdout
    assert "install --no-deps" in done.stdout
