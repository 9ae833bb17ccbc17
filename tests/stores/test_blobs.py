"""Directory: complete files or none, permissions, hostile folders, and full disks."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from kvx_core import Directory, InvalidArgumentError, StoreError
from kvx_core._c import os_files
from kvx_core.stores import beneath, new_files
from kvx_core.stores import blobs as blobs_module
from kvx_core.stores.usage import Used
from tests.descriptors import open_files

ENOSPC, EDQUOT = errno.ENOSPC, errno.EDQUOT
PAGE = 4096


def writing(data: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def fill(blobs: Directory, *names: str, size: int = PAGE) -> None:
    """Puts files, each used a second after the one before it, all of them long ago."""
    for i, name in enumerate(names):
        assert blobs.put(name, writing(bytes(size)))
        os.utime(blobs.root / name, (i + 1, i + 1))


def read(blobs: Directory, name: str) -> bytes | None:
    file = blobs.open(name)
    if file is None:
        return None
    with file:
        return file.read()


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*.tmp") if not path.is_dir()]


def modes(root: Path) -> set[tuple[str, str]]:
    kinds = {"d": "folder", "-": "file"}
    found = (stat.filemode(path.lstat().st_mode) for path in (root, *root.rglob("*")))
    return {(kinds[mode[0]], mode[1:]) for mode in found}


@pytest.fixture(params=[True, False], ids=["openat2", "by-folders"])
def resolver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with openat2, and those that have none."""
    if not request.param:
        monkeypatch.setattr(beneath, "_SYS_OPENAT2", 100_000)
        monkeypatch.setattr(beneath, "_read_file", lambda *_: (-errno.ENOSYS, 0, 0))


# --- All or nothing -------------------------------------------------------------------------------


def test_what_a_directory_is_made_of(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="group is 'all', expected 'none', 'read'"):
        Directory(tmp_path, group="all")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="expected a path without NUL"):
        Directory("a\0b")


def test_names_too_long_for_the_file_system(tmp_path: Path) -> None:
    blobs = Directory(tmp_path)
    assert blobs.open("x" * 300) is None
    assert blobs.names("x" * 300) == []
    with pytest.raises(StoreError, match=r"x cannot be written: File name too long"):
        blobs.put("x" * 300, writing(b""))


def test_a_root_that_is_deleted_and_made_again(tmp_path: Path) -> None:
    blobs = Directory(tmp_path / "up" / "root")
    for at in range(3):
        assert blobs.open("a/b") is None
        assert blobs.names("a") == []
        blobs.delete("a/b")
        assert blobs.trim() == 0
        assert blobs.put("a/b", writing(b"%d" % at))
        assert read(blobs, "a/b") == b"%d" % at
        (tmp_path / "up").rename(tmp_path / f"old{at}")


def test_a_root_that_is_deleted_while_a_file_is_written(tmp_path: Path) -> None:
    blobs, written = Directory(tmp_path / "root"), []

    def write(file: BinaryIO) -> None:
        file.write(b"data")
        if not written:
            shutil.rmtree(tmp_path / "root")
        written.append(file)

    assert blobs.put("a/b", write)
    assert len(written) == 2
    assert read(blobs, "a/b") == b"data"


def test_folders_that_vanish_while_a_file_is_written(tmp_path: Path) -> None:
    blobs = Directory(tmp_path)
    blobs.put("a/b/c", writing(b""))

    def write(file: BinaryIO) -> None:
        blobs.delete("a/b/c")
        assert not (tmp_path / "a").exists()
        file.write(b"data")

    assert blobs.put("a/b/d", write)
    assert read(blobs, "a/b/d") == b"data"


def test_every_folder_that_is_made_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def note(handle: int) -> None:
        fsync(handle)
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    monkeypatch.setattr(os, "fsync", note)
    blobs = Directory(tmp_path / "up" / "root")
    blobs.put("a/b/c", writing(b""))
    root = tmp_path / "up" / "root"
    assert {tmp_path, tmp_path / "up", root, root / "a", root / "a/b"} <= set(map(Path, synced))
    assert any(path.endswith(".tmp") for path in synced)
    synced.clear()
    blobs.put("a/b/d", writing(b""))
    assert len(synced) == 2
    assert synced[1] == str(root / "a/b")


