"""vLLM's own Triton kernels write, KVX reads. A script, since Triton has to interpret the kernels
on the CPU and vLLM has to think that there is a GPU: test_vllm_self_test.py runs it.

    python tests/adapters/triton_vllm.py
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language
import vllm.triton_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from kvx_adapters import vllm as adapter
from tests.fakes.vllm import LAYOUTS, SENTINEL, B, L, make_spec, views_of

# vllm for CPU turns Triton off; these are what its modules import from there.
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
op = import_module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
# A GPU whose FP8 is OCP's, as the kernels' wrappers ask for it.
op.current_platform = SimpleNamespace(
    is_rocm=lambda: True,  # the other branch asks CUDA for a capability
    is_xpu=lambda: False,
    fp8_dtype=lambda: torch.float8_e4m3fn,
    has_device_capability=lambda capability: True,
)

N, H, D = 16, 3, 64
F32, BF16, U8, S8 = torch.float32, torch.bfloat16, torch.uint8, torch.int8
# Module and class of the backend, kv_cache_dtype, dtype as stored, head_size of V, layouts.
CASES: list[tuple[str, str, str, torch.dtype, int, tuple[str, ...]]] = [
    *(
        ("triton_attn", "TritonAttention", name, dtype, D, LAYOUTS)
        for name, dtype in (
            ("auto", BF16),
            ("auto", F32),
            ("fp8", U8),
            ("fp8_per_token_head", U8),
            ("int8_per_token_head", S8),
            ("int4_per_token_head", U8),
        )
    ),
    ("triton_attn_diffkv", "TritonAttentionDiffKV", "auto", BF16, 32, LAYOUTS),
    ("triton_attn_diffkv", "TritonAttentionDiffKV", "fp8", U8, 32, ("LBNHC",)),
    ("rocm_attn", "RocmAttention", "auto", BF16, D, ("LBHNC",)),
    ("rocm_segmented_attn", "RocmSegmentedAttention", "auto", F32, D, ("LHBNC", "LBHNC")),
]


def impl_of(module: Any, name: str, kv_cache_dtype: str) -> Any:
    """The backend's impl, with what do_kv_cache_update asks of it; __init__ wants an engine."""
    cls = getattr(module, f"{name}Impl")
    impl = cls.__new__(cls)
    impl.attn_type, impl.kv_cache_dtype = "decoder", kv_cache_dtype
    impl.num_kv_heads, impl.head_size, impl.fp8_dtype = H, D, torch.float8_e4m3fn
    impl._kv_quant_mode = get_kv_quant_mode(kv_cache_dtype)
    impl._is_per_token_head_quant = impl._kv_quant_mode.is_per_token_head
    impl._k_scale_cache = impl._v_scale_cache = None
    return impl


for module_name, name, kv_cache_dtype, dtype, head_size_v, layouts in CASES:
    module = import_module(f"vllm.v1.attention.backends.{module_name}")
    backend = getattr(module, f"{name}Backend")
    theirs = backend.customize_spec(
        FullAttentionSpec(
            block_size=N,
            num_kv_heads=H,
            head_size=D,
            head_size_v=head_size_v,
            dtype=dtype,
            kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
        )
    )
    for layout in layouts:
        spec = make_spec(
            layout,
            backend=backend.get_name(),
            kv_cache_dtype=kv_cache_dtype,
            dtype=dtype,
            num_kv_heads=H,
            head_size=D,
            head_size_v=head_size_v,
            block_size=N,
            num_head_slots=theirs.num_head_slots,
            state_content_bytes=theirs.state_content_bytes,
            page_size_bytes=theirs.page_size_bytes,
        )
        raw, caches = views_of(theirs, spec)
        names = tuple(f"model.layers.{i}.attn" for i in range(L))
        layers = {
            layer_name: SimpleNamespace(
                impl=impl_of(module, name, kv_cache_dtype),
                kv_cache=cache,
                dtype=F32 if dtype is F32 else BF16,
                _k_scale=torch.tensor(0.37),
                _v_scale=torch.tensor(2.9),
            )
            for layer_name, cache in zip(names, caches, strict=True)
        }
        group = adapter.LayerGroup(names, tuple(range(L)), (spec,) * L, 0)
        adapter.self_test_group(group, dict(zip(names, caches, strict=True)), layers)
        changed = int((raw != SENTINEL).sum())
        scale_bytes = L * B * N * H * 2 * 4 if kv_cache_dtype.endswith("per_token_head") else 0
        assert changed <= scale_bytes, f"{changed} bytes changed, {scale_bytes} are scales"
        print(f"{spec.backend} {kv_cache_dtype} {dtype} {layout}: as vLLM wrote it")
