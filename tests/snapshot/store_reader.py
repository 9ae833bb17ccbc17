"""A reader of the files of stores and of snapshots, written from docs/store_format.md alone.

It is slow, checks everything, and shares nothing with kvx_core.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Decoder = Callable[[bytes], bytes]

# Bytes of a unit, and the name in safetensors where that has one.
DTYPES = {name: (4 if name == "F32" else 2, name) for name in ("F32", "F16", "BF16")}
DTYPES |= {name: (1, name) for name in ("F8_E4M3", "F8_E5M2", "U8")} | {"S8": (1, "I8")}
UNITS = {"F8_E4M3FNUZ": 1, "F4_E2M1": 1, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "IQ4_NL": 18}
UNITS |= {"Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "MXFP4": 17}
UNITS |= {"TQ2": 34, "TQ3": 50, "TQ4": 66}
DTYPES |= {name: (size, "U8") for name, size in UNITS.items()}


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    coding: str
    data: bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][0]


class Chunk(NamedTuple):
    parent: bytes
    start: int
    tokens: list[int]
    tensors: dict[str, Tensor]
    kind: dict[str, Any]


def canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def mac(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    key = hashlib.blake2b(secret, digest_size=64, person=b"kvx key").digest()
    return hashlib.blake2b(data, digest_size=32, key=key, person=purpose).digest()


def key_id(secret: bytes) -> int:
    return int.from_bytes(mac(secret, b"kvx name", b"")[:8], "little")


def check_of(data: bytes, secret: bytes | None, purpose: bytes) -> bytes:
    if secret is not None:
        return mac(secret, purpose, data)
    return xxhash.xxh3_128(data).digest()


def tensors_of(kind: Mapping[str, Any], n: int) -> dict[str, Tensor]:
    """The tensors of a file of n tokens, without their data, in the order of the file."""
    found: dict[str, Tensor] = {}
    absent = set()
    for name, dtype, shape, _, coding in kind["tensors"]:
        first, *rest = shape
        if isinstance(first, str):
            first = n // int(first[2:] or 1)
        if first:
            found[name] = Tensor(dtype, (first, *rest), coding, b"")
        else:
            absent.add(f"{name}.scale")
    return {name: tensor for name, tensor in found.items() if name not in absent}


def pieces_of(tensors: Mapping[str, Tensor]) -> list[list[tuple[str, int, int]]]:
    """Of each piece: tensors, and where their bytes in it begin and end."""
    pieces: list[list[tuple[str, int, int]]] = []
    size, last = 0, None  # of a piece that others may join
    for name, tensor in tensors.items():
        more, kind = tensor.num_bytes, (tensor.dtype, tensor.coding)
        if more > 1_048_576:
            for at in range(0, more, 1_048_576):
                pieces.append([(name, at, min(at + 1_048_576, more))])
            last = None
        elif kind == last and size + more <= 262_144:
            pieces[-1].append((name, 0, more))
            size += more
        else:
            pieces.append([(name, 0, more)])
            size, last = more, kind
    return pieces


def text_of(kind: Mapping[str, Any], tensors: Mapping[str, Tensor], record: str, size: int) -> str:
    """The header of a file whose data has `size` bytes."""
    return header_of(record, kind_text(kind), entries_of(kind, tensors, size))


def kind_text(kind: Mapping[str, Any]) -> str:
    """What is behind the record: the kind of a snapshot."""
    if "prefix" not in kind:
        return ""
    text = canonical(kind).decode().replace("\\", "\\\\").replace('"', '\\"')
    return f',"kvx_kind":"{text}"'


def header_of(record: str, kind: str, entries: str) -> str:
    text = f'{{"__metadata__":{{"kvx":"{record}"{kind}}}{entries}}}'
    return text + " " * (-(8 + len(text)) % 4096)


def entries_of(kind: Mapping[str, Any], tensors: Mapping[str, Tensor], size: int) -> str:
    """What the header says of the tensors."""
    if kind["encrypted"] or any(tensor.coding for tensor in tensors.values()):
        number = str(size).rjust(15)
        entries = f',"pieces":{{"dtype":"U8","shape":[{number}],"data_offsets":[0,{number}]}}'
    else:
        at, entries = 0, ""
        for name, tensor in tensors.items():
            item, word = DTYPES[tensor.dtype]
            *shape, last = tensor.shape
            shape.append(last * (item if word == "U8" else 1))
            numbers = ",".join(map(str, shape))
            entries += f',"{name}":{{"dtype":"{word}","shape":[{numbers}],'
            entries += f'"data_offsets":[{at},{at + tensor.num_bytes}]}}'
            at += tensor.num_bytes
    return entries


def holds_states(kind_raw: bytes) -> bool:
    """Whether files of a kind hold states, and nothing else."""
    kind = json.loads(kind_raw)
    per = [plane[2] for group in kind["groups"] for plane in group["planes"]]
    if 0 not in per:
        return False
    assert not any(per)
    assert all(name.startswith("planes.") for name, *_ in kind["tensors"])
    assert all(isinstance(shape[0], int) for _, _, shape, *_ in kind["tensors"])
    return True


def read(
    raw: bytes,
    kind_raw: bytes | None,
    *,
    signing: bytes | None = None,
    encryption: bytes | None = None,
    decoders: Mapping[str, Decoder] | None = None,
) -> Chunk:
    """What a file holds. Fails an assertion if it is not good.

    raw, kind_raw: the bytes of the file and of <kind>.json; None: of a snapshot
    """
    length = int.from_bytes(raw[:8], "little")
    head, data = raw[8 : 8 + length].decode("ascii"), raw[8 + length :]
    assert (8 + length) % 4096 == 0
    metadata = json.loads(head)["__metadata__"]
    digits, is_alone = metadata["kvx"], kind_raw is None
    kind_raw = metadata["kvx_kind"].encode("ascii") if kind_raw is None else kind_raw
    kind = json.loads(kind_raw)
    assert canonical(kind) == kind_raw
    assert kind["kvx_kind"] == 3
    assert is_alone == ("prefix" in kind)
    assert kind["keyed"] == (signing is not None)
    assert kind["encrypted"] == (encryption is not None)
    record = bytes.fromhex(digits)
    assert record.hex() == digits
    magic, flags, n, p, signer, encrypter, random = struct.unpack("<8sIIIQQ32s", record[:68])
    assert magic == b"KVXCHNK3"
    assert 0 < n <= 65_536 or (is_alone and n)
    assert length <= 33_554_432 or not is_alone
    assert flags == (signing is not None) + 2 * (encryption is not None)
    assert signer == (0 if signing is None else key_id(signing))
    assert encrypter == (0 if encryption is None else key_id(encryption))
    tensors = tensors_of(kind, n)
    pieces = pieces_of(tensors)
    assert p == len(pieces)
    assert head == text_of(kind, tensors, digits, len(data))
    clear, cipher = record[:68], None
    if encryption is None:
        assert random == bytes(32)
    else:
        cipher = AESGCM(mac(encryption, b"kvx file key", random))
        record = clear + cipher.decrypt(bytes(12), record[68:], clear)
    size = 32 if signing else 16
    assert record[-size:] == check_of(record[:-size], signing, b"kvx record")
    parent, digest, start = struct.unpack("<32s32sQ", record[68:140])
    assert digest == hashlib.sha256(kind_raw).digest()
    assert not (is_alone and any(parent))
    tokens = np.frombuffer(record, "<i8", n, 140).tolist()
    check_bytes = (16 if encryption or not signing else 0) + (32 if signing else 0)
    rows = record[140 + 8 * n : -size]
    assert len(rows) == p * (4 + check_bytes)
    found = {name: bytearray(tensor.num_bytes) for name, tensor in tensors.items()}
    at = 0
    for i, piece in enumerate(pieces):
        row = rows[i * (4 + check_bytes) : (i + 1) * (4 + check_bytes)]
        stored = int.from_bytes(row[:4], "little")
        content, check = data[at : at + stored], row[4:]
        at += stored
        assert len(content) == stored
        if signing or not encryption:
            own = check_of(content, signing, b"kvx piece")
            assert check[-len(own) :] == own
        if cipher is not None:
            nonce = (i + 1).to_bytes(12, "little")
            content = cipher.decrypt(nonce, content + check[:16], clear)
        whole = sum(end - begin for _, begin, end in piece)
        coding = tensors[piece[0][0]].coding
        if coding and stored < whole:
            content = (decoders or {})[coding](content)
        assert len(content) == whole
        for name, begin, end in piece:
            found[name][begin:end], content = content[: end - begin], content[end - begin :]
    assert at == len(data)
    whole_tensors = {n: t._replace(data=bytes(found[n])) for n, t in tensors.items()}
    return Chunk(parent, start, tokens, whole_tensors, kind)
