"""Stores with a format: what one format stored, no other finds; exact formats share with all.

gguf-py says what a conversion gives.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvx_core import (
    CacheDesc,
    CacheView,
    DType,
    InvalidArgumentError,
    PrefixStore,
    Section,
    Snapshot,
    UnsupportedError,
    describe,
    migrate,
    verify,
)
from kvx_core.snapshot import Precision, StorageFormat
from tests.caches import assert_same_bytes
from tests.snapshot.sections import FACTS
from tests.snapshot.with_planes import section
from tests.store_files import snapshot_of
from tests.stores.engine import Engine, Tokens, rows_of, save, store_in
from tests.stores.test_prefix import files_of

GGUF = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
DIM = 64  # two units
BF16 = Precision.of("bfloat16")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 5  # two chunks of 16 and 8 tokens more


def engine(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Engine:
    return Engine(dim=DIM, dtype=dtype, seed=seed, **options)


def store(path: Path, format: str | None = None, **options: Any) -> PrefixStore:
    return store_in(path, **{"precision": BF16, "format": format} | options)


def saved(path: Path, format: str | None = None, **options: Any) -> PrefixStore:
    """A store of an engine that has computed PROMPT."""
    found = store(path, format, **options)
    save(found, PROMPT, engine())
    return found


def expected(where: Engine, tokens: Tokens, start: int, stop: int, format: str) -> Engine:
    """An engine in whose cache these tokens are as the format decodes them, and nothing else is."""
    other = replace(where)
    rows = rows_of(tokens, DIM).to(torch.bfloat16).float().numpy()
    decoded = torch.from_numpy(dequantize(quantize(rows, GGUF[format]), GGUF[format]))
    for i, layer in zip(other.layers, other.cache.layers, strict=True):
        for kv, half in enumerate(layer.halves()):
            for t in range(start, stop):
                block, offset = other.place(t)
                half.tensor[block, :, offset] = decoded[t, i, kv].to(where.dtype)  # HND
    return other


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("format", GGUF)
def test_what_is_loaded_is_what_the_format_decodes(format: str, seed: int, tmp_path: Path) -> None:
    saved(tmp_path, format)
    reader = store(tmp_path, format)
    match = reader.lookup([*PROMPT[:37], 8, 8])
    assert match.num_tokens == 37
    there = engine(seed, block_size=8)
    reader.load(match, 5, 35, there.sections())
    assert_same_bytes(
        there.cache, expected(engine(seed, block_size=8), PROMPT, 5, 35, format).cache
    )
    snapshot = snapshot_of(files_of(tmp_path)[0])
    assert {part.facts.lossy for part in snapshot.header.parts} == {format}
    assert snapshot.header.precision.name == f"bf16+{format}"


@pytest.mark.parametrize("accept", ["same", "lossy"])
def test_no_format_finds_what_another_has_stored(accept: str, tmp_path: Path) -> None:
    formats = [None, "q8_0", "q4_0", "f16", "f8_e4m3", "nvfp4"]
    for count, format in enumerate(formats):
        reader = store(tmp_path, format, accept=accept)
        assert reader.lookup(PROMPT).num_tokens == 0
        assert reader.missing(PROMPT, 0, 16, range(3), (0, 4))
        saved(tmp_path, format)
        assert len(files_of(tmp_path)) == 3 * (count + 1)
        assert reader.is_lossy is (format is not None)
    for format in formats:
        reader = store(tmp_path, format, accept=accept)
        match = reader.lookup(PROMPT)
        assert match.num_tokens == len(PROMPT)
        assert not reader.missing(PROMPT, 0, 16, range(3), (0, 4))
        there = engine(5)
        reader.load(match, 0, len(PROMPT), there.sections())
        if format is None:
            there.check(PROMPT, 0, len(PROMPT))
        assert reader.carried == Precision()  # all that is stored in this format is as coarse
        assert store(tmp_path, format, salt="other").lookup(PROMPT).num_tokens == 0
        assert reader.salted("other").lookup(PROMPT).num_tokens == 0
        assert reader.salted("").lookup(PROMPT).num_tokens == len(PROMPT)


def test_an_exact_format_shares_with_all(tmp_path: Path) -> None:
    """BF16 numbers as float32, found by readers without a format, and the other way round."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert not saved(one, "f32").is_lossy
    saved(two)
    for path, format in ((one, None), (one, "bf16"), (two, "f32"), (two, None)):
        reader, there = store(path, format), engine(3)
        match = reader.lookup(PROMPT)
        assert match.num_tokens == len(PROMPT)
        reader.load(match, 0, len(PROMPT), there.sections())
        there.check(PROMPT, 0, len(PROMPT))


