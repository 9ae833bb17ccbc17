"""Every engine that KVX describes, each with a cache that its own indexing can fill.

A line of ENGINES makes an engine part of tests/engines/test_engine_matrix.py and docs/layouts.md; a
line of REFUSED says which of its caches cannot be described, and why.
"""

from functools import partial

from tests.engines import (
    cpu_engines,
    flashinfer,
    kv_store,
    llama_cpp,
    packed,
    sglang,
    tensorrt_llm,
    tgi,
    torch_caches,
    transformers,
    vllm,
)
from tests.engines.engine import (
    E4M3,
    E5M2,
    FLOATS,
    FP8,
    SENTINEL,
    Engine,
    EngineCache,
    Refused,
    Sizes,
)

ALL, WITH_E4M3, WITH_E5M2 = (*FLOATS, *FP8), (*FLOATS, E4M3), (*FLOATS, E5M2)

# name: Engine(build, block_size, dtypes, ...). Where an engine leaves the block size open it is one
# that no other has: blocks that match by chance would prove less.
ENGINES: dict[str, Engine] = {
    "vllm FLASH_ATTN LBNHC": Engine(partial(vllm.flash_attn, layout="LBNHC"), 16, ALL),
    "vllm FLASH_ATTN LBHNC": Engine(partial(vllm.flash_attn, layout="LBHNC"), 32, ALL),
    "vllm FLASH_ATTN BLNHC": Engine(partial(vllm.flash_attn, layout="BLNHC"), 48, ALL),
    "vllm FLASH_ATTN BLHNC": Engine(partial(vllm.flash_attn, layout="BLHNC"), 64, ALL),
    "vllm FLASH_ATTN LHBNC": Engine(partial(vllm.flash_attn, layout="LHBNC"), 16, ALL),
    "vllm FLASH_ATTN BHLNC": Engine(partial(vllm.flash_attn, layout="BHLNC"), 80, ALL),
    "vllm 0.22 FLASH_ATTN NHD": Engine(vllm.flash_attn_22, 16, ALL),
    "vllm CPU_ATTN": Engine(vllm.cpu_attn, 32, ALL),
    "vllm ROCM_ATTN LHBNC": Engine(partial(vllm.rocm_attn, layout="LHBNC"), 16, FLOATS),
    "vllm ROCM_ATTN LBHNC": Engine(partial(vllm.rocm_attn, layout="LBHNC"), 32, FLOATS),
    "vllm FLASHMLA": Engine(vllm.flashmla, 64, ALL, mla=True),
    "tensorrt_llm V1": Engine(tensorrt_llm.v1, 32, WITH_E4M3, one_scale=True),
    "tensorrt_llm V1 offloaded": Engine(tensorrt_llm.v1_offloaded, 8, WITH_E4M3, one_scale=True),
    "tensorrt_llm V2": Engine(tensorrt_llm.v2, 64, WITH_E4M3, one_scale=True),
    "tensorrt_llm MLA": Engine(tensorrt_llm.mla, 32, WITH_E4M3, mla=True),
    "tgi flashinfer": Engine(tgi.flashinfer, 1, ALL, unscaled=(E5M2,)),
    "tgi flashdecoding": Engine(tgi.flashdecoding, 256, FLOATS),
    "tgi flashdecoding-ipex xpu": Engine(tgi.flashdecoding_xpu, 64, ALL, unscaled=FP8),
    "tgi flashdecoding-ipex cpu": Engine(tgi.flashdecoding_cpu, 64, WITH_E5M2, unscaled=(E5M2,)),
    "tgi paged cuda": Engine(tgi.paged_cuda, 16, WITH_E4M3, unscaled=(E4M3,)),
    "tgi paged ipex xpu": Engine(tgi.paged_xpu, 16, ALL, unscaled=FP8),
    "tgi paged ipex cpu": Engine(tgi.paged_cpu, 16, WITH_E5M2, unscaled=(E5M2,)),
    "tgi gaudi": Engine(tgi.gaudi, 128, FLOATS),
    "flashinfer NHD": Engine(flashinfer.nhd, 11, ALL),
    "flashinfer HND": Engine(flashinfer.hnd, 13, ALL),
    "sglang NHD": Engine(sglang.nhd, 17, ALL),
    "sglang HND": Engine(sglang.hnd, 19, ALL),
    "sglang MLA": Engine(sglang.latent, 23, ALL, unscaled=FP8, mla=True),
    "hf DynamicCache": Engine(transformers.dynamic_cache, 41, FLOATS, whole=True),
    "hf StaticCache": Engine(transformers.static_cache, 53, FLOATS, whole=True),
    "llama.cpp": Engine(llama_cpp.Cells, 59, FLOATS, whole=True),
    "openvino": Engine(cpu_engines.openvino_pools, 32, FLOATS, whole=True),
    "mlx": Engine(cpu_engines.mlx_cache, 61, FLOATS, whole=True),
    "onnxruntime": Engine(cpu_engines.onnxruntime_buffers, 67, FLOATS, whole=True),
    "kvx packed": Engine(packed.PackedCaches, 47, FLOATS),
    "kvx store": Engine(kv_store.Store, 9, FLOATS),
    "dense": Engine(torch_caches.dense, 43, ALL, in_order=True),
    "torch NHD": Engine(torch_caches.nhd, 5, ALL),
    "torch HND": Engine(torch_caches.hnd, 7, ALL),
    "torch MLA": Engine(torch_caches.latent, 3, ALL, mla=True),
}

REFUSED: dict[str, Refused] = {
    "vllm CPU_ATTN amx": Refused(
        partial(vllm.cpu_attn, isa="amx"), "AMX pages are tiles of 16 x 2 elements"
    ),
    "vllm nvfp4": Refused(
        partial(vllm.flash_attn, layout="LBNHC", kv_cache_dtype="nvfp4"),
        "its pages hold the FP4 data of all tokens and then their block scales",
    ),
    "vllm turboquant": Refused(
        partial(vllm.flash_attn, layout="LBNHC", kv_cache_dtype="turboquant_4bit_nc"),
        "its vectors are rotated and coded",
    ),
    "vllm ROCM_ATTN FP8": Refused(
        partial(vllm.rocm_attn, layout="LHBNC"), "whose FP8 may be the FNUZ variant", E4M3
    ),
    "tensorrt_llm NVFP4": Refused(partial(tensorrt_llm.v1, dtype="NVFP4"), "a pool of NVFP4 holds"),
    "tgi flashdecoding FP8": Refused(tgi.flashdecoding, "TGI allocates no such cache", E4M3),
    "tgi paged rocm FP8": Refused(tgi.paged_rocm, "for paged on rocm", E4M3),
    "tgi gaudi FP8": Refused(tgi.gaudi, "the gaudi server stores value * scale", E4M3),
    "hf sliding window": Refused(
        transformers.sliding_window_cache, "it holds the last tokens of a sequence only"
    ),
}

__all__ = [
    "E4M3",
    "E5M2",
    "ENGINES",
    "FLOATS",
    "FP8",
    "REFUSED",
    "SENTINEL",
    "Engine",
    "EngineCache",
    "Refused",
    "Sizes",
]
