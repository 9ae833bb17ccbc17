"""Files that a directory deletes to make room: which of them, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

File = tuple[float, int, str]  # time of last use, bytes on the disk, name

_RECORDS = (".json", ".mac")  # what entries cannot be read without
_NO_ENTRIES = (*_RECORDS, ".mark")
_LONE_SECONDS = 24 * 3600  # a writer may be about to use records that no entry needs yet


def is_entry(name: str) -> bool:
    """Whether a file holds keys and values, or is one that no store of prefixes has made."""
    return not name.endswith(_NO_ENTRIES)


def evictable(files: Sequence[File]) -> list[File]:
    """Those that may be deleted, in their order: not the records of spaces."""
    return [file for file in files if not file[2].endswith(_RECORDS)]


def lone_records(files: Sequence[File], now: float) -> list[File]:
    """The records of spaces without entries that nobody has used for a day.

    now: by the clock of the times of last use
    """
    in_use = {_space(name) for _, _, name in files if is_entry(name)}
    return [
        (used, num_bytes, name)
        for used, num_bytes, name in files
        if name.endswith(_RECORDS) and used < now - _LONE_SECONDS and _space(name) not in in_use
    ]


def _space(name: str) -> str:
    return name.partition("/")[0]