def test_a_coarser_cache_reads_the_same_format(tmp_path: Path) -> None:
    """BF16 in Q8_0 serves an FP8 cache whose store has that format, and not the other way round."""
    saved(tmp_path, "q8_0")
    fp8 = Precision.of("bfloat16", torch.float8_e4m3fn)
    assert store(tmp_path, "q8_0", precision=fp8).lookup(PROMPT).num_tokens == len(PROMPT)
    coarse = store(tmp_path / "coarse", "q8_0", precision=fp8)
    small = replace(engine(dtype=torch.float8_e4m3fn), seed=1)
    save(coarse, PROMPT, small)
    assert store(tmp_path / "coarse", "q8_0").lookup(PROMPT).num_tokens == 0


def test_fp8_in_another_format_counts_as_rounded() -> None:
    """Its numbers are multiplied by scales."""
    fp8 = Precision.of("bfloat16", torch.float8_e4m3fn)
    for name in ("f32", "bf16", "q8_0"):
        assert StorageFormat.of(name).is_lossy_for(fp8)
    assert not StorageFormat().is_lossy_for(fp8)
    assert not StorageFormat.of("f32").is_lossy_for(BF16)


def test_a_format_with_a_smaller_range_counts_as_rounded() -> None:
    """A number computed in F16 may be 65536 in BF16, which is infinity in F16."""
    both = Precision.of("float16", "bfloat16")
    assert StorageFormat.of("f16").is_lossy_for(both)
    for name in ("bf16", "f32"):
        assert not StorageFormat.of(name).is_lossy_for(both)
    assert not StorageFormat.of("f16").is_lossy_for(Precision.of("float16"))


