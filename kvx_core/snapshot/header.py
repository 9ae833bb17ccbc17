"""The header of a snapshot's file: written here, and parsed without trusting it.

The file is a safetensors file whose data begins at a multiple of 64 bytes: first the tokens, then
the other tensors, those with larger elements first. Its metadata are a seal (seal.py) and "header",
a JSON text: what the snapshot contains, and a checksum of each tensor. "checksum" says which: XXH3
of 128 bits, or CRC-32 where it is missing; in signed files they are keyed BLAKE2b. Formats that
safetensors does not have are bytes, U8: "formats" says of which tensors, and what they are.
"originals" are the dtypes of tensors in the cache that they were captured from, where they were
converted. "coded" are tensors whose bytes are encoded (coding.py), U8 of one axis. A field that is
not needed is not there, so that versions of KVX that do not know it can read the file; they refuse
a file that has it.
Source: safetensors, README.md, "Format"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvx_core.snapshot.coding import CODINGS
from kvx_core.snapshot.contents import (
    FILE_DTYPES,
    KV_DTYPES,
    STORED_UNITS,
    Header,
    Stored,
    inconsistency,
)
from kvx_core.snapshot.errors import CorruptError, StoreError
from kvx_core.snapshot.precision import NVFP4
from kvx_core.snapshot.text import strict_json
from kvx_core.types import DType

_INTEGERS = {"I8": DType.S8, "I64": DType.S64}
_DTYPES = {dtype.name: dtype for dtype in FILE_DTYPES if dtype is not DType.S8} | _INTEGERS
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_WORDS = {dtype: dtype.name for dtype in STORED_UNITS} | {DType.F4_E2M1: NVFP4.name.upper()}
_FORMATS = {word: dtype for dtype, word in _WORDS.items()}
_FORMAT = re.compile("[A-Z][A-Z0-9_]{0,31}")
_CODING = re.compile("[a-z][a-z0-9_]{0,31}")
_KV = re.compile(r"layers\.[0-9]+\.[kv]")
CRC32, XXH3, SIGNED = "crc32", "xxh3_128", "blake2b"  # checksums
_SEAL = {"kvx_snapshot", "tokens", "bytes", "digest"}


@dataclass(frozen=True, slots=True)
class _Coded:
    """A tensor in fewer bytes."""

    coding: str
    shape: list[int]  # of its numbers


@dataclass(frozen=True, slots=True)
class _FileHeader:
    """The JSON text "header"."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # and all within it

    header: Header
    checksums: dict[str, str]
    checksum: str = CRC32  # what they are, if the file is not signed
    formats: dict[str, str] = field(default_factory=dict)  # by the names of tensors that are U8
    originals: dict[str, str] = field(default_factory=dict)  # by the names of converted tensors
    coded: dict[str, _Coded] = field(default_factory=dict)


_FILE_HEADER = TypeAdapter(_FileHeader)


def in_file_order(tensors: Mapping[str, Stored]) -> list[str]:
    """The names of tensors in the order of a file: the tokens first, each tensor aligned."""
    return sorted(tensors, key=lambda name: -_in_file(tensors[name])[0].itemsize)


def _in_file(tensor: Stored) -> tuple[DType, tuple[int, ...]]:
    """Dtype and shape of a tensor as a file has it."""
    if tensor.coding:
        return DType.U8, (tensor.coded_bytes,)
    if tensor.dtype in STORED_UNITS:
        return DType.U8, (*tensor.shape[:-1], tensor.shape[-1] * tensor.dtype.itemsize)
    return tensor.type


def header_body(
    header: Header,
    tensors: Mapping[str, Stored],
    checksums: dict[str, str],
    *,
    is_signed: bool,
) -> tuple[str, int]:
    """The text of a header behind its seal, and the bytes of the data.

    checksums: of each tensor, in the order of the file: SIGNED ones, else XXH3
    Raises ValueError for text that is not valid Unicode.
    """
    formats = {name: _WORDS[t.dtype] for name, t in tensors.items() if t.dtype in _WORDS}
    originals = {name: t.original.name for name, t in tensors.items() if t.original is not None}
    coded = {name: _Coded(t.coding, list(t.shape)) for name, t in tensors.items() if t.coding}
    kind = CRC32 if is_signed else XXH3
    content = _FileHeader(header, checksums, kind, formats, originals, coded)
    left_out: dict[str, Any] = {
        n: True for n in ("formats", "originals", "coded") if not getattr(content, n)
    }
    if is_signed:
        left_out["checksum"] = True
    of_parts: dict[str, Any] = {}
    if not any(part.planes for part in header.parts):
        of_parts["planes"] = True
    unknown = {
        name
        for name in ("lossy", "hadamard_k", "hadamard_v")
        if all(getattr(part.facts, name) is None for part in header.parts)
    }
    if unknown:
        of_parts["facts"] = unknown
    if of_parts:
        left_out["header"] = {"parts": {"__all__": of_parts}}
    text = _FILE_HEADER.dump_json(content, exclude=left_out).decode()
    entries: dict[str, Any] = {}
    offset = 0
    for name in checksums:
        tensor = tensors[name]
        dtype, shape = _in_file(tensor)
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": shape,
            "data_offsets": [offset, offset + tensor.file_bytes],
        }
        offset += tensor.file_bytes
    rest = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)[1:]
    body = f'"header":{json.dumps(text, ensure_ascii=False)}}}{"," if entries else ""}{rest}'
    return body, offset


