"""`kvx doctor --model`: what the caches of a model hold, and which adapters take them.

transformers reads the configuration and says what each layer keeps; no weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvx_adapters.cli.doctor import Check
from kvx_adapters.cli.extras import pip_install
from kvx_adapters.cli.model_layers import (
    Kinds,
    generates_text,
    kinds_of,
    parts_with_layers,
    read_config,
)
from kvx_core.argument_checks import plural

_GROUPS = "a view of each group of layers"
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes


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
        config = read_config(file)
    except ImportError as error:
        missing = error.name or "torch"  # transformers without torch does not name it
        problem = f"transformers and torch read the configuration: {pip_install('transformers')}"
        yield Check("model", f"{missing} is not installed", problem)
        return
    except Exception as error:  # whatever transformers raises for a file that it cannot read
        said = " ".join(str(error).split())[:300]
        yield Check("model", f"{file} cannot be read", f"{type(error).__name__}: {said}")
        return
    yield from _check(config)


def _check(config: Any) -> Iterator[Check]:
    text = config.get_text_config(decoder=True)
    named = ", ".join(getattr(config, "architectures", None) or ())
    if not generates_text(config):
        others = "others keep no cache" if named else "transformers has none of this type"
        problem = f"expected a model that generates text: {others}"
        yield Check("model", f"{config.model_type}{named and ', '}{named}", problem)
        return
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        parts = ", ".join(parts_with_layers(config))
        problem = "expected a configuration with layers, or with one decoder that has them"
        if parts:
            problem += f". {parts} have, and caches of their own: see docs/describe.md"
        yield Check("model", f"{config.model_type} has no layers", problem)
        return
    try:
        kinds = kinds_of(config)
    except Exception as error:  # whatever transformers raises where it makes no cache
        problem = f"transformers makes no cache for it: {type(error).__name__}: {error}"
        yield Check("model", str(text.model_type), problem)
        return
    yield Check("model", f"{text.model_type} of {text.num_hidden_layers} layers")
    yield Check("caches", _caches(kinds))
    size = _bytes_per_token(text, kinds)
    if size:
        yield Check("size", size)
    for engine, verdict in _verdicts(kinds, text):
        yield Check(engine, verdict, is_fact=True)
    if text.model_type == "deepseek_v4":
        yield Check("kvx_core.hybrid", "lays out its caches: docs/deepseek_v4.md", is_fact=True)


def _caches(kinds: Kinds) -> str:
    what = "K and V" if kinds.latent is None else "latents (MLA)"
    state = "a state (Mamba, linear attention or convolution)"

    def of(tokens: int) -> str:
        window = "chunk" if kinds.is_chunked else "window"
        return f"{what} of a {window} of {tokens:,} tokens" if tokens else f"{what} of all tokens"

    found = [
        (of(0), kinds.full),
        *((of(tokens), count) for tokens, count in kinds.windows),
        (f"{of(0)} and an indexer's keys", kinds.indexed),
        (state, kinds.states),
        *((f"{of(tokens)} and {state}", count) for tokens, count in kinds.both),
        *kinds.other,
        ("nothing: they use other layers' K and V", kinds.shared),
        ("nothing", kinds.nothing),
        ("an encoder's output", int(kinds.has_encoder)),
    ]
    return "; ".join(f"{plural(count, 'layer')}: {text}" for text, count in found if count)


def _bytes_per_token(text: Any, kinds: Kinds) -> str:
    """Of all layers with K and V; "" if the configuration does not say."""
    dtype = str(getattr(text, "dtype", None) or "bfloat16").removeprefix("torch.")
    numbers, how = _kv_numbers(text, kinds)
    if dtype not in _DTYPES or not numbers:
        return ""
    return f"{numbers * _DTYPES[dtype]:,} bytes per token in {dtype}: {how}"


def _kv_numbers(text: Any, kinds: Kinds) -> tuple[int, str]:
    """Numbers of K and V of a token in all layers, and their sizes; 0 if that is not known."""
    from kvx_adapters.transformers.sizes import are_alike, kv_layers, sizes_in_words
    from kvx_core import KvxError

    try:
        found = kv_layers(text)
    except (KvxError, AttributeError, TypeError):  # lists of numbers, or none
        return 0, ""
    if len(found) != kinds.num_kv_layers or not found:
        return 0, ""
    numbers = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in found)
    if kinds.latent is not None:
        rank, rotated = kinds.latent
        return numbers, f"latents of {rank} numbers and keys of {rotated} in each layer"
    if are_alike(found):
        heads = plural(found[0].num_kv_heads, "KV head")
        return numbers, f"{heads} of {found[0].head_dim} in each layer"
    return numbers, sizes_in_words(found)


def _verdicts(kinds: Kinds, text: Any) -> Iterator[tuple[str, str]]:
    """Of each engine. Source: "What is left to vLLM, and what is refused" in docs/vllm.md, and the
    same in docs/tensorrt_llm.md; docs/transformers.md; docs/hybrid.md."""
    from kvx_adapters.vllm import refusal
    from kvx_adapters.vllm.refusals import knows_states
    from kvx_core.model.recurrent import has_recurrent_state

    windows = bool(kinds.windows)
    is_known = not kinds.has_states or (has_recurrent_state(text) and kinds.num_kv_layers > 0)
    is_shared = is_known and (not kinds.has_states or (knows_states(text) and not windows))
    no = refusal(states=not is_known, indexed=kinds.indexed > 0, other=bool(kinds.other))

    def connector(*, states: bool) -> str:
        return refusal(
            states=states,
            indexed=kinds.indexed > 0,
            other=bool(kinds.other),
            is_chunked=kinds.is_chunked,
            has_encoder=kinds.has_encoder,
        )

    if refused := connector(states=not is_shared):
        yield "vLLM", f"the connector refuses it: {refused}"
    else:
        how = "; loads while other steps run" if windows or kinds.has_states else ""
        how += "; before vLLM 0.30 it loads nothing" if windows and kinds.full else ""
        how += ". Needs vLLM 0.30: docs/hybrid.md" if kinds.has_states else ""
        yield "vLLM", f"the connector shares its prefixes{how}"
    if no:
        yield "transformers", f"not described: {no}"
    elif kinds.is_chunked:
        yield "transformers", "not tested with chunks"
    elif kinds.has_states:
        yield "transformers", "hybrid_view"
    else:
        yield "transformers", _GROUPS if windows else "cache_view"
    unequal = f"layers have {' and '.join(map(str, kinds.kv_heads))} KV heads"
    there = [
        connector(states=kinds.has_states),
        "windows" if windows else "",
        unequal if kinds.kv_heads else "",
    ]
    refused_there = ", ".join(filter(None, there))
    yield (
        "TensorRT-LLM",
        f"the connector refuses it: {refused_there}" if refused_there else "the connector takes it",
    )
    if no:
        verdict = f"not described: {no}"
    elif kinds.has_states:
        verdict = "MLX by hybrid_view, where docs/hybrid.md says so; not described elsewhere"
    elif kinds.latent is not None or kinds.is_chunked:
        verdict = "not tested with latents or chunks"
    else:
        verdict = _GROUPS if windows else "cache_view"
    yield "others", f"llama.cpp, OpenVINO, MLX, ONNX Runtime: {verdict}"
