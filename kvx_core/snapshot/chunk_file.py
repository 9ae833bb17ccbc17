"""Writes snapshots to files of chunks and reads them back. Readers do not trust the files.

Format: docs/store_format.md, "Entries".
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvx_core._c.os_files import OpenFile, read_at
from kvx_core.errors import (
    CorruptError,
    InvalidArgumentError,
    OtherKeyError,
    StoreError,
    UnsignedError,
)
from kvx_core.snapshot.coding import CODINGS
from kvx_core.snapshot.contents import Contents, Header, Part
from kvx_core.snapshot.dense import Dense
from kvx_core.snapshot.file_layout import FileLayout, Selection
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.kind_text import MAX_TOKENS
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.pieces import MOST_BYTES, Group, Range
from kvx_core.snapshot.record import BEGIN_BYTES, CLEAR_BYTES, Record, RecordText, form_of
from kvx_core.snapshot.room import Placed, Room
from kvx_core.snapshot.scales import are_good
from kvx_core.snapshot.sealing import Sealing
from kvx_core.snapshot.secrets import TAG_BYTES
from kvx_core.snapshot.threaded import in_threads

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from kvx_core.snapshot.secrets import Secrets

MAX_POSITION = 1 << 62
_MOST_VIEWS = 60  # that one call of BlobStore.fetch fills
_of_thread = threading.local()
_PLAIN = Sealing(b"", None, None)


def chunk_parts(snapshot: Contents, kind: Kind, secrets: Secrets) -> list[memoryview]:
    """Returns the bytes of the file of a snapshot, as parts that follow one another.

    snapshot: in memory; its header.prefix is the key of all tokens before it
    Raises InvalidArgumentError if the snapshot is not of this kind, StoreError if there is not
    enough memory.
    """
    if (kind.keyed, kind.encrypted) != (secrets.is_keyed, secrets.is_encrypted):
        raise InvalidArgumentError(
            f"files of kind {kind.id} are {'' if kind.keyed else 'not '}signed and "
            f"{'' if kind.encrypted else 'not '}encrypted, expected secrets for that"
        )
    if not kind.has_parts(snapshot.header):
        raise InvalidArgumentError(f"the snapshot has other layers, heads or facts than {kind}")
    return file_parts(snapshot, kind, secrets, bytes.fromhex(snapshot.header.prefix))


def file_parts(snapshot: Contents, kind: Kind, secrets: Secrets, parent: bytes) -> list[memoryview]:
    """Returns the bytes of the file of a snapshot, as parts that follow one another.

    parent: the parent in the record
    Raises InvalidArgumentError if the tensors of the snapshot differ from those of the kind, or if
    its data is in a file, StoreError if there is not enough memory.
    """
    memory, header = snapshot.memory, snapshot.header
    if memory is None:
        raise InvalidArgumentError(f"{snapshot.name} has its data in a file, expected it in memory")
    layout = kind.layout(len(snapshot.tokens))
    source = layout.source(snapshot.tensors)
    sealing, text = Sealing.new(layout.head.record, secrets), layout.head.record

    def sealed(index: int) -> tuple[Sequence[Buffer], bytes]:
        views: Sequence[Buffer] = [memory.data[r.begin : r.end] for r in source.ranges[index]]
        coding = layout.pieces[index].coding
        return sealing.sealed(index, _encoded(coding, views) if coding else views)

    try:
        pieces = in_threads(sealed, range(len(layout.pieces)), layout.num_bytes)
        sizes = [sum(len(memoryview(view)) for view in views) for views, _ in pieces]
        record = Record(
            parent=parent,
            kind=kind.digest,
            start=header.start,
            ids=snapshot.tokens.astype("<i8", copy=False).tobytes(),
            sizes=tuple(sizes),
            checks=tuple(check for _, check in pieces),
        )
        raw = sealing.sealed_record(text.packed(sealing.clear, record))
        first = layout.head.text(raw, sum(sizes))
    except MemoryError as error:
        raise StoreError(f"the snapshot cannot be written: {error}") from None
    if layout.is_direct:
        data = [memory.data[run.begin : run.end] for run in source.runs]
    else:
        data = [memoryview(view) for views, _ in pieces for view in views]
    return [memoryview(first), *data]


def _encoded(coding: str, views: Sequence[Buffer]) -> Sequence[Buffer]:
    """Returns the encoded bytes of a piece, or the bytes as they are if encoding saves nothing."""
    whole = memoryview(views[0] if len(views) == 1 else b"".join(views))
    data = np.frombuffer(whole, np.uint8)
    encoded = CODINGS[coding].encode(data)
    return [encoded.data] if len(encoded) < len(data) else views


@dataclass(slots=True)
class ChunkFile:
    """An open file of a kind. The caller closes it."""

    file: BinaryIO | OpenFile
    kind: Kind
    secrets: Secrets
    name: str  # for messages
    layout: FileLayout
    num_bytes: int  # of the file
    _record: Record = field(init=False, repr=False)
    _sealing: Sealing = field(init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def parent(self) -> str:
        """The key of all tokens before these; the prefix of the snapshot in a snapshot's file."""
        prefix = self.kind.prefix
        return self._record.parent.hex() if prefix is None else prefix

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._record.tokens

    @property
    def start(self) -> int:
        """The position in the prompt of the first token."""
        return self._record.start

    def read(
        self, layers: Sequence[int], room: Room | None = None, fingerprint: str | None = None
    ) -> Loaded:
        """Reads some layers into memory and checks every byte of them.

        room:        gives the memory; room.has(Kind.memory_for(...)) must be true; None: new memory
        fingerprint: of the model; the file does not contain it
        Raises CorruptError if the data has changed, StoreError if it cannot be read.
        """
        room = Room(self.num_tokens) if room is None else room
        wanted = Wanted.of(self.kind, self.num_tokens, layers, room, fingerprint)
        at, memory = room.take(wanted.selection.place.num_bytes)
        try:
            self.read_groups(wanted.selection.groups, memory.data)
            return self.loaded(wanted, room, at, memory)
        except BaseException:
            room.give_back(at)
            raise

    def loaded(self, wanted: Wanted, room: Room, at: int, memory: Bytes) -> Loaded:
        """Returns the data that was read into `memory`, which the room gave at byte `at`.

        Raises CorruptError if a scale is invalid.
        """
        header = Header(self.start, self.parent, wanted.parts)
        return Loaded.of(header, self.tokens, wanted, room, at, memory, self.name)

    def check_size(self) -> None:
        """Raises CorruptError if files of its kind and number of tokens cannot have this size."""
        layout = self.layout
        if not layout.least_bytes <= self.num_bytes <= layout.most_bytes:
            raise CorruptError(
                f"{self.name} has {self.num_bytes} bytes, expected {layout.least_bytes} to "
                f"{layout.most_bytes} for {layout.num_tokens} tokens of kind {self.kind.id}"
            )

    def _open(self, key: str | None) -> None:
        """Reads and checks the head."""
        head = bytearray(self.layout.head.num_bytes)
        self._read_at([memoryview(head)], 0)
        self.check_head(head, key)

    def _read_at(self, views: Sequence[memoryview], offset: int) -> None:
        try:
            read_at(self.file.fileno(), views, offset)
        except EOFError:
            raise CorruptError(f"{self.name} became shorter while it was read") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.name} cannot be read: {error}") from None

    def check_head(self, head: bytearray, key: str | None) -> None:
        """Checks the head and its record, and keeps the record. Raises CorruptError, StoreError.

        key: the key that the tokens must have; None: any key
        """
        layout, kind, name = self.layout, self.kind, self.name
        num_bytes = self.num_bytes - len(head)
        sealed = layout.head.record_of(head, num_bytes)
        if sealed is None:
            raise CorruptError(f"{name} does not begin as files of kind {kind.id} do")
        text = layout.head.record
        raw, sealing = opened_record(sealed, text, self.secrets, name)
        record = text.unpacked(raw)
        sizes = record.sizes
        if record.kind != kind.digest:
            raise CorruptError(f"{name} is of kind {record.kind[:16].hex()}, expected {kind.id}")
        if kind.prefix is not None and any(record.parent):
            raise CorruptError(f"{name} has a parent, expected none: it is no entry of a store")
        if record.start > MAX_POSITION or (
            layout.entry_tokens and any(record.start % n for n in layout.entry_tokens)
        ):
            raise CorruptError(f"{name} begins at token {record.start}")
        if layout.is_coded:
            good = all(
                size == piece.num_bytes
                or (piece.coding and size < piece.num_bytes <= size * CODINGS[piece.coding].most)
                for size, piece in zip(sizes, layout.pieces, strict=True)
            )
        else:
            good = sizes == layout.sizes
        if not good or sum(sizes) != num_bytes:
            raise CorruptError(f"{name} has pieces of other lengths than files of its kind")
        if key is not None and record.key != key:
            raise CorruptError(f"{name} has the tokens of {record.key}")
        self._record, self._sealing = record, sealing

    def read_groups(self, groups: Sequence[Group], view: memoryview) -> None:
        """Reads pieces into the memory of a snapshot, and checks each piece.

        view: the memory of the snapshot
        """
        if not groups:
            return

        def read(group: Group) -> None:
            last = group.first + len(group.ranges)
            size = sum(self._record.sizes[group.first : last])
            data, other = data_of(self.layout, group, view, size)
            self._read_at(data, self._offset(group.first))
            self.check_group(group, view, other)

        in_threads(read, groups, sum(group.num_bytes for group in groups))

    def check_group(self, group: Group, view: memoryview, other: memoryview) -> None:
        """Checks the pieces of a group after they were read. Decrypts and decodes them into `view`.

        other: the second result of data_of
        """
        layout, sealing, checks, at = self.layout, self._sealing, self._record.checks, 0
        unwanted = other if layout.is_direct else memoryview(bytearray(group.unwanted_bytes))
        for index, ranges in enumerate(group.ranges, group.first):
            targets = _views(ranges, view, unwanted)
            if layout.is_direct:
                good = sealing.is_good(checks[index], targets)
            else:
                size = self._record.sizes[index]
                good = self._open_piece(index, other[at : at + size + TAG_BYTES], targets)
                at += size
            if not good:
                names = ", ".join(each.tensor for each in layout.pieces[index].slices)
                raise CorruptError(
                    f"{self.name}: the bytes of {names[:200]} have changed since they were written"
                )

    def _open_piece(self, index: int, data: memoryview, targets: list[memoryview]) -> bool:
        """Decrypts and decodes a piece into `targets`. Returns False if the piece is corrupt.

        data: the bytes of the piece and TAG_BYTES behind them, which are overwritten and put back
        """
        sealing, check = self._sealing, self._record.checks[index]
        sealed, data = data, data[:-TAG_BYTES]
        if not sealing.is_good(check, [data]):
            return False
        piece = self.layout.pieces[index]
        is_coded = len(data) < piece.num_bytes
        if sealing.is_encrypted:
            into = [memoryview(bytearray(len(data)))] if is_coded else targets
            if not sealing.decrypted(index, check, sealed, into):
                return False
            data = into[0]
        if is_coded:
            decoded = targets[0] if len(targets) == 1 else memoryview(bytearray(piece.num_bytes))
            coding = CODINGS[piece.coding]
            if not coding.decode(np.frombuffer(decoded, np.uint8), np.frombuffer(data, np.uint8)):
                return False
            data = decoded
        if data is not targets[0]:
            at = 0
            for target in targets:
                target[:] = data[at : at + len(target)]
                at += len(target)
        return True

    def _offset(self, index: int) -> int:
        """Returns the offset of a piece in the file."""
        return self.layout.head.num_bytes + sum(self._record.sizes[:index])


