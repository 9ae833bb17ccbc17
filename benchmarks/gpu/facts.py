"""What a result from a GPU needs to be understood later: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import kvx_core

ROOT = Path(__file__).resolve().parents[2]


def facts(module: str, commit: str | None) -> dict[str, Any]:
    """Ready for JSON. `commit`: of a tree that came without its repository."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "git_commit": commit or output_of("git", "rev-parse", "HEAD"),
        "git_modified": bool(output_of("git", "status", "--porcelain")),
        "gpu": _gpu(),
        "versions": {
            "kvx": kvx_core.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda_of_torch": torch.version.cuda,
            "nvcc": _nvcc(),
            "driver": output_of(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
        },
    }


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties("cuda")
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def _nvcc() -> str | None:
    said = output_of(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version") or ""
    release = re.search(r"release [\d.]+, V([\d.]+)", said)
    return release[1] if release else None


def output_of(*command: str) -> str | None:
    """What it prints, or None if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