def test_files_that_need_not_last_are_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise AssertionError("synced")

    blobs = Directory(tmp_path)
    blobs.put("first", writing(b""))
    for module, function in ((os, "fsync"), (new_files, "sync_file_system")):
        monkeypatch.setattr(module, function, fail)
    assert blobs.put("a/b/c", writing(b"data"), durable=False)
    assert not blobs.put("a/b/c", writing(b"other"), durable=False)
    assert read(blobs, "a/b/c") == b"data"
    assert blobs.replace("a/b/c", writing(b"other"), durable=False)
    assert read(blobs, "a/b/c") == b"other"
    assert not temporaries(tmp_path)


def test_a_file_that_another_writer_had_and_that_has_gone_was_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name was there when it was to be given, and nothing was when it was asked for."""
    blobs = Directory(tmp_path)
    assert blobs.put("a/b", writing(b"another's"))
    monkeypatch.setattr(new_files.NewFiles, "is_there", lambda files, place, name: False)
    assert not blobs.put("a/b", writing(b"data"), durable=False)
    assert read(blobs, "a/b") == b"another's"


def test_files_that_are_put_together_get_their_names_when_all_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, seen = Directory(tmp_path), []
    assert blobs.put("a/2", writing(b"old"))
    sync = new_files.sync_file_system

    def note(handle: int) -> None:
        sync(handle)
        complete = sum(path.stat().st_size == 3 for path in temporaries(tmp_path))
        seen.append((complete, len(list(tmp_path.glob("a/*")))))

    monkeypatch.setattr(new_files, "sync_file_system", note)
    monkeypatch.setattr(blobs_module, "syncs_together", lambda handle: True)
    names = [f"a/{i}" for i in range(5)]
    files = [(name, writing(b"new")) for name in (*names, "a/0")]
    assert blobs.put_all(files) == [True, True, False, True, True, False]
    assert seen == [(5, 1), (1, 5)]  # that of a name which another file had
    assert [read(blobs, name) for name in names] == [b"new", b"new", b"old", b"new", b"new"]
    assert not temporaries(tmp_path)
    assert blobs.trim() == 5 * PAGE
    assert blobs.usage.now.files == 5


@pytest.mark.parametrize("together", [True, False])
def test_a_file_that_fails_does_not_keep_others_from_being_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """As put does, each error is that of its own file."""
    monkeypatch.setattr(blobs_module, "syncs_together", lambda handle: together)
    blobs = Directory(tmp_path)
    blobs.put("file", writing(b""))

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise StoreError("no more")

    writes = [writing(b"%d" % i) for i in range(6)]
    names = ["a/0", "a/1", "file/2", "a/3", "a/4", "a/5"]
    writes[3] = fail
    put = blobs.put_all(list(zip(names, writes, strict=True)))
    assert [each is True for each in put] == [True, True, False, False, True, True]
    assert "file/2 cannot be written: Not a directory" in str(put[2])
    assert str(put[3]) == "no more"
    assert [read(blobs, name) for name in names] == [b"0", b"1", None, None, b"4", b"5"]
    assert not temporaries(tmp_path)
    with pytest.raises(InvalidArgumentError, match="the name of a blob"):
        blobs.put_all([(name, writing(b"")) for name in ("a/6", "a/7", "a/8", "../a")])


def test_a_sync_of_all_that_fails_is_tried_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(new_files, "sync_file_system", fail)
    monkeypatch.setattr(blobs_module, "syncs_together", lambda handle: True)
    blobs = Directory(tmp_path)
    assert blobs.put_all([(f"a/{i}", writing(b"x")) for i in range(4)]) == [True] * 4
    assert len(list(tmp_path.glob("a/*"))) == 4


def test_names_that_may_not_be_on_the_disk_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail_later(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(new_files, "sync_file_system", fail_later)
    monkeypatch.setattr(blobs_module, "syncs_together", lambda handle: True)
    put = Directory(tmp_path).put_all([(f"a/{i}", writing(b"x")) for i in range(4)])
    assert [str(each) for each in put] == [
        f"{tmp_path}/a/{i} cannot be written: Input/output error" for i in range(4)
    ]


def test_file_systems_that_sync_together(tmp_path: Path) -> None:
    """/dev/shm is a tmpfs; that of /proc is none that stores files."""
    for path, expected in (("/dev/shm", True), ("/proc", False)):
        handle = os.open(path, os.O_RDONLY)
        assert os_files.syncs_together(handle) is expected
        os.close(handle)
    blobs = Directory("/dev/shm/" + tmp_path.name)
    try:
        assert blobs.put_all([(f"a/{i}", writing(b"x")) for i in range(9)]) == [True] * 9
    finally:
        shutil.rmtree(blobs.root)


def test_what_is_used_is_known_without_a_walk(tmp_path: Path, monkeypatch: Any) -> None:
    blobs, other = Directory(tmp_path, max_bytes=10 * PAGE), Directory(tmp_path)
    fill(other, "a/1")
    assert blobs.usage.now == Used()
    fill(blobs, "a/2", "a/3", "a/4")  # counts after the first file
    with monkeypatch.context() as patch:
        patch.delattr(blobs_module, "_walk")
        assert blobs.usage.now == Used(4, 4 * PAGE)
        blobs.delete("a/2")
        blobs.delete("a/none")
        assert blobs.usage.now == Used(3, 3 * PAGE)
        fill(blobs, *(f"b/{i}" for i in range(6)))
        assert blobs.usage.now == Used(9, 9 * PAGE)
    fill(other, "c/1")
    fill(blobs, "c/2")  # makes room for both
    found = blobs.usage.now
    assert found.evicted_files == found.evicted_bytes // PAGE == 2
    assert (found.files, found.num_bytes) == (9, 9 * PAGE)
    assert len(other.files()) == 9


def test_nothing_stays_open(tmp_path: Path) -> None:
    blobs = Directory(tmp_path / "root", max_bytes=10 * PAGE)
    blobs.put("first", writing(b""))
    (tmp_path / "root" / "link").symlink_to("/")
    (tmp_path / "root" / "folder").mkdir()

    def fail(file: BinaryIO) -> None:
        raise RuntimeError

    before = open_files()
    for i in range(30):
        blobs.put(f"a/{i}", writing(bytes(PAGE)))
        blobs.put(f"a/{i}", writing(b""))
        read(blobs, f"a/{i}")
        for call in (
            lambda: blobs.open("none/none"),
            lambda: blobs.open("folder"),
            lambda: blobs.open("link/x"),
            lambda: blobs.names("a"),
            lambda: blobs.names("link"),
            lambda: blobs.delete("folder"),
            lambda: blobs.put("a/fail", fail),
            lambda: blobs.put("link/x", writing(b"")),
        ):
            with suppress(StoreError, RuntimeError):
                call()
    blobs.trim()
    assert not open_files() - before


def test_a_fork_while_another_thread_trims(tmp_path: Path) -> None:
    blobs = Directory(tmp_path, max_bytes=2 * PAGE)
    fill(blobs, "a/1", "a/2")
    with blobs._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            fill(blobs, "a/3", "a/4", "a/5")
            os._exit(len(blobs.names("a")))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (1, 2)


# --- For whom files are ---------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077, 0o777])
@pytest.mark.parametrize(
    ("group", "folder", "file"),
    [("none", "rwx------", "rw-------"), ("read", "rwxr-s---", "rw-r-----"),
     ("write", "rwxrws---", "rw-rw----")],
)  # fmt: skip
def test_modes_are_the_setting_s_whatever_the_umask(
    group: Any, folder: str, file: str, umask: int, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    old = os.umask(umask)
    try:
        Directory(root, group=group).put("a/b/c", writing(b""))
    finally:
        os.umask(old)
    assert modes(root) == {("folder", folder), ("file", file)}


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Directory(tmp_path).put("a/b", writing(b""))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_who_else_may_write_to_the_root(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings(**options: Any) -> str:
        caplog.clear()
        blobs = Directory(tmp_path, **options)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                blobs.names("")
        assert len(caplog.messages) < 2
        return " ".join(caplog.messages)

    said: list[int] = []
    tmp_path.chmod(0o755)
    assert not warnings()
    tmp_path.chmod(0o777)
    assert "has mode 0777: every user of this machine can forge" in warnings(group="write")
    tmp_path.chmod(0o770)
    of_group = f"has mode 0770: every user of group {os.getegid()} can forge"
    assert of_group in warnings()
    assert of_group in warnings(group="read")
    assert not warnings(group="write")
    tmp_path.chmod(0o700)
    blobs = Directory(tmp_path)
    with caplog.at_level(logging.WARNING):
        for mode in (0o700, 0o777, 0o777, 0o700, 0o770):  # it may be made again by somebody else
            caplog.clear()
            tmp_path.chmod(mode)
            blobs.names("")
            said.append(len(caplog.messages))
    assert said == [0, 1, 0, 0, 1]
    tmp_path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, -1)
        assert "belongs to user 65534, who can forge" in warnings()
        assert not warnings(group="write")


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    blobs = Directory(tmp_path / "root")
    (tmp_path / "root").touch()
    with pytest.raises(InvalidArgumentError, match=r"root is .*root, a file, expected a directory"):
        Directory(tmp_path / "root")
    for call in (
        lambda: blobs.open("a"),
        lambda: blobs.delete("a"),
        lambda: blobs.put("a", writing(b"")),
        blobs.trim,
    ):
        with pytest.raises(
            StoreError,
            match=r"root.* cannot be \w+: Not a directory\. A file lies where a directory is",
        ):
            call()
    assert blobs.names("") == []


def test_a_root_that_is_a_link(tmp_path: Path) -> None:
    """Whoever runs the engine has made it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to("elsewhere")
    blobs = Directory(tmp_path / "root")
    assert blobs.put("a/b", writing(b"data"))
    assert read(Directory(tmp_path / "elsewhere"), "a/b") == b"data"
    (tmp_path / "dangling").symlink_to("none")
    with pytest.raises(StoreError, match="cannot be written: No such file or directory"):
        Directory(tmp_path / "dangling").put("a", writing(b""))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_store_of_another_user(tmp_path: Path) -> None:
    for parent in (*list(tmp_path.parents)[:3], tmp_path):
        parent.chmod(0o755)
    private, shared = Directory(tmp_path / "private"), Directory(tmp_path / "shared", group="read")
    for blobs in (private, shared):
        blobs.put("a/b", writing(b"data"))
    os.setegid(0)
    os.seteuid(65534)
    try:
        with pytest.raises(
            StoreError, match=r"a/b cannot be read: Permission denied\. Give this user the right"
        ):
            private.open("a/b")
        assert read(shared, "a/b") == b"data"  # is in the group
        with pytest.raises(StoreError, match=r"a/c cannot be written: Permission denied"):
            shared.put("a/c", writing(b""))
        with pytest.raises(StoreError, match=r"a/b cannot be deleted: Permission denied"):
            shared.delete("a/b")
    finally:
        os.seteuid(0)


