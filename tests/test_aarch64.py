"""libkvx for aarch64, compiled here: the programs of tests/c on it, run by qemu's emulator.

`make test-aarch64` runs this; `make test` does not, as few machines have the compiler. What x86-64
builds choose vectors for is portable code there, which the emulator executes as a processor would.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests.native import ROOT, library, run

CC, CXX, EMULATOR = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64"
C = (CC, "-std=c11", "-Wall", "-Wextra", "-Werror")
CPP = (CXX, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror")
FUZZED = ("validate", "write", "gather", "migrate", "hybrid", "attend")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, (CC, CXX, EMULATOR))),
        reason="no compiler or emulator for aarch64: apt install g++-aarch64-linux-gnu qemu-user",
    ),
]


@cache
def built() -> Path:
    """build/aarch64, with libkvx.so."""
    return library(
        "aarch64",
        CMAKE_TOOLCHAIN_FILE=str(ROOT / "cmake/aarch64.cmake"),
        CMAKE_CXX_COMPILER=CXX,
    ).parent


def emulated(compiler: tuple[str, ...], source: str, folder: Path, *arguments: str) -> str:
    """What a program says that is compiled for aarch64 and linked to that library."""
    program = folder / Path(source).stem
    include = [f"-I{ROOT / one}" for one in ("csrc", "csrc/include")]
    if source == "tests/c/v1/program.c":
        include = []  # it has a header of its own
    link = [f"-L{built()}", "-lkvx", f"-Wl,-rpath,{built()}", "-pthread", "-lm"]
    run([*compiler, *include, ROOT / source, "-o", program, *link])
    return run([EMULATOR, "-L", "/usr/aarch64-linux-gnu", program, *arguments])


@pytest.mark.parametrize(
    "source",
    ["conformance.c", "kvbm.c", "float_env.c", "v1/program.c"],
)
def test_programs_of_the_abi(source: str, tmp_path: Path) -> None:
    said = emulated(C, f"tests/c/{source}", tmp_path)
    checks, failures = re.findall(r"(\d+) checks, (\d+) failures", said)[0]
    assert (int(failures), int(checks) > 10) == (0, True)


def test_random_calls(tmp_path: Path) -> None:
    """tests/c/fuzz compares each byte with a second implementation of the spec."""
    said = emulated((*CPP, "-O2"), "tests/c/fuzz/fuzz.cc", tmp_path, "0", "1", "0", "5000")
    calls = {name: int(accepted) for name, accepted in re.findall(r"(\w+): .* (\d+) accep", said)}
    assert calls.keys() == set(FUZZED)
    assert min(calls.values()) > 50, said  # of 5,000


def test_lossless_bytes(tmp_path: Path) -> None:
    said = emulated(CPP, "tests/c/lossless.cc", tmp_path, "2", "1")
    counts = dict(re.findall(r"(\w+): (\d+)", said))
    assert counts.keys() == {"intact", "accepted", "refused", "changing"}


def test_the_example(tmp_path: Path) -> None:
    said = emulated(C, "examples/c/move_tokens.c", tmp_path)
    assert said.splitlines()[1] == "gathered: equal"


def test_vectors_are_vectors() -> None:
    """The portable code is written in vectors of 16 bytes, which are NEON's registers there."""
    code = run(["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", built() / "libkvx.so"])
    assert len(re.findall(r"\b(?:zip[12]|tbl|ldp|ldr)\s+[vq]\d+", code)) > 1000


def test_the_wheel() -> None:
    """dist/ has it after `make wheel-aarch64`."""
    wheels = list((ROOT / "dist").glob("kvx-*_aarch64.whl"))
    if not wheels:
        pytest.skip("make wheel-aarch64 has not run")
    (wheel,) = wheels
    assert re.fullmatch(r"kvx-[\d.]+-py3-none-manylinux_2_\d+_aarch64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        heads = {archive.read(name)[:20] for name in libraries}
    assert libraries == ["kvx_core/libkvx.so", "kvx_core/libkvx_python.so"]
    assert {(head[:4], head[18]) for head in heads} == {(b"\x7fELF", 183)}  # EM_AARCH64
