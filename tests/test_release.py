"""What a release consists of beside its code: versions, files for the host, the source archive."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvx_core
from tests.native import ROOT, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
HOSTED = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"])
REGISTRIES = r"pypi\.org|pythonhosted|npmjs\.|debian\.org|anaconda\.|ghcr\.io|docker\.io|quay\.io"


def tracked() -> list[str]:
    """Files of this tree, those that git does not know yet too."""
    said = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"])
    return [name for name in said.splitlines() if (ROOT / name).is_file()]


def parsed(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_one_version() -> None:
    """pyproject.toml says it. CMake reads it there, and tests/test_import.py libkvx's."""
    version = PROJECT["version"]
    cited = parsed("CITATION.cff")
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.M)
    assert kvx_core.__version__ == cited["version"] == version
    assert headings[:2] == ["Unreleased", f"{version} ({cited['date-released']})"]
    assert PROJECT["license"] == cited["license"]


def test_the_first_release_is_read_in_two_minutes() -> None:
    (section,) = re.findall(r"^## 0\.1\.0 .*?(?=^## |\Z)", CHANGELOG, re.M | re.S)
    assert len(section.splitlines()) <= 60


def test_citation() -> None:
    """The fields that version 1.2.0 of the Citation File Format needs."""
    cited = parsed("CITATION.cff")
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys()
    assert all(author.keys() == {"name"} for author in cited["authors"])


@pytest.mark.parametrize("path", HOSTED, ids=lambda path: path.name)
def test_files_for_the_host_are_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_workflows_run_targets_of_make() -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.M))
    used: set[str] = set()
    for name in ("checks", "release"):
        flow = parsed(f".github/workflows/{name}.yml")
        assert flow["permissions"] == {"contents": "read"}
        for job in flow["jobs"].values():
            assert job["timeout-minutes"]
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step)
                if step.get("run", "").startswith("make "):
                    used |= {word for word in step["run"].split()[1:] if "=" not in word}
    assert used <= targets
    assert used == {"lint", "test", "docs", "test-aarch64", "release"}


def test_the_pythons_that_are_tested_are_those_of_the_metadata() -> None:
    job = parsed(".github/workflows/checks.yml")["jobs"]["test"]
    named = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_commits_are_checked_as_by_make_lint() -> None:
    (recipe,) = re.findall(r"^lint: setup\n((?:\t.*\n)+)", MAKEFILE, re.M)
    lines = [line.removeprefix("\t$(BIN)/") for line in recipe.splitlines()]
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # nothing is fetched
    for hook, line in zip(repository["hooks"], lines, strict=True):
        entry = hook["entry"].removeprefix(".venv/bin/").replace(" --force-exclude", "")
        assert entry == re.sub(r" (\.|\$\(CXX_FILES\))$", "", line)
        assert hook["language"] == "system"


def test_hooks_take_the_files_that_lint_takes() -> None:
    hook = parsed(".pre-commit-config.yaml")["repos"][0]["hooks"][3]
    taken = {name for name in tracked() if re.search(hook["files"], name)}
    said = run(["make", "-s", "--eval", "files: ; @echo $(CXX_FILES)", "files"])
    assert taken == set(said.split())


def test_fields_to_fill_in_are_valid_once_they_are() -> None:
    """Where the project is hosted is one placeholder, in comments: metadata without it is valid."""
    assert "urls" not in PROJECT
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^# (\[project\.urls\]\n(?:# .*\n)+)", text, re.M)
    filled = block.replace("\n# ", "\n").replace("HOST/OWNER", "example.org/someone")
    urls = tomllib.loads(filled)["project"]["urls"]
    assert urls.keys() == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://example.org/someone/kvx") for url in urls.values())
    cited = (ROOT / "CITATION.cff").read_text()
    assert re.search(r'^# .*repository-code: "https://HOST/OWNER/kvx"$', cited, re.M)


def test_no_file_names_a_registry() -> None:
    """Packages are named, and come from where pip, apt and the like are told to look."""
    for name in tracked():
        if name == "tests/test_release.py":
            continue
        text = (ROOT / name).read_bytes().decode(errors="replace")
        assert not re.search(rf"https?://[\w.-]*({REGISTRIES})", text), name


def test_reports_have_a_way() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "](docs/security.md)" in text
    assert "in private" in text
    assert f"| {PROJECT['version'].rpartition('.')[0]} | yes |" in text


def test_the_source_archive_holds_all_files(tmp_path: Path) -> None:
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT])
    with tarfile.open(tmp_path / f"kvx-{PROJECT['version']}.tar.gz") as archive:
        folder = f"kvx-{PROJECT['version']}/"
        held = {file.name.removeprefix(folder) for file in archive if file.isfile()}
    assert {"PKG-INFO", *tracked()} <= held
    made = r"\.(so|o|pyc|whl)$|^(build|dist|\.venv)/|__pycache__"
    assert not [name for name in held if re.search(made, name)]


@pytest.mark.slow  # compiles libkvx anew
def test_a_wheel_of_the_source_archive(tmp_path: Path, wheel: Path) -> None:
    """Unpacked elsewhere, without git, it builds the files that the wheel of this tree has."""
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT])
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    # What is compiled alike is in the cache.
    env = {"CCACHE_BASEDIR": str(folder)}
    run([*pip, "-Ccmake.define.KVX_CUDA=OFF", "--wheel-dir", tmp_path, folder], env=env)
    (made,) = tmp_path.glob("*.whl")
    ours, theirs = (sorted(zipfile.ZipFile(path).namelist()) for path in (made, wheel))
    assert ours == theirs