# --- What others put there ------------------------------------------------------------------------


@pytest.mark.usefixtures("resolver")
@pytest.mark.parametrize("where", ["a", "a/b", ".tmp"])
def test_folders_that_are_links_lead_nowhere(where: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    (outside / "c").write_text("precious")
    (outside / "b" / "c").write_text("precious")
    os.utime(outside / "b" / "c", (1, 1))
    root = tmp_path / "root"
    (root / where).parent.mkdir(parents=True)
    (root / where).symlink_to(outside)
    blobs = Directory(root, max_bytes=1)
    with pytest.raises(StoreError, match=r"a/b/d cannot be written: .*; delete it"):
        blobs.put("a/b/d", writing(b"data"))
    if where != ".tmp":
        assert blobs.open("a/b/c") is None
        assert blobs.names("a/b") == []
        blobs.delete("a/b/c")
    assert blobs.trim() == 0
    left = {path.relative_to(outside).as_posix() for path in outside.rglob("*")}
    assert left == {"b", "c", "b/c"}
    assert (outside / "b" / "c").read_text() == "precious"
    assert (outside / "b" / "c").stat().st_mtime == 1


@pytest.mark.usefixtures("resolver")
def test_a_root_that_gives_place_to_another(tmp_path: Path) -> None:
    """Files are opened in what has the root's name now, however it was when it was looked at."""
    blobs = Directory(tmp_path / "above" / "root")
    assert blobs.put("a/b", writing(b"one"))
    assert read(blobs, "a/b") == b"one"
    (tmp_path / "above").rename(tmp_path / "moved")
    assert blobs.open("a/b") is None
    (tmp_path / "above").symlink_to("moved")
    assert read(blobs, "a/b") == b"one"
    (tmp_path / "above").unlink()
    assert Directory(tmp_path / "above" / "root").put("a/b", writing(b"two"))
    assert read(blobs, "a/b") == b"two"
    for where in ("a", "a/b"):
        (tmp_path / "above" / "root" / where).rename(tmp_path / f"was-{len(where)}")
        (tmp_path / "above" / "root" / where).symlink_to(tmp_path / f"was-{len(where)}")
        assert blobs.open("a/b") is None
        (tmp_path / "above" / "root" / where).unlink()
        (tmp_path / f"was-{len(where)}").rename(tmp_path / "above" / "root" / where)
    assert read(blobs, "a/b") == b"two"


def things(root: Path) -> dict[str, Path]:
    """One of each kind that is no regular file, and what they may lead to."""
    root.mkdir()
    (root.parent / "victim").write_text("precious")
    (root.parent / "victim").chmod(0o600)
    os.utime(root.parent / "victim", (1, 1))
    (root / "link").symlink_to(root.parent / "victim")
    (root / "dangling").symlink_to(root.parent / "none")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "fifo")
    (root / "folder").mkdir()
    os.mkdir(root / "tree")
    (root / "tree" / "file").touch()
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(os.path.relpath(root / "socket"))
    try:
        os.mknod(root / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except OSError:
        (root / "device").symlink_to("/dev/zero")
    names = ["link", "dangling", "loop", "fifo", "folder", "tree", "socket", "device"]
    return {name: root / name for name in names}


@pytest.mark.usefixtures("resolver")
def test_what_is_no_file_is_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    blobs = Directory(tmp_path / "root", max_bytes=1)
    signal.alarm(60)  # a FIFO must not keep anybody
    for name, path in things(tmp_path / "root").items():
        assert blobs.open(name) is None
        with pytest.raises(
            StoreError, match=rf"{name} cannot be written: what lies there .*Delete"
        ):
            blobs.put(name, writing(b"data"))
        if name == "tree":
            with pytest.raises(StoreError, match="tree cannot be deleted: Is a directory"):
                blobs.delete(name)
        elif name != "folder":
            blobs.delete(name)
            assert not os.path.lexists(path)
    blobs.trim()
    signal.alarm(0)
    victim = tmp_path / "victim"
    assert victim.read_text() == "precious"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert victim.stat().st_mtime == 1
    assert not (tmp_path / "none").exists()


def test_hard_links_are_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / ".tmp").mkdir()
    os.link(victim, tmp_path / "root" / "a" / "b")
    os.link(victim, tmp_path / "root" / ".tmp" / ".0123456789abcdef-1.tmp")
    os.utime(victim, (1, 1))
    blobs = Directory(tmp_path / "root", max_bytes=1, group="write")
    assert not blobs.put("a/b", writing(b"data"))
    assert blobs.put("a/c", writing(b"data"))
    blobs.trim()
    assert victim.read_text() == "precious"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert victim.stat().st_nlink == 1


