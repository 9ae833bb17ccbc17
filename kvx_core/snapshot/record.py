"""A Record is the part of a file's safetensors header that its kind does not determine.

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
CLEAR_BYTES = 68  # at the start of a record; they are never encrypted
RANDOM_BYTES = KEY_BYTES = 32
START_BYTES = ID_BYTES = 8
_FIXED_BYTES = 140
_BEGIN = Struct("<8s3I")  # the start of a record, which determines its length
_KEYS = Struct("<2Q32s")  # behind _BEGIN
_NUMBER = 15  # characters of a number
_HOLE = b"@@"  # stands for a number; JSON has it in strings alone
_CODES = {
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F8_E4M3: "F8_E4M3",
    DType.F8_E5M2: "F8_E5M2",
    DType.S8: "I8",
}


def element_bytes(dtype: DType) -> int:
    """Returns the bytes of an element of the safetensors dtype; 1 if the file holds bytes, U8."""
    return dtype.itemsize if dtype in _CODES else 1


class Form(NamedTuple):
    """The values that determine the length of a record."""

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
        """The bytes of the check of the record."""
        return 32 if self.signed else 16

    @property
    def num_bytes(self) -> int:
        rows = self.num_pieces * (4 + self.piece_check_bytes)
        return _FIXED_BYTES + 8 * self.num_tokens + rows + self.check_bytes + 16 * self.encrypted


class Record(NamedTuple):
    """The values that differ between files of a kind."""

    parent: bytes
    kind: bytes  # digest of the kind
    start: int
    ids: bytes  # token ids, int64
    sizes: tuple[int, ...]  # of the pieces in the file
    checks: tuple[bytes, ...]  # of the pieces

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.ids, "<i8")

    @property
    def key(self) -> str:
        """The key of the entry."""
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
        """Returns the first CLEAR_BYTES of a record.

        signer, encrypter: ids of the keys; 0: none
        random:            RANDOM_BYTES of the file; zeros if it is not encrypted
        """
        return self._begin + _KEYS.pack(signer, encrypter, random)

    def keys(self, raw: bytes) -> tuple[int, int] | None:
        """Returns the ids of the keys that signed and encrypted a record; None: of another form.

        raw: begins with the first CLEAR_BYTES of the record
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
        """Returns all bytes of a record before its check.

        clear: the first CLEAR_BYTES
        """
        rows = chain.from_iterable(zip(record.sizes, record.checks, strict=True))
        return clear + self._rest.pack(*record[:4], *rows)

    def unpacked(self, raw: bytes) -> Record:
        """Returns the record.

        raw: all bytes before the check; `keys` has accepted the first CLEAR_BYTES
        """
        parent, kind, start, ids, *rows = self._rest.unpack_from(raw, CLEAR_BYTES)
        return Record(parent, kind, start, ids, tuple(rows[::2]), tuple(rows[1::2]))


# The text between the length of the header and the record's first digit.
FIRST_TEXT = b'{"__metadata__":{"kvx":"'
RECORD_AT = 8 + len(FIRST_TEXT)
BEGIN_BYTES = RECORD_AT + 2 * _BEGIN.size  # at the start of a file; they give its record's form
MAX_HEADER_BYTES = 32 << 20  # of a snapshot: tokens mostly, about two million
MAX_FILE_BYTES = 1 << 38  # of a snapshot's data in memory
# The text between the record's last digit and the kind, in a file that contains its kind.
KIND_TEXT = b'","kvx_kind":'


def form_of(head: bytes) -> Form | None:
    """Returns the form of a file's record; None if the file is not one of KVX.

    head: the first BEGIN_BYTES of the file
    """
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
    """The bytes of a file before its data. They are the same for all files of a layout, except the
    record and, if `is_whole`, the number of data bytes.
    """

    def __init__(
        self, tensors: Mapping[str, Stored], form: Form, *, is_whole: bool, kind: bytes = b""
    ) -> None:
        """tensors:  in the order of the file
        is_whole: the file has one tensor of bytes in their place; its length may differ by file
        kind:     the text of the kind, if the file contains it
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
        """Returns the head of a file.

        record:         with its check and tag
        num_data_bytes: bytes of data in this file
        """
        return self._before + record.hex().encode() + self._rest(num_data_bytes)

    def _rest(self, num_data_bytes: int) -> bytes:
        if not self._is_whole:
            return self._after
        number = b"%*d" % (_NUMBER, num_data_bytes)
        return self._beside + self._entries.replace(_HOLE, number)

    def record_of(self, head: bytes | bytearray, num_data_bytes: int) -> bytes | None:
        """Returns the record in the head of a file, encrypted or not; None: another head.

        num_data_bytes: bytes of data in the file
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
    """Returns the JSON entries of tensors, with a comma before each."""
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
    """Returns the JSON entry of one tensor of bytes, with holes for its length."""
    return b',"pieces":{"dtype":"U8","shape":[%b],"data_offsets":[0,%b]}' % (_HOLE, _HOLE)
