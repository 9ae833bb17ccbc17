"""What the bytes of llama.cpp's cache mean: rotary order, and the Hadamard rotation of quantized K
and V."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvx_adapters.llama_cpp.ggml_types import cache_type, is_quantized
from kvx_core import CacheFacts, DType, InvalidArgumentError
from kvx_core.argument_checks import flag, integer

VERSION = "0.5.0"  # the release whose structures and state format this package knows
# Source: llama.cpp v0.5.0 include/llama.h, enum llama_rope_type
_ROTARY: dict[int, Literal["half", "interleaved", "none"]] = {
    -1: "none",
    0: "interleaved",  # NORM
    2: "half",  # NEOX
}


class Rotation(NamedTuple):
    """Orders of the Hadamard matrices that heads are multiplied by before they are stored, group by
    group; 0: not rotated."""

    k: int
    v: int


def rotation(
    k_dtype: DType | str,
    v_dtype: DType | str,
    *,
    k_head_dim: int,
    v_head_dim: int,
    disabled: bool = False,
) -> Rotation:
    """Whether and how a context rotates what it stores.

    k_dtype, v_dtype: of the cache
    disabled:         the context was made with LLAMA_ATTN_ROT_DISABLE=1 in the environment
    Quantized K and V are rotated if head_dim is a multiple of 64: K by the largest power of two
    that divides head_dim, V by 64.
    Raises InvalidArgumentError.
    Source: llama.cpp v0.5.0 src/llama-kv-cache.cpp, attn_rot_k, build_input_k_rot,
            build_input_v_rot
    """
    if flag("disabled", disabled):
        return Rotation(0, 0)
    k_dim, v_dim = integer("k_head_dim", k_head_dim, 1), integer("v_head_dim", v_head_dim, 1)
    k = k_dim & -k_dim if is_quantized(cache_type(k_dtype, "k_dtype")) and k_dim % 64 == 0 else 0
    v = 64 if is_quantized(cache_type(v_dtype, "v_dtype")) and v_dim % 64 == 0 else 0
    return Rotation(k, v)


def cache_facts(
    *,
    rope_type: int,
    rotary_dim: int,
    num_layers: int,
    num_kv_heads: int,
    k_dtype: DType | str,
    v_dtype: DType | str,
    rotation: Rotation,
    first_layer: int | None = 0,
    window: int = 0,
    fingerprint: str | None = None,
) -> CacheFacts:
    """The facts of one cache of a context. llama.h's functions give the numbers.

    rope_type:    llama_model_rope_type: 0 (NORM) pairs neighbouring dims, 2 (NEOX) halves. Types
                  with several positions per token (M-RoPE) have an unknown order
    rotary_dim:   metadata {architecture}.rope.dimension_count; without it head_dim
    num_layers:   of the layers in the view
    num_kv_heads: llama_model_n_head_kv
    k_dtype, v_dtype: of the cache
    rotation:     see `rotation`
    first_layer:  None if the view's layers do not follow each other in the model
    window:       llama_model_n_swa for the cache of sliding-window layers, else 0
    fingerprint:  of the model as it is computed. Keys of a GGUF with quantized weights are not
                  those of the original model
    Raises InvalidArgumentError.
    """
    found = cache_type(k_dtype, "k_dtype"), cache_type(v_dtype, "v_dtype")
    rounded = sorted({dtype.name.lower() for dtype in found if is_quantized(dtype)})
    if not isinstance(rotation, Rotation):
        raise InvalidArgumentError(
            f"rotation is {rotation!r}, expected a Rotation: call llama_cpp.rotation"
        )
    rotated = bool(rotation.k or rotation.v)
    rotary = _ROTARY.get(integer("rope_type", rope_type, -1))
    dims = {"none": 0, None: None}.get(rotary, integer("rotary_dim", rotary_dim, 0))
    return CacheFacts(
        engine=f"llama.cpp {VERSION}",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=dims,
        rope_applied=None if rotary is None else True,
        hadamard=rotated,
        hadamard_k=rotation.k if rotated else None,
        hadamard_v=rotation.v if rotated else None,
        scale_convention="multiply",  # units bring their scales
        num_layers=integer("num_layers", num_layers, 1),
        first_layer=first_layer,
        window=integer("window", window, 0),
        total_kv_heads=integer("num_kv_heads", num_kv_heads, 1),
        first_kv_head=0,
        negative_slots="undefined",
        lossy=" and ".join(rounded) or None,
    )
