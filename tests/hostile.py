"""Files of snapshots: broken, foreign, or written to deceive, each made from a good one.

hostile_files yields the same files every time. Checks are recomputed where an attacker could, so
that what is behind them is reached: tests/hostile_entries.py changes the record and what is around
it, this file the kind that a snapshot has with it. Files whose name begins with "forged" are well
formed and hold other keys, values or scales: only a signature detects them.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from tests.hostile_entries import hostile_entries
from tests.snapshot import store_reader
from tests.snapshot_files import SnapshotFile

# All that safetensors has, in bits.
DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# Clears a terminal, names its window, rings, begins another line and turns what follows around.
CONTROLS = "\x1b[2J\x1b]0;x\x07\nERROR\r\u202e\x9b"


def hostile_files(
    good: bytes, *, header_limit: int = 32 << 20, mutations: int = 300
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file.

    good:         a file of a snapshot, unsigned
    header_limit: one of the files has a header of one byte more
    mutations:    how many files with random changes there are at the end
    """
    makers = (_texts, _foreign, _tensors, _kinds, _controlling, _forged)
    groups = (
        hostile_entries(good, mutations=mutations),
        _long(good, header_limit),
        *(make(good) for make in makers),
        mutated_files(good, mutations),
    )
    yield from _each_once(good, chain(*groups))


def _each_once(good: bytes, files: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    seen: Counter[str] = Counter()
    for name, data in files:
        if data != good:
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name} ({seen[name]})", data