def _buffer() -> memoryview:
    """Returns this thread's buffer for encrypted or encoded bytes of a file."""
    found: memoryview | None = getattr(_of_thread, "buffer", None)
    if found is None:
        found = _of_thread.buffer = memoryview(bytearray(MOST_BYTES + TAG_BYTES))
    return found


def data_of(
    layout: FileLayout, group: Group, view: memoryview, size: int
) -> tuple[list[memoryview], memoryview]:
    """Returns the memory that the bytes of a group are read into, and `other` for check_group.

    `other` is the memory outside of `view`: this thread's buffer for encrypted or encoded bytes, or
    memory for tensors that nobody wants.
    size: bytes of the group's pieces in the file
    """
    if layout.is_direct:
        unwanted = memoryview(bytearray(group.unwanted_bytes))
        return _views(group.runs, view, unwanted), unwanted
    buffer = _buffer()
    return [buffer[:size]], buffer


def _views(ranges: Sequence[Range], wanted: memoryview, other: memoryview) -> list[memoryview]:
    return [(wanted if of_wanted else other)[begin:end] for begin, end, of_wanted in ranges]


class Wanted(NamedTuple):
    """The plan to read some layers of any file of one kind and number of tokens."""

    kind: Kind
    layout: FileLayout
    selection: Selection
    parts: tuple[Part, ...]  # of the snapshots in the files
    with_head: bool  # the first group is read with the head

    @classmethod
    def of(
        cls, kind: Kind, num_tokens: int, layers: Sequence[int], room: Room, fingerprint: str | None
    ) -> Self:
        """layers: of the kind; room: gives the memory; fingerprint: see ChunkFile.read

        Raises StoreError if files with this number of tokens are too long.
        """
        layout = kind.layout(num_tokens)
        selection = layout.selection(layers, room.num_tokens)
        first = selection.groups[:1]
        with_head = (
            layout.num_bytes <= MOST_BYTES
            and bool(first)
            and not first[0].first
            and len(first[0].runs) < _MOST_VIEWS
        )
        return cls(kind, layout, selection, kind.with_fingerprint(fingerprint), with_head)


