"""`kvx store` on stores of several models and salts, on damaged ones, and over a month."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from kvx_adapters.cli.commands import app
from kvx_core import CacheDesc, CacheFacts, CacheView, InvalidArgumentError, describe
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import Precision, Section
from kvx_core.snapshot.seal import sealed
from kvx_core.stores import Directory, PrefixStore
from kvx_core.stores.inventory import Inventory, num_bytes_of
from kvx_core.types import DType
from tests.documents import Document
from tests.native import ROOT

CHUNK = 16
DAY = 86400
KEY = bytes(range(32))


def prefix_store(
    path: Path, model: str = "a", salt: str = "", max_bytes: int | None = None, **options: Any
) -> PrefixStore:
    return PrefixStore(
        Directory(path, max_bytes),
        fingerprint=model * 64,
        num_layers=2,
        total_kv_heads=3,
        precision=Precision.of(DType.F32),
        chunk_tokens=CHUNK,
        salt=salt,
        **options,
    )


def save(store: PrefixStore, seed: int, num_tokens: int = 40) -> None:
    """Stores a prompt: three chunks, the last one of 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    caches = torch.randn(2, 2, 1, num_tokens, 3, 8, generator=generator)
    facts = CacheFacts(
        rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0, compute_dtype=DType.F32
    )
    layers = (
        CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in caches
    )
    section = Section((0, 1), CacheView(tuple(layers), facts, dense=True), None)
    tokens = np.random.default_rng(seed).integers(0, 1000, num_tokens)
    for start, stop in store.spans(num_tokens):
        part = store.capture(tokens, start, stop, [section])
        assert part is not None
        store.commit(part)


