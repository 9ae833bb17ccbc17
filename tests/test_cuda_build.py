"""The machine code of the CUDA kernels in the wheel, read without a GPU.

What a kernel computes is for the tests with the backend `hostgrid`; here is what only the compiler
decides: registers, spills, the width of loads and stores, the conversions of the hardware.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.native import run

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
READ = ("sm_80", "sm_90")  # whose code is read: without and with conversions to FP8
MAX_REGISTERS = 64  # at 256 threads a block: four blocks on a multiprocessor
MAX_WHEEL_BYTES = 3 << 20

# Kernels that move vectors of 16 bytes, by a part of their names.
WIDE = ("rows_kernel<uint4", "blocks_kernel", "remap_kernel<uint4", "tile_kernel", "convert_kernel")


@dataclass
class Kernel:
    name: str
    registers: int
    stack: int
    local: int
    instructions: Counter[str] = field(default_factory=Counter)

    def count(self, *prefixes: str) -> int:
        return sum(n for name, n in self.instructions.items() if name.startswith(prefixes))


def cuobjdump(*arguments: str | Path) -> str:
    """Runs NVIDIA's cuobjdump from the PyPI packages that kvx[test] brings."""
    spec = find_spec("nvidia.cu13")
    assert spec is not None, "nvidia-cuda-cuobjdump is not installed: pip install 'kvx[test]'"
    for folder in spec.submodule_search_locations or ():
        tool = Path(folder) / "bin" / "cuobjdump"
        if tool.exists():
            return run([tool, *arguments], env={"PATH": f"{tool.parent}:{os.environ['PATH']}"})
    raise AssertionError("nvidia-cuda-cuobjdump is not installed: pip install 'kvx[test]'")


@cache
def kernels(library: Path, architecture: str) -> tuple[Kernel, ...]:
    found: dict[str, Kernel] = {}
    resources = cuobjdump("--dump-resource-usage", "-arch", architecture, library)
    usage = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
    for mangled, registers, stack, local in usage.findall(resources):
        found[mangled] = Kernel("", int(registers), int(stack), int(local))
    names = run(["c++filt", *found]).splitlines()
    for kernel, name in zip(found.values(), names, strict=True):
        kernel.name = name.replace("kvx::cuda::", "").replace("(anonymous namespace)::", "")
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")
    current = Counter[str]()
    for line in cuobjdump("-sass", "-arch", architecture, library).splitlines():
        if function := re.search(r"Function : (\S+)", line):
            current = found[function[1]].instructions
        elif match := instruction.search(line):
            current[match[1]] += 1
    assert len(found) > 50
    return tuple(found.values())


@pytest.fixture(scope="module")
def library(installed: Path) -> Path:
    return installed / "kvx_core/libkvx.so"


def test_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        assert "kvx_core/libkvx.so" in archive.namelist()


def test_every_architecture_is_there(library: Path) -> None:
    cubins = set(re.findall(r"\.(sm_\d+)\.cubin", cuobjdump("--list-elf", library)))
    assert cubins == set(ARCHITECTURES)
    assert set(re.findall(r"\.(sm_\d+)\.ptx", cuobjdump("--list-ptx", library))) == {"sm_90"}


@pytest.mark.parametrize("architecture", READ)
def test_registers_and_spills(library: Path, architecture: str) -> None:
    over = [
        f"{kernel.name}: {kernel.registers} registers, stack {kernel.stack}, local {kernel.local}"
        for kernel in kernels(library, architecture)
        if kernel.registers > MAX_REGISTERS or kernel.local or kernel.count("LDL", "STL")
    ]
    assert not over, "\n".join(over)


@pytest.mark.parametrize("architecture", READ)
@pytest.mark.parametrize("name", WIDE)
def test_vectors_are_whole_instructions(library: Path, architecture: str, name: str) -> None:
    found = [kernel for kernel in kernels(library, architecture) if name in kernel.name]
    assert found
    for kernel in found:
        wide = {n[:3] for n in kernel.instructions if n.startswith(("LDG", "STG")) and ".128" in n}
        one_side = name == "convert_kernel"  # eight elements of FP8 are 8 bytes
        assert wide == {"LDG", "STG"} or (one_side and wide), kernel.name
        assert not kernel.count("LD.", "ST."), f"{kernel.name}: accesses of unknown memory"


def test_fp8_is_converted_by_the_hardware(library: Path) -> None:
    def conversions(architecture: str) -> int:
        named = (k for k in kernels(library, architecture) if "convert_kernel" in k.name)
        return sum(k.count("F2FP.SATFINITE.E4M3", "F2FP.SATFINITE.E5M2") for k in named)

    assert conversions("sm_80") == 0
    assert conversions("sm_90") > 0


def test_without_a_driver_the_sentence_says_so(installed: Path) -> None:
    """A call on DEVICE memory where there is no GPU; CPU calls go on working."""
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    code = """
import numpy, kvx_core
from dataclasses import replace
from kvx_core import CacheDesc, Layout, Memory, describe, write_kv
cache = CacheDesc.from_kv(*(describe(numpy.zeros((2, 4, 1, 8), numpy.float32), Layout.BLOCK_NHD)
                            for _ in range(2)))
key = numpy.ones((1, 1, 8), numpy.float32)
write_kv(cache, key, key, [5])
assert cache.k.owner[1, 1, 0, 0] == 1
device = CacheDesc.from_kv(*(replace(t, memory=Memory.DEVICE) for t in (cache.k, cache.v)))
try:
    write_kv(device, key, key, numpy.array([], numpy.int64))
except kvx_core.UnsupportedError as error:
    print(error)
"""
    paths = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    environment = {"PYTHONPATH": paths, "KVX_LIBRARY": ""}
    said = run([sys.executable, "-S", "-P", "-c", code], env=environment)
    assert said.startswith("cache.k.memory is DEVICE, but no CUDA device can be used here"), said
