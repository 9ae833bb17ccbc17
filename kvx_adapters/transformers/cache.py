"""DynamicCache and StaticCache as KVX views.

A layer's keys and values are two tensors (batch, num_kv_heads, num_tokens, head_dim), K stored
after the rotation. That is a paged cache with one block per sequence: num_blocks is the batch,
block_size the number of tokens, and a batch padded on the left starts each sequence inside its
block. Sliding-window layers hold other tokens: see groups.py; recurrent layers hold states:
states.py. Quantised layers are refused.

DynamicCache makes new tensors in every forward pass, so a view is valid until the next one: after
that migrate and verify refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Layout,
    SeqLens,
    SlotMapping,
    UnsupportedError,
    describe,
)

# Layers that hold the keys and values of every token of the sequence, in order, as computed.
# Source: transformers 5.19 cache_utils.py
LAYERS = ("DynamicLayer", "StaticLayer", "PackedLayer")
# Layers that hold the last tokens only.
SLIDING_LAYERS = ("DynamicSlidingWindowLayer", "StaticSlidingWindowLayer")


def cache_desc(layer: Any) -> CacheDesc:
    """One layer of a transformers cache, zero-copy: each sequence of the batch is a block.

    layer: cache.layers[i], a DynamicLayer or StaticLayer that holds tokens (see `reserve`)
    A DynamicLayer replaces its tensors in every forward pass: describe it again after each.
    Raises UnsupportedError, InvalidArgumentError.
    Source: transformers 5.19 cache_utils.py, DynamicLayer.update, StaticLayer.update
    """
    require_kind(layer, LAYERS)
    return layer_desc(layer)


def require_kind(layer: Any, kinds: Sequence[str]) -> None:
    """Raises UnsupportedError if the layer is of none of these classes."""
    kind = type(layer).__name__
    if kind not in kinds:
        raise UnsupportedError(
            f"layer is a {kind}, expected {' or '.join(kinds)}: {_way_out(layer)}"
        )


def _way_out(layer: Any) -> str:
    kinds = {found.__name__ for found in type(layer).__mro__}
    if "QuantizedLayer" in kinds:
        return (
            "its tokens are quantized by a library of their own (quanto, HQQ), and the last ones "
            "are not yet. Run the prompt with a DynamicCache, and quantize after the migration"
        )
    if type(layer).__name__ in SLIDING_LAYERS:
        return "it holds the last tokens of a sequence only. Call layer_groups"
    if "LinearAttentionCacheLayerMixin" in kinds:
        return "it holds a state of the whole sequence. Call hybrid_view"
    return "others do not hold each token's keys and values at its own place"


def layer_desc(layer: Any) -> CacheDesc:
    """The tensors of a layer, whatever tokens they hold. Raises InvalidArgumentError."""
    if layer.keys is None or layer.keys.ndim != 4:
        raise InvalidArgumentError(
            "layer.keys is empty, expected (batch, num_kv_heads, num_tokens, head_dim). Call "
            "reserve(cache, model, ...) or run the model once"
        )
    return CacheDesc.from_kv(
        describe(layer.keys, Layout.BLOCK_HND), describe(layer.values, Layout.BLOCK_HND)
    )


def slot_mapping(attention_mask: Tensor) -> SlotMapping:
    """The slot of each real token of a padded batch, the sequences one after the other.

    attention_mask: (batch, num_tokens) as the cache is, 1 for tokens and 0 for padding
    """
    return SlotMapping.of(attention_mask.flatten().nonzero().flatten())


def block_table(rows: Sequence[int]) -> BlockTable:
    """A table in which the block of each sequence is its row in the batch."""
    return BlockTable.packed([[row] for row in rows])


def seq_lens(attention_mask: Tensor) -> SeqLens:
    """Real tokens of each sequence of a padded batch.

    attention_mask: (batch, num_tokens), 1 for tokens and 0 for padding on one side or both
    Raises InvalidArgumentError if the tokens of a sequence are not in one piece.
    """
    return SeqLens.of(_run_of_ones(attention_mask)[1])


def starts(attention_mask: Tensor) -> SeqLens:
    """First real token of each sequence of a padded batch: `starts` of CacheView.at.

    It stands at position 0: `padded_span` gives both.
    attention_mask: as in `seq_lens`
    Raises InvalidArgumentError if the tokens of a sequence are not in one piece.
    """
    return SeqLens.of(_run_of_ones(attention_mask)[0])


def padded_span(view: CacheView, attention_mask: Tensor) -> tuple[CacheSpan, SeqLens]:
    """The real tokens of a padded batch: one end of a migration, and the lengths to move.

    view:           of a DynamicCache or StaticCache, see `cache_view`. It cannot tell padding from
                    tokens: a view without a mask has rows that begin at their padding
    attention_mask: (batch, num_tokens) as in the last forward pass, so of all tokens in the cache;
                    1 for tokens and 0 for padding on one side or both
    Raises InvalidArgumentError for a mask of another batch or length, and for a sequence whose
    tokens are not in one piece.
    """
    layer = view.layers[0]
    shape = tuple(attention_mask.shape)
    held = layer.block_size if view.holds is None else view.holds()
    if shape != (layer.num_blocks, held) or not held:
        raise InvalidArgumentError(
            f"attention_mask has the shape {shape}, expected {(layer.num_blocks, held)}: a row for "
            "each sequence of the cache, a column for each token that it holds. Pass that of the "
            "last forward pass"
        )
    first, lens = starts(attention_mask), seq_lens(attention_mask)
    if view.state_tokens is not None:  # a state has no padding
        view = replace(view, state_tokens=lens.to_numpy().tolist())
    return view.at(starts=first, first_positions=-first.to_numpy()), lens


def cache_view(cache: Any, facts: CacheFacts) -> CacheView:
    """All layers of a DynamicCache or StaticCache, zero-copy.

    cache: described as it is now. The next forward pass of a DynamicCache makes new tensors, as a
           crop or a reordering does; migrate and verify then refuse the view
    facts: see `cache_facts`
    Raises UnsupportedError, InvalidArgumentError.
    """
    layers = layers_of(cache)
    described = tuple(map(cache_desc, layers))
    return CacheView(
        described,
        facts,
        dense=True,
        outdated=partial(outdated, layers, described),
        holds=partial(num_held, layers),
    )


def num_held(layers: Sequence[Any]) -> int:
    """The tokens of each sequence that every one of these layers holds, as they count them.

    After generate() a StaticCache holds one token less than there are ids. Waits for the device of
    a StaticCache, which counts there.
    """
    counts = [layer.get_seq_length() for layer in layers]
    on_device = [count for count in counts if isinstance(count, Tensor)]
    counts = [count for count in counts if not isinstance(count, Tensor)]
    if on_device:
        counts.append(int(torch.stack(on_device).min()))
    return min(map(int, counts))


def layers_of(cache: Any) -> Sequence[Any]:
    """The layers of a Cache. Raises UnsupportedError for what is none and for one that offloads its
    layers, InvalidArgumentError for one that has no layers yet.

    Source: transformers 5.19 cache_utils.py, Cache, EncoderDecoderCache
    """
    layers: Sequence[Any] | None = getattr(cache, "layers", None)
    if layers is None:
        raise UnsupportedError(
            f"cache is a {type(cache).__name__}, expected a DynamicCache or StaticCache. Of an "
            "EncoderDecoderCache pass self_attention_cache, and cross_attention_cache apart"
        )
    if getattr(cache, "offloading", False):
        raise UnsupportedError(
            "cache.offloading is True, expected False: its layers move to the host and back beside "
            "the model's work, and no call says when a copy is complete. Make it without"
        )
    if not layers:
        raise InvalidArgumentError(
            "cache has no layers, expected those of the model. Make it with config=model.config "
            "and call reserve(cache, model, ...), or run the model once"
        )
    return layers


def outdated(
    layers: Sequence[Any], described: Sequence[CacheDesc], indices: Sequence[int] | None = None
) -> str | None:
    """Why the tensors of layers are no longer the described ones; None if they are.

    indices: of the layers in the cache; None: 0, 1, ...
    """
    numbers = range(len(layers)) if indices is None else indices
    for i, layer, desc in zip(numbers, layers, described, strict=False):
        if layer.keys is not desc.k.owner or desc.v is None or layer.values is not desc.v.owner:
            return (
                f"cache.layers[{i}] has new tensors, expected those described. A DynamicCache "
                "replaces them in every forward pass: call cache_view again after it"
            )
    return None


def _run_of_ones(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First one and number of ones of each sequence: two (batch,) of int64."""
    mask = attention_mask != 0
    num_tokens = mask.shape[1]
    position = torch.arange(num_tokens, device=mask.device)
    first = position.where(mask, num_tokens).amin(1)
    last = position.where(mask, -1).amax(1)
    count = mask.sum(1)
    torn = ((count > 0) & (last - first + 1 != count)).nonzero().flatten()
    if torn.numel():
        row = int(torn[0])
        raise InvalidArgumentError(
            f"attention_mask[{row}] has {int(count[row])} ones between {int(first[row])} and "
            f"{int(last[row])}, expected them in one piece. Use slot_mapping"
        )
    return first.where(count > 0, 0), count