def kvx(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def listed(path: Path, *arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kvx("ls", path, "--json", *arguments).stdout)
    return found


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two models; the first has two salts."""
    save(prefix_store(tmp_path), 1)
    save(prefix_store(tmp_path), 2)
    save(prefix_store(tmp_path, salt="tenant"), 3)
    save(prefix_store(tmp_path, "b"), 4)
    return tmp_path


def test_ls_and_stat(path: Path) -> None:
    spaces = {(s["model"], s["has_default_salt"]): s for s in listed(path)}
    assert spaces.keys() == {("a" * 64, True), ("a" * 64, False), ("b" * 64, True)}
    first = spaces["a" * 64, True]
    assert (first["num_files"], first["num_entries"], first["num_tokens"]) == (6, 6, 80)
    assert first["precisions"] == ["f32"]
    lines = kvx("ls", path).stdout.splitlines()
    assert lines[0].split() == [
        *("space", "model", "salt", "entries", "tokens", "size", "precision", "last", "used"),
    ]
    assert len(lines) == 4
    totals = json.loads(kvx("stat", path, "--json").stdout)
    assert totals["num_files"] == len(files(path)) == 12
    assert (totals["num_spaces"], totals["num_models"], totals["num_tokens"]) == (3, 2, 160)
    assert totals["bytes"] == sum(f.stat().st_blocks * 512 for f in files(path))
    assert totals["free_bytes"] > 0
    assert "free" in kvx("stat", path).stdout


@pytest.mark.parametrize("columns", [130, 60])
def test_on_a_terminal(columns: int, path: Path) -> None:
    """Nothing is cut off, and progress leaves nothing behind."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [sys.executable, "-c", "from kvx_adapters.cli import main; main()", "store", "ls", path],
        env=os.environ | {"COLUMNS": str(columns), "TERM": "xterm", "PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
    os.close(ours)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    *_, head, first, second, third = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert head.split()[:3] == ["space", "model", "salt"]
    assert all(line.endswith("s ago") for line in (first, second, third))
    assert "…" not in text
    assert max(map(len, (head, first, second, third))) <= columns


def test_verify(path: Path) -> None:
    assert kvx("verify", path).stdout == "12 of 12 files are good.\n"
    bad = files(path)[5]
    raw = bytearray(bad.read_bytes())
    raw[-1] ^= 1
    bad.write_bytes(raw)
    files(path)[7].write_bytes(b"no snapshot")
    other = files(path)[3]
    other.rename(other.with_name(other.name.replace(".l0-2.", ".l0-1.")))
    found = json.loads(kvx("verify", path, "--json", code=1).stdout)
    assert (found["num_files"], len(found["bad"]), found["deleted"]) == (12, 3, False)
    assert str(bad.relative_to(path)) in {wrong["file"] for wrong in found["bad"]}
    output = kvx("verify", path, "--delete", code=1).stdout
    assert "9 of 12 files are good." in output
    assert kvx("verify", path).stdout == "9 of 9 files are good.\n"


def test_rm_by_salt(path: Path) -> None:
    said = kvx("rm", path, "--salt", "tenant", "--dry-run").stdout
    assert said.startswith("Would delete 3 files, ")
    assert len(files(path)) == 12
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 3 files, ")
    assert [s["has_default_salt"] for s in listed(path)] == [True, True]
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 0 files, ")
    kvx("rm", path, "--salt", "", "--model", "bbbb")
    assert [s["model"] for s in listed(path)] == ["a" * 64]
    kvx("rm", path, "--salt", "")
    assert files(path) == []
    assert kvx("ls", path).stdout == f"{path} holds no entries.\n"


def test_rm_by_model_and_age(path: Path) -> None:
    old = files(path)[::2]
    for file in old:
        os.utime(file, (time.time() - 8 * DAY,) * 2)
    kvx("rm", path, "--older", "7d", "--model", "a")
    assert set(files(path)) & set(old) == {f for f in old if f in files(path)}
    (space,) = (s for s in listed(path) if s["model"] == "b" * 64)
    kvx("rm", path, "--older", "1w")
    assert not set(files(path)) & set(old)
    kvx("rm", path, "--model", space["space"][:10])
    assert {s["model"] for s in listed(path)} == {"a" * 64}


def test_trim_deletes_what_was_used_least_recently(path: Path) -> None:
    all_of_them = files(path)
    for age, file in enumerate(all_of_them):
        os.utime(file, (time.time() - age * DAY,) * 2)
    each = all_of_them[0].stat().st_blocks * 512
    all_bytes, gone = len(all_of_them) * each, len(all_of_them) - 5
    numbers = {"num_files": gone, "bytes": gone * each, "bytes_left": all_bytes - gone * each}
    for dry_run in (True, False):
        words = ["--json", "--dry-run"][: 1 + dry_run]
        said = json.loads(kvx("trim", path, 5 * each, *words).stdout)
        assert said == {"dry_run": dry_run} | numbers
        assert files(path) == (all_of_them if dry_run else all_of_them[:5])
    kvx("trim", path, "1GB")
    assert files(path) == all_of_them[:5]
    left = json.loads(kvx("rm", path, "--json", "--older", "90s").stdout)
    assert left["num_files"] == 4
    assert files(path) == all_of_them[:1]
    kvx("trim", path, "1B")
    assert files(path) == []


def test_signed_files(tmp_path: Path) -> None:
    path, key_file = tmp_path / "store", tmp_path / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    save(prefix_store(path, salt="tenant", key=KEY), 1)
    (space,) = listed(path)
    assert (space["is_signed"], space["model"]) == (True, None)
    assert "3 cannot be judged here" in kvx("verify", path, "--delete", code=1).stdout
    assert kvx("verify", path, "--key-file", key_file).stdout == "3 of 3 files are good.\n"
    said = kvx("rm", path, "--salt", "tenant", code=1)
    assert said.stdout.startswith("Deleted 0 files")
    assert "cannot be told (the last one is signed, and this reader has no key." in said.stderr
    # With a key, files that are not signed are seen, too.
    save(prefix_store(path, "b"), 2)
    both = {s["is_signed"]: s for s in listed(path, "--key-file", key_file)}
    assert (both[True]["model"], both[False]["model"]) == ("a" * 64, "b" * 64)
    kvx("rm", path, "--salt", "", "--key-file", key_file)
    assert kvx("rm", path, "--salt", "tenant", "--key-file", key_file).stdout.startswith(
        "Deleted 3 files"
    )
    assert files(path) == []


def test_a_pipeline_stage_alone_has_its_salt(path: Path) -> None:
    """Names say how many layers a file has, not how many the model has."""
    for file in files(path):
        file.rename(file.with_name(file.name.replace(".l0-2.", ".l0-1.")))
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 3 files")


def test_a_newer_version_wrote_it(path: Path) -> None:
    """It is neither good nor bad; --delete leaves it."""
    file = files(path)[0]
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    start = 8 + length
    body = re.sub(rb'"(\{\\"header\\":)', rb'"{\\"from_later\\":1,\\"header\\":', raw[8:start])
    body = body[body.index(b'"header"') :]
    num_tokens = int(re.findall(rb'"tokens":"(\d+)"', raw[:start])[0])
    tokens = raw[start : start + 8 * num_tokens]
    file.write_bytes(sealed(body, tokens, len(raw) - start, None) + raw[start:])
    found = json.loads(kvx("verify", path, "--delete", "--json", code=1).stdout)
    assert [wrong["file"] for wrong in found["unknown"]] == [str(file.relative_to(path))]
    assert "which this version of KVX does not know" in found["unknown"][0]["reason"]
    assert (found["num_good"], found["bad"], file.exists()) == (11, [], True)


def test_what_vanishes_meanwhile_is_not_bad(path: Path) -> None:
    inventory = Inventory(Directory(path))
    files(path)[4].unlink()
    assert [error for _, error in inventory.verify()] == [None] * 11


def test_hostile_names_and_headers(tmp_path: Path) -> None:
    """Names that claim a billion layers cost nothing; text in files does not reach a terminal."""
    save(prefix_store(tmp_path, salt="tenant"), 1)
    good = files(tmp_path)[0]
    store = PrefixStore(
        Directory(tmp_path),
        fingerprint="\x1b[2J\x07[red]\u202e",
        num_layers=2,
        total_kv_heads=3,
        precision=Precision.of(DType.F32),
        chunk_tokens=CHUNK,
    )
    save(store, 2)
    for layers in ("0-999999999", "0-900+0-900", "1000-1024"):
        good.with_name(good.name.replace(".l0-2.", f".l{layers}.")).write_bytes(good.read_bytes())
    for arguments in (("ls", tmp_path), ("rm", tmp_path, "--dry-run", "--model", "\x1b")):
        shown = kvx(*arguments).stdout
        assert all(letter.isprintable() for line in shown.splitlines() for letter in line)
    assert r"\x1b[2J\x07[red]\u202e" in kvx("ls", tmp_path).stdout
    assert json.loads(kvx("stat", tmp_path, "--json").stdout)["num_other_files"] == 2
    kvx("rm", tmp_path, "--salt", "tenant")
    assert json.loads(kvx("stat", tmp_path, "--json").stdout)["num_files"] == 3


def test_trim_deletes_what_dead_writers_left(path: Path) -> None:
    left = path / ".tmp" / ".0123456789abcdef-0.tmp"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half a file")
    os.utime(left, (time.time() - 2 * DAY,) * 2)
    kvx("trim", path, "1GB", "--dry-run")
    assert left.exists()
    kvx("trim", path, "1GB")
    assert not left.exists()
    assert len(files(path)) == 12


def test_lossy_formats_have_salts_too(tmp_path: Path) -> None:
    save(prefix_store(tmp_path, salt="tenant", format="f16"), 1)
    assert kvx("rm", tmp_path, "--salt", "").stdout.startswith("Deleted 0 files")
    assert kvx("rm", tmp_path, "--salt", "tenant").stdout.startswith("Deleted 3 files")


def test_what_is_not_kvx_stays(path: Path) -> None:
    (path / "notes").mkdir()
    (path / "notes/mine.txt").write_text("mine")
    (path / "link").symlink_to(path.parent)
    (path / ("0" * 64)).mkdir()
    (path / ("0" * 64) / "x.safetensors").write_bytes(b"")
    good = files(path)[-1]
    for raw in (b"", b"\xff" * 100, (1 << 62).to_bytes(8, "little")):
        good.with_name(good.name.replace(".l0-2.", ".l0-7.")).write_bytes(raw)
        assert len(listed(path)) == 3
        kvx("verify", path, code=1)
    assert json.loads(kvx("stat", path, "--json").stdout)["num_other_files"] == 2
    kvx("trim", path, "1B")
    assert (path / "notes/mine.txt").read_text() == "mine"
    assert (path / "kvx-store.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "path is nowhere, expected the directory of a store"),
        (("trim", ".", "much"), "to is 'much', expected a number of bytes greater than 0"),
        (("trim", ".", "0"), "to is '0', expected"),
        (("rm", "."), "expected at least one of them: what is to go"),
        (("rm", ".", "--model", ""), "model is '', expected the beginning of a model"),
        (("rm", ".", "--older", "soon"), "older is 'soon', expected a number and a unit"),
        (("verify", ".", "--key-file", "none"), "none"),
    ],
)
def test_wrong_input_is_one_sentence(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in kvx(*arguments, code=2).stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50GB", 50 * 10**9),
        ("1.5TiB", 3 << 39),
        ("512", 512),
        (7, 7),
        ("2 mib", 2 << 20),
        (5e10, 5 * 10**10),
    ],
)
def test_sizes(text: object, expected: int) -> None:
    assert num_bytes_of(text) == expected


