"""DynamicCache and StaticCache as KVX views, their facts, and the record of their model.

A layer's keys and values are two tensors (batch, num_kv_heads, num_tokens, head_dim), K stored
after the rotation. That is a paged cache with one block per sequence: num_blocks is the batch,
block_size the number of tokens, and a batch padded on the left starts each sequence inside its
block. Sliding-window layers hold other tokens: see groups.py. Quantised and linear-attention layers
hold other data and are refused.

DynamicCache makes new tensors in every forward pass, so a view is valid until the next one: after
that migrate and verify refuse it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheGeometry,
    CacheSpan,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ModelRecord,
    SeqLens,
    SlotMapping,
    UnsupportedError,
    describe,
    model_files_digest,
)
from kvx_core.config_values import as_json
from kvx_core.model_record import without_rope
from kvx_core.rope import Rope, as_applied, standard_rope

# Layers that hold the keys and values of every token of the sequence, in order, as computed.
# Source: transformers 5.19 cache_utils.py
_LAYERS = ("DynamicLayer", "StaticLayer")
# Layers that hold the last tokens only.
SLIDING_LAYERS = ("DynamicSlidingWindowLayer", "StaticSlidingWindowLayer")
# Fields of a loaded config that change how the model is called, not what it computes.
_CALLING = (
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "eos_token_id",
    "experts_implementation",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "quantization_config",
    "return_dict",
    "use_cache",
)


def cache_desc(layer: Any) -> CacheDesc:
    """One layer of a transformers cache, zero-copy: each sequence of the batch is a block.

    layer: cache.layers[i], a DynamicLayer or StaticLayer that holds tokens (see `reserve`)
    A DynamicLayer replaces its tensors in every forward pass: describe it again after each.
    Raises UnsupportedError, InvalidArgumentError.
    Source: transformers 5.19 cache_utils.py, DynamicLayer.update, StaticLayer.update
    """
    kind = type(layer).__name__
    if kind not in _LAYERS:
        raise UnsupportedError(
            f"layer is a {kind}, expected {' or '.join(_LAYERS)}: {_way_out(layer)}"
        )
    return layer_desc(layer)


def _way_out(layer: Any) -> str:
    kinds = {found.__name__ for found in type(layer).__mro__}
    if "QuantizedLayer" in kinds:
        return (
            "its tokens are quantized by a library of their own (quanto, HQQ), and the last ones "
            "are not yet. Run the prompt with a DynamicCache, and quantize after the migration"
        )
    if type(layer).__name__ in SLIDING_LAYERS:
        return "it holds the last tokens of a sequence only. Call layer_groups"
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
    if len(shape) != 2 or shape[0] != layer.num_blocks or shape[1] > layer.block_size:
        raise InvalidArgumentError(
            f"attention_mask has the shape {shape}, expected ({layer.num_blocks}, at most "
            f"{layer.block_size}): a row for each sequence of the cache, a column for each token"
        )
    first = starts(attention_mask)
    span = view.at(starts=first, first_positions=-first.to_numpy())
    return span, seq_lens(attention_mask)


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
    """The layers of a Cache. Raises UnsupportedError for what is none, InvalidArgumentError for one
    that has no layers yet.

    Source: transformers 5.19 cache_utils.py, Cache, EncoderDecoderCache
    """
    layers: Sequence[Any] | None = getattr(cache, "layers", None)
    if layers is None:
        raise UnsupportedError(
            f"cache is a {type(cache).__name__}, expected a DynamicCache or StaticCache. Of an "
            "EncoderDecoderCache pass self_attention_cache, and cross_attention_cache apart"
        )
    if not layers:
        raise InvalidArgumentError(
            "cache has no layers, expected those of the model. Make it with config=model.config "
            "and call reserve(cache, model, ...), or run the model once"
        )
    return layers


def outdated(layers: Sequence[Any], described: Sequence[CacheDesc]) -> str | None:
    """Why the tensors of layers are no longer the described ones; None if they are."""
    for i, (layer, desc) in enumerate(zip(layers, described, strict=False)):
        if layer.keys is not desc.k.owner or desc.v is None or layer.values is not desc.v.owner:
            return (
                f"cache.layers[{i}] has new tensors, expected those described. A DynamicCache "
                "replaces them in every forward pass: call cache_view again after it"
            )
    return None


def cache_facts(model: Any, *, fingerprint: str | None = None) -> CacheFacts:
    """The facts of a transformers model's cache; None where they are not known.

    model:       a PreTrainedModel with a decoder, on one device. Its rotary embedding is run once
    fingerprint: of the model as it is computed, see `model_record`
    """
    config = model.config.get_text_config(decoder=True)
    rotary, rotary_dim = _rotary(model)
    return CacheFacts(
        engine=f"transformers {sys.modules['transformers'].__version__}",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=rotary_dim,
        rope_applied=None if rotary is None else True,
        hadamard=False,
        scale_convention="multiply",  # there are no scales
        num_layers=config.num_hidden_layers,
        first_layer=0,
        window=_window(config),
        total_kv_heads=_num_kv_heads(config),
        first_kv_head=0,
        compute_dtype=_dtype(model),
        negative_slots="wrap",  # -1 indexes the last token
    )


def model_record(
    model: Any,
    directory: Path | str,
    *,
    files: str | None = None,
    num_tokens: int | None = None,
) -> ModelRecord:
    """The ModelRecord of a model loaded from a directory, with the config that it has now.

    model:      a PreTrainedModel whose weights are those of the files
    directory:  the model's files
    files:      the caller's own name for them; None: model_files_digest(directory)
    num_tokens: of the longest sequence, computed in one forward pass. Needed for rotary types that
                depend on it: longrope, dynamic
    Raises UnsupportedError for changes that files and config do not show, such as adapters;
    InvalidArgumentError.
    """
    if getattr(model, "peft_config", None):
        raise UnsupportedError(
            f"model has the adapters {sorted(model.peft_config)}, expected none: keys and values "
            "depend on them. Merge them, save the model and load it from there"
        )
    saved = type(model.config).from_pretrained(directory)
    text = model.config.get_text_config(decoder=True)
    overrides = dict(_changes(saved, model.config))
    if text.model_type.startswith("llama4"):
        overrides["attn_temperature_tuning"] = bool(text.attn_temperature_tuning)
    return ModelRecord(
        files=model_files_digest(directory) if files is None else files,
        architecture=text.model_type,
        rope=_rope(model, text, num_tokens),
        quantization=_quantization(saved, model.config),
        overrides=overrides,
    )


def geometry(model: Any, *, batch_size: int, num_tokens: int) -> CacheGeometry:
    """Sizes of a cache for `model` that holds `num_tokens` tokens of `batch_size` sequences.

    Raises InvalidArgumentError naming the wrong number, UnsupportedError for latent attention.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedError(
            f"model is a {type(model).__name__} with latent attention (config.kv_lora_rank), whose "
            "keys and values have sizes of their own. Run it once instead, to make its cache"
        )
    head_dim = getattr(config, "head_dim", None)
    return CacheGeometry(
        num_layers=config.num_hidden_layers,
        num_blocks=batch_size,
        block_size=num_tokens,
        num_kv_heads=_num_kv_heads(config),
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        dtype=model.dtype,
    )


