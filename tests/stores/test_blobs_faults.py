"""Directory on file systems that fail, with writers that die and clocks that differ.

Other processes run with the faults of kvx_conformance/faults.c; the tests check the files that they
leave.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from kvx_core import Directory, StoreError
from tests.faults import environment
from tests.native import ROOT

# A process that does not know on which machine it is: as on another one.
ELSEWHERE = "call=open,path=/boot_id,error=ENOENT"
HOUR, DAY = 3600, 24 * 3600

START = """
import os, sys, time
from pathlib import Path
from kvx_core import Directory, StoreError
root = Path(sys.argv[1])
def writing(data):
    return lambda file: file.write(data) and None
"""


def spawn(script: str, root: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START + script, root],
        cwd=ROOT,
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(script: str, root: Path, *rules: str, log: Path | None = None, clock_ahead: int = 0) -> str:
    """What a script prints in a process with these faults."""
    with spawn(script, root, environment(*rules, log=log, clock_ahead=clock_ahead)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def writing(data: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*.tmp") if path.is_file()]


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


# --- Each call fails ------------------------------------------------------------------------------

FAULTS = (
    *(f"call=open,error={error},every=3" for error in ("EIO", "ESTALE", "ENOMEM", "EMFILE")),
    *(
        "call=open,error=EINTR,every=2",
        "call=openat2,error=ENOSYS",
        "call=open,error=EACCES,every=5",
        "call=close,error=EIO",
        "call=close,error=ENOSPC,every=3",
    ),
    *("call=read,error=EIO,every=2", "call=read,short=1", "call=write,short=1"),
    *("call=write,error=EIO,every=2", "call=write,error=ENOSPC,every=2", "call=write,error=EDQUOT"),
    *("call=sync,error=EIO,every=3", "call=sync,error=ENOSPC,every=2", "call=sync,error=EINVAL"),
    *("call=stat,error=ESTALE,every=3", "call=stat,error=EIO", "call=list,error=EIO,every=3"),
    *(
        "call=mkdir,error=ENOSPC,every=2",
        "call=mkdir,error=EROFS",
        "call=chmod,error=EIO,every=2",
    ),
    *("call=link,error=EPERM", "call=link,error=EIO,every=2", "call=link+rename,error=EIO,every=3"),
    *("call=unlink,error=EIO,every=2", "call=unlink,error=ESTALE", "call=utime,error=EACCES"),
    *("call=lock,error=ENOLCK", "call=lock,error=EIO,every=2", "call=lock,error=ENOSYS,every=2"),
    *("call=*,error=EIO,chance=0.1,seed=1", "call=*,error=ESTALE,chance=0.3,seed=2"),
    "call=*,error=ENOSPC,chance=0.1,seed=3",
)

WORK = """
import gc
switches, calls = Path(sys.argv[2]), 0
for rule in range(int(sys.argv[3])):
    switch = switches / str(rule)
    blobs = Directory(root / "store", max_bytes=40 << 12, group="read")
    switch.touch()
    done = failed = 0
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(3):
        for i in range(8):
            name = f"{turn}/{i}/{rule}"
            data = name.encode() * 700
            for action in ("put", "open", "names", "delete", "trim"):
                try:
                    if action == "put":
                        blobs.put(name, writing(data))
                    elif action == "open":
                        file = blobs.open(name)
                        if file is not None:
                            with file:
                                found = b""
                                try:
                                    while part := file.read(1000):
                                        found += part
                                except OSError:
                                    continue
                            assert found == data, (rule, name)
                    elif action == "names":
                        assert set(blobs.names(f"{turn}/{i}")) <= set(map(str, range(rule + 1)))
                    elif action == "delete" and i % 3 == 0:
                        blobs.delete(name)
                    elif action == "trim" and i % 4 == 0:
                        blobs.trim()
                    done += 1
                except StoreError as error:
                    assert "cannot be" in str(error), error
                    failed += 1
        names = [f"together/{turn}{i}/{rule}" for i in range(6)]
        for name, put in zip(names, blobs.put_all([(n, writing(n.encode() * 700)) for n in names])):
            assert put is True or "cannot be" in str(put), put
            done, failed = done + (put is True), failed + (put is not True)
    switch.unlink()
    assert len(os.listdir("/proc/self/fd")) == before, (rule, before)
    print(rule, done, failed)
