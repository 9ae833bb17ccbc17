"""scalar.h's FP8 is that of NVIDIA's processors, for every BF16 and for 116 million floats.

The reference is the host part of cuda_fp8.h. It is written to give the same bits as the
instructions that its functions are on a device; those are what the kernels use.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from tests.native import CXX, ROOT, run


def cuda_headers() -> Path:
    """The include directory of the CUDA toolkit, or of its packages from PyPI."""
    nvcc = shutil.which("nvcc")
    spec = find_spec("nvidia.cu13")
    folders = [*Path("/usr/local").glob("cuda*")]
    folders += [Path(nvcc).resolve().parents[1]] if nvcc else []
    folders += [
        Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()
    ]
    for folder in folders:
        if (folder / "include/cuda_fp8.h").exists():
            return folder / "include"
    raise AssertionError("cuda_fp8.h is nowhere: pip install 'kvx[nvcc]', or install the toolkit")


def test_codec_agrees_with_nvidias(tmp_path: Path) -> None:
    program = tmp_path / "fp8_reference"
    include = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/include")]
    include += ["-isystem", str(cuda_headers())]
    source = ROOT / "tests/c/fp8_reference.cc"
    run([CXX, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", *include, source, "-o", program])
    assert run([program]) == "0 of 232291980 differ\n"
