"""vLLM's own TurboQuant kernels, run by Triton's interpreter. `python -m tests.vllm_turboquant OUT`

Fills the slots of each preset and head_dim with vLLM's store kernel and reads them back with its
dequantizing kernel, for tests/test_turboquant.py. Needs TRITON_INTERPRET=1, which Triton reads when
it is imported.
Source: vllm 0.32 v1/attention/ops/triton_turboquant_{store,decode}.py, and their calls in
  v1/attention/backends/turboquant_attn.py
"""

from __future__ import annotations

import math
import sys
from functools import cache
from importlib import reload
from typing import Any

import numpy as np
import torch
from torch import Tensor

PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
DIMS = (64, 128, 256)
TOKENS, HEADS, BLOCK_SIZE = 7, 2, 4


def inputs(dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens, (tokens, heads, dim) bfloat16; zeros among them."""
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, TOKENS, HEADS, dim, generator=random)
    keys[:, :, ::9] *= 6
    keys[3, 1] = 0
    values[2, 0] = 0
    values[4, 1] = 0.75
    return keys.to(torch.bfloat16), values.to(torch.bfloat16)


@cache
def kernels() -> tuple[Any, Any]:
    """vLLM's modules, with Triton: on a machine without a GPU it uses placeholders instead."""
    import triton
    import triton.language
    import vllm.triton_utils
    from vllm.v1.attention.ops import triton_turboquant_decode, triton_turboquant_store

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
    return reload(triton_turboquant_store), reload(triton_turboquant_decode)


def hadamard(dim: int) -> Tensor:
    """As _build_hadamard of turboquant_attn.py, which imports attention backends."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(dim)


def run(preset: str, dim: int, seed: int) -> dict[str, Any]:
    """The slots that vLLM fills, and the keys (rotated) and values that it reads from them."""
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    store, decode = kernels()
    config = TurboQuantConfig.from_cache_dtype(preset, dim)
    keys, values = inputs(dim, seed)
    blocks = -(-TOKENS // BLOCK_SIZE)
    cache = torch.zeros(blocks, BLOCK_SIZE, HEADS, config.slot_size_aligned, dtype=torch.uint8)
    centroids = get_centroids(dim, config.centroid_bits)
    store.triton_turboquant_store(
        keys,
        values,
        cache,
        torch.arange(TOKENS, dtype=torch.int32),
        hadamard(dim),
        (centroids[:-1] + centroids[1:]) / 2,
        config.mse_bits,
        config.key_packed_size,
        config.effective_value_quant_bits,
        key_fp8=config.key_fp8,
    )
    read = torch.zeros(2, 1, HEADS, TOKENS, dim, dtype=torch.float16)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    decode._tq_full_dequant_kv[(TOKENS, HEADS)](
        cache,
        table,
        centroids,
        *read,
        *read[0].stride()[:3],
        *read[1].stride()[:3],
        *cache.stride()[:3],
        table.stride(0),
        HEAD_DIM=dim,
        BLOCK_SIZE=BLOCK_SIZE,
        NUM_KV_HEADS=HEADS,
        MSE_BYTES=-(-dim * config.key_mse_bits // 8),
        KPS=config.key_packed_size,
        VQB=config.effective_value_quant_bits,
        VAL_DATA_BYTES=-(-dim * config.effective_value_quant_bits // 8),
        MSE_BITS=config.key_mse_bits,
        KEY_FP8=int(config.key_fp8),
        BLOCK_D=dim,
        NORM_CORRECTION=int(config.norm_correction),
    )
    slots = cache.flatten(0, 1)[:TOKENS]
    read_keys, read_values = read[:, 0].transpose(1, 2)
    found = {"slots": slots, "keys": read_keys, "values": read_values}
    return {name: tensor.numpy() for name, tensor in found.items()} | {
        "slot_size": config.slot_size,
        "centroids": centroids.numpy(),
    }


if __name__ == "__main__":
    seeds = [int(seed) for seed in sys.argv[2:]] or [1]
    np.savez(
        sys.argv[1],
        **{
            f"{preset} {dim} {seed} {name}": value
            for preset in PRESETS
            for dim in DIMS
            for seed in seeds
            for name, value in run(preset, dim, seed).items()
        },
    )
