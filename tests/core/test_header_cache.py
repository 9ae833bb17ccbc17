"""Headers like earlier ones are parsed as all others are, and are taken from memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import CacheDesc, CacheFacts, CacheView, Snapshot, StoreError, describe
from kvx_core.snapshot import Section, header_cache
from kvx_core.snapshot.header import parse_header
from kvx_core.tables import BlockTable

CHUNK = 8
KEY = bytes(range(32))
FACTS = CacheFacts(fingerprint="m", rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0)


@pytest.fixture(autouse=True)
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files whose headers were parsed, with no header known before."""
    names: list[str] = []

    def counted(raw: bytes, num_tokens: int, num_bytes: int, name: str, **options: Any) -> Any:
        names.append(name)
        return parse_header(raw, num_tokens, num_bytes, name, **options)

    monkeypatch.setattr(header_cache, "parse_header", counted)
    header_cache._known.clear()
    yield names
    header_cache._known.clear()


def section(seed: int = 0, facts: CacheFacts = FACTS) -> Section:
    generator = torch.Generator().manual_seed(seed)
    caches = torch.randn(2, 2, 11, 4, 3, 8, generator=generator)
    layers = (
        CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in caches
    )
    return Section((0, 1), CacheView(tuple(layers), facts), BlockTable.packed([range(11)]))


def files(held: Section, folder: Path, key: bytes | None = None, **options: Any) -> list[Path]:
    """Chunks of a prompt, each with a prefix of its own."""
    paths = []
    for start in range(0, 40, CHUNK):
        ids = range(start, start + CHUNK)
        prefix = f"{start:064x}" if start else ""
        chunk = Snapshot.capture(ids, [held], start=start, prefix=prefix, **options)
        assert chunk is not None
        paths.append(folder / f"{start}.safetensors")
        chunk.save(paths[-1], key=key)
    return paths


def sealed(path: Path, key: bytes | None = None) -> tuple[bytes, int, int]:
    """The header of a file as it is parsed, with the counts of its seal."""
    with Snapshot.open(path, key=key) as file:
        assert file.file is not None
        found = file.file.sealed(1 << 20)
    return found.raw, len(found.tokens), found.num_data_bytes


def outcome(parse: Any, raw: bytes, *counts: int, is_signed: bool = False) -> Any:
    try:
        return parse(raw, *counts, "a file", is_signed=is_signed)
    except StoreError as error:
        return type(error), str(error)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("format", [None, "q8_0", "lossless_bf16", "f16"])
