"""The steps, the most valuable ones first, for runs of a few minutes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT, tools
from benchmarks.gpu.steps import Step

# And the seconds that they may take.
BENCHMARKS = {"write": 60, "gather": 40, "migrate": 40, "tiers": 90, "hybrid": 40}
_WITH_PEERS = ("write", "migrate")
_PEERS_SECONDS = 240  # for others' compilers

# Byte tests by file, side by side, and the seconds that a file may take. They build nothing, and
# need torch, numpy, hypothesis and ml_dtypes alone.
_TESTS = {
    "test_conformance": 60,
    "test_write_gather": 120,
    "test_migrate": 120,
    "test_device_flags": 90,
    "test_cuda_graph": 60,
    "test_device_status": 60,
    "test_find_scales": 90,
    "test_codecs": 120,
    "test_properties": 120,
    "hybrid_ops": 90,
    "test_write_layers": 60,
    "test_launches": 60,
    "test_pointers": 60,
    "test_ring": 60,
    "test_planes": 60,
    "test_block_copies": 60,
    "test_cuda_engine": 90,
    "test_formats": 90,
    "test_affine": 90,
    "test_fp4": 60,
}
# Those that need other packages: ggml's own, and what kvx_core's stores and snapshots need.
_NEEDS = {
    **dict.fromkeys(("test_affine", "test_fp4"), ("gguf",)),
    "test_formats": ("gguf", "pywhispercpp"),
    "test_cuda_engine": ("pydantic", "safetensors", "xxhash"),
}
_ON_CPU_OR_GPU = ("test_cuda_engine", "test_far_offsets")  # and on no hostgrid
_MOST_JOBS = 10  # processes that share a GPU

# Odd sizes, where what is out of bounds is not hidden by what is next to it.
_SANITIZED = "odd or many_layers or head_ranges or token_ranges or background"

_NO_GPU = "it needs a GPU"
_PATIENCE = 6  # a CPU that runs kernels takes this much longer at least
_HANG_SECONDS = 60.0  # after which a test ends its process, and its stacks are printed


@dataclass(frozen=True)
class Request:
    """What was asked for.

    library:    a libkvx to take instead of building one
    capability: of the GPU, such as "9.0"; None: nvcc finds out
    """

    out: Path
    quick: bool = False
    rehearse: bool = False
    library: Path | None = None
    commit: str | None = None
    capability: str | None = None

    @property
    def build(self) -> Path:
        """The folder that libkvx is built in."""
        return ROOT / "build" / ("rehearsal" if self.rehearse else "cuda")

    @property
    def libkvx(self) -> Path:
        """The library that is tested and measured."""
        return self.library or self.build / "libkvx.so"

    @property
    def backend(self) -> str:
        """That the tests run, as tests/calls.py names it."""
        return "hostgrid" if self.rehearse else "cuda"


def machine(command: str, commit: str | None) -> Step:
    """Goes ahead of all others, which need to know of the GPU. The first import of torch reads
    gigabytes, perhaps from a disk of the network."""
    facts = [sys.executable, "-m", "benchmarks.gpu.facts", command, *filter(None, [commit])]
    return Step("machine", "names GPU, driver and versions", facts, 300)


def steps(request: Request) -> Iterator[Step]:
    """All of them, in order."""
    if request.library is None:
        yield from _building(request, "hostgrid" if request.rehearse else "nvcc")
    if request.quick:
        yield _tests(request, "test_conformance", 60)
    else:
        # A process's first call of KVX in a capture, and the one kernel that may hang, alone.
        graph, flags = "test_cuda_graph", "test_device_flags"
        yield _tests(request, "first_capture", 30, file=graph, some="first_call")
        yield _tests(request, "background", 30, file=flags, some="background", hang=10)
        yield from (_tests(request, *item, part="tests") for item in _TESTS.items())
        yield _tests(request, "test_far_offsets", 60)
    what = "what this GPU can do at best, and what a call takes the host"
    yield _bench(request, "ceilings", what, 50, module="ceilings")
    what = "first calls of others' kernels, which compile them"
    yield _bench(request, "peers", what, _PEERS_SECONDS, *_WITH_PEERS, "--warm")
    for name, seconds in BENCHMARKS.items():
        yield _bench(request, name, f"times of {name}", seconds, name)
    if not request.quick:
        yield from (_sanitizer(request, t) for t in ("memcheck", "racecheck", "synccheck"))
    if request.rehearse and request.library is None:
        yield from _building(replace(request, rehearse=False, capability="9.0"), "nvcc", "_nvcc")


def jobs(part: str) -> int:
    """How many steps of a part run at a time. Tests need no quiet GPU."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(_MOST_JOBS, cores // 2)) if part == "tests" else 3


def environment(request: Request) -> dict[str, str]:
    """For the steps: this tree's packages, the library under test, no foreign pytest plugins."""
    programs = [tools.find("ninja"), tools.find("cmake")]  # and no nvcc: see _nvcc
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    folders += [str(path.parent) for path in programs if path]
    # Else CMakeLists.txt takes an nvcc of the machine, which was not suitable.
    from_wheel = {"KVX_PYPI_NVCC": "1"} if tools.find_nvcc() in tools.wheel_nvccs() else {}
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "KVX_LIBRARY": str(request.libkvx),
        **from_wheel,
        **({"KVX_HOSTGRID_LIBRARY": str(request.libkvx)} if request.rehearse else {}),
    }