def test_a_file_that_is_replaced_by_a_link_while_it_is_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")

    def write(file: BinaryIO) -> None:
        (path,) = temporaries(tmp_path)
        path.unlink()
        path.symlink_to(victim)
        file.write(b"data")

    blobs = Directory(tmp_path / "root")
    blobs.put("a/b", write)
    assert blobs.open("a/b") is None
    assert victim.read_text() == "precious"
    assert victim.stat().st_nlink == 1


def test_links_among_the_temporary_files(tmp_path: Path) -> None:
    folder = tmp_path / "root" / ".tmp"
    folder.mkdir(parents=True)
    victim = tmp_path / "victim.tmp"
    victim.touch()
    os.utime(victim, (1, 1))
    (folder / ".link.tmp").symlink_to(victim)
    os.mkfifo(folder / ".fifo.tmp")
    (folder / ".folder.tmp").mkdir()
    blobs = Directory(tmp_path / "root")
    signal.alarm(60)
    assert blobs.put("a/b", writing(b""))
    assert blobs.trim() >= 0
    signal.alarm(0)
    assert victim.exists()


def test_names_that_nobody_has_put(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "a")
    Path(os.fsdecode(folder)).mkdir()
    for name in (b"good", b"new\nline", b"\xff\xfe", b"\xc3\xa9", b"esc\x1b[2J", b".hidden"):
        Path(os.fsdecode(folder + b"/" + name)).touch()
    assert Directory(tmp_path).names("a") == ["good"]
    assert Directory(tmp_path, max_bytes=1).trim() == 0