@pytest.mark.parametrize("wrong", ["", "GB", "-1", "1e9", "1 XB", 0, -5, 1.5, None, True, "0.1"])
def test_no_sizes(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'50GB' or '1\.5TiB'"):
        num_bytes_of(wrong)


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
    assert first.warned() == ""

    _, directory = opened(tmp_path / "store")
    assert directory.max_bytes == limit
    third, directory = opened(tmp_path / "store", max_bytes="5GB")
    assert directory.max_bytes == 5 * 10**9
    assert ", at most 5.0 GB, " in third.told("a" * 64, 128)


def test_a_store_keeps_the_limit_of_the_engine_that_made_it(tmp_path: Path) -> None:
    opened(tmp_path, max_bytes="5GB")
    _, directory = opened(tmp_path)
    assert directory.max_bytes == 5 * 10**9


def test_a_store_of_an_earlier_version_keeps_what_it_has(tmp_path: Path) -> None:
    text = '{"format": 2, "chunk_tokens": 128}'
    (tmp_path / "kvx-store.json").write_text(text)
    settings, directory = opened(tmp_path)
    assert directory.max_bytes is None
    assert (tmp_path / "kvx-store.json").read_text() == text
    assert ", no limit, " in settings.told("a" * 64, 128)
    assert settings.warned().endswith("Set `max_bytes`, such as '50GB'")
    assert opened(tmp_path, max_bytes="5GB")[0].warned() == ""


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
    commands = [
        line.strip().partition("#")[0].split()
        for snippet in PAGE.snippets("bash")
        for line in snippet.splitlines()
        if line.strip().startswith("kvx store")
    ]
    assert {words[2] for words in commands} == {"ls", "stat", "verify", "trim", "rm"}
    for words in commands:
        assert words[3] == "/srv/kvx", words
        given = [word.strip("'") for word in words[4:]]
        kvx(words[2], path, *given, code=1 if "--model" in given else 0)  # it is not there


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


def test_a_month(tmp_path: Path) -> None:
    """Saves of 30 days stay within max_bytes, and are inspected, trimmed and emptied by salt."""
    most = 400 << 10
    store = prefix_store(tmp_path, max_bytes=most)
    shops = store, store.salted("shop")
    for day in range(30):
        for file in files(tmp_path):
            status = file.stat()
            os.utime(file, (status.st_atime - DAY, status.st_mtime - DAY))
        for i in range(4):
            save(shops[i % 2], seed=100 * day + i)
        totals = json.loads(kvx("stat", tmp_path, "--json").stdout)
        assert totals["bytes"] <= most
    assert totals["num_spaces"] == 2
    assert totals["least_recently_used_seconds"] >= 2 * DAY
    kvx("rm", tmp_path, "--older", "5d")
    assert json.loads(kvx("stat", tmp_path, "--json").stdout)["least_recently_used_seconds"] < (
        5 * DAY
    )
    kvx("verify", tmp_path)
    kvx("trim", tmp_path, "100kB")
    assert json.loads(kvx("stat", tmp_path, "--json").stdout)["bytes"] <= 100_000
    kvx("rm", tmp_path, "--salt", "shop")
    assert all(space["has_default_salt"] for space in listed(tmp_path))
    kvx("rm", tmp_path, "--salt", "")
    assert files(tmp_path) == []


@pytest.mark.parametrize("num_entries", [2400, pytest.param(30_000, marks=pytest.mark.slow)])
def test_a_large_store(num_entries: int, tmp_path: Path) -> None:
    """Two weeks bring a tenth more than fits; then it is inspected, trimmed and emptied by salt.

    Most files are copies of a saved one, under names of their own.
    """
    stores = [prefix_store(tmp_path, salt=salt) for salt in ("", "shop")]
    for seed, store in enumerate(stores):
        save(store, seed, CHUNK)
    models = [(file.relative_to(tmp_path), file.read_bytes()) for file in files(tmp_path)]
    most = num_entries * (files(tmp_path)[0].stat().st_blocks * 512)
    weekly = num_entries * 11 // 20
    for week in range(2):
        used = time.time() - (2 - week) * 7 * DAY
        for i in range(weekly):
            like, raw = models[i % 2]
            node, entry = (
                hashlib.sha256(b"%s %d %d" % (kind, week, number)).hexdigest()
                for kind, number in ((b"node", i // 32), (b"entry", i))
            )
            folder = tmp_path / like.parts[0] / node / like.parts[2]
            if i % 32 < 2:
                folder.mkdir(parents=True)
            file = folder / f"{CHUNK}-{entry}{like.name[like.name.index('.') :]}"
            file.write_bytes(raw)
            os.utime(file, (used, used))
        # A server starts, saves a prompt, and so trims.
        save(prefix_store(tmp_path, max_bytes=most), 100 + week, CHUNK)
    totals = json.loads(kvx("stat", tmp_path, "--json").stdout)
    assert totals["bytes"] <= most
    assert totals["num_entries"] > num_entries * 8 // 10
    assert [space["num_files"] > num_entries // 3 for space in listed(tmp_path)] == [True, True]
    said = kvx("rm", tmp_path, "--older", "8d", "--dry-run").stdout
    assert said.startswith("Would delete ")
    assert json.loads(kvx("stat", tmp_path, "--json").stdout)["num_files"] == totals["num_files"]
    kvx("trim", tmp_path, most // 10)
    assert kvx("verify", tmp_path).stdout.endswith(" files are good.\n")
    kvx("rm", tmp_path, "--salt", "shop")
    (space,) = listed(tmp_path)
    assert space["has_default_salt"]
    assert 0 < space["bytes"] <= most // 10
    kvx("rm", tmp_path, "--salt", "")
    assert files(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_folders_that_cannot_be_read_are_named() -> None:
    path = Path(tempfile.mkdtemp())
    try:
        save(prefix_store(path), 1)
        save(prefix_store(path, "b"), 2)
        for folder in (path, *path.rglob("*")):
            folder.chmod(0o755 if folder.is_dir() else 0o644)
        hidden = path / files(path)[0].relative_to(path).parts[0]
        hidden.chmod(0o700)
        os.seteuid(65534)
        try:
            result = kvx("stat", path, "--json")
        finally:
            os.seteuid(0)
        expected = f"1 folder cannot be read, and nothing in there is counted: {hidden.name} (Perm"
        assert expected in result.stderr
        totals = json.loads(result.stdout)
        assert (totals["num_files"], totals["num_unread_folders"]) == (3, 1)
    finally:
        shutil.rmtree(path)
