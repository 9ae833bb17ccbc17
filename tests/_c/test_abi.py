"""abi.py against the headers; a libkvx that is missing, foreign or of another major version."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvx_core import InternalError, InvalidArgumentError, Status
from kvx_core._c import abi, abi_attend, abi_hybrid, abi_plan
from kvx_core.errors import BY_STATUS
from kvx_core.types import BlockTableFormat, DType, Layout, Memory, ScaleGranularity
from tests.native import run

REPOSITORY = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")

STRUCTS = {
    name: struct
    for name, struct in (vars(abi) | vars(abi_attend) | vars(abi_hybrid) | vars(abi_plan)).items()
    if name.startswith("kvx_") and name.endswith("_t") and issubclass(struct, ctypes.Structure)
}

# Python name: what the header calls it.
CONSTANTS = {
    **{f"KVX_STATUS_{status.name}": status for status in Status},
    **{f"KVX_DTYPE_{dtype.name}": dtype for dtype in DType},
    **{f"KVX_LAYOUT_{layout.name}": layout for layout in Layout},
    **{f"KVX_MEMORY_{memory.name}": memory for memory in Memory},
    **{f"KVX_BLOCK_TABLE_{table.name}": table for table in BlockTableFormat},
    **{f"KVX_SCALE_{granularity.name}": granularity for granularity in ScaleGranularity},
    "KVX_ABI_VERSION_MAJOR": abi.ABI_MAJOR,
    "KVX_ABI_VERSION_MINOR": abi.ABI_MINOR,
    "KVX_MAX_TENSOR_DIMS": abi.MAX_TENSOR_DIMS,
    "KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX": abi.FLAG_KVCACHEINDEX,
    "KVX_FLAG_ZERO_FILL": abi.FLAG_ZERO_FILL,
    "KVX_BLOCK_TABLE_FLAG_EXACT": abi.FLAG_EXACT,
    "KVX_BLOCK_TABLE_FLAG_WHOLE": abi.FLAG_WHOLE,
    "KVX_BLOCK_TABLE_FLAG_HOLES": abi.FLAG_HOLES,
    "KVX_PLANE_INFO_CONVERTS": abi_plan.CONVERTS,
    "KVX_PLANE_INFO_EXACT": abi_plan.EXACT,
    "KVX_PLANE_INFO_JOINED": abi_plan.JOINED,
    "KVX_PLANE_INFO_FINDS_SCALES": abi_plan.FINDS_SCALES,
    "KVX_FORMAT_ELEMENT": abi.FORMAT_ELEMENT,
    "KVX_FORMAT_SCALED": abi.FORMAT_SCALED,
    "KVX_FORMAT_ZEROS": abi.FORMAT_ZEROS,
    "KVX_FORMAT_GROUPS": abi.FORMAT_GROUPS,
    "KVX_HYBRID_ONE_EACH": abi_hybrid.ONE_EACH,
    "KVX_HYBRID_SINGLE_ROW": abi_hybrid.SINGLE_ROW,
    "KVX_HYBRID_BULK": abi_hybrid.BULK,
    "KVX_HYBRID_NO_OVERLAP": abi_hybrid.NO_OVERLAP,
    "KVX_HYBRID_THRESHOLDS": abi_hybrid.THRESHOLDS,
    "KVX_HYBRID_NO_KEYS": abi_hybrid.NO_KEYS,
    "KVX_HYBRID_NVFP4": abi_hybrid.NVFP4,
    "KVX_HYBRID_MXFP4": abi_hybrid.MXFP4,
    "KVX_HYBRID_FP8": abi_hybrid.FP8,
    "KVX_NULL_BLOCK(0)": abi.null_block_plus_1(0),
    "KVX_NULL_BLOCK(7)": abi.null_block_plus_1(7),
}


def compile_and_run(tmp_path: Path, source: str) -> str:
    (tmp_path / "main.cc").write_text(source)
    include = REPOSITORY / "csrc" / "include"
    subprocess.run(
        [CXX, "-std=c++17", f"-I{include}", "main.cc", "-o", "main"], cwd=tmp_path, check=True
    )
    return subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout


def test_structs_are_those_of_the_headers(tmp_path: Path) -> None:
    expected, lines = [], []
    for name, struct in STRUCTS.items():
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            at = getattr(struct, field)
            expected.append(f"{name}.{field} {at.offset} {at.size}")
            lines.append(
                f'std::printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof({name}::{field}));"
            )
    body = "\n".join(lines)
    found = compile_and_run(
        tmp_path, f'#include <cstdio>\n#include "kvx/kvx_ext.h"\nint main() {{\n{body}\n}}\n'
    )
    assert found.splitlines() == expected
    assert len(STRUCTS) == 33


def test_enums_and_constants_are_those_of_the_headers(tmp_path: Path) -> None:
    body = "\n".join(
        f'std::printf("{name} %lld\\n", static_cast<long long>({name}));' for name in CONSTANTS
    )
    found = compile_and_run(
        tmp_path, f'#include <cstdio>\n#include "kvx/kvx_ext.h"\nint main() {{\n{body}\n}}\n'
    )
    assert found.splitlines() == [f"{name} {int(value)}" for name, value in CONSTANTS.items()]


def test_everything_is_of_the_headers_version() -> None:
    """kvx_abi.h says the ABI's version; abi.py, both places of spec.md and the changelog agree."""
    header = (REPOSITORY / "csrc/include/kvx/kvx_abi.h").read_text()
    parts = dict(re.findall(r"#define KVX_ABI_VERSION_(\w+) (\d+)", header))
    version = f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
    assert (int(parts["MAJOR"]), int(parts["MINOR"])) == (abi.ABI_MAJOR, abi.ABI_MINOR)
    spec = (REPOSITORY / "docs/spec.md").read_text()
    assert re.findall(r"[Tt]his is ABI version ([\d.]+\d)", spec) == [version]
    assert re.findall(r"are version ([\d.]+\d) of the ABI", spec) == [version]
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.findall(r"^ABI ([\d.]+\d):", changes, re.MULTILINE)[0] == version


