"""What each layer of a transformers model keeps, as its configuration says. Imports no torch.

Layers may differ: in the heads and head_dim of their keys and values, and in their windows. Layers
that use the keys and values of others keep nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvx_core import UnsupportedError
from kvx_core.argument_checks import plural

# Layers that keep no keys and values: a state, or nothing.
# Source: transformers 5.19 cache_utils.py, DYNAMIC_LAYER_TYPE_MAPPING
_WITHOUT = ("conv", "linear_attention", "mamba", "moe", "mlp")
_WINDOWS = ("sliding_attention", "hybrid_sliding")

# Models whose code decides what they keep.
# Source: transformers 5.19 generation/utils.py, _supports_default_dynamic_cache; the modeling files
_UNSAID = {
    "mimo_v2_flash": "keys and values of unlike sizes, and more heads in windows",
    "openai-gpt": "nothing",
    "recurrent_gemma": "keys, values and states in its modules",
    "reformer": "a cache of its own",
    "rwkv": "a state of its own",
    "xlnet": "hidden states",
    "xlstm": "a state of its own",
}
_WITHOUT_CACHE = _UNSAID.keys() - {"mimo_v2_flash"}


class KvLayer(NamedTuple):
    """Keys and values of one layer."""

    layer: int  # its index in the model
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None  # in tokens; 0: it attends to all; None: to a chunk
    kind: str  # its name in config.layer_types; "": it has none


def kv_layers(config: Any) -> tuple[KvLayer, ...]:
    """The layers of a decoder that keep keys and values of their own, in order.

    Layers with latents (MLA) keep them as the keys of one head, and their rotated key as its value.

    config: of the decoder: model.config.get_text_config(decoder=True)
    Raises UnsupportedError if it does not say.
    Source: transformers 5.19 cache_utils.py, get_layer_types_and_kwargs
    """
    kept = unsaid(config)
    if kept:
        raise UnsupportedError(
            f"config is of a model of type {config.model_type}, which keeps {kept}: expected one "
            f"that keeps what its configuration says. {_way_out(config.model_type)}"
        )
    return tuple(_layers(config))


def _way_out(model_type: str) -> str:
    if model_type in _WITHOUT_CACHE:
        return "It makes no cache of transformers' classes: run the prompt in this model"
    return "Run the model once instead, to make its cache"


def unsaid(config: Any) -> str:
    """What a model keeps that its configuration does not say; "" if it says all."""
    return _UNSAID.get(getattr(config, "model_type", ""), "")


def _layers(config: Any) -> Iterator[KvLayer]:
    num_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = list(getattr(config, "layer_types", None) or ())
    each = getattr(config, "per_layer_config", None)
    images = getattr(config, "cross_attention_layers", None) or ()  # these keep an image's K and V
    for i in range(num_layers):
        own = config if each is None else each[i]
        kind = kinds[i] if i < len(kinds) else ""
        if kind not in _WITHOUT and i not in images:
            sizes = _sizes(own, kind)
            if not all(isinstance(size, int) for size in sizes):
                raise UnsupportedError(
                    f"config of layer {i} has num_key_value_heads {sizes[0]} and head_dim "
                    f"{sizes[1]}, expected numbers. Run the model once instead, to make its cache"
                )
            yield KvLayer(i, *sizes, _window(own, kind), kind)


def _sizes(config: Any, kind: str) -> tuple[int, int, int]:
    """KV heads of a layer, head_dim of its keys and of its values, where it says them."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        return 1, rank, config.qk_rope_head_dim
    if getattr(config, "model_type", "") == "falcon":
        heads = _falcon_heads(config)
    else:
        heads = _of_kind(config, kind, "num_key_value_heads") or config.num_attention_heads
    head_dim = _of_kind(config, kind, "head_dim")
    if head_dim is None and isinstance(heads, int):
        head_dim = config.hidden_size // config.num_attention_heads
    return heads, head_dim, head_dim


def _of_kind(config: Any, kind: str, name: str) -> Any:
    """A field, which layers with a window may have for themselves."""
    own = getattr(config, f"swa_{name}", None) if kind in _WINDOWS else None
    return getattr(config, name, None) if own is None else own


def _falcon_heads(config: Any) -> int:
    """Source: transformers 5.19 modeling_falcon.py, FalconAttention: heads are repeated before they
    are kept."""
    if config.new_decoder_architecture:
        return int(config.num_attention_heads)
    return 1 if config.multi_query else int(config.num_kv_heads)


def _window(config: Any, kind: str) -> int | None:
    window: int = getattr(config, "sliding_window", None) or 0
    chunk = getattr(config, "attention_chunk_size", None)
    if kind == "chunked_attention" or (not kind and not window and chunk):
        return None
    return window if not kind or kind in _WINDOWS else 0


def sizes_in_words(layers: Sequence[KvLayer]) -> str:
    """Such as: 5 layers with 4 KV heads of 256, 1 layer with 1 KV head of 512 and values of 64."""
    counts = Counter((layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in layers)
    return ", ".join(
        f"{plural(count, 'layer')} with {plural(heads, 'KV head')} of {head_dim}"
        + (f" and values of {v_head_dim}" if v_head_dim != head_dim else "")
        for (heads, head_dim, v_head_dim), count in counts.items()
    )


def are_alike(layers: Sequence[KvLayer]) -> bool:
    """Whether all have the same heads, and keys and values of one size."""
    return len({size for layer in layers for size in _heads_and_dims(layer)}) == 1


def _heads_and_dims(layer: KvLayer) -> tuple[tuple[int, int], tuple[int, int]]:
    return (layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)
