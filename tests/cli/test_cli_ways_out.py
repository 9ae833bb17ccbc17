"""`kvx`: where a sentence names a way out, the commands that it names are run.

Adapters have theirs in tests/ways_out.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from kvx_adapters.cli.commands import app
from tests.cli.stores import KEY, NEW_KEY, SECRET, prefix_store, save, two_models


class WayOut(NamedTuple):
    """A command that fails, and the commands that its sentence names, which do not."""

    refused: str
    sentence: str  # what it says; ... stands for anything
    way_out: tuple[str, ...]
    code: int = 2

    def __str__(self) -> str:
        return self.refused


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stores, keys, and what export has written."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("made")
        patch.chdir(folder)
        make(folder)
        yield folder


@pytest.fixture
def stores(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which commands run, a copy."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def make(folder: Path) -> None:
    two_models(folder / "store")
    save(prefix_store(folder / "signed", key=KEY), 1)
    save(prefix_store(folder / "encrypted", encryption_key=SECRET), 1)
    for name, secret in (("key", KEY), ("new", NEW_KEY), ("secret", SECRET), ("open", KEY)):
        Path(name).write_bytes(secret)
        Path(name).chmod(0o644 if name == "open" else 0o600)
    Path("short").write_bytes(b"much too short")
    Path("short").chmod(0o600)
    Path("file").write_text("mine")
    run("kvx store export store bb out")
    shutil.copytree("store", "forged")
    Path("forged").chmod(0o777)
    shutil.copytree("store", "broken")
    Path("broken/kvx-store.json").write_text('{"format": 2, "chunk_tokens": 16}')
    Path("model").mkdir()


def run(line: str) -> tuple[int, str]:
    """The exit status of a command, and what it says, in one line."""
    if not line.startswith("kvx "):
        done = subprocess.run(["bash", "-c", line], check=False)
        return done.returncode, ""
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


IN_A_STORE = "Expected `path` of the connector's settings"
WAYS_OUT = [
    WayOut(
        "kvx store ls nowhere",
        "PATH is nowhere, expected the directory of a store: `path` of the connector's settings",
        ("kvx store ls store",),
    ),
    WayOut("kvx store stat .", IN_A_STORE, ("kvx store stat store",)),
    WayOut(
        "kvx store rm store --model cc",
        "no name here begins so. `kvx store ls store` lists them",
        ("kvx store ls store", "kvx store rm store --model bb"),
        code=1,
    ),
    WayOut(
        "kvx store rm store",
        "none of --salt, --model, --epoch and --older is given, expected at least one of them",
        (
            "kvx store rm store --older 4w",
            "kvx store rm store --salt tenant",
            "kvx store rm store --epoch ''",
        ),
    ),
    WayOut(
        "kvx store rm store --older soon",
        "expected a number and a unit: 90s, 30m, 12h, 7d or 4w",
        tuple(f"kvx store rm store --older {time}" for time in ("90s", "30m", "12h", "7d", "4w")),
    ),
    WayOut(
        "kvx store trim store much",
        "expected a number of bytes greater than 0, such as 50000000000, '50GB' or '1.5TiB'",
        tuple(f"kvx store trim store {size}" for size in ("50000000000", "'50GB'", "'1.5TiB'")),
    ),
    WayOut(
        "kvx store verify signed",
        "6 cannot be judged here: they stay. Give --key-file",
        ("kvx store verify signed --key-file key",),
        code=1,
    ),
    WayOut(
        "kvx store verify encrypted",
        "6 cannot be judged here: they stay. Give --encryption-key-file",
        ("kvx store verify encrypted --encryption-key-file secret",),
        code=1,
    ),
    WayOut(
        "kvx store verify encrypted --key-file key",
        "Give the key: --encryption-key-file, or use another directory",
        ("kvx store verify encrypted --encryption-key-file secret",),
    ),
    WayOut(
        "kvx store verify signed --key-file new",
        "Give the key that the store was made with, or use another directory",
        ("kvx store verify signed --key-file key",),
    ),
    WayOut(
        "kvx store verify store --key-file none",
        "Make it with: (umask 077; head -c 32 /dev/urandom > none)",
        (
            "(umask 077; head -c 32 /dev/urandom > none)",
            "kvx store import made out --chunk-tokens 16 --key-file none --unsigned",
        ),
    ),
    WayOut(
        "kvx store verify signed --key-file open",
        "others must not read it. Run: chmod 600 open",
        ("chmod 600 open", "kvx store verify signed --key-file open"),
    ),
    WayOut(
        "kvx store import made out --chunk-tokens 16 --unsigned --key-file short",
        "expected 32 to 4096. Make it with: (umask 077; head -c 32 /dev/urandom > short)",
        (
            "(umask 077; head -c 32 /dev/urandom > short)",
            "kvx store import made out --chunk-tokens 16 --unsigned --key-file short",
        ),
    ),
    WayOut(
        "kvx store export store bb out",
        "FOLDER is out, which exists, expected a new folder",
        ("kvx store export store bb out2",),
    ),
    WayOut(
        "kvx store export store cc new2",
        "MODEL is cc, expected ... `kvx store ls store` lists them",
        ("kvx store ls store", "kvx store export store bb new2"),
    ),
    WayOut(
        "kvx store export signed a new2",
        "3 entries were left out. Give --key-file",
        ("kvx store export signed a new3 --key-file key",),
        code=1,
    ),
    WayOut(
        "kvx store export encrypted a new2",
        "3 entries were left out. Give --encryption-key-file",
        ("kvx store export encrypted a new3 --encryption-key-file secret",),
        code=1,
    ),
    WayOut(
        "kvx store import made out",
        "PATH is made, expected the directory of a store. To make one: --chunk-tokens",
        ("kvx store import made out --chunk-tokens 16", "kvx store import made out"),
    ),
    WayOut(
        "kvx store import store file",
        "FOLDER is file, expected what `kvx store export` writes",
        ("kvx store export store bb out2", "kvx store import store out2"),
    ),
    WayOut(
        "kvx store import store out --chunk-tokens 32",
        "Leave it out, or use another directory",
        ("kvx store import store out", "kvx store import made out --chunk-tokens 32"),
    ),
    WayOut(
        "kvx store import made out --chunk-tokens 99999",
        "chunk_tokens is 99999, expected at most 65536",
        ("kvx store import made out --chunk-tokens 65536",),
    ),
    WayOut(
        "kvx store import made out --chunk-tokens 16 --key-file key",
        "Give it those of the writer, or take what is not signed: --unsigned",
        (
            "kvx store import made out --chunk-tokens 16 --key-file key --unsigned",
            "kvx store export signed a out2 --key-file key",
            "kvx store import made out2 --key-file key",
        ),
        code=1,
    ),
    WayOut(
        "kvx doctor --store file",
        "expected a directory: the setting `path`",
        ("kvx doctor --store store", "kvx doctor --store nowhere"),
        code=1,
    ),
    WayOut(
        "kvx doctor --store forged",
        "every user of this machine can forge what engines load: chmod o-w",
        ("chmod o-w forged", "kvx doctor --store forged"),
        code=1,
    ),
    WayOut(
        "kvx doctor --store broken",
        "of format 2, ... expected format 3. Delete the directory, or use another",
        ("kvx doctor --store store", "rm -r broken", "kvx doctor --store broken"),
        code=1,
    ),
    WayOut(
        "kvx doctor --model model",
        "expected the folder of a model, with config.json, or that file",
        (
            """echo '{"model_type": "llama"}' > model/config.json""",
            "kvx doctor --model model",
            "kvx doctor --model model/config.json",
        ),
        code=1,
    ),
    WayOut("kvx stroe ls store", "Did you mean 'store'?", ("kvx store ls store",)),
    WayOut("kvx store list store", "Try 'root store --help' for help", ("kvx store --help",)),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
@pytest.mark.usefixtures("stores")
def test_each_way_out_leads_out(case: WayOut) -> None:
    code, said = run(case.refused)
    assert code == case.code, said
    expected = re.escape(case.sentence).replace(r"\.\.\.", ".*")
    assert re.search(expected, said), said
    for line in case.way_out:
        code, said = run(line)
        assert code == 0, f"{line}: {said}"


@pytest.mark.usefixtures("stores")
def test_a_disk_that_is_almost_full_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the doctor says, with a size in place of SIZE."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 1000, 1000))
    code, said = run("kvx doctor --store store")
    assert code == 1
    (line,) = re.findall(r"`(kvx store trim .+ SIZE)`", said)
    code, said = run(line.replace("SIZE", "20kB"))
    assert code == 0
    assert said.startswith("Deleted ")