"""


def test_whatever_call_fails_nothing_but_store_error_escapes(tmp_path: Path) -> None:
    """And nothing wrong is read, nothing half is left, no handle stays open."""
    switches = tmp_path / "switches"
    switches.mkdir()
    log = tmp_path / "log"
    rules = [
        f"{fault},path={tmp_path}/root/store,if={switches}/{i}" for i, fault in enumerate(FAULTS)
    ]
    (tmp_path / "root").mkdir()
    env = environment(*rules, log=log)
    done = subprocess.run(
        [sys.executable, "-c", START + WORK, tmp_path / "root", switches, str(len(rules))],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [rule for rule, *_ in counts] == list(range(len(rules)))
    assert sum(failed for *_, failed in counts) > 100
    struck = {tuple(line.split()[:2]) for line in log.read_text().splitlines()}
    assert len(struck) > 30, struck
    left = Directory(tmp_path / "root" / "store")
    left.trim()
    assert not temporaries(tmp_path)
    for path in (tmp_path / "root" / "store").glob("*/*/*"):
        name = path.relative_to(tmp_path / "root" / "store").as_posix()
        assert path.read_bytes() == name.encode() * 700


def test_a_file_system_without_modes_and_links_and_syncs_of_folders(tmp_path: Path) -> None:
    output = run(
        "blobs = Directory(root / 'store')\n"
        "print(blobs.put('a/b', writing(b'data')), blobs.open('a/b').read())\n",
        tmp_path,
        "call=chmod,error=EPERM",
        "call=link,error=EPERM",
        f"call=sync,path={tmp_path}/store/a,error=EINVAL",
        "call=lock,error=ENOSYS",
    )
    assert output == "True b'data'\n"
    assert not temporaries(tmp_path)


def test_a_store_that_can_only_be_read(tmp_path: Path) -> None:
    Directory(tmp_path).put("a/b", writing(b"data"))
    age(tmp_path / "a" / "b", HOUR)
    output = run(
        "blobs = Directory(root)\n"
        "print(blobs.open('a/b').read(), blobs.names('a'), blobs.trim() > 0)\n"
        "try: blobs.put('a/c', lambda file: None)\n"
        "except StoreError as error: print(error)\n",
        tmp_path,
        "call=utime+mkdir+unlink+link,error=EROFS",
        f"call=openat+openat64,path={tmp_path}/.tmp/,error=EROFS",
    )
    assert output.startswith("b'data' ['b'] True\n")
    assert "a/c cannot be written: Read-only file system. Mount it writable" in output


def test_a_file_system_that_is_frozen_keeps_only_who_writes_to_it(tmp_path: Path) -> None:
    output = run(
        "import threading\n"
        "blobs = Directory(root, max_bytes=1 << 30)\n"
        "blobs.put('a/b', writing(b'data'))\n"
        "(root / 'on').touch()\n"
        "thread = threading.Thread(target=blobs.put, args=('a/c', writing(b'data')))\n"
        "start = time.monotonic()\n"
        "thread.start()\n"
        "time.sleep(0.2)\n"
        "for _ in range(20):\n"
        "    blobs.open('a/b').close(), blobs.names('a'), blobs.put('a/b', writing(b''))\n"
        "read = time.monotonic() - start\n"
        "assert blobs.open('a/c') is None\n"
        "thread.join()\n"
        "print(read < 1.4, time.monotonic() - start >= 1.5, blobs.open('a/c').read())\n",
        tmp_path,
        f"call=fsync,path={tmp_path}/.tmp/,delay=1500,if={tmp_path}/on",
    )
    assert output == "True True b'data'\n"


# --- Writers that die -----------------------------------------------------------------------------

DIE = """
for at in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        (root / f"on{at}").touch()
        Directory(root / "store").put(f"a/{at}/{at}", writing(b"x" * 100000))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (root / f"on{at}").unlink()
    print(status)
