"""The host grid (tests/hostgrid): kernels work in any order of threads, and it detects faults."""

from __future__ import annotations

import ctypes
import re
import shlex
from pathlib import Path

import pytest

from tests.native import ADDRESS, CXX, ROOT, THREAD, run

HOSTGRID = ROOT / "tests/hostgrid"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
FLAGS = ("-std=c++20", "-O1", "-g", "-fPIC", "-fno-omit-frame-pointer", *WARNINGS)
INCLUDE = tuple(f"-I{folder}" for folder in (HOSTGRID, ROOT / "csrc", ROOT / "csrc/include"))
# Who looks: what kernels are compiled with, what the host grid is, and what it consists of.
BUILDS = {
    "plain": ((), (), ("hostgrid.cc",)),
    "address": (ADDRESS, ADDRESS, ("hostgrid.cc",)),
    "race": (THREAD, (), ("hostgrid.cc", "racecheck.cc")),
}
ORDERS = [("fwd", "1"), ("rev", "1"), ("rand", "1"), ("rand", "2"), ("rand", "3")]


@pytest.fixture(scope="module")
def selftest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program selftest.cu in every build, and as a library with the race check."""
    folder = tmp_path_factory.mktemp("hostgrid")
    programs = {}
    for build, (kernel_flags, grid_flags, grid) in BUILDS.items():
        kernels = folder / f"{build}.o"
        compiler = [CXX, *FLAGS, *INCLUDE]
        run([*compiler, *kernel_flags, "-x", "c++", "-c", HOSTGRID / "selftest.cu", "-o", kernels])
        sources = [HOSTGRID / source for source in grid]
        programs[build] = folder / build
        run([*compiler, *grid_flags, *sources, kernels, "-o", programs[build]])
        if build == "race":
            programs["library"] = folder / "librace.so"
            run([*compiler, "-shared", *sources, kernels, "-o", programs["library"]])
    return programs


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("build", BUILDS)
def test_results(selftest: dict[str, Path], build: str, order: str, seed: str) -> None:
    output = run([selftest[build]], env={"HOSTGRID_SCHED": order, "HOSTGRID_SEED": seed})
    assert output.endswith("done\n")
    if build == "race":
        found = re.search(r"(\d+) races, (\d+) accesses", output)
        assert found
        assert int(found[1]) == 0
        assert int(found[2]) > 10_000


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize(
    ("build", "fault", "report"),
    [
        (
            "plain",
            "divergent-barrier",
            r"different barriers.*cu:\d+: threads 0-19\n.*threads 20-31",
        ),
        ("plain", "different-lines", r"deadlock.*ffffffff, .*selftest.cu:\d+: threads [01] [23] "),
        (
            "plain",
            "absent-lane",
            r"lane that is not there.*threads 0-6 8-31\n.*exited: threads 7\n",
        ),
        ("plain", "absent-source", r"lane 20 is not in mask 0000ffff of a shuffle by thread \d+, "),
        ("plain", "wrong-mask", r"lane \d+ is not in mask 000000ff of __syncwarp by thread \d+, "),
        ("address", "misaligned", r"selftest.cu:\d+:.* misaligned address .* 16 byte alignment"),
        ("address", "past-end", r"heap-buffer-overflow.* in copy_kernel<uint4> "),
        ("address", "past-shared", r"use-after-poison.* in past_shared_kernel"),
        ("race", "missing-barrier", r"race in launch 1 at .* shared memory\n.* by thread \d+ of"),
        ("race", "missing-syncwarp", r"race in launch 1 at .* shared memory\n.* by thread \d+ of"),
        ("race", "same-address", r"race in launch 1 at .* global memory\n.* by thread 5 of block"),
    ],
)
def test_faults(
    selftest: dict[str, Path], build: str, fault: str, report: str, order: str, seed: str
) -> None:
    with pytest.raises(AssertionError, match=f"(?s){report}"):
        run([selftest[build], fault], env={"HOSTGRID_SCHED": order, "HOSTGRID_SEED": seed})


def test_refused_launch(selftest: dict[str, Path]) -> None:
    """As on a device, the runtime's error is all that happens."""
    output = run([selftest["plain"], "shared-memory"])
    assert "launch refused: shared memory is 232449 bytes, expected at most 49152" in output
    assert output.endswith("done\n")


def test_race_names_the_line(selftest: dict[str, Path]) -> None:
    with pytest.raises(AssertionError) as report:
        run([selftest["race"], "missing-barrier"])
    commands = re.findall(r"addr2line .*", str(report.value))
    assert len(commands) == 4  # a read and a write, and the other way round
    for command in commands:
        assert re.search(r"transpose_kernel.*selftest\.cu:\d+", run(shlex.split(command)))


def test_race_check_in_a_library(selftest: dict[str, Path]) -> None:
    library = ctypes.CDLL(str(selftest["library"]))
    library.hostgrid_accesses.restype = library.hostgrid_races.restype = ctypes.c_ulong
    assert library.main(1, None) == 0
    assert library.hostgrid_accesses() > 10_000
    assert library.hostgrid_races() == 0
