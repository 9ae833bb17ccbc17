"""What `kvx doctor` says of the engines beside vLLM: which are installed, and as tested or not.

Imports no engine. llama.cpp is no package of Python: here are the libraries that the demo and the
tests run, and a program brings its own libllama.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvx_adapters.cli.engines import llama_cpp_library
from kvx_adapters.cli.extras import pip_install

LLAMA_CPP = "v0.5.0"


@dataclass(frozen=True, slots=True)
class Package:
    """An engine that is a package of Python."""

    engine: str
    distribution: str
    tested: str  # version that KVX's tests run
    install: str  # the line that installs it
    last_python: tuple[int, int] | None = None  # that its packages are for; None: every one

    @property
    def way_out(self) -> str:
        """How it comes to be here."""
        if self.last_python is None or sys.version_info[:2] <= self.last_python:
            return self.install
        newest, here = (
            ".".join(map(str, version[:2])) for version in (self.last_python, sys.version_info)
        )
        return f"it has packages for Python 3.11 to {newest}, this is {here}"


PACKAGES = (
    Package("transformers", "transformers", "5.19.0", pip_install("transformers")),
    Package("OpenVINO", "openvino", "2026.4.1", pip_install("openvino")),
    Package("MLX", "mlx-lm", "0.32.2", pip_install("mlx")),
    Package("ONNX Runtime", "onnxruntime", "1.31.1", pip_install("onnxruntime")),
    Package("SGLang", "sglang", "0.5.23", pip_install("sglang"), (3, 13)),
    Package("FlashInfer", "flashinfer-python", "", "pip install flashinfer-python"),
)


def engines() -> Iterator[tuple[str, str]]:
    """The name of each engine with an adapter, and what is here of it."""
    for package in PACKAGES:
        tested = f"tested with {package.tested}" if package.tested else "its page tables, untested"
        try:
            found = version(package.distribution)
        except PackageNotFoundError:
            yield package.engine, f"not installed: {package.way_out}; {tested}"
            continue
        yield package.engine, f"{package.distribution} {found}, {tested}"
    yield "llama.cpp", _llama_cpp()


def _llama_cpp() -> str:
    tested = f"tested with {LLAMA_CPP}"
    folder = llama_cpp_library.folder()
    if (folder / llama_cpp_library.LIBLLAMA).exists():
        return f"libllama {LLAMA_CPP} in {folder}, {tested}"
    return f"not installed: python -m {llama_cpp_library.__name__}; {tested}"
