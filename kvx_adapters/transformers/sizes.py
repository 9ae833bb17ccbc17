"""What each layer of a transformers model keeps, as its configuration says. Imports no torch.

Layers may differ: in the heads and head_dim of their keys and values, and in their windows. Layers
that use the keys and values of others keep nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvx_core import UnsupportedError
from kvx_core.words import many

# Layers that keep a state, and no keys and values.
# Source: transformers 5.19 cache_utils.py, DYNAMIC_LAYER_TYPE_MAPPING
_STATES = ("conv", "linear_attention", "mamba")
_WINDOWS = ("sliding_attention", "hybrid_sliding")


class KvLayer(NamedTuple):
    """Keys and values of one layer."""

    layer: int  # its index in the model
    num_kv_heads: int
    head_dim: int
    window: int | None  # in tokens; 0: it attends to all; None: to a chunk
    kind: str  # its name in config.layer_types; "": it has none


def kv_layers(config: Any) -> tuple[KvLayer, ...]:
    """The layers of a decoder that keep keys and values of their own, in order.

    config: of the decoder: model.config.get_text_config(decoder=True)
    Raises UnsupportedError if it does not say.
    Source: transformers 5.19 cache_utils.py, get_layer_types_and_kwargs
    """
    return tuple(_layers(config))


def _layers(config: Any) -> Iterator[KvLayer]:
    num_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = list(getattr(config, "layer_types", None) or ())
    each = getattr(config, "per_layer_config", None)
    for i in range(num_layers):
        own = config if each is None else each[i]
        kind = kinds[i] if i < len(kinds) else ""
        if kind not in _STATES:
            heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
            head_dim = getattr(own, "head_dim", None)
            if head_dim is None and isinstance(heads, int):
                head_dim = own.hidden_size // own.num_attention_heads
            if not isinstance(heads, int) or not isinstance(head_dim, int):
                raise UnsupportedError(
                    f"config of layer {i} has num_key_value_heads {heads} and head_dim {head_dim}, "
                    "expected numbers. Run the model once instead, to make its cache"
                )
            yield KvLayer(i, heads, head_dim, _window(own, kind), kind)


def _window(config: Any, kind: str) -> int | None:
    window: int = getattr(config, "sliding_window", None) or 0
    chunk = getattr(config, "attention_chunk_size", None)
    if kind == "chunked_attention" or (not kind and not window and chunk):
        return None
    return window if not kind or kind in _WINDOWS else 0


def sizes_in_words(layers: Sequence[KvLayer]) -> str:
    """Such as: 5 layers with 4 KV heads of 256, 1 layer with 2 KV heads of 512."""
    counts = Counter((layer.num_kv_heads, layer.head_dim) for layer in layers)
    return ", ".join(
        f"{many(count, 'layer')} with {many(heads, 'KV head')} of {head_dim}"
        for (heads, head_dim), count in counts.items()
    )


def are_unlike(layers: Sequence[KvLayer]) -> bool:
    """Whether layers differ in their sizes."""
    return len({(layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1
