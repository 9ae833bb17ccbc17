"""Tests that only csrc decides: they run when it has changed since they last passed.

Such tests have the mark `of_csrc`: sanitizers, other instruction sets, orders of the kernels'
threads, machine code, builds by nvcc. They take half of all tests' time. A run of all tests in
which they pass writes csrc_passed.txt, which is committed; where it has the digest of what is here
they are skipped. It has a line for each kind of processor. `--csrc` runs them all the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.native import CXX, ROOT

PASSED = ROOT / "tests/csrc_passed.txt"
REASON = "csrc is as it was when this passed (tests/csrc_passed.txt); --csrc runs it"
# What their results depend on: sources, how they are built, and the tests that they run again.
DECIDES = (
    *("csrc/**/*", "CMakeLists.txt", "tests/c/**/*", "tests/hostgrid/**/*", "tests/sass/**/*"),
    *("benchmarks/gpu/**/*", "tests/bare.py", "tests/blocks/test_kvbm_build.py"),
    "tests/gpu/test_gpu_harness.py",
    *(
        f"tests/{name}.py"
        for name in ("calls", "caches", "migrations", "native", "plans", "reference", "token_calls")
    ),
    "tests/validation_rules.txt",
    *(
        f"tests/test_{name}.py"
        for name in (
            *("codecs", "conformance", "cpu_isa", "cuda_build", "fp8_loads", "fuzz", "ggml"),
            *("hostgrid_mutants", "hostgrid_orders", "hostgrid_sanitizers", "migrate"),
            *("planes_apart", "plans_public", "pointers", "sanitizers", "sass_budget"),
            *("scaled_rows", "validation", "wheel", "write_gather"),
        )
    ),
)
# It touches no cache: each build compiles it, and the tests that call it always run.
APART = "csrc/python"
# Of the processor: what csrc chooses kernels by.
FEATURES = ("avx2", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_bf16", "amx_tile")


def digest() -> str:
    """Of all that decides, the compilers, and the features of this processor."""
    found = hashlib.sha256()
    for pattern in DECIDES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if not path.is_file() or "__pycache__" in path.parts or name.startswith(APART):
                continue
            found.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    for compiler in (CXX, "nvcc"):
        found.update(_version(compiler).encode())
    return f"{found.hexdigest()} {' '.join(_features())}".strip()


def _version(compiler: str) -> str:
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except OSError:
        return "none"
    return said.stdout


def _features() -> list[str]:
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return [one for one in FEATURES if found is not None and one in found[1].split()]


class Checked:
    """The plugin of pytest that skips such tests, and writes what has passed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcomes: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mine = [item for item in items if item.get_closest_marker("of_csrc")]
        if mine and not self._config.getoption("--csrc") and self._has_passed():
            for item in mine:
                item.add_marker(pytest.mark.skip(reason=REASON))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "of_csrc" not in report.keywords:
            return
        if report.failed:
            self._outcomes["failed"] += 1
        elif report.when == "call" and report.passed:
            self._outcomes["passed"] += 1

    def pytest_sessionfinish(self) -> None:
        options = self._config.option
        is_whole = (
            options.slow
            and not options.keyword
            and not options.deselect
            and options.markexpr in ("", "of_csrc")
            and self._config.args_source.name != "ARGS"
        )
        if "PYTEST_XDIST_WORKER" in os.environ or not is_whole:
            return
        if self._outcomes["failed"] == 0 < self._outcomes["passed"]:
            now = digest()
            same = [one for one in _passed() if one.split()[0] == now.split()[0]]
            PASSED.write_text("\n".join(sorted({*same, now})) + "\n")

    @staticmethod
    def _has_passed() -> bool:
        return digest() in _passed()


def _passed() -> list[str]:
    """Digests that have passed: of one csrc, by processor."""
    return PASSED.read_text().splitlines() if PASSED.is_file() else []
