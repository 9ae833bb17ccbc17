"""Where the files for C and C++ are: the headers, and libkvx."""

from __future__ import annotations

from pathlib import Path

from kvx_core._c import abi


def include_dir() -> Path:
    """The folder of the C headers, for a compiler's -I: it holds kvx/kvx_ext.h and the others.

    Absolute. In a wheel it lies in this package, in an editable install in the source tree. Loads
    nothing. Raises FileNotFoundError if the headers are in neither place.
    """
    package = abi.PACKAGE
    for folder in (package / "include", package.parent / "csrc" / "include"):
        if (folder / "kvx" / "kvx_ext.h").is_file():
            return folder
    raise FileNotFoundError(
        f"kvx/kvx_ext.h is neither in {package / 'include'} nor in the source tree, expected the "
        "headers of KVX. Install the package again"
    )


def library_path() -> Path:
    """The libkvx that this package loads: the file that $KVX_LIBRARY names, or its own libkvx.so.

    Absolute. Loads nothing and does not look whether the file is there.
    """
    return abi.library_path().absolute()
