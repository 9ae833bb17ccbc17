"""`kvx store copy`: the files of a store from one place to another, as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from kvx_adapters.cli.store import missing_model
from kvx_adapters.cli.store_options import (
    AsJson,
    Epoch,
    Model,
    Salt,
    StorePath,
    check_model,
    errors,
    opened,
    place_of,
    size_text,
    steps,
)
from kvx_core import InvalidArgumentError
from kvx_core.errors import printable
from kvx_core.stores import StoreError
from kvx_core.stores.blob_store import BlobStore, Content
from kvx_core.stores.config import read_config
from kvx_core.stores.inventory import Inventory
from kvx_core.stores.stored_kind import StoredFile

_THREADS = 16
_MOST_SAID = 20  # errors that are printed
_CONFIG = "kvx-store."  # how names of kvx-store.json and its MACs begin
_MOST_BYTES = 4096  # of one of these


def _copy(
    path: StorePath,
    to: Annotated[str, typer.Argument(help="A directory, or s3://bucket/prefix.")],
    model: Model = None,
    salt: Salt = None,
    epoch: Epoch = None,
    as_json: AsJson = False,
) -> None:
    """Copy files to another place, byte for byte. What is there already stays.

    No key is needed: signed and encrypted files are copied as they are. Exits with 1 if a file was
    not copied.
    """
    with errors():
        check_model(model)
        found, target = opened(path), place_of(to)
        spaces = found.spaces(salt=salt, model=model, epoch=epoch)
        if not spaces:
            raise InvalidArgumentError(
                missing_model(model, path) if model else f"{path} has nothing of it to copy"
            )
        _make(found, target)
        copied, failed, files = 0, list[str](), list[StoredFile]()
        for space in spaces:  # records come first, and marks when what they lead to is there
            files += [*space.records, *space.entries, *space.marks]
        num_bytes = 0
        with steps("copying", len(files)) as step:
            for file, result in _copied(found, target, files):
                step()
                if isinstance(result, StoreError):
                    failed.append(str(result))
                elif result:
                    copied += 1
                    num_bytes += file.num_bytes
    if as_json:
        facts: dict[str, Any] = {"num_files": len(files), "num_copied": copied, "bytes": num_bytes}
        print(json.dumps(facts | {"failed": failed}, indent=1))
    else:
        for reason in failed[:_MOST_SAID]:
            print(printable(reason))
        there = len(files) - copied - len(failed)
        print(f"Copied {copied:,} files, {size_text(num_bytes)}; {there:,} were there already.")
        if failed:
            print(f"{len(failed):,} files were not copied.")
    raise typer.Exit(1 if failed else 0)


def add_to(app: typer.Typer) -> None:
    """Makes it a command."""
    app.command("copy")(_copy)


def _make(found: Inventory, target: BlobStore) -> None:
    """Makes the target a store like the one that is copied. Raises StoreError if it is another."""
    config = read_config(target)
    if config is not None:
        wanted = found.config.chunk_tokens, found.config.is_encrypted
        if (config.chunk_tokens, config.is_encrypted) != wanted:
            raise StoreError(
                f"TO has chunk_tokens {config.chunk_tokens} and is "
                f"{'' if config.is_encrypted else 'not '}encrypted, expected {wanted[0]} and "
                f"{'' if wanted[1] else 'not '}encrypted, as PATH. Copy to another place"
            )
        return
    names = [name for name in found.blobs.names("") if name.startswith(_CONFIG)]
    for name in sorted(names, reverse=True):  # the MACs before what they are of
        target.put(name, Content.of(found.read(name, _MOST_BYTES)))


def _copied(
    found: Inventory, target: BlobStore, files: Sequence[StoredFile]
) -> Iterator[tuple[StoredFile, bool | StoreError]]:
    """Yields each file, with True if it is new there, or why it was not copied."""

    def content(name: str) -> list[memoryview]:
        with found.opened(name) as file:
            return [memoryview(file.read())]

    def copy(file: StoredFile) -> bool | StoreError:
        try:
            return target.put(file.name, Content(lambda: content(file.name)))
        except (StoreError, OSError) as error:
            return error if isinstance(error, StoreError) else StoreError(str(error))

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from zip(files, pool.map(copy, files), strict=True)
