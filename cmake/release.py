"""The last step of `make release`: what dist/ holds is complete, has an SBOM and checksums.

    python cmake/release.py DIST SBOM BUILD

Runs in an environment that holds the wheel of this machine and what it requires. SBOM is
cyclonedx-py's list of that environment; what libkvx links statically joins it, with the versions
that BUILD, the folder in which CMake has built the wheel, knows.
Writes kvx-VERSION.cdx.json and SHA256SUMS into DIST. Uses only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import kvx_core

_WHEELS = ("x86_64", "aarch64")


def _linked(build: Path) -> list[dict[str, Any]]:
    """What the library holds of others, which no list of Python packages names."""
    parts = [("CXX", "libstdc++", "GPL-3.0-or-later WITH GCC-exception-3.1")]
    if kvx_core.backend_info().has_cuda:
        parts.append(("CUDA", "libcudart_static", "LicenseRef-NVIDIA-CUDA-EULA"))
    found = []
    for language, name, licence in parts:
        (said,) = build.glob(f"CMakeFiles/*/CMake{language}Compiler.cmake")
        pattern = rf'CMAKE_{language}_COMPILER_VERSION "([\d.]+)"'
        found.append(
            {
                "type": "library",
                "bom-ref": f"linked-{name}",
                "name": name,
                "version": re.findall(pattern, said.read_text())[0],
                "description": "linked statically into libkvx.so",
                "licenses": [{"expression": licence}],
            }
        )
    return found


def main(dist: Path, sbom: Path, build: Path) -> None:
    version = importlib.metadata.version("kvx")
    info = kvx_core.backend_info()
    if {version, info.version} != {kvx_core.__version__}:
        sys.exit(f"versions differ: kvx {version}, kvx_core {kvx_core.__version__}, {info}")
    names = {path.name for path in dist.iterdir()}
    wheels = [rf"kvx-{version}-py3-none-manylinux_\d+_\d+_{machine}\.whl" for machine in _WHEELS]
    for pattern in [rf"kvx-{version}\.tar\.gz", *wheels]:
        if sum(re.fullmatch(pattern, name) is not None for name in names) != 1:
            sys.exit(f"{dist} holds {sorted(names)}, expected one {pattern}")

    listed = json.loads(sbom.read_text())
    linked = _linked(build)
    listed["components"] += linked
    root = listed["metadata"]["component"]["bom-ref"]
    depends = next(one for one in listed["dependencies"] if one["ref"] == root)
    depends["dependsOn"] = sorted(
        [*depends.get("dependsOn", ()), *(one["bom-ref"] for one in linked)]
    )
    listed["dependencies"] += [{"ref": one["bom-ref"]} for one in linked]
    (dist / f"kvx-{version}.cdx.json").write_text(json.dumps(listed, indent=2) + "\n")

    sums = dist / "SHA256SUMS"
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(dist.iterdir())
        if path != sums
    ]
    sums.write_text("".join(lines))
    print(f"kvx {version}: {dist}/ is complete\n{''.join(lines)}", end="")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
