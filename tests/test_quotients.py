"""Kernels divide by multiplying (csrc/formats/quotient.h): the FP8 codes are those of division."""

from __future__ import annotations

import re
from pathlib import Path

from tests.native import CXX, ROOT, run


def test_codes_are_those_of_division(tmp_path: Path) -> None:
    program = tmp_path / "quotients"
    include = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/include")]
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    run([CXX, *flags, *include, ROOT / "tests/c/quotients.cc", "-o", program])
    found = re.fullmatch(r"0 of (\d+) differ\n", run([program]))
    assert found
    assert int(found[1]) > 50_000_000
