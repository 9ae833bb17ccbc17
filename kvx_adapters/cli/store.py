"""`kvx store`: what a store of prefixes holds, whether it is good, and what is to go."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kvx_core import InvalidArgumentError, KvxError
from kvx_core.errors import printable
from kvx_core.stores import CorruptError, Directory, StoreError, read_key
from kvx_core.stores.encrypted import Encryption
from kvx_core.stores.inventory import Inventory, Space, StoredFile, num_bytes_of

app = typer.Typer(help="Look into a store of prefixes, and delete from it.", no_args_is_help=True)

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SHOWN, _SHOWN_NARROW = 12, 8  # digits of hashes
_SAID = 5  # folders in a warning
_WIDE = 100  # columns of a terminal
_WIDE_ONLY = ("entries", "precision")
_COLUMNS: dict[str, Literal["left", "right"]] = {
    "space": "left",
    "model": "left",
    "salt": "left",
    "entries": "right",
    "tokens": "right",
    "size": "right",
    "precision": "left",
    "last used": "left",
}

StorePath = Annotated[Path, typer.Argument(help="The directory: `path` of the connector.")]
KeyFile = Annotated[Path | None, typer.Option(help="Its secret signs the files: key_file.")]
EncryptionKeyFile = Annotated[
    Path | None, typer.Option(help="Its secret encrypts the files: encryption_key_file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")]


@app.command("ls")
def _ls(
    path: StorePath,
    key_file: KeyFile = None,
    encryption_key_file: EncryptionKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """List models and salts: entries, tokens, bytes, precisions, and when they were last used.

    A space is the hash of a model, a salt and a key. A salt cannot be read from it.
    """
    with _errors():
        spaces = _inventory(path, key_file, encryption_key_file).spaces()
    if as_json:
        print(json.dumps([_facts(space) for space in spaces], indent=1))
        return
    console = _console()
    is_narrow = console.width < _WIDE
    shown = _SHOWN_NARROW if is_narrow else _SHOWN
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        if not is_narrow or column not in _WIDE_ONLY:
            table.add_column(column, justify=_COLUMNS[column], no_wrap=True)
    for space in spaces:
        cells = {
            "space": space.name[:shown],
            "model": escape(printable((space.fingerprint or "?")[:shown])),
            "salt": _salt(space),
            "entries": f"{space.num_entries:,}",
            "tokens": f"{space.num_tokens:,}",
            "size": size_text(space.num_bytes),
            "precision": " ".join(space.precisions),
            "last used": f"{_age(space.used)} ago",
        }
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    console.print(table if spaces else f"{path} holds no entries.")


@app.command("stat")
def _stat(
    path: StorePath,
    key_file: KeyFile = None,
    encryption_key_file: EncryptionKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show totals: files, entries, tokens, bytes, ages, and the space left on the disk."""
    with _errors():
        found = _inventory(path, key_file, encryption_key_file)
        spaces = found.spaces()
        facts = _totals(found, spaces)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        words = name.replace("_", " ").removeprefix("num ")
        if name.endswith("bytes"):
            value = size_text(value)
        elif name.endswith("seconds"):
            words, value = words.removesuffix(" seconds"), "-" if value is None else _span(value)
        table.add_row(words, f"{value:,}" if isinstance(value, int) else str(value))
    _console().print(table)


@app.command("verify")
def _verify(
    path: StorePath,
    key_file: KeyFile = None,
    encryption_key_file: EncryptionKeyFile = None,
    as_json: AsJson = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete files that are bad.")] = False,
) -> None:
    """Read every byte of every file. Exits with 0 if all are good, else with 1.

    A file that is signed with another key, or that a newer version wrote, is neither good nor bad,
    and stays.
    """
    with _errors():
        found = _inventory(path, key_file, encryption_key_file)
        num_files = sum(len(space.files) for space in found.spaces())
        bad: list[tuple[StoredFile, str]] = []
        unknown: list[tuple[StoredFile, str]] = []
        num_good = 0
        with _steps("verifying", num_files) as step:
            for file, error in found.verify():
                step()
                if error is None:
                    num_good += 1
                else:
                    group = bad if isinstance(error, CorruptError) else unknown
                    group.append((file, str(error).removeprefix(f"{found.directory.root}/")))
        if delete:
            for _ in found.delete(file for file, _ in bad):
                pass
    num_files = num_good + len(bad) + len(unknown)  # without those that vanished meanwhile
    if as_json:
        facts: dict[str, Any] = {"num_files": num_files, "num_good": num_good, "deleted": delete}
        for name, group in (("bad", bad), ("unknown", unknown)):
            facts[name] = [{"file": file.file.name, "reason": reason} for file, reason in group]
        print(json.dumps(facts, indent=1))
    else:
        for _, reason in bad + unknown:
            print(printable(reason))
        print(f"{num_good:,} of {num_files:,} files are good.")
        if unknown:
            print(f"{len(unknown):,} cannot be judged here: they stay.")
    raise typer.Exit(0 if num_good == num_files else 1)


