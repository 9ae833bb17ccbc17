"""PackedKVCache in the blocks of a transformers model: layers of its DynamicCaches that append in
place, where transformers' own copy all tokens in every step.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kvx_core import PackedKVCache, UnsupportedError


def use_packed(model: Any) -> RemovableHandle:
    """Makes every block of a decoder keep its keys and values in a PackedKVCache.

    model: a PreTrainedModel of transformers. From now on, when it is called or generates, layers
           of its DynamicCache that hold every token are PackedLayers: appends copy the new tokens
           alone. Each has its cache as `kv_cache`: output.past_key_values.layers[i].kv_cache. A
           layer that holds tokens keeps them. Layers with a sliding window, states and caches of
           other kinds stay as they are
    The model computes the same.
    Returns a handle; handle.remove() ends it. Mutates the model, which gets a forward hook, and the
    DynamicCaches that it is called with.
    Raises UnsupportedError for what is no decoder of transformers, and for latent attention, whose
    keys and values differ in size.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        raise UnsupportedError(
            f"model is a {type(model).__name__}, expected a PreTrainedModel of transformers"
        )
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedError(
            f"model is a {type(model).__name__}, with an encoder or latent attention, expected a "
            "decoder whose keys and values are of one size"
        )
    signature = inspect.signature(model.forward)
    if "past_key_values" not in signature.parameters:
        raise UnsupportedError(
            f"{type(model).__name__}.forward takes no past_key_values, expected a decoder"
        )

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = signature.bind_partial(*args, **kwargs)
        given = call.arguments
        past = given.get("past_key_values")
        if past is not None:
            pack_layers(past)
            return args, kwargs
        wanted = given.get("use_cache", given.get("kwargs", {}).get("use_cache"))
        if wanted is None:
            wanted = getattr(config, "use_cache", True)
        if wanted:
            past = library.DynamicCache(config=model.config)
            pack_layers(past)
            given["past_key_values"] = past
        return call.args, call.kwargs

    handle: RemovableHandle = model.register_forward_pre_hook(before, with_kwargs=True)
    return handle


def pack_layers(past: Any) -> None:
    """Makes the DynamicLayers of a cache PackedLayers, with the tokens that they hold.

    past: a cache of transformers; one that offloads its layers stays as it is
    Source: transformers 5.19 cache_utils.py, Cache.update, layer_class_to_replicate
    """
    dynamic = sys.modules["transformers.cache_utils"].DynamicLayer
    if getattr(past, "offloading", True):
        return
    packed = packed_layer(dynamic)
    if past.layer_class_to_replicate is dynamic:
        past.layer_class_to_replicate = packed
    for i, layer in enumerate(past.layers):
        if type(layer) is dynamic:
            past.layers[i] = packed()
            if layer.get_seq_length():
                past.layers[i].update(layer.keys, layer.values)


@cache
def packed_layer(dynamic: Any) -> Any:
    """The class PackedLayer, a subclass of transformers' DynamicLayer."""

    class PackedLayer(dynamic):  # type: ignore[misc]
        """A layer of a transformers cache whose tokens are in `kv_cache`, a PackedKVCache.

        keys, values: (batch, num_kv_heads, num_tokens, head_dim), views of it; new views in every
                      forward pass
        Source: transformers 5.19 cache_utils.py, DynamicLayer
        """

        keys: Any
        values: Any

        def __init__(self) -> None:
            super().__init__()
            self.kv_cache = PackedKVCache()

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Appends tokens, (batch, num_kv_heads, new, head_dim); returns all, as views."""
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.kv_cache.append_packed(_packed(key_states), _packed(value_states))
            self._show(key_states.shape[1])
            return self.keys, self.values

        def crop(self, tokens_to_remove: int) -> None:
            held = self.get_seq_length()
            super().crop(tokens_to_remove)
            if held:
                heads = self.keys.shape[1]
                self.kv_cache.truncate(held - self.keys.shape[-2])
                self._show(heads)

        def reset(self) -> None:
            super().reset()
            self.kv_cache.clear()

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self._take()

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self._take()

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self._take()

        def _take(self) -> None:
            """Holds the tensors that transformers has made of its sequences."""
            if self.get_seq_length():
                heads = self.keys.shape[1]
                self.kv_cache.set_packed(_packed(self.keys), _packed(self.values))
                self._show(heads)

        def _show(self, heads: int) -> None:
            self.keys = _by_head(self.kv_cache.packed_keys(), heads)
            self.values = _by_head(self.kv_cache.packed_values(), heads)

    return PackedLayer


def _packed(states: Tensor) -> Tensor:
    """(batch, heads, tokens, head_dim) as (batch, tokens, heads * head_dim)."""
    return states.transpose(1, 2).flatten(2)


def _by_head(packed: Any, heads: int) -> Any:
    """The inverse of _packed: a view."""
    return packed.unflatten(2, (heads, -1)).transpose(1, 2)