"""


def test_a_writer_that_is_killed_in_any_of_its_calls(tmp_path: Path) -> None:
    """What it leaves is a whole file under its name or none, and the next start cleans up."""
    count = 60
    rules = [
        f"call=*,path={tmp_path}/store,if={tmp_path}/on{at},after={at},kill=9"
        for at in range(count)
    ]
    with subprocess.Popen(
        [sys.executable, "-c", START + DIE, tmp_path, str(count)],
        cwd=ROOT,
        env=os.environ | environment(*rules),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        statuses = list(map(int, process.communicate(timeout=120)[0].split()))
    assert len(statuses) == count
    assert statuses.count(-signal.SIGKILL) >= 20
    assert statuses[-1] == 0  # a whole put has fewer calls
    whole = 0
    blobs = Directory(tmp_path / "store")
    for at in range(count):
        file = blobs.open(f"a/{at}/{at}")
        if file is not None:
            with file:
                assert file.read() == b"x" * 100000
            whole += 1
    assert 0 < whole < count
    for at in range(count):  # a part of a put is in nobody's way
        blobs.put(f"a/{at}/{at}", writing(b"x" * 100000))
        assert blobs.open(f"a/{at}/{at}") is not None
    assert not temporaries(tmp_path)


@contextmanager
def writer(root: Path, *rules: str, clock_ahead: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that writes a/b, and waits in the middle for a line."""
    script = (
        "def write(file):\n"
        "    file.write(b'whole')\n"
        "    print('half', flush=True)\n"
        "    sys.stdin.readline()\n"
        "print(Directory(root).put('a/b', write), flush=True)\n"
    )
    with spawn(script, root, environment(*rules, clock_ahead=clock_ahead)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> str:
    return process.communicate("\n", timeout=60)[0]


def test_the_files_of_dead_writers_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    for _ in range(3):
        with writer(tmp_path) as process:
            process.send_signal(signal.SIGKILL)
        assert len(temporaries(tmp_path)) == 1  # that of the last one: this one has cleaned up
    assert Directory(tmp_path).names("a") == []
    Directory(tmp_path).put("c", writing(b""))
    assert not temporaries(tmp_path)


def test_the_files_of_dead_writers_are_deleted_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = Directory(tmp_path)
    blobs.put("1", writing(b""))
    with writer(tmp_path):
        pass
    blobs.put("2", writing(b""))
    assert len(temporaries(tmp_path)) == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 700)
    blobs.put("3", writing(b""))
    assert not temporaries(tmp_path)
    with writer(tmp_path):
        pass
    blobs.trim()
    assert not temporaries(tmp_path)


def test_the_file_of_a_live_writer_stays(tmp_path: Path) -> None:
    """However old it is, and whatever this machine's clock says."""
    with writer(tmp_path) as process:
        (file,) = temporaries(tmp_path)
        age(file, 30 * DAY)
        run("Directory(root).trim()", tmp_path, clock_ahead=60 * DAY)
        Directory(tmp_path).put("c", writing(b""))
        assert temporaries(tmp_path) == [file]
        assert finish(process) == "True\n"
    assert (tmp_path / "a" / "b").read_bytes() == b"whole"
    assert not temporaries(tmp_path)


@pytest.mark.parametrize("hours", [2, -2, 48])
def test_machines_whose_clocks_differ_lose_no_save(hours: int, tmp_path: Path) -> None:
    """Not even where they do not see each other's locks."""
    no_locks = "call=lock,error=ENOLCK"
    with writer(tmp_path, no_locks) as process:
        cleaner = "blobs = Directory(root); blobs.put(str(time.time()), writing(b'')); blobs.trim()"
        run(cleaner, tmp_path, no_locks, clock_ahead=hours * HOUR)
        run(cleaner, tmp_path, ELSEWHERE, clock_ahead=hours * HOUR)
        assert finish(process) == "True\n"
    with writer(tmp_path / "2", no_locks, clock_ahead=hours * HOUR) as process:
        run("Directory(root).trim()", tmp_path / "2", ELSEWHERE)
        assert finish(process) == "True\n"


def test_where_there_are_no_locks_a_day_tells(tmp_path: Path) -> None:
    no_locks = "call=lock,error=EOPNOTSUPP"
    with writer(tmp_path, no_locks):
        pass
    (file,) = temporaries(tmp_path)
    cleaner = "Directory(root).trim()"
    age(file, DAY - 60)
    run(cleaner, tmp_path, no_locks, clock_ahead=48 * HOUR)
    assert file.exists()
    age(file, DAY + 60)
    run(cleaner, tmp_path, no_locks, clock_ahead=-48 * HOUR)
    assert not file.exists()


