"""check_access: what can never be a store ends a start; what may pass does not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvx_core import Directory, InvalidArgumentError, StoreError
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import Precision
from kvx_core.stores.access import check_access

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter and read, and its owner may write."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_nobody(path: Path, *, writes: bool) -> str:
    """What check_access raises in a process of another user; "" if nothing."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        text = ""
        try:
            os.setgroups([])
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
            check_access(Directory(path), writes=writes)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def test_a_directory_and_one_that_is_not_made_yet(tmp_path: Path) -> None:
    check_access(Directory(tmp_path), writes=True)
    check_access(Directory(tmp_path / "not/yet"), writes=True)
    assert not list(tmp_path.iterdir())


def test_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = (
        f"path is {tmp_path}/file/store, made below {tmp_path}/file, which is a file, expected a "
        "directory. Name another path"
    )
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
        check_access(Directory(tmp_path / "file/store"), writes=False)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InvalidArgumentError, match=r"link, which cannot be read by user \d+: No "):
        check_access(Directory(tmp_path / "link"), writes=False)


@needs_root
def test_rights(folder: Path) -> None:
    expected = f"InvalidArgumentError: path is {folder}, which cannot be written by user {NOBODY}: "
    assert as_nobody(folder, writes=True).startswith(expected + "this user has no right to. ")
    below = as_nobody(folder / "store", writes=True)
    assert f"path is {folder}/store, made below {folder}, which cannot be written" in below
    assert as_nobody(folder, writes=False) == ""
    folder.chmod(0o700)
    assert f"{folder}, which cannot be read by user {NOBODY}: " in as_nobody(folder, writes=False)
    folder.chmod(0o777)
    assert as_nobody(folder, writes=True) == ""


@needs_root
def test_a_full_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    try:
        blobs = Directory(tmp_path / "store")
        (tmp_path / "fill").write_bytes(bytes(15 * 4096))
        check_access(blobs, writes=True)
        blobs.put("a/b", lambda file: file.write(bytes(10)))
        assert blobs.free_bytes() == 0
        check_access(blobs, writes=True)  # the next save deletes what is there
        blobs.delete("a/b")
        (tmp_path / "fill").write_bytes(bytes(16 * 4096))
        with pytest.raises(InvalidArgumentError, match=r"store, which is on a full disk, and no f"):
            check_access(blobs, writes=True)
        check_access(blobs, writes=False)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"format": 3, "chunk_tokens": 128}',
        '{"format": 3, "chunk_tokens": 1}',
        '{"format": 3, "chunk_tokens": 64, "encryption": "AES-256-GCM"}',
    ],
)
def test_what_a_file_of_the_store_says_ends_no_start(text: str, tmp_path: Path) -> None:
    """Whoever may write there can have written it: the engine runs without the store."""
    (tmp_path / "kvx-store.json").write_text(text)
    settings = StoreSettings(path=tmp_path, chunk_tokens=64)
    settings.check(writes=True)
    with pytest.raises(StoreError):
        settings.store(
            fingerprint="f", num_layers=1, total_kv_heads=1, precision=Precision.of("float32")
        )


def test_the_settings_alone(tmp_path: Path) -> None:
    """A chunk has 16 tokens at least, so that a prompt of thousands is not thousands of files."""
    StoreSettings(path=tmp_path, chunk_tokens=16)
    with pytest.raises(ValueError, match=r"chunk_tokens\n.* greater than or equal to 16"):
        StoreSettings(path=tmp_path, chunk_tokens=15)
