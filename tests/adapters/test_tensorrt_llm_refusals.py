"""The refusals of the TensorRT-LLM adapter, and their sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm as trt
from kvx_adapters.tensorrt_llm import PoolIndex, PoolSpec
from kvx_core import InvalidArgumentError, Memory, OutOfRangeError, UnsupportedError
from tests.adapters.tensorrt_llm_ends import FACTS

KNOWN: dict[str, Any] = {
    "layers": (0, 1),
    "num_blocks": 5,
    "tokens_per_block": 8,
    "num_kv_heads": 3,
    "head_dim": 20,
    "dtype": "HALF",
}
SPEC = PoolSpec(**KNOWN)
EXPECTED_POOL = (
    r"expected \(5, 2, 2, 480\) of torch.float16: blocks, layers, kv_factor, and the elements of "
    r"num_kv_heads 3 \* tokens_per_block 8 \* head_dim 20$"
)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        (
            "dtype",
            "NVFP4",
            UnsupportedError,
            "dtype is 'NVFP4', expected one of HALF, BF16, FLOAT, FP8, INT8: a pool of NVFP4 "
            "holds two 4-bit numbers per byte, and keeps their scales in another pool, in an order "
            "that is not documented",
        ),
        (
            "dtype",
            "float16",
            UnsupportedError,
            "dtype is 'float16', expected one of HALF, BF16, FLOAT, FP8, INT8",
        ),
        (
            "tokens_per_block",
            48,
            InvalidArgumentError,
            "tokens_per_block is 48, expected a power of two: the kernels find a token's block by "
            "a shift",
        ),
        (
            "kv_factor",
            3,
            InvalidArgumentError,
            "kv_factor is 3, expected 2, K and V, or 1, K alone (SELFKONLY)",
        ),
        (
            "kv_layout",
            "hnd",
            InvalidArgumentError,
            "kv_layout is 'hnd', expected 'HND' or 'NHD'",
        ),
        ("layers", (), InvalidArgumentError, "layers is empty, expected the layers of the pool"),
        ("num_blocks", 0, InvalidArgumentError, "num_blocks is 0, expected at least 1"),
        ("num_kv_heads", 0, InvalidArgumentError, "num_kv_heads is 0, expected at least 1"),
        ("head_dim", -1, InvalidArgumentError, "head_dim is -1, expected at least 1"),
        ("tokens_per_block", 0, InvalidArgumentError, "tokens_per_block is 0, expected at least 1"),
        (
            "num_secondary_blocks",
            -1,
            InvalidArgumentError,
            "num_secondary_blocks is -1, expected at least 0",
        ),
        ("window", -1, InvalidArgumentError, "window is -1, expected at least 0"),
        (
            "index_scale",
            3,
            InvalidArgumentError,
            "index_scale is 3, expected at least 4, kv_factor for each of the layers",
        ),
        (
            "index_scale",
            0,
            InvalidArgumentError,
            "index_scale is 0, expected at least 4, kv_factor for each of the layers",
        ),
    ],
)
def test_specs(field: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        PoolSpec(**(KNOWN | {field: value}))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_to_pool_mapping": torch.zeros(3, dtype=torch.int32)},
            r"^layer_to_pool_mapping is \(3,\), expected \(3, 2\), pool and place of each layer of "
            r"num_kv_heads_per_layer$",
        ),
        (
            {"layer_to_pool_mapping": torch.tensor([[0, 0], [2, 0], [0, 1]])},
            r"^layer_to_pool_mapping\[1, 0\] is 2, expected one of the 2 pools of num_blocks$",
        ),
        (
            {"layer_to_pool_mapping": torch.tensor([[0, 0], [1, 0], [0, 0]])},
            r"^layer_to_pool_mapping places layers at \[0, 0\] of pool 0, expected 0, 1, 2, ... "
            r"Describe another order with slot_view$",
        ),
        (
            {"layer_to_pool_mapping": torch.tensor([[0, 0], [0, 1], [0, 2]])},
            r"^num_kv_heads of the layers of pool 0 is \[2, 4\], expected one number: "
            r"layer_to_pool_mapping is of another manager$",
        ),
        (
            {"num_blocks": [5, 6, 7]},
            r"^layer_to_pool_mapping places layers at \[\] of pool 2, expected 0, 1, 2, ...",
        ),
        (
            {"head_dim": [20, 20, 40]},
            r"^head_dim of the layers of pool 0 is \[20, 40\], expected one number",
        ),
        (
            {"max_attention_window_vec": [16, 16, 32]},
            r"^window of the layers of pool 0 is \[16, 32\], expected one number",
        ),
        (
            {"max_attention_window_vec": [16, 32]},
            r"^max_attention_window_vec has 2 entries, expected 1 or 3, one per local layer. "
            r"Repeat a pattern as your version does: KVCacheManagerV2 of main takes \[pattern\[i % "
            r"len\(pattern\)\] for i in pp_layers\]$",
        ),
        ({"head_dim": [20, 20]}, r"^head_dim has 2 entries, expected 3$"),
        ({"num_secondary_blocks": [4]}, r"^num_secondary_blocks has 1 entries, expected 2$"),
        ({"index_scales": [6]}, r"^index_scales has 1 entries, expected 2$"),
    ],
)
def test_mappings(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "layer_to_pool_mapping": torch.tensor([[0, 0], [1, 0], [0, 1]], dtype=torch.int32),
        "num_blocks": [5, 6],
        "tokens_per_block": 8,
        "num_kv_heads_per_layer": [4, 2, 4],
        "head_dim": 20,
        "dtype": "HALF",
    }
    assert [spec.layers for spec in trt.pool_specs(**arguments)] == [(0, 2), (1,)]
    with pytest.raises(InvalidArgumentError, match=message):
        trt.pool_specs(**(arguments | change))


def test_layers_are_in_the_order_of_the_pool() -> None:
    (spec,) = trt.pool_specs(
        torch.tensor([[0, 2], [0, 0], [0, 1]], dtype=torch.int32),
        num_blocks=[5],
        tokens_per_block=8,
        num_kv_heads_per_layer=[3, 3, 3],
        head_dim=20,
        dtype="HALF",
    )
    assert spec.layers == (1, 2, 0)


@pytest.mark.parametrize(
    ("windows", "found"),
    [
        (None, [0, 0]),
        ([None], [0, 0]),  # KVCacheManagerV2's name for full attention
        ([16], [16, 16]),
        ([90], [0, 0]),
        ([None, 16, 99], [0, 16]),
    ],
)
def test_windows(windows: list[int | None] | None, found: list[int]) -> None:
    specs = trt.pool_specs(
        torch.tensor([[0, 0], [1, 0], [0, 1]], dtype=torch.int32),
        num_blocks=[5, 6],
        tokens_per_block=8,
        num_kv_heads_per_layer=[4, 2, 4],
        head_dim=20,
        dtype="HALF",
        max_attention_window_vec=windows,
        max_seq_len=90,
    )
    assert [spec.window for spec in specs] == found


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            torch.zeros(5, 2, 2, 480, dtype=torch.bfloat16),
            r"^primary is \(5, 2, 2, 480\) of torch.bfloat16, " + EXPECTED_POOL,
        ),
        (
            torch.zeros(5, 2, 480, dtype=torch.float16),  # of MLA, or of one layer
            r"^primary is \(5, 2, 480\) of torch.float16, " + EXPECTED_POOL,
        ),
        (
            torch.zeros(6, 2, 2, 480, dtype=torch.float16)[1:].transpose(1, 2),
            r"^primary.stride\(\) is \(1920, 480, 960, 1\), expected contiguous, as TensorRT-LLM "
            r"allocates pools. Pass the whole pool$",
        ),
        ((0, Memory.DEVICE), r"^primary is NULL, expected the address of a pool$"),
    ],
)
def test_pools(pool: trt.Pool, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        trt.cache_desc(SPEC, 1, pool)


def test_secondary_pools() -> None:
    primary = torch.zeros(SPEC.pool_shape, dtype=torch.float16)
    with pytest.raises(
        InvalidArgumentError,
        match=r"^num_secondary_blocks is 0, expected the blocks of the secondary pool that is "
        r"given$",
    ):
        trt.cache_desc(SPEC, 0, primary, (4096, Memory.HOST))
    spec = PoolSpec(**KNOWN, num_secondary_blocks=3)
    with pytest.raises(InvalidArgumentError, match=r"^secondary is \(5, 2, 2, 480\) of torch.flo"):
        trt.cache_desc(spec, 0, primary, primary)
    with pytest.raises(
        UnsupportedError,
        match=r"^secondary is pageable memory, expected pinned, as TensorRT-LLM allocates it: "
        r"calls run where the primary pool is$",
    ):
        trt.cache_desc(spec, 0, (4096, Memory.DEVICE), primary[:3])
    with pytest.raises(
        UnsupportedError,
        match=r"^secondary is in DEVICE memory, expected HOST, where the primary pool is and calls "
        r"run$",
    ):
        trt.cache_desc(spec, 0, primary, (4096, Memory.DEVICE))
    view = trt.cache_view(spec, primary, FACTS)
    assert view.secondary_num_blocks == 0  # it is not given: no entry may name a block of it


def test_layers_that_a_pool_has_not() -> None:
    primary = torch.zeros(SPEC.pool_shape, dtype=torch.float16)
    for layer in (-1, 2):
        with pytest.raises(
            InvalidArgumentError,
            match=rf"^layer_in_pool is {layer}, expected one of the 2 layers of the pool$",
        ):
            trt.cache_desc(SPEC, layer, primary)


@pytest.mark.parametrize(
    ("pointers", "num_facts", "message"),
    [
        (
            torch.zeros(1, 2, dtype=torch.int32),
            1,
            r"^kv_cache_pool_pointers is \(1, 2\) of torch.int32, expected \(1, 2\) of "
            r"torch.int64, primary and secondary of each of specs$",
        ),
        (
            torch.zeros(1, 2, 2, dtype=torch.int64),  # as NVFP4 has them
            1,
            r"^kv_cache_pool_pointers is \(1, 2, 2\) of torch.int64, expected \(1, 2\)",
        ),
        (torch.ones(1, 2, dtype=torch.int64), 2, r"^facts has 2 entries, expected 1$"),
    ],
)
def test_pointers(pointers: Tensor, num_facts: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        trt.cache_views(pointers, [SPEC], [FACTS] * num_facts)


OFFSETS = torch.zeros(2, 6, 2, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: trt.block_table(OFFSETS[0], 0),
            InvalidArgumentError,
            r"^kv_cache_block_offsets is \(6, 2, 8\) of torch.int32, expected \(num_pools, rows, "
            r"2, max_blocks_per_seq\) of torch.int32$",
        ),
        (
            lambda: trt.block_table(OFFSETS[..., 0], 0),
            InvalidArgumentError,
            r"^kv_cache_block_offsets is \(2, 6, 2\) of torch.int32, expected \(num_pools,",
        ),
        (
            lambda: trt.block_table(OFFSETS[:, :, :, None], 0),
            InvalidArgumentError,
            r"^kv_cache_block_offsets is \(2, 6, 2, 1, 8\) of torch.int32, expected \(num_pools,",
        ),
        (
            lambda: trt.block_table(OFFSETS[:, :, :1], 0),
            InvalidArgumentError,
            r"^kv_cache_block_offsets is \(2, 6, 1, 8\) of torch.int32, expected \(num_pools,",
        ),
        (
            lambda: trt.block_table(OFFSETS.long(), 0),
            InvalidArgumentError,
            r"^kv_cache_block_offsets is \(2, 6, 2, 8\) of torch.int64, expected \(num_pools,",
        ),
        (
            lambda: trt.block_table(OFFSETS, 2),
            InvalidArgumentError,
            r"^pool_idx is 2, expected one of the 2 pools of kv_cache_block_offsets$",
        ),
        (
            lambda: trt.block_table(OFFSETS, -1),
            InvalidArgumentError,
            r"^pool_idx is -1, expected one of the 2 pools of kv_cache_block_offsets$",
        ),
        (
            lambda: trt.block_table(OFFSETS, 0, beam_width=0),
            InvalidArgumentError,
            r"^beam_width is 0, expected a divisor of the 6 rows$",
        ),
        (
            lambda: trt.block_offsets([[0]], SPEC, max_blocks_per_seq=1, beam_width=0),
            InvalidArgumentError,
            r"^beam_width is 0, expected a divisor of the 1 rows of blocks$",
        ),
        (
            lambda: trt.block_table(OFFSETS, 0, beam_width=4),
            InvalidArgumentError,
            r"^beam_width is 4, expected a divisor of the 6 rows$",
        ),
        (
            lambda: trt.block_table(OFFSETS, 1, rows=slice(0, 6, 3), beam_width=2),
            InvalidArgumentError,
            r"^the rows of kv_cache_block_offsets\[1\] have strides \(48, 8, 1\), expected "
            r"contiguous. Pass the whole table, and rows without a step$",
        ),
        (
            lambda: trt.block_table(OFFSETS[..., :4], 0),
            InvalidArgumentError,
            r"^the rows of kv_cache_block_offsets\[0\] have strides \(16, 8, 1\), expected "
            r"contiguous. Pass the whole table,",
        ),
        (
            lambda: trt.block_offsets([[0], [1], [2]], SPEC, max_blocks_per_seq=1, beam_width=2),
            InvalidArgumentError,
            r"^beam_width is 2, expected a divisor of the 3 rows of blocks$",
        ),
        (
            lambda: trt.block_offsets([[0], [1, 2]], SPEC, max_blocks_per_seq=1),
            InvalidArgumentError,
            r"^blocks\[1\] has 2 blocks, expected at most max_blocks_per_seq 1$",
        ),
        (
            lambda: trt.block_offsets([[0, 5]], SPEC, max_blocks_per_seq=2),
            OutOfRangeError,
            r"^blocks\[0\]\[1\] is 5 in the primary pool, expected one of its 5 blocks$",
        ),
        (
            lambda: trt.block_offsets([[-1]], SPEC, max_blocks_per_seq=2),
            OutOfRangeError,
            r"^blocks\[0\]\[0\] is -1 in the primary pool, expected one of its 5 blocks$",
        ),
        (
            lambda: trt.block_offsets(
                [[PoolIndex(0, is_secondary=True)]], SPEC, max_blocks_per_seq=1
            ),
            OutOfRangeError,
            r"^blocks\[0\]\[0\] is 0 in the secondary pool, expected one of its 0 blocks$",
        ),
    ],
)
def test_tables(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
