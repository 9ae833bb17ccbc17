"""What C programs find libkvx by: the CMake package and the pkg-config file of the wheel and of
`cmake --install`, the functions that say where the files are, and docs/c.md."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

import kvx_core
from kvx_core._c import abi
from tests.documents import Document
from tests.native import CC, ROOT, hostgrid_library, run, tool

EXAMPLE = ROOT / "examples/c"
DOCUMENT = Document("c.md")
PRINTED, BY_THE_EXTENSION = DOCUMENT.snippets("text")
NINJA = ("-G", "Ninja")


@pytest.fixture(scope="module", params=["wheel", "install"])
def prefix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a package has been moved to, after it was installed elsewhere."""
    folder = tmp_path_factory.mktemp("package")
    if request.param == "wheel":
        core = folder / "moved/kvx_core"
        shutil.copytree(request.getfixturevalue("installed") / "kvx_core", core)
        return core
    build = hostgrid_library().parent
    run([tool("cmake"), "--install", build, "--prefix", folder / "first"])
    return (folder / "first").rename(folder / "moved")


def ninja() -> str:
    return f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"


def test_the_example_is_built_by_cmake(prefix: Path, tmp_path: Path) -> None:
    found = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_C_COMPILER={CC}"]
    warnings = "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror"
    run([tool("cmake"), "-S", EXAMPLE, "-B", tmp_path, *NINJA, ninja(), *found, warnings])
    run([tool("cmake"), "--build", tmp_path])
    assert run([tmp_path / "move_tokens"]) == PRINTED


def test_the_example_is_built_by_pkg_config(prefix: Path, tmp_path: Path) -> None:
    (file,) = prefix.rglob("kvx.pc")
    environment = {"PKG_CONFIG_PATH": str(file.parent)}

    def ask(*options: str) -> list[str]:
        return run([tool("pkg-config"), *options, "kvx"], env=environment).split()

    program = tmp_path / "move_tokens"
    rpath = f"-Wl,-rpath,{ask('--variable=libdir')[0]}"
    flags = [*ask("--cflags", "--libs"), rpath]
    run([CC, "-std=c11", EXAMPLE / "move_tokens.c", "-o", program, *flags])
    assert run([program]) == PRINTED
    version = re.findall(r"define KVX_ABI_VERSION_\w+ (\d+)", header(prefix))
    assert ask("--modversion") == [".".join(version)]
    assert Path(ask("--variable=prefix")[0]).resolve() == prefix.resolve()


def header(prefix: Path) -> str:
    return (prefix / "include/kvx/kvx_abi.h").read_text()


def test_nothing_in_a_package_says_where_it_was_made(prefix: Path) -> None:
    files = [*prefix.rglob("*.cmake"), *prefix.rglob("*.pc")]
    assert len(files) == 5
    for file in files:
        assert str(ROOT) not in file.read_text(), file
        assert str(prefix.parent) not in file.read_text(), file


def test_another_major_version_is_not_found(prefix: Path, tmp_path: Path) -> None:
    asks = (EXAMPLE / "CMakeLists.txt").read_text()
    (tmp_path / "CMakeLists.txt").write_text(asks.replace("kvx 1.0", "kvx 2.0"))
    shutil.copy(EXAMPLE / "move_tokens.c", tmp_path)
    found = f"-DCMAKE_PREFIX_PATH={prefix}"
    with pytest.raises(AssertionError, match=r"compatible\s+with\s+requested\s+version \"2\.0\""):
        run([tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", *NINJA, ninja(), found])


def test_the_library_names_itself(prefix: Path) -> None:
    (library,) = prefix.rglob("libkvx.so")
    (soname,) = re.findall(r"\(SONAME\).*\[(.+)\]", run(["readelf", "-d", library]))
    if library.parent == prefix:  # the wheel's, which can hold no links
        assert (soname, library.is_symlink()) == ("libkvx.so", False)
    else:
        assert soname == "libkvx.so.1"
        assert os.readlink(library) == soname
        assert library.resolve().name == "libkvx.so." + ".".join(
            re.findall(r"define KVX_ABI_VERSION_\w+ (\d+)", header(prefix))
        )


@pytest.fixture
def of_a_user(installed: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a user of the wheel: `python` knows no editable install of this tree."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -P "$@"\n')
    python.chmod(0o755)
    folders = [python.parent, Path(tool("cmake")).parent, os.environ["PATH"]]
    return {
        "PATH": os.pathsep.join(map(str, folders)),
        "PYTHONPATH": os.pathsep.join([str(installed), sysconfig.get_path("purelib"), *sys.path]),
        "CMAKE_GENERATOR": "Ninja",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }


def test_the_commands_of_the_document(of_a_user: dict[str, str], tmp_path: Path) -> None:
    (commands,) = DOCUMENT.snippets("sh")
    moved = commands.replace("build/", f"{tmp_path}/build/")
    printed = run(["sh", "-ec", moved], env=of_a_user)
    assert printed.count(PRINTED) == 2
    assert printed.endswith(PRINTED)


@pytest.mark.slow  # torch's headers compile for half a minute
def test_the_torch_extension(of_a_user: dict[str, str]) -> None:
    (command,) = re.findall(r"    (python examples/torch_extension/.*)", DOCUMENT.text)
    assert run(["sh", "-ec", command], env=of_a_user).endswith(BY_THE_EXTENSION)


def test_where_the_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kvx_core.include_dir()
    assert folder.is_absolute()
    assert (folder / "kvx/kvx_ext.h").is_file()
    assert kvx_core.library_path().is_absolute()
    assert kvx_core.library_path().samefile(abi.library_path())
    monkeypatch.setenv("KVX_LIBRARY", "build/other.so")
    assert kvx_core.library_path() == Path.cwd() / "build/other.so"


def test_headers_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvx_core._c.abi.PACKAGE", tmp_path / "kvx_core")
    with pytest.raises(FileNotFoundError, match=r"kvx/kvx_ext\.h is neither in .*, expected the"):
        kvx_core.include_dir()
