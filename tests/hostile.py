"""Files that a store may hold: broken, foreign, or written to deceive, each made from a good one.

hostile_files yields the same files every time. Seals and checksums are recomputed where an attacker
could, so that the checks behind them are reached. Files whose name begins with "forged" are well
formed and hold other keys, values or scales: only a signature detects them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from xxhash import xxh3_128_hexdigest

# All that safetensors has, in bits.
DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_SEAL = re.compile(
    rb'\{"__metadata__":\{"kvx_snapshot":"2","tokens":"([0-9]+)",'
    rb'"bytes":"([0-9]+)","digest":"([0-9a-f]{64})",'
    rb'(?:"signature":"[0-9a-f]{64}",)?'
)


def hostile_files(
    good: bytes, *, header_limit: int = 16 << 20, mutations: int = 300
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file.

    good:         a file of a KVX store, unsigned
    header_limit: one of the files has a header of one byte more
    mutations:    how many files with random changes there are at the end
    """
    seen: Counter[str] = Counter()
    makers = (_no_json, _foreign, _tensors, _metadata, _headers, _controlling, _forged)
    groups = (_lengths(good, header_limit), *(make(good) for make in makers))
    for name, data in chain(*groups, mutated_files(good, mutations)):
        if data != good:
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name} ({seen[name]})", data


@dataclass
class _File:
    """The parts of a file, to be changed and put together again."""

    entries: dict[str, Any]
    metadata: dict[str, Any]
    text: dict[str, Any]
    data: bytes

    @classmethod
    def of(cls, good: bytes) -> _File:
        first = 8 + int.from_bytes(good[:8], "little")
        entries = json.loads(good[8:first])
        metadata = entries.pop("__metadata__")
        return cls(entries, metadata, json.loads(metadata["header"]), good[first:])

    def bytes(self, *, checksums: bool = True) -> bytes:
        """The file, its seal right; checksums: those of the data too."""
        if checksums:
            for name, entry in self.entries.items():
                begin, end = entry["data_offsets"]
                self.text["checksums"][name] = xxh3_128_hexdigest(self.data[begin:end])
        return self.with_text(json.dumps(self.text, separators=(",", ":")))

    def with_text(self, text: str) -> bytes:
        """The file with this as its own header, the seal right."""
        self.metadata |= {"bytes": str(len(self.data)), "header": text}
        return self.with_entries(_dumps({"__metadata__": self.metadata} | self.entries))

    def with_entries(self, raw: bytes) -> bytes:
        return raw_file(raw, self.data)


