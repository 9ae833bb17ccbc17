"""The seal of a file, at its start: digests that show whether header and tokens have changed.

    {"__metadata__":{"kvx_snapshot":"2","tokens":"<number>","bytes":"<of the data>",
    "digest":"<SHA-256>", and if it is signed: "signature":"<keyed BLAKE2b>",

The tokens are the first bytes of the data. A reader checks the seal before it parses anything else:
one with a key parses only what was signed. A lookup needs only seal and tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from kvx_core.snapshot.errors import CorruptError
from kvx_core.snapshot.signing import Key, check_signature

FORMAT = 2

_ALIGN = 64  # bytes, of the data within the file
_SEAL = re.compile(
    rb'\{"__metadata__":\{"kvx_snapshot":"%d","tokens":"(0|[1-9][0-9]{0,8})",'
    rb'"bytes":"(0|[1-9][0-9]{0,17})","digest":"([0-9a-f]{64})",(?:"signature":"([0-9a-f]{64})",)?'
    % FORMAT
)
_MAX_BYTES = 300  # of a seal


def sealed(body: bytes, tokens: bytes, num_data_bytes: int, key: Key | None) -> bytes:
    """A header with its length: the seal, then `body`.

    tokens: int64, the first bytes of the data
    """
    counts = len(tokens) // 8, num_data_bytes
    num_blank = _seal_bytes(*counts, is_signed=key is not None)
    body += b" " * (-(8 + num_blank + len(body)) % _ALIGN)
    message = _message(num_blank + len(body), num_data_bytes, body, tokens)
    digest = hashlib.sha256(message).hexdigest()
    signature = None if key is None else key.digest(message, b"kvx header")
    raw = _words(*counts, digest, signature) + body
    return len(raw).to_bytes(8, "little") + raw


def sealed_counts(raw: bytes, name: str) -> tuple[int, int]:
    """The numbers of tokens and of data bytes in the seal. Raises CorruptError without a seal."""
    found = _SEAL.match(raw, 0, _MAX_BYTES)
    if found is None:
        raise CorruptError(
            f"{name} is not a safetensors file of KVX: it does not begin as a snapshot of format "
            f"{FORMAT} does"
        )
    return int(found[1]), int(found[2])


def check_seal(raw: bytes, tokens: bytes, num_data_bytes: int, name: str, key: Key | None) -> None:
    """Raises CorruptError if header or tokens have changed since they were written, UnsignedError
    if they are not signed with this key.
    """
    found = _SEAL.match(raw, 0, _MAX_BYTES)
    assert found is not None  # by sealed_counts
    message = _message(len(raw), num_data_bytes, raw[found.end() :], tokens)
    if not hmac.compare_digest(found[3], hashlib.sha256(message).hexdigest().encode()):
        raise CorruptError(f"{name}: its header or tokens have changed since they were written")
    check_signature(name, key, message, found[4])


def _seal_bytes(num_tokens: int, num_data_bytes: int, *, is_signed: bool) -> int:
    blank = "0" * 64
    return len(_words(num_tokens, num_data_bytes, blank, blank if is_signed else None))


def _words(num_tokens: int, num_data_bytes: int, digest: str, signature: str | None) -> bytes:
    words = f'{{"__metadata__":{{"kvx_snapshot":"{FORMAT}","tokens":"{num_tokens}",'
    words += f'"bytes":"{num_data_bytes}","digest":"{digest}",'
    if signature is not None:
        words += f'"signature":"{signature}",'
    return words.encode()


def _message(num_header_bytes: int, num_data_bytes: int, body: bytes, tokens: bytes) -> bytes:
    """The bytes that the seal's digests cover: lengths of header, tokens and data, then content."""
    ends = (num_header_bytes, len(tokens), num_data_bytes)
    return b"".join([*(end.to_bytes(8, "little") for end in ends), body, tokens])
