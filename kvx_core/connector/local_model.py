"""The directory of a model's files on this machine."""

from __future__ import annotations

from pathlib import Path

from kvx_core.errors import UnsupportedError


def local_model(name: str, revision: str | None, way_out: str, *, cache: str | None = None) -> Path:
    """The directory of a model: `name` is one, or a model of the hub that has been fetched.

    way_out: what the user can do if there is none
    cache:   the hub's cache directory; None: its default
    Raises UnsupportedError.
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
