"""Parses untrusted JSON: limited depth, no duplicate keys, no NaN, numbers of at most 64 bits."""

from __future__ import annotations

import json
import re
from typing import Any

_MAX_DEPTH = 8
# The characters of JSON outside of strings. NaN and Infinity have capitals, and do not match.
_PLAIN = re.compile(rb"[\[\]{}:,0-9eE+\-. \t\r\na-z]*")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_TOO_LARGE = re.compile(rb"[0-9]{19}")  # may exceed 64 bits; parsing many digits is slow too


def strict_json(raw: bytes) -> Any:
    """Parses a JSON text. Returns its value.

    Raises nothing but ValueError. Takes time linear in the length of the text.
    """
    # Once escaped characters are removed, every quote begins or ends a string.
    words = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    bare = b" ".join(words[::2])
    if not len(words) % 2:
        raise ValueError("it has a string without an end")
    if not _PLAIN.fullmatch(bare):
        raise ValueError("it has a number or word that is none of JSON")
    if _TOO_LARGE.search(bare):
        raise ValueError("it has a number that does not fit into 64 bits")
    brackets = bare.translate(None, _NO_BRACKETS)
    for _ in range(_MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise ValueError("its brackets do not match, or are too deep")
    # The depth is limited now, so that the parser cannot exhaust its recursion.
    return json.loads(raw.decode(), object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    for name, value in pairs:
        for word in (name, value):
            if isinstance(word, str) and not word.isascii():
                word.encode()  # raises for half of a surrogate pair
    return found
