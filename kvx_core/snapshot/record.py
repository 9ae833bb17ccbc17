"""Record: what a file has of its own, in a safetensors header that its kind decides else.

Format: docs/store_format.md, "Entries".
"""

from __future__ import annotations

import hashlib
import json
from binascii import unhexlify
from collections.abc import Mapping
from itertools import chain
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot.contents import Stored
from kvx_core.types import DType

PAGE = 4096
MAGIC = b"KVXCHNK3"
SIGNED, ENCRYPTED = 1, 2  # flags
CLEAR_BYTES = 68  # of a record, which encrypted ones begin with
RANDOM_BYTES = KEY_BYTES = 32
START_BYTES = ID_BYTES = 8
_FIXED_BYTES = 140
_BEGIN = Struct("<8s3I")  # what tells how long a record is
_KEYS = Struct("<2Q32s")  # behind it
_NUMBER = 15  # characters
_HOLE = b"@@"  # where a number comes; no JSON outside of strings has it
_CODES = {
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F8_E4M3: "F8_E4M3",
    DType.F8_E5M2: "F8_E5M2",
    DType.S8: "I8",
}


def element_bytes(dtype: DType) -> int:
    """Bytes of an element as safetensors has it."""
    return dtype.itemsize if dtype in _CODES else 1


class Form(NamedTuple):
    """What decides how long a record is."""

    num_tokens: int
    num_pieces: int
    signed: bool
    encrypted: bool

    @property
    def flags(self) -> int:
        return SIGNED * self.signed | ENCRYPTED * self.encrypted

    @property
    def piece_check_bytes(self) -> int:
        return 16 * (self.encrypted or not self.signed) + 32 * self.signed

    @property
    def check_bytes(self) -> int:
        """Of the record."""
        return 32 if self.signed else 16

    @property
    def num_bytes(self) -> int:
        rows = self.num_pieces * (4 + self.piece_check_bytes)
        return _FIXED_BYTES + 8 * self.num_tokens + rows + self.check_bytes + 16 * self.encrypted


class Record(NamedTuple):
    """What one file has of its own."""

    parent: bytes
    kind: bytes  # its digest
    start: int
    ids: bytes  # of the tokens, int64
    sizes: tuple[int, ...]  # of the pieces in the file
    checks: tuple[bytes, ...]  # of the pieces

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.ids, "<i8")

    @property
    def key(self) -> str:
        """Of the entry."""
        return hashlib.sha256(self.parent + self.ids).hexdigest()


class RecordText:
    """Packs and unpacks records of one form."""

    def __init__(self, form: Form) -> None:
        self.form = form
        rows = f"I{form.piece_check_bytes}s" * form.num_pieces
        self._rest = Struct(f"<32s32sQ{8 * form.num_tokens}s{rows}")  # behind CLEAR_BYTES
        self._begin = _BEGIN.pack(MAGIC, form.flags, form.num_tokens, form.num_pieces)
        self.without_keys = self.clear(0, 0, bytes(RANDOM_BYTES))

    def clear(self, signer: int, encrypter: int, random: bytes) -> bytes:
        """The first CLEAR_BYTES of a record."""
        return self._begin + _KEYS.pack(signer, encrypter, random)

    def keys(self, raw: bytes) -> tuple[int, int] | None:
        """The ids of the keys that have signed and encrypted it, from its first CLEAR_BYTES; None:
        it is no record of this form.
        """
        if raw.startswith(self.without_keys):
            return 0, 0
        form = self.form
        if not raw.startswith(self._begin):
            return None
        signer, encrypter, random = _KEYS.unpack_from(raw, _BEGIN.size)
        if (signer and not form.signed) or ((encrypter or any(random)) and not form.encrypted):
            return None
        return signer, encrypter

    def packed(self, clear: bytes, record: Record) -> bytes:
        """All bytes before the check."""
        rows = chain.from_iterable(zip(record.sizes, record.checks, strict=True))
        return clear + self._rest.pack(*record[:4], *rows)

    def unpacked(self, raw: bytes) -> Record:
        """From all bytes before the check, of which `keys` has found the first good."""
        parent, kind, start, ids, *rows = self._rest.unpack_from(raw, CLEAR_BYTES)
        return Record(parent, kind, start, ids, tuple(rows[::2]), tuple(rows[1::2]))


