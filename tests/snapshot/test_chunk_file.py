"""Files of chunks: exact bytes, as a reader finds them that follows their page; what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kvx_core import DType, InvalidArgumentError, Snapshot
from kvx_core.snapshot import CorruptError, Room, StoreError, UnsignedError
from kvx_core.snapshot.chunk_file import chunk_parts, open_chunk
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from tests.snapshot import store_reader
from tests.snapshot.chunk_files import (
    DECODERS,
    ENCRYPTION,
    FULL,
    KEYS,
    MAKERS,
    SIGNING,
    bytes_of,
    file_at,
    key_of,
    kind_of,
    numbers,
    secrets_of,
    snapshot_of,
    write,
)
from tests.snapshot.chunk_files import read as read_file

SEEDS = [1, 2, 3]
SENTINEL = 0xA5


def read(
    path: Path,
    kind: Kind,
    snapshot: Snapshot,
    keys: str = "plain",
    *,
    layers: Any = None,
    room: Room | None = None,
    num_tokens: int | None = None,
    secrets: Secrets | None = None,
) -> Snapshot:
    return read_file(
        file_at(path),
        kind,
        num_tokens or len(snapshot.tokens),
        keys,
        key=key_of(snapshot),
        layers=layers,
        room=room,
        secrets=secrets,
    )


def filled(num_tokens: int, num_bytes: int) -> Room:
    """A room of sentinels."""
    room = Room(num_tokens)
    room.clear(num_bytes)
    room.take(num_bytes)[1][:] = SENTINEL
    room.give_back(0)
    return room


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_file(name: str, keys: str, tmp_path: Path) -> None:
    """The reader of the page and this one find the bytes that were captured, all and in parts."""
    make, path = MAKERS[name], tmp_path / "file"
    kind = kind_of(make, keys)
    assert Kind.parse(kind.text, "kind").text == kind.text
    for seed, n in zip(SEEDS, (1, 7, FULL), strict=True):
        snapshot = snapshot_of(make, n, seed)
        raw = write(path, snapshot, kind, keys)
        names = set(snapshot.tensors)
        signing, encryption = KEYS[keys]
        found = store_reader.read(
            raw, kind.text, signing=signing, encryption=encryption, decoders=DECODERS
        )
        assert found.parent.hex() == snapshot.header.prefix
        assert (found.start, found.tokens) == (snapshot.header.start, snapshot.tokens.tolist())
        assert found.tensors.keys() == names
        for tensor, each in found.tensors.items():
            stored = snapshot.tensors[tensor]
            assert (each.dtype, each.shape) == (stored.dtype.name, stored.shape)
            assert each.data == bytes_of(snapshot, tensor)
        layers = kind.layers
        for wanted in {layers, layers[:1], layers[-1:], layers[1:3]}:
            room = filled(FULL, kind.memory_for(n, wanted, FULL) + 4096)
            loaded = read(path, kind, snapshot, keys, layers=wanted, room=room)
            expected = {tensor for tensor in names if layer_of(tensor) in wanted}
            assert loaded.tensors.keys() == expected
            assert loaded.header.parts == tuple(
                sorted((_without_engine(p) for p in snapshot.header.parts), key=lambda p: p.layers)
            )
            covered = np.zeros(room.num_bytes, np.bool_)
            for tensor in expected:
                assert bytes_of(loaded, tensor) == bytes_of(snapshot, tensor)
                stored = loaded.tensors[tensor]
                covered[stored.offset : stored.offset + stored.num_bytes] = True
            room.give_back(0)
            memory = room.take(room.num_bytes)[1]
            assert (memory[~covered] == SENTINEL).all()
            with path.open("rb", buffering=0) as file:
                chunk = open_chunk(file, kind, secrets_of(keys), name="it", key=key_of(snapshot))
                assert (chunk.num_tokens, chunk.start) == (n, snapshot.header.start)
                assert chunk.parent == snapshot.header.prefix
                assert chunk.tokens.tolist() == snapshot.tokens.tolist()
                again = Snapshot.of_file(chunk.read(wanted, None, "a model"))
            assert again.header == loaded.header
            assert all(bytes_of(again, t) == bytes_of(loaded, t) for t in expected)


def _without_engine(part: Any) -> Any:
    facts, planes = replace(part.facts, engine=None), tuple(sorted(part.planes))
    return replace(part, facts=facts, planes=planes)


# ---- what a file is ----


@pytest.mark.parametrize("keys", KEYS)
def test_a_header_is_constant_but_for_its_record(keys: str, tmp_path: Path) -> None:
    """Also its length; data begins at a page, and the file's size is known before it is there."""
    kind = kind_of(numbers(DType.BF16), keys)
    heads = set()
    for seed in SEEDS:
        snapshot = snapshot_of(numbers(DType.BF16), 9, seed, start=1 << 40)
        raw = write(tmp_path / str(seed), snapshot, kind, keys)
        length = int.from_bytes(raw[:8], "little")
        assert (8 + length) % 4096 == 0
        digits = json.loads(raw[8 : 8 + length])["__metadata__"]["kvx"]
        heads.add(raw[: 8 + length].replace(digits.encode(), b"", 1))
        assert kind.layout(9).least_bytes == kind.layout(9).most_bytes == len(raw)
    assert len(heads) == 1