def _dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def raw_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of safetensors with any header, which may lie about its length; its seal is right."""
    header = _resealed(header, data)
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


def _resealed(header: bytes, data: bytes) -> bytes:
    """The header with the digest of what it is now, if it begins as one of KVX."""
    found = _SEAL.match(header)
    if found is None or int(found[2]) >= 1 << 64:
        return header
    tokens = data[: 8 * int(found[1])]
    ends = (len(header), len(tokens), int(found[2]))
    message = b"".join([*(n.to_bytes(8, "little") for n in ends), header[found.end() :], tokens])
    digest = hashlib.sha256(message).hexdigest().encode()
    return header[: found.start(3)] + digest + header[found.end(3) :]


def _lengths(good: bytes, limit: int) -> Iterator[tuple[str, bytes]]:
    size = len(good)
    first = 8 + int.from_bytes(good[:8], "little")
    tokens = first + _File.of(good).entries["tokens"]["data_offsets"][1]
    for cut in (0, 1, 7, 8, 9, first // 2, first - 1, first, first + 1, tokens - 1, tokens,
                tokens + 1, (tokens + size) // 2, size - 1):  # fmt: skip
        yield f"cut to {cut} bytes", good[:cut]
    for more in (b"\0", b"\0" * 4096, good):
        yield f"{len(more)} bytes more", good + more
    large = [limit + 1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
    for length in (0, 1, 2, first - 9, first - 7, first + 56, size - 8, size - 7, size, *large):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + good[8:]
    padded = good[8:first].ljust(limit + 1)
    yield "header one byte too long, and there", raw_file(padded, good[first:])
    yield "all zeros", b"\0" * size
    yield "all ones", b"\xff" * size
    yield "random bytes", random.Random(1).randbytes(size)


def _no_json(good: bytes) -> Iterator[tuple[str, bytes]]:
    first = 8 + int.from_bytes(good[:8], "little")
    header, data = good[8:first].rstrip(), good[first:]
    for name, raw in {
        "nothing": b"  ",
        "a list": b"[]",
        "null": b"null",
        "a number": b"12345678",
        "a string": b'"tokens"',
        "an open string": b'{"tokens',
        "many escapes": b'{"' + b"\\\\" * 200_000 + b'": 1}',
        "many open strings": b'"\\' * 200_000,
        "deep lists": b"[" * 100_000,
        "deep lists that end": b"[" * 100_000 + b"]" * 100_000,
        "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "one more bracket": header + b"}",
        "one less bracket": header[:-1],
        "text after it": header + b" x",
        "a BOM": b"\xef\xbb\xbf" + header,
        "UTF-16": header.decode().encode("utf-16"),
        "no UTF-8": header.replace(b"tokens", b"tok\xffens"),
        "half a character": header.replace(b"tokens", b"tok\xc3", 1),
        "a NUL": header.replace(b"tokens", b"tok\0ens"),
        "a surrogate in a name": header.replace(b'"tokens"', b'"\\ud800"'),
        "a surrogate in the metadata": header.replace(b'"digest":"', b'"digest":"\\udfff'),
        "NaN": header.replace(b'"data_offsets":[0', b'"data_offsets":[NaN'),
        "Infinity": header.replace(b'"data_offsets":[0', b'"data_offsets":[-Infinity'),
        "1e400": header.replace(b'"data_offsets":[0', b'"data_offsets":[1e400'),
        "an integer of 5000 digits": header.replace(b'":[', b'":[' + b"9" * 5000 + b","),
        "an integer of 4000 digits": header.replace(b'":[', b'":[' + b"9" * 4000 + b","),
        "an integer of 19 digits": header.replace(b'":[', b'":[' + b"9" * 19 + b","),
        "a comment": b"/* */" + header,
        "single quotes": header.replace(b'"', b"'"),
    }.items():  # fmt: skip
        yield f"{name} as a header", raw_file(raw, data)
    metadata = header[1 : header.index(b'"tokens":{')]
    tokens = header[
        header.index(b'"tokens":{') : header.index(b"}", header.index(b'"tokens":{')) + 1
    ]
    yield "the metadata twice", raw_file(b"{" + metadata + header[1:], data)
    yield "the tokens twice", raw_file(header[:-1] + b"," + tokens + b"}", data)
    yield (
        "the dtype twice",
        raw_file(header.replace(b'"dtype":"I64"', b'"dtype":"I64","dtype":"I64"'), data),
    )
    many = {f"x{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(9999)}
    yield "thousands of tensors", raw_file(json.dumps(many).encode(), b"\0" * 9999)


def _foreign(good: bytes) -> Iterator[tuple[str, bytes]]:
    data = bytes(64)
    weight = {"weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    tokens = {"tokens": {"dtype": "I64", "shape": [8], "data_offsets": [0, 64]}}
    for name, header in {
        "weights": weight,
        "weights of PyTorch": {"__metadata__": {"format": "pt"}} | weight,
        "tokens": tokens,
        "tokens of PyTorch": {"__metadata__": {"format": "pt"}} | tokens,
        "tokens with a header": {"__metadata__": {"header": "{}", "kvx_snapshot": "2"}} | tokens,
        "metadata that are a list": {"__metadata__": ["kvx_snapshot"]} | tokens,
        "metadata that are null": {"__metadata__": None} | tokens,
        "nothing": {},
        "nothing but metadata": {"__metadata__": {"kvx_snapshot": "2"}},
    }.items():
        yield f"a foreign file of {name}", raw_file(json.dumps(header).encode(), data)
    yield (
        "216 bytes that ended an engine",
        raw_file(
            json.dumps({"tokens": {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}})
            .encode()
            .ljust(192),
            bytes(16),
        ),
    )


def _tensors(good: bytes) -> Iterator[tuple[str, bytes]]:
    """What safetensors says of tensors is another thing than their data."""
    names = [n for n in _File.of(good).entries if n == "tokens" or n.endswith((".k", ".v"))]
    for name in (names[0], names[1], names[-1]):
        for code, bits in DTYPES.items():
            file = _File.of(good)
            entry = file.entries[name]
            begin, end = entry["data_offsets"]
            if entry["dtype"] != code:
                whole = 8 * (end - begin) // bits
                entry["dtype"] = code
                entry["shape"] = [whole] if name == "tokens" else [*entry["shape"][:2], 1]
                if name != "tokens":
                    entry["shape"][2] = whole // (entry["shape"][0] * entry["shape"][1])
                yield f"{name} as {code}", file.bytes()
        for field, values in _WRONG.items():
            for value in values:
                file = _File.of(good)
                file.entries[name][field] = value
                yield f"{name} has {field} {str(value)[:40]}", file.bytes(checksums=False)
        for shift in (-8, -1, 1, 8, 64, 1 << 20, 1 << 62):
            file = _File.of(good)
            begin, end = file.entries[name]["data_offsets"]
            file.entries[name]["data_offsets"] = [begin + shift, end + shift]
            yield f"{name} is shifted by {shift}", file.bytes(checksums=False)
        for change in _REPLACED:
            file = _File.of(good)
            file.entries[name] = copy.deepcopy(change)
            yield f"{name} is {str(change)[:40]}", file.bytes(checksums=False)
        file = _File.of(good)
        shape = file.entries[name]["shape"]
        file.entries[name]["shape"] = [*shape[:-1], shape[-1] - 1]
        yield f"{name} has less than its bytes", file.bytes(checksums=False)
        file = _File.of(good)
        del file.entries[name]
        yield f"without {name}", file.bytes(checksums=False)
        file = _File.of(good)
        file.entries[name]["more"] = 1
        yield f"{name} with another field", file.bytes(checksums=False)
        file = _File.of(good)
        file.entries[f"{name}x"] = file.entries.pop(name)
        yield f"{name} under another name", file.bytes()
    file = _File.of(good)
    begin = len(file.data)
    file.data += bytes(64)
    file.entries["more"] = {"dtype": "U8", "shape": [64], "data_offsets": [begin, begin + 64]}
    yield "another tensor", file.bytes()
    file = _File.of(good)
    file.entries = dict(reversed(file.entries.items()))
    yield "the tensors in another order", file.bytes()
    file = _File.of(good)
    one, two = names[1], names[2]
    file.entries[one], file.entries[two] = file.entries[two], file.entries[one]
    yield "the tensors of one layer under each other's name", file.bytes(checksums=False)
    file = _File.of(good)
    file.entries[two]["data_offsets"] = file.entries[one]["data_offsets"]
    yield "two tensors of the same bytes", file.bytes()


_NUMBERS: list[Any] = [
    [], [-1], [0], [0, 0], [1 << 63], [(1 << 63) - 1], [1 << 32, 1 << 32], [0.0], [1.5], [True],
    ["1"], [None], [[1]], [1] * 100, None, 8, "8", {}, True, [-(1 << 63), 1 << 63], [0, 1 << 62],
    [16, 8],
]  # fmt: skip
_WRONG: dict[str, list[Any]] = {
    "shape": _NUMBERS,
    "data_offsets": _NUMBERS,
    "dtype": ["", "WHAT", "i64", None, 64, ["I64"], {}, "I64 ", "\u0661", "F32" * 10000],
}
_REPLACED: list[Any] = [None, [], {}, 1, "tokens", {"dtype": "I64"}, {"shape": [1]}]


# Clears a terminal, names its window, rings, begins another line and turns what follows around.
CONTROLS = "\x1b[2J\x1b]0;x\x07\nERROR\r\u202e\x9b"


def _controlling(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Wherever a file has a word, one that controls a terminal, or makes up lines of a log."""
    for field in ("dtype", "shape"):
        file = _File.of(good)
        file.entries["tokens"][field] = CONTROLS if field == "dtype" else [CONTROLS]
        yield f"controls as {field}", file.bytes(checksums=False)
    for name in (CONTROLS, f"layers.0.{CONTROLS}"):
        file = _File.of(good)
        file.entries[name] = file.entries.pop("layers.0.k")
        yield f"controls in the name of a tensor, {len(name)} letters", file.bytes()
    for key in ("formats", "originals", "coded"):
        for word in (CONTROLS, "F32", {"coding": CONTROLS, "shape": [1, 1, 1]}):
            for name in (CONTROLS, "layers.0.k"):
                file = _File.of(good)
                file.text[key] = {name: word}
                yield f"controls among the {key}", file.bytes()
    for key, value in (("checksum", CONTROLS), (CONTROLS, 1)):
        file = _File.of(good)
        file.text[key] = value
        yield f"controls as {'a field' if value == 1 else key}", file.bytes()
    for key in ("prefix", "start", "heads", "parts"):
        file = _File.of(good)
        file.text["header"][key] = CONTROLS
        yield f"controls as {key}", file.bytes()
    for key in ("encoding", "precision", "layers", "heads", CONTROLS):
        file = _File.of(good)
        file.text["header"]["parts"][0][key] = CONTROLS
        yield f"controls in a part, {len(key)} letters", file.bytes()
    for key in (*_File.of(good).text["header"]["parts"][0]["facts"], CONTROLS):
        file = _File.of(good)
        file.text["header"]["parts"][0]["facts"][key] = CONTROLS
        yield f"controls in the facts, {len(key)} letters", file.bytes()
    for field in ("kvx_snapshot", "tokens", "header", "digest", CONTROLS):
        file = _File.of(good)
        file.metadata[field] = CONTROLS
        raw = _dumps({"__metadata__": file.metadata} | file.entries)
        yield f"controls in the metadata, {len(field)} letters", file.with_entries(raw)