def test_what_is_found_is_what_a_parser_finds(
    key: bytes | None, format: str | None, tmp_path: Path, parsed: list[str]
) -> None:
    held = section()
    if format in ("q8_0", "lossless_bf16"):
        caches = torch.randn(2, 2, 11, 4, 8, 32).to(torch.bfloat16)
        pairs = ((describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in caches)
        view = CacheView(tuple(CacheDesc.from_kv(*pair) for pair in pairs), FACTS)
        held = replace(held, view=view)
    paths = files(held, tmp_path, key, format=format)
    for path in paths:
        with Snapshot.open(path, key=key) as file:
            raw, *counts = sealed(path, key)
            content = outcome(parse_header, raw, *counts, is_signed=key is not None)
            header, tensors = content.header, content.tensors
            assert (file.header, file.tensors) == (header, tensors)
            assert list(file.tensors) == list(tensors)
            data = file.read(file.header.layers)
            original = Snapshot.capture(
                range(header.start, header.start + CHUNK),
                [held],
                start=header.start,
                format=format,
            )
            assert original is not None
            assert data.digest() == original.digest()
    # Prefixes are empty or not, starts have one digit or two; coded bytes differ in number.
    assert len(parsed) <= 3 or format == "lossless_bf16"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_change_of_a_header_is_overlooked(seed: int, tmp_path: Path) -> None:
    """Whatever a file has in the place of a known header, the parser's answer is given."""
    first, second, *_ = files(section(), tmp_path)
    raw, *counts = sealed(first)
    other, *_ = sealed(second)
    header_cache.parse(raw, *counts, "a file", is_signed=False)
    chance = random.Random(seed)
    pieces = [b"\0", b'\\"', b"0" * 32, b"9", b"-", b"e5", b"}", b'"', b"\\", b"a" * 32]
    num_right = 0
    for _ in range(4000):
        changed = bytearray(chance.choice((raw, other)))
        for _ in range(chance.randrange(1, 3)):
            at = chance.randrange(len(changed))
            match chance.randrange(4):
                case 0:
                    changed[at] = chance.randrange(256)
                case 1:
                    changed[at : at + chance.randrange(1, 40)] = chance.choice(pieces)
                case 2:
                    begin = chance.randrange(len(raw))
                    changed[at:at] = raw[begin : begin + chance.randrange(60)]
                case 3:
                    del changed[at : at + chance.randrange(1, 20)]
        one = bytes(changed)
        expected = outcome(parse_header, one, *counts)
        assert outcome(header_cache.parse, one, *counts) == expected
        assert outcome(header_cache.parse, one, *counts) == expected  # now that it may be known
        num_right += not isinstance(expected[0], type)
    assert 50 < num_right < 3000  # changed digits of prefixes and checksums are right


@pytest.mark.parametrize(
    "facts",
    [replace(FACTS, fingerprint="0123456789abcdef" * 2), replace(FACTS, fingerprint="layers.0.k")],
)
def test_text_like_a_checksum(facts: CacheFacts, tmp_path: Path) -> None:
    for path in files(section(facts=facts), tmp_path):
        with Snapshot.open(path) as file:
            assert file.header.parts[0].facts.fingerprint == facts.fingerprint
    changed = replace(facts, fingerprint="fedcba9876543210" * 2)
    for path in files(section(facts=changed), tmp_path):
        with Snapshot.open(path) as file:
            assert file.header.parts[0].facts.fingerprint == changed.fingerprint


def test_equal_tensors_and_other_lengths(tmp_path: Path, parsed: list[str]) -> None:
    held = section()
    caches = torch.zeros(2, 2, 11, 4, 3, 8)
    pairs = ((describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in caches)
    held = replace(held, view=CacheView(tuple(CacheDesc.from_kv(*pair) for pair in pairs), FACTS))
    paths = files(held, tmp_path)
    for path in paths:
        raw, *counts = sealed(path)
        found = header_cache.parse(raw, *counts, "a file", is_signed=False)
        assert found == outcome(parse_header, raw, *counts)
    tail = Snapshot.capture(range(3), [held], start=0)
    assert tail is not None
    tail.save(tmp_path / "tail")
    with Snapshot.open(tmp_path / "tail") as file:
        assert file.tensors["tokens"].shape == (3,)


def test_signed_and_unsigned_files_are_told_apart(tmp_path: Path) -> None:
    (signed, *_), unsigned = files(section(), tmp_path, KEY), tmp_path / "unsigned"
    with Snapshot.open(signed, key=KEY):
        pass
    raw, *counts = sealed(signed, KEY)
    assert outcome(header_cache.parse, raw, *counts) == outcome(parse_header, raw, *counts)
    unsigned.mkdir()
    first, *_ = files(section(), unsigned)
    raw, *counts = sealed(first)
    expected = outcome(parse_header, raw, *counts, is_signed=True)
    assert outcome(header_cache.parse, raw, *counts, is_signed=True) == expected


def test_as_many_headers_are_known_as_may_be(tmp_path: Path) -> None:
    for num_tokens in range(1, 41):
        chunk = Snapshot.capture(range(num_tokens), [section()], start=0)
        assert chunk is not None
        chunk.save(tmp_path / "one")
        with Snapshot.open(tmp_path / "one"):
            assert 0 < len(header_cache._known) <= header_cache._MAX_HEADERS