def test_pieces_are_cut_as_the_page_says(tmp_path: Path) -> None:
    """262,144 bytes of one dtype are together; a larger tensor than 1 MiB is cut at multiples."""
    for make in (*MAKERS.values(), numbers(DType.F32, 3, dim=1400)):
        layout = kind_of(make).layout(FULL)
        tensors = store_reader.tensors_of(json.loads(kind_of(make).text), FULL)
        found = [[tuple(each) for each in piece.slices] for piece in layout.pieces]
        assert found == store_reader.pieces_of(tensors)
    assert [piece.num_bytes for piece in layout.pieces] == [
        *(1048576, 1048576, 1048576, 214272),
        *(1048576, 631424),
    ] * 3


def test_safetensors_opens_files(tmp_path: Path) -> None:
    make = numbers(DType.F16)
    snapshot, kind = snapshot_of(make, 33, 1), kind_of(make)
    write(tmp_path / "file", snapshot, kind)
    with safe_open(tmp_path / "file", "np") as file:
        names = set(snapshot.tensors)
        assert set(file.keys()) == names
        for name in names:
            assert file.get_tensor(name).tobytes() == bytes_of(snapshot, name)
    kind = kind_of(make, "both")
    raw = write(tmp_path / "encrypted", snapshot, kind, "both")
    with safe_open(tmp_path / "encrypted", "np") as file:
        assert list(file.keys()) == ["pieces"]
        assert raw.endswith(file.get_tensor("pieces").tobytes())


def test_a_coding_that_saves_nothing_is_left_out_piece_by_piece(tmp_path: Path) -> None:
    """Gaussian numbers get shorter, bits of every kind do not."""
    make = MAKERS["lossless"]
    kind, whole = kind_of(make), []
    for noise in (False, True):
        snapshot = snapshot_of(make, FULL, 1)
        if noise:
            assert snapshot.memory is not None
            snapshot.memory[:] = np.random.default_rng(1).integers(0, 256, len(snapshot.memory))
        raw = write(tmp_path / "file", snapshot, kind)
        whole.append(len(raw) == kind.layout(FULL).most_bytes)
        found = store_reader.read(raw, kind.text, decoders=DECODERS)
        for name, tensor in found.tensors.items():
            assert tensor.data == bytes_of(snapshot, name)
            assert bytes_of(read(tmp_path / "file", kind, snapshot), name) == tensor.data
    assert whole == [False, True]


