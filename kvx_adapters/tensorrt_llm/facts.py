"""The facts of a TensorRT-LLM rank's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvx_adapters.tensorrt_llm.spec import PoolSpec
from kvx_core import CacheFacts, DType
from kvx_core.desc.facts import first_layer_of


def cache_facts(
    spec: PoolSpec,
    *,
    version: str,
    fingerprint: str | None,
    is_neox: bool | None,
    rotary_dim: int | None,
    total_kv_heads: int | None,
    first_kv_head: int | None,
    pp_layers: Sequence[int] | None = None,
    compute_dtype: DType | None = None,
) -> CacheFacts:
    """Facts of one pool of one rank.

    version:        tensorrt_llm.__version__
    fingerprint:    of the model as it is computed, see kvx_core.ModelRecord
    is_neox:        PositionalEmbeddingParams.is_neox. True, or type rope_gpt_neox: dims i and
                    i + rotary_dim / 2 rotate together; False, or rope_gptj: neighbours do; None:
                    unknown
    rotary_dim:     RopeParams.dim; 0: these layers have no rotary embedding
    total_kv_heads: of the model
    first_kv_head:  index in the model of the first head on this rank
    pp_layers:      manager.pp_layers, index in the model of each local layer; None: the same
    compute_dtype:  TorchLlmArgs.dtype, that of the model's arithmetic; None: unknown
    Source: TensorRT-LLM main 2026-09, _torch/attention_backend/interface.py
    """
    layers = [layer if pp_layers is None else pp_layers[layer] for layer in spec.layers]
    rotary: Literal["half", "interleaved", "none"] | None
    if rotary_dim == 0:
        rotary = "none"
    else:
        rotary = None if is_neox is None else "half" if is_neox else "interleaved"
    return CacheFacts(
        engine=f"tensorrt_llm {version}",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=rotary_dim,
        rope_applied=None if rotary is None else True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=len(spec.layers),
        first_layer=first_layer_of(layers),
        window=spec.window,
        total_kv_heads=total_kv_heads,
        first_kv_head=first_kv_head,
        compute_dtype=compute_dtype,
    )