def test_a_folder_of_very_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvx_core.stores import blobs

    for i in range(30):
        (tmp_path / str(i)).touch()
    monkeypatch.setattr(blobs, "_MAX_NAMES", 10)
    assert len(Directory(tmp_path).names("")) == 10


def test_a_tree_deeper_than_names_are(tmp_path: Path) -> None:
    path = tmp_path
    for _ in range(400):
        path = path / "d"
    path.mkdir(parents=True)
    blobs = Directory(tmp_path, max_bytes=1)
    before = open_files()
    assert blobs.trim() == 0
    assert not open_files() - before
    assert blobs.put("a/b", writing(b""))


# --- Full disks and trimming ----------------------------------------------------------------------


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    blobs = Directory(tmp_path, max_bytes=10 * PAGE)
    fill(blobs, *(f"f{i}/name" for i in range(10)))
    assert len(blobs.names("")) == 10
    assert read(blobs, "f0/name") is not None  # is used now
    blobs.put("f10/name", writing(b"x" * PAGE))
    assert sorted(blobs.names("")) == sorted(f"f{i}" for i in (0, *range(3, 11)))
    assert blobs.trim() == 9 * PAGE


def test_records_stay_as_long_as_their_space_has_entries(tmp_path: Path) -> None:
    """However long ago they were used, and however full the disk is; marks go as entries do."""
    records = ["a/space.json", "a/space.0123456789abcdef.mac", "a/kinds/k.json", "a/kinds/k.9.mac"]
    blobs = Directory(tmp_path)
    fill(blobs, *records, "a/000/1.k", "a/000/1.mark", "a/001/2.k", "b/002/3.k")
    for i in range(4):
        assert blobs.put(f"c/{i}", on_a_disk_of(8 * PAGE, tmp_path, b"x" * PAGE, ENOSPC))
    assert [name for _, _, name in blobs.files()] == [*records, *(f"c/{i}" for i in range(4))]
    blobs.put("a/003/4.k", writing(bytes(PAGE)))
    assert blobs.trim() == 9 * PAGE
    blobs.max_bytes = 1
    assert blobs.trim() == 4 * PAGE  # the last entry has gone: so do its records, a day after
    assert [name for _, _, name in blobs.files()] == records
    os.utime(tmp_path / records[3])
    blobs.max_bytes = 1 << 40
    blobs.put("a/004/5.mark", writing(b"x"))
    assert blobs.trim() == 2 * PAGE
    assert {name for _, _, name in blobs.files()} == {records[3], "a/004/5.mark"}


