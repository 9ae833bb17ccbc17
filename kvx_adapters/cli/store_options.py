"""What the commands of `kvx store` share: their options, opening a store, progress and errors."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from kvx_core import InvalidArgumentError, KvxError
from kvx_core.errors import printable
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores import Directory, StoreError, read_key
from kvx_core.stores.blob_store import ListedStore
from kvx_core.stores.inventory import Inventory
from kvx_core.stores.tiers import Tiers
from kvx_core.stores.tiers.levels import far_store

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SETTING, _OPTION = "Give the key: encryption_key_files", "Give the key: --encryption-key-file"
_SAID = 5  # folders in a warning
_SECONDS = 60.0  # for a call to an object store

StorePath = Annotated[
    str, typer.Argument(help="The directory, or s3://bucket/prefix: a tier of the connector.")
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file", help="Its secret signs the files: `key_files`. Several: the new one first."
    ),
]
EncryptionKeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--encryption-key-file",
        help="Its secret encrypts the files: `encryption_key_files`. Several: the new one first.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Beginning of a model or of a space, as ls shows them.")
]
Salt = Annotated[str | None, typer.Option(help="Of this salt; '' is that of none.")]
Epoch = Annotated[
    str | None,
    typer.Option(help="Beginning of an epoch; '' is that of the weights in the model's files."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")]


def place_of(path: str) -> ListedStore:
    """The place that PATH names: a directory, or an object store. Raises InvalidArgumentError."""
    if "://" not in path:
        return Directory(Path(path))
    return far_store(*Tiers.parse([path]).urls, deadline=_SECONDS)


def opened(path: str, secrets: Secrets | None = None) -> Inventory:
    """What a store has. Says on the error stream which folders cannot be read.

    Raises InvalidArgumentError, StoreError.
    """
    place = place_of(path)
    if place.root is not None and not place.root.is_dir():
        raise StoreError(
            f"PATH is {path}, expected the directory of a store: `path` of the connector's settings"
        )
    with Console(stderr=True).status("reading the names of files"):
        found = Inventory(place, secrets)
    if found.unread:
        num, more = len(found.unread), "" if len(found.unread) <= _SAID else ", ..."
        folders = printable(", ".join(found.unread[:_SAID]))
        print(
            f"{num:,} folder{'s' * (num > 1)} cannot be read, and nothing in there is counted: "
            f"{folders}{more}",
            file=sys.stderr,
        )
    return found


def secrets_of(
    key_files: Sequence[Path] | None, encryption_key_files: Sequence[Path] | None
) -> Secrets:
    """The secrets in files. Raises InvalidArgumentError, UnsupportedError."""
    keys = [read_key(path, "--key-file") for path in key_files or ()]
    others = [read_key(path, "--encryption-key-file") for path in encryption_key_files or ()]
    return Secrets.of(keys or None, others or None)


def check_model(model: str | None) -> None:
    """Raises InvalidArgumentError for a beginning that every name has."""
    if model == "":
        raise InvalidArgumentError(
            "--model is '', expected the beginning of a model or of a space; every name begins so"
        )


def seconds_of(text: str) -> float:
    """The time of --older. Raises InvalidArgumentError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw])", text)
    if found is None:
        raise InvalidArgumentError(
            f"--older is {text!r}, expected a number and a unit: 90s, 30m, 12h, 7d or 4w"
        )
    return float(found[1]) * _AGES[found[2]]


def size_text(num_bytes: int) -> str:
    """A number of bytes, as people read it: 1.2 GB."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000 or unit == "PB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def age_text(used: float) -> str:
    """How long ago a time was."""
    return span_text(max(0.0, time.time() - used))


def span_text(seconds: float) -> str:
    """A time, in one unit."""
    unit = next((u for u in reversed(_AGES) if seconds >= 2 * _AGES[u]), "s")
    return f"{seconds / _AGES[unit]:.0f}{unit}"


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Progress on a terminal's error stream."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def console() -> Console:
    """The output. Piped, lines are as long as they are."""
    found = Console()
    return found if found.is_terminal else Console(width=240)


@contextmanager
def errors() -> Iterator[None]:
    """An error of KVX is one sentence, and exit status 2."""
    try:
        yield
    except (KvxError, OSError) as error:
        text = printable(str(error)).replace(_SETTING, _OPTION)
        Console(stderr=True, soft_wrap=True).print(
            f"[red]kvx store:[/] {escape(text)}", highlight=False
        )
        raise typer.Exit(2) from None