def reserve(cache: Any, model: Any, *, batch_size: int, num_tokens: int) -> None:
    """Makes an empty cache hold `num_tokens` zero tokens per sequence, to migrate into.

    cache: an empty DynamicCache(config=model.config), or a StaticCache of at least that length
    Mutates the cache: its keys and values are then (batch_size, num_kv_heads, num_tokens,
    head_dim), zero, since attention multiplies padding by 0 and the padding must be finite.
    Raises InvalidArgumentError if the cache is not empty or a size is wrong, UnsupportedError.
    """
    if cache.get_seq_length() != 0:
        raise InvalidArgumentError(
            f"cache holds {int(cache.get_seq_length())} tokens, expected none. Pass a new one"
        )
    sizes = geometry(model, batch_size=batch_size, num_tokens=num_tokens)
    # update() copies what it is given, so one zero stands for all of them.
    zeros = torch.zeros((), dtype=model.dtype, device=model.device).expand(
        sizes.k_shape(Layout.BLOCK_HND)
    )
    for layer_idx in range(sizes.num_layers):
        cache.update(zeros, zeros, layer_idx)


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


def _dtype(model: Any) -> DType | None:
    try:
        return DType.from_name(str(getattr(model, "dtype", None)))
    except InvalidArgumentError:
        return None


