"""Chooses the files that a directory deletes to make room."""

from __future__ import annotations

from collections.abc import Sequence

File = tuple[float, int, str]  # time of last use, bytes on the disk, name

_RECORDS = (".json", ".mac")  # entries cannot be read without these files
_NO_ENTRIES = (*_RECORDS, ".mark")
_LONE_SECONDS = 24 * 3600  # a writer may be about to use records that have no entries yet


def is_entry(name: str) -> bool:
    """True if a file is neither a record nor a mark: an entry, or a file of somebody else."""
    return not name.endswith(_NO_ENTRIES)


def evictable(files: Sequence[File]) -> list[File]:
    """Returns the files that may be deleted, in the same order: all but the records of spaces."""
    return [file for file in files if not file[2].endswith(_RECORDS)]


def lone_records(files: Sequence[File], now: float) -> list[File]:
    """Returns the records that nobody has used for a day, of spaces without entries.

    now: the time by the clock that set the times of last use
    """
    in_use = {_space(name) for _, _, name in files if is_entry(name)}
    return [
        (used, num_bytes, name)
        for used, num_bytes, name in files
        if name.endswith(_RECORDS) and used < now - _LONE_SECONDS and _space(name) not in in_use
    ]


def _space(name: str) -> str:
    return name.partition("/")[0]
