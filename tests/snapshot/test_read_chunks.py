"""Files that C reads and checks: it takes those that Python takes, with the same bytes, and no
other.

`read_chunk` is the oracle. Files that C does not read are those that its plan leaves to Python.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvx_core import DType, Snapshot
from kvx_core._c import file_calls
from kvx_core._c.os_files import close
from kvx_core.snapshot import Room, StoreError, can_join
from kvx_core.snapshot.chunk_file import Wanted
from kvx_core.snapshot.chunk_reads import ChunkRun, ToRead, read_chunks
from kvx_core.snapshot.kind import Kind
from kvx_core.stores.entries import Entries
from tests.snapshot.chunk_files import (
    FULL,
    MAKERS,
    bytes_of,
    file_at,
    key_of,
    kind_of,
    numbers,
    read,
    snapshot_of,
    write,
)
from tests.snapshot.test_chunk_file import at, resealed
from tests.snapshot.test_chunk_file_fuzz import NAMES, File
from tests.stores.engine import Engine, save, store_in

SENTINEL = 0xA5


def runs_by_c(
    paths: Sequence[Path],
    kind: Kind,
    goods: Sequence[Snapshot],
    *,
    room_tokens: int = FULL,
    layers: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
) -> list[ChunkRun | None]:
    """What C finds in files of one folder, each of which should be like a snapshot."""
    room, files, num_bytes = Room(room_tokens), list[ToRead](), 0
    of, wanteds = kind.layers if layers is None else layers, dict[int, Wanted]()
    for i, (path, good) in enumerate(zip(paths, goods, strict=True)):
        n = len(good.tokens)
        if n not in wanteds:
            wanteds[n] = Wanted.of(kind, n, of, room, "a model")
        start = good.header.start if starts is None else starts[i]
        files.append(ToRead(path.name, key_of(good), wanteds[n], start, num_bytes))
        num_bytes += wanteds[n].selection.place.num_bytes
    first, memory = room.take(num_bytes)
    memory[:] = SENTINEL
    folder = os.open(paths[0].parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return read_chunks(folder, files, room, first, memory)
    finally:
        close(folder)


def by_c(
    paths: Sequence[Path], kind: Kind, goods: Sequence[Snapshot], **given: Any
) -> list[Snapshot | None]:
    """The snapshot of each file, or None, as `runs_by_c` finds them."""
    found = [one for run in runs_by_c(paths, kind, goods, **given) for one in run or [None]]
    assert len(found) == len(paths)
    return found


def by_python(path: Path, kind: Kind, good: Snapshot, **given: Any) -> Snapshot | None:
    n, room = len(good.tokens), Room(FULL)
    try:
        return read(file_at(path), kind, n, key=key_of(good), room=room, **given)
    except StoreError:
        return None


def are_alike(one: Snapshot | None, other: Snapshot | None) -> bool:
    if one is None or other is None:
        return one is other
    assert one.header == other.header
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.tensors == other.tensors
    assert one.place is other.place
    return all(bytes_of(one, name) == bytes_of(other, name) for name in one.tensors)


def is_read(kind: Kind, n: int, layers: Sequence[int]) -> bool:
    return Wanted.of(kind, n, layers, Room(FULL), None).selection.plan is not None


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_file(name: str, tmp_path: Path) -> None:
    """In all and in some layers, in whole chunks and others; what is beside them stays."""
    kind, path, num_read = kind_of(MAKERS[name]), tmp_path / "file", 0
    for seed, n in enumerate((1, 7, FULL)):
        good = snapshot_of(MAKERS[name], n, seed)
        write(path, good, kind)
        for layers in {kind.layers, kind.layers[:1], kind.layers[-1:], kind.layers[1:3]}:
            (found,) = by_c([path], kind, [good], layers=layers)
            expected = by_python(path, kind, good, layers=layers)
            assert expected is not None
            if not is_read(kind, n, layers):
                assert found is None
                continue
            num_read += 1
            assert are_alike(found, expected)
            assert found is not None
            assert found.memory is not None
            rest = np.ones(len(found.memory), np.bool_)
            for stored in found.tensors.values():
                rest[stored.offset : stored.offset + stored.num_bytes] = False
            assert (found.memory[rest] == SENTINEL).all()
    assert num_read or any(tensor.coding for tensor in MAKERS[name](FULL).tensors.values())


def test_signed_encrypted_and_coded_files_are_left_to_python(tmp_path: Path) -> None:
    for keys in ("signed", "encrypted", "both"):
        assert not is_read(kind_of(numbers(DType.BF16), keys), 7, (0, 1))
    assert not is_read(kind_of(MAKERS["lossless"]), 7, (0, 1))
    assert not is_read(kind_of(MAKERS["pieces of 1 MiB"]), FULL, (0, 1))
    assert is_read(kind_of(numbers(DType.BF16)), 7, (0, 1))


def test_many_files_at_once(tmp_path: Path) -> None:
    """Some are good, of several lengths; each bad one costs itself alone."""
    make = numbers(DType.BF16)
    kind, dice = kind_of(make), random.Random(1)
    goods = [snapshot_of(make, dice.choice([1, 3, FULL]), i, start=i) for i in range(64)]
    paths = [tmp_path / str(i) for i in range(64)]
    for i, (path, good) in enumerate(zip(paths, goods, strict=True)):
        write(path, good, kind)
        if i % 4 == 1:
            path.unlink()
        elif i % 4 == 2:
            raw = bytearray(path.read_bytes())
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
            path.write_bytes(raw)
    found = by_c(paths, kind, goods)
    for i, (path, one, good) in enumerate(zip(paths, found, goods, strict=True)):
        assert (one is not None) == (i % 4 in (0, 3))
        assert are_alike(one, by_python(path, kind, good) if path.exists() else None)
    with pytest.raises(SystemError):
        by_c([*paths, paths[0]], kind, [*goods, goods[0]])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_runs_of_files_that_follow_one_another(seed: int, tmp_path: Path) -> None:
    """Files of a run can be joined: they are full, good, and next in the sequence and the room."""
    make, dice = numbers(DType.BF16), random.Random(seed)
    kind, goods, at = kind_of(make), list[Snapshot](), 0
    for i in range(40):
        n = dice.choice([FULL, FULL, FULL, FULL, FULL, 3])
        at += dice.choice([0, 0, 0, 0, 0, FULL])  # some files are missing in between
        goods.append(snapshot_of(make, n, i, start=at))
        at += n
    paths = [tmp_path / str(i) for i in range(len(goods))]
    is_good = [dice.random() < 0.9 for _ in goods]
    for path, good, is_there in zip(paths, goods, is_good, strict=True):
        write(path, good, kind)
        if not is_there:
            path.write_bytes(path.read_bytes()[:-1])
    runs, done, lengths = runs_by_c(paths, kind, goods), 0, list[int]()
    for run in runs:
        if run is None:
            assert not is_good[done]
            done += 1
            continue
        lengths.append(len(run))
        each = list(run)
        assert can_join(each) or len(each) == 1
        for one in each:
            assert is_good[done]
            assert are_alike(one, by_python(paths[done], kind, goods[done]))
            done += 1
        assert run[-1].header.start == each[-1].header.start
        assert [one.name for one in run[1:]] == [one.name for one in each[1:]]
        with pytest.raises(IndexError):
            run[len(run)]
    assert done == len(paths)
    # As few as there are: a new one begins behind a gap, a bad file, or one that is not full.
    borders = sum(
        not (is_good[i - 1] and len(goods[i - 1].tokens) == len(goods[i].tokens) == FULL)
        or goods[i].header.start != goods[i - 1].header.start + FULL
        for i in range(1, len(goods))
        if is_good[i]
    )
    assert len(lengths) == borders + is_good[0]
    assert max(lengths) > 3


@pytest.mark.parametrize(("name", "n"), [("a layer", 2), ("planes", 4), ("a scale per head", 1)])
def test_every_byte_counts(name: str, n: int, tmp_path: Path) -> None:
    """All bytes of a file, changed: a bit, and the case of letters; cut and longer anywhere."""
    kind, path = kind_of(MAKERS[name]), tmp_path / "file"
    good = snapshot_of(MAKERS[name], n, 1)
    raw = write(path, good, kind)
    with path.open("r+b", buffering=0) as file:
        for place in range(len(raw)):
            for bit in (0x20, 1 << place % 8):
                os.pwrite(file.fileno(), bytes([raw[place] ^ bit]), place)
                assert by_c([path], kind, [good]) == [None]
                if place % 97 == 0:
                    assert by_python(path, kind, good) is None
            os.pwrite(file.fileno(), raw[place : place + 1], place)
    assert by_c([path], kind, [good]) != [None]
    for size in (*range(0, len(raw), 41), len(raw) - 1):
        path.write_bytes(raw[:size])
        assert by_c([path], kind, [good]) == [None]
    for more in (b"\0", raw):
        path.write_bytes(raw + more)
        assert by_c([path], kind, [good]) == [None]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lossless"])
def test_changed_files_with_good_checks(name: str, tmp_path: Path) -> None:
    """As test_chunk_file_fuzz.py makes them: C takes a file if Python does."""
    path, good = tmp_path / "file", snapshot_of(MAKERS[name], 6, 6)
    file, dice, num_good = File(name, "plain", 6), random.Random(7), 0
    for _ in range(600):
        path.write_bytes(file.changed(dice))
        expected = by_python(path, file.kind, good)
        if expected is not None and expected.header.start != good.header.start:
            expected = None  # which a load asks for
        (found,) = by_c([path], file.kind, [good])
        assert are_alike(found, expected)
        num_good += found is not None
    assert num_good > 20


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"KVXCHNK4"),
        *((place, b"\1") for place in (8, 20, 28, 36, 67)),
        (12, b"\4"),
        (16, b"\2"),
        (68, b"\0\0\0"),
        (100, b"\0\0\0"),
        (131, b"\0\0\0"),
        (132, b"\xff"),
        (139, b"\xff"),
        (140, b"\xff"),
        (164, b"\xff\xff\xff\xff"),
        (164, b"\0\0\0\0"),
        (168, b"\0\0\0\0"),
    ],
)
def test_forged_records(offset: int, value: bytes, tmp_path: Path) -> None:
    make, path = numbers(DType.BF16, dim=2), tmp_path / "file"
    kind, good = kind_of(make), snapshot_of(make, 3, 1)
    raw = write(path, good, kind)
    path.write_bytes(resealed(raw, at(0, b"K")))
    assert by_c([path], kind, [good]) != [None]
    path.write_bytes(resealed(raw, at(offset, value)))
    assert by_c([path], kind, [good]) == [None]


def test_where_a_file_begins(tmp_path: Path) -> None:
    """Where it is asked for, at a multiple of the tokens of each entry."""
    make, path = MAKERS["planes"], tmp_path / "file"
    kind = kind_of(make)
    for start, is_good in ((404, True), (402, False), (1 << 62, True), ((1 << 62) + 4, False)):
        good = snapshot_of(make, 8, 1, start=start)
        write(path, good, kind)
        assert (by_c([path], kind, [good]) != [None]) == is_good
        assert by_c([path], kind, [good], starts=[start - 4]) == [None]
        assert (by_python(path, kind, good) is not None) == is_good


def test_nothing_but_regular_files_without_links(tmp_path: Path) -> None:
    make = numbers(DType.BF16)
    kind, good = kind_of(make), snapshot_of(make, 3, 1)
    write(tmp_path / "file", good, kind)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    os.utime(tmp_path / "file", (5, 5))
    for name in ("link", "folder", "fifo", "absent"):
        assert by_c([tmp_path / name], kind, [good]) == [None]
    assert (tmp_path / "file").stat().st_mtime == 5
    assert by_c([tmp_path / "file"], kind, [good]) != [None]
    assert abs((tmp_path / "file").stat().st_mtime - time.time()) < 60  # used now


def test_a_bad_file_costs_little(tmp_path: Path) -> None:
    """At most 10 ms and 1 MiB, whatever it says of itself."""
    make, path = numbers(DType.F32, 4, dim=700), tmp_path / "file"
    kind, good = kind_of(make), snapshot_of(make, 15, 1)
    raw = write(path, good, kind)
    assert len(raw) > 700_000
    sparse = 1 << 40
    for content in (raw[:-1] + b"?", bytes(len(raw)), raw[:100], sparse):
        if isinstance(content, int):
            os.truncate(path, content)
        else:
            path.write_bytes(content)
        taken = []
        for _ in range(3):
            begin = time.thread_time()
            assert by_c([path], kind, [good], room_tokens=15) == [None]
            taken.append(time.thread_time() - begin)
        assert min(taken) < 0.01
    room = Room(15)
    wanted = Wanted.of(kind, 15, kind.layers, room, "a model")
    first, memory = room.take(wanted.selection.place.num_bytes)
    file = ToRead("file", key_of(good), wanted, 400, 0)
    folder = os.open(tmp_path, os.O_RDONLY)
    tracemalloc.start()
    try:
        assert read_chunks(folder, [file], room, first, memory) == [None]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        close(folder)


def test_a_place_outside_the_memory_is_not_written(tmp_path: Path) -> None:
    make = numbers(DType.BF16)
    kind, good = kind_of(make), snapshot_of(make, FULL, 1)
    write(tmp_path / "file", good, kind)
    room = Room(FULL)
    wanted = Wanted.of(kind, FULL, kind.layers, room, "a model")
    first, memory = room.take(wanted.selection.place.num_bytes)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for place in (-1, 1, 1 << 40):
            file = ToRead("file", key_of(good), wanted, 400, place)
            with pytest.raises(SystemError):
                read_chunks(folder, [file], room, first, memory)
    finally:
        close(folder)


def test_loads_read_plain_files_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in Python what C does not read, with the same bytes."""
    tokens, engine = range(20), Engine(seed=1)
    save(store_in(tmp_path), tokens)
    store = store_in(tmp_path)
    match = store.lookup(tokens)
    with monkeypatch.context() as patcher:
        patcher.setattr(Entries, "_read", None)  # of one file, by Python
        store.load(match, 0, 20, engine.sections())
    engine.check(tokens, 0, 20)
    other = Engine(seed=1)
    monkeypatch.setattr(file_calls, "read_chunks", lambda: None)
    store.load(match, 0, 20, other.sections())
    other.check(tokens, 0, 20)
