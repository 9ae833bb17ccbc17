"""`kvx store`: what a store of prefixes holds, whether it is good, and what is to go."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from kvx_adapters.cli.store_options import (
    AsJson,
    DryRun,
    EncryptionKeyFiles,
    Epoch,
    KeyFiles,
    Model,
    Salt,
    StorePath,
    age_text,
    check_model,
    console,
    errors,
    opened,
    seconds_of,
    secrets_of,
    size_text,
    span_text,
    steps,
)
from kvx_core import InvalidArgumentError
from kvx_core.errors import printable
from kvx_core.stores import CorruptError, Directory
from kvx_core.stores.inventory import Inventory, num_bytes_of
from kvx_core.stores.stored_kind import StoredFile, StoredKind
from kvx_core.stores.stored_space import Space

app = typer.Typer(help="Look into a store of prefixes, and delete from it.", no_args_is_help=True)

_SHOWN, _SHOWN_NARROW = 12, 8  # digits of hashes
_WIDE = 100  # columns of a terminal
_HASHES = ("space", "model", "salt", "kind")
_MOST_WORDS = 60  # characters of a text that is as long as a file says
_WIDE_ONLY = ("architecture", "epoch", "entries", "precision", "keys")
_COLUMNS: dict[str, Literal["left", "right"]] = {
    "space": "left",
    "model": "left",
    "architecture": "left",
    "epoch": "left",
    "salt": "left",
    "entries": "right",
    "tokens": "right",
    "states": "right",
    "size": "right",
    "precision": "left",
    "keys": "left",
    "last used": "left",
}
_OF_KINDS: dict[str, Literal["left", "right"]] = {
    "space": "left",
    "kind": "left",
    "holds": "left",
    "layers": "left",
    "heads": "left",
    "precision": "left",
    "keys": "left",
    "files": "right",
    "size": "right",
}


@app.command("ls")
def _ls(
    path: StorePath,
    model: Model = None,
    salt: Salt = None,
    epoch: Epoch = None,
    kinds: Annotated[
        bool, typer.Option("--kinds", help="A line for each kind of files: layers, heads.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List models and salts: entries, tokens, bytes, precisions, and when they were last used.

    A space is what a store has of one model, epoch of its weights, and salt. A salt cannot be read
    from it: SHA-256 of "kvx salt" and the salt is shown, and --salt finds that of a salt that you
    know. No key is needed.
    """
    with errors():
        check_model(model)
        found = opened(path)
        spaces = found.spaces(salt=salt, model=model, epoch=epoch)
    if as_json:
        print(json.dumps([_facts(found, space) for space in spaces], indent=1))
    elif not spaces:
        words = "no entries" if salt is model is epoch is None else "nothing of it"
        print(f"{printable(str(path))} holds {words}.")
    elif kinds:
        rows = [_kind_cells(space, kind) for space in spaces for kind in space.kinds.values()]
        _print_table(_OF_KINDS, rows)
    else:
        _print_table(_COLUMNS, [_cells(found, space) for space in spaces])
    for space in spaces:
        if space.reason and not as_json:
            print(printable(space.reason), file=sys.stderr)


@app.command("stat")
def _stat(path: StorePath, as_json: AsJson = False) -> None:
    """Show totals: files, entries, tokens, bytes, ages, and the space left on the disk.

    Reads the beginning of entries whose size does not tell how many tokens they have.
    """
    with errors():
        found = opened(path)
        facts = _totals(found)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        words = name.replace("_", " ").removeprefix("num ")
        if name.endswith("bytes"):
            value = "-" if value is None else size_text(value)
        elif name.endswith("seconds"):
            words, value = (
                words.removesuffix(" seconds"),
                "-" if value is None else span_text(value),
            )
        shown = f"{value:,}" if type(value) is int else {True: "yes", False: "no"}.get(value, value)
        table.add_row(words, escape(printable(str(shown))))
    console().print(table)


@app.command("verify")
def _verify(
    path: StorePath,
    key_files: KeyFiles = None,
    encryption_key_files: EncryptionKeyFiles = None,
    as_json: AsJson = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete files that are bad.")] = False,
) -> None:
    """Read every byte of every file. Exits with 0 if all are good, else with 1.

    A file that is signed or encrypted with a key that is not given, or whose kind cannot be read,
    is neither good nor bad, and stays.
    """
    with errors():
        found = opened(path, secrets_of(key_files, encryption_key_files))
        num_files = sum(len(space.files) for space in found.spaces())
        bad: list[tuple[StoredFile, str]] = []
        unknown: list[tuple[StoredFile, str]] = []
        num_good = 0
        with steps("verifying", num_files) as step:
            for file, error in found.verify():
                step()
                if error is None:
                    num_good += 1
                else:
                    group = bad if isinstance(error, CorruptError) else unknown
                    group.append((file, str(error).removeprefix(f"{found.where}/")))
        if delete:
            for _ in found.delete(file for file, _ in bad):
                pass
    num_files = num_good + len(bad) + len(unknown)  # without those that vanished meanwhile
    if as_json:
        facts: dict[str, Any] = {"num_files": num_files, "num_good": num_good, "deleted": delete}
        for name, group in (("bad", bad), ("unknown", unknown)):
            facts[name] = [{"file": file.name, "reason": reason} for file, reason in group]
        print(json.dumps(facts, indent=1))
    else:
        for _, reason in bad + unknown:
            print(printable(reason))
        print(f"{num_good:,} of {num_files:,} files are good.")
        if unknown:
            print(f"{len(unknown):,} cannot be judged here: they stay.{keys_that_help(found)}")
    raise typer.Exit(0 if num_good == num_files else 1)