class Loaded(NamedTuple):
    """The data that was read from a file into memory of a room: the fields of a Snapshot."""

    header: Header
    tokens: npt.NDArray[np.int64]
    memory: Bytes
    room: Room
    at: int  # bytes, from the start of the room
    place: Placed
    name: str  # for messages

    @classmethod
    def of(
        cls,
        header: Header,
        tokens: npt.NDArray[np.int64],
        wanted: Wanted,
        room: Room,
        at: int,
        memory: Bytes,
        name: str,
    ) -> Self:
        """Checks the scales. Raises CorruptError if a scale is invalid."""
        place = wanted.selection.place
        if wanted.selection.scales:
            dense = Dense(place.tensors, memory)
            for scale in wanted.selection.scales:
                if not are_good(dense.array(scale)):
                    raise CorruptError(f"{name}: {scale} has a number that is no scale")
        return cls(header, tokens, memory, room, at, place, name)


def open_chunk(
    file: BinaryIO,
    kind: Kind,
    secrets: Secrets,
    *,
    name: str,
    key: str | None = None,
    num_tokens: int | None = None,
) -> ChunkFile:
    """Reads and checks the head of a file. Returns the file.

    file:       unbuffered; must stay open for reading as long as data is read
    name:       for messages
    key:        the key that the tokens must have; None: any key
    num_tokens: the number of tokens that the file must have; None: the number that its head says
    Raises CorruptError if it is not a valid file of this kind, OtherKeyError if it was signed or
    encrypted with a key that is not among the secrets, StoreError if it cannot be read.
    """
    chunk = _sized(file, kind, secrets, name, num_tokens)
    chunk._open(key)
    return chunk