@app.command("trim")
def _trim(
    path: StorePath,
    to: Annotated[str, typer.Argument(help="Bytes that may stay, such as 50GB or 1.5TiB.")],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete the least recently used files until the others have at most this many bytes.

    Also what writers left behind that died while they wrote.
    """
    with _errors():
        most = num_bytes_of(to, "to")
        found = _inventory(path, None, None)
        files = sorted(
            (file for space in found.spaces() for file in space.files), key=lambda file: file.used
        )
        left, chosen = found.num_bytes, []
        for file in files:
            if left <= most:
                break
            chosen.append(file)
            left -= file.num_bytes
        _delete(found, chosen, dry_run=dry_run, as_json=as_json)
        if not dry_run:
            found.directory.trim()


@app.command("rm")
def _rm(
    path: StorePath,
    salt: Annotated[str | None, typer.Option(help="Of this salt; '' is that of none.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Beginning of a model or of a space, as ls shows them.")
    ] = None,
    older: Annotated[
        str | None, typer.Option(help="Not used for this long: 90s, 30m, 12h, 7d, 4w.")
    ] = None,
    key_file: KeyFile = None,
    encryption_key_file: EncryptionKeyFile = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete the files to which all that is given applies.

    Exits with 1 if a salt or model is asked for and there are files of which it cannot be told, or
    if there is no such model.
    """
    with _errors():
        before = None if older is None else time.time() - _seconds(older)
        found = _inventory(path, key_file, encryption_key_file)
        chosen, unknown = found.chosen(salt=salt, model=model, before=before)
        is_missing = model is not None and not found.has_model(model)
        if not is_missing:
            _delete(found, chosen, dry_run=dry_run, as_json=as_json)
    if is_missing:
        print(
            f"model is {model}, expected the beginning of a model or of a space: no name here "
            f"begins so. `kvx store ls {path}` lists them",
            file=sys.stderr,
        )
    for space in unknown:
        name, reason = space.name[:_SHOWN], space.reason
        print(
            f"{len(space.files):,} files of space {name} stay: their salt and model cannot be told "
            f"(the last one {reason}). Give --key-file if they are signed; --model {name} without "
            "--salt deletes them",
            file=sys.stderr,
        )
    raise typer.Exit(1 if unknown or is_missing else 0)


def _inventory(path: Path, key_file: Path | None, encryption_key_file: Path | None) -> Inventory:
    if not path.is_dir():
        raise StoreError(
            f"path is {path}, expected the directory of a store: `path` of the connector's settings"
        )
    with Console(stderr=True).status("reading the names of files"):
        found = Inventory(
            Directory(path),
            None if key_file is None else read_key(key_file),
            _encryption(encryption_key_file),
        )
    if found.unread:
        num, more = len(found.unread), "" if len(found.unread) <= _SAID else ", ..."
        folders = printable(", ".join(found.unread[:_SAID]))
        print(
            f"{num:,} folder{'s' * (num > 1)} cannot be read, and nothing in there is counted: "
            f"{folders}{more}",
            file=sys.stderr,
        )
    return found


def _encryption(path: Path | None) -> Encryption | None:
    return None if path is None else Encryption(read_key(path, "encryption_key_file"))


def _delete(found: Inventory, files: list[StoredFile], *, dry_run: bool, as_json: bool) -> None:
    num_bytes = sum(file.num_bytes for file in files)
    if not dry_run:
        with _steps("deleting", len(files)) as step:
            for _ in found.delete(files):
                step()
    left = found.num_bytes - num_bytes
    if as_json:
        facts = {"dry_run": dry_run, "num_files": len(files), "bytes": num_bytes}
        print(json.dumps(facts | {"bytes_left": left}))
        return
    would = "Would delete" if dry_run else "Deleted"
    print(f"{would} {len(files):,} files, {size_text(num_bytes)}; {size_text(left)} stay.")


def _facts(space: Space) -> dict[str, Any]:
    return {
        "space": space.name,
        "model": space.fingerprint,
        "has_default_salt": space.has_salt("") if space.header and not space.is_signed else None,
        "is_signed": space.is_signed,
        "num_files": len(space.files),
        "num_entries": space.num_entries,
        "num_tokens": space.num_tokens,
        "bytes": space.num_bytes,
        "precisions": space.precisions,
        "last_used": space.used,
    }


def _totals(found: Inventory, spaces: list[Space]) -> dict[str, Any]:
    now, used = time.time(), [file.used for space in spaces for file in space.files]
    return {
        "path": str(found.directory.root.absolute()),
        "num_spaces": len(spaces),
        "num_models": len({space.fingerprint for space in spaces}),
        "num_files": sum(len(space.files) for space in spaces),
        "num_entries": sum(space.num_entries for space in spaces),
        "num_tokens": sum(space.num_tokens for space in spaces),
        "bytes": found.num_bytes,
        "free_bytes": found.directory.free_bytes(),
        "num_other_files": found.num_other_files,
        "num_unread_folders": len(found.unread),
        "last_used_seconds": max(0, round(now - max(used))) if used else None,
        "least_recently_used_seconds": max(0, round(now - min(used))) if used else None,
    }


def _salt(space: Space) -> str:
    if space.is_signed:
        return "signed"
    if space.header is None:
        return "?"
    return "none" if space.has_salt("") else "some"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw])", text)
    if found is None:
        raise InvalidArgumentError(
            f"older is {text!r}, expected a number and a unit: 90s, 30m, 12h, 7d or 4w"
        )
    return float(found[1]) * _AGES[found[2]]


def size_text(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000 or unit == "PB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _age(used: float) -> str:
    return _span(max(0.0, time.time() - used))


def _span(seconds: float) -> str:
    unit = next((u for u in reversed(_AGES) if seconds >= 2 * _AGES[u]), "s")
    return f"{seconds / _AGES[unit]:.0f}{unit}"


@contextmanager
def _steps(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Progress on a terminal's error stream."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _console() -> Console:
    """Piped, lines are as long as they are."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


@contextmanager
def _errors() -> Iterator[None]:
    """An error of KVX is one sentence, and exit status 2."""
    try:
        yield
    except (KvxError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(
            f"[red]kvx store:[/] {escape(str(error))}", highlight=False
        )
        raise typer.Exit(2) from None