def test_what_counts_is_what_is_allocated(tmp_path: Path) -> None:
    blobs = Directory(tmp_path, max_bytes=100 * PAGE)
    fill(blobs, *(f"a/{i}" for i in range(9)), size=100)
    blobs.put("a/sparse", lambda file: file.truncate(1 << 40) and None)
    assert blobs.trim() == 9 * PAGE
    assert len(blobs.names("a")) == 10


def test_a_file_system_that_says_nothing_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvx_core.stores import blobs as module

    monkeypatch.setattr(module, "allocated", lambda status: 0)
    blobs = Directory(tmp_path, max_bytes=10 * PAGE)
    fill(blobs, *(f"a/{i}" for i in range(20)))
    assert 8 * PAGE <= blobs.trim() <= 10 * PAGE


def on_a_disk_of(num_bytes: int, root: Path, data: bytes, code: int) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        if used + len(data) > num_bytes:
            file.write(data[: max(0, num_bytes - used)])
            raise OSError(code, os.strerror(code))
        file.write(data)

    return write


@pytest.mark.parametrize("code", [ENOSPC, EDQUOT])
@pytest.mark.parametrize("max_bytes", [None, 1 << 40])
def test_a_full_disk_makes_room(max_bytes: int | None, code: int, tmp_path: Path) -> None:
    """All of 40 are stored, and the ones of before go, the first of them first."""
    blobs = Directory(tmp_path, max_bytes=max_bytes)
    fill(blobs, *(f"old/{i:02}" for i in range(40)))
    for i in range(40):
        assert blobs.put(f"new/{i:02}", on_a_disk_of(40 * PAGE, tmp_path, b"x" * PAGE, code))
        if i == 1:
            assert sorted(blobs.names("old")) == [f"{i:02}" for i in range(4, 40)]
    assert len(blobs.names("new")) == 40
    assert blobs.names("old") == []
    used = blobs.usage.now
    assert (used.evicted_files, used.evicted_bytes) == (40, 40 * PAGE)
    assert not temporaries(tmp_path)