def _changes(saved: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """The fields in which a config differs from its file."""
    before, now = (without_rope(found.to_dict()) for found in (saved, config))
    for key in sorted(before.keys() | now.keys()):
        if key not in _CALLING and before.get(key) != now.get(key):
            yield key, as_json(now.get(key))


def _quantization(saved: Any, config: Any) -> dict[str, Any] | None:
    """Quantisation done while loading; None if the files say what is quantised."""
    before, now = (
        found if isinstance(found, Mapping) else found.to_dict()
        for found in (getattr(c, "quantization_config", None) or {} for c in (saved, config))
    )
    if not now or str(before.get("quant_method")) == str(now.get("quant_method")):
        return None
    return {
        "engine": f"transformers {sys.modules['transformers'].__version__}",
        "config": as_json(now),
    }


def _rope(model: Any, config: Any, num_tokens: int | None) -> Rope:
    """The rotary parameters as applied. Raises UnsupportedError, InvalidArgumentError.

    Source: transformers 5.19 modeling_rope_utils.py, dynamic_rope_update
    """
    found = standard_rope(config.to_dict())
    kinds = {parameters["rope_type"] for parameters in found.values()}
    length = getattr(config, "max_position_embeddings", None)
    if kinds & {"longrope", "dynamic"} and num_tokens is None:
        raise InvalidArgumentError(
            f"num_tokens is None and the rotary embedding is of type {', '.join(sorted(kinds))}, "
            "expected the length of the longest sequence: its angles depend on it"
        )
    if "dynamic" in kinds and length is not None and (num_tokens or 0) > length:
        raise UnsupportedError(
            f"num_tokens is {num_tokens}, expected at most max_position_embeddings, {length}: "
            "beyond it the angles of a dynamic rotary embedding depend on the sequence's length"
        )
    for name, part in model.named_modules():
        if name.endswith("rotary_emb") and not _is_of_config(part):
            raise UnsupportedError(
                f"{name} is not what model.config says. Load the model with the rope_parameters "
                "that it should have: from_pretrained(directory, rope_parameters=...)"
            )
    return as_applied(
        found,
        num_tokens=num_tokens or 0,
        max_position_embeddings=length,
        is_transformers=True,
    )


def _is_of_config(embedding: Any) -> bool:
    """Whether a rotary embedding has the frequencies that its config gives a new one."""
    try:
        new = dict(type(embedding)(embedding.config).named_buffers())
    except (TypeError, AttributeError):
        return True  # its class is not made from a config
    own = dict(embedding.named_buffers())
    frequencies = [name for name in new if name.endswith("original_inv_freq")]
    frequencies = frequencies or [name for name in new if name.endswith("inv_freq")]
    return all(
        torch.equal(own[name].cpu().float(), new[name].cpu().float()) for name in frequencies
    )


def _num_kv_heads(config: Any) -> int:
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def _window(config: Any) -> int | None:
    """The sliding window that all layers share, 0 for full attention; None if layers differ."""
    window: int = getattr(config, "sliding_window", None) or 0
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds == {"full_attention"}:
        return 0
    return window if kinds <= {"sliding_attention"} else None


def _rotary(model: Any) -> tuple[Literal["half", "interleaved"] | None, int | None]:
    """Which dims of a key rotate together, and how many do; (None, None) if that is not known.

    Found by rotating a key by 90 degrees (cos 0, sin 1). The dims (1, 2, .. D) become
    (-D/2-1, .., -D, 1, .., D/2) if halves rotate together, (-2, 1, -4, 3, ..) if neighbours do.
    Source: transformers 5.19 models/*/modeling_*.py, apply_rotary_pos_emb
    """
    module = vars(sys.modules[type(model).__module__])
    if [name for name in module if name.startswith("apply_") and "rotary" in name] != [
        "apply_rotary_pos_emb"
    ]:
        return None, None
    embeddings = [part for name, part in model.named_modules() if name.endswith("rotary_emb")]
    if not embeddings:
        return None, None
    dims = set()
    try:
        for embedding in embeddings:
            like = torch.zeros(1, 1, 1, device=model.device)
            cos, _ = embedding(like, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
            dims.add(cos.shape[-1])
        (dim,) = dims
        key = torch.arange(1.0, dim + 1).expand(1, 1, 1, dim)
        zero, one = torch.zeros(1, 1, dim), torch.ones(1, 1, dim)
        _, turned = module["apply_rotary_pos_emb"](key, key, zero, one)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None, None  # an unusual signature
    half = torch.cat([-key[..., dim // 2 :], key[..., : dim // 2]], dim=-1)
    interleaved = torch.stack([-key[..., 1::2], key[..., 0::2]], dim=-1).flatten(-2)
    if torch.equal(turned, half):
        return "half", dim
    if torch.equal(turned, interleaved):
        return "interleaved", dim
    return None, None