# What is in front of the record's first digit, behind the length of the header.
FIRST_TEXT = b'{"__metadata__":{"kvx":"'
RECORD_AT = 8 + len(FIRST_TEXT)
BEGIN_BYTES = RECORD_AT + 2 * _BEGIN.size  # of a file, that tell the form of its record
MAX_HEADER_BYTES = 32 << 20  # of a snapshot: tokens mostly, about two million
MAX_FILE_BYTES = 1 << 38  # of its data in memory
# What is between the record's last digit and the kind, where a file has its kind with it.
KIND_TEXT = b'","kvx_kind":'


def form_of(head: bytes) -> Form | None:
    """The form of a file's record, from its first BEGIN_BYTES; None: it is no file of KVX."""
    if head[8:RECORD_AT] != FIRST_TEXT:
        return None
    try:
        magic, flags, num_tokens, num_pieces = _BEGIN.unpack(unhexlify(head[RECORD_AT:BEGIN_BYTES]))
    except (ValueError, StructError):
        return None
    if magic != MAGIC or not num_tokens or flags & ~(SIGNED | ENCRYPTED):
        return None
    return Form(num_tokens, num_pieces, bool(flags & SIGNED), bool(flags & ENCRYPTED))


class Head:
    """The bytes of files before their data: constant, but for the record."""

    def __init__(
        self, tensors: Mapping[str, Stored], form: Form, *, is_whole: bool, kind: bytes = b""
    ) -> None:
        """tensors:  in the order of the file
        is_whole: they are one tensor of bytes there, whose number differs between files
        kind:     its text, if the file has it with it
        """
        self.form = form
        self.record = RecordText(form)
        self._num_digits = 2 * form.num_bytes
        self._is_whole = is_whole
        beside = b'"'
        if kind:
            beside = KIND_TEXT + json.dumps(kind.decode("ascii")).encode("ascii")
        beside += b"}"
        entries = (_of_pieces() if is_whole else _of_tensors(tensors)) + b"}"
        num_bytes = len(FIRST_TEXT) + self._num_digits + len(beside) + len(entries)
        if is_whole:
            num_bytes += 2 * (_NUMBER - len(_HOLE))
        padding = -(8 + num_bytes) % PAGE
        self.num_bytes = 8 + num_bytes + padding
        self._before = (num_bytes + padding).to_bytes(8, "little") + FIRST_TEXT
        self._beside, self._entries = beside, entries + b" " * padding
        self._after = beside + self._entries

    def text(self, record: bytes, num_data_bytes: int) -> bytes:
        """All of it.

        record:         with its check and tag
        num_data_bytes: in this file
        """
        return self._before + record.hex().encode() + self._rest(num_data_bytes)

    def _rest(self, num_data_bytes: int) -> bytes:
        if not self._is_whole:
            return self._after
        number = b"%*d" % (_NUMBER, num_data_bytes)
        return self._beside + self._entries.replace(_HOLE, number)

    def record_of(self, head: bytes | bytearray, num_data_bytes: int) -> bytes | None:
        """The record, encrypted or not, in the first bytes of a file; None: they are no head of
        this kind.
        """
        at, rest = len(self._before), self._rest(num_data_bytes)
        digits = head[at : at + self._num_digits]
        if (
            len(head) != self.num_bytes
            or not head.startswith(self._before)
            or not head.endswith(rest)
            or digits != digits.lower()
        ):
            return None
        try:
            return unhexlify(digits)
        except ValueError:
            return None


def _of_tensors(tensors: Mapping[str, Stored]) -> bytes:
    """What the JSON says of them, with a comma before each."""
    entries = {}
    for name, stored in tensors.items():
        *shape, last = stored.shape
        if stored.dtype not in _CODES:
            last *= stored.dtype.itemsize
        entries[name] = {
            "dtype": _CODES.get(stored.dtype, "U8"),
            "shape": [*shape, last],
            "data_offsets": [stored.offset, stored.offset + stored.num_bytes],
        }
    text = json.dumps(entries, separators=(",", ":"))[1:-1]
    return f",{text}".encode() if entries else b""


def _of_pieces() -> bytes:
    """One tensor of bytes."""
    return b',"pieces":{"dtype":"U8","shape":[%b],"data_offsets":[0,%b]}' % (_HOLE, _HOLE)
