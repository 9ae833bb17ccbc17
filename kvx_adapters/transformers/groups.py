"""Models with sliding windows: layers that hold the same tokens, as one view for each group.

A layer with a window keeps its last tokens, in order, and forgets the others: window - 1 of them in
a DynamicCache, window in a StaticCache. So the first token of its tensors is not token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvx_adapters.transformers.cache import (
    LAYERS,
    SLIDING_LAYERS,
    layer_desc,
    layers_of,
    num_held,
    outdated,
    require_kind,
)
from kvx_adapters.transformers.facts import facts_of_layers
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Layout,
    Section,
    TensorDesc,
    describe,
)
from kvx_core.desc.facts import first_layer_of

_STATIC = "StaticSlidingWindowLayer"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a cache that hold the same tokens.

    layers:      their indices in the model
    view:        of these layers, a block per sequence of the batch; where the first token is not
                 token 0, `span` and `section` say which tokens these are
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
        view = self.view if self.view.dense else replace(self.view, dense=True)
        return view.at(starts=starts, first_positions=self.first_token)

    def section(self, row: int = 0) -> Section:
        """A sequence of the batch for snapshots, by positions: tokens that a window has left are
        null. Another cache may hold more or fewer: restore from the later of both first tokens on.

        Raises InvalidArgumentError if there is no such row.
        """
        view, rows = self.view, self.view.layers[0].num_blocks
        if not 0 <= row < rows:
            raise InvalidArgumentError(f"row is {row}, expected 0 to {rows - 1}")
        table = [[row]]
        if self.first_token:
            view = replace(view, layers=tuple(_by_token(c, row) for c in view.layers), dense=False)
            table = [[-1] * self.first_token + list(range(self.num_tokens))]
        return Section(self.layers, view, BlockTable.packed(table))


def layer_groups(cache: Any, facts: CacheFacts, model: Any = None) -> tuple[LayerGroup, ...]:
    """The layers of a DynamicCache or StaticCache, those together that hold the same, zero-copy.

    cache: of a model with sliding windows, or without. A batch padded on the left has no tokens in
           common positions: move its sequences one by one
    facts: of the model, see `cache_facts`; each group has its own window and number of layers
    model: says what each layer keeps, where that is not in the cache: heads and rotations that
           differ, and the windows of a DynamicCache() without config, which keeps all tokens
    Groups of all tokens come first. A view is valid until the next forward pass; migrate and verify
    then refuse it.
    Raises UnsupportedError, InvalidArgumentError.
    Source: transformers 5.19 cache_utils.py, DynamicSlidingWindowLayer, StaticSlidingWindowLayer
    """
    layers = layers_of(cache)
    own = {} if model is None else facts_of_layers(model, facts)
    found: dict[tuple[Any, ...], tuple[CacheFacts, list[tuple[int, CacheDesc]]]] = {}
    for i, layer in enumerate(layers):
        require_kind(layer, (*LAYERS, *SLIDING_LAYERS))
        if model is not None and i not in own:
            raise InvalidArgumentError(
                f"cache.layers[{i}] has keys and values, expected them in the layers {sorted(own)} "
                f"of {type(model).__name__}. Give its own model"
            )
        desc = layer_desc(layer)
        of_layer = own.get(i) or replace(facts, window=_window(layers, i, facts.window))
        held = _held(layer, desc)
        _require_window(i, layer, *held)
        sizes = desc.num_kv_heads, desc.head_dim, desc.v_head_dim
        found.setdefault((*held, of_layer, *sizes), (of_layer, []))[1].append((i, desc))
    groups = [
        _group(cache, part, (first, count), members)
        for (first, count, *_), (part, members) in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (group.window, group.layers)))


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


def _by_token(cache: CacheDesc, row: int) -> CacheDesc:
    """A sequence of a layer with a block for each token: (row, head, token, dim) becomes
    (token, 1, head, dim).
    """

    def blocks(tensor: TensorDesc) -> TensorDesc:
        owner: Any = tensor.owner
        return describe(owner[row].transpose(0, 1)[:, None], Layout.BLOCK_NHD)

    tensors = {name: blocks(tensor) for name, tensor in cache.tensors.items()}
    return CacheDesc.from_kv(tensors["k"], tensors.get("v"))


def _window(layers: Sequence[Any], i: int, of_all: int | None) -> int:
    """The window of a layer.

    of_all: of all layers of the model; None: they differ, or it is not known
    """
    layer, kind = layers[i], type(layers[i]).__name__
    if of_all is not None:
        return of_all
    if kind in SLIDING_LAYERS:
        # A static layer is as long as its window, or as the cache if that is shorter.
        return int(layer.max_cache_len if kind == _STATIC else layer.sliding_window)
    if not any(type(other).__name__ in SLIDING_LAYERS for other in layers):
        raise InvalidArgumentError(
            "facts.window is None and all layers of the cache hold all tokens, expected to know "
            "which layers have windows. Call layer_groups(cache, facts, model)"
        )
    return 0


def _held(layer: Any, desc: CacheDesc) -> tuple[int, int]:
    """Position of the first token in the tensors of a layer, and how many it holds."""
    total, room = int(layer.get_seq_length()), desc.block_size
    return max(total - room, 0), min(total, room)


def _require_window(i: int, layer: Any, first: int, count: int) -> None:
    """Raises InvalidArgumentError if layer i has dropped tokens that its window still reaches.

    Each crop takes tokens from both ends of a window that has been full.
    """
    if type(layer).__name__ != "DynamicSlidingWindowLayer":
        return
    needed = min(first + count, layer.sliding_window - 1)
    if count < needed:
        raise InvalidArgumentError(
            f"cache.layers[{i}] holds the last {count} of {first + count} tokens, expected "
            f"{needed} as its attention reads them: crops have dropped the others. Run the "
            "sequence anew"
        )


def _group(
    cache: Any,
    facts: CacheFacts,
    held: tuple[int, int],
    members: Sequence[tuple[int, CacheDesc]],
) -> LayerGroup:
    layers, described = zip(*members, strict=True)
    own = replace(
        facts,
        num_layers=len(layers),
        first_layer=first_layer_of(layers),
    )
    parts = [cache.layers[i] for i in layers]

    def moved_on() -> str | None:
        for part, desc in zip(parts, described, strict=True):
            if type(part).__name__ == _STATIC and _held(part, desc) != held:
                return (
                    "a StaticCache with windows has gone on, which moves its tokens, expected "
                    "those described. Call layer_groups again"
                )
        return outdated(parts, described)

    # A layer that has left tokens behind is full, so that its count is beyond its room.
    holds = partial(num_held, parts)
    first, _ = held  # unless it is 0, token 0 of the view is another one of the sequence
    view = CacheView(described, own, dense=not first, outdated=moved_on, holds=holds)
    return LayerGroup(layers, view, facts.window or 0, *held)
