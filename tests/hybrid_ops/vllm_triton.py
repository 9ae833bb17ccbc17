"""Runs vLLM's Triton kernels of DeepSeek-V4's cache in Triton's interpreter, on the CPU.

    TRITON_INTERPRET=1 python vllm_triton.py INPUT OUTPUT

INPUT is a file of torch.save with the arguments of the kernels' functions, OUTPUT the same after
the calls. A process of its own: vLLM replaces Triton where there is no GPU, and Triton reads
TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
import vllm.triton_utils
from triton import language
from triton.runtime import interpreter

# The interpreter cuts bits off where processors round to nearest, ties to even.
ROUNDED = {language.bfloat16: torch.bfloat16, language.float8e4nv: torch.float8_e4m3fn}
convert = interpreter._convert_float


def convert_rounded(given: Any, src: Any, dst: Any, rounding: Any) -> Any:
    if src != language.float32 or dst not in ROUNDED:
        return convert(given, src, dst, rounding)
    rounded = torch.from_numpy(given.copy()).to(ROUNDED[dst])
    bits = torch.int16 if dst == language.bfloat16 else torch.uint8
    return rounded.view(bits).numpy().view("u2" if dst == language.bfloat16 else "u1")


interpreter._convert_float = convert_rounded
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language

from vllm.models.deepseek_v4.common.ops.cache_utils import (  # noqa: E402
    quantize_and_insert_k_cache,
)
from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import (  # noqa: E402
    _fused_kv_compress_norm_rope_insert_indexer_attn,
    compress_norm_rope_store_triton,
)

jobs = torch.load(sys.argv[1])
for given in jobs["compress"]:
    compress_norm_rope_store_triton(
        **{name: value for name, value in given.items() if name != "kv_slots"},
        k_cache_metadata=SimpleNamespace(slot_mapping=given["kv_slots"]),
        pdl_kwargs={},
        use_fp4_cache=False,
        quant_block=64,
        token_stride=576,
        scale_dim=8,
    )
for given in jobs["keys"]:
    state, table, pages = given["state_cache"], given["block_table"], given["kv_cache"]
    _fused_kv_compress_norm_rope_insert_indexer_attn[(given["num_actual"],)](
        state,
        state.stride(0),
        state.stride(1),
        given["token_to_req_indices"],
        given["positions"],
        given["slot_mapping"],
        table,
        table.stride(0),
        given["block_size"],
        given["rms_norm_weight"],
        given["rms_norm_eps"],
        given["cos_sin_cache"],
        given["cos_sin_cache"].stride(0),
        pages,
        given["kv_slots"],
        pages.shape[1],
        HEAD_SIZE=128,
        TRITON_BLOCK_SIZE=128,
        STATE_WIDTH=given["state_width"],
        COMPRESS_RATIO=4,
        OVERLAP=True,
        ROPE_HEAD_DIM=64,
        FP8_MAX=448.0,
        QUANT_BLOCK=128,
        TOKEN_STRIDE=128,
        SCALE_DIM=4,
        KV_BLOCK_STRIDE=pages.stride(0),
    )
quantize_and_insert_k_cache(**jobs["insert"], is_ue8m0=True)
torch.save(jobs, sys.argv[2])
