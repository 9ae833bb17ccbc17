"""Makes an environment such as a borrowed GPU machine has: torch, the test tools, nothing else.

Its site-packages hold links to the distributions named here and to what these require; its PATH
holds a Python, cmake, ninja and a compiler. All else is missing as it would be there: pydantic,
safetensors, transformers, pip, make, git.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.native import ROOT

DISTRIBUTIONS = ("torch", "numpy", "pytest", "hypothesis", "ml_dtypes", "cmake", "ninja")

# The CUDA compiler, where it is PyPI's: kvx[nvcc].
NVCC = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")

# A C++ compiler, what it calls, and what cmake and nvcc's scripts call.
TOOLS = (
    "g++",
    "gcc",
    "c++",
    "cc",
    "as",
    "ld",
    "ar",
    "ranlib",
    "nm",
    "strip",
    "sh",
    "uname",
    "nvcc",
)

# Of a checkout, what `python3 -m benchmarks.gpu` reads.
TREE = (
    *("csrc", "cmake", "kvx_core", "kvx_adapters", "kvx_conformance", "benchmarks", "tests"),
    *("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"),
)


@dataclass(frozen=True)
class Bare:
    """tree: a copy of this one, without its repository and without what was built in it."""

    python: Path
    path: str
    tree: Path

    def run(
        self, *arguments: str | Path, timeout: float, **environment: str | Path
    ) -> subprocess.CompletedProcess[str]:
        """Runs this Python in the tree, with no variable of the tests' own environment but how
        the threads of OpenMP wait."""
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            cwd=self.tree,
            env={"PATH": self.path, "HOME": str(self.tree)}
            | {name: os.environ[name] for name in ("OMP_WAIT_POLICY",) if name in os.environ}
            | {name: str(value) for name, value in environment.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )


def make(folder: Path) -> Bare:
    """Makes the environment in an empty folder, in about a second.

    It lies where `make` puts its own: then PyPI's nvcc, whose headers lie in it, compiles what the
    cache of `make` knows.
    """
    tree, tools = folder / "tree", folder / "tools"
    home = tree / ".venv"
    copy_tree(tree)
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    names = closure([*DISTRIBUTIONS, *(f"nvidia-{name}" for name in NVCC)])
    for name in names:
        for path in top_level_paths(name):
            link = site / path.name
            if not link.exists():
                link.symlink_to(path)
    python = home / "bin" / "python"
    _scripts(names, home / "bin", python)
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    return Bare(python, os.pathsep.join(map(str, (home / "bin", tools))), tree)


def closure(names: Iterable[str]) -> set[str]:
    """These distributions and all that they require here, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform or Python
            continue
        if name not in found:
            found.add(name)
            waiting += [re.split(r"[^\w.-]", r)[0] for r in required if "extra ==" not in r]
    return found


def top_level_paths(name: str) -> Iterator[Path]:
    """Files and folders that the distribution put into site-packages."""
    distribution = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or ()}
    for top in sorted(tops - {"..", "__pycache__"}):
        yield Path(str(distribution.locate_file(top)))


def _scripts(names: Iterable[str], folder: Path, python: Path) -> None:
    """Programs in the environment's bin, as an installer puts them there."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for entry in distribution.entry_points:
            if entry.group == "console_scripts":
                text = f"#!{python}\nimport sys\nfrom {entry.module} import {entry.attr}\n"
                (folder / entry.name).write_text(f"{text}sys.exit({entry.attr}())\n")
                (folder / entry.name).chmod(0o755)
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if file.parts[-2:-1] == ("bin",) and file.parts[0] == "..":
                link = folder / file.name
                if not link.exists():
                    link.symlink_to(path.resolve())


def copy_tree(tree: Path) -> None:
    """The files of this checkout, but nothing that was built."""
    built = shutil.ignore_patterns("__pycache__", "*.so", "results", ".*")
    tree.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=built)
        else:
            shutil.copy(ROOT / name, tree / name)
