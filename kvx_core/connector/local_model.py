"""Finds the directory of a model's files on this machine."""

from __future__ import annotations

from pathlib import Path

from kvx_core.errors import UnsupportedError


def local_model(name: str, revision: str | None, way_out: str, *, cache: str | None = None) -> Path:
    """Returns the directory of a model's files.

    name:    a directory, or the name of a hub model that is in the cache
    way_out: ends the error message: it tells the user what to do without a local copy
    cache:   the hub's cache directory; None: the hub's default
    Raises UnsupportedError if this machine has no copy of the model.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UnsupportedError(
            f"model is {name!r}, of which no local copy was found ({error}). {way_out}"
        ) from None