def test_the_kind_of_a_model_does_not_depend_on_order_or_length(tmp_path: Path) -> None:
    """Nor on the engine and the fingerprint."""
    for make in MAKERS.values():
        parts, tensors = make(FULL)
        shorter = make(4).tensors
        other = tuple(
            replace(p, facts=replace(p.facts, engine="there 2", fingerprint=None)) for p in parts
        )
        kinds = [
            Kind.of(parts, tensors, FULL),
            Kind.of(parts[::-1], dict(reversed(tensors.items())), FULL),
            Kind.of(other, shorter, 4),
        ]
        assert len({kind.id for kind in kinds}) == 1
        assert kinds[0].id == hashlib.sha256(kinds[0].text).hexdigest()[:32]
        assert kinds[0].digest == hashlib.sha256(kinds[0].text).digest()
        assert all(kinds[0].has_parts(snapshot_of(make, n, 1).header) for n in (1, 5))
    with pytest.raises(InvalidArgumentError, match=r"no planes\.3\.role_41, expected an entry"):
        Kind.of(*MAKERS["planes"](3), 3)


def test_what_files_share_is_one_object() -> None:
    """So that what follows from it is found once: room.placed, Loads."""
    kind = kind_of(numbers(DType.BF16))
    assert kind.layout(9).tensors is kind.layout(9).tensors
    assert kind.with_fingerprint("a model") is kind.with_fingerprint("a model")
    assert kind.with_fingerprint("a model") is not kind.with_fingerprint("another")


def test_a_snapshot_of_another_kind_is_not_written(tmp_path: Path) -> None:
    kind = kind_of(numbers(DType.BF16))
    with (tmp_path / "file").open("wb", buffering=0) as file:
        other = snapshot_of(numbers(DType.F16), 9, 1)
        with pytest.raises(InvalidArgumentError, match="other layers, heads or facts"):
            file.write(b"".join(chunk_parts(other, kind, Secrets())))
        snapshot = snapshot_of(numbers(DType.BF16, dim=8), 9, 1)
        with pytest.raises(InvalidArgumentError, match=r"layers\.0\.k of the snapshot is"):
            file.write(b"".join(chunk_parts(snapshot, kind, Secrets())))
        snapshot = snapshot_of(numbers(DType.BF16), 9, 1)
        with pytest.raises(InvalidArgumentError, match="not signed and not encrypted"):
            file.write(b"".join(chunk_parts(snapshot, kind, secrets_of("both"))))
    assert (tmp_path / "file").stat().st_size == 0


# ---- keys ----


def test_keys_are_changed_while_processes_run(tmp_path: Path) -> None:
    """Each process writes with its first keys and reads with all."""
    make, old, new = numbers(DType.BF16), bytes(range(50, 90)), bytes(range(60, 100))
    kind, snapshot = kind_of(make, "both"), snapshot_of(make, 9, 1)
    for mine, others in ((SIGNING, old), (old, SIGNING)):
        writer = Secrets.of([mine, others], [new, ENCRYPTION])
        with (tmp_path / "file").open("wb", buffering=0) as file:
            file.write(b"".join(chunk_parts(snapshot, kind, writer)))
        raw = (tmp_path / "file").read_bytes()
        assert store_reader.read(raw, kind.text, signing=mine, encryption=new).start == 400
        for reader in (Secrets.of([SIGNING, old], [ENCRYPTION, new]), Secrets.of(mine, new)):
            found = read(tmp_path / "file", kind, snapshot, secrets=reader)
            assert all(bytes_of(found, n) == bytes_of(snapshot, n) for n in found.tensors)
        with pytest.raises(UnsignedError, match=r"signed with the key \w+, which"):
            read(tmp_path / "file", kind, snapshot, secrets=Secrets.of(others, new))
        with pytest.raises(StoreError, match=r"encrypted with the key \w+, which"):
            read(tmp_path / "file", kind, snapshot, secrets=Secrets.of(mine, ENCRYPTION))


def test_each_file_has_random_bytes_of_its_own(tmp_path: Path) -> None:
    """So that no nonce is used twice with one key, also where `put` calls `write` again."""
    make = numbers(DType.BF16)
    kind, snapshot = kind_of(make, "encrypted"), snapshot_of(make, 9, 1)
    raws = [write(tmp_path / "file", snapshot, kind, "encrypted") for _ in range(20)]
    records = [json.loads(raw[8:4096].rstrip())["__metadata__"]["kvx"] for raw in raws]
    assert len({record[72:136] for record in records}) == 20
    assert len({raw[4096:] for raw in raws}) == 20
    assert not any(bytes_of(snapshot, "layers.0.k")[:16] in raw for raw in raws)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("others", KEYS)
