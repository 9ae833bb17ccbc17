"""What the wheel asks of the machine that loads it: auditwheel's verdict, and `make wheel`."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest

from tests.native import ROOT, run, tool

# Of the machine on which releases are built. A newer glibc may ask for itself.
_BUILT_ON, _NEEDS = (2, 36), (2, 34)


def environment() -> dict[str, str]:
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


@pytest.mark.slow  # it needs the wheel with its kernels
@pytest.mark.of_csrc
def test_the_wheel_is_for_many_linuxes(release_wheel: Path, tmp_path: Path) -> None:
    """As `make wheel` repairs it: its name says for which, nothing is added to it."""
    rule = r"\t(.*auditwheel repair.* build/wheel/.*)"
    (line,) = re.findall(rule, (ROOT / "Makefile").read_text())
    assert line.endswith("$(BIN)/auditwheel repair --wheel-dir dist build/wheel/kvx-*.whl")
    run([tool("auditwheel"), "repair", "--wheel-dir", tmp_path, release_wheel], env=environment())
    (made,) = tmp_path.glob("*.whl")
    name = re.fullmatch(r"kvx-[\d.]+-py3-none-manylinux_(\d+)_(\d+)_\w+\.whl", made.name)
    assert name, made.name
    glibc = tuple(map(int, platform.libc_ver()[1].split(".")))
    if glibc <= _BUILT_ON:
        assert (int(name[1]), int(name[2])) <= _NEEDS
    said = run([tool("auditwheel"), "show", made], env=environment())
    libraries = set(re.findall(r"\b(lib\w+\.so\.\d+)\b", said))
    assert libraries <= {"libc.so.6", "libm.so.6", "libgcc_s.so.1"}, said
