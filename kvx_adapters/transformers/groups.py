"""Models with sliding windows: layers that hold the same tokens, as one view for each group.

A layer with a window keeps its last tokens, in order, and forgets the others: window - 1 of them in
a DynamicCache, window in a StaticCache. So the first token of its tensors is not token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvx_adapters.transformers.cache import (
    SLIDING_LAYERS,
    cache_desc,
    layer_desc,
    layers_of,
    outdated,
)
from kvx_core import CacheDesc, CacheFacts, CacheSpan, CacheView, InvalidArgumentError

_STATIC = "StaticSlidingWindowLayer"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a cache that hold the same tokens.

    layers:      their indices in the model
    view:        of these layers, a block per sequence of the batch
    window:      in tokens; 0 for full attention
    first_token: position of the first token held, of sequences without padding
    num_tokens:  held
    """

    layers: tuple[int, ...]
    view: CacheView
    window: int
    first_token: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens of the sequence so far, those included that the window has left behind."""
        return self.first_token + self.num_tokens

    def span(self, first_token: int | None = None) -> CacheSpan:
        """The tokens from `first_token` on; None: all held. To be moved with the length
        `end` - first_token for each sequence.

        Raises InvalidArgumentError for tokens that are not held.
        """
        first = self.first_token if first_token is None else first_token
        if not self.first_token <= first <= self.end:
            raise InvalidArgumentError(
                f"first_token is {first}, expected {self.first_token} to {self.end}: the layers "
                f"{self.layers} hold no others"
            )
        starts = [first - self.first_token] * self.view.layers[0].num_blocks
        return self.view.at(starts=starts, first_positions=self.first_token)


def layer_groups(cache: Any, facts: CacheFacts) -> tuple[LayerGroup, ...]:
    """The layers of a DynamicCache or StaticCache by the tokens that they hold, zero-copy.

    cache: of a model with sliding windows, or without. A batch padded on the left has no tokens in
           common positions: move its sequences one by one
    facts: of the model, see `cache_facts`; each group has its own window and number of layers
    A view is valid until the next forward pass; migrate and verify then refuse it.
    Raises UnsupportedError, InvalidArgumentError.
    Source: transformers 5.19 cache_utils.py, DynamicSlidingWindowLayer, StaticSlidingWindowLayer
    """
    found: dict[tuple[int, int, int], list[tuple[int, CacheDesc]]] = {}
    for i, layer in enumerate(layers_of(cache)):
        sliding = type(layer).__name__ in SLIDING_LAYERS
        desc = layer_desc(layer) if sliding else cache_desc(layer)
        found.setdefault((_window(layer), *_held(layer, desc)), []).append((i, desc))
    return tuple(_group(cache, facts, *key, members) for key, members in sorted(found.items()))


def shared_spans(src: LayerGroup, dst: LayerGroup) -> tuple[CacheSpan, CacheSpan, list[int]]:
    """The tokens that both groups hold: both ends of a migration and its lengths.

    src, dst: of caches that hold sequences of the same length
    Raises InvalidArgumentError for sequences of different lengths.
    """
    if src.end != dst.end:
        raise InvalidArgumentError(
            f"dst holds a sequence of {dst.end} tokens, expected {src.end} as src: reserve(cache, "
            f"model, num_tokens={src.end}, ...)"
        )
    first = max(src.first_token, dst.first_token)
    count = [src.end - first] * src.view.layers[0].num_blocks
    return src.span(first), dst.span(first), count


def _window(layer: Any) -> int:
    kind = type(layer).__name__
    if kind not in SLIDING_LAYERS:
        return 0
    # A static layer is as long as its window, or as the cache if that is shorter.
    return int(layer.max_cache_len if kind == _STATIC else layer.sliding_window)


def _held(layer: Any, desc: CacheDesc) -> tuple[int, int]:
    """Position of the first token in the tensors of a layer, and how many it holds."""
    kind, room = type(layer).__name__, desc.block_size
    total = int(layer.cumulative_length_int if kind == _STATIC else layer.get_seq_length())
    return max(total - room, 0), min(total, room)


def _group(
    cache: Any,
    facts: CacheFacts,
    window: int,
    first: int,
    count: int,
    members: Sequence[tuple[int, CacheDesc]],
) -> LayerGroup:
    layers, described = zip(*members, strict=True)
    are_adjacent = layers == tuple(range(layers[0], layers[0] + len(layers)))
    own = replace(
        facts,
        num_layers=len(layers),
        first_layer=layers[0] if are_adjacent else None,
        window=window,
    )

    def moved_on() -> str | None:
        parts = [cache.layers[i] for i in layers]
        for part, desc in zip(parts, described, strict=True):
            if _held(part, desc) != (first, count) and type(part).__name__ == _STATIC:
                return (
                    "a StaticCache with windows has gone on, which moves its tokens, expected "
                    "those described. Call layer_groups again"
                )
        return outdated(parts, described)

    view = CacheView(described, own, dense=True, outdated=moved_on)
    return LayerGroup(layers, view, window, first, count)
