"""What a call writes meets nothing else of it (csrc/extent.h): the sweep against all pairs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.native import CXX, ROOT, run


def test_a_sweep_finds_what_a_comparison_of_all_pairs_finds(tmp_path: Path) -> None:
    program = tmp_path / "accesses"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    run([CXX, *flags, ROOT / "tests/c/accesses.cc", "-o", program])
    assert re.fullmatch(r"\d+ of 600000 meet\n", run([program]))
