"""The CUDA kernels, run on the CPU with ASan and UBSan, and under the host grid's race check.

Random calls (tests/c/fuzz) over buffers of the exact size: a byte too far ends the run. Each call
runs in an order of its own.
"""

from __future__ import annotations

import os
import re

import pytest

from tests.native import run, sanitized_program

pytestmark = [pytest.mark.slow, pytest.mark.of_csrc]
SECONDS = int(os.environ.get("KVX_FUZZ_SECONDS", "5"))
SEED = int(os.environ.get("KVX_FUZZ_SEED", "1"))


@pytest.mark.parametrize("sanitize", ["ON", "THREAD"])
def test_random_calls(sanitize: str) -> None:
    program = sanitized_program("fuzz/fuzz.cc", sanitize, hostgrid=True)
    output = run(
        [program, "device", str(SECONDS), str(SEED)],
        env={"UBSAN_OPTIONS": "print_stacktrace=1"},
        timeout=SECONDS + 120,
    )
    line = re.compile(r"(\w+): (\d+) calls, (\d+) accepted, (\d+) refused, (\d+) of them out")
    counts = {name: list(map(int, numbers)) for name, *numbers in line.findall(output)}
    for operation in ("write", "gather", "migrate"):
        _, accepted, _, out_of_range = counts[operation]
        assert accepted > 5 * SECONDS, operation
        # The race check looks at calls in which every token has a place of its own.
        assert (out_of_range > 0) == (sanitize == "ON"), operation
    if sanitize == "THREAD":
        races, accesses = map(int, re.findall(r"(\d+) races in (\d+) accesses", output)[0])
        assert races == 0
        assert accesses > 1_000 * SECONDS
