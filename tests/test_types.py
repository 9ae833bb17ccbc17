"""The types that mypy infers from the public signatures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

CODE = """
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvx_core import CacheDesc, gather_kv


def calls(cache: CacheDesc, key: Tensor, array: npt.NDArray[np.float32]) -> None:
    assert_type(gather_kv(cache, [[1]], [1], out=(key, key)), tuple[Tensor, Tensor])
    assert_type(gather_kv(cache, [[1]], [1], out=(key, None)), tuple[Tensor, None])
    assert_type(
        gather_kv(cache, [[1]], [1], out=(array, key)), tuple[npt.NDArray[np.float32], Tensor]
    )
    assert_type(gather_kv(cache, [[1]], [1]), tuple[Any, Any])
    gather_kv(cache, [[1]], [1], dtype="float32", layer=1)
    gather_kv(cache, [[1]], [1], out=(key, key), dtype="float32")
    gather_kv(cache, [[1]], [1], out=key)
"""


@pytest.mark.slow
def test_gather_kv_returns_what_it_is_given(tmp_path: Path) -> None:
    """The last three calls are wrong, and nothing else."""
    path = tmp_path / "calls.py"
    path.write_text(CODE)
    options = ["--strict", "--no-error-summary", "--hide-error-context", "--no-color-output"]
    cache = ["--cache-dir", REPOSITORY / ".mypy_cache"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *cache, path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = CODE.splitlines()
    wrong = {lines.index(line) + 1 for line in lines if line.startswith("    gather_kv(")}
    found = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error:" in line}
    assert found == wrong, run.stdout + run.stderr
