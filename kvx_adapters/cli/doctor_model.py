"""`kvx doctor --model`: what the caches of a model hold, and which adapters take them.

transformers reads the configuration and says what each layer keeps; no weights are read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvx_adapters.cli.doctor import Check
from kvx_adapters.cli.extras import pip_install

_GENERATES = re.compile("ForCausalLM|LMHeadModel|ForConditionalGeneration")
_GROUPS = "a view of each group of layers"
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes


@dataclass(frozen=True)
class Kinds:
    """How many layers keep what, of all that have a cache."""

    full: int = 0  # K and V of all tokens
    windows: tuple[tuple[int, int], ...] = ()  # (tokens of the window, layers)
    states: int = 0  # a state: Mamba, linear attention, convolution
    indexed: int = 0  # K and V, and an indexer's keys
    other: int = 0  # that KVX does not know
    latent: tuple[int, int] | None = None  # numbers of a latent, and of its rotated key (MLA)
    is_chunked: bool = False  # windows are chunks of attention
    shared: int = 0  # layers that use the K and V of others
    has_encoder: bool = False
    kv_heads: tuple[int, ...] = ()  # numbers of KV heads, if layers differ


def check_model(path: Path) -> Iterator[Check]:
    """Says what the model's caches hold, and of each engine whether KVX moves them.

    path: a folder with config.json, or that file
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        problem = (
            "expected the folder of a model, with config.json, or that file. A name of a hub is "
            "not looked up: download it with `hf download NAME`"
        )
        yield Check("model", f"{path} has no config.json", problem)
        return
    try:
        config, layers = _read(file)
    except ImportError as error:
        missing = error.name or "torch"  # transformers without torch does not name it
        problem = f"transformers and torch read the configuration: {pip_install('transformers')}"
        yield Check("model", f"{missing} is not installed", problem)
        return
    except KeyError as error:  # DeepSeek-V4's layers, for instance
        problem = f"a DynamicCache of this transformers has no layers of the kind {error}"
        yield Check("model", str(file), f"{problem}. DeepSeek-V4: kvx_core.hybrid")
        return
    except Exception as error:  # whatever transformers raises for a file that it cannot read
        first = next(iter(str(error).strip().splitlines()), "")
        yield Check("model", f"{file} cannot be read", f"{type(error).__name__}: {first}")
        return
    text = config.get_text_config(decoder=True)
    architectures = getattr(config, "architectures", None) or []
    if architectures and not any(map(_GENERATES.search, map(str, architectures))):
        problem = "expected a model that generates text: others keep no cache"
        yield Check("model", f"{text.model_type}, {architectures[0]}", problem)
        return
    kinds = _kinds(config, text, layers)
    yield Check("model", f"{text.model_type} of {text.num_hidden_layers} layers")
    yield Check("caches", _caches(kinds))
    size = _bytes_per_token(text, kinds)
    if size:
        yield Check("size", size)
    for engine, verdict in _verdicts(kinds):
        yield Check(engine, verdict, is_fact=True)


