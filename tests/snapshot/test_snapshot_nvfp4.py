"""Snapshots in NVFP4, whose scales lie beside its units: stored bytes, restored numbers, refusals.

tests/fp4.py says what the bytes are, with ml_dtypes. Spec: E.18
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ml_dtypes import float8_e4m3fn

from kvx_adapters.vllm import amx_planes
from kvx_core import CacheDesc, CacheView, InvalidArgumentError, Snapshot, describe
from kvx_core.snapshot import CorruptError
from tests import fp4
from tests.snapshot.formatted import HEADS, K_DIM, SEEDS, V_DIM, Engine, expect, numbers
from tests.snapshot.sections import FACTS
from tests.snapshot.with_planes import filled, reopened, section
from tests.snapshot_files import kind_in, rewritten, row_of, with_row


@pytest.mark.parametrize("seed", SEEDS)
def test_nvfp4_has_a_scale_for_each_group(seed: int, tmp_path: Path) -> None:
    """Beside its units, as tests/fp4.py computes them with ml_dtypes."""
    src, dst = Engine(torch.bfloat16, 5, seed), Engine(torch.bfloat16, 7, None)
    captured = Snapshot.capture(range(19), [src.section], start=3, format="nvfp4")
    read = reopened(captured, tmp_path / "file")
    read.restore(dst.section, 4, 22)
    assert read.header.precision.name == "bf16+nvfp4"
    assert read.header.parts[0].facts.lossy == "nvfp4"
    bf16_bytes = 19 * 2 * HEADS * (K_DIM + V_DIM) * 2
    assert read.cache_bytes == bf16_bytes
    assert read.num_bytes == bf16_bytes * 9 // 32
    names = [f"layers.{layer}.{kind}" for layer in (0, 1) for kind in "kv"]
    rows = kind_in(tmp_path / "file")["tensors"]
    assert {row[0]: row[1] for row in rows if row[0] in names} == dict.fromkeys(names, "F4_E2M1")
    for name in names:
        layer, kv = int(name[7]), "kv".index(name[-1])
        units, scales = fp4.encode(src.tokens(layer, kv, 3, 22).float().numpy(), float8_e4m3fn)
        np.testing.assert_array_equal(read.array(name), units)
        np.testing.assert_array_equal(read.array(f"{name}_scale"), scales.view(np.uint8))
        decoded = torch.from_numpy(fp4.decode(units, scales))[1:]
        expect(dst, layer, kv, 4, decoded.to(torch.bfloat16))


def test_nvfp4_keeps_zeros_and_goes_to_fewer_heads(tmp_path: Path) -> None:
    """A group of zeros has the scale 0."""
    k = numbers((3, 4, 4, 32), 1).bfloat16()
    k[1, 2] = 0
    four = replace(FACTS, first_kv_head=0, total_kv_heads=4)
    view = CacheView((CacheDesc.from_kv(describe(k, "BLOCK_NHD")),), four)
    read = reopened(
        Snapshot.capture(range(11), [section(view, [1, 0, 2])], format="nvfp4"), tmp_path / "file"
    )
    assert not read.array("layers.3.k_scale")[2].any()
    back = filled((3, 4, 2, 32), torch.bfloat16, None)
    two = CacheView(
        (CacheDesc.from_kv(describe(back, "BLOCK_NHD")),), replace(four, first_kv_head=1)
    )
    read.restore(section(two, [0, 1, 2]), 0, 11)
    source = k[[1, 0, 2]].flatten(0, 1)[:11, 1:3].float().numpy()
    decoded = torch.from_numpy(fp4.decode(*fp4.encode(source, float8_e4m3fn))).bfloat16()
    assert torch.equal(back.flatten(0, 1)[:11], decoded)


def test_k_and_v_in_tiles_in_nvfp4() -> None:
    page = numbers((4, 2, 32, 128), 1).to(torch.bfloat16)
    back = torch.zeros_like(page)
    tiles, there = (CacheView((), FACTS, planes=amx_planes(t, 0)) for t in (page, back))
    held = section(tiles, [3, 0, 2], [0])
    plain = Snapshot.capture(range(75), [held])
    captured = Snapshot.capture(range(75), [held], format="nvfp4")
    assert captured is not None
    captured.restore(section(there, [1, 2, 0], [0]), 0, 75)
    again = Snapshot.capture(range(75), [section(there, [1, 2, 0], [0])])
    assert plain is not None
    assert again is not None
    for name in ("layers.0.k", "layers.0.v"):
        exact = torch.from_numpy(plain.array(name).view(np.int16)).view(torch.bfloat16)
        units, scales = fp4.encode(exact.float().numpy(), float8_e4m3fn)
        np.testing.assert_array_equal(captured.array(name), units)
        np.testing.assert_array_equal(captured.array(f"{name}_scale"), scales.view(np.uint8))
        found = torch.from_numpy(again.array(name).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(found, torch.from_numpy(fp4.decode(units, scales)).bfloat16())


@pytest.mark.parametrize("wrong", ["no scales", "scales of 32", "U8 of no groups"])
def test_nvfp4_without_its_scales_is_refused(wrong: str, tmp_path: Path) -> None:
    src = Engine(torch.bfloat16, 5, 1)
    captured = Snapshot.capture(range(19), [src.section], format="nvfp4")
    assert captured is not None
    captured.save(tmp_path / "file")
    kind = kind_in(tmp_path / "file")
    if wrong == "no scales":
        kind["tensors"].remove(row_of(kind, "layers.0.k_scale"))
    elif wrong == "scales of 32":
        kind = with_row(kind, "layers.0.k_scale", shape=[19, HEADS, K_DIM // 32])
    else:
        kind = with_row(kind, "layers.0.k", shape=[19, HEADS, K_DIM // 2 - 1])
    with pytest.raises(CorruptError, match=r"layers\.0\.k is nvfp4 of 6[24] numbers and its scale"):
        Snapshot.open(rewritten(tmp_path / "file", kind))


@pytest.mark.parametrize("wrong", [0x7F, 0x80, 0xFF])
def test_scales_of_nvfp4_that_are_nan_or_below_zero(wrong: int, tmp_path: Path) -> None:
    captured = Snapshot.capture(range(19), [Engine(torch.bfloat16, 5, 1).section], format="nvfp4")
    assert captured is not None
    captured.array("layers.1.v_scale")[3, 1, 2] = wrong
    captured.save(tmp_path / "file")
    with (
        Snapshot.open(tmp_path / "file") as opened,
        pytest.raises(CorruptError, match=r"layers\.1\.v_scale has a number that is no scale"),
    ):
        opened.read([0, 1])


def test_groups_that_do_not_fit_are_refused() -> None:
    k = filled((5, 4, 2, 40), torch.bfloat16, 1)
    view = CacheView((CacheDesc.from_kv(describe(k, "BLOCK_NHD")),), FACTS)
    with pytest.raises(
        InvalidArgumentError, match=r"'nvfp4' and k of layer 3 has head_dim 40, .* multiple of 16"
    ):
        Snapshot.capture(range(11), [section(view, [4, 0, 2])], format="nvfp4")