def test_every_failing_status_has_an_exception_and_a_builtin() -> None:
    assert set(BY_STATUS) == set(Status) - {Status.OK}
    builtin = {
        Status.INVALID_ARGUMENT: ValueError,
        Status.UNSUPPORTED: NotImplementedError,
        Status.OUT_OF_RANGE: IndexError,
        Status.INCOMPATIBLE: RuntimeError,
        Status.INTERNAL_ERROR: RuntimeError,
    }
    for status, error in BY_STATUS.items():
        assert issubclass(error, builtin[Status(status)])
        assert error.status is status


def test_check_passes_the_sentence_on() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        abi.check(abi.library().kvx_get_version(None))
    assert str(raised.value) == "version is NULL"
    abi.check(0)


def test_check_of_a_status_from_the_future_is_an_internal_error() -> None:
    with pytest.raises(InternalError):
        abi.check(77)


@pytest.mark.parametrize("count", [-1, 2**32])
def test_a_count_that_uint32_would_cut_is_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        abi.kvx_slot_mapping_t(token_count=count)
    assert str(raised.value) == f"token_count is {count}, expected 0 to 4294967295"


def load(library: Path) -> str:
    """The last line that a new Python prints when it uses this libkvx."""
    run = subprocess.run(
        [sys.executable, "-c", "import kvx_core; kvx_core.backend_info()"],
        env={**os.environ, "KVX_LIBRARY": str(library)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    return run.stderr.splitlines()[-1]


def build_library(tmp_path: Path, source: str) -> Path:
    (tmp_path / "stub.cc").write_text(source)
    subprocess.run(
        [CXX, "-shared", "-fPIC", "stub.cc", "-o", "libkvx.so"], cwd=tmp_path, check=True
    )
    return tmp_path / "libkvx.so"


def test_a_missing_library_says_how_to_get_it(tmp_path: Path) -> None:
    path = tmp_path / "libkvx.so"
    error = load(path)
    assert error.startswith(f"ImportError: libkvx is not at {path} (")
    assert error.endswith("or set KVX_LIBRARY to its path")


def test_a_library_without_our_functions_is_refused(tmp_path: Path) -> None:
    error = load(build_library(tmp_path, 'extern "C" int kvx_get_version(void *) { return 0; }'))
    assert "IncompatibleError: " in error
    assert "undefined symbol: kvx_" in error


def test_another_major_version_is_refused(tmp_path: Path) -> None:
    functions = "\n".join(
        f"int {name}() {{ return 0; }}" for name in abi._FUNCTIONS if name != "kvx_check_version"
    )
    source = f"""
        extern "C" {{
        {functions}
        const char *kvx_last_error() {{ return "abi_major.abi_minor is 1.4, expected 2.0"; }}
        int kvx_check_version(unsigned, unsigned) {{ return 4; }}
        }}
    """
    path = build_library(tmp_path, source)
    error = load(path)
    assert error.endswith(
        f"IncompatibleError: {path} is of another version than this kvx_core: abi_major.abi_minor "
        "is 1.4, expected 2.0. Install both from the same release"
    )


def test_import_loads_no_library() -> None:
    """A machine may get the libraries later, and $KVX_LIBRARY counts until the first call."""
    code = "import kvx_core; print('libkvx' in open('/proc/self/maps').read())"
    assert run([sys.executable, "-c", code]) == "False\n"
