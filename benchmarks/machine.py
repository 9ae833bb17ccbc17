"""The circumstances of a result: machine, versions, commit, command, disturbance."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kvx_core
from benchmarks import native

# What a result depends on, besides the machine.
_SOURCES = ("csrc", "kvx_core", "benchmarks", ":!benchmarks/results", ":!benchmarks/README.md")

_ROOT = Path(__file__).resolve().parent.parent


def cache_bytes() -> int:
    """Size of the last-level cache; 32 MiB where the system does not say."""
    for level in ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        try:
            size = os.sysconf(level)
        except (ValueError, OSError):
            continue
        if size > 0:
            return size
    return 32 << 20


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def facts(*packages: str) -> dict[str, Any]:
    """Machine, versions, commit, command and date, ready for JSON.

    packages: whose versions matter besides those of KVX, torch and Python
    """
    backend = kvx_core.backend_info()
    versions = {
        "kvx": kvx_core.__version__,
        "libkvx": backend.version,
        "python": platform.python_version(),
        "cc": native.compiler(),
        **{name: importlib.metadata.version(name) for name in ("torch", *packages)},
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "git_commit": commit(_ROOT),
        "git_modified": _git("status", "--porcelain", "--", *_SOURCES) != "",
        "machine": {
            "cpu": _cpu_model(),
            "cores": cores(),
            "last_level_cache_bytes": cache_bytes(),
            "kernel": f"{platform.system()} {platform.release()}",
            "libc": " ".join(platform.libc_ver()),
            "kvx_isa": backend.cpu_isa,
            "kvx_stream_bytes": backend.stream_bytes,
            "reference_stream_isa": native.stream_isa(),
        },
        "versions": versions,
    }


def commit(checkout: Path) -> str | None:
    """The commit that is checked out there; None: it is not a git checkout."""
    return _git("rev-parse", "HEAD", checkout=checkout)


class Disturbance:
    """How much of the cores others have used since this object was made."""

    def __init__(self) -> None:
        self._before = self._seconds()

    def so_far(self) -> dict[str, float]:
        """Cores that other processes kept busy, and that the hypervisor gave to other guests, on
        average; nothing where the system does not say."""
        elapsed, *used = (
            now - then for now, then in zip(self._seconds(), self._before, strict=True)
        )
        names = ("other_processes_cores", "stolen_cores")
        return {
            name: max(0.0, round(seconds / elapsed, 3))
            for name, seconds in zip(names, used, strict=False)
        }

    @staticmethod
    def _seconds() -> list[float]:
        """Elapsed; busy with other processes; stolen."""
        try:
            first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
        except OSError:
            return [time.monotonic()]
        ticks = map(int, first_line.split()[1:9])
        user, nice, system, _, _, irq, softirq, stolen = (
            t / os.sysconf("SC_CLK_TCK") for t in ticks
        )
        own = sum(os.times()[:4])  # and of the processes that it has started and waited for
        others = user + nice + system + irq + softirq - own
        return [time.monotonic(), others, stolen]


def _module() -> str:
    main = sys.modules["__main__"]
    spec = main.__spec__
    return Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    keys = ("model name", "cpu family", "model", "stepping")
    found = [re.search(rf"^{key}\s*:\s*(.*)$", text, re.M) for key in keys]
    name, *numbers = (match[1] if match else "?" for match in found)
    return f"{name} (family {', model '.join(numbers[:2])}, stepping {numbers[2]})"


def _git(*arguments: str, checkout: Path = _ROOT) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
