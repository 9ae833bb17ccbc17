"""`kvx store export` and `kvx store import`: between a store and a folder of snapshots."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvx_adapters.cli.store import keys_that_help, missing_model
from kvx_adapters.cli.store_exports import Export
from kvx_adapters.cli.store_imports import Import, folders_of
from kvx_adapters.cli.store_options import (
    AsJson,
    EncryptionKeyFiles,
    Epoch,
    KeyFiles,
    Salt,
    StorePath,
    errors,
    opened,
    place_of,
    secrets_of,
    size_text,
    steps,
)
from kvx_core import InvalidArgumentError
from kvx_core.errors import printable
from kvx_core.stores import Directory, StoreError
from kvx_core.stores.config import stored_config

_MOST_SAID = 20  # errors that are printed


def _export(
    path: StorePath,
    model: Annotated[
        str, typer.Argument(help="Beginning of a model or of a space, as ls shows them.")
    ],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    salt: Salt = None,
    epoch: Epoch = None,
    key_files: KeyFiles = None,
    encryption_key_files: EncryptionKeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Write prompts as snapshots: a folder for each space, a file for each prompt and kind.

    What prompts share is in the file of each. Snapshots are signed with the first --key-file; they
    are never encrypted. Exits with 1 if entries were left out.
    """
    with errors():
        if not model:
            raise InvalidArgumentError(
                "MODEL is '', expected the beginning of a model or of a space; every name begins so"
            )
        _check_new(folder)
        found = opened(path, secrets_of(key_files, encryption_key_files))
        spaces = found.spaces(salt=salt, model=model, epoch=epoch)
        if not spaces:
            raise InvalidArgumentError(missing_model(model, path).replace("--model", "MODEL"))
        exports = [(space, Export(found, space)) for space in spaces]
        _check_room(folder, sum(export.num_bytes for _, export in exports))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files: list[Path] = []
        with steps("exporting", sum(export.num_chains for _, export in exports)) as step:
            for space, export in exports:
                inner = folder / space.name
                inner.mkdir(mode=0o700)
                for new in export.write(inner):
                    files += new
                    step()
    if found.config.is_encrypted:
        print("The store is encrypted, and the snapshots are not: keep them safe.", file=sys.stderr)
    failed = [str(error) for _, export in exports for error in export.failed]
    num_bytes = sum(file.stat().st_size for file in files)
    if as_json:
        facts: dict[str, Any] = {
            "num_spaces": len(exports),
            "num_files": len(files),
            "bytes": num_bytes,
            "files": [str(file.relative_to(folder)) for file in files],
            "failed": failed,
        }
        print(json.dumps(facts, indent=1))
    else:
        _say(failed)
        print(
            f"{len(files):,} snapshots of {len(exports):,} space{'s' * (len(exports) > 1)}, "
            f"{size_text(num_bytes)}, in {printable(str(folder))}."
        )
        if failed:
            print(f"{len(failed):,} entries were left out.{keys_that_help(found)}")
    raise typer.Exit(1 if failed else 0)


def _import(
    path: StorePath,
    folder: Annotated[Path, typer.Argument(help="What export has written.")],
    chunk_tokens: Annotated[
        int | None,
        typer.Option(help="Makes a new store at PATH, with so many tokens in a full chunk."),
    ] = None,
    key_files: KeyFiles = None,
    encryption_key_files: EncryptionKeyFiles = None,
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Take snapshots that are not signed, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Store snapshots that export has written, cut into the chunks of this store.

    They keep model, epoch and salt. With --key-file they must be signed with one of the keys, and
    entries are signed with the first. Exits with 1 if a snapshot was left out.
    """
    with errors():
        secrets = secrets_of(key_files, encryption_key_files)
        if not folder.is_dir():
            raise StoreError(f"FOLDER is {folder}, expected what `kvx store export` writes")
        folders = folders_of(folder)
        place = place_of(path)
        if chunk_tokens is None and place.root is not None and not place.root.exists():
            raise StoreError(
                f"PATH is {path}, expected the directory of a store. To make one: --chunk-tokens"
            )
        if chunk_tokens is None:
            opened(path, secrets)
        if place.root is not None:
            place = Directory(place.root, group=_group(place.root))
        config = stored_config(place, secrets, chunk_tokens, chunk_tokens or 0)
        if config is None:
            raise StoreError(f"PATH is {path}, expected a directory that this user can write to")
        if isinstance(place, Directory):
            place.max_bytes = config.max_bytes
        imports = [
            Import(place, secrets, config.chunk_tokens, each, takes_unsigned=unsigned)
            for each in folders
        ]
        results = []
        with steps("importing", sum(len(each.paths) for each in imports)) as step:
            for each in imports:
                for result in each.run():
                    results.append(result)
                    step()
    failed = [str(result.error) for result in results if result.error]
    totals = {
        "num_files": len(results),
        "num_entries": sum(result.num_entries for result in results),
        "num_new_entries": sum(result.num_new for result in results),
        "bytes": sum(result.num_bytes for result in results),
    }
    if as_json:
        print(json.dumps(totals | {"failed": failed}, indent=1))
    else:
        _say(failed)
        print(
            f"{totals['num_new_entries']:,} of {totals['num_entries']:,} entries were new, "
            f"{size_text(totals['bytes'])}, from {totals['num_files']:,} snapshots."
        )
        if failed:
            print(f"{len(failed):,} snapshots were left out, or their ends.")
    raise typer.Exit(1 if failed else 0)


def add_to(app: typer.Typer) -> None:
    """Makes them commands."""
    app.command("export")(_export)
    app.command("import")(_import)


def _say(failed: list[str]) -> None:
    for reason in failed[:_MOST_SAID]:
        print(printable(reason))
    if len(failed) > _MOST_SAID:
        print(f"and {len(failed) - _MOST_SAID:,} more")


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgumentError(f"FOLDER is {folder}, which exists, expected a new folder")


def _check_room(folder: Path, num_bytes: int) -> None:
    above = next(each for each in folder.absolute().parents if each.exists())
    free = shutil.disk_usage(above).free
    if num_bytes > free:
        raise StoreError(
            f"FOLDER is {folder}, where {size_text(free)} are free, expected "
            f"{size_text(num_bytes)} for these snapshots. Export less: --salt, "
            "--epoch, or the beginning of a space"
        )


def _group(path: Path) -> Any:
    """What the group of a directory may do, as its mode says."""
    mode = path.stat().st_mode if path.exists() else 0
    return "write" if mode & stat.S_IWGRP else "read" if mode & stat.S_IRGRP else "none"
