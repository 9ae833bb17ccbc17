"""Faults of file systems in other processes: builds tests/c/faults.c, which says what there is."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from tests.native import CC, ROOT, alone, run


@cache
def library() -> Path:
    """Builds libfaults.so, and returns its path."""
    path = ROOT / "build" / "faults" / "libfaults.so"
    with alone("faults"):
        path.parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / "tests/c/faults.c"
        if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
            flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
            new = path.with_suffix(".new")
            run([CC, *flags, source, "-o", new, "-ldl"])
            new.replace(path)  # a process may have the old one loaded
    return path


def environment(*rules: str, log: Path | None = None, clock_ahead: int = 0) -> dict[str, str]:
    """Variables, on top of this process's, of a process that has these faults.

    rules: as tests/c/faults.c has them, such as "call=read,path=/store/,error=EIO,every=7"
    log: has a line for each fault
    clock_ahead: seconds
    """
    preloaded = os.environ.get("LD_PRELOAD", "")
    return {
        "LD_PRELOAD": f"{library()}:{preloaded}".rstrip(":"),
        "KVX_FAULTS": "; ".join(rules),
        "KVX_FAULTS_CLOCK": str(clock_ahead),
        **({} if log is None else {"KVX_FAULTS_LOG": str(log)}),
    }