def _metadata(good: bytes) -> Iterator[tuple[str, bytes]]:
    for tokens in (0, 1, 4, 6, 7, 1 << 20, 999_999_999, "00", "05", "-1", "1e1", "\u0665"):
        file = _File.of(good)
        file.metadata["tokens"] = str(tokens)
        yield f"sealed with {tokens} tokens", file.bytes()
    for number in (0, 1, len(good), 1 << 62, (1 << 64) - 1, "9" * 30, "00", "-1"):
        file = _File.of(good)
        raw = _dumps({"__metadata__": file.metadata | {"bytes": str(number)}} | file.entries)
        yield f"sealed with {number} bytes", file.with_entries(raw)
    for field in ("kvx_snapshot", "tokens", "bytes", "header", "digest"):
        for value in (None, 2, "", "0", "1", "3", " 2", "2 ", [], {}, "\u00b2", "x" * 100_000):
            file = _File.of(good)
            file.metadata[field] = value
            raw = _dumps({"__metadata__": file.metadata} | file.entries)
            yield f"{field} is {str(value)[:40]!r}", file.with_entries(raw)
        file = _File.of(good)
        del file.metadata[field]
        raw = _dumps({"__metadata__": file.metadata} | file.entries)
        yield f"without {field}", file.with_entries(raw)
    for value in ("", "0" * 64, "x", None, 1):
        file = _File.of(good)
        text = file.metadata.pop("header")
        file.metadata |= {"signature": value, "header": text}
        yield f"a signature of {value!r}", file.bytes()
    file = _File.of(good)
    file.metadata["more"] = "x"
    yield "another word in the metadata", file.bytes()


