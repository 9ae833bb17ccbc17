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
quantize_and_insert_k_cache(**jobs["insert"], is_ue8m0=True)
torch.save(jobs, sys.argv[2])