def test_a_full_disk_makes_room_for_a_large_file(tmp_path: Path) -> None:
    blobs = Directory(tmp_path)
    fill(blobs, *(f"old/{i}" for i in range(8)))
    assert blobs.put("new", on_a_disk_of(8 * PAGE, tmp_path, b"x" * 7 * PAGE, ENOSPC))
    assert len(blobs.names("old")) == 1


def test_a_writer_that_sets_the_size_first(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.truncate(16 * PAGE)
        for _ in range(16):
            used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))
            if used >= 16 * PAGE + folders:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            file.write(b"x" * PAGE)

    blobs = Directory(tmp_path)
    fill(blobs, *(f"old/{i}" for i in range(16)))
    folders = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_dir())
    assert blobs.put("new", write)


def test_a_failure_that_a_writer_puts_into_its_own_words(tmp_path: Path) -> None:
    blobs = Directory(tmp_path)
    fill(blobs, *(f"old/{i}" for i in range(8)))
    on_disk = on_a_disk_of(8 * PAGE, tmp_path, b"x" * PAGE, ENOSPC)

    def write(file: BinaryIO) -> None:
        try:
            on_disk(file)
        except OSError as error:
            raise StoreError(f"cannot be written: {error}") from None

    assert blobs.put("new", write)


def test_a_full_disk_that_the_store_cannot_help(tmp_path: Path) -> None:
    blobs = Directory(tmp_path)
    fill(blobs, *(f"old/{i}" for i in range(8)))
    with pytest.raises(
        StoreError, match=r"new cannot be written: No space left on device\. Free space there"
    ):
        blobs.put("new", on_a_disk_of(8 * PAGE, tmp_path, b"x" * 9 * PAGE, ENOSPC))
    assert not temporaries(tmp_path)


def test_room_that_is_not_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota that other files use up, snapshots that hold what is deleted: not all goes for it."""
    blobs = Directory(tmp_path)
    fill(blobs, *(f"old/{i:02}" for i in range(40)))

    def fail(file: BinaryIO) -> None:
        file.write(b"some")
        raise OSError(EDQUOT, os.strerror(EDQUOT))

    for _ in range(5):
        with pytest.raises(StoreError, match=r"new cannot be written: Disk quota exceeded\. Raise"):
            blobs.put("new", fail)
        assert len(blobs.names("old")) == 36
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert blobs.put("new", on_a_disk_of(36 * PAGE, tmp_path, b"x" * PAGE, EDQUOT))


def test_other_failures_drop_nothing(tmp_path: Path) -> None:
    blobs = Directory(tmp_path)
    fill(blobs, *(f"old/{i}" for i in range(8)))

    def fail(file: BinaryIO) -> None:
        raise OSError(errno.EIO, "broken")

    def refuse(file: BinaryIO) -> None:
        raise StoreError("not this one")

    with pytest.raises(StoreError, match="new cannot be written: broken"):
        blobs.put("new", fail)
    try:
        raise OSError(ENOSPC, "of another disk")
    except OSError:
        with pytest.raises(StoreError, match="not this one"):
            blobs.put("new", refuse)
    assert len(blobs.names("old")) == 8


def test_room_that_another_writer_has_made(tmp_path: Path) -> None:
    """Of writers that meet a full disk at once, not each drops a tenth."""
    blobs, failed = Directory(tmp_path), []

    def write(file: BinaryIO) -> None:
        if not failed:
            failed.append(file)
            raise OSError(ENOSPC, "full")
        file.write(b"data")

    fill(blobs, *(f"old/{i}" for i in range(8)))
    assert blobs.put("new", write)
    assert len(blobs.names("old")) == 8


def test_a_tree_that_vanishes_while_it_is_trimmed(tmp_path: Path) -> None:
    names = [f"{i}/{j}" for i in range(20) for j in range(5)]
    stop = threading.Event()
    failures = []

    def churn() -> None:
        other = Directory(tmp_path)
        try:
            while not stop.is_set():
                for name in names:
                    other.put(name, writing(bytes(100)))
                for name in names:
                    other.delete(name)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    blobs = Directory(tmp_path, max_bytes=20 * PAGE)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert blobs.trim() <= 20 * PAGE
    stop.set()
    thread.join()
    assert not failures, failures[0]
