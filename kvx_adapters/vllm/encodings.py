"""Encoding: the bytes of a vector (one token and head), by vLLM's kv_cache_dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvx_adapters.vllm.spec import LayerSpec
from kvx_core import DType, InvalidArgumentError, UnsupportedError

VALUES = "values"
FP8 = {"fp8": DType.F8_E4M3, "fp8_e4m3": DType.F8_E4M3, "fp8_e5m2": DType.F8_E5M2}
_FLOATS = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}
_SCALE_BYTES = 4  # one float32 behind the values of a head, per token
# Vectors of values that have a scale behind them.
# Source: vllm 0.32 v1/attention/ops/triton_reshape_and_cache_flash.py,
# _PER_TOKEN_HEAD_QUANT_PARAMS
PER_TOKEN_HEAD = {"fp8_per_token_head": DType.F8_E4M3, "int8_per_token_head": DType.S8}
# The only backends that keep a scale behind each vector.
# Source: vllm 0.32 v1/attention/backends/triton_attn.py, TritonAttentionBackend.customize_spec
_WITH_INLINE_SCALES = ("TRITON_ATTN",)
# Bytes of a token of sparse MLA, whose head_size is 576.
# Source: vllm 0.32 v1/attention/backends/mla/flashmla_sparse.py, the note at its head
_DS_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
# Why these cache dtypes have no vectors that could be moved one by one. Keys are prefixes.
_NO_VECTORS = {
    "nvfp4": "its pages hold the FP4 data of all tokens and then their block scales",
    "turboquant": "its vectors are rotated and coded, in an order that depends on the device",
    "ultraquant": "its vectors are rotated and coded, in an order that depends on the device",
    "octave": "its vectors are rotated and coded, in an order that depends on the device",
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a backend stores a vector: the K, or the V, of one token and head."""

    name: str  # "values", or the name of opaque bytes that only their own kind can read
    dtype: DType  # of what is described
    k_elements: int  # of a vector as it is stored, with what follows the values
    v_elements: int  # 0: no V
    inline_scales: bool = False  # a float32 follows the values of each vector

    def values(self, num_elements: int) -> int:
        """How many elements of a stored vector are described."""
        return num_elements - _SCALE_BYTES if self.inline_scales else num_elements


def encoding_of(spec: LayerSpec) -> Encoding:
    """How a layer stores its vectors. Raises UnsupportedError, InvalidArgumentError."""
    name = spec.kv_cache_dtype
    k, v = spec.head_size, spec.head_size if spec.head_size_v is None else spec.head_size_v
    if name in _DS_MLA_BYTES:
        return _ds_mla(spec)
    for prefix, reason in _NO_VECTORS.items():
        if name.startswith(prefix):
            raise UnsupportedError(f"kv_cache_dtype is {name!r}: {reason}, not described here")
    if name.endswith("_per_token_head"):
        return _per_token_head(spec, k, v)
    if name in FP8:
        _check_fp8(spec)
        if spec.dtype not in (torch.uint8, getattr(torch, FP8[name].array_name)):
            raise InvalidArgumentError(
                f"dtype is {spec.dtype}, expected torch.uint8 for kv_cache_dtype {name!r}"
            )
        return Encoding(VALUES, FP8[name], k, v)
    if spec.dtype not in _FLOATS:
        raise UnsupportedError(
            f"dtype is {spec.dtype} for kv_cache_dtype {name!r}, expected "
            f"{', '.join(map(str, _FLOATS))}, or kv_cache_dtype one of {', '.join(FP8)}"
        )
    if name not in ("auto", str(spec.dtype).removeprefix("torch.")):
        raise UnsupportedError(
            f"kv_cache_dtype is {name!r} for dtype {spec.dtype}, expected 'auto' or "
            f"{str(spec.dtype).removeprefix('torch.')!r}"
        )
    return Encoding(VALUES, _FLOATS[spec.dtype], k, v)


def _per_token_head(spec: LayerSpec, k: int, v: int) -> Encoding:
    """[values][float32 scale] per token and head.

    INT4 vectors hold two values to a byte, rotated, and a zero point in the scale's last bits.
    Source: vllm 0.32 v1/attention/backends/triton_attn.py, _ensure_scale_caches;
    v1/attention/ops/int4_per_token_head.py
    """
    name = spec.kv_cache_dtype
    if spec.backend not in _WITH_INLINE_SCALES or spec.minor < 26:
        raise UnsupportedError(
            f"kv_cache_dtype is {name!r} for backend {spec.backend} of vllm {spec.version}, "
            f"expected {' or '.join(_WITH_INLINE_SCALES)} since 0.26"
        )
    if name in PER_TOKEN_HEAD:
        if name.startswith("fp8"):
            _check_fp8(spec)
        return Encoding(
            VALUES, PER_TOKEN_HEAD[name], k + _SCALE_BYTES, v + _SCALE_BYTES, inline_scales=True
        )
    values_per_byte = 2 if name == "int4_per_token_head" else 1
    k_bytes, v_bytes = (size // values_per_byte + _SCALE_BYTES for size in (k, v))
    return Encoding(opaque_name(spec.minor, spec.kv_cache_dtype), DType.U8, k_bytes, v_bytes)


def _ds_mla(spec: LayerSpec) -> Encoding:
    num_bytes = _DS_MLA_BYTES[spec.kv_cache_dtype]
    if (
        spec.head_size != 576
        or spec.tokens_per_state != 1
        or spec.state_content_bytes not in (None, num_bytes)
    ):
        raise UnsupportedError(
            f"kv_cache_dtype is {spec.kv_cache_dtype!r} with head_size {spec.head_size}, "
            f"state_content_bytes {spec.state_content_bytes} and tokens_per_state "
            f"{spec.tokens_per_state:g}, expected 576, {num_bytes} and 1: the pages of other "
            "models hold the data of all tokens and then their scales"
        )
    return Encoding(opaque_name(spec.minor, spec.kv_cache_dtype), DType.U8, num_bytes, 0)


def opaque_name(minor: int, kv_cache_dtype: str) -> str:
    """The name of opaque bytes of vLLM 0.minor. Another version may code them differently."""
    return f"vllm 0.{minor} {kv_cache_dtype}"


def _check_fp8(spec: LayerSpec) -> None:
    if torch.version.hip is not None or spec.backend.startswith("ROCM_"):
        raise UnsupportedError(
            f"kv_cache_dtype is {spec.kv_cache_dtype!r} on ROCm, whose FP8 may be the FNUZ "
            "variant or not, by GPU, and the cache does not say which"
        )
