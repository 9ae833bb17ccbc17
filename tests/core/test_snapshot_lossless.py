"""Snapshots and stores in lossless_bf16: fewer bytes in the file, the same bits everywhere else."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_adapters.vllm import amx_planes
from kvx_core import CacheDesc, CacheView, Snapshot, StoreError, UnsupportedError, describe
from kvx_core.snapshot import CorruptError, Precision
from tests.caches import assert_same_bytes
from tests.core.test_snapshot_formats import Engine, expect, json_of, rewritten
from tests.core.test_snapshot_planes import filled, header_of, reopened, section
from tests.core.test_stores import Engine as StoreEngine
from tests.core.test_stores import files_of, save, store_in
from tests.store_files import kind_of
from tests.trained import trained

SEEDS = [1, 2, 3]
FORMAT = "lossless_bf16"
BF16 = torch.bfloat16


@pytest.mark.parametrize("any_bits", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_bit_comes_back(seed: int, any_bits: bool, tmp_path: Path) -> None:
    """Numbers, which take less, and bits of every kind, NaN included, which do not."""
    src, dst = Engine(BF16, 5, seed), Engine(BF16, 7, None)
    if any_bits:
        for layer, kv in enumerate(src.layers):
            for i, tensor in enumerate(kv):
                tensor.copy_(filled(tuple(tensor.shape), BF16, seed + 4 * layer + i))
    captured = Snapshot.capture(range(19), [src.section], start=3, format=FORMAT)
    plain = Snapshot.capture(range(19), [src.section], start=3)
    assert captured is not None
    assert plain is not None
    assert captured.digest() == plain.digest()
    assert captured.header == plain.header
    read = reopened(captured, tmp_path / "file")
    read.restore(dst.section, 4, 22)
    for layer in (0, 1):
        for kv in (0, 1):
            values = src.tokens(layer, kv, 4, 22)
            tensor, n = dst.layers[layer][kv], dst.block_size
            expected = filled(tuple(tensor.shape), BF16, None)
            for i, value in enumerate(values):
                expected[dst.order[(4 + i) // n], (4 + i) % n] = value
            assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16))
    plain.save(tmp_path / "plain")
    size, exact = ((tmp_path / name).stat().st_size for name in ("file", "plain"))
    if any_bits:
        assert "coded" not in json_of(tmp_path / "file")
        assert size == exact
    else:
        assert json_of(tmp_path / "file")["coded"].keys() == {
            f"layers.{layer}.{kind}" for layer in (0, 1) for kind in "kv"
        }
        assert size < exact


def test_layers_of_a_file_are_read_alone_and_written_again(tmp_path: Path) -> None:
    src, dst = Engine(BF16, 5, 1), Engine(BF16, 7, None)
    captured = Snapshot.capture(range(19), [src.section], format=FORMAT)
    one = reopened(captured, tmp_path / "file", [1])
    one.restore(dst.section, 0, 19)
    assert torch.equal(
        dst.layers[0][0].view(torch.uint8),
        filled(tuple(dst.layers[0][0].shape), BF16, None).view(torch.uint8),
    )
    expect(dst, 1, 0, 0, src.tokens(1, 0, 0, 19))
    with Snapshot.open(tmp_path / "file") as opened:
        opened._read(sorted(opened.tensors), None).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()


def test_signed_files_and_tiles(tmp_path: Path) -> None:
    page = torch.randn(4, 2, 32, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    tiles = CacheView((), Engine(BF16, 5, 1).view.facts, planes=amx_planes(page, 0))
    back = torch.zeros_like(page)
    there = CacheView((), tiles.facts, planes=amx_planes(back, 0))
    captured = Snapshot.capture(range(128), [section(tiles, [3, 0, 2, 1], [0])], format=FORMAT)
    assert captured is not None
    captured.save(tmp_path / "file", key=b"k" * 32)
    with Snapshot.open(tmp_path / "file", key=b"k" * 32) as opened:
        opened.read([0]).restore(section(there, [3, 0, 2, 1], [0]), 0, 128)
    assert torch.equal(back.view(torch.int16), page.view(torch.int16))


@pytest.mark.slow  # trains a model
def test_a_trained_model_takes_less(tmp_path: Path) -> None:
    """What a store holds of real keys and values; the store's own file, headers included."""
    model = trained()
    layers = tuple(
        CacheDesc.from_kv(
            *(describe(t.transpose(0, 1)[None].contiguous(), "BLOCK_NHD") for t in kv)
        )
        for kv in zip(model.keys, model.values, strict=True)
    )
    facts = Engine(BF16, 5, 1).view.facts
    held = section(CacheView(layers, facts, dense=True), None, range(len(layers)))
    num_tokens = model.keys[0].shape[1]
    captured = Snapshot.capture(range(num_tokens), [held], format=FORMAT)
    assert captured is not None
    captured.save(tmp_path / "file")
    assert captured.cache_bytes > 1.35 * (tmp_path / "file").stat().st_size


# --- stores ---------------------------------------------------------------------------------------


def test_exact_readers_and_writers_share(tmp_path: Path) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    bf16 = {"precision": Precision.of(BF16)}
    stores = {name: store_in(tmp_path / str(name), format=name, **bf16) for name in (None, FORMAT)}
    for name, store in stores.items():
        save(store, prompt, StoreEngine(dtype=BF16, dim=64))
        assert not store.is_lossy
        for reader in (None, FORMAT, "f32"):
            found = store_in(tmp_path / str(name), format=reader, **bf16)
            there = StoreEngine(dtype=BF16, dim=64, seed=3, block_size=8)
            match = found.lookup(prompt)
            assert match.num_tokens == len(prompt)
            found.load(match, 1, 39, there.sections())
            there.check(prompt, 1, 39)
    exact, coded = (
        sum(path.stat().st_size for path in files_of(tmp_path / str(name))) for name in stores
    )
    assert coded < exact
    keys = [
        {path.name.partition(".")[0] for path in files_of(tmp_path / str(name))} for name in stores
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        UnsupportedError, match=r"format is 'lossless_bf16' and k of layer 0 is .*, expected BF16"
    ):
        Snapshot.capture(range(9), [Engine(dtype, 5, 1).section], format=FORMAT)


