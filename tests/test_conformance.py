"""Spec section 9: what every implementation must pass, one test per bullet."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Layout
from tests.caches import LAYOUTS, Geometry, assert_same_bytes, random_values
from tests.calls import Backend
from tests.reference import Half, KvOffsets, Layer, Packed, Ragged

HEADERS = Path(__file__).parents[1] / "csrc" / "include" / "kvx"

# sizeof on LP64, the numbers of v1. Spec: 6
SIZES = {
    "kvx_version_t": 16,
    "kvx_tensor_desc_t": 112,
    "kvx_pool_desc_t": 32,
    "kvx_cache_desc_t": 280,
    "kvx_block_table_t": 64,
    "kvx_slot_mapping_t": 32,
    "kvx_seq_lens_t": 24,
    "kvx_kv_io_desc_t": 248,
    "kvx_scale_desc_t": 104,
    "kvx_write_desc_t": 512,
    "kvx_gather_desc_t": 352,
}

# Offsets of the fields that a compiler could place differently. Spec: 6
OFFSETS = {
    "kvx_tensor_desc_t": {"ndim": 16, "shape": 24, "stride": 64, "data": 104},
    "kvx_pool_desc_t": {"bytes_per_block": 8, "primary": 16, "secondary": 24},
    "kvx_cache_desc_t": {"head_dim": 16, "k": 24, "v": 136, "pool": 248},
    "kvx_block_table_t": {"max_blocks_per_seq": 24, "indices": 32, "indptr": 40, "flags": 56},
    "kvx_slot_mapping_t": {"token_count": 8, "invalid_slot": 16, "slots": 24},
    "kvx_seq_lens_t": {"seq_count": 8, "lengths": 16},
    "kvx_kv_io_desc_t": {"key": 8, "value": 120, "num_tokens": 232, "head_dim": 240},
    "kvx_scale_desc_t": {"ndim": 12, "shape": 16, "stride": 56, "data": 96},
    "kvx_write_desc_t": {
        "io": 8,
        "slots": 256,
        "k_scale": 288,
        "v_scale": 296,
        "k_scale_desc": 304,
        "v_scale_desc": 408,
    },
    "kvx_gather_desc_t": {"io": 8, "block_table": 256, "seq_lens": 320, "max_seq_len": 344},
}


def test_get_version_returns_the_headers_version_and_a_valid_size() -> None:
    header = (HEADERS / "kvx_abi.h").read_text()
    expected = {
        part: int(re.search(rf"#define KVX_ABI_VERSION_{part} (\d+)", header)[1])
        for part in ("MAJOR", "MINOR", "PATCH")
    }
    version = abi.kvx_version_t()
    ctypes.memset(ctypes.byref(version), 0, ctypes.sizeof(version))  # whatever it held before
    abi.check(abi.library().kvx_get_version(version))
    assert version.size == 16
    assert version.abi_major == expected["MAJOR"] == 1
    assert version.abi_minor == expected["MINOR"]
    assert version.abi_patch == expected["PATCH"]


def test_struct_sizes() -> None:
    for name, size in SIZES.items():
        struct = getattr(abi, name)
        assert ctypes.sizeof(struct) == size, name
        for field, offset in OFFSETS.get(name, {}).items():
            assert getattr(struct, field).offset == offset, f"{name}.{field}"


@pytest.mark.parametrize("name", ["nhd", "hnd", "packed8"])
def test_layout_shape_and_strides(backend: Backend, name: str) -> None:
    cache = LAYOUTS[name](Geometry(), torch.float16, seed=1)
    layer = backend.layer(cache.layers[0])
    library = backend.library()

    def validate() -> None:
        abi.check(library.kvx_validate_cache_desc(layer), library)

    validate()
    for tensor in (layer.k, layer.v):
        for axis in range(tensor.ndim):
            for field in ("shape", "stride"):
                values = getattr(tensor, field)
                kept, values[axis] = values[axis], 0  # no block, or every element at one place
                with pytest.raises(InvalidArgumentError, match=rf"{field}\[{axis}\]"):
                    validate()
                values[axis] = kept
    validate()


def test_block_table_counts_and_indptr(backend: Backend) -> None:
    cache = LAYOUTS["tensorrt_llm"](Geometry(), torch.float16, seed=1)
    layer = backend.layer(cache.layers[0], cache.bytes_per_block)
    lengths = torch.tensor([3, 2])
    key, value = torch.zeros(2, 2, 4, 2, 16, dtype=torch.float16)

    def gather(table: object) -> None:
        desc = abi.kvx_gather_desc_t(
            io=backend.io(key, value, 8),
            block_table=table,
            seq_lens=backend.seq_lens(lengths),
            max_seq_len=4,
        )
        backend.call("kvx_gather_kv", layer, desc)

    offsets = torch.zeros(2, 1, 2, 3, dtype=torch.int32)
    offsets[:, :, 1] = 1
    ends = (
        Packed(torch.zeros(2, 3, dtype=torch.int64), 4),
        Ragged(torch.zeros(5, dtype=torch.int64), torch.tensor([0, 3, 5]), 4),
        KvOffsets(offsets, 4, cache.sub_blocks),
    )
    for end in ends:
        gather(backend.block_table(end))
        for field in ("indices_count", "indptr_count"):
            table = backend.block_table(end)
            setattr(table, field, getattr(table, field) + 1)
            with pytest.raises(InvalidArgumentError, match=r"indices_count|indptr_count"):
                gather(table)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_invalid_slot_is_a_no_op(backend: Backend, dtype: torch.dtype) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.float16, seed=1)
    expected = cache.clone()
    key, value = random_values((2, 3, 2, 16), torch.float16, seed=2)
    slots = torch.tensor([-1, 6, -1], dtype=dtype)
    backend.write(cache.layers[0], key, value, slots)
    layer: Layer = expected.layers[0]
    halves: tuple[Half, Half] = (layer.k, layer.v)
    for half, tokens in zip(halves, (key, value), strict=True):
        assert half.layout == Layout.BLOCK_NHD
        half.tensor[1, 2] = tokens[1]  # slot 6 of blocks of 4
    assert_same_bytes(cache, expected)
