"""Breaks one line of a kernel; the checks that pass on the real one must then fail."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.native import ROOT, hostgrid_library, run, sanitized_program

pytestmark = [pytest.mark.slow, pytest.mark.of_csrc]


class Mutant(NamedTuple):
    source: str
    right: str  # found once; the first of them if there are more
    wrong: str
    sanitize: str  # who looks
    report: str


MUTANTS = {
    "vector_wider_than_alignment": Mutant(
        "choice.cc", "alignment % vector || ", "", "ON", r"misaligned address"
    ),
    "tile_read_before_it_is_filled": Mutant(
        "tile.cu", "__syncthreads();", "", "THREAD", r"race in launch|FAILED"
    ),
    "one_unit_too_many": Mutant(
        "vectors.cu",
        "if (unit + i * kWarp < last) store(",
        "if (unit + i * kWarp <= last) store(",
        "ON",
        r"heap-buffer-overflow|FAILED",
    ),
}


def mutated(mutant: Mutant, library: Path, folder: Path) -> Path:
    """The library linked anew, with the mutant's object in the place of the right one."""
    build, source = library.parent, ROOT / "csrc/cuda" / mutant.source
    text = source.read_text()
    assert mutant.right in text, f"{mutant.source} no longer looks as this test expects"
    copy = folder / source.name
    copy.write_text(text.replace(mutant.right, mutant.wrong, 1))
    commands = json.loads((build / "compile_commands.json").read_text())
    (command,) = (c["command"] for c in commands if c["file"] == str(source))
    changed = folder / "mutant.o"
    *flags, _, _, _, _ = shlex.split(command)  # -o object -c source
    run([*flags, "-o", changed, "-c", copy])
    objects = [o for o in build.glob("CMakeFiles/kvx.dir/**/*.o") if o.name != f"{source.name}.o"]
    sanitize = [f for f in flags if f.startswith("-fsanitize=address")]
    wrong = folder / "libkvx.so.1"  # the name that programs ask for
    run([flags[0], "-shared", *sanitize, *objects, changed, "-o", wrong, "-pthread"])
    return wrong


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    program = sanitized_program("fuzz/fuzz.cc", mutant.sanitize, hostgrid=True)
    mutated(mutant, hostgrid_library(mutant.sanitize), tmp_path)
    with pytest.raises(AssertionError, match=mutant.report):
        run([program, "device", "20"], env={"LD_LIBRARY_PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("sanitize", "lie", "report"),
    [("ON", "overflow", r"heap-buffer-overflow.*::cuda"), ("THREAD", "twice", r"race in launch 1")],
)
def test_a_call_that_lies_is_noticed(sanitize: str, lie: str, report: str) -> None:
    program = sanitized_program("lie.cc", sanitize, hostgrid=True)
    output = run(["sh", "-c", f"{program} {lie} device 2>&1 || true"])
    assert re.search(rf"(?s){report}", output)
