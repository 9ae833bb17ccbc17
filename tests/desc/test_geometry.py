"""Layouts and the numbers that come from outside."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from kvx_core import (
    CacheDesc,
    CacheGeometry,
    DType,
    InvalidArgumentError,
    Layout,
    describe,
)
from kvx_core.desc import layouts
from kvx_core.desc.tensors import row_major

SIZES = {"num_blocks": 3, "block_size": 16, "num_kv_heads": 4, "head_dim": 80}
GOOD = {"num_layers": 2, **SIZES, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("layout", "pack", "shape", "stride"),
    [
        (Layout.BLOCK_NHD, 1, (3, 16, 4, 80), (16 * 4 * 80, 4 * 80, 80, 1)),
        (Layout.BLOCK_HND, 1, (3, 4, 16, 80), (4 * 16 * 80, 16 * 80, 80, 1)),
        (
            Layout.BLOCK_HND_PACKED,
            8,
            (3, 4, 10, 16, 8),
            (4 * 10 * 16 * 8, 10 * 16 * 8, 16 * 8, 8, 1),
        ),
    ],
)
def test_shape_axes_and_canonical_strides(
    layout: Layout, pack: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    assert layouts.shape(layout, **SIZES, pack=pack) == shape
    assert layouts.axes(layout, shape) == (3, 16, 4, 80, pack)
    assert row_major(shape) == stride == torch.empty(shape).stride()
    CacheDesc.from_kv(describe(torch.empty(shape), layout)).validate()


def test_custom_reads_as_hnd() -> None:
    assert layouts.axes(Layout.BLOCK_CUSTOM, (3, 4, 16, 80)) == (3, 16, 4, 80, 1)
    assert layouts.axes(Layout.BLOCK_CUSTOM, (3, 4, 10, 16, 8)) == (3, 16, 4, 80, 8)


def test_custom_has_no_shape_of_its_own() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        layouts.shape(Layout.BLOCK_CUSTOM, **SIZES)
    assert str(raised.value) == (
        "layout is BLOCK_CUSTOM, expected one with a shape of its own: BLOCK_NHD, BLOCK_HND or "
        "BLOCK_HND_PACKED (spec 4.2)"
    )


@pytest.mark.parametrize("pack", [0, 7])
def test_pack_divides_head_dim(pack: int) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        layouts.shape(Layout.BLOCK_HND_PACKED, **SIZES, pack=pack)
    assert str(raised.value) == (
        f"pack is {pack}, expected a divisor of head_dim 80 (BLOCK_HND_PACKED, spec 4.2)"
    )


def test_geometry() -> None:
    geometry = CacheGeometry(**GOOD)
    assert geometry.dtype is DType.BF16
    assert geometry.v_head_dim == 80
    assert geometry.num_tokens == 48
    assert geometry.bytes_per_block == 16 * 4 * 160 * 2
    assert geometry.num_bytes == 2 * 3 * 16 * 4 * 160 * 2
    assert geometry.k_shape(Layout.BLOCK_NHD) == (3, 16, 4, 80)
    assert geometry.v_shape(Layout.BLOCK_HND_PACKED, pack=8) == (3, 4, 10, 16, 8)


def test_geometry_of_other_v() -> None:
    assert CacheGeometry(**GOOD, v_head_dim=64).v_shape(Layout.BLOCK_HND) == (3, 4, 16, 64)
    assert CacheGeometry(**GOOD, v_head_dim=0).bytes_per_block == 16 * 4 * 80 * 2


def test_geometry_of_json_and_back() -> None:
    geometry = CacheGeometry(**GOOD)
    assert '"dtype":"bfloat16"' in geometry.model_dump_json()
    assert CacheGeometry.from_json(geometry.model_dump_json()) == geometry
    assert CacheGeometry.from_json(json.dumps(GOOD)) == geometry
    with pytest.raises(ValidationError):
        geometry.block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"block_size": 0},
            "geometry.block_size is 0: input should be greater than or equal to 1",
        ),
        ({"head_dim": "80"}, "geometry.head_dim is '80': input should be a valid integer"),
        ({"num_kv_heads": True}, "geometry.num_kv_heads is True: input should be a valid integer"),
        (
            {"num_blocks": 2**32},
            "geometry.num_blocks is 4294967296: input should be less than or equal to 4294967295",
        ),
        ({"v_head_dim": -1}, "geometry.v_head_dim is -1: input should be greater than or equal to"),
        ({"dtype": "fp8"}, "geometry.dtype is 'fp8', expected one of float16, bfloat16, float32, "),
        (
            {"page_size": 16},
            "geometry.page_size is not a field of CacheGeometry, expected one of num_layers, "
            "num_blocks, block_size, num_kv_heads, head_dim, v_head_dim, dtype",
        ),
    ],
)
@pytest.mark.parametrize(
    "load",
    [
        lambda fields: CacheGeometry(**fields),
        lambda fields: CacheGeometry.from_json(json.dumps(fields)),
    ],
    ids=["keywords", "json"],
)
def test_wrong_numbers_are_named(load: Any, change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        load({**GOOD, **change})
    assert str(raised.value).startswith(expected)


def test_missing_numbers_are_named_together() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        CacheGeometry(num_blocks=3, block_size=16, num_kv_heads=4, dtype="float16")
    assert str(raised.value) == "geometry.num_layers is missing; geometry.head_dim is missing"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "geometry is not JSON: Expecting property name"),
        ("[1]", "geometry is a JSON list, expected an object"),
    ],
)
def test_text_that_is_no_object(text: str, expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        CacheGeometry.from_json(text)
    assert str(raised.value).startswith(expected)


def test_layouts_have_their_number_of_axes() -> None:
    shapes = {4: (9, 8, 7, 6), 5: (9, 8, 5, 7, 4), 3: (9, 8, 7), 6: (1,) * 6}
    takes = {
        Layout.BLOCK_NHD: {4: (9, 8, 7, 6, 1)},
        Layout.BLOCK_HND: {4: (9, 7, 8, 6, 1)},
        Layout.BLOCK_HND_PACKED: {5: (9, 7, 8, 20, 4)},
        Layout.BLOCK_CUSTOM: {4: (9, 7, 8, 6, 1), 5: (9, 7, 8, 20, 4)},
    }
    for layout, found in takes.items():
        for ndim, shape in shapes.items():
            if ndim in found:
                assert tuple(layouts.axes(layout, shape)) == found[ndim]
            else:
                with pytest.raises(InvalidArgumentError, match=f"^tensor.ndim is {ndim}, expected"):
                    layouts.axes(layout, shape)