def _sized(
    file: BinaryIO, kind: Kind, secrets: Secrets, name: str, num_tokens: int | None
) -> ChunkFile:
    """Checks the size of a file. Returns the file."""
    size = regular_size(file, name)
    if num_tokens is None:
        num_tokens = said_tokens(file, name)
        if size < kind.least_bytes(num_tokens):
            raise CorruptError(f"{name} has {size} bytes, and {num_tokens} tokens")
    chunk = ChunkFile(file, kind, secrets, name, kind.layout(num_tokens), size)
    chunk.check_size()
    return chunk


def regular_size(file: BinaryIO | OpenFile, name: str) -> int:
    """Returns the size in bytes of a regular file. Raises StoreError for any other file."""
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        raise StoreError(f"{name} cannot be read: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{name} is no regular file, expected one")
    return status.st_size


def said_tokens(file: BinaryIO, name: str) -> int:
    """Returns the number of tokens that the head of a file says. Checks nothing else.

    Raises CorruptError; StoreError if the file cannot be read.
    """
    try:
        form = form_of(os.pread(file.fileno(), BEGIN_BYTES, 0))
    except (OSError, ValueError) as error:
        raise StoreError(f"{name} cannot be read: {error}") from None
    if form is None or form.num_tokens > MAX_TOKENS:
        raise CorruptError(f"{name} does not begin as files of stores do")
    return form.num_tokens


def opened_record(
    sealed: bytes, text: RecordText, secrets: Secrets, name: str
) -> tuple[bytes, Sealing]:
    """Decrypts and checks a record. Returns its bytes before the check, and the file's Sealing.

    sealed: the record as it is in the file
    Raises CorruptError, UnsignedError, OtherKeyError, StoreError.
    """
    ids, form = text.keys(sealed), text.form
    if ids is None:
        raise CorruptError(f"{name} does not begin as files of its kind do")
    if form.signed != secrets.is_keyed:
        raise UnsignedError(
            f"{name} is {'' if form.signed else 'not '}signed, and this process has "
            f"{'keys' if secrets.is_keyed else 'no key'}. Give it those of the writer"
        )
    if form.encrypted != secrets.is_encrypted:
        raise StoreError(
            f"{name} is {'' if form.encrypted else 'not '}encrypted, and this process has "
            f"{'keys' if secrets.is_encrypted else 'no key'}. Give it those of the writer"
        )
    sealing = _PLAIN
    if form.signed or form.encrypted:
        signer, encrypter = secrets.signer_of(ids[0]), secrets.encrypter_of(ids[1])
        if form.signed and signer is None:
            raise OtherKeyError(
                f"{name} is signed with the key {ids[0]:016x}, which this process does not have"
            )
        if form.encrypted and encrypter is None:
            raise OtherKeyError(
                f"{name} is encrypted with the key {ids[1]:016x}, which this process does not have"
            )
        sealing = Sealing(sealed[:CLEAR_BYTES], signer, encrypter)
    raw = sealing.opened_record(sealed)
    if raw is None:
        raise CorruptError(f"{name}: its record has changed since it was written")
    return raw, sealing