def _read(file: Path) -> tuple[Any, list[Any]]:
    """The configuration, and transformers' cache layers for it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, DynamicCache
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(file, trust_remote_code=False)
    return config, DynamicCache(config=config).layers


def _kinds(config: Any, text: Any, layers: list[Any]) -> Kinds:
    """Source: transformers 5.19 cache_utils.py, DYNAMIC_LAYER_TYPE_MAPPING"""
    windows: Counter[int] = Counter()
    counts: Counter[str] = Counter()
    for layer in layers:
        names = {kind.__name__ for kind in type(layer).__mro__}
        if "LinearAttentionCacheLayerMixin" in names:
            counts["states"] += 1
        elif "DynamicIndexedLayer" in names:
            counts["indexed"] += 1
        elif "DynamicSlidingWindowLayer" in names:
            windows[layer.sliding_window] += 1
        elif type(layer).__name__ == "DynamicLayer":
            counts["full"] += 1
        else:
            counts["other"] += 1
    rank, rotated = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return Kinds(
        **counts,
        windows=tuple(sorted(windows.items())),
        latent=(rank, rotated) if isinstance(rank, int) and isinstance(rotated, int) else None,
        is_chunked=getattr(text, "attention_chunk_size", None) is not None,
        shared=getattr(text, "num_kv_shared_layers", None) or 0,
        has_encoder=bool(getattr(config, "is_encoder_decoder", False)),
        kv_heads=_kv_heads(text),
    )


def _kv_heads(text: Any) -> tuple[int, ...]:
    """The numbers of KV heads of layers that keep K and V; () if they do not differ, or it is not
    known. Latents (MLA) have no heads.
    """
    if getattr(text, "kv_lora_rank", None) is not None:
        return ()
    layers = getattr(text, "per_layer_config", None) or ()
    found = {getattr(layer, "num_key_value_heads", None) for layer in layers}
    heads = {number for number in found if isinstance(number, int)}
    return tuple(sorted(heads)) if len(heads) > 1 else ()


def _caches(kinds: Kinds) -> str:
    what = "K and V"
    if kinds.latent is not None:
        what = "latents (MLA), in transformers K and V,"
    window = "chunk" if kinds.is_chunked else "window"
    found = [
        (kinds.full, f"{what} of all tokens"),
        *((layers, f"{what} of a {window} of {size:,} tokens") for size, layers in kinds.windows),
        (kinds.indexed, f"{what} of all tokens and an indexer's keys"),
        (kinds.states, "a state (Mamba, linear attention or convolution)"),
        (kinds.other, "something that KVX does not know"),
        (kinds.shared, "nothing: they use other layers' K and V"),
        (int(kinds.has_encoder), "an encoder's output"),
    ]
    return "; ".join(
        f"{count} {'layer' if count == 1 else 'layers'}: {text}" for count, text in found if count
    )


def _bytes_per_token(text: Any, kinds: Kinds) -> str:
    """Of all layers with K and V; "" if the configuration does not say."""
    dtype = str(getattr(text, "dtype", None) or "bfloat16").removeprefix("torch.")
    layers = kinds.full + kinds.indexed + sum(count for _, count in kinds.windows)
    if kinds.latent is not None:
        numbers = layers * sum(kinds.latent)
        how = f"latents of {kinds.latent[0]} numbers and keys of {kinds.latent[1]} in each layer"
    else:
        numbers, how = _kv_numbers(text, layers)
    if dtype not in _DTYPES or not numbers:
        return ""
    return f"{numbers * _DTYPES[dtype]:,} bytes per token in {dtype}: {how}"


def _kv_numbers(text: Any, layers: int) -> tuple[int, str]:
    """Numbers of K and V of a token in all layers, and how they come about; 0 if that is not known.

    layers: that have K and V
    """
    from kvx_adapters.transformers.sizes import are_unlike, kv_layers, sizes_in_words
    from kvx_core import KvxError

    try:
        found = kv_layers(text)
    except (KvxError, AttributeError, TypeError):  # lists of numbers, or none
        return 0, ""
    numbers = [2 * layer.num_kv_heads * layer.head_dim for layer in found]
    if found and not are_unlike(found):
        how = f"{found[0].num_kv_heads} KV heads of {found[0].head_dim} in each layer"
        return layers * numbers[0], how
    return (sum(numbers), sizes_in_words(found)) if len(found) == layers else (0, "")


def _verdicts(kinds: Kinds) -> Iterator[tuple[str, str]]:
    """Of each engine. Source: "What is left to vLLM, and what is refused" in docs/vllm.md, and the
    same in docs/tensorrt_llm.md; docs/transformers.md."""
    from kvx_adapters.vllm import refusal

    no = refusal(states=kinds.states > 0, indexed=kinds.indexed > 0, other=kinds.other > 0)
    connector = refusal(
        states=kinds.states > 0,
        indexed=kinds.indexed > 0,
        other=kinds.other > 0,
        is_chunked=kinds.is_chunked,
        shared=kinds.shared > 0,
        has_encoder=kinds.has_encoder,
        kv_heads=kinds.kv_heads,
    )
    windows = bool(kinds.windows)
    if connector:
        yield "vLLM", f"the connector refuses it: {connector}"
    else:
        how = "; loads while other steps run" if windows else ""
        how += "; before vLLM 0.30 it loads nothing" if windows and kinds.full else ""
        yield "vLLM", f"the connector shares its prefixes{how}"
    if no:
        yield "transformers", f"not described: {no}"
    elif kinds.is_chunked:
        yield "transformers", "not tested with chunks"
    else:
        yield "transformers", _GROUPS if windows else "cache_view"
    refused_there = ", ".join(filter(None, [connector, "windows" if windows else ""]))
    yield (
        "TensorRT-LLM",
        f"the connector refuses it: {refused_there}" if refused_there else "the connector takes it",
    )
    if no:
        verdict = f"not described: {no}"
    elif kinds.latent is not None or kinds.is_chunked:
        verdict = "not tested with latents or chunks"
    else:
        verdict = _GROUPS if windows else "cache_view"
    yield "others", f"llama.cpp, OpenVINO, MLX, ONNX Runtime: {verdict}"
