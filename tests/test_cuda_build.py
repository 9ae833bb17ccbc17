"""The machine code of the CUDA kernels in the wheel, read without a GPU.

Tests with the backend `hostgrid` check what kernels compute. This file checks what the compiler
decides: registers, spills, the width of loads and stores, the conversions of the hardware.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.native import run
from tests.sass.listing import cuobjdump, demangled, usages

pytestmark = [pytest.mark.slow, pytest.mark.of_csrc]  # it builds for minutes

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
READ = ("sm_80", "sm_90")  # whose code is read: without and with conversions to FP8
OTHERS = [architecture for architecture in ARCHITECTURES if architecture not in READ]
MAX_REGISTERS = 64  # at 256 threads a block: four blocks on a multiprocessor
# Since a null entry that a token needs is a fault, these keep some bytes of it on the stack.
SPILLS = {
    "sm_80": (r"quantize_kernel<kvx::B?[Ff]16, kvx::E\dm\d, CompactParams<160u> ?>", 16),
    "sm_89": (r"from_affine_kernel<true>", 8),
}
MAX_WHEEL_BYTES = 28 << 18  # five architectures, all kernels each, for few pairs and for many

# Kernels that move vectors of 16 bytes, by a part of their names.
WIDE = (
    "layer_kernel<uint4",
    "vectors_kernel<uint4",
    "blocks_kernel",
    "remap_kernel<uint4",
    "tile_kernel",
    "convert_kernel",
)


@cache
def instructions(library: Path, architecture: str) -> dict[str, Counter[str]]:
    """How often every kernel has each instruction, by name: takes seconds."""
    found: dict[str, Counter[str]] = {}
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")
    for line in cuobjdump("-sass", "-arch", architecture, library).splitlines():
        if function := re.search(r"Function : (\S+)", line):
            current = found.setdefault(function[1], Counter())
        elif match := instruction.search(line):
            current[match[1]] += 1
    return dict(zip(demangled(found), found.values(), strict=True))


def count(kernel: Counter[str], *prefixes: str) -> int:
    return sum(n for name, n in kernel.items() if name.startswith(prefixes))


@pytest.fixture(scope="module")
def library(release_library: Path) -> Path:
    return release_library


def test_wheel_is_small(release_wheel: Path) -> None:
    assert release_wheel.stat().st_size < MAX_WHEEL_BYTES


@pytest.mark.slow
def test_every_architecture_is_there(library: Path) -> None:
    cubins = set(re.findall(r"\.(sm_\d+)\.cubin", cuobjdump("--list-elf", library)))
    assert cubins == set(ARCHITECTURES)
    assert set(re.findall(r"\.(sm_\d+)\.ptx", cuobjdump("--list-ptx", library))) == {"sm_90"}


@pytest.mark.parametrize(
    "architecture", [*READ, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_registers_and_spills(library: Path, architecture: str) -> None:
    found = usages(library)[architecture]
    spilling, most = SPILLS.get(architecture, ("no kernel", 0))
    assert len(found) > 50
    over = [
        f"{name}: {used}"
        for name, used in found.items()
        if used.registers > MAX_REGISTERS
        or used.stack > (most if re.search(spilling, name) else 0)
        or used.local
    ]
    assert not over, "\n".join(over)


@pytest.mark.parametrize("architecture", READ)
@pytest.mark.parametrize("name", WIDE)
def test_vectors_are_whole_instructions(library: Path, architecture: str, name: str) -> None:
    found = {k: v for k, v in instructions(library, architecture).items() if name in k}
    assert found
    for kernel, has in found.items():
        wide = {n[:3] for n in has if n.startswith(("LDG", "STG")) and ".128" in n}
        is_wide = re.search(r"<kvx::E\dm\d, kvx::B?[Ff]16,", kernel)  # 16 elements of FP8
        one_side = name == "convert_kernel" and not is_wide  # eight of them are 8 bytes
        assert wide == {"LDG", "STG"} or (one_side and wide), kernel
        assert not count(has, "LD.", "ST."), f"{kernel}: accesses of unknown memory"


def test_fp8_is_converted_by_the_hardware(library: Path) -> None:
    def conversions(architecture: str) -> int:
        return sum(
            count(has, "F2FP.SATFINITE.E4M3", "F2FP.SATFINITE.E5M2")
            for name, has in instructions(library, architecture).items()
            if "convert_kernel" in name
        )

    assert conversions("sm_80") == 0
    assert conversions("sm_90") > 0


def test_without_a_driver_the_sentence_says_so(library: Path) -> None:
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
    paths = os.pathsep.join([str(library.parents[1]), sysconfig.get_path("purelib")])
    environment = {"PYTHONPATH": paths, "KVX_LIBRARY": ""}
    said = run([sys.executable, "-S", "-P", "-c", code], env=environment)
    assert said.startswith("cache.k.memory is DEVICE, but no CUDA device can be used here"), said
