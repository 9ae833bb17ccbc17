"""The wheel's headers, library and packages, used by a C program and by another Python."""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.native import CC, CXX, ROOT, compile_program, hostgrid_library, run

PROGRAM = ROOT / "tests/c/conformance.c"
WARNINGS = ("-Wall", "-Wextra", "-pedantic", "-Werror")
HEADERS = sorted(f"kvx/{path.name}" for path in (ROOT / "csrc/include/kvx").glob("*.h"))
LANGUAGES = {
    "c11": (CC, "-std=c11", "-x", "c"),
    "c++17": (CXX, "-std=c++17", "-x", "c++"),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_conformance_program(language: str, installed: Path, tmp_path: Path) -> None:
    core = installed / "kvx_core"
    program = compile_program(
        [*LANGUAGES[language], *WARNINGS],
        PROGRAM,
        tmp_path / "conformance",
        include=core / "include",
        library=core / "libkvx.so",
    )
    checks, failures = re.findall(r"(\d+) checks, (\d+) failures", run([program]))[0]
    assert (int(failures), int(checks) > 500) == (0, True)


def kvbm(library: Path, tmp_path: Path) -> Path:
    """The program of a user of KVBM's kernels, which sees no header of KVX."""
    return compile_program(
        [*LANGUAGES["c11"], *WARNINGS],
        ROOT / "tests/c/kvbm.c",
        tmp_path / "kvbm",
        include=tmp_path,
        library=library,
    )


def test_a_program_written_for_kvbm_links_and_runs(installed: Path, tmp_path: Path) -> None:
    """All memory is the host's. A wheel without CUDA is what KVBM calls a stub build."""
    said = run([kvbm(installed / "kvx_core/libkvx.so", tmp_path)])
    stub, batches, checks, failures = map(int, re.findall(r"\d+", said))
    assert (checks > 500, failures) == (True, 0), said
    assert batches == (not stub)


def test_a_program_written_for_kvbm_on_the_kernels(tmp_path: Path) -> None:
    said = run([kvbm(hostgrid_library(), tmp_path), "device"])
    assert re.fullmatch(r"stub build 0, batches 1, \d+ checks, 0 failures\n", said), said


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_program_with_the_header_of_v1_alone(
    language: str, installed: Path, tmp_path: Path
) -> None:
    program = compile_program(
        [*LANGUAGES[language], *WARNINGS],
        ROOT / "tests/c/v1/program.c",
        tmp_path / "program",
        include=ROOT / "tests/c/v1",
        library=installed / "kvx_core/libkvx.so",
    )
    assert re.findall(r"(\d+) checks, (\d+) failures", run([program])) == [("64", "0")]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("header", HEADERS)
def test_header_stands_alone(language: str, header: str, installed: Path, tmp_path: Path) -> None:
    source = tmp_path / "only.c"
    source.write_text(f'#include "{header}"\n')
    include = installed / "kvx_core/include"
    run([*LANGUAGES[language], *WARNINGS, f"-I{include}", "-fsyntax-only", source])


def test_library_exports_what_the_headers_declare(installed: Path) -> None:
    core = installed / "kvx_core"
    text = "".join(path.read_text() for path in (core / "include/kvx").glob("*.h"))
    functions = r"^KVX_API [\w ]+[ *]((?:kvx|kvbm_kernels)_\w+)\("
    declared = set(re.findall(functions, text, re.MULTILINE))
    symbols = run(["nm", "-D", "--defined-only", "--format=posix", core / "libkvx.so"])
    assert {line.split()[0] for line in symbols.splitlines()} == declared
    assert len(declared) >= 9


def test_library_needs_only_the_c_library(installed: Path) -> None:
    dynamic = run(["readelf", "-d", installed / "kvx_core/libkvx.so"])
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", dynamic))
    loaders = {"ld-linux-x86-64", "ld-linux-aarch64"}
    assert (
        {"libc"} <= needed <= {"libc", "libgcc_s", "libm", "libdl", "librt", "libpthread", *loaders}
    )


def test_wheel_is_for_every_python(wheel: Path, installed: Path) -> None:
    assert re.fullmatch(r"kvx-[\d.]+-py3-none-\w*linux\w+\.whl", wheel.name)
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    for package in ("kvx_core", "kvx_adapters", "kvx_conformance"):
        source = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert source | {f"{package}/py.typed"} <= files
    assert "kvx_conformance/faults.c" in files
    assert {file.split("/")[0].split("-")[0] for file in files} == {
        "kvx_core",
        "kvx_adapters",
        "kvx_conformance",
        "kvx",
    }
    assert {file for file in files if file.endswith(".so")} == {
        "kvx_core/libkvx.so",
        "kvx_core/libkvx_python.so",
    }


def test_wheel_is_for_many_linuxes(installed: Path) -> None:
    """Its library for Python; test_wheel.py asks of all of it when csrc has changed."""
    library = (installed / "kvx_core/libkvx_python.so").read_bytes()
    asked = {tuple(map(int, one)) for one in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    glibc = tuple(map(int, platform.libc_ver()[1].split(".")))
    assert asked
    assert glibc > (2, 36) or max(asked) <= (2, 34)  # a newer glibc may ask for itself


def test_wheel_imports_outside_the_source_tree(installed: Path, tmp_path: Path) -> None:
    """Without .pth files (-S), so that an editable install of this tree is not found."""
    code = "import kvx_core; print(kvx_core.__file__); print(kvx_core.backend_info())"
    paths = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    environment = {"PYTHONPATH": paths, "KVX_LIBRARY": ""}
    lines = run([sys.executable, "-S", "-P", "-c", code], env=environment).splitlines()
    assert Path(lines[0]).is_relative_to(installed)
    assert "version" in lines[1]