def test_a_process_takes_files_of_its_sort_alone(keys: str, others: str, tmp_path: Path) -> None:
    if keys == others:
        return
    make = numbers(DType.BF16)
    kind, snapshot = kind_of(make, keys), snapshot_of(make, 9, 1)
    write(tmp_path / "file", snapshot, kind, keys)
    with pytest.raises(StoreError, match=r"(signed|encrypted), and this process"):
        read(tmp_path / "file", kind, snapshot, others)
    with pytest.raises(CorruptError):  # the file of another kind under this name
        read(tmp_path / "file", kind_of(make, others), snapshot, others)


# ---- what is wrong ----


def small(keys: str, path: Path) -> tuple[Kind, Snapshot, bytes]:
    make = numbers(DType.BF16, dim=2)
    kind, snapshot = kind_of(make, keys), snapshot_of(make, 3, 1)
    return kind, snapshot, write(path, snapshot, kind, keys)


@pytest.mark.parametrize("keys", KEYS)
def test_every_byte_counts(keys: str, tmp_path: Path) -> None:
    """Each byte of a file, changed, is found: one bit, and for letters the case."""
    path = tmp_path / "file"
    kind, snapshot, raw = small(keys, path)
    record_end = raw.index(b'"}') + 2
    file = os.open(path, os.O_WRONLY)
    for at in range(len(raw)):
        # The spaces at the end are alike: some of them.
        if record_end + 400 < at < 4090:
            continue
        for bit in (1, 0x20) if at % 3 == 0 else (0x20,):
            os.pwrite(file, bytes([raw[at] ^ bit]), at)
            with pytest.raises(StoreError):
                read(path, kind, snapshot, keys)
        os.pwrite(file, raw[at : at + 1], at)
    os.close(file)
    read(path, kind, snapshot, keys)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("num_tokens", [7, None])
def test_wrong_files_cost_nothing(keys: str, num_tokens: int | None, tmp_path: Path) -> None:
    """Truncated, longer, with holes, of other tokens or another kind: at most 10 ms and 1 MiB."""
    make = numbers(DType.F32, dim=1000)  # 12,000 bytes a token and layer
    kind, path = kind_of(make, keys), tmp_path / "file"
    good = snapshot_of(make, 7, 1)
    raw = write(path, good, kind, keys)
    other = write(tmp_path / "other", snapshot_of(make, 7, 2), kind, keys)
    longer = write(tmp_path / "longer", snapshot_of(make, 150, 2), kind, keys)
    fewer = numbers(DType.F16, dim=2000)
    of_other_kind = write(tmp_path / "kind", snapshot_of(fewer, 7, 1), kind_of(fewer, keys), keys)
    huge = bytearray(raw[:4096])
    huge[32 + 24 : 32 + 32] = b"ffffffff"  # its number of tokens
    contents: list[bytes | int] = [
        *(raw[:size] for size in (0, 7, 8, 40, 100, 4095, 4096, 4097, len(raw) - 1)),
        raw + b"\0",
        raw + raw,
        bytes(len(raw)),
        raw[:4096] + bytes(len(raw) - 4096),
        bytes(huge) + raw[4096:],
        other,
        longer,
        of_other_kind,
        1 << 40,
    ]
    secrets, room = secrets_of(keys), Room(FULL)
    room.clear(kind.memory_for(FULL, kind.layers, FULL))
    kind.layout(7)

    def attempt() -> None:
        if num_tokens is None:
            with path.open("rb", buffering=0) as file:
                chunk = open_chunk(file, kind, secrets, name="it", key=key_of(good))
                chunk.read(kind.layers, room)
                return
        read_file(file_at(path), kind, num_tokens, key=key_of(good), room=room, secrets=secrets)

    for content in contents:
        if isinstance(content, int):
            os.truncate(path, 0)
            os.truncate(path, content)
        else:
            path.write_bytes(content)
        taken = []
        for _ in range(3):
            begin = time.thread_time()
            with pytest.raises(CorruptError):
                attempt()
            taken.append(time.thread_time() - begin)
        assert min(taken) < 0.01
        tracemalloc.start()
        with pytest.raises(CorruptError):
            attempt()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        assert room.take(0)[0] == 0
    path.write_bytes(raw)
    attempt()