# ---- Each kind of step ----


def _building(request: Request, compiler: str, suffix: str = "") -> Iterator[Step]:
    """compiler: "nvcc", or "hostgrid" for kernels that run on the CPU
    suffix: of names, where nothing else needs what is built; then $CUDA_ARCHS says for which GPUs
    """
    cmake = str(tools.find("cmake") or "cmake")
    configure = [cmake, "-S", ".", "-B", str(request.build), "-DCMAKE_BUILD_TYPE=Release"]
    if tools.find("ninja"):
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.find('ninja')}"]
    if compiler == "hostgrid":
        configure += ["-DKVX_CUDA=OFF", "-DKVX_HOSTGRID=ON"]
    else:
        number = (request.capability or "").replace(".", "")
        architectures = f"{number}-real" if number else "native"
        if suffix:
            architectures = os.environ.get("CUDA_ARCHS", architectures)
        configure += ["-DKVX_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
        configure += _nvcc()
    cores = len(os.sched_getaffinity(0))
    slower = 1 if cores >= 4 else _PATIENCE
    name = f"configure{suffix}"
    why = "nvcc is not there" if suffix and not tools.find_nvcc() else None
    yield Step(name, f"cmake, for {compiler}", configure, 60 * slower, 30, unavailable=why)
    build = [cmake, "--build", str(request.build), "--parallel", str(cores)]
    yield Step(
        f"build{suffix}",
        f"libkvx, by {compiler}",
        build,
        120 * slower,
        60,
        needs=(request.build / "CMakeCache.txt", f"the step {name}"),
        unavailable=why,
    )


def _nvcc() -> list[str]:
    """CMakeLists.txt finds nvcc on PATH, and PyPI's through the Python that is named to it."""
    nvcc = tools.find_nvcc()
    if nvcc is None or nvcc in tools.wheel_nvccs():
        return [f"-DPython_EXECUTABLE={sys.executable}"]
    return [f"-DCMAKE_CUDA_COMPILER={nvcc}"]


def _tests(
    request: Request, name: str, seconds: float, *, file: str = "", some: str = "", **options: Any
) -> Step:
    """The tests of a file on this backend.

    file: where it is not as the step is called
    some: which of them, in pytest's words
    """
    file = file or name
    path = f"tests/{file}" if file == "hybrid_ops" else f"tests/{file}.py"
    backend, slower, on_gpu_alone = request.backend, _PATIENCE, False
    if not request.rehearse:
        slower = 1
    elif file == "test_cuda_graph":
        backend, on_gpu_alone = "cuda", True
    elif file in _ON_CPU_OR_GPU:
        backend = "cpu"
    without = next((module for module in _NEEDS.get(name, ()) if not tools.has(module)), None)
    hang = options.pop("hang", _HANG_SECONDS)
    return Step(
        name,
        f"{path} on the GPU" + f": {some}" * bool(some),
        _pytest(path, "-k", f"{backend} and {some}" if some else backend, hang=hang),
        seconds * slower,
        needs=_library(request),
        unavailable=f"{without} cannot be imported: pip install {without}" if without else None,
        tests=True,
        device_only=on_gpu_alone,
        **options,
    )


def _sanitizer(request: Request, tool: str) -> Step:
    program = tools.find_sanitizer()
    some = f"{request.backend} and ({_SANITIZED})"
    files = [
        f"tests/{name}.py" for name in ("test_device_flags", "test_write_gather", "test_migrate")
    ]
    return Step(
        tool,
        "some of the tests under compute-sanitizer",
        [
            *(str(program or "compute-sanitizer"), "--tool", tool, "--error-exitcode", "9"),
            # Calls that torch and the runtime expect to fail, such as a search for a function that
            # the driver does not have, are no faults of kernels.
            *("--report-api-errors", "no"),
            *_pytest(*files, "-k", some, hang=90),
        ],
        100,
        45,
        needs=_library(request),
        unavailable=_NO_GPU
        if request.rehearse
        else None
        if program
        else "compute-sanitizer is neither on PATH nor beside nvcc",
        absent="Device not supported",
        tests=True,
        part="sanitizers",
    )


def _bench(
    request: Request, name: str, does: str, seconds: float, *arguments: str, module: str = "bench"
) -> Step:
    """By a module of benchmarks.gpu, which leaves its results itself."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments]
    command += ["--results", str(request.out)]
    command += ["--rehearse", "device"] if request.rehearse else []
    if module == "bench":
        command += ["--quick"] * request.quick
        command += ["--commit", request.commit] if request.commit else []
    seconds *= _PATIENCE if request.rehearse else 1
    return Step(name, does, command, seconds, 20, needs=_library(request))


def _pytest(*arguments: str, hang: float = _HANG_SECONDS) -> list[str]:
    """hang: seconds after which a test counts as failed, and ends its process"""
    options = ["-q", "--tb=short", "--maxfail=20", "-p", "no:cacheprovider"]
    options += ["-p", "benchmarks.gpu.tally", "-o", "minversion=8", "-o", "faulthandler_timeout=0"]
    options += ["--test-seconds", str(hang)]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def _library(request: Request) -> tuple[Path, str]:
    return request.libkvx, "the step build" if request.library is None else "whoever named it"