class Content(NamedTuple):
    """What a file contains. `tensors` are shared with files like it, and do not change."""

    header: Header
    tensors: dict[str, Stored]
    kind: str  # of the checksums: SIGNED, XXH3 or CRC32
    checksums: dict[str, str]  # of the tensors, by name


def parse_header(
    raw: bytes, num_tokens: int, num_data_bytes: int, name: str, *, is_signed: bool
) -> Content:
    """Parses a header and checks every field; its tensors fill the data exactly.

    raw: the header without its length. num_tokens, is_signed: from its seal, checked before
    Raises CorruptError; StoreError if a newer version of KVX has written it.
    """
    try:
        found = strict_json(raw)
        text = _text(found, is_signed)
        tensors = _tensors(found, 8 + len(raw), num_data_bytes)
    except ValueError as error:
        raise CorruptError(f"{name} is not a safetensors file of KVX: {error}") from None
    content = _file_header(text, name)
    header, checksums = content.header, content.checksums
    kind = SIGNED if is_signed else content.checksum
    if kind not in (SIGNED, XXH3, CRC32) and _CODING.fullmatch(kind):
        raise StoreError(
            f"{name} has checksums in {kind}, which this version of KVX does not know. Use the "
            "version that wrote it, or a newer one"
        )
    reason = _unpacked(tensors, content.formats, name)
    reason = reason or _decodable(tensors, content.coded, name)
    reason = reason or _converted(tensors, content.originals, name)
    reason = reason or inconsistency(header, tensors)
    if reason is None and checksums.keys() != tensors.keys():
        reason = f"it has checksums of {sorted(checksums)}, expected {sorted(tensors)}"
    if reason is None and tensors["tokens"] != Stored(DType.S64, (num_tokens,), 8 + len(raw)):
        reason = f"its tokens are not its first {8 * num_tokens} bytes, expected them there"
    if reason is None and content.checksum not in ((CRC32,) if is_signed else (XXH3, CRC32)):
        reason = (
            f"its checksums are {content.checksum[:100]!r}, expected {XXH3}, {CRC32} or a key's"
        )
    if reason is not None:
        raise CorruptError(f"{name}: {reason[:500]}")
    return Content(header, tensors, kind, checksums)


def _text(found: Any, is_signed: bool) -> str:
    """The text "header"; removes the metadata from `found`. Raises ValueError."""
    metadata = found.pop("__metadata__", None) if isinstance(found, dict) else None
    words = _SEAL | ({"signature"} if is_signed else set())
    if not isinstance(metadata, dict) or metadata.keys() != words | {"header"}:
        raise ValueError("it has other metadata than a KVX snapshot")
    text = metadata["header"]
    if not isinstance(text, str):
        raise ValueError(f"its header is {str(text)[:100]}, expected JSON")
    return text


def _tensors(found: dict[str, Any], offset: int, num_data_bytes: int) -> dict[str, Stored]:
    """The tensors. Raises ValueError unless they follow one another and fill the data."""
    tensors: dict[str, Stored] = {}
    at = 0
    for name, entry in found.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name[:100]} is {str(entry)[:100]}, expected a tensor")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(code, str) or code not in _DTYPES:
            raise ValueError(f"{name[:100]} is {str(code)[:100]}, expected {', '.join(_DTYPES)}")
        if not _are_counts(shape, 1) or not _are_counts(offsets, 0):
            raise ValueError(f"{name[:100]} has shape {str(shape)[:100]}, expected sizes")
        end = at + prod(shape) * _DTYPES[code].itemsize
        if offsets != [at, end] or end > num_data_bytes:
            raise ValueError(
                f"{name[:100]} has the bytes {offsets} of {num_data_bytes}, expected {at} to {end}"
            )
        tensors[name] = Stored(_DTYPES[code], tuple(shape), offset + at)
        at = end
    if at != num_data_bytes:
        raise ValueError(f"it has {num_data_bytes} bytes of data, expected {at}")
    return tensors


