"""Kinds of files, which anyone may have written: what is wrong is refused, in little time."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvx_core.snapshot import CorruptError, StoreError
from kvx_core.snapshot.kind import Kind
from tests.snapshot.chunk_files import FULL, MAKERS, kind_of
from tests.snapshot.store_reader import canonical

Change = Callable[[dict[str, Any]], object]


def put(value: Any, *path: Any) -> Change:
    def change(kind: dict[str, Any]) -> None:
        *before, last = path
        at: Any = kind
        for step in before:
            at = at[step]
        if isinstance(at, list) and last == len(at):
            at.append(value)
        else:
            at[last] = value

    return change


HUGE = 2**31 - 1
ROW = ["layers.0.k", "BF16", ["n", 3, 6], "", ""]
CORRUPT: dict[str, Change] = {
    "no format": lambda kind: kind.pop("kvx_kind"),
    "an older format": put(2, "kvx_kind"),
    "a newer format": put(4, "kvx_kind"),
    "keyed is a number": put(1, "keyed"),
    "encrypted is a text": put("yes", "encrypted"),
    "no groups": put([], "groups"),
    "no tensors": put([], "tensors"),
    "groups are none": put(None, "groups"),
    "layers are a text": put("01", "groups", 0, "layers"),
    "no layers": put([], "groups", 0, "layers"),
    "a layer twice": put([0, 0], "groups", 0, "layers"),
    "layers not sorted": put([1, 0], "groups", 0, "layers"),
    "a layer in two groups": put([0, 3, 5], "groups", 1, "layers"),
    "a negative layer": put([-1, 1], "groups", 0, "layers"),
    "a huge layer": put([0, 1 << 40], "groups", 0, "layers"),
    "a layer more": put([0, 1, 2], "groups", 0, "layers"),
    "a layer is true": put([False, True], "groups", 0, "layers"),
    "a layer is a number with a point": put([0.0, 1.0], "groups", 0, "layers"),
    "no heads": put([2, 2], "groups", 0, "heads"),
    "heads backwards": put([5, 2], "groups", 0, "heads"),
    "negative heads": put([-1, 2], "groups", 0, "heads"),
    "huge heads": put([0, 1 << 40], "groups", 0, "heads"),
    "three heads": put([0, 1, 2], "groups", 0, "heads"),
    "other heads": put([0, 4], "groups", 0, "heads"),
    "no precision": put("", "groups", 0, "precision"),
    "an unknown precision": put("bf17", "groups", 0, "precision"),
    "another encoding": put("ours", "groups", 0, "encoding"),
    "a fact of another type": put("4", "groups", 0, "facts", "rotary_dim"),
    "an odd rotary_dim": put(3, "groups", 0, "facts", "rotary_dim"),
    "a negative window": put(-1, "groups", 0, "facts", "window"),
    "an unknown rotary": put("third", "groups", 0, "facts", "rotary"),
    "a fact is none": put(None, "groups", 0, "facts", "rotary"),
    "no precision in lossy": put("bf17", "groups", 0, "facts", "lossy"),
    "a fact that is not said": put("xyz", "groups", 0, "facts", "fingerprint!"),
    "facts are a list": put([], "groups", 0, "facts"),
    "a plane of another layer": put([9, 6, 1, True], "groups", 1, "planes", 0),
    "a plane twice": put([3, 6, 1, True], "groups", 1, "planes", 2),
    "a role of K": put([3, 1, 1, True], "groups", 1, "planes", 0),
    "a huge entry": put([3, 6, 1 << 30, True], "groups", 1, "planes", 0),
    "a negative entry": put([3, 6, -4, True], "groups", 1, "planes", 0),
    "another entry": put([3, 5, 1, False], "groups", 1, "planes", 0),
    "a plane without a tensor": put([5, 60, 1, True], "groups", 1, "planes", 4),
    "a plane of two numbers": put([3, 6], "groups", 1, "planes", 0),
    "a tensor twice": lambda kind: kind["tensors"].insert(0, kind["tensors"][0]),
    "a tensor too many": lambda kind: kind["tensors"].insert(2, ["layers.8.k", *ROW[1:]]),
    "a tensor too few": lambda kind: kind["tensors"].pop(),
    "a tensor without a name": put("", "tensors", 2, 0),
    "a name of another kind": put("weights.0", "tensors", 2, 0),
    "a row of four": put(ROW[:4], "tensors", 2),
    "a dtype that is a number": put(2, "tensors", 2, 1),
    "no dtype": put("", "tensors", 2, 1),
    "an invalid dtype": put("INVALID", "tensors", 2, 1),
    "an index dtype": put("S64", "tensors", 2, 1),
    "larger elements last": lambda kind: kind["tensors"].append(kind["tensors"].pop(0)),
    "no shape": put([], "tensors", 2, 2),
    "four axes": put(["n", 3, 3, 2], "tensors", 2, 2),
    "an extent of 0": put(["n", 3, 0], "tensors", 2, 2),
    "a negative extent": put(["n", 3, -6], "tensors", 2, 2),
    "shapes that overflow": put(["n", HUGE, HUGE], "tensors", 2, 2),
    "a huge extent": put(["n", 3, HUGE], "tensors", 2, 2),
    "an extent of 63 bits": put(["n", 3, 1 << 62], "tensors", 2, 2),
    "a number of tokens": put([200, 3, 6], "tensors", 2, 2),
    "tokens at the end": put([3, 6, "n"], "tensors", 2, 2),
    "entries of K": put(["n/4", 3, 6], "tensors", 2, 2),
    "entries of 0 tokens": put(["n/0", 3, 6], "tensors", 2, 2),
    "an extent of words": put(["m", 3, 6], "tensors", 2, 2),
    "an original of bytes": put("S64", "tensors", 2, 3),
    "no original": put("INVALID", "tensors", 2, 3),
    "a coding of other numbers": put("lossless_bf16", "tensors", 0, 4),
}
NEWER: dict[str, Change] = {
    "a field": put(1, "more"),
    "a field of a group": put(1, "groups", 0, "more"),
    "a fact": put(1, "groups", 0, "facts", "more"),
    "a dtype": put("F6_E3M2", "tensors", 2, 1),
    "an original": put("F6_E3M2", "tensors", 2, 3),
    "a coding": put("lossless_f8", "tensors", 2, 4),
}


def changed(change: Change) -> bytes:
    kind = json.loads(kind_of(MAKERS["planes"]).text)
    change(kind)
    return canonical(kind)


def refused(raw: bytes, error: type[StoreError] = CorruptError) -> str:
    """Why a kind is refused: in 20 ms of a core, or in as much as a second for a megabyte."""
    taken = []
    for _ in range(2):
        begin = time.thread_time()
        with pytest.raises(error) as found:
            Kind.parse(raw, "a kind")
        taken.append(time.thread_time() - begin)
    assert min(taken) < (0.02 if len(raw) < 1 << 16 else 1)
    assert type(found.value) is error
    assert len(str(found.value)) < 1000
    return str(found.value)


@pytest.mark.parametrize("name", CORRUPT)
def test_wrong_kinds(name: str) -> None:
    refused(changed(CORRUPT[name]))


@pytest.mark.parametrize("name", NEWER)
def test_kinds_of_newer_versions_are_not_called_corrupt(name: str) -> None:
    assert "which this version of KVX does not know" in refused(changed(NEWER[name]), StoreError)


GOOD = kind_of(MAKERS["planes"]).text
TEXTS = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"3",
    "no text": b"\xff\xfe",
    "a byte more": GOOD + b" ",
    "a byte less": GOOD[:-1],
    "spaces": GOOD.replace(b":", b": "),
    "another order": json.dumps(dict(reversed(json.loads(GOOD).items()))).encode(),
    "a key twice": GOOD.replace(b'"keyed":false', b'"keyed":false,"keyed":false'),
    "NaN": GOOD.replace(b'"kvx_kind":3', b'"kvx_kind":NaN'),
    "infinity": GOOD.replace(b'"kvx_kind":3', b'"kvx_kind":Infinity'),
    "3.0": GOOD.replace(b'"kvx_kind":3', b'"kvx_kind":3.0'),
    "a huge number": GOOD.replace(b'"kvx_kind":3', b'"kvx_kind":' + b"9" * 100_000),
    "a huge exponent": GOOD.replace(b'"kvx_kind":3', b'"kvx_kind":1e999999999'),
    "deep lists": b"[" * 500_000,
    "deep objects": b'{"a":' * 100_000,
    "deep in a field": GOOD.replace(b'"kvx_kind":3', b'"kvx_kind":' + b"[" * 9999 + b"]" * 9999),
    "half a pair": GOOD.replace(b'"values"', b'"\\ud800"'),
    "a zero": GOOD.replace(b'"values"', b'"values\\u0000"'),
    "too long": GOOD + b" " * (1 << 20),
    "many layers": GOOD.replace(b'"layers":[0,1]', b'"layers":[0' + b",1" * 400_000 + b"]"),
    "many groups": b'{"groups":[' + b"{}," * 300_000 + b"{}]}",
    "many tensors": GOOD.replace(b'"tensors":[', b'"tensors":[' + b"[]," * 300_000),
}


@pytest.mark.parametrize("name", TEXTS)
def test_wrong_texts(name: str) -> None:
    assert TEXTS[name] != GOOD
    refused(TEXTS[name])


def test_a_small_wrong_kind_takes_little_memory() -> None:
    for change in CORRUPT.values():
        raw = changed(change)
        tracemalloc.start()
        with pytest.raises(StoreError):
            Kind.parse(raw, "a kind")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_files_are_never_larger_than_64_gib() -> None:
    """Of however many tokens: nothing is laid out before."""
    kind = json.loads(kind_of(MAKERS["F32"]).text)
    for row in kind["tensors"]:
        row[2] = ["n", 3, 100_000]
    large = Kind.parse(canonical(kind), "a kind")
    assert large.layout(FULL).num_bytes == FULL * 4 * 3 * 400_000
    with pytest.raises(StoreError, match="Set a smaller chunk_tokens"):
        large.layout(65_536)
    for n in (0, -1, 65_537):
        with pytest.raises(StoreError, match="tokens, expected 1 to 65536"):
            large.layout(n)