def raw_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of safetensors with any header, which may lie about its length."""
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


def _long(good: bytes, limit: int) -> Iterator[tuple[str, bytes]]:
    stop = 8 + int.from_bytes(good[:8], "little")
    padded = good[8:stop].ljust(limit + 1)
    yield "header one byte too long, and there", raw_file(padded, good[stop:])
    large = (limit + 1).to_bytes(8, "little")
    yield "header one byte too long, and not there", large + good[8:]
    file = SnapshotFile.of(good)
    file.ids = bytes(limit // 2)
    yield "more tokens than a header may have", file.bytes()


def _texts(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Kinds that are no JSON as KVX writes it, and headers that have them elsewhere."""
    kind = store_reader.canonical(SnapshotFile.of(good).kind)
    for name, raw in {
        "nothing": b"",
        "blanks": b"  ",
        "a list": b"[]",
        "null": b"null",
        "a number": b"12345678",
        "a string": b'"tensors"',
        "an empty object": b"{}",
        "an open string": b'{"tens',
        "many escapes": b'{"' + b"\\\\" * 200_000 + b'": 1}',
        "many open strings": b'"\\' * 200_000,
        "deep lists": b"[" * 100_000,
        "deep lists that end": b"[" * 100_000 + b"]" * 100_000,
        "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "deep lists in the facts": kind.replace(
            b'"facts":{', b'"facts":{"engine":' + b"[" * 5000 + b"]" * 5000 + b","
        ),
        "one more bracket": kind + b"}",
        "one less bracket": kind[:-1],
        "half of it": kind[: len(kind) // 2],
        "text after it": kind + b" x",
        "a blank after it": kind + b" ",
        "blanks in it": kind.replace(b",", b", "),
        "a BOM": b"\xef\xbb\xbf" + kind,
        "UTF-16": kind.decode().encode("utf-16"),
        "no UTF-8": kind.replace(b"tensors", b"tens\xffors"),
        "half a character": kind.replace(b"tensors", b"tens\xc3", 1),
        "a NUL": kind.replace(b"tensors", b"tens\0ors"),
        "a surrogate in a name": kind.replace(b'"layers.0.k"', b'"\\ud800"'),
        "a surrogate in the prefix": kind.replace(b'"prefix":"', b'"prefix":"\\udfff'),
        "a surrogate in the encoding": kind.replace(b'"encoding":"', b'"encoding":"\\ud800'),
        "NaN": kind.replace(b'"heads":[0', b'"heads":[NaN'),
        "Infinity": kind.replace(b'"heads":[0', b'"heads":[-Infinity'),
        "1e400": kind.replace(b'"heads":[0', b'"heads":[1e400'),
        "an integer of 5000 digits": kind.replace(b'"heads":[', b'"heads":[' + b"9" * 5000 + b","),
        "an integer of 4000 digits": kind.replace(b'"heads":[', b'"heads":[' + b"9" * 4000 + b","),
        "an integer of 19 digits": kind.replace(b'"heads":[', b'"heads":[' + b"9" * 19 + b","),
        "a comment": b"/* */" + kind,
        "single quotes": kind.replace(b'"', b"'"),
        "its groups twice": kind.replace(b'"groups":', b'"groups":[],"groups":'),
        "its facts twice": kind.replace(b'"facts":', b'"facts":{},"facts":'),
        "its prefix twice": kind.replace(b'"prefix":', b'"prefix":"","prefix":'),
        "a number of 1.0": kind.replace(b'"kvx_kind":3', b'"kvx_kind":3.0'),
        "more than a MiB": kind.replace(b'"prefix":"', b'"prefix":"' + b"x" * (1 << 20)),
    }.items():
        yield f"{name} as a kind", SnapshotFile.of(good).bytes(raw)
    text = json.dumps(kind.decode())
    for name, literal in {
        "nothing": "",
        "an open string": ',"kvx_kind":"x',
        "an open kind": f',"kvx_kind":{text[:-1]}',
        "null": ',"kvx_kind":null',
        "a list": ',"kvx_kind":["x"]',
        "the kind as an object": f',"kvx_kind":{kind.decode()}',
        "another name": f',"kvx_Kind":{text}',
        "a blank": f', "kvx_kind":{text}',
        "a blank in it": f',"kvx_kind": {text}',
        "the kind twice": f',"kvx_kind":{text},"kvx_kind":{text}',
        "another word": f',"kvx_kind":{text},"more":"x"',
        "another word before": f',"more":"x","kvx_kind":{text}',
        "the end of the metadata twice": f',"kvx_kind":{text}}}',
        "other escapes": f',"kvx_kind":{text}'.replace('\\"', "\\u0022"),
        "one other escape": f',"kvx_kind":{text}'.replace('\\"', "\\u0022", 1),
        "a slash that is escaped": f',"kvx_kind":{text}'.replace("n", "\\u006e", 1),
        "half a surrogate": ',"kvx_kind":"\\ud800"',
        "many escapes": ',"kvx_kind":"' + "\\\\" * 200_000 + '"',
        "many quotes": ',"kvx_kind":' + '"' * 200_000,
        "many brackets": ',"kvx_kind":' + "[" * 100_000,
    }.items():
        yield f"{name} behind the record", SnapshotFile.of(good).bytes(literal=literal)
    for name, change in {
        "no tensors": lambda text: "",
        "a bracket more": lambda text: text + "}",
        "the metadata again": lambda text: ',"__metadata__":{}' + text,
        "a tensor more": lambda text: (
            text + ',"more":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        ),
        "an order of its own": lambda text: text[:1] + text[1:].swapcase(),
        "other offsets": lambda text: text.replace('"data_offsets":[0,', '"data_offsets":[1,', 1),
        "another dtype": lambda text: text.replace('"F32"', '"I32"', 1),
        "another shape": lambda text: text.replace('"shape":[', '"shape":[1,', 1),
        "a blank": lambda text: text.replace(":", ": ", 1),
        "controls": lambda text: text.replace("layers", CONTROLS.encode().decode("latin-1"), 1),
    }.items():
        file = SnapshotFile.of(good)
        file.entries = change(file.entries)
        yield f"{name} in the text of the tensors", file.bytes()


def _foreign(good: bytes) -> Iterator[tuple[str, bytes]]:
    data = bytes(64)
    weight = {"weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    tokens = {"tokens": {"dtype": "I64", "shape": [8], "data_offsets": [0, 64]}}
    many = {f"x{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(9999)}
    for name, header in {
        "weights": weight,
        "weights of PyTorch": {"__metadata__": {"format": "pt"}} | weight,
        "tokens": tokens,
        "tokens of PyTorch": {"__metadata__": {"format": "pt"}} | tokens,
        "format 2": {"__metadata__": {"kvx_snapshot": "2", "tokens": "8", "bytes": "64"}} | tokens,
        "metadata that are a list": {"__metadata__": ["kvx"]} | tokens,
        "metadata that are null": {"__metadata__": None} | tokens,
        "a record that is null": {"__metadata__": {"kvx": None}} | tokens,
        "a record that is empty": {"__metadata__": {"kvx": ""}} | tokens,
        "nothing": {},
        "nothing but metadata": {"__metadata__": {"kvx": "00"}},
        "thousands of tensors": many,
    }.items():
        raw = json.dumps(header, separators=(",", ":")).encode()
        yield f"a foreign file of {name}", raw_file(raw, data)
    yield (
        "216 bytes that ended an engine",
        raw_file(
            json.dumps({"tokens": {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}})
            .encode()
            .ljust(192),
            bytes(16),
        ),
    )
    for name, raw in {
        "deep lists": b"[" * 100_000,
        "no text": b"\xff\xfe" * 40,
        "a list": b"[]",
        "one byte": b"{",
    }.items():
        yield f"a header of {name}", raw_file(raw, data)
    file = SnapshotFile.of(good)
    del file.kind["prefix"]
    file.entries = file.entries or ""
    yield "an entry of a store", file.bytes(literal="")
    yield "an entry with its kind", file.bytes()


def _tensors(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Tensors of other dtypes, shapes and names; the text of the header is right, if it can be."""
    names = [row[0] for row in SnapshotFile.of(good).kind["tensors"]]
    for at in (0, 1, len(names) - 1):
        for word in (*DTYPES, *store_reader.UNITS, "S8", "S32", "INVALID", "U8_ZERO"):
            file, row = _row(good, at)
            item = store_reader.DTYPES.get(word, (DTYPES.get(word, 8) // 8 or 1,))[0]
            if row[1] != word:
                size = store_reader.DTYPES[row[1]][0]
                row[1], row[2][-1] = word, max(1, row[2][-1] * size // item)
                yield f"{names[at]} as {word}", _again(file)
        for field, values in _WRONG.items():
            for value in values:
                file, row = _row(good, at)
                row[field] = copy.deepcopy(value)
                yield f"{names[at]} has {field} {str(value)[:40]}", _again(file)
        for value in (None, [], {}, 1, "x", ["x"], [1, 2, 3, 4, 5], [names[at]] * 5, ["x"] * 6):
            file, _ = _row(good, at)
            file.kind["tensors"][at] = value
            yield f"{names[at]} is {str(value)[:40]}", _again(file)
        file, row = _row(good, at)
        row[2][-1] -= 1
        yield f"{names[at]} has less than its bytes", file.bytes()
        yield f"{names[at]} has less than its bytes, and says so", _again(file)
        file, row = _row(good, at)
        row[2][-1] = (1 << 31) - 1
        yield f"{names[at]} has very many bytes", file.bytes()
        row[2][:] = [(1 << 31) - 1] * 3
        yield f"{names[at]} has more bytes than there are", file.bytes()
        file, row = _row(good, at)
        file.kind["tensors"].remove(row)
        yield f"without {names[at]}", _again(file)
        file, row = _row(good, at)
        row[0] += "x"
        yield f"{names[at]} under another name", _again(file)
    file, _ = _row(good, 0)
    file.kind["tensors"].append(["more", "U8", [64], "", ""])
    file.data += bytes(64)
    yield "another tensor", _again(file)
    for change in (list.reverse, list.clear, lambda rows: rows.append(rows[0])):
        file = SnapshotFile.of(good)
        change(file.kind["tensors"])
        yield "the tensors in another order", _again(file)
    file = SnapshotFile.of(good)
    one, two = file.kind["tensors"][:2]
    one[0], two[0] = two[0], one[0]
    yield "the tensors of one layer under each other's name", _again(file)


def _row(good: bytes, at: int) -> tuple[SnapshotFile, list[Any]]:
    file = SnapshotFile.of(good)
    return file, file.kind["tensors"][at]


def _again(file: SnapshotFile) -> bytes:
    """The file, laid out as its kind says if that says anything."""
    with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        tensors = store_reader.tensors_of(file.kind, len(file.ids) // 8)
        if 0 < sum(tensor.num_bytes for tensor in tensors.values()) < 1 << 26:
            return copy.deepcopy(file).laid_out().bytes()
    return file.bytes()


_NUMBERS: list[Any] = [
    [], [-1], [0], [0, 0], [1 << 63], [(1 << 63) - 1], [1 << 32, 1 << 32], [0.0], [1.5], [True],
    ["1"], [None], [[1]], [1] * 100, None, 8, "8", {}, True, [-(1 << 63), 1 << 63], [0, 1 << 62],
    [16, 8], ["n", 1, 1], ["n/2", 1, 1], ["n/0"], [1, "n", 1],
]  # fmt: skip
_WRONG: dict[int, list[Any]] = {  # by their place in a row
    0: ["", "tokens", "layers.0", "layers..k", "layers.-1.k", "layers.0.k.k", "layers.00.k", None,
        1, "planes.0.x", "x" * 50_000, "\u0661"],
    1: ["", "WHAT", "i64", None, 64, ["I64"], {}, "I64 ", "\u0661", "F32" * 10_000],
    2: _NUMBERS,
    3: ["WHAT", "Q9_9", "S64", "no word", "F32", None, 0, [], "x" * 50_000],
    4: ["lossless_f16", "lossless_bf16", "No Word", None, 0, [], "x" * 50_000],
}  # fmt: skip


def _controlling(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Wherever a file has a word, one that controls a terminal, or makes up lines of a log."""
    for path in _paths(SnapshotFile.of(good).kind):
        file = SnapshotFile.of(good)
        _put(file.kind, path, CONTROLS)
        yield f"controls as {'.'.join(map(str, path))}", _again(file)
    for key in ("", "groups", "facts"):
        file = SnapshotFile.of(good)
        group = file.kind["groups"][0]
        {"": file.kind, "groups": group, "facts": group["facts"]}[key][CONTROLS] = 1
        yield f"controls as a field of {key}", file.bytes()
    for at in (0, 3, 4):
        file, row = _row(good, 0)
        row[at] = f"layers.0.{CONTROLS}"
        yield f"controls in field {at} of a tensor", _again(file)
    text = CONTROLS.encode().decode("latin-1")
    file = SnapshotFile.of(good)
    yield "controls behind the record", file.bytes(literal=f',"kvx_kind":"{text}"')
    yield "controls in the metadata", file.bytes(literal=f',"{text}":"x"')


def _kinds(good: bytes) -> Iterator[tuple[str, bytes]]:
    """KVX's own description, its check right."""
    wrong: list[Any] = [None, -1, 1.5, 1 << 62, "0", [], {}, True, "x" * 50_000, [0, 1, 2]]
    for path in _paths(SnapshotFile.of(good).kind):
        for value in wrong:
            file = SnapshotFile.of(good)
            _put(file.kind, path, value)
            yield f"{'.'.join(map(str, path))} is {str(value)[:40]}", file.bytes()
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "unknown field": lambda k: k.update(more=1),
        "unknown field of a group": lambda k: k["groups"][0].update(more=1),
        "unknown fact": lambda k: k["groups"][0]["facts"].update(more=1),
        "unknown facts": lambda k: k["groups"][0]["facts"].update(more=1, others=[]),
        "a fact that is null": lambda k: k["groups"][0]["facts"].update(lossy=None),
        "no prefix": lambda k: k.pop("prefix"),
        "another format": lambda k: k.update(kvx_kind=4),
        "signed": lambda k: k.update(keyed=True),
        "encrypted": lambda k: k.update(encrypted=True),
        "heads of all groups": lambda k: k.update(heads=k["groups"][0].pop("heads")),
        "no heads": lambda k: k["groups"][0].update(heads=[1, 1]),
        "heads the wrong way round": lambda k: k["groups"][0]["heads"].reverse(),
        "heads of others": lambda k: k["groups"][0].update(
            heads=[n + 1 for n in k["groups"][0]["heads"]]
        ),
        "no groups": lambda k: k.update(groups=[]),
        "a group twice": lambda k: k["groups"].append(k["groups"][0]),
        "no layers": lambda k: k["groups"][0].update(layers=[]),
        "a layer twice": lambda k: k["groups"][0]["layers"].append(k["groups"][0]["layers"][0]),
        "a layer of others": lambda k: k["groups"][0]["layers"].append(1 << 20),
        "a layer beyond all": lambda k: k["groups"][0]["layers"].append(1 << 40),
        "many layers": lambda k: k["groups"][0].update(layers=list(range(100_000))),
        "many groups": lambda k: k.update(groups=k["groups"] * 1000),
        "many tensors": lambda k: k.update(
            tensors=[[f"layers.{i}.k", "F32", [1, 1, 1], "", ""] for i in range(20_000)]
        ),
        "opaque bytes": lambda k: k["groups"][0].update(encoding="rows"),
    }
    for word in ("", "zz" * 32, "ab", "AB" * 32, "0" * 63, "0" * 65, "\u0661" * 64, "../" * 20,
                 "0" * 64, "x" * 50_000, "0" * 63 + "\n", "\0" * 64, "@@", '"}', "\\"):  # fmt: skip
        changes[f"prefix {word[:20]!r} of {len(word)}"] = partial(_with_prefix, word)
    for word in ("", "f64", "F32", "rows-", "f32+bf16", "bf16+bf16", "values", "f8_e4m3", "+",
                 "f8_e4m3+f8_e5m2", "rows-0123456789abcdef", "f16\n", "f32" * 10_000):  # fmt: skip
        changes[f"precision {word[:20]!r}"] = partial(_with_precision, word)
    for name, change in changes.items():
        file = SnapshotFile.of(good)
        change(file.kind)
        yield f"a kind with {name}", file.bytes()
    for start in (1, 7, 1 << 20, (1 << 62) + 1, (1 << 64) - 1):
        file = SnapshotFile.of(good)
        file.start = start
        yield f"it begins at {start}", file.bytes()
    file = SnapshotFile.of(good)
    file.parent = bytes(31) + b"\1"
    yield "a parent", file.bytes()


def hostile_planes(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Files whose planes and formats deceive, each made from a good one that has both."""
    yield from _each_once(good, _planes(good))


def _planes(good: bytes) -> Iterator[tuple[str, bytes]]:
    kind = SnapshotFile.of(good).kind
    for at, (name, _, shape, *_) in enumerate(kind["tensors"]):
        shapes = [[*shape[:2], shape[-1] * 2], [shape[0] * 2, *shape[1:]], shape[:2], [shape[0]]]
        count = 1
        for extent in shape:
            count *= extent
        shapes += [[1, 1, count], shape[::-1], [*shape, 1]]
        for wrong in dict.fromkeys(map(tuple, shapes)):
            file, row = _row(good, at)
            row[2] = list(wrong)
            yield f"{name} has shape {wrong}", file.bytes()
            yield f"{name} has shape {wrong}, and says so", _again(file)
        for word in (*DTYPES, *store_reader.UNITS, "S8"):
            file, row = _row(good, at)
            if word != row[1]:
                item = store_reader.DTYPES.get(word, (DTYPES.get(word, 8) // 8 or 1,))[0]
                size = store_reader.DTYPES[row[1]][0]
                row[1], row[2][-1] = word, max(1, row[2][-1] * size // item)
                yield f"{name} as {word}", _again(file)
        for word in ("Q8_0", "BF16", "F32", "Q9_9", "x" * 50_000):
            file, row = _row(good, at)
            row[3] = word
            yield f"{name} was {word[:20]}", _again(file)
        file, row = _row(good, at)
        file.kind["tensors"].remove(row)
        yield f"without {name}", _again(file)
        file, row = _row(good, at)
        row[0] += "x"
        yield f"{name} under another name", _again(file)
    planes: dict[str, Callable[[list[Any]], object]] = {
        "none": list.clear,
        "one twice": lambda p: p.append(p[0]),
        "others of the same role": lambda p: p.append([*p[0][:2], 2, p[0][3]]),
        "thousands": lambda p: p.extend([p[0][0], 1000 + i, *p[0][2:]] for i in range(20_000)),
        "thousands of one role": lambda p: p.extend([p[0]] * 20_000),
        "an unknown field": lambda p: p[0].append(1),
        "an object": lambda p: p.append({"layer": 0}),
        "a list": lambda p: p.append([]),
        "null": lambda p: p.append(None),
    }
    wrongs: list[list[Any]] = [
        [-1, 1, 1 << 20, 1 << 40, None, "0", 0.5, True],
        [-1, 0, 1, 2, 41, 1 << 31, 1 << 62, None, "index_k", [4]],
        [-1, 0, 1, 2, 3, 5, 1000, 1 << 31, 1 << 62, None, "4"],
        [True, False, 1, None, "true"],
    ]
    for i, plane in enumerate(kind["groups"][0]["planes"]):
        for at, values in enumerate(wrongs):
            for value in values:
                if plane[at] != value or type(plane[at]) is not type(value):
                    planes[f"field {at} of {i} {str(value)[:40]}"] = partial(
                        _with_field, i, at, value
                    )
    for name, change in planes.items():
        file = SnapshotFile.of(good)
        change(file.kind["groups"][0]["planes"])
        yield f"planes: {name}", file.bytes()
    for start in (1, 2, 3, 5, (1 << 62) + 4):
        file = SnapshotFile.of(good)
        file.start = start
        yield f"planes: it begins at {start}", file.bytes()


def _with_field(i: int, at: int, value: Any, planes: list[Any]) -> None:
    planes[i][at] = value


def _with_prefix(prefix: str, kind: dict[str, Any]) -> None:
    kind["prefix"] = prefix


def _with_precision(precision: str, kind: dict[str, Any]) -> None:
    kind["groups"][0]["precision"] = precision


def _forged(good: bytes) -> Iterator[tuple[str, bytes]]:
    """All checks are right."""
    file = SnapshotFile.of(good)
    file.ids = bytes([file.ids[0] ^ 1]) + file.ids[1:]
    yield "forged tokens", file.bytes()
    file = SnapshotFile.of(good)
    file.kind["prefix"], file.start = "another", file.start + 1024
    yield "forged prefix", file.bytes()
    for ending in (".k", ".v", "_scale"):
        for name, *_ in SnapshotFile.of(good).kind["tensors"]:
            if name.endswith(ending):
                file = SnapshotFile.of(good)
                begin, end = file.piece(name)
                changed = bytes(byte ^ 1 for byte in file.data[begin:end])
                file.data = file.data[:begin] + changed + file.data[end:]
                yield f"{name} changed, its check not", file.bytes()
                yield f"forged {name}", file.checked().bytes()
                break


def mutated_files(good: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Random changes; half of them in the words and numbers of the kind, with good checks."""
    dice = random.Random(20260101)
    first = 8 + int.from_bytes(good[:8], "little")
    used = len(good[:first].rstrip())
    for i in range(count):
        if i % 2:
            data = bytearray(good)
            for _ in range(dice.randrange(1, 4)):
                at = dice.randrange(len(data) if dice.random() < 0.2 else used)
                way = dice.randrange(4)
                if way == 0:
                    data[at] ^= 1 << dice.randrange(8)
                elif way == 1:
                    del data[at : at + dice.randrange(1, 9)]
                elif way == 2:
                    data[at:at] = dice.randbytes(dice.randrange(1, 9))
                else:
                    source = dice.randrange(len(data))
                    data[at : at + 16] = data[source : source + 16]
            yield f"mutation {i} of bytes", bytes(data)
        else:
            file = SnapshotFile.of(good)
            path = dice.choice(list(_paths(file.kind)))
            old = _at(file.kind, path)
            value = dice.choice((old, 0, 1, 7, 2**31, 2**60, "", "x", [], {}, None, 0.5))
            if isinstance(value, int) and dice.random() < 0.5:
                value += dice.choice((-1, 1, 2, 16))
            _put(file.kind, path, value)
            yield f"mutation {i} of {'.'.join(map(str, path))}", _again(file)


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for word in path:
        tree = tree[word]
    return tree


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    _at(tree, path[:-1])[path[-1]] = value


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
