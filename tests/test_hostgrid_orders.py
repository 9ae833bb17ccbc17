"""The kernels in other orders of threads, warps and blocks than the one all tests run in.

HOSTGRID_SEED and HOSTGRID_SCHED are read at each launch; the tests run again in a process for each.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.native import run

pytestmark = [pytest.mark.slow, pytest.mark.of_csrc]

# Every family, every way to find a token, tokens that are skipped, calls of many waves.
SUBSET = (
    "hostgrid and (every_granularity or out_of_range or out_of_order or every_pair_of_ends or "
    "beams or opaque or many_layers or (store_past and tgi) or "
    "(every_layout and (usual or odd)) or "
    "(every_pair_of_layouts and (tgi or packed16 or vllm_LBNHC)) or "
    "(every_pair_of_dtypes and float8_e4m3fn))"
)
# The orders without chance add little to two seeds of it.
PLAIN = "hostgrid and (every_granularity or out_of_order or (every_layout and odd))"
FILES = [f"tests/test_{name}.py" for name in ("write_gather", "migrate", "codecs")]


@pytest.mark.parametrize(
    ("order", "seed", "subset"),
    [("rand", "2", SUBSET), ("fwd", "1", PLAIN), ("rev", "1", PLAIN)],
    ids=["rand-2", "fwd", "rev"],
)
def test_another_order_passes_the_same_tests(order: str, seed: str, subset: str) -> None:
    output = run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            subset,
            *FILES,
        ],
        env={"HOSTGRID_SCHED": order, "HOSTGRID_SEED": seed},
    )
    assert int(re.findall(r"(\d+) passed", output)[-1]) > 60