def _headers(good: bytes) -> Iterator[tuple[str, bytes]]:
    """KVX's own header, its seal right."""
    plain = json.dumps(_File.of(good).text)
    for name, text in {
        "nothing": "",
        "null": "null",
        "a list": "[]",
        "an empty object": "{}",
        "empty parts": '{"header": {}, "checksums": {}}',
        "NaN": plain.replace('"start": 0', '"start": NaN'),
        "deep lists": "[" * 50_000,
        "deep lists in the facts": plain.replace(
            '"rotary":', '"engine": ' + "[" * 5000 + "]" * 5000 + ', "rotary":'
        ),
        "the start twice": plain.replace('"start":', '"start": 0, "start":'),
        "the facts twice": plain.replace('"facts":', '"facts": {}, "facts":'),
        "an integer of 4000 digits": plain.replace('"start":', '"start": ' + "9" * 4000 + ', "x":'),
        "an integer of 19 digits": plain.replace('"heads": [', '"heads": [' + "9" * 19 + ", "),
        "a surrogate": plain.replace('"encoding": "', '"encoding": "\\ud800'),
        "half its text": plain[: len(plain) // 2],
        "text after it": plain + "{}",
    }.items():
        yield f"{name} as KVX's header", _File.of(good).with_text(text)
    wrong: list[Any] = [None, -1, 1.5, 1 << 62, "0", [], {}, True, "x" * 50_000, [0, 1, 2]]
    for path in _paths(_File.of(good).text):
        for value in wrong:
            file = _File.of(good)
            *parents, last = path
            at: Any = file.text
            for word in parents:
                at = at[word]
            if at[last] == value or (path[-2:-1] == ("facts",) and value is None):
                continue
            at[last] = value
            yield f"{'.'.join(map(str, path))} is {str(value)[:40]}", file.bytes(checksums=False)
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "unknown field of the header": lambda h: h.update(more=1),
        "unknown field of a part": lambda h: h["parts"][0].update(more=1),
        "unknown fact": lambda h: h["parts"][0]["facts"].update(more=1),
        "unknown facts": lambda h: h["parts"][0]["facts"].update(more=1, others=[]),
        "another start": lambda h: h.update(start=h["start"] + 1),
        "heads of all parts": lambda h: h.update(heads=h["parts"][0].pop("heads")),
        "no heads": lambda h: h["parts"][0].update(heads=[1, 1]),
        "heads the wrong way round": lambda h: h["parts"][0]["heads"].reverse(),
        "heads of others": lambda h: h["parts"][0].update(
            heads=[n + 1 for n in h["parts"][0]["heads"]]
        ),
        "no parts": lambda h: h.update(parts=[]),
        "a part twice": lambda h: h["parts"].append(h["parts"][0]),
        "no layers": lambda h: h["parts"][0].update(layers=[]),
        "a layer twice": lambda h: h["parts"][0]["layers"].append(h["parts"][0]["layers"][0]),
        "a layer of others": lambda h: h["parts"][0]["layers"].append(1 << 20),
        "a layer beyond all": lambda h: h["parts"][0]["layers"].append(1 << 40),
        "many layers": lambda h: h["parts"][0].update(layers=list(range(100_000))),
        "many parts": lambda h: h.update(parts=h["parts"] * 1000),
        "opaque bytes": lambda h: h["parts"][0].update(encoding="rows"),
    }
    for word in ("", "zz" * 32, "ab", "AB" * 32, "0" * 63, "0" * 65, "\u0661" * 64, "../" * 20,
                   "0" * 64, "x" * 50_000, "0" * 63 + "\n", "\0" * 64):  # fmt: skip
        changes[f"prefix {word[:20]!r} of {len(word)}"] = partial(_with_prefix, word)
    for word in ("", "f64", "F32", "rows-", "f32+bf16", "bf16+bf16", "values", "f8_e4m3", "+",
                 "f8_e4m3+f8_e5m2", "rows-0123456789abcdef", "f16\n", "f32" * 10_000):  # fmt: skip
        changes[f"precision {word[:20]!r}"] = partial(_with_precision, word)
    for name, change in changes.items():
        file = _File.of(good)
        change(file.text["header"])
        yield f"KVX's header with {name}", file.bytes()
    for name, sums in {
        "none": {},
        "another": file.text["checksums"] | {"more": "00000000"},
        "wrong ones": dict.fromkeys(file.text["checksums"], "00000000"),
        "long ones": dict.fromkeys(file.text["checksums"], "0" * 64),
        "numbers": dict.fromkeys(file.text["checksums"], 0),
    }.items():
        file = _File.of(good)
        file.text["checksums"] = sums
        yield f"checksums: {name}", file.bytes(checksums=False)


