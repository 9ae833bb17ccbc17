"""Which tests csrc alone decides: nothing that decides them is left out of the digest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import checked
from tests.native import ROOT


def decides(path: Path) -> bool:
    return any(path in ROOT.glob(pattern) for pattern in checked.DECIDES)


def test_every_pattern_finds_files() -> None:
    for pattern in checked.DECIDES:
        assert any(path.is_file() for path in ROOT.glob(pattern)), pattern


def test_files_with_such_tests_are_in_the_digest() -> None:
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "of_csrc" in path.read_text()]
    found.remove(Path(__file__))
    assert len(found) > 5
    assert all(map(decides, found))


def test_the_digest_is_of_sources_compilers_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "ROOT", tmp_path)
    (tmp_path / "csrc/plan").mkdir(parents=True)
    source = tmp_path / "csrc/plan/plan.cc"
    source.write_text("int one;")
    digests = [checked.digest()]
    source.write_text("int two;")
    digests.append(checked.digest())
    source.rename(source.with_name("other.cc"))
    digests.append(checked.digest())
    monkeypatch.setattr(checked, "CXX", sys.executable)
    digests.append(checked.digest())
    monkeypatch.setattr(checked, "FEATURES", ("fpu",))
    digests.append(checked.digest())
    assert len(set(digests)) == len(digests)
    (tmp_path / checked.APART).mkdir()
    (tmp_path / checked.APART / "calls.cc").write_text("int three;")
    assert checked.digest() == digests[-1]


@pytest.mark.slow
def test_what_has_passed_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of pytest on a test of its own, with and without the record, and with --csrc."""
    code = """
import sys, pytest
from pathlib import Path
from tests import checked
checked.PASSED = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
    test = tmp_path / "test_one.py"
    test.write_text("import pytest\n@pytest.mark.of_csrc\ndef test_one():\n    pass\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.checked import Checked\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--slow', action='store_true')\n"
        "    parser.addoption('--csrc', action='store_true')\n"
        "def pytest_configure(config):\n"
        "    for name in ('of_csrc', 'slow'):\n"
        "        config.addinivalue_line('markers', f'{name}: ')\n"
        "    config.pluginmanager.register(Checked(config))\n"
    )
    record = tmp_path / "csrc_passed.txt"

    def said(*options: str) -> str:
        command = [sys.executable, "-c", code, record, "-c", tmp_path / "none.ini", *options]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.stdout.strip().splitlines()[-1]

    (tmp_path / "none.ini").write_text("[pytest]\ntestpaths = .\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert said().startswith("1 passed")
    assert not record.exists()
    assert said("--slow", "test_one.py").startswith("1 passed")
    assert not record.exists()  # of some files alone
    assert said("--slow", "-m", "not slow").startswith("1 passed")
    assert not record.exists()  # perhaps without some tests
    assert said("--slow", "-m", "of_csrc").startswith("1 passed")
    assert record.read_text().strip() == checked.digest()
    record.unlink()
    assert said("--slow").startswith("1 passed")
    assert record.read_text().strip() == checked.digest()
    assert said("--slow").startswith("1 skipped")
    source, _, processor = checked.digest().partition(" ")
    for other, kept in ((f"{source} another", True), (f"0 {processor}", False)):
        record.write_text(f"{other}\n")
        assert said("--slow").startswith("1 passed")
        assert (other in record.read_text().splitlines()) == kept
        assert said("--slow").startswith("1 skipped")
    assert said("--csrc").startswith("1 passed")
    record.write_text("another\n")
    assert said("--slow").startswith("1 passed")
