"""The settings of a store, its limits, and what docs/operations.md says of both."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from kvx_core.connector.plan import Scope
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import Precision
from kvx_core.stores import Directory
from kvx_core.stores.inventory import num_bytes_of
from tests.cli.stores import kvx, save_tokenizer, two_models
from tests.documents import Document
from tests.native import ROOT


def test_settings_take_sizes(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path, max_bytes="50GB", max_pending_bytes="1GiB")  # type: ignore[arg-type]
    assert (settings.max_bytes, settings.max_pending_bytes) == (50 * 10**9, 1 << 30)
    assert StoreSettings(path=tmp_path, max_bytes=None).max_bytes is None
    for wrong in ("50 parsecs", -1, 0, True, 1.5, [1]):
        message = re.escape(
            f"max_bytes is {wrong!r}, expected a number of bytes greater than 0, su"
        )
        with pytest.raises(ValueError, match=message):
            StoreSettings(path=tmp_path, max_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("min_tokens", 1),
        ("writer_threads", 1),
        ("loader_threads", 1),
        ("chunk_tokens", 16),
        ("lookup_seconds", 0),
        ("fresh_seconds", 0),
        ("shutdown_seconds", 0),
    ],
)
def test_the_least_that_settings_take(name: str, least: int, tmp_path: Path) -> None:
    assert getattr(StoreSettings(path=tmp_path, **{name: least}), name) == least  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{name}\n.* greater than or equal to {least}"):
        StoreSettings(path=tmp_path, **{name: least - 1})  # type: ignore[arg-type]


def test_the_stores_of_1024_scopes_are_kept() -> None:
    """Salts come from users, whose number has no end."""
    store: Any = SimpleNamespace(salted=lambda salt: object())
    scoped = Scoped(store)
    first = scoped[Scope("0")]
    for i in range(1, 1024):
        scoped[Scope(str(i))]
    assert scoped[Scope("0")] is first
    scoped[Scope("1024")]
    assert scoped[Scope("0")] is not first


@pytest.mark.parametrize("name", ["key_files", "encryption_key_files"])
def test_settings_take_one_file_of_keys_or_several(name: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for given, found in ((one, (one,)), (str(one), (one,)), ([one, other], (one, other))):
        assert getattr(StoreSettings(path=tmp_path, **{name: given}), name) == found  # type: ignore[arg-type]
    for nothing in ([], ()):
        with pytest.raises(ValueError, match=r"expected a path, or a list of them: .new, old"):
            StoreSettings(path=tmp_path, **{name: nothing})  # type: ignore[arg-type]


def test_what_a_start_tells(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path / "not/yet", max_bytes=50 * 10**9)
    assert re.fullmatch(
        rf"KVX keeps prefixes in {tmp_path}/not/yet: model aaaaaaaaaaaa, chunks of 128 tokens, "
        r"at most 50\.0 GB, free there: [0-9.]+ GB",
        settings.told("a" * 64, 128),
    )


def opened(path: Path, **settings: Any) -> tuple[StoreSettings, Directory]:
    """The settings of an engine that has opened its store, and the directory as it uses it."""
    found = StoreSettings(path=path, **settings)
    store = found.store(
        fingerprint="a model",
        num_layers=2,
        total_kv_heads=2,
        precision=Precision.of(torch.float32, torch.float32),
    )
    directory = store._blobs
    assert isinstance(directory, Directory)
    return found, directory


def test_a_new_store_has_a_limit(tmp_path: Path) -> None:
    """Half of what is free; engines that come later take it from the store."""
    free = Directory(tmp_path).free_bytes()
    first, directory = opened(tmp_path / "store")
    limit = directory.max_bytes
    assert limit is not None
    assert 0.4 * free < limit < 0.6 * free
    assert json.loads((tmp_path / "store/kvx-store.json").read_text())["max_bytes"] == limit
    assert f", at most {limit / 1e9:.1f} GB, " in first.told("a" * 64, 128)
    assert first.limit_warning() == ""

    _, directory = opened(tmp_path / "store")
    assert directory.max_bytes == limit
    third, directory = opened(tmp_path / "store", max_bytes="5GB")
    assert directory.max_bytes == 5 * 10**9
    assert ", at most 5.0 GB, " in third.told("a" * 64, 128)


def test_a_store_keeps_the_limit_of_the_engine_that_made_it(tmp_path: Path) -> None:
    opened(tmp_path, max_bytes="5GB")
    _, directory = opened(tmp_path)
    assert directory.max_bytes == 5 * 10**9


def test_a_store_that_was_made_without_a_limit_has_none(tmp_path: Path) -> None:
    text = '{"format": 3, "chunk_tokens": 128}'
    (tmp_path / "kvx-store.json").write_text(text)
    settings, directory = opened(tmp_path)
    assert directory.max_bytes is None
    assert (tmp_path / "kvx-store.json").read_text() == text
    assert ", no limit, " in settings.told("a" * 64, 128)
    assert settings.limit_warning().endswith("Set `max_bytes`, such as '50GB'")
    assert opened(tmp_path, max_bytes="5GB")[0].limit_warning() == ""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return two_models(tmp_path)


PAGE = Document("operations.md")
STATS = set(  # of the connector
    re.findall(
        r'^    "(\w+)": "', (ROOT / "kvx_adapters/vllm_plugin/stats.py").read_text(), re.MULTILINE
    )
)
HISTOGRAMS = set(
    re.findall(
        r'^HISTOGRAMS = {"(\w+)": ', (ROOT / "kvx_adapters/vllm_plugin/stats.py").read_text(), re.M
    )
)


def test_the_commands_of_the_document(path: Path) -> None:
    """In the order of the page: what is exported is imported again."""
    commands = [
        line.strip().partition("#")[0].split()
        for snippet in PAGE.snippets("bash")
        for line in snippet.splitlines()
        if line.strip().startswith("kvx store")
    ]
    assert {words[2] for words in commands} == {
        *("ls", "stat", "verify", "trim", "rm", "export", "import", "explain")
    }
    beside = path.parent
    (beside / "ids.json").write_text("[1, 2, 3]")
    (beside / "prompt.txt").write_text("two one two")
    save_tokenizer(beside / "tokenizer.json")
    there = {"ids.json": beside / "ids.json", "prompt.txt": beside / "prompt.txt"}
    there |= {"/srv/export": beside / "export", "/srv/model": beside}
    models = dict.fromkeys(("3f1c", "4fc31527a63b"), "aaaa")  # one that is there
    for words in commands:
        assert words[3] == "/srv/kvx", words
        given = [word.strip("'") for word in words[4:]]
        kvx(words[2], path, *((models | there).get(word, word) for word in given))


def test_the_arithmetic_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    PAGE.run({})
    assert capsys.readouterr().out.splitlines() == PAGE.prints()
    assert "131,072 bytes" in PAGE.text


def connector_settings(command: list[str]) -> StoreSettings:
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_load_failure_policy"] == "recompute"
    return StoreSettings(**config["kv_connector_extra_config"])


def test_the_compose_file() -> None:
    compose, _, _ = PAGE.snippets("yaml")
    for service in yaml.safe_load(compose)["services"].values():
        settings = connector_settings(shlex.split(service["command"]))
        assert settings.max_bytes == 50 * 10**9
        (volume,) = service["volumes"]
        assert volume.split(":")[1] == str(settings.path)


def test_the_kubernetes_manifests(path: Path) -> None:
    """Names agree, the settings are valid, and the job's command runs. No cluster is asked."""
    _, manifests, _ = PAGE.snippets("yaml")
    claim, server, job = yaml.safe_load_all(manifests)
    templates = (server["spec"]["template"], job["spec"]["jobTemplate"]["spec"]["template"])
    for template in templates:
        (container,) = template["spec"]["containers"]
        (volume,) = template["spec"]["volumes"]
        (mount,) = container["volumeMounts"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mount["name"] == volume["name"]
        assert mount["mountPath"] == "/srv/kvx"
    assert server["spec"]["selector"]["matchLabels"] == templates[0]["metadata"]["labels"]
    settings = connector_settings(templates[0]["spec"]["containers"][0]["args"])
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert settings.max_bytes is not None
    assert settings.max_bytes < num_bytes_of(f"{size}B")
    assert (settings.path, settings.group) == (Path("/srv/kvx"), "write")
    command = templates[1]["spec"]["containers"][0]["command"]
    assert command[:2] == ["kvx", "store"]
    assert command[3] == "/srv/kvx"
    kvx(command[2], path, *command[4:])


def test_the_alerts() -> None:
    """They ask for metrics that the connector has."""
    _, _, rules = PAGE.snippets("yaml")
    (group,) = yaml.safe_load(rules)["groups"]
    texts = [rule["expr"] for rule in group["rules"]]
    asked = {name for text in texts for name in re.findall(r"kvx_(\w+)_total", text)}
    assert asked == {"load_failures", "dropped_saves", "lookup_failures", "errors"}
    assert asked <= STATS
    buckets = {name for text in texts for name in re.findall(r"kvx_(\w+)_bucket", text)}
    assert buckets == {"lookup_seconds"} == HISTOGRAMS
