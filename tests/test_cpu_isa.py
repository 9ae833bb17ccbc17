"""The instruction sets that libkvx can choose from: each of them passes the same tests.

KVX_CPU_ISA is read once per process, so the tests run again in a process of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import CC, CXX, compile_program, run

ROOT = Path(__file__).parents[1]
ISA = "from kvx_core import backend_info; print(backend_info().cpu_isa)"
# What goes through every kernel: all conversions, all layouts on both sides, odd sizes, threads.
SUBSET = (
    "cpu and ((test_every_value and not flush) or test_write_every_layout or test_ggml or "
    "every_pair_of_dtypes or (test_calls_that_store and tgi) or "
    "(every_pair_of_layouts and (custom or tgi-packed16)))"
    " or test_scaled_rows or test_past_the_caches"
)


def python(*arguments: str, isa: str | None = None) -> subprocess.CompletedProcess[str]:
    """A Python process in which libkvx is told to use `isa`."""
    environment = {k: v for k, v in os.environ.items() if k != "KVX_CPU_ISA"}
    if isa is not None:
        environment["KVX_CPU_ISA"] = isa
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.of_csrc
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_another_instruction_set_passes_the_same_tests(isa: str) -> None:
    used = python("-c", ISA, isa=isa).stdout.strip()
    if used != isa:
        assert isa != "portable", f"portable is always there, but {used} is used"
        pytest.skip(f"this processor has no {isa}, {used} is used")
    files = [
        f"tests/test_{name}.py"
        for name in ("codecs", "ggml", "scaled_rows", "write_gather", "migrate")
    ]
    result = python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", SUBSET, *files, isa=isa
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout
    assert "deselected" in result.stdout


def test_an_unknown_instruction_set_is_ignored() -> None:
    best, unknown = python("-c", ISA), python("-c", ISA, isa="mmx")
    assert best.returncode == 0, best.stderr
    assert unknown.stdout == best.stdout
    assert best.stdout.strip() in ("avx512vbmi", "avx512", "avx2", "portable")


CHOSEN = """
#include <stdio.h>
#include "kvx/kvx_ext.h"
int main(void) {
  kvx_backend_info_t info = {0};
  info.size = sizeof(info);
  return kvx_backend_info(&info) != KVX_STATUS_OK || puts(info.cpu_isa) < 0;
}
"""


@pytest.mark.slow
@pytest.mark.of_csrc
@pytest.mark.skipif(
    shutil.which("qemu-x86_64") is None, reason="no emulator of processors: apt install qemu-user"
)
@pytest.mark.parametrize(("processor", "isa"), [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_a_processor_that_has_less(
    processor: str, isa: str, installed: Path, tmp_path: Path
) -> None:
    """What it does not have is not executed: the emulator would end the program."""
    core = installed / "kvx_core"
    (tmp_path / "chosen.c").write_text(CHOSEN)
    said = {}
    for compiler, source, arguments in (
        ([CC], tmp_path / "chosen.c", []),
        ([CC], ROOT / "tests/c/conformance.c", []),
        (
            [CXX, "-std=c++20", f"-I{ROOT / 'csrc'}"],
            ROOT / "tests/c/fuzz/fuzz.cc",
            ["0", "1", "0", "2000"],
        ),
    ):
        program = compile_program(
            compiler,
            source,
            tmp_path / source.stem,
            include=core / "include",
            library=core / "libkvx.so",
        )
        said[source.stem] = run(["qemu-x86_64", "-cpu", processor, program, *arguments])
    assert said["chosen"].splitlines()[-1] == isa  # after what the emulator says of itself
    assert " 0 failures" in said["conformance"]
    accepted = re.findall(r"(\d+) accepted", said["fuzz"])
    assert len(accepted) == 6
    assert min(map(int, accepted)) > 10
