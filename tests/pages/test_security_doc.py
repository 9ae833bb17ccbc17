"""docs/security.md: its limits are those of the code, and nothing that it excludes is imported."""

from __future__ import annotations

import ast

import pytest

from kvx_core._c import os_files
from kvx_core.connector import boundary, scoped
from kvx_core.snapshot import pieces, record, secrets
from kvx_core.stores import config, covers, index, kinds, marks, names, root, space, walk
from tests.documents import Document
from tests.native import ROOT

TEXT = " ".join(Document("security.md").text.split())
# The command is left out: it may run what the person who calls it asks for.
SOURCES = [
    path
    for package in ("kvx_core", "kvx_adapters")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "cli" not in path.parts
]
# Modules that load code from data, open sockets, or start programs.
EXCLUDED = {
    *("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "runpy"),
    *("socket", "socketserver", "http", "urllib", "ftplib", "requests", "httpx", "asyncio"),
    *("subprocess", "multiprocessing", "pty"),
}


@pytest.mark.parametrize(
    ("sentence", "limit"),
    [
        ("A snapshot has a header of at most {} MiB", record.MAX_HEADER_BYTES >> 20),
        ("at most {} GiB of keys and values", record.MAX_FILE_BYTES >> 30),
        ("records have at most {} MiB", space.MAX_BYTES >> 20),
        ("in pieces of at most {} MiB", pieces.MOST_BYTES >> 20),
        ("asks for at most {} kinds of files", covers._MOST_ASKED),
        ("and {} marks, by name", names.RUNGS),
        ("of the last {} prefixes", walk._CLOSE),
        ("in the last {} chunks", walk._NEAR),
        ("{:,} names of each sort", index._MAX_NAMES),
        ("{:,} tokens of marks (16 MB)", marks._MOST_HELD),
        ("{} kinds of a space", kinds._MOST),
        ("{:,} salts", scoped._MAX_SCOPES),
        ("chunks of {} to", config.MIN_CHUNK_TOKENS),
        ("to {:,} tokens, or what the settings ask for", config.MOST_CHUNK_TOKENS),
        ("each of at most {} kinds", boundary._MAX_KINDS),
        ("at most {:,} characters of what a file says", boundary._MAX_CHARS),
        ("at least {} random bytes", secrets._MIN_BYTES),
        ("{:04o} unless `group` says more", root.MODES["none"][0]),
    ],
)
def test_a_limit(sentence: str, limit: int) -> None:
    assert sentence.format(limit) in TEXT


def test_nothing_loads_code_opens_sockets_or_starts_programs() -> None:
    assert len(SOURCES) > 100
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            found = {name.partition(".")[0] for name in names} & EXCLUDED
            assert not found, (path, found)
            called = node.func if isinstance(node, ast.Call) else None
            assert not (isinstance(called, ast.Name) and called.id in ("eval", "exec")), path


def test_nothing_reads_gguf_files() -> None:
    """Says the page; `kvx demo` writes one, which llama.cpp reads."""
    assert "GGUF files are read by llama.cpp" in TEXT
    for path in SOURCES:
        assert "GGUFReader" not in path.read_text(), path


def test_the_file_systems_that_are_told() -> None:
    names = {"_EXT4": "ext4", "_XFS": "XFS", "_BTRFS": "Btrfs", "_F2FS": "F2FS"}
    known = {getattr(os_files, name) for name in (*names, "_OVERLAY")}
    assert known == os_files._TELL_OF_MAPPED_WRITES
    assert f"only on {', '.join(names.values())} and overlays of them" in TEXT