@pytest.mark.parametrize("name", [".tmp/.0123456789abcdef-1.tmp", "a/.name.0123456789abcdef.tmp"])
def test_the_files_of_other_machines_and_versions(name: str, tmp_path: Path) -> None:
    """Where they were locked, it may not be seen here."""
    file = tmp_path / name
    file.parent.mkdir()
    file.touch()
    other = file.with_name("notes.tmp")
    other.touch()
    age(other, 30 * DAY)
    age(file, DAY - 60)
    Directory(tmp_path).trim()
    assert file.exists()
    age(file, DAY + 60)
    with file.open("r+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        Directory(tmp_path).trim()
        assert file.exists()
    Directory(tmp_path).trim()
    assert not file.exists()
    assert other.exists()


def test_a_file_that_is_taken_for_abandoned_is_written_again(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        written.append(file)
        file.write(b"data")
        if len(written) < 3:
            temporaries(tmp_path)[0].unlink()

    written: list[BinaryIO] = []
    blobs = Directory(tmp_path)
    assert blobs.put("a/b", write)
    assert len(written) == 3
    assert (tmp_path / "a" / "b").read_bytes() == b"data"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_file_that_is_gone_is_written_again_and_not_for_ever(code: int, tmp_path: Path) -> None:
    """NFS says of what another machine has deleted that it is stale."""

    def write(file: BinaryIO) -> None:
        calls.append(file)
        if len(calls) < succeeds:
            raise OSError(code, os.strerror(code))

    blobs, calls, succeeds = Directory(tmp_path), list[BinaryIO](), 3
    assert blobs.put("a/b", write)
    calls, succeeds = [], 99
    with pytest.raises(StoreError, match=f"a/c cannot be written: {os.strerror(code)}"):
        blobs.put("a/c", write)
    assert len(calls) < 10


@pytest.mark.parametrize("fault", ["error=EAGAIN", "delay=300"])
def test_a_new_file_that_a_cleaning_process_was_quick_to_take(tmp_path: Path, fault: str) -> None:
    """It has the lock; or it had the lock, and has deleted the file. It was noticed before."""
    (tmp_path / ".tmp").mkdir(mode=0o700)
    output = run(
        "import threading\n"
        "def delete():\n"
        "    while not (found := [*root.glob('.tmp/.*.tmp')]): time.sleep(0.001)\n"
        "    found[0].unlink()\n"
        f"if {fault!r} == 'delay=300': threading.Thread(target=delete).start()\n"
        "written = []\n"
        "assert Directory(root).put('a/b', written.append)\n"
        "print(len(written))\n",
        tmp_path,
        f"call=lock,path=/.tmp/,{fault},times=1",
    )
    assert output == "1\n"
    assert (tmp_path / "a" / "b").is_file()
    assert not temporaries(tmp_path)


# --- Clocks and the order of use ------------------------------------------------------------------


def test_what_a_machine_with_another_clock_uses_was_used_now(tmp_path: Path) -> None:
    """Its clock says two hours more; the file system's does not."""
    Directory(tmp_path).put("a/1", writing(b"x"))
    age(tmp_path / "a" / "1", DAY)
    run(
        "blobs = Directory(root)\nblobs.open('a/1').close()\nblobs.put('a/2', writing(b'x'))\n",
        tmp_path,
        clock_ahead=2 * HOUR,
    )
    for name in ("1", "2"):
        assert abs((tmp_path / "a" / name).stat().st_mtime - time.time()) < 60


def test_files_of_the_future_grow_old_too(tmp_path: Path) -> None:
    blobs = Directory(tmp_path, max_bytes=4 << 12)
    for i in range(3):
        blobs.put(f"a/{i}", writing(bytes(1 << 12)))
    age(tmp_path / "a" / "0", -DAY)
    blobs.trim()
    assert abs((tmp_path / "a" / "0").stat().st_mtime - time.time()) < 60
    for i in range(1, 3):
        age(tmp_path / "a" / str(i), -1)
    for i in range(3, 6):
        blobs.put(f"a/{i}", writing(bytes(1 << 12)))
    assert "0" not in blobs.names("a")


def test_writers_of_one_file(tmp_path: Path) -> None:
    barrier, written = threading.Barrier(8), []

    def put() -> None:
        blobs = Directory(tmp_path)
        barrier.wait()
        written.append(blobs.put("a/b", writing(b"data")))

    threads = [threading.Thread(target=put) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(written) == [False] * 7 + [True]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]
