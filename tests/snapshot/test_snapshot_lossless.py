"""Snapshots and stores in lossless_bf16: fewer bytes in the file, the same bits everywhere else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_adapters.vllm import amx_planes
from kvx_core import CacheDesc, CacheView, Snapshot, StoreError, UnsupportedError, describe
from kvx_core.snapshot import CorruptError, Precision
from tests.caches import assert_same_bytes
from tests.snapshot import store_reader
from tests.snapshot.chunk_files import DECODERS
from tests.snapshot.formatted import Engine, expect
from tests.snapshot.with_planes import filled, reopened, section
from tests.snapshot_files import SnapshotFile, kind_in, rewritten, with_row
from tests.store_files import kind_of
from tests.stores.engine import Engine as StoreEngine
from tests.stores.engine import save, store_in
from tests.stores.test_prefix import files_of
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
    file = SnapshotFile.of((tmp_path / "file").read_bytes())
    assert {name: coding for name, *_, coding in file.kind["tensors"]} == {
        f"layers.{layer}.{kind}": FORMAT for layer in (0, 1) for kind in "kv"
    }
    (piece,) = file.sizes
    assert piece == len(file.data)
    assert (piece == captured.num_bytes) is any_bits
    assert (size == exact) is any_bits
    assert store_reader.read((tmp_path / "file").read_bytes(), None, decoders=DECODERS).tensors == {
        name: store_reader.Tensor("BF16", captured.tensors[name].shape, FORMAT, data.tobytes())
        for name, data in ((name, captured.array(name)) for name in captured.tensors)
    }


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
        opened.read([0, 1]).save(tmp_path / "again")
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
        ({"coding": 3}, CorruptError, "is no kind of files"),
        ({"coding": FORMAT, "dtype": "F16"}, CorruptError, "layers.0.k of F16 is in lossless_bf16"),
        ({"shape": [19, 3, 1 << 40]}, CorruptError, "has shape"),
        ({"shape": [19, 3, (1 << 31) - 1]}, CorruptError, "has tensors of .* bytes in 1 pieces"),
        ({"shape": [19, 3, 64, 1]}, CorruptError, "has shape"),
        ({"shape": [19, 3, -64]}, CorruptError, "has shape"),
        ({"shape": [18, 3, 64]}, CorruptError, "expected .19, 3. and a head_dim"),
        ({"shape": [19, 192]}, CorruptError, "expected .19, 3. and a head_dim"),
        ({"shape": 3}, CorruptError, "is no kind of files"),
    ],
)
def test_kinds_that_lie(
    change: dict[str, Any], error: type[StoreError], message: str, good: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        Snapshot.open(rewritten(good, with_row(kind_in(good), "layers.0.k", **change)))
    assert type(caught.value) is error


@pytest.mark.parametrize("num_bytes", [19 * 3 * 64 * 2, 1 << 32])
def test_a_piece_that_claims_more_bytes_than_it_has_numbers(num_bytes: int, good: Path) -> None:
    """A sparse file takes no space, and reading it would take `num_bytes` of memory."""
    file = SnapshotFile.of(good.read_bytes())
    (most,) = (4 * 19 * 3 * 64 * 2 * 3 // 2,)  # bytes of K and V of two layers
    file.sizes = [min(num_bytes + most, (1 << 32) - 1)]
    size = f"{file.sizes[0]:15}"
    file.entries = f',"pieces":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}'
    file.data = b""
    raw = file.bytes()
    with good.open("wb") as sparse:
        sparse.write(raw)
        sparse.truncate(len(raw) + file.sizes[0])
    with pytest.raises(CorruptError, match=r"bytes, expected \d+ to \d+ for 19 tokens"):
        Snapshot.open(good)


def test_a_piece_in_fewer_bytes_than_a_coding_can_need(good: Path) -> None:
    """A small file cannot ask for much memory."""
    for count, message in ((1, "pieces of other lengths"), (100, "pieces of other lengths")):
        file = SnapshotFile.of(good.read_bytes())
        file.data, file.sizes = file.data[:count], [count]
        good.write_bytes(file.laid_out().bytes())
        with pytest.raises(CorruptError, match=message):
            Snapshot.open(good)


def test_other_tensors_are_not_coded(good: Path) -> None:
    kind = kind_in(good)
    kind["groups"][0]["planes"] = [[0, 40, 1, True]]
    kind["tensors"].append(["planes.0.role_40", "BF16", [19, 1, 8], "", FORMAT])
    with pytest.raises(CorruptError, match=r"planes\.0\.role_40 of BF16 is in lossless_bf16"):
        Snapshot.open(rewritten(good, kind))


def test_a_head_dim_that_is_not_that_of_the_bytes(good: Path) -> None:
    """The header agrees with itself; the encoded bytes have other numbers."""
    kind = with_row(kind_in(good), "layers.0.k", shape=[19, 3, 63])
    with (
        Snapshot.open(rewritten(good, kind)) as opened,
        pytest.raises(CorruptError, match=r"layers\.0\.k"),
    ):
        opened.read([0])


def test_no_bytes_harm_a_reader(good: Path) -> None:
    """Encoded bytes are altered, and their checks with them: refused, or read as numbers."""
    file, chosen, refused = SnapshotFile.of(good.read_bytes()), random.Random(1), 0
    data = file.data
    for round_ in range(60):
        altered = bytearray(data)
        for _ in range(chosen.choice((1, 3, 50))):
            where = chosen.randrange(24) if round_ % 2 else chosen.randrange(len(data))
            altered[where] = chosen.randrange(256)
        file.data = bytes(altered)
        good.write_bytes(file.checked().bytes())
        with Snapshot.open(good) as opened:
            try:
                assert opened.read([0]).array("layers.0.k").shape == (19, 3, 64)
            except CorruptError:
                refused += 1
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
