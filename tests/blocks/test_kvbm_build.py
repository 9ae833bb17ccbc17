"""The switches of KVBM's build: CUDA_ARCHS, KVBM_REQUIRE_CUDA, CUDA_PATH, and a static library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.native import CC, ROOT, library, run, tool

pytestmark = pytest.mark.slow  # builds, and asks a CUDA compiler


def configure(build: Path, **env: str) -> str:
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    return run([tool("cmake"), "-S", ROOT, "-B", build, *generator], env=env)


def test_required_cuda_that_is_not_there_ends_the_build(tmp_path: Path) -> None:
    no_compiler = {"KVBM_REQUIRE_CUDA": "1", "CUDACXX": str(tmp_path / "nvcc")}
    with pytest.raises(AssertionError, match=r"(?s)KVX_CUDA=ON.*no CUDA compiler|CUDACXX"):
        configure(tmp_path / "build", **no_compiler)


def test_architectures_and_the_toolkits_folder(tmp_path: Path) -> None:
    """CUDA_ARCHS names them as KVBM does; of the last there is code for newer devices, too."""
    nvcc = Path("/usr/local/cuda/bin/nvcc")
    if not nvcc.exists():
        pytest.skip("no CUDA toolkit where KVBM's build looks for it")
    env = {"CUDA_ARCHS": "80,90", "CUDA_PATH": str(nvcc.parents[1]), "KVBM_REQUIRE_CUDA": "1"}
    said = configure(tmp_path / "build", **env)
    found = re.search(r"CPU and CUDA \((\S+) \S+, (\S+)\)", said)
    assert found, said
    assert found[2] == "80-real;90-real;90-virtual"
    assert Path(found[1]).samefile(nvcc)


@pytest.mark.of_csrc
def test_a_static_library(tmp_path: Path) -> None:
    """A program written for KVBM's kernels with libkvx.a inside needs no library of ours."""
    archive = library("static-kernels", KVX_STATIC="ON").with_suffix(".a")
    program = tmp_path / "kvbm"
    link = [archive, "-lstdc++", "-lm", "-ldl", "-lpthread"]
    run([CC, "-std=c11", ROOT / "tests/c/kvbm.c", *link, "-o", program])
    assert "libkvx" not in run(["readelf", "-d", program])
    assert re.fullmatch(r"stub build 1, batches 0, \d+ checks, 0 failures\n", run([program]))