def test_a_file_that_says_many_tokens_is_not_laid_out(tmp_path: Path) -> None:
    """Unless it is as long as that."""
    path, make = tmp_path / "file", numbers(DType.F32, 33, dim=1000)
    kind, good = kind_of(make), snapshot_of(make, 1, 1)
    raw = bytearray(write(path, good, kind))
    raw[32 + 24 : 32 + 32] = (60_000).to_bytes(4, "little").hex().encode()
    path.write_bytes(raw)
    with path.open("rb", buffering=0) as file:
        begin = time.thread_time()
        with pytest.raises(CorruptError, match="bytes, and 60000 tokens"):
            open_chunk(file, kind, Secrets(), name="it")
        assert time.thread_time() - begin < 0.01
    assert 60_000 not in kind._layouts


def test_no_file_but_a_regular_one(tmp_path: Path) -> None:
    kind, snapshot, _ = small("plain", tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    handle = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with (
        os.fdopen(handle, "rb", buffering=0) as file,
        pytest.raises(StoreError, match="no regular file"),
    ):
        open_chunk(file, kind, Secrets(), name="it", num_tokens=3)
    with pytest.raises(OSError, match="No such device or address"):
        file_at(tmp_path / "fifo")("it", (), 0, 1 << 20)
    with (tmp_path / "file").open("rb", buffering=0) as file:
        chunk = open_chunk(file, kind, Secrets(), name="it")
        os.truncate(tmp_path / "file", 4100)
        with pytest.raises(CorruptError, match="became shorter"):
            chunk.read(kind.layers)
    with pytest.raises(StoreError, match="cannot be read"):
        chunk.read(kind.layers)
    assert snapshot.header.start == 400


# ---- what is wrong, and has good checks all the same ----


def resealed(raw: bytes, change: Callable[[bytearray], object], data: bytes | None = None) -> bytes:
    """A plain file whose record is changed, with a good check of it."""
    length = int.from_bytes(raw[:8], "little")
    digits = json.loads(raw[8 : 8 + length])["__metadata__"]["kvx"]
    record = bytearray.fromhex(digits)[:-16]
    change(record)
    whole = bytes(record) + store_reader.check_of(bytes(record), None, b"")
    head = raw[: 8 + length].replace(digits.encode(), whole.hex().encode(), 1)
    return head + (raw[8 + length :] if data is None else data)


def at(offset: int, value: bytes) -> Callable[[bytearray], object]:
    def change(record: bytearray) -> None:
        record[offset : offset + len(value)] = value

    return change


@pytest.mark.parametrize(
    ("offset", "value", "sentence"),
    [
        (0, b"KVXCHNK4", "does not begin"),
        (8, b"\1\0\0\0", "does not begin"),
        (8, b"\2\0\0\0", "does not begin"),
        (12, b"\4\0\0\0", "does not begin"),
        (16, b"\0\0\0\0", "does not begin"),
        (16, b"\2\0\0\0", "does not begin"),
        (20, b"\1", "does not begin"),
        (28, b"\1", "does not begin"),
        (67, b"\1", "does not begin"),
        (68, b"\0\0\0", "has the tokens of"),
        (100, b"\0\0\0", "is of kind"),
        (139, b"\xff", "begins at token"),
        (140, b"\xff", "has the tokens of"),
        (164, b"\xff\xff\xff\xff", "pieces of other lengths"),
        (164, b"\0\0\0\0", "pieces of other lengths"),
        (168, b"\0\0\0\0", "bytes of layers.0.k, layers.0.v, .* have changed"),
    ],
)
def test_forged_records(offset: int, value: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    kind, snapshot, raw = small("plain", path)
    path.write_bytes(resealed(raw, at(0, b"K")))
    read(path, kind, snapshot)
    path.write_bytes(resealed(raw, at(offset, value)))
    with pytest.raises(CorruptError, match=sentence):
        read(path, kind, snapshot)


@pytest.mark.parametrize("keys", KEYS)
def test_swapped_pieces_are_refused(keys: str, tmp_path: Path) -> None:
    """Of a file, and of two files of one prompt with the same keys."""
    make, path = numbers(DType.F32, dim=400), tmp_path / "file"
    kind, one, two = kind_of(make, keys), snapshot_of(make, 80, 1), snapshot_of(make, 80, 2)
    raw, other = write(path, one, kind, keys), write(path, two, kind, keys)
    begin = kind.layout(80).head.num_bytes
    size = kind.layout(80).pieces[0].num_bytes
    assert kind.layout(80).pieces[2].num_bytes == size
    first, third = slice(begin, begin + size), begin + sum(kind.layout(80).sizes[:2])
    swapped = bytearray(raw)
    swapped[first], swapped[third : third + size] = raw[third : third + size], raw[first]
    mixed = bytearray(raw)
    mixed[first] = other[first]
    headed = other[:begin] + raw[begin:]
    for content in (bytes(swapped), bytes(mixed)):
        path.write_bytes(content)
        with pytest.raises(CorruptError, match="have changed since they were written"):
            read(path, kind, one, keys)
    path.write_bytes(headed)
    with pytest.raises(CorruptError, match="have changed since they were written"):
        read(path, kind, two, keys)
    path.write_bytes(raw)
    read(path, kind, one, keys)


def test_forged_sizes_of_coded_pieces(tmp_path: Path) -> None:
    """They have to fill the data, none longer than it is in memory; hostile bytes do not decode."""
    make, path = MAKERS["lossless"], tmp_path / "file"
    kind, snapshot = kind_of(make), snapshot_of(make, FULL, 1)
    raw = write(path, snapshot, kind)
    rows = 140 + 8 * FULL
    sizes = kind.layout(FULL).sizes
    first = int.from_bytes(
        bytes.fromhex(json.loads(raw[8 : kind.layout(FULL).head.num_bytes])["__metadata__"]["kvx"])[
            rows : rows + 4
        ],
        "little",
    )
    assert 0 < first < sizes[0]
    for size in (0, first - 1, first + 1, sizes[0] + 1, (1 << 32) - 1):
        path.write_bytes(resealed(raw, at(rows, size.to_bytes(4, "little"))))
        with pytest.raises(CorruptError, match="pieces of other lengths"):
            read(path, kind, snapshot)
    begin = kind.layout(FULL).head.num_bytes
    for seed in range(20):
        random = np.random.default_rng(seed)
        piece = bytearray(raw[begin : begin + first])
        if seed % 2:
            piece[:] = random.bytes(first)
        else:
            piece[int(random.integers(0, 64))] ^= int(random.integers(1, 256))
        check = store_reader.check_of(bytes(piece), None, b"")
        path.write_bytes(resealed(raw, at(rows + 4, check), bytes(piece) + raw[begin + first :]))
        with pytest.raises(CorruptError, match="have changed"):
            read(path, kind, snapshot)


def test_planes_begin_where_their_entries_do(tmp_path: Path) -> None:
    make, path = MAKERS["planes"], tmp_path / "file"
    kind, snapshot = kind_of(make), snapshot_of(make, 9, 1, start=402)
    write(path, snapshot, kind)
    with pytest.raises(CorruptError, match="begins at token 402"):
        read(path, kind, snapshot)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_finite_and_positive(value: float, tmp_path: Path) -> None:
    make, path = MAKERS["a scale per token and head"], tmp_path / "file"
    kind, snapshot = kind_of(make), snapshot_of(make, 9, 1)
    stored = snapshot.tensors["layers.1.v_scale"]
    assert snapshot.memory is not None
    snapshot.memory[stored.offset : stored.offset + 4].view(np.float32)[:] = value
    write(path, snapshot, kind)
    with pytest.raises(CorruptError, match=r"layers\.1\.v_scale has a number that is no scale"):
        read(path, kind, snapshot)
    read(path, kind, snapshot, layers=[0])
