"""The facts of a vLLM worker's cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from kvx_core import CacheFacts, DType, InvalidArgumentError


def cache_facts(
    model_config: Any,
    embeddings: Iterable[Any],
    *,
    version: str,
    fingerprint: str | None,
    first_kv_head: int,
    layer: int | None = None,
) -> CacheFacts:
    """Facts of one worker's whole cache; `group_view` adds a group's layers and window.

    model_config:  vllm_config.model_config
    embeddings:    every RotaryEmbedding of the model; other objects are ignored
    version:       vllm.__version__
    fingerprint:   of the model as it is computed, see model_record
    first_kv_head: index in the model of the first head on this rank
    layer:         whose heads are counted, where layers of the model differ in that
    """
    rotary, rotary_dim = _rotary(embeddings)
    return CacheFacts(
        engine=f"vllm {version}",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=rotary_dim,
        rope_applied=None if rotary is None else True,
        hadamard=False,
        scale_convention="multiply",
        total_kv_heads=total_kv_heads(model_config, layer),
        first_kv_head=first_kv_head,
        compute_dtype=_dtype(model_config),
        negative_slots="skip",
    )


def num_kv_layers(model_config: Any) -> int:
    """The layers of the whole model, without those at its end that use the K and V of others.

    model_config: vllm_config.model_config
    Source: vllm 0.32 model_executor/models/gemma4.py, gemma3n.py
    """
    shared = getattr(model_config.hf_text_config, "num_kv_shared_layers", None) or 0
    return int(model_config.get_total_num_hidden_layers()) - int(shared)


def total_kv_heads(model_config: Any, layer: int | None = None) -> int:
    """KV heads of the whole model, as its caches hold them: MLA keeps one latent for all heads.

    model_config: vllm_config.model_config
    layer:        of the model; None: the one with most
    Source: vllm 0.32 config/model.py, get_num_kv_heads; config/model_arch.py, per_layer_overrides
    """
    if model_config.use_mla:
        return 1
    total = int(model_config.get_total_num_kv_heads())
    known = getattr(model_config, "model_arch_config", None)
    overrides = None if layer is None else getattr(known, "per_layer_overrides", None)
    return total if overrides is None else int(overrides[layer].get("total_num_kv_heads", total))


def kv_heads_of(
    model_config: Any, rank: int, num_ranks: int, layer: int | None = None
) -> tuple[int, int]:
    """The KV heads of a tensor-parallel rank: first, and one past the last.

    layer: as for `total_kv_heads`
    More ranks than heads share heads: of 4 ranks and 2 heads the first two have head 0.
    Source: vllm 0.32 model_executor/layers/linear.py, QKVParallelLinear
    """
    total = total_kv_heads(model_config, layer)
    first = rank * total // num_ranks
    return first, first + max(1, total // num_ranks)


# is_neox_style of embeddings that have only one style and no such attribute.
# Source: vllm 0.32 model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py
_STYLES = {"Phi3LongRoPEScaledRotaryEmbedding": True}


def _dtype(model_config: Any) -> DType | None:
    try:
        return DType.of(getattr(model_config, "dtype", None))
    except InvalidArgumentError:
        return None


def _rotary(
    embeddings: Iterable[Any],
) -> tuple[Literal["half", "interleaved"] | None, int | None]:
    """The rotary embedding that all layers share; (None, None) if there is none or several.

    Source: vllm 0.32 model_executor/layers/rotary_embedding/base.py, RotaryEmbedding
    """
    found = {
        (bool(style), int(module.rotary_dim))
        for module in embeddings
        if hasattr(module, "rotary_dim")
        and (style := getattr(module, "is_neox_style", _STYLES.get(type(module).__name__)))
        is not None
    }
    if len(found) != 1:
        return None, None
    ((is_neox_style, rotary_dim),) = found
    return ("half" if is_neox_style else "interleaved"), rotary_dim
