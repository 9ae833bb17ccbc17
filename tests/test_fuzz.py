"""Random and hostile calls: no crash, and no byte written where none should be.

KVX_FUZZ_SECONDS and KVX_FUZZ_SEED set how long tests/c/fuzz runs per test and where it starts.
A failure prints the arguments that repeat it alone: build/sanitize-on/fuzz 0 SEED ITERATION 1.
"""

from __future__ import annotations

import os
import re

import pytest

from tests.native import run, sanitized_program

pytestmark = pytest.mark.of_csrc

SECONDS = int(os.environ.get("KVX_FUZZ_SECONDS", "5"))
SEED = int(os.environ.get("KVX_FUZZ_SEED", "1"))


@pytest.mark.parametrize("isa", ["avx512vbmi", "avx512", "avx2", "portable"])
def test_hostile_calls(isa: str) -> None:
    """On a processor without `isa` the best that it has is used once more."""
    output = run(
        [sanitized_program("fuzz/fuzz.cc", "ON"), str(SECONDS), str(SEED)],
        env={"KVX_CPU_ISA": isa, "UBSAN_OPTIONS": "print_stacktrace=1"},
        timeout=SECONDS + 120,
    )
    print(output)
    line = re.compile(r"(\w+): (\d+) calls, (\d+) accepted, (\d+) refused, (\d+) of them out")
    counts = {name: list(map(int, numbers)) for name, *numbers in line.findall(output)}
    assert counts.keys() == {"validate", "write", "gather", "migrate", "hybrid", "attend"}
    # Half of the work would be missing if nearly all calls were refused, or nearly none.
    for operation, (calls, accepted, refused, out_of_range) in counts.items():
        assert calls > 10 * SECONDS, operation
        assert accepted > calls / 10, operation
        assert refused > calls / 10, operation
        assert (out_of_range > 0) == (operation != "validate"), operation


def test_hostile_lossless_bytes() -> None:
    """tests/c/lossless.cc: random arrays, damaged ones, and ones that change during a call."""
    for isa in ("avx512vbmi", "portable"):
        program = sanitized_program("lossless.cc", "ON")
        output = run([program, "2", "1"], env={"KVX_CPU_ISA": isa}, timeout=120)
        counts = {name: int(count) for name, count in re.findall(r"(\w+): (\d+)", output)}
        assert counts.keys() == {"intact", "accepted", "refused", "changing"}
        assert min(counts.values()) > 20, output