def keys_that_help(found: Inventory) -> str:
    """Which keys would help."""
    spaces = found.spaces()
    options = []
    if not found.secrets.is_keyed and any(space.is_signed for space in spaces):
        options.append("--key-file")
    if not found.secrets.is_encrypted and any(space.is_encrypted for space in spaces):
        options.append("--encryption-key-file")
    return f" Give {' and '.join(options)}" if options else ""


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
    with errors():
        most = num_bytes_of(to, "TO")
        found = opened(path)
        spaces = found.spaces()
        files = [file for space in spaces for file in (*space.entries, *space.marks)]
        left, chosen = found.num_bytes, []
        for file in sorted(files, key=lambda file: file.used):
            if left <= most:
                break
            chosen.append(file)
            left -= file.num_bytes
        _delete(found, chosen, dry_run=dry_run, as_json=as_json)
        if not dry_run and isinstance(found.blobs, Directory):
            found.blobs.trim()


@app.command("rm")
def _rm(
    path: StorePath,
    salt: Salt = None,
    model: Model = None,
    epoch: Epoch = None,
    older: Annotated[
        str | None, typer.Option(help="Not used for this long: 90s, 30m, 12h, 7d, 4w.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete the files to which all that is given applies. No key is needed.

    Exits with 1 if a salt, model or epoch is asked for and there are files of which it cannot be
    told, or if there is no such model.
    """
    with errors():
        if salt is model is epoch is older is None:
            raise InvalidArgumentError(
                "none of --salt, --model, --epoch and --older is given, expected at least one of "
                "them: what is to go"
            )
        check_model(model)
        before = None if older is None else time.time() - seconds_of(older)
        found = opened(path)
        chosen, unknown = found.chosen(salt=salt, model=model, epoch=epoch, before=before)
        is_missing = model is not None and not found.spaces(model=model)
        if not is_missing:
            _delete(found, chosen, dry_run=dry_run, as_json=as_json)
    if is_missing:
        print(printable(missing_model(model, path)), file=sys.stderr)
    for space in unknown:
        name = space.name[:_SHOWN]
        print(
            f"{len(space.files):,} files of space {name} stay: what they are of cannot be told "
            f"({printable(space.reason)}). --model {name} alone deletes them",
            file=sys.stderr,
        )
    raise typer.Exit(1 if unknown or is_missing else 0)


def missing_model(model: str | None, path: object) -> str:
    """The sentence for a model that is not there."""
    return (
        f"--model is {model}, expected the beginning of a model or of a space: no name here "
        f"begins so. `kvx store ls {path}` lists them"
    )


def _delete(found: Inventory, files: list[StoredFile], *, dry_run: bool, as_json: bool) -> None:
    num_bytes = sum(file.num_bytes for file in files)
    num_entries = len({(file.space, file.key) for file in files if file.is_entry})
    if not dry_run:
        with steps("deleting", len(files)) as step:
            for _ in found.delete(files):
                step()
    left = found.num_bytes - num_bytes
    if as_json:
        facts = {
            "dry_run": dry_run,
            "num_entries": num_entries,
            "num_files": len(files),
            "bytes": num_bytes,
            "bytes_left": left,
        }
        print(json.dumps(facts))
        return
    would = "Would delete" if dry_run else "Deleted"
    entries = f"{num_entries:,} entr{'y' if num_entries == 1 else 'ies'}"
    freed, stays = size_text(num_bytes), size_text(left)
    print(f"{would} {entries} in {len(files):,} files, {freed}; {stays} stay.")


# ---- what is shown ----


def _facts(found: Inventory, space: Space) -> dict[str, Any]:
    record, tokens = space.record, found.tokens(space)
    return {
        "space": space.name,
        "model": record.fingerprint if record else None,
        "model_record": space.model or None,
        "epoch": record.epoch if record else None,
        "salt": record.salt if record else None,
        "lossy": record.lossy if record else None,
        "problem": space.reason or None,
        "is_signed": space.is_signed,
        "is_encrypted": space.is_encrypted,
        "num_files": len(space.files),
        "num_entries": space.num_entries,
        "num_states": space.num_states,
        "num_marks": len(space.marks),
        "num_tokens": sum(tokens.values()),
        "num_entries_of_unknown_length": space.num_entries - len(tokens),
        "bytes": space.num_bytes,
        "precisions": space.precisions,
        "last_used": space.used,
        "kinds": [_kind_facts(kind) for kind in space.kinds.values()],
    }


def _kind_facts(kind: StoredKind) -> dict[str, Any]:
    return {
        "kind": kind.id,
        "holds": "states" if kind.is_states else "tokens",
        "layers": [
            {"layers": part.words, "heads": list(part.heads), "precision": part.precision}
            for part in kind.layers
        ],
        "is_signed": kind.kind.keyed if kind.kind else None,
        "is_encrypted": kind.kind.encrypted if kind.kind else None,
        "problem": kind.reason or None,
        "num_files": len(kind.files),
        "bytes": sum(file.num_bytes for file in kind.files),
    }


def _cells(found: Inventory, space: Space) -> dict[str, str]:
    record, tokens = space.record, found.tokens(space)
    more = "+" if len(tokens) < space.num_entries else ""
    return {
        "space": space.name,
        "model": record.fingerprint if record else "?",
        "architecture": str(space.model.get("architecture", ""))[:_MOST_WORDS],
        "epoch": record.epoch[:_MOST_WORDS] if record else "?",
        "salt": (record.salt or "none") if record else "?",
        "entries": f"{space.num_entries:,}",
        "tokens": f"{sum(tokens.values()):,}{more}" if tokens or not more else "?",
        "states": f"{space.num_states:,}" if space.num_states else "",
        "size": size_text(space.num_bytes),
        "precision": " ".join(space.precisions)[:_MOST_WORDS],
        "keys": _keys(space.is_signed, space.is_encrypted),
        "last used": f"{age_text(space.used)} ago",
    }


def _kind_cells(space: Space, kind: StoredKind) -> dict[str, str]:
    parts = list(kind.layers)
    heads = dict.fromkeys(f"{first}-{last - 1}" for first, last in (p.heads for p in parts))
    return {
        "space": space.name,
        "kind": kind.id,
        "holds": "states" if kind.is_states else "",
        "layers": (" ".join(part.words for part in parts) or "?")[:_MOST_WORDS],
        "heads": (" ".join(heads) or "?")[:_MOST_WORDS],
        "precision": " ".join(sorted(kind.precisions))[:_MOST_WORDS],
        "keys": _keys(kind.kind.keyed, kind.kind.encrypted) if kind.kind else "?",
        "files": f"{len(kind.files):,}",
        "size": size_text(sum(file.num_bytes for file in kind.files)),
    }


def _keys(is_signed: bool, is_encrypted: bool) -> str:
    return " ".join(["signed"] * is_signed + ["encrypted"] * is_encrypted)


def _print_table(columns: dict[str, Literal["left", "right"]], rows: list[dict[str, str]]) -> None:
    """Columns without a word are left out."""
    output = console()
    is_narrow = output.width < _WIDE
    shown = _SHOWN_NARROW if is_narrow else _SHOWN
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column, justify in columns.items():
        if any(row[column] for row in rows) and not (is_narrow and column in _WIDE_ONLY):
            table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        cells = (str(column.header) for column in table.columns)
        table.add_row(
            *(escape(printable(row[c][:shown] if c in _HASHES else row[c])) for c in cells)
        )
    output.print(table)


def _totals(found: Inventory) -> dict[str, Any]:
    spaces = found.spaces()
    now, used = time.time(), [file.used for space in spaces for file in space.entries]
    tokens = [found.tokens(space, read=True) for space in spaces]
    return {
        "path": found.where if found.blobs.root is None else str(found.blobs.root.absolute()),
        "chunk_tokens": found.config.chunk_tokens,
        "max_bytes": found.config.max_bytes,
        "is_encrypted": found.config.is_encrypted,
        "num_spaces": len(spaces),
        "num_models": len({space.record.fingerprint for space in spaces if space.record}),
        "num_kinds": sum(len(space.kinds) for space in spaces),
        "num_files": sum(len(space.files) for space in spaces),
        "num_entries": sum(space.num_entries for space in spaces),
        "num_states": sum(space.num_states for space in spaces),
        "num_marks": sum(len(space.marks) for space in spaces),
        "num_tokens": sum(sum(each.values()) for each in tokens),
        "num_entries_of_unknown_length": sum(
            space.num_entries - len(each) for space, each in zip(spaces, tokens, strict=True)
        ),
        "bytes": found.num_bytes,
        "free_bytes": found.blobs.free_bytes() if isinstance(found.blobs, Directory) else None,
        "num_unread_records": sum(bool(space.reason) for space in spaces)
        + sum(bool(kind.reason) for space in spaces for kind in space.kinds.values()),
        "num_other_files": found.num_other_files,
        "num_unread_folders": len(found.unread),
        "last_used_seconds": max(0, round(now - max(used))) if used else None,
        "least_recently_used_seconds": max(0, round(now - min(used))) if used else None,
    }