def held(*dtypes: Any, compute: DType | None, seed: int = 1, blocks: int = 2) -> Section:
    """Layers of K and V in these dtypes, in turn: 2 heads of 256 numbers, 16 tokens in block 1."""
    facts = replace(FACTS, fingerprint="model", first_kv_head=0, total_kv_heads=2)
    facts = replace(facts, compute_dtype=compute)
    generator = torch.Generator().manual_seed(seed)
    descs = []
    for dtype in dtypes:
        numbers = torch.randn(blocks, 16, 2, 256, generator=generator)
        if isinstance(dtype, torch.dtype):
            descs.append(describe(numbers.to(dtype), "BLOCK_NHD"))
            continue
        units = torch.zeros(*numbers.shape[:3], 256 // dtype.numbers * dtype.itemsize).byte()
        desc = describe(units, "BLOCK_NHD", dtype=dtype)
        src, dst = (
            CacheView((CacheDesc.from_kv(d),), facts)
            for d in (describe(numbers, "BLOCK_NHD"), desc)
        )
        table = [list(range(blocks))]
        migrate(src.at(table), dst.at(table), [16 * blocks])
        descs.append(desc)
    caches = [CacheDesc.from_kv(*pair) for pair in zip(descs[::2], descs[1::2], strict=True)]
    return section(CacheView(tuple(caches), facts), [1], range(len(caches)))


UNITS = ("Q8_0", "Q4_0", "IQ4_NL", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize(
    ("compute", "format"), [("BF16", "bf16"), ("F16", "f16"), ("BF16", "f32"), ("F32", "f32")]
)
def test_units_in_another_format_count_as_rounded(
    name: str, compute: str, format: str, tmp_path: Path
) -> None:
    """A unit's numbers are multiplied by scales: no reader without the format gets them."""
    dtype, tokens = DType[name], range(16)
    where = held(dtype, dtype, compute=DType[compute])
    of_model = {"num_layers": 1, "total_kv_heads": 2, "precision": Precision.of(compute, dtype)}
    rounding, exact, same = (
        store_in(tmp_path, format=f, **of_model) for f in (format, None, name.lower())
    )
    assert rounding.is_lossy
    assert not exact.is_lossy
    assert not same.is_lossy
    snapshot = rounding.capture(tokens, 0, 16, [where])
    assert snapshot is not None
    assert snapshot.header.parts[0].facts.lossy == format
    rounding.commit(snapshot)
    assert rounding.lookup(tokens).num_tokens == 16
    assert exact.lookup(tokens).num_tokens == 0
    plain = same.capture(tokens, 0, 16, [where])
    assert plain is not None
    assert plain.header.parts[0].facts.lossy is None
    same.commit(plain)
    there = held(dtype, dtype, compute=DType[compute], seed=2)
    exact.load(exact.lookup(tokens), 0, 16, [there])
    assert verify(where.view.at([[1]]), there.view.at([[1]]), [16])


@pytest.mark.parametrize("compute", [None, DType.F32])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_tensor_more_precise_than_the_coarsest_is_not_rounded_in_an_exact_store(
    compute: DType | None, layers: int, tmp_path: Path
) -> None:
    """K float32 beside V, or a layer beside a layer, of bfloat16."""
    dtypes = sorted((torch.float32, torch.bfloat16) * layers, key=str, reverse=True)
    where = held(*dtypes, compute=compute)
    snapshot = Snapshot.capture(range(16), [where], format="bf16")
    assert snapshot is not None
    assert snapshot.header.parts[0].facts.lossy == "bf16"
    coarsest = Precision.of(torch.float32, torch.bfloat16)
    of_model = {"num_layers": layers, "total_kv_heads": 2, "precision": coarsest}
    store = store_in(tmp_path, format="bf16", **of_model)
    with pytest.raises(
        UnsupportedError, match=r"format is 'bf16' and rounds K or V of layers .*Choose a format"
    ):
        store.capture(range(16), 0, 16, [where])
    for format in ("f32", None):
        store = store_in(tmp_path, format=format, **of_model)
        assert not store.is_lossy
        exact = store.capture(range(16), 0, 16, [where])
        assert exact is not None
        assert exact.header.parts[0].facts.lossy is None


def test_bfloat16_numbers_in_a_float32_cache_are_stored_as_bfloat16(tmp_path: Path) -> None:
    of_model = {"num_layers": 1, "total_kv_heads": 2, "precision": BF16, "format": "bf16"}
    store = store_in(tmp_path, **of_model)
    floats = (torch.float32, torch.float32)
    with pytest.raises(UnsupportedError, match=r"set facts\.compute_dtype of the section"):
        store.capture(range(16), 0, 16, [held(*floats, compute=None)])
    snapshot = store.capture(range(16), 0, 16, [held(*floats, compute=DType.BF16)])
    assert snapshot is not None
    assert snapshot.header.parts[0].facts.lossy is None


def test_what_is_computed_from_rounded_values_stays_with_them(tmp_path: Path) -> None:
    """A prompt that continues a loaded one: found with the format, and without it never."""
    saved(tmp_path, "q8_0")
    reader, there = store(tmp_path, "q8_0"), engine(5)
    reader.load(reader.lookup(PROMPT), 0, len(PROMPT), there.sections())
    longer = [*PROMPT, 7, 7, 7]
    there.compute(longer, len(PROMPT))
    for start, stop in reader.spans(len(longer), len(PROMPT)):
        snapshot = reader.capture(longer, start, stop, there.sections())
        assert snapshot is not None
        assert reader.commit(snapshot)
    assert store(tmp_path, "q8_0").lookup(longer).num_tokens == len(longer)
    for format in (None, "q4_0"):
        assert store(tmp_path, format, accept="lossy").lookup(longer).num_tokens == 0


@pytest.mark.parametrize(("format", "share"), [("q8_0", 34 / 64), ("q4_0", 18 / 64)])
def test_the_bytes_that_a_format_saves(format: str, share: float, tmp_path: Path) -> None:
    reader, where = store(tmp_path, format, chunk_tokens=32), engine()
    where.compute(PROMPT)
    snapshot = reader.capture(PROMPT, 0, 32, where.sections())
    assert snapshot is not None
    numbers = 32 * 3 * 2 * 4 * DIM
    written = reader.commit(snapshot)
    assert snapshot.cache_bytes == 2 * numbers
    assert snapshot.num_bytes == share * 2 * numbers
    assert snapshot.num_bytes < written < snapshot.num_bytes + 8000


def test_formats_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"format is 'q9', expected None or one of f16"):
        store(tmp_path, "q9")
    narrow = Engine(dim=44, dtype=torch.bfloat16)
    narrow.compute(PROMPT)
    with pytest.raises(InvalidArgumentError, match="k of layer 0 has head_dim 44, in 4 heads 176"):
        store(tmp_path, "q8_0").capture(PROMPT, 0, 16, narrow.sections())
    assert not files_of(tmp_path)


def test_files_that_somebody_copies_into_an_exact_space(tmp_path: Path) -> None:
    """The keys of their tokens begin with the space: under another they are of no tokens."""
    lossy, exact = saved(tmp_path, "q8_0"), store(tmp_path)
    save(exact, PROMPT[:3], engine())
    spaces = [found.nodes([])[0] for found in (lossy, exact)]
    assert {path.relative_to(tmp_path).parts[0] for path in files_of(tmp_path)} == set(spaces)
    for path in files_of(tmp_path / spaces[0]):
        target = Path(str(path).replace(*spaces))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    for accept in ("same", "lossy"):
        assert store(tmp_path, accept=accept).lookup(PROMPT).num_tokens == 3


def test_stored_units_are_those_of_gguf(tmp_path: Path) -> None:
    saved(tmp_path, "q8_0", chunk_tokens=64)
    (file,) = files_of(tmp_path)
    rows = rows_of(PROMPT, DIM).to(torch.bfloat16).float().numpy()
    read = snapshot_of(file)
    for layer in range(3):
        for kv, kind in enumerate("kv"):
            units = quantize(np.ascontiguousarray(rows[:, layer, kv]), GGUF["q8_0"])
            np.testing.assert_array_equal(read.array(f"layers.{layer}.{kind}"), units)