def hostile_planes(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Files whose planes and formats deceive, each made from a good one that has both."""
    text = _File.of(good).text
    names = [n for n in _File.of(good).entries if n.startswith("planes.")] + list(text["formats"])
    for name in names:
        entry = _File.of(good).entries[name]
        shape = entry["shape"]
        shapes = [[*shape[:2], shape[2] * 2], [shape[0] * 2, *shape[1:]], shape[:2], [shape[0]]]
        shapes += [[1, 1, shape[0] * shape[1] * shape[2]], shape[::-1], [*shape, 1]]
        for wrong in dict.fromkeys(map(tuple, shapes)):
            file = _File.of(good)
            file.entries[name]["shape"] = wrong
            yield f"{name} has shape {wrong}", file.bytes(checksums=False)
        for code, bits in DTYPES.items():
            file = _File.of(good)
            begin, end = entry["data_offsets"]
            if code != entry["dtype"]:
                whole = 8 * (end - begin) // bits // (shape[0] * shape[1])
                file.entries[name] |= {"dtype": code, "shape": [*shape[:2], whole]}
                yield f"{name} as {code}", file.bytes()
        file = _File.of(good)
        file.entries = {n: e for n, e in file.entries.items() if n != name}
        yield f"without {name}", file.bytes(checksums=False)
        file = _File.of(good)
        file.entries[f"{name}x"] = file.entries.pop(name)
        file.text["checksums"].pop(name)
        yield f"{name} under another name", file.bytes()
    planes: dict[str, Callable[[list[Any]], object]] = {
        "none": list.clear,
        "one twice": lambda p: p.append(p[0]),
        "others of the same role": lambda p: p.append(p[0] | {"tokens_per_entry": 2}),
        "thousands": lambda p: p.extend(p[0] | {"role": 1000 + i} for i in range(20_000)),
        "thousands of one role": lambda p: p.extend([p[0]] * 20_000),
        "an unknown field": lambda p: p[0].update(more=1),
        "a list": lambda p: p.append([]),
        "null": lambda p: p.append(None),
    }
    for i, plane in enumerate(text["header"]["parts"][0]["planes"]):
        for key, values in {
            "layer": [-1, 1, 1 << 20, 1 << 40, None, "0", 0.5, True],
            "role": [-1, 0, 1, 2, 41, 1 << 31, 1 << 62, None, "index_k", [4]],
            "tokens_per_entry": [-1, 0, 1, 2, 3, 5, 1000, 1 << 31, 1 << 62, None, "4"],
            "replicated": [not plane["replicated"], 1, None, "true"],
        }.items():
            for value in values:
                if plane[key] != value or type(plane[key]) is not type(value):
                    change = partial(_with_field, i, key, value)
                    planes[f"{key} of {i} {str(value)[:40]}"] = change
    for name, change in planes.items():
        file = _File.of(good)
        change(file.text["header"]["parts"][0]["planes"])
        yield f"planes: {name}", file.bytes()
    (packed,) = text["formats"]
    for formats in (
        {}, None, [], "Q8_0", {packed: "Q4_0"}, {packed: "q8_0"}, {packed: "Q9_9"}, {packed: 12},
        {packed: "F16"}, {packed: "U8"}, {packed: "Q" * 50_000}, {packed: "Q8_0\n"},
        {"tokens": "Q8_0"}, {"more": "Q8_0"}, {packed: "Q8_0", "more": "Q8_0"},
        {names[0]: "Q8_0"}, dict.fromkeys(map(str, range(20_000)), "Q8_0"),
    ):  # fmt: skip
        file = _File.of(good)
        file.text["formats"] = formats
        yield f"formats {str(formats)[:60]}", file.bytes()


def _with_field(i: int, key: str, value: Any, planes: list[Any]) -> None:
    planes[i][key] = value


def _with_prefix(prefix: str, header: dict[str, Any]) -> None:
    header["prefix"] = prefix


def _with_precision(precision: str, header: dict[str, Any]) -> None:
    header["parts"][0]["precision"] = precision


def _forged(good: bytes) -> Iterator[tuple[str, bytes]]:
    """All checksums are right: the first two are noticed by what the file is called."""
    file = _File.of(good)
    begin, end = file.entries["tokens"]["data_offsets"]
    tokens = bytes([file.data[begin] ^ 1]) + file.data[begin + 1 : end]
    file.data = file.data[:begin] + tokens + file.data[end:]
    yield "the tokens of another entry", file.bytes()
    other = _File.of(good)
    other.text["header"]["prefix"] = hashlib.sha256(b"another").hexdigest()
    other.text["header"]["start"] += 1 << 10
    yield "the header of another entry", other.bytes()
    for kind in (".k", ".v", "_scale"):
        for name, entry in _File.of(good).entries.items():
            if name.endswith(kind):
                file = _File.of(good)
                begin, end = entry["data_offsets"]
                changed = bytes(byte ^ 1 for byte in file.data[begin:end])
                file.data = file.data[:begin] + changed + file.data[end:]
                yield f"{name} changed, its checksum not", file.bytes(checksums=False)
                yield f"forged {name}", file.bytes()
                break


def mutated_files(good: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Random changes; in the header's words and numbers half of them, with the seal right."""
    dice = random.Random(20260101)
    first = 8 + int.from_bytes(good[:8], "little")
    for i in range(count):
        if i % 2:
            data = bytearray(good)
            for _ in range(dice.randrange(1, 4)):
                at = dice.randrange(len(data) if dice.random() < 0.2 else first)
                kind = dice.randrange(4)
                if kind == 0:
                    data[at] ^= 1 << dice.randrange(8)
                elif kind == 1:
                    del data[at : at + dice.randrange(1, 9)]
                elif kind == 2:
                    data[at:at] = dice.randbytes(dice.randrange(1, 9))
                else:
                    source = dice.randrange(len(data))
                    data[at : at + 16] = data[source : source + 16]
            yield f"mutation {i} of bytes", bytes(data)
        else:
            file = _File.of(good)
            tree: Any = dice.choice((file.text, file.entries))
            paths = list(_paths(tree))
            *parents, last = dice.choice(paths)
            for word in parents:
                tree = tree[word]
            tree[last] = dice.choice(
                (tree[last], 0, 1, 7, 2**31, 2**60, "", "x", [], {}, None, 0.5)
            )
            if isinstance(tree[last], int) and dice.random() < 0.5:
                tree[last] += dice.choice((-1, 1, 2, 16))
            yield f"mutation {i} of {last}", file.bytes(checksums=False)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value lies in a tree of JSON, those of lists only at their ends."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))[:: max(1, len(tree) - 1)]
    else:
        return
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))