# --- hostile files --------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    src = Engine(BF16, 5, 1)
    captured = Snapshot.capture(range(19), [src.section], format=FORMAT)
    assert captured is not None
    captured.save(tmp_path / "good")
    return tmp_path / "good"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"coding": "lossless_f16"}, StoreError, "in lossless_f16, which this version of KVX does"),
        ({"coding": "No Word"}, CorruptError, "is said to be"),
        ({"shape": [19, 3, 1 << 40]}, CorruptError, "is said to be"),
        ({"shape": [19, 3, 64, 1]}, CorruptError, "is said to be"),
        ({"shape": [19, 3, -64]}, CorruptError, "is said to be"),
        ({"shape": [18, 3, 64]}, CorruptError, "expected .19, 3. and a head_dim"),
        ({"shape": [19, 192]}, CorruptError, "expected .19, 3. and a head_dim"),
        ({"shape": 3}, CorruptError, "no header"),
    ],
)
def test_headers_that_lie(
    change: dict[str, Any], error: type[StoreError], message: str, good: Path
) -> None:
    coded = json_of(good)["coded"]
    coded["layers.0.k"] |= change
    with pytest.raises(error, match=message) as caught:
        Snapshot.open(rewritten(good, coded=coded))
    assert type(caught.value) is error


@pytest.mark.parametrize("num_bytes", [19 * 3 * 64 * 2, 1 << 32])
def test_a_tensor_that_claims_more_bytes_than_it_has_numbers(num_bytes: int, good: Path) -> None:
    """A sparse file takes no space, and reading it would take `num_bytes` of memory."""
    from kvx_core.snapshot.seal import sealed

    raw, data = header_of(good), good.read_bytes()
    found = json.loads(raw)
    text = found.pop("__metadata__")["header"]
    lo, hi = found["layers.0.k"]["data_offsets"]
    found["layers.0.k"]["shape"] = [num_bytes]
    for name, entry in found.items():
        first, last = entry["data_offsets"]
        moved = num_bytes - (hi - lo) if first > lo else 0
        entry["data_offsets"] = [first + moved, last + moved]
        if name == "layers.0.k":
            entry["data_offsets"] = [lo, lo + num_bytes]
    total = max(entry["data_offsets"][1] for entry in found.values())
    tokens = data[8 + len(raw) :][: 19 * 8]
    head = sealed(
        f'"header":{json.dumps(text)}}},{json.dumps(found)[1:]}'.encode(), tokens, total, None
    )
    with good.open("wb") as file:
        file.write(head + tokens)
        file.truncate(len(head) + total)
    with pytest.raises(
        CorruptError, match=r"'lossless_bf16' of shape .19, 3, 64. in .* fewer bytes"
    ):
        Snapshot.open(good)


def test_other_tensors_are_not_coded(good: Path) -> None:
    coded = json_of(good)["coded"]
    with pytest.raises(CorruptError, match="tokens is said to be"):
        Snapshot.open(rewritten(good, coded=coded | {"tokens": coded["layers.0.k"]}))


def test_a_head_dim_that_is_not_that_of_the_bytes(good: Path) -> None:
    """The header agrees with itself; the encoded bytes have other numbers."""
    coded = json_of(good)["coded"]
    coded["layers.0.k"]["shape"] = [19, 3, 63]
    with (
        Snapshot.open(rewritten(good, coded=coded)) as opened,
        pytest.raises(CorruptError, match=r"layers\.0\.k"),
    ):
        opened.read([0])


def test_no_bytes_harm_a_reader(good: Path) -> None:
    """Encoded bytes are altered, and their checksums with them: refused, or read as numbers."""
    import zlib

    data = bytearray(good.read_bytes())
    start = 8 + len(header_of(good))
    entry = json.loads(header_of(good))["layers.0.k"]
    lo, hi = (start + at for at in entry["data_offsets"])
    chosen = random.Random(1)
    refused = 0
    for round_ in range(60):
        altered = bytearray(data)
        for _ in range(chosen.choice((1, 3, 50))):
            where = lo + (chosen.randrange(24) if round_ % 2 else chosen.randrange(hi - lo))
            altered[where] = chosen.randrange(256)
        good.write_bytes(altered)
        checksums = json_of(good)["checksums"]
        checksums["layers.0.k"] = f"{zlib.crc32(altered[lo:hi]):08x}"
        with Snapshot.open(rewritten(good, checksums=checksums)) as opened:
            try:
                assert opened.read([0]).array("layers.0.k").shape == (19, 3, 64)
            except CorruptError:
                refused += 1
        good.write_bytes(data)
    assert refused


def test_an_exact_cache_of_a_store_keeps_its_bytes(tmp_path: Path) -> None:
    """With no format, tensors are in the file as they are in memory."""
    prompt = [1, 2, 3] * 9
    engine = StoreEngine(dtype=BF16, dim=64)
    store = store_in(tmp_path, precision=Precision.of(BF16))
    save(store, prompt, engine)
    for path in files_of(tmp_path):
        assert not any(coding for *_, coding in kind_of(path)["tensors"])
    there = StoreEngine(dtype=BF16, dim=64)
    store.load(store.lookup(prompt), 0, len(prompt), there.sections())
    assert_same_bytes(there.cache, engine.cache)
