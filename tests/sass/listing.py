"""The machine code in a library, as NVIDIA's cuobjdump lists it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.native import run

RESERVED_SHARED = 0x400  # of each block, on sm_90


class Usage(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    registers: int
    stack: int  # bytes of a thread, which only spills need
    local: int
    shared: int  # bytes of a block that the code names, behind those that the driver keeps


def cuobjdump(*arguments: str | Path) -> str:
    """Runs NVIDIA's cuobjdump from the PyPI packages that kvx[test] brings."""
    spec = find_spec("nvidia.cu13")
    assert spec is not None, "nvidia-cuda-cuobjdump is not installed: pip install 'kvx[test]'"
    for folder in spec.submodule_search_locations or ():
        tool = Path(folder) / "bin" / "cuobjdump"
        if tool.exists():
            return run([tool, *arguments], env={"PATH": f"{tool.parent}:{os.environ['PATH']}"})
    raise AssertionError("nvidia-cuda-cuobjdump is not installed: pip install 'kvx[test]'")


def demangled(names: Iterable[str]) -> list[str]:
    """As g++ and nvcc both write them: without namespaces."""
    found = run(["c++filt", *names]).splitlines()
    return [re.sub(r"kvx::cuda::|\(anonymous namespace\)::", "", name) for name in found]


def short(name: str) -> str:
    """A demangled kernel without its parameters: "vectors_kernel<uint4,Params<2>>".

    g++ and nvcc spell numbers and integer types differently.
    """
    name = name.removeprefix("void ").replace("kvx::", "")
    name = re.sub(r"\((?:unsigned )?(?:int|char|bool)\)(\d)", r"\1", name)
    name = re.sub(r"\(.*\)$", "", name)
    name = re.sub(r"(\d)u\b", r"\1", name)
    for word, brief in (("char", "u8"), ("short", "u16"), ("int", "u32"), ("long", "u64")):
        name = name.replace(f"unsigned {word}", brief)
    return name.replace(" ", "")


@cache
def usages(library: Path) -> dict[str, dict[str, Usage]]:
    """What every kernel uses, by architecture and name."""
    found: dict[str, dict[str, Usage]] = {}
    part = re.compile(
        r"^arch = (sm_\d+)$|Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.M
    )
    for architecture, mangled, *numbers in part.findall(
        cuobjdump("--dump-resource-usage", library)
    ):
        if architecture:
            current = found.setdefault(architecture, {})
        else:
            registers, stack, shared, local = map(int, numbers)
            current[mangled] = Usage(registers, stack, local, max(shared - RESERVED_SHARED, 0))
    return {
        name: dict(zip(demangled(kernels), kernels.values(), strict=True))
        for name, kernels in found.items()
    }


def code(library: Path, architecture: str) -> dict[str, list[str]]:
    """The instructions of every kernel, by its mangled name."""
    found: dict[str, list[str]] = {}
    instruction = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
    for line in cuobjdump("-sass", "-arch", architecture, library).splitlines():
        if function := re.search(r"Function : (\S+)", line):
            current = found.setdefault(function[1], [])
        elif match := instruction.match(line):
            current.append(match[1])
    return found


def branch_tables(library: Path, architecture: str) -> dict[str, str]:
    """Constant bank 2 of every kernel that has one, as hexadecimal digits, by its mangled name."""
    listed = cuobjdump("-elf", "-arch", architecture, library)
    section = re.compile(r"^\.nv\.constant2\.(\S+)\n((?:0x[0-9a-f]+[^\n]*\n)+)", re.M)
    return {
        name: "".join(
            int(word, 16).to_bytes(4, "little").hex()
            for word in re.findall(r"0x([0-9a-f]{8})\b", words)
        )
        for name, words in section.findall(listed)
    }


def write_programs(library: Path, architecture: str, path: Path) -> None:
    """Writes what program.cc reads."""
    kernels, tables = code(library, architecture), branch_tables(library, architecture)
    with path.open("w") as file:
        for mangled, name in zip(kernels, demangled(kernels), strict=True):
            print("K", short(name), file=file)
            if mangled in tables:
                print("2", tables[mangled], file=file)
            print(*kernels[mangled], sep="\n", file=file)
