"""content_digest: one digest of texts, bytes, files and directories."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvx_core.argument_checks import instance, text
from kvx_core.errors import InvalidArgumentError


def content_digest(*parts: bytes | str | Path) -> str:
    """SHA-256, as hex, of `parts` in order: equal only if every part is.

    parts: bytes and str stand for themselves (str as UTF-8); a Path for the content of a file, or
           of all files below a directory together with their names there.
    Raises OSError for a file that cannot be read, InvalidArgumentError for a path that is neither.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            content = _path_digest(part)
        else:
            instance("a part", part, (bytes, str), "bytes, a str or a pathlib.Path")
            data = text("a part", part).encode() if isinstance(part, str) else part
            content = hashlib.sha256(data).digest()
        digest.update(content)
    return digest.hexdigest()


def _path_digest(path: Path) -> bytes:
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    if not path.is_dir():
        raise InvalidArgumentError(f"content_digest: {path} is neither a file nor a directory")
    digest = hashlib.sha256()
    for file_path in sorted(found for found in path.rglob("*") if found.is_file()):
        digest.update(hashlib.sha256(file_path.relative_to(path).as_posix().encode()).digest())
        digest.update(_path_digest(file_path))
    return digest.digest()
