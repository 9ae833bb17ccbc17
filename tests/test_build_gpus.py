"""For which GPUs a build compiles the CUDA kernels: those of the machine, unless they are named."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.native import ROOT, run, tool

A_RELEASE = "80-real;89-real;90-real;100-real;120-real;90-virtual"


def configured(folder: Path, nvidia_smi: str, *options: str, archs: str = "") -> str:
    """What CMake says of a build on a machine whose nvidia-smi is this shell script."""
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("no CUDA compiler is on this machine")
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    program.chmod(0o755)
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    said = run(
        [tool("cmake"), "-S", ROOT, "-B", folder / "build", *generator, *options],
        env={"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_ARCHS": archs},
    )
    (line,) = re.findall(r"-- kvx [\d.]+: (.*)", said)
    return re.sub(r"\(\S+ \S+, (.*)\)", r"\1", line)


NONE = "exit 9"
THREE = "echo 9.0; echo 12.0; echo 9.0"


@pytest.mark.parametrize(
    ("nvidia_smi", "options", "archs", "built"),
    [
        (NONE, [], "", "CPU only, as nvidia-smi finds no GPU here."),
        (THREE, [], "", "CPU and CUDA 90-real;120-real"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # each asks a CUDA compiler
            for case in (
                ("echo 9.0; exit 9", [], "", "CPU only, as nvidia-smi finds no GPU here."),
                ("echo 7.5", [], "", "CPU only, as nvidia-smi finds no GPU here."),  # too old
                (THREE, ["-DKVX_CUDA=OFF"], "", "CPU only"),
                (NONE, ["-DKVX_CUDA=ON"], "", f"CPU and CUDA {A_RELEASE}"),
                (THREE, [], "80", "CPU and CUDA 80-real;80-virtual"),
            )
        ),
    ],
)
def test_architectures(
    nvidia_smi: str, options: list[str], archs: str, built: str, tmp_path: Path
) -> None:
    said = configured(tmp_path, nvidia_smi, *options, archs=archs)
    assert said.startswith(built)
    assert ("CUDA_ARCHS=90" in said) == (built.endswith("here."))
