"""What the layers of a transformers model keep, as transformers makes its cache.

No weights are read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GENERATES = re.compile("ForCausalLM|LMHeadModel|ForConditionalGeneration|EncoderDecoderModel")
# Source: transformers 5.19 models/auto/modeling_auto.py
_GENERATING = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ"),
    *("MULTIMODAL_LM", "TEXT_TO_WAVEFORM"),
)


@dataclass(frozen=True)
class Kinds:
    """How many layers keep what, of all that have a cache."""

    full: int = 0  # K and V of all tokens
    windows: tuple[tuple[int, int], ...] = ()  # (tokens of the window, layers)
    states: int = 0  # a state: Mamba, linear attention, convolution
    both: tuple[tuple[int, int], ...] = ()  # a state, and K and V of (tokens of a window or 0)
    indexed: int = 0  # K and V, and an indexer's keys
    nothing: int = 0  # experts alone
    other: tuple[tuple[str, int], ...] = ()  # (what KVX does not know, layers)
    latent: tuple[int, int] | None = None  # numbers of a latent, and of its rotated key (MLA)
    is_chunked: bool = False  # windows are chunks of attention
    shared: int = 0  # layers that use the K and V of others
    has_encoder: bool = False
    kv_heads: tuple[int, ...] = ()  # numbers of KV heads, if layers differ

    @property
    def num_kv_layers(self) -> int:
        """Layers with K and V of their own."""
        windows = sum(count for _, count in (*self.windows, *self.both))
        return self.full + self.indexed + windows

    @property
    def has_states(self) -> bool:
        return bool(self.states or self.both)


def read_config(file: Path) -> Any:
    """Raises what transformers raises for a file that it cannot read; ImportError."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    return AutoConfig.from_pretrained(file, trust_remote_code=False)


def generates_text(config: Any) -> bool:
    """Whether its class does by its name, or transformers has one for its type that does."""
    named = getattr(config, "architectures", None)
    if not named:
        return next(_classes(config), None) is not None
    return any(map(_GENERATES.search, map(str, named)))


def parts_with_layers(config: Any) -> list[str]:
    """The parts of a configuration that have layers, if it has none itself."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return [name for name, part in parts.items() if hasattr(part, "num_hidden_layers")]


def kinds_of(config: Any) -> Kinds:
    """What the layers keep.

    config: of a model that generates text; it has layers, or its text_config or decoder has
    Source: transformers 5.19 cache_utils.py, DYNAMIC_LAYER_TYPE_MAPPING
    """
    from transformers import DynamicCache

    from kvx_adapters.transformers.sizes import unsaid

    text = config.get_text_config(decoder=True)
    kept = unsaid(text)
    if kept:
        return Kinds(other=((kept, text.num_hidden_layers),))
    _load_class(config)
    layers = DynamicCache(config=config).layers
    rank, rotated = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return Kinds(
        **_counted(layers, getattr(text, "layer_types", None) or ()),
        latent=(rank, rotated) if isinstance(rank, int) and isinstance(rotated, int) else None,
        is_chunked=getattr(text, "attention_chunk_size", None) is not None,
        shared=getattr(text, "num_kv_shared_layers", None) or 0,
        has_encoder=bool(getattr(config, "is_encoder_decoder", False)),
        kv_heads=_kv_heads(text),
    )


def _counted(layers: list[Any], types: Any) -> dict[str, Any]:
    """Fields of Kinds.

    types: of the layers, as the configuration names them, or ()
    """
    counts: Counter[str] = Counter()
    windows: dict[str, Counter[Any]] = {"windows": Counter(), "both": Counter(), "other": Counter()}
    types = types if len(types) == len(layers) else [""] * len(layers)
    for layer, kind in zip(layers, types, strict=True):
        names = {found.__name__ for found in type(layer).__mro__}
        has_window = "DynamicSlidingWindowLayer" in names
        window = layer.sliding_window if has_window else 0
        if "LinearAttentionCacheLayerMixin" in names and "DynamicLayer" in names:
            windows["both"][window] += 1
        elif kind in ("moe", "mlp"):  # transformers has a layer for them, which stays empty
            counts["nothing"] += 1
        elif "LinearAttentionCacheLayerMixin" in names:
            counts["states"] += 1
        elif "DynamicIndexedLayer" in names:
            counts["indexed"] += 1
        elif type(layer).__name__ == "DynamicSlidingWindowLayer":
            windows["windows"][window] += 1
        elif type(layer).__name__ == "DynamicLayer":
            counts["full"] += 1
        else:
            windows["other"][f"a {type(layer).__name__}, which KVX does not know"] += 1
    return counts | {name: tuple(sorted(found.items())) for name, found in windows.items()}


def _kv_heads(text: Any) -> tuple[int, ...]:
    """The numbers of KV heads of layers that keep K and V; () if they do not differ, or it is not
    known. Latents (MLA) have no heads.
    """
    from kvx_adapters.transformers.sizes import kv_layers
    from kvx_core import KvxError

    try:
        heads = {layer.num_kv_heads for layer in kv_layers(text)}
    except (KvxError, AttributeError, TypeError):  # lists of numbers, or none
        return ()
    return tuple(sorted(heads)) if len(heads) > 1 else ()


def _classes(config: Any) -> Iterator[str]:
    """The names of transformers' classes that generate text from such a configuration."""
    from transformers.models.auto import modeling_auto

    for task in _GENERATING:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        found = names.get(config.model_type)
        if found is not None:
            yield found if isinstance(found, str) else found[0]


def _load_class(config: Any) -> None:
    """Imports the model's code, which registers the cache layers that are its own."""
    import transformers

    for name in (*(getattr(config, "architectures", None) or ()), *_classes(config)):
        getattr(transformers, str(name), None)
