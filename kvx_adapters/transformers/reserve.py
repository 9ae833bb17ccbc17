"""Room for tokens in an empty cache of a model, to migrate into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvx_adapters.transformers.cache import LAYERS, SLIDING_LAYERS, layers_of, require_kind
from kvx_adapters.transformers.sizes import KvLayer, are_alike, kv_layers, sizes_in_words
from kvx_adapters.transformers.states import (
    STATES,
    WITH_BOTH,
    recurrent_layers,
    reserve_states,
)
from kvx_core import CacheGeometry, InvalidArgumentError, Layout, UnsupportedError

# Layers that keep nothing, which a cache has all the same.
_EMPTY = ("moe", "mlp")


def geometry(model: Any, *, batch_size: int, num_tokens: int) -> CacheGeometry:
    """Sizes of a cache for `model` that holds `num_tokens` tokens of `batch_size` sequences.

    Raises InvalidArgumentError naming the wrong number, UnsupportedError for layers that differ in
    their sizes, and for keys of another size than values (MLA).
    """
    layers = _layers_with_tokens(model)
    if not are_alike(layers):
        raise UnsupportedError(
            f"{type(model).__name__} has {sizes_in_words(layers)}, expected the same in all. "
            "reserve makes room of each layer's own size"
        )
    return _geometry(model, layers[0], batch_size, num_tokens, num_layers=len(layers))


def reserve(cache: Any, model: Any, *, batch_size: int, num_tokens: int) -> None:
    """Makes an empty cache hold `num_tokens` zero tokens per sequence, to migrate into.

    cache: an empty DynamicCache(config=model.config), or a StaticCache of at least that length
    Mutates the cache: keys and values of each layer are then (batch_size, num_kv_heads, num_tokens,
    head_dim) as the model has them there, or latents and rotated keys of one head (MLA). They are
    zero: attention multiplies padding by 0, and padding must be finite. Recurrent layers have zero
    states.
    Raises InvalidArgumentError if the cache is not empty or a size is wrong, UnsupportedError for
    models whose states are not known; then nothing is changed.
    """
    wanted = _layers_with_tokens(model)
    shapes = [
        _geometry(model, layer, batch_size, num_tokens).k_shape(Layout.BLOCK_HND)
        for layer in wanted
    ]
    layers: Sequence[Any] = layers_of(cache) if _has_layers(cache) else ()
    indices = [layer.layer for layer in wanted]
    recurrent = recurrent_layers(model)
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    empty = [i for i, kind in enumerate(kinds) if kind in _EMPTY]
    known = sorted({*indices, *recurrent, *empty})
    if known != list(range(len(known))):
        raise UnsupportedError(
            f"{type(model).__name__} has keys and values of tokens in the layers {indices} alone, "
            "expected them or states in all: the others keep an image's, for which a cache has no "
            "room before a prompt. Run the prompt in this model"
        )
    if recurrent and not layers:
        raise InvalidArgumentError(
            f"cache has no layers and {type(model).__name__} has states in the layers {recurrent}, "
            "expected layers of each kind. Make it with config=model.config"
        )
    if layers and len(known) != len(layers):
        raise InvalidArgumentError(
            f"cache has {len(layers)} layers and keys and values are in layers {indices} of the "
            "model, expected the same layers. Make it with config=model.config"
        )
    for i, layer in enumerate(layers):
        if i in indices or i in recurrent:
            _require_empty(i, layer, i in recurrent, num_tokens)
    # update() copies what it is given, so one zero stands for all of them.
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    for layer, shape in zip(wanted, shapes, strict=True):
        keys, values = zero.expand(shape), zero.expand(*shape[:-1], layer.v_head_dim)
        cache.update(keys, values, layer.layer)
    reserve_states([(i, layers[i]) for i in recurrent], model, batch_size)


def _require_empty(index: int, layer: Any, is_recurrent: bool, num_tokens: int) -> None:
    """Raises unless a layer has room for so many tokens, and holds none."""
    kinds = (*STATES, *WITH_BOTH) if is_recurrent else (*LAYERS, *SLIDING_LAYERS)
    require_kind(layer, kinds)
    kind = type(layer).__name__
    if is_recurrent and (any(layer.has_previous_state.values()) or layer.record_past):
        raise InvalidArgumentError(
            f"cache.layers[{index}] has a state already, expected none. Pass a new cache"
        )
    if kind in STATES:
        return
    held = int(layer.get_seq_length())
    if held:
        raise InvalidArgumentError(f"cache holds {held} tokens, expected none. Pass a new one")
    room = layer.max_cache_len if "Static" in kind and "Sliding" not in kind else num_tokens
    if room < num_tokens:
        raise InvalidArgumentError(
            f"cache.layers[{index}] has room for {room} tokens, expected it for {num_tokens}. Make "
            f"it with max_cache_len={num_tokens} or more"
        )


def _layers_with_tokens(model: Any) -> tuple[KvLayer, ...]:
    layers = kv_layers(model.config.get_text_config(decoder=True))
    if not layers:
        raise UnsupportedError(
            f"model is a {type(model).__name__}, whose layers keep states, expected some with keys "
            "and values"
        )
    return layers


def _geometry(
    model: Any, layer: KvLayer, batch_size: int, num_tokens: int, *, num_layers: int = 1
) -> CacheGeometry:
    """Of the keys of a layer."""
    return CacheGeometry(
        num_layers=num_layers,
        num_blocks=batch_size,
        block_size=num_tokens,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        dtype=model.dtype,
    )


def _has_layers(cache: Any) -> bool:
    """False for DynamicCache(), which makes them as they are needed."""
    return bool(getattr(cache, "layers", True))
