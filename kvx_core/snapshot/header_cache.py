"""Headers like earlier ones: the files of a prompt differ in a few words, and are parsed once.

A header is cut into the words that each file has of its own, its first token, its prefix and its
checksums, and the text around them. Where that text is, byte for byte, that of a header that was
parsed and found right, this header is right too, and its own words go to the same places. A word
cannot change how the text around it is read: it is a decimal number, or hexadecimal digits between
quotes.
"""

from __future__ import annotations

import re

from kvx_core.snapshot.contents import Header
from kvx_core.snapshot.header import Content, parse_header
from kvx_core.snapshot.seal import end_of_seal

_MAX_BYTES = 1 << 16  # of a header that is remembered
_MAX_HEADERS = 32
_BEGIN = re.compile(
    rb'"header":"\{\\"header\\":\{\\"start\\":(0|[1-9][0-9]{0,17}),'
    rb'\\"prefix\\":\\"([0-9a-f]{0,128})\\"'
)
_CHECKSUM = re.compile(rb'\\"([a-z0-9._]{1,64})\\":\\"([0-9a-f]{32,64})\\"')


_Key = tuple[bytes, int, int, int, int, bool]
_known: dict[_Key, Content] = {}  # with the same text around its own words


def parse(
    raw: bytes, num_tokens: int, num_data_bytes: int, name: str, *, is_signed: bool
) -> Content:
    """parse_header, quicker for a header like an earlier one. Arguments and errors are its."""
    at = end_of_seal(raw)
    begin = _BEGIN.match(raw, at) if len(raw) <= _MAX_BYTES and b"\0" not in raw else None
    if begin is None:
        return parse_header(raw, num_tokens, num_data_bytes, name, is_signed=is_signed)
    start, prefix = int(begin[1]), begin[2].decode()
    cut = _CHECKSUM.split(raw[begin.end() :])  # text, name, checksum, text, name, checksum, ...
    names, values = ([word.decode() for word in cut[i::3]] for i in (1, 2))
    checksums = dict(zip(names, values, strict=True))
    del cut[2::3]
    around = b"\0".join(cut)
    key = around, at, len(raw), num_tokens, num_data_bytes, is_signed
    known = _known.get(key)
    if known is None:
        found = parse_header(raw, num_tokens, num_data_bytes, name, is_signed=is_signed)
        if (
            (found.header.start, found.header.prefix) == (start, prefix)
            and len(names) == len(checksums)
            and checksums == found.checksums
            # What planes may be depends on the start.
            and not any(part.planes for part in found.header.parts)
        ):
            if len(_known) >= _MAX_HEADERS:
                _known.clear()
            _known[key] = found
        return found
    header = Header(start, prefix, known.header.parts)
    return Content(header, known.tensors, known.kind, checksums)
