"""The circumstances of a result from a GPU: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu import RESULT_VARIABLE, ROOT, driver, tools

# Whose versions are named where they are there.
_PACKAGES = (
    *("torch", "numpy", "pytest", "hypothesis", "ml_dtypes"),
    *("triton", "vllm", "flashinfer-python", "lmcache"),
)


def facts(command: str, commit: str | None) -> dict[str, Any]:
    """Ready for JSON. `commit`: of a tree that came without its repository."""
    inside = output_of("git", "rev-parse", "--show-toplevel") == str(ROOT)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "git_commit": commit or (output_of("git", "rev-parse", "HEAD") if inside else None),
        "git_modified": bool(output_of("git", "status", "--porcelain")) if inside else None,
        "gpu": _gpu(),
        "versions": {name: found for name, found in _versions().items() if found},
    }


def command_of(module: str) -> str:
    """How this process was started."""
    return shlex.join(["python3", "-m", module, *sys.argv[1:]])


def lines(found: dict[str, Any]) -> list[str]:
    """The same as text: the GPU, the tree, the versions."""
    gpu = found["gpu"]
    if gpu is None:
        first = "no GPU"
    else:
        first = (
            f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['multiprocessors']} "
            f"multiprocessors, {gpu['memory_bytes'] / 2**30:.0f} GiB, L2 of "
            f"{gpu['l2_bytes'] / 2**20:.0f} MiB"
        )
    commit = f"commit {found['git_commit'] or 'unknown: --commit names it'}"
    commit += " with changes" * bool(found["git_modified"])
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return [first, f"{commit}, {found['date']}, `{found['command']}`", versions]


def _versions() -> dict[str, str | None]:
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    smi = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    found = {
        "kvx": project[1] if project else None,
        "python": platform.python_version(),
        "driver": (output_of(*smi) or "").partition("\n")[0],
        "CUDA of the driver": ".".join(map(str, driver.cuda_version() or ())),
        "CUDA of torch": _cuda_of_torch(),
        "nvcc": _number(tools.find_nvcc(), r"release [\d.]+, V([\d.]+)"),
        "cmake": _number(tools.find("cmake"), r"version ([\w.]+)"),
        "ninja": _number(tools.find("ninja"), r"([\w.]+)"),
        "c++": _number(tools.find(os.environ.get("CXX", "c++")), r"(\d+\.\d[\w.]*)"),
        "compute-sanitizer": _number(tools.find_sanitizer(), r"Version ([\d.]+)"),
    }
    return found | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _number(program: Path | None, pattern: str) -> str | None:
    said = re.search(pattern, (output_of(str(program), "--version") or "") if program else "")
    return said[1] if said else None


def _cuda_of_torch() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    cuda: str | None = torch.version.cuda
    return cuda


def _gpu() -> dict[str, Any] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.ones(2, device="cuda").sum().item()  # raises here, rather than in every step
    properties = torch.cuda.get_device_properties("cuda")
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def output_of(*command: str) -> str | None:
    """What it prints, or None if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """`python -m benchmarks.gpu.facts COMMAND [COMMIT]`, a step: prints them, and leaves them."""
    command, commit = [*sys.argv[1:], "", ""][:2]
    found = facts(command, commit or None)
    print("\n".join(lines(found)))
    Path(os.environ[RESULT_VARIABLE]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
