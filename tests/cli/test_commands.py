"""The commands of the README and of the pages: what can be checked of them without an engine.

The engines' commands of docs/vllm.md run in tests/vllm_plugin/test_commands.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvx_adapters.cli.commands import app
from kvx_adapters.cli.doctor_engines import engines
from kvx_adapters.vllm_plugin.settings import Settings
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import read_key
from tests.cli.stores import prefix_store, save
from tests.documents import Block, blocks
from tests.native import ROOT, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def commands(words: str) -> list[list[str]]:
    """The commands of all pages that begin so, as a shell reads them, without what "..." ends."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            text = block.text.replace("\\\n", " ")
            for start in re.finditer(rf"(?:^|&& |\$ )(?={words} )", text, re.M):
                end = _end(text, start.end())
                found.append(shlex.split(text[start.end() : end], comments=True))
    assert found, words
    return found


def _end(text: str, start: int) -> int:
    """Where a command ends: at the end of a line or at "&&", but in no quotes."""
    quoted = ""
    for at in range(start, len(text)):
        letter = text[at]
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "'\"":
            quoted = letter
        elif letter == "#" or letter == "\n" or text.startswith("&&", at):
            return at
    return len(text)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_make() -> None:
    """Each target that a page names is one."""
    for words in commands("make"):
        done = subprocess.run(
            ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr)


def test_pip_install() -> None:
    """Extras exist; what is named beside them is what the extras bring; KVX is on no index."""
    known = {
        requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra
    }
    for words in commands(r"[\w./-]*pip install"):
        for word in words[words.index("install") + 1 :]:
            if found := re.fullmatch(r"(?:\.|.*\.whl\))\[([\w,-]+)\]", word):
                assert set(found[1].split(",")) <= set(PROJECT["optional-dependencies"]), words
            elif word.startswith(("-", ".")) or words[0].startswith(".venv-lmcache"):
                continue
            else:
                assert word in known, words


def test_the_page_on_installing_lists_the_extras() -> None:
    text = (ROOT / "docs/install.md").read_text()
    listed = re.search(r"Other extras: (.*?)\. A wheel", text, re.S)
    assert listed is not None
    named = {"transformers", *re.findall(r"`([\w-]+)`", listed[1].replace("`kvx`", ""))}
    assert named == set(PROJECT["optional-dependencies"]) - {
        "test",
        "nvcc",
        "bench",
        "lint",
        "docs",
    }


def test_pip_lines_in_texts() -> None:
    """No page and no error names KVX as if an index had it; requirements are those of extras."""
    known = PROJECT["optional-dependencies"]
    for path in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "kvx_core").rglob("*.py")]:
        assert not re.search(r"pip install '?kvx\b", path.read_text()), path
    (needed,) = known["encryption"]
    assert f"pip install '{needed}'" in (ROOT / "kvx_core/snapshot/secrets.py").read_text()
    for page in ("vllm", "tensorrt_llm"):
        assert f"`pip install '{needed}'`" in (ROOT / f"docs/{page}.md").read_text()


def test_kvx() -> None:
    """Commands and options exist. (tests/cli/test_store_command.py runs those of `kvx store`.)"""
    group: Any = typer.main.get_command(app)
    for words in commands("kvx"):
        command, rest = group, words[1:]
        while rest and hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        names = {name for parameter in command.params for name in parameter.opts}
        options = [word for word in rest if word.startswith("--")]
        assert set(options) <= names, words


CONFIGS = [
    (page.name, text)
    for page in PAGES
    for text in re.findall(
        r'\{"kv_connector": "KVXConnector".*?\}\}', page.read_text().replace("\n", " "), re.S
    )
]


@pytest.mark.parametrize(("page", "text"), CONFIGS)
def test_connectors_are_configured(page: str, text: str) -> None:
    """A load that fails ends no request, and each setting is one."""
    config = json.loads(text)
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_role"] == "kv_both"
    Settings(**config["kv_connector_extra_config"])


def test_every_page_that_configures_a_connector_was_found() -> None:
    assert {page for page, _ in CONFIGS} == {
        *("README.md", "live_migration.md", "operations.md", "tensorrt_llm.md", "vllm.md"),
    }
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text()
        assert text.count("KVTransferConfig(") == text.count('kv_load_failure_policy="recompute"')


def test_tensorrt_llms_settings() -> None:
    text = (ROOT / "docs/tensorrt_llm.md").read_text()
    found = re.findall(r"TRTLLM_KVX='(\{.*?\})'", text)
    assert len(found) == 2
    for settings in found:
        StoreSettings(**json.loads(settings))
    (program,) = re.findall(r"<<'PYTHON'\n(.*?)^PYTHON", text, re.M | re.S)
    compile(program, "try_kvx.py", "exec")


@pytest.mark.parametrize("name", ["kvx.key", "kvx-store.key"])
def test_the_command_that_makes_a_key(name: str, tmp_path: Path) -> None:
    text = (ROOT / "docs/vllm.md").read_text()
    (command,) = re.findall(rf"^    (\(umask .* > /etc/{re.escape(name)}\))", text, re.M)
    run(["sh", "-ec", command.replace("/etc", str(tmp_path))])
    assert (tmp_path / name).stat().st_size == 32
    read_key(tmp_path / name)


def test_what_doctor_shows(tmp_path: Path) -> None:
    """Each line that docs/vllm.md shows begins as one that the command prints or has in it."""
    shown = [
        block.text
        for block in blocks(ROOT / "docs/vllm.md")
        if block.text.startswith("$ kvx doctor")
    ]
    assert len(shown) == 2
    sources = "".join(path.read_text() for path in (ROOT / "kvx_adapters/cli").glob("doctor*.py"))
    lines = [line for line in "".join(shown).splitlines() if not line.startswith("$")]
    for line in lines:
        name = re.fullmatch(r"[✓ ]  (\S+(?: \S+)*?)  +\S.*", line)
        assert name, line
        assert f'"{name[1]}"' in sources + (ROOT / "kvx_adapters/cli/commands.py").read_text()
    named = [name for name, _ in engines()]
    last = next(at for at, line in enumerate(lines) if f" {named[0]} " in line)
    assert [line.split("  ")[1].strip() for line in lines[last : last + len(named)]] == named
    # The lines of a store, but for its numbers.
    save(prefix_store(tmp_path, max_bytes=42 * 10**9), 1)
    printed = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path)]).stdout.splitlines()
    begin, end = (
        lines.index("✓  store            /srv/kvx"),
        lines.index("✓  model            gemma3_text of 26 layers"),
    )
    of_a_store = [line for line in printed if line.startswith("✓")]
    assert [kind_of(line) for line in of_a_store] == [kind_of(line) for line in lines[begin:end]]


def kind_of(line: str) -> str:
    """A line without what differs from store to store."""
    line = re.sub(r"/\S+", "/", line)
    line = re.sub(r"\d[\d.,]*( [kMGT]?B\b)?|limit of engines without .*|mode \d+", "#", line)
    return re.sub(r"\bmodels?\b", "models", line)


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n    one\n\n    two\n\n```sh\nthree\n```\n- b\n")
    assert blocks(page) == [Block("", "one\n\ntwo\n", 3), Block("sh", "three\n", 7)]
