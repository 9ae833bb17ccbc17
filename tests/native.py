"""Builds variants of libkvx, and C and C++ programs that use it."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CXX = os.environ.get("CXX", "g++")
CC = os.environ.get("CC", "gcc")

# Enum values are the caller's and may be any int; see KVX_SANITIZE in CMakeLists.txt.
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize=enum", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)


def run(
    command: Iterable[str | Path], *, env: Mapping[str, str] | None = None, timeout: float = 600
) -> str:
    """Runs a command in the repository and returns its output; raises with the output if it fails.

    env: variables on top of this process's.
    """
    command = [str(part) for part in command]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    if done.returncode != 0:
        raise AssertionError(f"{shlex.join(command)}\nexit {done.returncode}\n{done.stdout}")
    return done.stdout


def tool(name: str) -> str:
    """Path of a build tool, first of all the one beside this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise AssertionError(f"{name} is not on PATH: pip install 'kvx[test]'")
    return found


@cache
def library(name: str, **options: str) -> Path:
    """Builds libkvx.so with these CMake options in build/`name`, and returns its path."""
    build = ROOT / "build" / name
    with alone(name):
        return _library(build, options)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Tests may run in several processes: one at a time does what has this name."""
    locks = ROOT / "build" / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _library(build: Path, options: Mapping[str, str]) -> Path:
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    options = {"KVX_CUDA": "OFF", "CMAKE_CXX_COMPILER": CXX, **options}
    defined = [f"-D{option}={value}" for option, value in options.items()]
    run([tool("cmake"), "-S", ROOT, "-B", build, *generator, *defined])
    run([tool("cmake"), "--build", build])
    return build / "libkvx.so"


def sanitized_library(sanitize: str) -> Path:
    """libkvx.so with KVX_SANITIZE=ON or THREAD."""
    return library(f"sanitize-{sanitize.lower()}", KVX_SANITIZE=sanitize)


def hostgrid_library(sanitize: str = "OFF") -> Path:
    """libkvx.so whose CUDA kernels run on the CPU."""
    name = "hostgrid" if sanitize == "OFF" else f"hostgrid-{sanitize.lower()}"
    return library(name, KVX_HOSTGRID="ON", KVX_SANITIZE=sanitize)


def compile_program(
    compiler: Iterable[str], source: Path, program: Path, *, include: Path, library: Path
) -> Path:
    """Compiles `source` against the headers in `include` and links it to `library`."""
    folder = library.parent
    link = [f"-L{folder}", "-lkvx", f"-Wl,-rpath,{folder}", "-pthread"]
    run([*compiler, f"-I{include}", source, "-o", program, *link])
    return program


@cache
def sanitized_program(source: str, sanitize: str, *, hostgrid: bool = False) -> Path:
    """A C++ program of tests/c, built with the same sanitizers as the library that it calls.

    hostgrid: the library runs CUDA kernels on the CPU, and THREAD is its own race check.
    """
    library = hostgrid_library(sanitize) if hostgrid else sanitized_library(sanitize)
    flags = ADDRESS if sanitize == "ON" else () if hostgrid else THREAD
    warnings = ("-Wall", "-Wextra", "-Werror")
    with alone(library.parent.name):
        return compile_program(
            [CXX, "-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", *warnings, *flags],
            ROOT / "tests/c" / source,
            library.parent / Path(source).stem,
            include=ROOT / "csrc/include",
            library=library,
        )


def sentences_in(source: Path) -> list[str]:
    """The printf formats of every failure in a source file."""
    literals = r'((?:"(?:[^"\\]|\\.)*"\s*)+)'
    calls = rf"(?:KVX_INVALID|KVX_OUT_OF_RANGE|fail)\(\s*(?:KVX_STATUS_\w+,\s*)?{literals}"
    found = re.findall(calls, source.read_text())
    return ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literal)) for literal in found]
