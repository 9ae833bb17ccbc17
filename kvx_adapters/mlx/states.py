"""ArraysCache: the states of recurrent layers, as planes of one entry per sequence.

Each step replaces the arrays, so a view is valid until the next one. A convolution is
[batch, kernel - 1, channels], oldest input first; the state of a gated delta net is [batch, head,
value, key], that of Mamba 2 [batch, head, head_dim, state].
Source: mlx-lm 0.32.2 models/cache.py, ArraysCache; qwen3_next.py, granitemoehybrid.py, lfm2.py, as
measured
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvx_adapters.mlx.cache import cache_view
from kvx_core import (
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Plane,
    StateFacts,
    UnsupportedError,
)
from kvx_core.argument_checks import int64s, integer
from kvx_core.desc.facts import first_layer_of
from kvx_core.model.recurrent import RecurrentState, recurrent_state

# Caches of tokens that lie in order, as many in each row.
_IN_ORDER = ("KVCache", "QuantizedKVCache")
_CONV = ("block", "time", "channel")
# The axes of the recurrent state, of the kinds that were run.
_STATE = {
    "gdn": ("block", "head", "value", "key"),
    "mamba2": ("block", "head", "head_dim", "state"),
    "short_conv": (),
}


def hybrid_view(
    cache: Sequence[Any],
    config: Any,
    facts: CacheFacts,
    *,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> CacheView:
    """Keys and values of the layers that have them, beside the states of the others.

    cache:  a prompt cache of KVCache and ArraysCache, or of CacheLists of both. Is evaluated
    config: the model's: model.args
    facts:  of the layers with keys and values, see `cache_facts`
    layers: of the model, one for each cache; None: 0, 1, ... Models whose layers without attention
            or state have no cache (Nemotron-H) need it
    rows:   of the batch, one for each sequence that a table names: view.at(block_table=[[row]])
            says where tokens are, and not where states are. None: all, in order
    The states stand for as many tokens as the keys and values: a KVCache that was trimmed by itself
    is not seen (mlx-lm trims no prompt cache with states). The view is valid until the next step.
    Raises UnsupportedError, InvalidArgumentError.
    """
    parts = list(_parts(cache, layers))
    attention = [(i, part) for i, part in parts if type(part).__name__ != "ArraysCache"]
    if not attention:
        raise InvalidArgumentError(
            "cache has no layer with keys and values, expected some. Use state_view"
        )
    for i, part in attention:
        if type(part).__name__ not in _IN_ORDER:
            raise UnsupportedError(
                f"cache[{i}] is a {type(part).__name__}, expected {' or '.join(_IN_ORDER)}: tokens "
                "of others are no run from the first on. Move them by span, and the states by "
                "state_view in a call of their own"
            )
    indices = [i for i, _ in attention]
    facts = replace(facts, num_layers=len(indices), first_layer=first_layer_of(indices))
    view = cache_view([part for _, part in attention], facts)
    tokens = int(attention[0][1].offset)
    states = state_view(cache, config, facts, num_tokens=tokens, layers=layers, rows=rows)
    return view.beside(states)


def state_view(
    cache: Sequence[Any],
    config: Any,
    facts: CacheFacts,
    *,
    num_tokens: int,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> CacheView:
    """The states of all recurrent layers, zero-copy: a dense view of planes, without K and V.

    cache:      a prompt cache; layers of other classes are left out. Is evaluated
    config:     the model's: model.args
    num_tokens: that the states stand for: of all rows
    layers, rows: as for `hybrid_view`
    To move K and V in the same call: cache_view(...).beside(state_view(...)), or `hybrid_view`.
    Raises UnsupportedError, InvalidArgumentError.
    """
    parts = _parts(cache, layers)
    found = [(i, part) for i, part in parts if type(part).__name__ == "ArraysCache"]
    sizes = recurrent_state(config)
    if sizes.kind not in _STATE:
        raise UnsupportedError(
            f"config is of a model with states of {sizes.kind}, expected one of "
            f"{', '.join(_STATE)}: of others it is not known which axis is which. Describe them "
            "with Plane.of_state"
        )
    planes = [plane for i, part in found for plane in _planes(i, part, sizes, rows)]
    if not planes:
        raise InvalidArgumentError("cache has no ArraysCache, expected recurrent layers")
    tokens = integer("num_tokens", num_tokens, 1)
    described = [(i, part, list(part.cache)) for i, part in found]
    return CacheView(
        (),
        facts,
        planes=tuple(planes),
        dense=True,
        outdated=partial(_outdated, described),
        state_tokens=tokens,
    )


def reserve_states(
    cache: Sequence[Any], config: Any, *, batch_size: int, dtype: str = "float32"
) -> None:
    """Makes zero states in an empty prompt cache, to migrate into.

    config: the model's: model.args
    dtype:  of convolutions and of Mamba 2's states, the model's as MLX calls it; states of gated
            delta nets are float32
    Mutates the recurrent layers of the cache; `reserve` makes room in the others.
    Raises InvalidArgumentError if a layer has states, UnsupportedError.
    """
    mx = sys.modules["mlx.core"]
    sizes = recurrent_state(config)
    if sizes.kind not in _STATE:
        raise UnsupportedError(
            f"config is of a model with states of {sizes.kind}, expected one of {', '.join(_STATE)}"
        )
    of_state = mx.float32 if sizes.kind == "gdn" else getattr(mx, dtype)
    channels = sum(width for _, width in sizes.conv)
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((sizes.num_columns, channels), getattr(mx, dtype))
    ]
    if sizes.state:
        at = dict(zip(sizes.state_facts().axes, sizes.state, strict=True))
        shape = tuple(at[axis] for axis in _STATE[sizes.kind][1:])
        shapes.append((shape, of_state))
    recurrent = [
        (i, part) for i, part in _parts(cache, None) if type(part).__name__ == "ArraysCache"
    ]
    for i, part in recurrent:
        if len(part.cache) != len(shapes) or any(one is not None for one in part.cache):
            raise InvalidArgumentError(
                f"cache[{i}] has {len(part.cache)} arrays or a state already, expected "
                f"{len(shapes)} that are None. Pass a new prompt cache"
            )
    for _, part in recurrent:
        part.cache = [mx.zeros((batch_size, *shape), of) for shape, of in shapes]
        mx.eval(part.cache)


def _parts(cache: Sequence[Any], layers: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
    """Each layer's caches, and the layer's index in the model."""
    indices = range(len(cache)) if layers is None else int64s("layers", layers)
    if len(indices) != len(cache) or len(set(indices)) != len(indices):
        raise InvalidArgumentError(
            f"layers is {list(indices)}, expected {len(cache)} different indices, one per cache"
        )
    for i, layer in zip(indices, cache, strict=True):
        if type(layer).__name__ == "CacheList":
            yield from ((i, part) for part in layer.caches)
        else:
            yield i, layer


def _planes(
    layer: int, part: Any, sizes: RecurrentState, rows: Sequence[int] | None
) -> Iterator[Plane]:
    if part.lengths is not None or part.left_padding is not None:
        raise UnsupportedError(
            f"cache[{layer}] has lengths or left_padding, expected None: its rows have padding, "
            "which states do not show. Take rows one by one: extract(row) after finalize()"
        )
    named: list[tuple[tuple[str, ...], StateFacts]] = [(_CONV, sizes.conv_facts())]
    if sizes.state:
        named.append((_STATE[sizes.kind], sizes.state_facts()))
    if len(part.cache) != len(named) or any(one is None for one in part.cache):
        raise InvalidArgumentError(
            f"cache[{layer}] has {len(part.cache)} arrays, of which some may be None, expected "
            f"{len(named)} with states. Call reserve_states(cache, ...) or run the model once"
        )
    mx = sys.modules["mlx.core"]
    mx.eval(part.cache)
    for j, (array, (axes, facts)) in enumerate(zip(part.cache, named, strict=True)):
        name = f"cache[{layer}][{j}]"
        yield Plane.of_state(array, axes, facts, layer, slots=rows, name=name)


def _outdated(described: Sequence[tuple[int, Any, list[Any]]]) -> str | None:
    for i, part, arrays in described:
        if any(now is not then for now, then in zip(part.cache, arrays, strict=False)):
            return (
                f"cache[{i}] has new states, expected those described: each step makes new ones. "
                "Call state_view again after it"
            )
    return None
