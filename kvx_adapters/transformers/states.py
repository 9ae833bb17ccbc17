"""Recurrent layers of a DynamicCache or StaticCache: states as planes of one entry per sequence.

A layer's convolution is a tensor (batch, channels, kernel): the last kernel - 1 inputs, oldest
first, behind a column that nothing reads. Its recurrent state is (batch, head, key, value), (batch,
head, head_dim, state) or (batch, channel, state), float32. Both are changed in place, step by step.
Source: transformers 5.19 cache_utils.py, LinearAttentionLayer; the models' modeling files
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvx_adapters.transformers.cache import (
    LAYERS,
    layer_desc,
    layers_of,
    num_held,
    outdated,
)
from kvx_core import CacheFacts, CacheView, InvalidArgumentError, Plane, UnsupportedError
from kvx_core.argument_checks import integer
from kvx_core.desc.facts import first_layer_of
from kvx_core.model.recurrent import RecurrentState, has_recurrent_state, recurrent_state

# Layers of a model that keep a state, by their names in its configuration.
# Source: transformers 5.19 cache_utils.py, DYNAMIC_LAYER_TYPE_MAPPING
_KINDS = ("conv", "linear_attention", "hybrid")
# Layers with a state, and layers with both a state and the keys and values of every token.
STATES = ("LinearAttentionLayer",)
WITH_BOTH = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer")


def hybrid_view(
    cache: Any, model: Any, facts: CacheFacts, *, rows: Sequence[int] | None = None
) -> CacheView:
    """Keys and values of the layers that have them, beside the states of the recurrent ones.

    cache: a DynamicCache or StaticCache of a hybrid model that has run, or see `reserve`
    model: says what a state is made of
    facts: see `cache_facts`; the view's say which layers have keys and values
    rows:  of the batch, one for each sequence that a table names: view.at(block_table=[[row]]) says
           where tokens are, and not where states are. None: all, in order
    The states stand for as many tokens as the keys and values, padding on the left left out
    (`padded_span`). The view is valid until the next forward pass.
    Raises UnsupportedError, InvalidArgumentError.
    """
    layers = list(enumerate(layers_of(cache)))
    _require_kinds(layers)
    attention = [(i, layer) for i, layer in layers if type(layer).__name__ not in STATES]
    if not attention:
        raise InvalidArgumentError(
            "cache has no layer with keys and values, expected some. Use state_view"
        )
    indices, parts = zip(*attention, strict=True)
    described, held = tuple(map(layer_desc, parts)), partial(num_held, parts)
    view = CacheView(
        described,
        replace(facts, num_layers=len(indices), first_layer=first_layer_of(indices)),
        dense=True,
        outdated=partial(outdated, parts, described, indices),
        holds=held,
    )
    return view.beside(state_view(cache, model, view.facts, num_tokens=held, rows=rows))


def state_view(
    cache: Any,
    model: Any,
    facts: CacheFacts,
    *,
    num_tokens: int | Callable[[], int],
    rows: Sequence[int] | None = None,
) -> CacheView:
    """The states of the recurrent layers, zero-copy: a dense view of planes, without K and V.

    cache:      a DynamicCache or StaticCache; layers without a state are left out
    model:      says what a state is made of
    num_tokens: that the states stand for: of all rows. Steps change states in place, and a cache
                without keys does not count: a number is that of this moment, make a new view after
                a step; a function is asked before each use
    rows:       as for `hybrid_view`
    Raises UnsupportedError, InvalidArgumentError.
    """
    layers = list(enumerate(layers_of(cache)))
    _require_kinds(layers)
    recurrent = recurrent_layers(model)
    found = [(i, layer) for i, layer in layers if i in recurrent]
    sizes = recurrent_state(_config(model))
    planes = [plane for i, layer in found for plane in _planes(i, layer, sizes, rows)]
    if not planes:
        raise InvalidArgumentError("cache has no recurrent layers, expected some")
    parts = [layer for _, layer in found]
    return CacheView(
        (),
        facts,
        planes=tuple(planes),
        dense=True,
        outdated=partial(_outdated, parts, [_tensors(part) for part in parts]),
        state_tokens=num_tokens if callable(num_tokens) else integer("num_tokens", num_tokens, 1),
    )


def recurrent_layers(model: Any) -> list[int]:
    """The layers of a model that keep a state. Raises UnsupportedError if it is not known."""
    config = _config(model)
    kinds = getattr(config, "layer_types", None) or ()
    found = [i for i, kind in enumerate(kinds) if kind in _KINDS]
    if found and not has_recurrent_state(config):
        raise UnsupportedError(
            f"{type(model).__name__} keeps states in the layers {found}, and what they are is not "
            "known. Run the prompt in this model"
        )
    return found


def reserve_states(layers: Sequence[tuple[int, Any]], model: Any, batch_size: int) -> None:
    """Makes zero states in recurrent layers that have none.

    layers: index and layer; none of a model whose states are not known
    """
    if not layers:
        return
    sizes = recurrent_state(_config(model))
    channels = sum(width for _, width in sizes.conv)
    of_conv = (batch_size, channels, sizes.num_columns + 1)
    for _, layer in layers:
        where: Any = {"device": model.device}
        if sizes.num_columns:
            layer.update_conv_state(torch.zeros(of_conv, dtype=model.dtype, **where))
        if sizes.state:
            shape = (batch_size, *sizes.state)
            layer.update_recurrent_state(torch.zeros(shape, dtype=torch.float32, **where))


def _config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _require_kinds(layers: Sequence[tuple[int, Any]]) -> None:
    """Raises UnsupportedError for layers that are none of those here."""
    for i, layer in layers:
        kind = type(layer).__name__
        if kind not in (*LAYERS, *STATES, *WITH_BOTH):
            raise UnsupportedError(
                f"cache.layers[{i}] is a {kind}, expected one of "
                f"{', '.join((*LAYERS, *STATES, *WITH_BOTH))}: others hold other tokens or states"
            )


def _planes(
    index: int, layer: Any, sizes: RecurrentState, rows: Sequence[int] | None
) -> Iterator[Plane]:
    name = f"cache.layers[{index}]"
    if layer.number_of_states != 1:
        raise UnsupportedError(
            f"{name} has {layer.number_of_states} states, expected one: which of them is which is "
            "not known"
        )
    if layer.record_past:
        raise UnsupportedError(
            f"{name}.record_past is True, expected False: it keeps inputs of drafts that may be "
            "rejected. Move between generations without an assistant model"
        )
    conv, state = _tensors(layer)
    if (conv is None) is (sizes.num_columns > 0) or (state is None) is (len(sizes.state) > 0):
        raise InvalidArgumentError(
            f"{name} has no states yet, expected them. Call reserve(cache, model, ...) or run the "
            "model once"
        )
    if conv is not None:
        facts = sizes.conv_facts(first_column=1)
        yield Plane.of_state(
            conv,
            ("block", "channel", "time"),
            facts,
            index,
            slots=rows,
            name=f"{name}.conv_states[0]",
        )
    if state is not None:
        of_state = sizes.state_facts()
        yield Plane.of_state(
            state,
            ("block", *of_state.axes),
            of_state,
            index,
            slots=rows,
            name=f"{name}.recurrent_states[0]",
        )


def _tensors(layer: Any) -> tuple[Any, Any]:
    return layer.conv_states.get(0), layer.recurrent_states.get(0)


def _outdated(layers: Sequence[Any], described: Sequence[tuple[Any, Any]]) -> str | None:
    for layer, tensors in zip(layers, described, strict=True):
        if any(now is not then for now, then in zip(_tensors(layer), tensors, strict=True)):
            return (
                "the cache has its states in new tensors, expected those described, as after a "
                "reordering. Describe it again"
            )
    return None
