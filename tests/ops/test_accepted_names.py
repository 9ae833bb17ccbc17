"""What an error lists is what the call takes: each name of the list is tried."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvx_core.ops.torch_ops  # noqa: F401  registers torch.ops.kvx
from kvx_adapters import llama_cpp
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheGeometry,
    DType,
    KvCacheStore,
    KvxError,
    Plane,
    SeqLens,
    SlotMapping,
    describe,
    gather_kv,
    write_kv,
)
from kvx_core import types as kvx_types
from kvx_core.desc.layouts import shape
from kvx_core.desc.scales import ScaleDesc
from kvx_core.snapshot.precision import Precision

CACHE = CacheDesc.from_kv(describe(torch.zeros(4, 2, 3, 256), "BLOCK_NHD"))


def in_units(dtype: Any) -> Any:
    """A cache of bytes that are units of a format."""
    size = DType.of(dtype).itemsize if isinstance(dtype, str) and dtype != "?" else 1
    data = torch.zeros(4, 2, 3, 4 * size, dtype=torch.uint8)
    return CacheDesc.from_kv(describe(data, "BLOCK_NHD", dtype=dtype)).validate()


def geometry(dtype: Any) -> Any:
    return CacheGeometry(
        num_layers=1, num_blocks=2, block_size=4, num_kv_heads=2, head_dim=256, dtype=dtype
    )


def store(dtype: Any, **sizes: int) -> Any:
    found = KvCacheStore(1, 2, sizes.get("head_dim", 256), 4, value_encoding=dtype)
    tokens = torch.zeros(1, 2, found.head_dim)
    found.append(0, tokens, tokens)
    return found


def scales(granularity: Any) -> Any:
    """One scale of every shape that an FP8 cache may have."""
    sizes = {
        "PER_TENSOR": (1,),
        "PER_BLOCK": (4,),
        "PER_HEAD": (3,),
        "PER_BLOCK_HEAD": (4, 3),
        "PER_TOKEN_HEAD": (4, 2, 3),
    }
    key, cache = torch.zeros(1, 3, 8), torch.zeros(4, 2, 3, 8).to(torch.float8_e4m3fn)
    torch.ops.kvx.write_kv(
        key, None, cache, None, torch.tensor([1]), "BLOCK_NHD",
        k_scale=torch.ones(sizes.get(granularity, (1,))), scale_granularity=granularity,
    )  # fmt: skip


SIZES = {"num_blocks": 1, "block_size": 2, "num_kv_heads": 3, "head_dim": 4}
# What takes a name, and how many names it lists, at least.
CALLS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "store of heads of 256": (store, 18),
    "store of heads of 64": (lambda dtype: store(dtype, head_dim=64), 15),
    "store of heads of 80": (lambda dtype: store(dtype, head_dim=80), 13),
    "describe": (in_units, 20),
    "describe float32": (
        lambda dtype: describe(torch.zeros(1, 2, 3, 4), "BLOCK_NHD", dtype=dtype), 1
    ),
    "plane": (
        lambda dtype: Plane.of(torch.zeros(2, 4), ("block", "dim"), "K", 0, dtype=dtype), 1
    ),
    "geometry": (geometry, 23),
    "gather": (lambda dtype: gather_kv(CACHE, [[1]], [2], dtype=dtype), 6),
    "precision": (Precision.of, 17),
    "llama.cpp": (llama_cpp.ggml_type, 9),
    "rotation": (
        lambda dtype: llama_cpp.rotation(
            k_dtype=dtype, v_dtype="F16", k_head_dim=64, v_head_dim=64
        ), 9,
    ),
    "shape": (lambda layout: shape(layout, **SIZES), 3),
    "scales": (scales, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_each_name_of_the_list_is_taken(name: str) -> None:
    call, count = CALLS[name]
    with pytest.raises(KvxError) as raised:
        call("?")
    listed = re.search(r"expected (?:one of |a kvx_core\.\w+: )(\w+(?:, \w+)*)", str(raised.value))
    assert listed is not None, raised.value
    names = listed[1].split(", ")
    assert len(names) >= count, names
    for one in names:
        call(one)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "U8_ZERO", "F4_E2M1", "float8_e8m0fnu"])
def test_a_store_refuses_all_others_with_the_same_list(dtype: str) -> None:
    expected = "float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz"
    for given in (dtype, DType.of(dtype), "?"):
        with pytest.raises(KvxError, match=rf"^value_encoding is '.+', expected one of {expected}"):
            store(given)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda wrong: SlotMapping.of(wrong(3)), "int32, int64"),
        (lambda wrong: SeqLens.of(wrong(3)), "int32, int64"),
        (lambda wrong: BlockTable.packed(wrong(2, 3)), "int32, int64"),
        (lambda wrong: BlockTable.kv_offsets(wrong(1, 1, 2, 3)), "int32"),
        (lambda wrong: ScaleDesc.of(wrong(1)), "float32, float16, bfloat16, float8_e4m3fn, float"),
    ],
    ids=["slots", "lengths", "table", "offsets", "scales"],
)
def test_tensors_of_a_wrong_dtype(call: Callable[..., Any], names: str) -> None:
    """Of a dtype that KVX does not know, the list is of those that go there."""
    for wrong in (torch.int16, np.int16):
        make = torch.zeros if isinstance(wrong, torch.dtype) else np.zeros

        def tensor(*sizes: int, make: Any = make, wrong: Any = wrong) -> Any:
            return make(sizes, dtype=wrong)

        with pytest.raises(KvxError, match=rf"dtype is '(torch\.)?int16', expected one of {names}"):
            call(tensor)


def test_tokens_are_no_indices() -> None:
    with pytest.raises(KvxError, match=r"dtype is 'torch.int16', expected one of") as raised:
        write_kv(CACHE, torch.zeros(1, 3, 256, dtype=torch.int16), None, [0])
    assert "int32" not in str(raised.value)
    assert "uint8" in str(raised.value)  # opaque bytes


def test_members_that_mean_nothing_are_not_listed() -> None:
    for kind in (kvx_types.Layout, kvx_types.Memory, kvx_types.ScaleGranularity):
        with pytest.raises(KvxError) as raised:
            kind.of("?")
        assert not re.search(r"\b(INVALID|UNKNOWN|NONE)\b", str(raised.value))


def test_names_in_small_letters() -> None:
    assert kvx_types.Layout.of("block_nhd") is kvx_types.Layout.BLOCK_NHD
    assert kvx_types.Role.of("index_k") is kvx_types.Role.INDEX_K
    assert kvx_types.Transfer.of("copy_engine") is kvx_types.Transfer.COPY_ENGINE