def _are_counts(found: Any, least: int) -> bool:
    """Whether it is a list of 1 to 3 integers, each at least `least`."""
    return (
        isinstance(found, list)
        and 0 < len(found) <= 3
        and all(type(number) is int and number >= least for number in found)
    )


def _unpacked(tensors: dict[str, Stored], formats: dict[str, str], name: str) -> str | None:
    """Makes tensors of bytes what `formats` says; why that cannot be right, or None.

    Raises StoreError for a format that only a newer version of KVX knows.
    """
    for tensor, word in formats.items():
        stored = tensors.get(tensor)
        dtype = _FORMATS.get(word)
        _check_known(word, tensor, name)
        if dtype is None or stored is None or stored.dtype is not DType.U8:
            return f"{tensor[:100]} is said to be in {word[:100]!r}, expected U8 of a known format"
        *shape, num_bytes = stored.shape
        if num_bytes % dtype.itemsize:
            return f"{tensor[:100]} has rows of {num_bytes} bytes, expected units of {word}"
        tensors[tensor] = Stored(dtype, (*shape, num_bytes // dtype.itemsize), stored.offset)
    return None


def _decodable(tensors: dict[str, Stored], coded: dict[str, _Coded], name: str) -> str | None:
    """Makes tensors of bytes what they are when decoded; why that cannot be right, or None.

    Raises StoreError for a coding that only a newer version of KVX knows.
    """
    for tensor, found in coded.items():
        stored, coding = tensors.get(tensor), CODINGS.get(found.coding)
        if coding is None and _CODING.fullmatch(found.coding):
            raise StoreError(
                f"{name} has {tensor[:100]} in {found.coding}, which this version of KVX does not "
                "know. Use the version that wrote it, or a newer one"
            )
        if (
            coding is None
            or stored is None
            or stored.dtype is not DType.U8
            or len(stored.shape) != 1
            or not _KV.fullmatch(tensor)
            or not _are_counts(found.shape, 1)
            or not (
                stored.num_bytes
                < prod(found.shape) * coding.dtype.itemsize
                <= stored.num_bytes * coding.most
            )
        ):
            return (
                f"{tensor[:100]} is said to be {found.coding[:100]!r} of shape "
                f"{str(found.shape)[:100]} in {0 if stored is None else stored.num_bytes} bytes, "
                "expected K or V in fewer bytes than its numbers have, and no fewer than the "
                "coding can need"
            )
        tensors[tensor] = Stored(
            coding.dtype,
            tuple(found.shape),
            stored.offset,
            coding=found.coding,
            coded_bytes=stored.num_bytes,
        )
    return None


def _converted(tensors: dict[str, Stored], originals: dict[str, str], name: str) -> str | None:
    """Notes what tensors were converted from; why that cannot be right, or None.

    Raises StoreError for a format that only a newer version of KVX knows.
    """
    for tensor, word in originals.items():
        _check_known(word, tensor, name)
        stored, dtype = tensors.get(tensor), DType.__members__.get(word)
        if stored is None or dtype not in KV_DTYPES or not _KV.fullmatch(tensor):
            return f"{tensor[:100]} is said to have been {word[:100]!r}, expected K or V of numbers"
        tensors[tensor] = replace(stored, original=dtype)
    return None


def _check_known(word: str, tensor: str, name: str) -> None:
    """Raises StoreError for a format that only a newer version of KVX knows."""
    if _FORMAT.fullmatch(word) and word not in DType.__members__ and word not in _FORMATS:
        raise StoreError(
            f"{name} has {tensor[:100]} in {word}, which this version of KVX does not know. Use "
            "the version that wrote it, or a newer one"
        )


def _file_header(text: str, name: str) -> _FileHeader:
    try:
        strict_json(text.encode())
        found = _FILE_HEADER.validate_json(text, strict=True)
    except ValidationError as error:
        wrong = error.errors()
        if all(each["type"] == "unexpected_keyword_argument" for each in wrong):
            raise StoreError(
                f"{name} has {'.'.join(map(str, wrong[0]['loc']))[:200]}, which this version of "
                "KVX does not know. Use the version that wrote it, or a newer one"
            ) from None
        raise CorruptError(
            f"{name} has no header of a KVX snapshot: {wrong[0]['loc']}: {wrong[0]['msg'][:200]}"
        ) from None
    except ValueError as error:
        raise CorruptError(f"{name} has no header of a KVX snapshot: {error}") from None
    return found
