"""What every BlobStore does: one suite for all of them. What a Directory does besides is in
test_blobs.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import obstore
import pytest

from kvx_core import Directory, InvalidArgumentError, StoreError
from kvx_core.stores import BlobStore, beneath
from kvx_core.stores.blob_store import Write
from kvx_core.stores.tiers import MemoryStore, ObjectStore, Tiered, ValkeyStore
from tests.descriptors import open_files
from tests.stores_memory import InMemory, OnlyDefaults
from tests.tiers.servers import BUCKET, S3Server, s3_server, valkey_server

_numbers = count()  # of empty places on the servers
STORES: dict[str, Callable[[Path], BlobStore]] = {
    "directory": Directory,
    "directory-by-folders": Directory,
    "directory-of-a-group": lambda root: Directory(root, group="write"),
    "directory-with-a-limit": lambda root: Directory(root, max_bytes=1 << 30),
    "in-memory": lambda root: InMemory(),
    "defaults": OnlyDefaults,
    "objects": lambda root: objects(),
    "one-tier": lambda root: Tiered([objects()]),
    "memory-and-disk": lambda root: Tiered([volatile(root), Directory(root)]),
    "disk-and-objects": lambda root: Tiered([Directory(root), objects()]),
    "memory-and-objects": lambda root: Tiered([volatile(root), objects()]),
}


def objects() -> ObjectStore:
    return ObjectStore("memory://bucket", client=obstore.store.MemoryStore())


def volatile(root: Path) -> MemoryStore:
    return MemoryStore("root", 1 << 20, folder=root.parent)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as found:
        yield found


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as port:
        yield port


@pytest.fixture(params=[*STORES, "s3", "valkey"])
def blobs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> BlobStore:
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        return ObjectStore(f"s3://{BUCKET}/{next(_numbers)}")
    if request.param == "valkey":
        return ValkeyStore(
            f"valkey://127.0.0.1:{request.getfixturevalue('valkey')}/{next(_numbers)}"
        )
    if request.param == "directory-by-folders":
        monkeypatch.setattr(beneath, "_SYS_OPENAT2", 100_000)  # as kernels that have none
    return STORES[request.param](tmp_path / "root")


def writing(data: bytes) -> Write:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def content(blobs: BlobStore, name: str) -> bytes | None:
    return blobs.read(name, 1 << 20)


def test_put_is_all_or_nothing(blobs: BlobStore) -> None:
    assert blobs.put("a/b", writing(b"one"))
    assert not blobs.put("a/b", writing(b"two"))

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        blobs.put("a/c", fail)
    assert content(blobs, "a/b") == b"one"
    assert blobs.open("a/c") is None
    assert blobs.open("none/c") is None
    assert blobs.open("a/b/c") is None
    assert blobs.open("a") is None
    assert blobs.names("a") == ["b"]
    assert blobs.names("") == ["a"]
    assert blobs.names("none") == blobs.names("a/b") == []
    blobs.delete("a/b")
    blobs.delete("a/b")
    blobs.delete("a/b/c")
    assert blobs.names("") == []


@pytest.mark.parametrize("durable", [True, False])
def test_the_file_to_write(blobs: BlobStore, durable: bool) -> None:
    """Unbuffered, seekable, closed by whoever likes to, and never written in part."""

    def write(file: BinaryIO) -> None:
        assert file.fileno() > 2
        assert not os.get_inheritable(file.fileno())
        assert file.write(b"-----cdef") == 9
        file.seek(0)
        file.write(b"ab")
        file.seek(2)
        assert file.read() == b"---cdef"
        file.truncate(5)
        file.close()

    assert blobs.put("a/name", write, durable=durable)
    file = blobs.open("a/name")
    assert file is not None
    with closing(file):
        assert file.name.endswith("name")
        assert not os.get_inheritable(file.fileno())
        assert os.pread(file.fileno(), 9, 0) == b"ab---"
        assert os.fstat(file.fileno()).st_size == 5


@pytest.mark.parametrize(
    "name",
    ["", "..", "a/../b", "/a", "a//b", "a/", ".hidden", "a/.tmp", "a\0b", "a\nb", "\xe9", "\udc80",
     "a/b/c/d/e/f/g/h/i"],
)  # fmt: skip
def test_names_that_are_none(blobs: BlobStore, name: str) -> None:
    for call in (
        blobs.open,
        blobs.delete,
        blobs.is_there,
        lambda name: blobs.read(name, 1),
        lambda name: blobs.put(name, writing(b"")),
        lambda name: blobs.replace(name, writing(b"")),
        lambda name: blobs.put_all([("good", writing(b"")), (name, writing(b""))]),
        *([blobs.names] if name else []),
    ):
        with pytest.raises(InvalidArgumentError, match="expected words with '/' between them"):
            call(name)


def test_names_that_are_long_and_deep(blobs: BlobStore) -> None:
    names = ["x" * 250, "a/b/c/d/e/f/g/h", "a b", "A-z_0.9~", "a/b.mark", "a/b.json"]
    for i, name in enumerate(names):
        assert blobs.put(name, writing(b"%d" % i))
    assert [content(blobs, name) for name in names] == [b"%d" % i for i in range(len(names))]
    assert sorted(blobs.names("a")) == ["b", "b.json", "b.mark"]
    assert blobs.names("a/b/c/d/e/f/g") == ["h"]


@pytest.mark.parametrize("durable", [True, False])
def test_files_that_are_put_together(blobs: BlobStore, durable: bool) -> None:
    """As `put` does, each error is that of its own file."""

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise StoreError("no more")

    assert blobs.put("a/2", writing(b"old"))
    names = [f"a/{i}" for i in range(6)]
    files = [(name, writing(b"new")) for name in (*names, "a/0")]
    files[3] = ("a/3", fail)
    found = blobs.put_all(files, durable=durable)
    assert [str(each) for each in found] == [
        *("True", "True", "False", "no more", "True", "True", "False")
    ]
    assert isinstance(found[3], StoreError)
    assert [content(blobs, name) for name in names] == [
        *(b"new", b"new", b"old", None, b"new", b"new")
    ]
    assert blobs.put_all([]) == []


@pytest.mark.parametrize("durable", [True, False])
def test_files_whose_content_changes(blobs: BlobStore, durable: bool) -> None:
    for data in (b"one", b"", b"three"):
        assert blobs.replace("a/b", writing(data), durable=durable)
        assert content(blobs, "a/b") == data

    def write(file: BinaryIO) -> None:
        blobs.put("a/b", writing(b"of another writer"))
        file.write(b"four")

    assert not blobs.replace("a/b", write, durable=durable)  # its name comes last
    assert content(blobs, "a/b") == b"of another writer"


def test_what_fails_while_it_is_written_leaves_nothing(blobs: BlobStore) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"a part")
        raise ZeroDivisionError

    for durable in (True, False):
        with pytest.raises(ZeroDivisionError):
            blobs.put("a/b", write, durable=durable)
        assert content(blobs, "a/b") is None


def test_small_files_are_read_whole_and_larger_ones_not_at_all(blobs: BlobStore) -> None:
    blobs.put("a/b", writing(b"12345"))
    blobs.put("a/empty", writing(b""))
    assert blobs.read("a/b", 5) == blobs.read("a/b", 6) == b"12345"
    assert blobs.read("a/empty", 0) == b""
    assert blobs.read("a/none", 5) is None
    with pytest.raises(StoreError, match="a/b has more than 4 bytes, expected at most that"):
        blobs.read("a/b", 4)
    blobs.put("a/large", writing(bytes(1 << 21)))
    assert blobs.read("a/large", 1 << 21) == bytes(1 << 21)
    with pytest.raises(StoreError, match="a/large has more than 2097151 bytes"):
        blobs.read("a/large", (1 << 21) - 1)


def test_what_is_there(blobs: BlobStore) -> None:
    assert not blobs.is_there("a/b")
    blobs.put("a/b", writing(b""))
    assert blobs.is_there("a/b")
    assert not blobs.is_there("a")
    blobs.delete("a/b")
    assert not blobs.is_there("a/b")


def test_the_first_bytes_of_a_file_come_with_it(blobs: BlobStore) -> None:
    data = bytes(range(200))
    blobs.put("a/b", writing(data))

    def fetched(least: int, most: int, *sizes: int) -> tuple[int, list[bytes]]:
        views = tuple(bytearray(b"\xa5" * size) for size in sizes)
        file = blobs.fetch("a/b", views, least, most)
        assert file is not None
        with file:
            assert os.pread(file.fileno(), 300, 0) == data
            return file.num_bytes, [bytes(view) for view in views]

    assert fetched(200, 200, 3, 100) == (200, [data[:3], data[3:103]])
    assert fetched(0, 300, 150, 0, 60) == (200, [data[:150], b"", data[150:] + b"\xa5" * 10])
    assert fetched(1, 200, *[1] * 70)[1] == [data[i : i + 1] for i in range(70)]
    for least, most in ((0, 199), (201, 300), (0, -1)):
        assert fetched(least, most, 5) == (200, [b"\xa5" * 5])
    assert fetched(200, 200) == (200, [])
    assert blobs.fetch("a/c", (bytearray(1),), 0, 300) is None
    assert blobs.fetch("a", (bytearray(1),), 0, 300) is None
    with pytest.raises(InvalidArgumentError, match="the name of a blob"):
        blobs.fetch("a//b", ())
    with pytest.raises((TypeError, BufferError)):
        blobs.fetch("a/b", (b"read only",), 0, 300)  # type: ignore[arg-type]


def test_files_that_are_fetched_close_themselves(blobs: BlobStore) -> None:
    blobs.put("a/b", writing(b"abc"))
    before = open_files()
    for _ in range(9):
        blobs.fetch("a/b", (bytearray(2),), 0, 3)
        with suppress(TypeError, BufferError):
            blobs.fetch("a/b", (b"read only",), 0, 3)  # type: ignore[arg-type]
    left = open_files() - before
    assert not [name for name in left if not name.startswith("socket:")]  # clients keep connections


def test_a_file_that_is_open_stays_what_it_is(blobs: BlobStore) -> None:
    blobs.put("a/b", writing(b"old"))
    file = blobs.open("a/b")
    assert file is not None
    with file:
        blobs.replace("a/b", writing(b"new"))
        assert file.read() == b"old"
    assert content(blobs, "a/b") == b"new"


def test_of_threads_that_put_a_name_one_is_first(blobs: BlobStore) -> None:
    found: list[bool] = []
    ready = threading.Barrier(4)

    def put(data: bytes) -> None:
        ready.wait()
        for i in range(20):
            found.append(blobs.put(f"a/{i}", writing(data)))

    datas = [bytes([65 + i]) * 4096 for i in range(4)]
    threads = [threading.Thread(target=put, args=(data,)) for data in datas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == 20
    assert {content(blobs, f"a/{i}") for i in range(20)} <= set(datas)


def test_what_messages_and_callers_ask_for(blobs: BlobStore, tmp_path: Path) -> None:
    assert blobs.path_of("a/b").endswith("a/b")
    if blobs.root is not None:
        assert blobs.path_of("a/b") == f"{tmp_path}/root/a/b"
    assert blobs.max_bytes is None or blobs.max_bytes == 1 << 30
    assert blobs.usage is None or blobs.usage.now.evicted_files == 0


def test_a_store_has_at_least_four_functions() -> None:
    class Three(BlobStore):
        put, open, names = InMemory.put, InMemory.open, InMemory.names

    with pytest.raises(TypeError, match=r"abstract method '?delete"):
        Three()  # type: ignore[abstract]
