"""Reports the threads of KVX's writes in vLLM's workers to a test in another process.

Workers load this as their extension: worker_extension_cls="tests.vllm_plugin.live_openmp.Watch".
The file $KVX_TEST_TEAMS gets a line for every call that runs on OpenMP's threads: the library that
they are of.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_uint, c_void_p
from pathlib import Path

from kvx_core._c import abi

_PARALLEL = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_uint, c_uint)

_file = Path(os.environ["KVX_TEST_TEAMS"])
_openmp = abi.openmp


def _library_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < last:
            return Path(line.split()[-1]).name
    return "none"


def _watched() -> tuple[int, int]:
    found = _openmp()
    assert found is not None
    address, num_threads = found
    parallel, library = _PARALLEL(address), _library_at(address)

    def run(work: int, data: int, num_threads: int, flags: int) -> None:
        with _file.open("a") as lines:
            print(library, file=lines)
        parallel(work, data, num_threads, flags)

    team = _PARALLEL(run)
    _teams.append(team)
    return ctypes.cast(team, c_void_p).value or 0, num_threads


_teams: list[object] = []  # that libkvx may call
abi.openmp = _watched


class Watch:
    """vLLM makes it a base of its worker; to be loaded is all that it does."""
