"""Finds compilers and build tools, on PATH or where machines with a GPU have them without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import driver

OLDEST_CUDA = 12  # whose compiler knows C++20
_OLDEST = {"torch": (2, 11), "pytest": (8, 0)}
MODULES = ("torch", "numpy", "pytest", "hypothesis", "ml_dtypes")
_SYSTEM = Path("/usr/local")


def find(name: str) -> Path | None:
    """A program on PATH, beside this Python, or from a package on Python's path."""
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    folders += [str(Path(entry or ".") / "bin") for entry in sys.path]
    folders += [str(Path(entry or ".") / "cmake/data/bin") for entry in sys.path]
    found = shutil.which(name, path=os.pathsep.join(folders))
    return Path(found) if found else None


def has(module: str) -> bool:
    """Whether it can be imported."""
    return find_spec(module) is not None


def _version_of(package: str) -> tuple[int, ...] | None:
    """Its first two numbers, or None if nothing says them."""
    try:
        return tuple(map(int, re.findall(r"\d+", version(package))[:2]))
    except PackageNotFoundError:
        return None


def find_nvcc() -> Path | None:
    """$CUDACXX, PATH, the toolkit that $CUDA_HOME or $CUDA_PATH names, /usr/local/cuda*, conda's,
    or PyPI's: the first that can build KVX and whose programs the driver runs, else the first."""
    named = shutil.which(os.environ.get("CUDACXX", ""))
    if named:
        return Path(named)
    found = [path for path in _nvccs() if os.access(path, os.X_OK)]
    return next((path for path in found if not unsuitable(path)), found[0] if found else None)


def unsuitable(nvcc: Path) -> str | None:
    """Why what it builds cannot run here, or cannot be built; None: nothing speaks against it."""
    major = _major_of(nvcc)
    if major is None:
        return None
    if major < OLDEST_CUDA:
        return f"{nvcc} is of CUDA {major}, expected {OLDEST_CUDA} or later"
    of_driver = driver.cuda_version()
    if of_driver is None or major <= of_driver[0]:
        return None
    return (
        f"{nvcc} is of CUDA {major}, but this machine's driver runs CUDA "
        f"{of_driver[0]}.{of_driver[1]} and earlier: name a toolkit of CUDA {of_driver[0]} in "
        "CUDA_HOME"
    )


@cache
def _major_of(nvcc: Path) -> int | None:
    """The CUDA that it is of, by what it says; None: it says nothing."""
    try:
        done = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.search(r"release (\d+)\.", done.stdout)
    return int(said[1]) if said else None


def _nvccs() -> Iterator[Path]:
    on_path = find("nvcc")
    if on_path:
        yield on_path
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    yield from (Path(home) / "bin/nvcc" for home in homes if home)
    yield _SYSTEM / "cuda/bin/nvcc"
    yield from sorted(_SYSTEM.glob("cuda-*/bin/nvcc"), reverse=True)
    yield Path(sys.prefix) / "bin/nvcc"
    yield from wheel_nvccs()


def wheel_nvccs() -> Iterator[Path]:
    """Of the packages nvidia-cuda-nvcc and its like, whose folders are named for their CUDA."""
    try:
        spec = find_spec("nvidia")
    except ValueError:  # a stand-in without a spec
        return
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(folder).glob("*/bin/nvcc"), reverse=True)


def find_sanitizer() -> Path | None:
    """compute-sanitizer, on PATH or beside nvcc."""
    found, nvcc = find("compute-sanitizer"), find_nvcc()
    if found or not nvcc:
        return found
    for home in (nvcc.parent.parent, nvcc.resolve().parent.parent):
        for folder in ("bin", "compute-sanitizer"):
            path = home / folder / "compute-sanitizer"
            if os.access(path, os.X_OK):
                return path
    return None


def missing(*, with_nvcc: bool) -> list[str]:
    """What this machine lacks: a sentence each, with the way out."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = [f"Python 3.11 or later: this is {version}"] * (sys.version_info < (3, 11))
    found += [
        f"{name} cannot be imported by {sys.executable}: install it, or run this with the Python "
        "that has it"
        for name in MODULES
        if not has(name)
    ]
    for name, oldest in _OLDEST.items():
        if has(name) and (there := _version_of(name)) and there < oldest:
            wanted, is_ = (".".join(map(str, numbers)) for numbers in (oldest, there))
            found.append(f"{name} {wanted} or later: {sys.executable} has {is_}")
    if not find("cmake"):
        found.append("cmake is not on PATH: install it, or carry PyPI's package cmake")
    if not find("ninja") and not find("make"):
        found.append("neither ninja nor make is on PATH: carry PyPI's package ninja")
    if not any(map(find, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        found.append("no C++ compiler is on PATH: install g++ 12 or later, or name it in CXX")
    nvcc = find_nvcc() if with_nvcc else None
    if nvcc and (why := unsuitable(nvcc)):
        found.append(why)
    if with_nvcc and not nvcc:
        found.append(
            "nvcc is not there: put the bin folder of CUDA's toolkit on PATH, name the toolkit in "
            "CUDA_HOME, or carry PyPI's nvidia-cuda-nvcc, -crt, -runtime, -cccl and nvidia-nvvm"
        )
    return found
