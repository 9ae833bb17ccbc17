"""Runs the launches of a libkvx on the machine code of its kernels, and counts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.native import CXX, ROOT, alone, run
from tests.sass import listing

ARCHITECTURE = "sm_90"  # whose instructions the interpreter knows
_SOURCES = ("program.cc", "numbers.cc", "lane.cc", "warp.cc", "machine.cc")


class Launched(ctypes.Structure):
    """hostgrid::Launched"""

    _fields_: Sequence[tuple[str, Any]] = [
        ("kernel", ctypes.c_void_p),
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("parameters", ctypes.c_void_p),
        ("parameter_bytes", ctypes.c_uint32),
    ]


class _Counts(ctypes.Structure):
    """sass::Counts"""

    _fields_: Sequence[tuple[str, Any]] = [
        ("blocks", ctypes.c_uint64),
        ("blocks_run", ctypes.c_uint64),
        ("instructions", ctypes.c_uint64),
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
        ("loads", ctypes.c_uint64 * 5),
        ("stores", ctypes.c_uint64 * 5),
    ]


@dataclass(frozen=True)
class Launch:
    """What a launch, or the blocks of it that ran, has executed.

    loads, stores: accesses of global memory by lanes, by their bytes
    """

    kernel: str
    blocks: int
    blocks_run: int
    instructions: int
    loaded: int
    stored: int
    loads: dict[int, int]
    stores: dict[int, int]

    @property
    def share(self) -> float:
        """What to multiply counts with, for the whole launch."""
        return self.blocks / self.blocks_run


@cache
def _interpreter() -> ctypes.CDLL:
    folder = ROOT / "build" / "sass"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "libsass.so"
    sources = [ROOT / "tests/sass" / name for name in _SOURCES]
    with alone("sass"):
        inputs = [*sources, *(ROOT / "tests/sass").glob("*.h")]
        if not built.exists() or built.stat().st_mtime < max(p.stat().st_mtime for p in inputs):
            flags = ("-std=c++17", "-O2", "-frounding-math", "-Wall", "-Wextra", "-shared", "-fPIC")
            run([CXX, *flags, *sources, "-o", built])
    library = ctypes.CDLL(str(built))
    library.sass_launch.restype = ctypes.c_bool
    return library


@dataclass
class Machine:
    """Runs launches of `hostgrid`, a libkvx of tests/hostgrid, on the code in `library`, a libkvx
    that nvcc built of the same sources. Launches of other libraries run as before.

    sample: about how many blocks of each launch run; 0: all, so that the results are complete
    """

    library: Path
    hostgrid: Path
    sample: int = 0
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._interpreter = _interpreter()
        programs = self.library.with_suffix(f".{ARCHITECTURE}.txt")
        if not programs.exists() or programs.stat().st_mtime < self.library.stat().st_mtime:
            listing.write_programs(self.library, ARCHITECTURE, programs)
        self._interpreter.sass_read(str(programs).encode())
        self._names = _kernels(self.hostgrid)
        self._usages = {
            listing.short(name): usage
            for name, usage in listing.usages(self.library)[ARCHITECTURE].items()
        }
        self._loaded = ctypes.CDLL(str(self.hostgrid))
        self._runner = ctypes.CFUNCTYPE(None, ctypes.POINTER(Launched))(self._run)
        self._loaded.kvx_hostgrid_run_with(self._runner)

    def close(self) -> None:
        """Leaves later launches to the host grid."""
        self._loaded.kvx_hostgrid_run_with(None)

    def counted(self, call: Callable[[], object]) -> list[Launch]:
        """The launches of a call."""
        self.launches.clear()
        call()
        return list(self.launches)

    def _run(self, launched: Any) -> None:
        """Called by C, which no exception may reach: a launch that has not run is missing."""
        launch = launched.contents
        offset = launch.kernel - _address(self._loaded)
        name = self._names.get(offset, f"the kernel at offset {offset:#x}")
        counts = _Counts()
        ran = self._interpreter.sass_launch(
            name.encode(),
            launch.grid_x,
            launch.grid_y,
            launch.threads,
            self._usages[name].shared + launch.shared_bytes if name in self._usages else 0,
            ctypes.c_void_p(launch.parameters),
            launch.parameter_bytes,
            self.sample,
            ctypes.byref(counts),
        )
        if not ran:
            raise LookupError(f"{self.library} has no {ARCHITECTURE} code of {name}")
        self.launches.append(
            Launch(
                name,
                counts.blocks,
                counts.blocks_run,
                counts.instructions,
                counts.loaded,
                counts.stored,
                {1 << i: n for i, n in enumerate(counts.loads) if n},
                {1 << i: n for i, n in enumerate(counts.stores) if n},
            )
        )


def _address(library: ctypes.CDLL) -> int:
    """Of the function that offsets in the library count from."""
    return ctypes.cast(library.kvx_get_version, ctypes.c_void_p).value or 0


def _kernels(library: Path) -> dict[int, str]:
    """The names of the host grid's kernels, by their offset from kvx_get_version."""
    symbols = [line.split() for line in run(["nm", library]).splitlines()]
    addresses = {symbol[2]: int(symbol[0], 16) for symbol in symbols if len(symbol) == 3}
    mangled = [name for name in addresses if "_kernel" in name]
    base = addresses["kvx_get_version"]
    return {
        addresses[name] - base: listing.short(readable)
        for name, readable in zip(mangled, listing.demangled(mangled), strict=True)
    }
