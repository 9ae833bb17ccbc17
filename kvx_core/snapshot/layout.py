"""Layout: how the file of a snapshot is laid out, and its header with holes for what differs.

The files of a prompt differ in a few words of their headers: the first token, the prefix and the
checksums. The text around them is made once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvx_core.snapshot.contents import Header, Stored
from kvx_core.snapshot.header import header_body, in_file_order
from kvx_core.snapshot.seal import sealed, sealed_bytes
from kvx_core.snapshot.signing import Key

_MAX_LAYOUTS = 32  # that are remembered
_DIGITS, _SIGNED_DIGITS = 32, 64  # of a checksum: XXH3 of 128 bits, keyed BLAKE2b of 256


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a file in its order, the tokens first, and the text of its header."""

    names: tuple[str, ...]
    num_bytes: int  # of all tensors
    is_signed: bool
    _texts: tuple[str, ...]  # around the first token, the prefix and each checksum
    _num_text_bytes: int  # of all of these

    @classmethod
    def of(cls, header: Header, tensors: Mapping[str, Stored], *, is_signed: bool) -> Layout:
        """The layout of files with these tensors, whose encoded bytes are counted.

        Raises ValueError for text that is not valid Unicode.
        """
        types = tuple(
            (name, t.dtype, t.shape, t.original, t.coding, t.coded_bytes)
            for name, t in tensors.items()
        )
        key = header.parts, is_signed, types
        found = _layouts.get(key)
        if found is None:
            if len(_layouts) >= _MAX_LAYOUTS:
                _layouts.clear()
            found = _layouts[key] = cls._made(header, tensors, is_signed)
        return found

    @classmethod
    def _made(cls, header: Header, tensors: Mapping[str, Stored], is_signed: bool) -> Layout:
        names = in_file_order(tensors)
        start = 10**17 + secrets.randbelow(10**17)  # words that nothing else in the text has
        prefix, *sums = (secrets.token_hex(16) for _ in range(1 + len(names)))
        marked = replace(header, start=start, prefix=prefix)
        body, num_bytes = header_body(
            marked, tensors, dict(zip(names, sums, strict=True)), is_signed=is_signed
        )
        texts = []
        for word in (str(start), prefix, *sums):
            text, found, body = body.partition(word)
            assert found
            texts.append(text)
        texts.append(body)
        num_text_bytes = len("".join(texts).encode())
        return cls(tuple(names), num_bytes, is_signed, tuple(texts), num_text_bytes)

    def header(
        self, start: int, prefix: str, checksums: Sequence[str], tokens: bytes, key: Key | None
    ) -> bytes:
        """The bytes of a file before its data.

        checksums: of each tensor, in the order of `names`, without their kind
        tokens:    int64, the first bytes of the data
        """
        texts = iter(self._texts)
        words = [next(texts), str(start), next(texts), _escaped(_escaped(prefix)), next(texts)]
        for checksum in checksums:
            words += (checksum, next(texts))
        return sealed("".join(words).encode(), tokens, self.num_bytes, key)

    def num_header_bytes(self, start: int, prefix: str, num_tokens: int) -> int:
        """Bytes of `header`, whatever the tokens and their checksums are."""
        words = f"{start}{_escaped(_escaped(prefix))}".encode()
        digits = len(self.names) * (_SIGNED_DIGITS if self.is_signed else _DIGITS)
        num_body_bytes = self._num_text_bytes + len(words) + digits
        return sealed_bytes(num_tokens, self.num_bytes, num_body_bytes, is_signed=self.is_signed)


_layouts: dict[object, Layout] = {}


def _escaped(text: str) -> str:
    """A text as JSON has it between quotes."""
    if text.isalnum():  # as a key of tokens is
        return text
    return json.dumps(text, ensure_ascii=False)[1:-1]
