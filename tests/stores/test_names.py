"""The names of a store's files, against SHA-256 of bytes that struct makes."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from kvx_core.stores import names

SPACE = hashlib.sha256(b"a space").hexdigest()
IDS = [-(2**63), -1, 0, 1, 255, 256, 2**31, 2**63 - 1]
KIND = "0123456789abcdef" * 2
DIGIT = "\u0660"  # a zero in Arabic


def ids(values: list[int]) -> names.Ids:
    return np.array(values, np.int64)


def raw(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


@pytest.mark.parametrize("count", range(len(IDS) + 1))
def test_a_key_is_the_hash_of_the_parent_and_the_ids(count: int) -> None:
    expected = hashlib.sha256(bytes.fromhex(SPACE) + raw(IDS[:count])).hexdigest()
    assert names.key_of(SPACE, ids(IDS[:count])) == expected
    assert names.key_of(SPACE, ids(IDS)[:count]) == expected


@pytest.mark.parametrize("count", range(len(IDS) + 1))
def test_a_rung_has_words_of_its_own(count: int) -> None:
    expected = hashlib.sha256(b"kvx rung" + bytes.fromhex(SPACE) + raw(IDS[:count])).hexdigest()
    assert names.rung_of(SPACE, ids(IDS)[:count]) == expected


def test_exact_digits() -> None:
    """By hand: (printf 'kvx rung'; printf ...) | sha256sum."""
    zeros = "0" * 64
    assert names.key_of(zeros, ids([])) == (
        "66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925"
    )
    assert names.key_of(zeros, ids([0] * 4)) == (
        "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b"
    )
    assert names.rung_of(zeros, ids([])) == (
        "e0fbbbb7fb964f4a952fa29c561ac4298f854788fc9e1735b7627bb794bc2ecc"
    )
    assert names.key_of(zeros, ids([1, -2])) == (
        "d56253115cc3febeff9785f89c82a208f6bc0be0a06906d320b6450f9b7ea0ff"
    )


@pytest.mark.parametrize("ids_", [np.arange(8)[::2], np.arange(16).reshape(8, 2)[:, 0]])
def test_ids_that_are_not_contiguous_are_no_other_ones(ids_: names.Ids) -> None:
    with pytest.raises((ValueError, BufferError)):
        names.key_of(SPACE, ids_)


@pytest.mark.parametrize(
    ("chunk_tokens", "count", "lengths"),
    [
        (16, 16, [0, 2, 4, 6, 8, 10, 12, 14]),
        (16, 15, [0, 2, 4, 6, 8, 10, 12, 14]),
        (16, 14, [0, 2, 4, 6, 8, 10, 12]),
        (20, 20, [0, 2, 5, 7, 10, 12, 15, 17]),
        (128, 1, [0]),
        (128, 0, []),
        (128, 16, [0]),
        (128, 17, [0, 16]),
        (128, 128, [0, 16, 32, 48, 64, 80, 96, 112]),
        (128, 500, [0, 16, 32, 48, 64, 80, 96, 112]),
        (65_536, 40_000, [0, 8192, 16384, 24576, 32768]),
    ],
)
def test_rungs(chunk_tokens: int, count: int, lengths: list[int]) -> None:
    values = np.arange(count, dtype=np.int64)
    found = list(names.rungs(SPACE, values, chunk_tokens))
    assert found == [(d, names.rung_of(SPACE, values[:d])) for d in lengths]


def test_names() -> None:
    key = "abc" + "d" * 61
    assert names.entry_name(SPACE, key, KIND) == f"{SPACE}/ab/{key}.{KIND}.safetensors"
    assert names.mark_name(SPACE, key) == f"{SPACE}/ab/{key}.mark"
    assert names.kind_name(SPACE, KIND) == f"{SPACE}/kinds/{KIND}.json"
    assert names.kinds_folder(SPACE) == f"{SPACE}/kinds"
    assert names.space_record(SPACE) == f"{SPACE}/space.json"
    assert names.parse_entry(f"{SPACE}/ab/{key}.{KIND}.safetensors") == (
        *(f"{SPACE}/ab/{key}.{KIND}.safetensors", SPACE, key, KIND),
    )
    assert names.is_mark(f"{SPACE}/ab/{key}.mark")
    assert names.is_key(key)


@pytest.mark.parametrize(
    "name",
    [
        "",
        f"{SPACE}/ab/{'abc' + 'd' * 61}.{KIND}.safetensors\n",
        f"{SPACE}/ac/{'abc' + 'd' * 61}.{KIND}.safetensors",
        f"{SPACE}/ab/{'abc' + 'd' * 60}.{KIND}.safetensors",
        f"{SPACE}/ab/{'abc' + 'D' * 61}.{KIND}.safetensors",
        f"{SPACE}/ab/{'abc' + 'd' * 61}.{KIND[1:]}.safetensors",
        f"{SPACE}/ab/{'abc' + 'd' * 61}.{KIND}0.safetensors",
        f"{SPACE}/ab/{'abc' + 'd' * 61}.mark",
        f"{SPACE}/ab/x/{'abc' + 'd' * 61}.{KIND}.safetensors",
        f"x{SPACE}/ab/{'abc' + 'd' * 61}.{KIND}.safetensors",
        f"{SPACE}/kinds/{KIND}.json",
        f"{SPACE}/{DIGIT * 2}/{DIGIT * 64}.{KIND}.safetensors",
        f"{SPACE}/ab/{'abc' + 'd' * 61}.{KIND}",
        f"{SPACE}/ab/{'abc' + 'd' * 61}.{KIND}xsafetensors",
    ],
)
def test_other_names_are_no_entries(name: str) -> None:
    assert names.parse_entry(name) is None


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n"])
def test_other_texts_are_no_keys(text: str) -> None:
    assert not names.is_key(text)
    assert not names.is_mark(f"{SPACE}/{text[:2]}/{text}.mark")


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 3], 1),
        ([1, 2], [0, 2], 0),
    ],
)
def test_shared_tokens(one: list[int], other: list[int], count: int) -> None:
    assert names.shared_tokens(ids(one), ids(other)) == count
    assert names.shared_tokens(ids(other), ids(one)) == count
