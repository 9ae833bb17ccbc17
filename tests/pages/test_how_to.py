"""The pages "How to": their snippets print what they say, what they say of keys is true, and the
notebook prints what it has kept."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
from docs import notebook
from kvx_adapters.cli.commands import app
from kvx_core import CacheView, Directory, Precision, PrefixStore, StoreError, verify
from tests.documents import Document
from tests.native import ROOT
from tests.pages.test_examples import PRINTED

ROTATION = Document("key_rotation.md")
PROMPT = list(range(300))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names of the page on rotation: facts, store, room, carry_over."""
    return ROTATION.run({})


def signed(path: Path, key: bytes) -> PrefixStore:
    return PrefixStore(
        Directory(path),
        fingerprint="a model",
        num_layers=2,
        total_kv_heads=4,
        precision=Precision.of("bfloat16"),
        key=key,
    )


def save(store: PrefixStore, page: dict[str, Any]) -> CacheView:
    """Stores PROMPT; returns where its keys and values are."""
    section = page["room"](len(PROMPT))
    for layer in section.view.layers:
        for tensor in layer.moving_owners:
            tensor.normal_()
    for start, stop in store.spans(len(PROMPT)):
        store.commit(store.capture(PROMPT, start, stop, [section]))
    return section.view


def require_holds(store: PrefixStore, view: CacheView, page: dict[str, Any]) -> None:
    """The store has PROMPT with these numbers."""
    section = page["room"](len(PROMPT))
    match = store.lookup(PROMPT)
    assert match.num_tokens == len(PROMPT)
    store.load(match, 0, len(PROMPT), [section])
    assert verify(view, section.view, [len(PROMPT)])


def test_prompts_are_carried_over_to_another_encryption_key(
    page: dict[str, Any], tmp_path: Path
) -> None:
    old = page["store"](tmp_path / "old", secrets.token_bytes(32))
    new = page["store"](tmp_path / "new", secrets.token_bytes(32))
    view = save(old, page)
    assert page["carry_over"]([*PROMPT, 7], old, new) == len(PROMPT)
    shutil.rmtree(tmp_path / "old")
    require_holds(new, view, page)


def test_a_store_that_is_encrypted_takes_no_other_key(page: dict[str, Any], tmp_path: Path) -> None:
    save(page["store"](tmp_path, secrets.token_bytes(32)), page)
    with pytest.raises(StoreError, match="is not authenticated by the encryption key"):
        page["store"](tmp_path, secrets.token_bytes(32))
    with pytest.raises(StoreError, match="is encrypted"):
        signed(tmp_path, secrets.token_bytes(32))


def test_the_steps_of_the_page(page: dict[str, Any], tmp_path: Path) -> None:
    """Every engine finds every prompt while keys change; then what the old one had is computed."""
    old, new = (secrets.token_bytes(32) for _ in range(2))
    steps = [re.findall(r'"/etc/(kvx(?:-2)?)\.key"', row) for row in ROTATION.text.split("\n| ")]
    given = {"kvx": old, "kvx-2": new}
    keys = [[given[name] for name in names] for names in steps if names]
    assert keys == [[old, new], [new, old], [new]]
    view = save(page["store"](tmp_path, old), page)
    for each in keys[:2]:
        require_holds(page["store"](tmp_path, *each), view, page)
    assert page["store"](tmp_path, new).lookup(PROMPT).num_tokens == 0
    view = save(page["store"](tmp_path, new), page)
    require_holds(page["store"](tmp_path, new), view, page)


def test_the_commands_of_the_page(page: dict[str, Any], tmp_path: Path) -> None:
    """With these stores and keys: the other store has its prompt, encrypted with the other key."""
    old, new = (secrets.token_bytes(32) for _ in range(2))
    for name, key in (("kvx.key", old), ("kvx-2.key", new)):
        (tmp_path / name).write_bytes(key)
        (tmp_path / name).chmod(0o600)
    view = save(signed(tmp_path / "kvx", old), page)
    lines = [line for text in ROTATION.snippets("bash") for line in text.splitlines()]
    assert [line.split()[2] for line in lines] == ["verify", "export", "import"]
    for line in lines[1:]:
        words = line.replace("/etc/", f"{tmp_path}/").replace("/srv/", f"{tmp_path}/").split()
        kvx(*["a model" if word == "3f1c" else word for word in words[2:]])
    require_holds(signed(tmp_path / "kvx-2", new), view, page)


def kvx(command: str, *words: object) -> str:
    result = CliRunner().invoke(app, ["store", command, *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_merging(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The snippets; and `cp -rn`, as the page has it."""
    page = Document("merge_prefixes.md")
    names = page.run({})
    assert capsys.readouterr().out.splitlines() == page.prints()
    assert "cp -rn /srv/kvx-a/. /srv/kvx-b/" in page.text
    one, other = (Directory(tmp_path / name) for name in "ab")
    stores = [names["store"](directory) for directory in (one, other)]
    prompts = [range(40), range(50, 90)]
    for store, prompt in zip(stores, prompts, strict=True):
        names["save"](store, prompt, names["whole"])
    subprocess.run(["cp", "-rn", f"{one.root}/.", f"{other.root}/"], check=True)
    found = names["store"](Directory(other.root))
    assert [found.lookup(prompt).num_tokens for prompt in prompts] == [40, 40]


def test_the_page_shows_what_the_example_prints() -> None:
    text = Document("own_engine.md").text
    (shown,) = re.findall(r"^\$ python examples/own_engine.py\n(.*?)^```", text, re.M | re.S)
    lines = shown.splitlines()
    assert len(lines) == len(PRINTED["own_engine"])
    for line, pattern in zip(lines, PRINTED["own_engine"], strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_prints_what_it_has_kept(path: Path) -> None:
    text = path.read_text()
    kept = json.loads(text)
    assert (kept["nbformat"], kept["nbformat_minor"]) == (4, 5)
    assert notebook.text_of(notebook.executed(kept)) == text, f"run python -m docs.notebook {path}"


def test_a_cell_shows_its_last_value() -> None:
    names: dict[str, object] = {}
    assert notebook.run("a = 3\nprint('b')\na + 1", names) == ("b\n", "4")
    assert notebook.run("print(a)", names) == ("3\n", "")
    assert notebook.run("a = 5", names) == ("", "")


def test_a_notebook_is_a_page() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "text"]},
        {"cell_type": "code", "source": ["b"], "outputs": [{"text": ["1\n", "2\n"]}]},
        {"cell_type": "code", "source": ["c"], "outputs": []},
        {"cell_type": "code", "source": ["d"], "outputs": [{"data": {"text/plain": ["3"]}}]},
    ]
    expected = (
        "# A\ntext\n\n```python\nb\n```\n\n```text\n1\n2\n```\n\n```python\nc\n```\n\n"
        "```python\nd\n```\n\n```text\n3\n```\n"
    )
    assert notebook.markdown({"cells": cells}) == expected
