"""Snapshots in a format of their own: stored bytes, restored numbers, headers, and refusals.

gguf-py and torch say what a conversion gives.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvx_adapters.vllm import amx_planes
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    ScaleDesc,
    ScaleGranularity,
    Snapshot,
    StoreError,
    UnsupportedError,
    describe,
)
from kvx_core.encodings import turboquant
from kvx_core.snapshot import CorruptError, StorageFormat
from tests.snapshot.formatted import HEADS, K_DIM, SEEDS, V_DIM, Engine, expect, numbers
from tests.snapshot.sections import FACTS
from tests.snapshot.with_planes import SENTINEL, filled, reopened, section
from tests.snapshot_files import kind_in, rewritten, with_row

GGUF = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}


# --- units of several numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", GGUF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_units_are_those_of_gguf(dtype: torch.dtype, name: str, seed: int, tmp_path: Path) -> None:
    src, dst = Engine(dtype, 5, seed), Engine(torch.bfloat16, 7, None)
    captured = Snapshot.capture(range(19), [src.section], start=3, format=name)
    read = reopened(captured, tmp_path / "file")
    num_bytes = read.restore(dst.section, 4, 22)
    assert num_bytes == 18 * 2 * HEADS * (K_DIM + V_DIM) * 2
    for layer in (0, 1):
        for kv, kind in enumerate("kv"):
            stored = f"layers.{layer}.{kind}"
            units = quantize(src.tokens(layer, kv, 3, 22).float().numpy(), GGUF[name])
            assert read.tensors[stored].dtype.name.lower() == name
            assert read.tensors[stored].original is DType.of(dtype)
            np.testing.assert_array_equal(read.array(stored), units)
            values = torch.from_numpy(dequantize(units[1:], GGUF[name])).to(torch.bfloat16)
            expect(dst, layer, kv, 4, values)


@pytest.mark.parametrize("name", GGUF)
def test_layer_by_layer(name: str, tmp_path: Path) -> None:
    """As connectors capture: the same bytes as in one call."""
    src = Engine(torch.bfloat16, 5, 1)
    whole = Snapshot.capture(range(19), [src.section], format=name)
    parts = Snapshot.reserve(range(19), [src.section], format=name)
    assert whole is not None
    assert parts is not None
    for layer in (1, 0):
        parts.fill(src.section.of([layer]))
    assert parts.digest() == whole.digest()
    one = reopened(whole, tmp_path / "file", [1])
    dst = Engine(torch.bfloat16, 7, None)
    one.restore(dst.section, 0, 19)
    assert (dst.layers[0][0].view(torch.uint8) == SENTINEL).all()
    assert not (dst.layers[1][0].view(torch.uint8) == SENTINEL).all()


def test_a_cache_that_has_the_format_is_stored_as_it_is(tmp_path: Path) -> None:
    """Whatever its units hold."""
    k = filled((5, 4, 2, 3 * 34), torch.uint8, 1)
    view = CacheView((CacheDesc.from_kv(describe(k, "BLOCK_NHD", dtype="Q8_0")),), FACTS)
    held = section(view, [4, 0, 2])
    plain = Snapshot.capture(range(11), [held])
    asked = Snapshot.capture(range(11), [held], format=DType.Q8_0)
    assert plain is not None
    assert asked is not None
    assert plain.digest() == asked.digest()
    assert plain.header == asked.header
    assert asked.header.parts[0].facts.lossy is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_s_units(bits: int, seed: int, tmp_path: Path) -> None:
    """Heads of 256 are two units; a head of 64 is refused by name."""
    heads = 2
    k = numbers((5, 4, heads, 256), seed).bfloat16()
    back = torch.zeros_like(k)
    src, dst = (CacheView((CacheDesc.from_kv(describe(t, "BLOCK_NHD")),), FACTS) for t in (k, back))
    name = f"tq{bits}"
    captured = Snapshot.capture(range(11), [section(src, [4, 0, 2])], format=name)
    read = reopened(captured, tmp_path / "file")
    assert read.header.parts[0].facts.lossy == name
    units = turboquant.encode(k[[4, 0, 2]].float().view(12, heads, 2, 128)[:11], bits)
    np.testing.assert_array_equal(read.array("layers.3.k"), units.reshape(11, heads, -1).numpy())
    read.restore(section(dst, [1, 3, 0]), 0, 11)
    expected = torch.zeros_like(k[:3]).view(12, heads, 256)
    expected[:11] = turboquant.decode(units, 128, bits).reshape(11, heads, 256).bfloat16()
    assert torch.equal(back[[1, 3, 0]].view(12, heads, 256), expected)
    assert not back[[2, 4]].any()
    small = Engine(torch.bfloat16, 5, 1)
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=f"(?i){name}"):
        Snapshot.capture(range(11), [small.section], format=name)


def test_k_and_v_in_tiles_are_converted() -> None:
    page = numbers((4, 2, 32, 128), 1).to(torch.bfloat16)
    tiles = CacheView((), FACTS, planes=amx_planes(page, 0))
    back = torch.zeros_like(page)
    there = CacheView((), FACTS, planes=amx_planes(back, 0))
    captured = Snapshot.capture(range(75), [section(tiles, [3, 0, 2], [0])], format="q8_0")
    plain = Snapshot.capture(range(75), [section(tiles, [3, 0, 2], [0])])
    assert captured is not None
    assert plain is not None
    assert plain.tensors["layers.0.k"].dtype is DType.BF16
    captured.restore(section(there, [1, 2, 0], [0]), 0, 75)
    again = Snapshot.capture(range(75), [section(there, [1, 2, 0], [0])])
    assert again is not None
    for name in ("layers.0.k", "layers.0.v"):
        exact = torch.from_numpy(plain.array(name).view(np.int16)).view(torch.bfloat16)
        units = quantize(exact.float().numpy(), GGUF["q8_0"])
        np.testing.assert_array_equal(captured.array(name), units)
        decoded = torch.from_numpy(dequantize(units, GGUF["q8_0"])).to(torch.bfloat16)
        found = torch.from_numpy(again.array(name).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(found, decoded)


# --- floats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wider_float_is_exact(seed: int, tmp_path: Path) -> None:
    src, dst = Engine(torch.bfloat16, 5, seed), Engine(torch.bfloat16, 7, None)
    read = reopened(
        Snapshot.capture(range(19), [src.section], format=torch.float32), tmp_path / "file"
    )
    assert read.header.precision.name == "bf16"
    assert read.header.parts[0].facts.lossy is None
    assert read.cache_bytes * 2 == read.num_bytes
    read.restore(dst.section, 0, 19)
    for layer in (0, 1):
        for kv in (0, 1):
            expect(dst, layer, kv, 0, src.tokens(layer, kv, 0, 19))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_may_become_infinite_is_lossy(seed: int, tmp_path: Path) -> None:
    """65504, computed in F16, is 65536 in a BF16 cache, and infinity in F16."""
    src, dst = (Engine(torch.bfloat16, 5, s, compute_dtype=DType.F16) for s in (seed, None))
    src.layers[0][0].fill_(torch.tensor(65504.0, dtype=torch.float16).to(torch.bfloat16))
    read = reopened(Snapshot.capture(range(19), [src.section], format="f16"), tmp_path / "file")
    assert read.header.parts[0].facts.lossy == "f16"
    read.restore(dst.section, 0, 19)
    expect(dst, 0, 0, 0, torch.full((19, HEADS, K_DIM), torch.inf).bfloat16())
    exact = Snapshot.capture(range(19), [src.section], format="f32")
    assert exact.header.parts[0].facts.lossy is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "largest"), [("f8_e4m3", 448.0), ("f8_e5m2", 57344.0)])
def test_fp8_gets_a_scale_for_each_token_and_head(
    name: str, largest: float, seed: int, tmp_path: Path
) -> None:
    src, dst = Engine(torch.bfloat16, 5, seed), Engine(torch.bfloat16, 7, None)
    read = reopened(Snapshot.capture(range(19), [src.section], format=name), tmp_path / "file")
    read.restore(dst.section, 0, 19)
    fp8 = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}[name]
    assert read.header.precision.name == f"{name}_row"
    assert read.header.parts[0].facts.lossy == f"{name}_row"
    assert read.cache_bytes == 19 * 2 * HEADS * (K_DIM + V_DIM) * 2  # which had no scales
    for layer in (0, 1):
        for kv, kind in enumerate("kv"):
            values = src.tokens(layer, kv, 0, 19).float()
            scale = values.abs().amax(-1, keepdim=True) / largest
            stored = (values / scale).to(fp8)
            assert torch.equal(
                torch.from_numpy(read.array(f"layers.{layer}.{kind}_scale")), scale[..., 0]
            )
            found = torch.from_numpy(read.array(f"layers.{layer}.{kind}"))
            assert torch.equal(found, stored.view(torch.uint8))
            expect(dst, layer, kv, 0, (stored.float() * scale).to(torch.bfloat16))


@pytest.mark.parametrize("granularity", ["PER_TENSOR", "PER_BLOCK", "PER_TOKEN_HEAD"])
def test_scales_of_the_cache_are_applied(granularity: str, tmp_path: Path) -> None:
    """Scales per block have no place in a snapshot, unless its format needs none."""
    k = numbers((5, 4, 2, 64), 1).clamp(-400, 400).to(torch.float8_e4m3fn)
    shapes = {"PER_TENSOR": (1,), "PER_BLOCK": (5,), "PER_TOKEN_HEAD": (5, 4, 2)}
    scale = torch.rand(shapes[granularity], generator=torch.Generator().manual_seed(2)) + 0.5
    descs = (ScaleDesc.of(scale, ScaleGranularity[granularity]),)
    view = CacheView((CacheDesc.from_kv(describe(k, "BLOCK_NHD")),), FACTS, k_scales=descs)
    held = section(view, [4, 0, 2])
    read = reopened(Snapshot.capture(range(11), [held], format="q8_0"), tmp_path / "file")
    full = {"PER_TENSOR": (1, 1, 1, 1), "PER_BLOCK": (5, 1, 1, 1), "PER_TOKEN_HEAD": (5, 4, 2, 1)}
    values = (k.float() * scale.view(full[granularity]))[[4, 0, 2]].flatten(0, 1)[:11]
    units = quantize(values.numpy(), GGUF["q8_0"])
    np.testing.assert_array_equal(read.array("layers.3.k"), units)
    assert read.header.parts[0].facts.lossy == "q8_0"


# --- what the header says -------------------------------------------------------------------------


def test_the_kind_names_format_and_dtype_of_the_cache(tmp_path: Path) -> None:
    src = Engine(torch.bfloat16, 5, 1)
    captured = Snapshot.capture(range(19), [src.section], format="q4_0")
    read = reopened(captured, tmp_path / "file")
    names = [f"layers.{layer}.{kind}" for layer in (0, 1) for kind in "kv"]
    kind = kind_in(tmp_path / "file")
    assert {name: (dtype, original) for name, dtype, _, original, _ in kind["tensors"]} == (
        dict.fromkeys(names, ("Q4_0", "BF16"))
    )
    assert kind["groups"][0]["facts"]["lossy"] == "q4_0"
    assert read.header.precision.name == "bf16+q4_0"
    numbers_of_a_token = 2 * HEADS * (K_DIM + V_DIM)
    assert read.cache_bytes == 19 * numbers_of_a_token * 2
    assert read.num_bytes == 19 * numbers_of_a_token // 32 * 18


def test_a_kind_has_the_facts_that_are_known(tmp_path: Path) -> None:
    src = Engine(torch.bfloat16, 5, 1)
    captured = Snapshot.capture(range(19), [src.section])
    reopened(captured, tmp_path / "file")
    assert captured is not None
    given = captured.header.parts[0].facts
    known = {f.name: getattr(given, f.name) for f in fields(CacheFacts)}
    kind = kind_in(tmp_path / "file")
    assert kind["groups"][0]["facts"] == {n: v for n, v in known.items() if v is not None}
    assert kind.keys() == {"encrypted", "groups", "keyed", "kvx_kind", "prefix", "tensors"}


def test_a_file_says_how_k_and_v_are_rotated(tmp_path: Path) -> None:
    rotated = {"hadamard": True, "hadamard_k": 64, "hadamard_v": 0}
    src = Engine(torch.bfloat16, 5, 1, **rotated)
    read = reopened(Snapshot.capture(range(19), [src.section]), tmp_path / "file")
    facts = read.header.parts[0].facts
    assert (facts.hadamard, facts.hadamard_k, facts.hadamard_v) == (True, 64, 0)
    alike, other = (Engine(torch.bfloat16, 5, 2, **rotated | {"hadamard_v": v}) for v in (0, 64))
    read.restore(alike.section, 0, 19)
    assert torch.equal(alike.tokens(0, 0, 0, 19), src.tokens(0, 0, 0, 19))
    with pytest.raises(StoreError, match=r"hadamard_v is 0 at the source .* and 64 at the dest"):
        read.restore(other.section, 0, 19)


def test_what_was_rounded_stays_so_in_later_snapshots() -> None:
    src = Engine(torch.bfloat16, 5, 1, lossy="q4_0")
    plain = Snapshot.capture(range(19), [src.section])
    assert plain is not None
    assert plain.header.precision.name == "bf16+q4_0"
    assert plain.header.parts[0].facts.lossy == "q4_0"
    twice = Snapshot.capture(range(19), [src.section], format="q8_0")
    assert twice is not None
    assert twice.header.precision.name == "bf16+q4_0+q8_0"
    assert twice.header.parts[0].facts.lossy == "q4_0+q8_0"
    wrong: Any
    for wrong in ("", "Q4_0", 3):
        with pytest.raises(InvalidArgumentError, match=r"facts\.lossy is .*, expected None or"):
            Snapshot.capture(range(19), [Engine(torch.bfloat16, 5, 1, lossy=wrong).section])


@pytest.mark.parametrize(
    ("name", "original", "error", "message"),
    [
        ("layers.0.k", "Q9_9", StoreError, "has Q9_9, which this version of KVX does not know"),
        ("layers.0.k", "S64", CorruptError, "layers.0.k was S64, expected K or V"),
        ("layers.0.k", "no word", CorruptError, "no word is no dtype"),
        ("layers.0.k", 3, CorruptError, "is no kind of files"),
        ("planes.0.role_40", "BF16", CorruptError, "planes.0.role_40 was BF16, expected K or V"),
    ],
)
def test_originals_that_cannot_be(
    name: str, original: Any, error: type[StoreError], message: str, tmp_path: Path
) -> None:
    src, path = Engine(torch.bfloat16, 5, 1), tmp_path / "file"
    reopened(Snapshot.capture(range(19), [src.section], format="q8_0"), path)
    before = path.read_bytes()
    with Snapshot.open(rewritten(path)) as same:
        assert same.read([0, 1]).num_bytes == same.num_bytes
    assert path.read_bytes() == before
    kind = kind_in(path)
    if name.startswith("planes"):
        kind["groups"][0]["planes"] = [[0, 40, 1, True]]
        kind["tensors"].append([name, "Q8_0", [19, 1, 1], "", ""])
        with Snapshot.open(rewritten(path, kind)) as other:
            assert other.read([0, 1]).array(name).shape == (19, 1, 34)
    with pytest.raises(error, match=message) as caught:
        Snapshot.open(rewritten(path, with_row(kind, name, original=original)))
    assert type(caught.value) is error


def test_a_format_that_is_said_to_be_exact_is_refused(tmp_path: Path) -> None:
    src = Engine(torch.bfloat16, 5, 1)
    reopened(Snapshot.capture(range(19), [src.section], format="q8_0"), tmp_path / "file")
    kind = kind_in(tmp_path / "file")
    kind["groups"][0]["precision"] = "bf16"
    with pytest.raises(CorruptError, match=r"layers\.0\.k is Q8_0, and precision is 'bf16'"):
        Snapshot.open(rewritten(tmp_path / "file", kind))


# --- digests --------------------------------------------------------------------------------------


def test_a_digest_is_that_of_the_stored_bytes(tmp_path: Path) -> None:
    src = Engine(torch.bfloat16, 5, 1)

    def digest(format: str | None, stop: int = 19) -> str:
        found = Snapshot.capture(range(stop), [src.section], format=format)
        assert found is not None
        return found.digest()

    first = {name: digest(name) for name in (None, "q8_0", "q4_0", "f32")}
    assert len({*first.values(), digest("q8_0", 18)}) == 5
    assert digest("q8_0") == first["q8_0"]
    captured = Snapshot.capture(range(19), [src.section], format="q8_0")
    read = reopened(captured, tmp_path / "file")
    assert read.digest() == first["q8_0"]
    assert read.digest() != reopened(captured, tmp_path / "file", [1]).digest()
    src.layers[1][1][src.order[0], 0, 0, 0] += 8
    assert digest(None) != first[None]
    assert digest("q8_0") != first["q8_0"]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["q9", "", "uint8", DType.S32, DType.U8_ZERO, 3, 2.5, ["q8_0"]])
def test_what_is_no_format(wrong: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"format is .*, expected None or one of f16, .*"
    ):
        StorageFormat.of(wrong)
    with pytest.raises(InvalidArgumentError, match=r"format is"):
        Snapshot.capture(range(4), [Engine(torch.bfloat16, 5, 1).section], format=wrong)


def test_formats_that_are_made_without_of() -> None:
    make: Any = StorageFormat
    for wrong in ("q8_0", 3, DType.U8, DType.S32, DType.U8_ZERO, torch.bfloat16):
        with pytest.raises(InvalidArgumentError, match=r"dtype is .*, expected None or one of DTy"):
            make(wrong)
    for wrong in ("nope", None, 3, ["lossless_bf16"]):
        with pytest.raises(InvalidArgumentError, match=r"coding is .*, expected '' or one of loss"):
            make(None, wrong)
    with pytest.raises(InvalidArgumentError, match=r"DType.Q8_0 and coding is 'lossless_bf16'"):
        make(DType.Q8_0, "lossless_bf16")
    with pytest.raises(InvalidArgumentError, match=r"format is DType\.U8, expected None or one of"):
        make.of(DType.U8)


def test_data_that_is_not_in_memory(tmp_path: Path) -> None:
    captured = Snapshot.capture(range(19), [Engine(torch.bfloat16, 5, 1).section])
    assert captured is not None
    captured.save(tmp_path / "file")
    with Snapshot.open(tmp_path / "file") as opened:
        with pytest.raises(InvalidArgumentError, match=r"file has its data in a file, .*read\("):
            opened.digest()
        with pytest.raises(InvalidArgumentError, match=r"file has its data in a file, expected it"):
            opened.save(tmp_path / "other")
        assert not (tmp_path / "other").exists()
        read = opened.read([0])
        with pytest.raises(InvalidArgumentError, match=r"file is in memory already, expected it"):
            read.read([0])


def test_names_of_formats() -> None:
    for format in (None, DType.Q8_0, "Q8_0", "q8_0", "bfloat16", torch.bfloat16):
        found = StorageFormat.of(format)
        assert StorageFormat.of(found.name or None) == found
    assert StorageFormat.of("bfloat16").name == "bf16"
    nvfp4 = StorageFormat.of("nvfp4")
    assert nvfp4 == StorageFormat(DType.F4_E2M1) == StorageFormat.of("f4_e2m1")
    assert nvfp4.name == "nvfp4"
    assert StorageFormat().name == ""


def test_units_that_do_not_fit_are_refused_before_anything_is_allocated() -> None:
    k = filled((5, 4, 2, 40), torch.bfloat16, 1)
    v = filled((5, 4, 2, 64), torch.bfloat16, 1)
    view = CacheView(
        (CacheDesc.from_kv(describe(v, "BLOCK_NHD"), describe(k, "BLOCK_NHD")),), FACTS
    )
    with pytest.raises(
        InvalidArgumentError,
        match=r"format is 'q8_0' and v of layer 3 has head_dim 40, in 2 heads 80 numbers, expected "
        r"one of them to be a multiple of 32",
    ):
        Snapshot.capture(range(11), [section(view, [4, 0, 2])], format="q8_0")


def test_opaque_bytes_are_refused() -> None:
    rows = filled((5, 4, 1, 64), torch.uint8, 1)
    view = CacheView((CacheDesc.from_kv(describe(rows, "BLOCK_NHD")),), FACTS)
    held = section(view, [4, 0, 2], encoding="an engine's rows")
    with pytest.raises(UnsupportedError, match=r"format is 'q8_0' and the cache has opaque bytes"):
        Snapshot.capture(range(11), [held], format="q8_0")


def test_tiles_have_no_scale_for_each_token() -> None:
    tiles = CacheView((), FACTS, planes=amx_planes(filled((4, 2, 32, 128), torch.bfloat16, 1), 0))
    with pytest.raises(UnsupportedError, match=r"format is 'f8_e4m3' and K and V are planes"):
        Snapshot.capture(range(9), [section(tiles, [3, 0, 2], [0])], format="f8_e4m3")
