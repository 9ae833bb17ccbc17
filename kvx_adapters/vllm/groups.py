"""The KV cache groups of one worker: layers that share a block table, and the spec of each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvx_adapters.vllm.cache_tensor import kernel_blocks
from kvx_adapters.vllm.describe import cache_view
from kvx_adapters.vllm.encodings import FP8, encoding_of
from kvx_adapters.vllm.pages import page_of
from kvx_adapters.vllm.spec import LayerSpec, minor
from kvx_core import CacheFacts, CacheView, InvalidArgumentError, UnsupportedError
from kvx_core.desc.facts import first_layer_of

# Specs whose blocks hold nothing but the keys and values of their tokens. Others hold recurrent
# states, those of an encoder, or tokens that are in no block table.
# Source: vllm 0.32 v1/kv_cache_interface.py
_TOKEN_SPECS = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
)
# Backends whose get_name returns the name of another one.
# Source: vllm 0.32 v1/attention/backends/rocm_aiter_fa.py, get_name returns "FLASH_ATTN"
_BACKEND_OF_CLASS = {"AiterFlashAttentionBackend": "ROCM_AITER_FA"}
# Before 0.26 vLLM's objects are too different: use cache_desc with a LayerSpec.
_FIRST_MINOR = 26


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table: a KV cache group of vLLM."""

    layer_names: tuple[str, ...]  # in the order of the model's layers
    layers: tuple[int, ...]  # their indices in the model
    specs: tuple[LayerSpec, ...]
    window: int | None  # sliding window in tokens, 0: full attention; None: unknown, or they differ

    @property
    def encoding(self) -> str:
        """What `group_view` describes: "values", or the name of opaque bytes."""
        return encoding_of(self.specs[0]).name


def layer_groups(
    config: Any,
    attention_layers: Mapping[str, Any],
    version: str,
    *,
    layout: str | None = None,
) -> tuple[LayerGroup, ...]:
    """The KV cache groups of one worker, in vLLM's order: that of a request's tuple of block ids.

    config:           KVCacheConfig, as the worker's connector or model runner has it
    attention_layers: vllm_config.compilation_config.static_forward_context
    version:          vllm.__version__
    layout:           only before 0.29, whose config has none: "NHD" or "HND"
    Layers that use the cache of another layer are left out. A custom backend names the backend
    whose cache it uses in its attribute `kvx_cache_of`, such as "FLASH_ATTN".
    Raises UnsupportedError for unknown caches and those that do not keep every token's keys and
    values; InvalidArgumentError.
    Source: vllm 0.32 v1/kv_cache_interface.py, KVCacheConfig; v1/worker/gpu_model_runner.py,
    initialize_kv_cache
    """
    minor(version, _FIRST_MINOR)
    resolved = getattr(config, "kv_cache_layout", None) or layout
    if resolved is None:
        raise InvalidArgumentError(
            "config.kv_cache_layout is None, expected the resolved layout. Pass layout=, before "
            "vllm 0.29 the result of vllm.v1.attention.backends.utils.get_kv_cache_layout()"
        )
    groups = tuple(
        _group(config, group, attention_layers, version, resolved)
        for group in config.kv_cache_groups
    )
    _check_one_cache_per_layer(groups)
    return groups


def group_view(
    group: LayerGroup,
    kv_caches: Mapping[str, Tensor],
    facts: CacheFacts,
    attention_layers: Mapping[str, Any],
) -> tuple[CacheView, int]:
    """The layers of one group, zero-copy, and the number of kernel blocks per block.

    kv_caches:        per layer name, as KVConnectorBase_V1.register_kv_caches gets them
    facts:            of the whole cache; the group's window and layers are filled in
    attention_layers: as in `layer_groups`; FP8 scales are theirs
    The number goes to `block_table` with the ids that the scheduler hands out.
    Raises UnsupportedError, InvalidArgumentError.
    """
    tensors = [kv_caches[name] for name in group.layer_names]
    cuts = {
        kernel_blocks(tensor, spec, page_of(spec))
        for tensor, spec in zip(tensors, group.specs, strict=True)
    }
    if len(cuts) != 1:
        raise UnsupportedError(
            f"the layers of one group have {sorted(cuts)} kernel blocks per block, expected the "
            "same number: they share one block table"
        )
    attention = [attention_layers[name] for name in group.layer_names]
    quantised = any(spec.kv_cache_dtype in FP8 for spec in group.specs)
    view = cache_view(
        tensors,
        group.specs,
        replace(
            facts,
            window=group.window,
            num_layers=len(group.layers),
            first_layer=first_layer_of(group.layers),
        ),
        k_scales=[layer._k_scale for layer in attention] if quantised else None,
        v_scales=[layer._v_scale for layer in attention] if quantised else None,
    )
    return view, cuts.pop()


def layout_before_29() -> str | None:
    """`layout` of `layer_groups`, once vllm is imported; None since 0.29, whose config has it.

    Source: vllm 0.28 v1/attention/backends/utils.py, get_kv_cache_layout
    """
    utils = sys.modules["vllm.v1.attention.backends.utils"]
    return utils.get_kv_cache_layout() if hasattr(utils, "get_kv_cache_layout") else None


