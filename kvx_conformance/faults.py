"""Faults of file systems in other processes: builds faults.c, which says what there is."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from kvx_conformance.case import NotApplicable

SOURCE = Path(__file__).with_name("faults.c")


def build(folder: Path) -> Path:
    """Compiles libfaults.so into the folder, and returns its path.

    Raises NotApplicable if there is no C compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotApplicable("faults of file systems need a C compiler")
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
    new, path = folder / f"libfaults.{os.getpid()}.new", folder / "libfaults.so"
    subprocess.run([*compiler.split(), *flags, SOURCE, "-o", new, "-ldl"], check=True)
    new.replace(path)  # a process may have the old one loaded
    return path


def environment(
    library: Path, *rules: str, log: Path | None = None, clock_ahead: int = 0
) -> dict[str, str]:
    """Variables, on top of this process's, of a process that has these faults.

    library: of `build`
    rules: as faults.c has them, such as "call=read,path=/store/,error=EIO,every=7"
    log: has a line for each fault
    clock_ahead: seconds
    """
    preloaded = os.environ.get("LD_PRELOAD", "")
    return {
        "LD_PRELOAD": f"{library}:{preloaded}".rstrip(":"),
        "KVX_FAULTS": "; ".join(rules),
        "KVX_FAULTS_CLOCK": str(clock_ahead),
        **({} if log is None else {"KVX_FAULTS_LOG": str(log)}),
    }


def begin() -> None:
    """Faults of this process are from now on those of its environment as it is now. It was started
    with the library; without, this does nothing.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).faults_of_environment()