def layer_index(name: str) -> int:
    """3 of "model.layers.3.self_attn.attn". Raises UnsupportedError."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnsupportedError(
            f"layer name is {name!r}, expected one number in it, the layer's index in the model"
        )
    return numbers[0]


def _group(
    config: Any, group: Any, attention_layers: Mapping[str, Any], version: str, layout: str
) -> LayerGroup:
    names = sorted(
        (
            name
            for name in group.layer_names
            if getattr(attention_layers[name], "kv_sharing_target_layer_name", None) is None
        ),
        key=layer_index,
    )
    for name in names:
        _check_kind(name, attention_layers[name], group.kv_cache_spec)
    specs = tuple(
        _layer_spec(config, group.kv_cache_spec, name, attention_layers[name], version, layout)
        for name in names
    )
    for spec in specs:
        page_of(spec)
    encodings = {encoding_of(spec).name for spec in specs}
    if len(encodings) != 1:
        raise UnsupportedError(
            f"the layers of one group store {' and '.join(sorted(encodings))}, expected one kind"
        )
    windows = {_window(group.kv_cache_spec, attention_layers[name]) for name in names}
    return LayerGroup(
        layer_names=tuple(names),
        layers=tuple(map(layer_index, names)),
        specs=specs,
        window=windows.pop() if len(windows) == 1 else None,
    )


def _check_kind(name: str, layer: Any, group_spec: Any) -> None:
    """Raises UnsupportedError for a cache that belongs to no Attention layer, such as DeepSeek-V4's
    windows, compressed entries, indexer keys and compressor states.

    Source: vllm 0.32 models/deepseek_v4/{attention,compressor}.py and v1/attention/backends/mla/
    {sparse_swa,indexer}.py, whose caches have get_attn_backend and no attn_backend
    """
    if not hasattr(layer, "attn_backend"):
        spec = getattr(group_spec, "kv_cache_specs", {}).get(name, group_spec)
        entry = getattr(spec, "tokens_per_state", 1)
        raise UnsupportedError(
            f"layer {name!r} is a {type(layer).__name__} with a {type(spec).__name__}, {entry:g} "
            "tokens per entry, expected an attention layer with keys and values of every token: "
            "vLLM does not say enough of other caches to move them by its block tables. "
            "kvx_core.hybrid describes pages of DeepSeek-V4"
        )


def _check_one_cache_per_layer(groups: tuple[LayerGroup, ...]) -> None:
    owner: dict[int, str] = {}
    for group in groups:
        for index, name in zip(group.layers, group.layer_names, strict=True):
            other = owner.setdefault(index, name)
            if other != name:
                raise UnsupportedError(
                    f"layers {other!r} and {name!r} both have index {index}, expected one cache "
                    "per layer of the model"
                )


def _layer_spec(
    config: Any, group_spec: Any, name: str, layer: Any, version: str, layout: str
) -> LayerSpec:
    """The LayerSpec of one layer, from vLLM's objects; before 0.29 they lack some fields."""
    spec = getattr(group_spec, "kv_cache_specs", {}).get(name, group_spec)
    if type(spec).__name__ not in _TOKEN_SPECS:
        raise UnsupportedError(
            f"layer {name!r} has a {type(spec).__name__}, expected one of "
            f"{', '.join(_TOKEN_SPECS)}: only these keep every token's keys and values"
        )
    tensor = next(
        tensor
        for tensor in config.kv_cache_tensors
        if name in (tensor.layers if hasattr(tensor, "layers") else tensor.shared_by)
    )
    impl = getattr(layer, "impl", None)
    return LayerSpec(
        version=version,
        backend=_backend_name(layer.attn_backend),
        layout=layout,
        kv_cache_dtype=layer.kv_cache_dtype,
        dtype=spec.dtype,
        num_blocks=config.num_blocks,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        page_size_bytes=spec.page_size_bytes,
        num_layers=len(tensor.layers) if hasattr(tensor, "layers") else 1,
        block_stride_bytes=tensor.block_stride or None,
        head_size_v=getattr(spec, "head_size_v", None),
        num_head_slots=getattr(spec, "num_head_slots", None),
        state_content_bytes=getattr(spec, "state_content_bytes", None),
        tokens_per_state=float(
            getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
        ),
        isa=getattr(layer, "isa", None) or getattr(impl, "isa", None),  # the impl's before 0.29
        interleaved_v=getattr(impl, "_use_interleaved_v_cache", False)
        or getattr(impl, "_shuffle_kv_layout", False),
    )


def _backend_name(backend: Any) -> str:
    name = getattr(backend, "kvx_cache_of", None) or _BACKEND_OF_CLASS.get(backend.__name__)
    return str(name or backend.get_name())


def _window(group_spec: Any, layer: Any) -> int | None:
    """The sliding window of a layer; 0: it attends to all tokens; None: to those of its chunk.

    Read from the layer: a merged spec has the window even if only one of its layers has it.
    """
    if getattr(group_spec, "attention_chunk_size", None):
        return None
    return getattr(layer, "sliding_window", None) or 0
