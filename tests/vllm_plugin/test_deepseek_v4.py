"""DeepSeek-V4 in vLLM: the connector refuses each kind of its caches by name, before it saves.

Caches, specs and groups are vLLM's own; no engine is started, as such a model needs one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_core import UnsupportedError
from tests.fakes.vllm import needs_vllm
from tests.hybrid.schemas import FLASH

pytestmark = needs_vllm

LAYERS = 4  # two windows alone, CSA, HCA


@pytest.fixture(scope="module")
def caches() -> dict[str, Any]:
    """The caches of the first layers of Flash, as vLLM's attention layers make them: by name, an
    object with get_kv_cache_spec.

    Source: vllm 0.32 models/deepseek_v4/attention.py, DeepseekV4Attention and DeepseekV4Indexer;
    models/deepseek_v4/compressor.py, DeepseekCompressor
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    # Its attention needs weights; what it says of its cache needs these fields alone.
    concrete = type("Attention", (DeepseekV4Attention,), {})
    concrete.__abstractmethods__ = frozenset()
    config = VllmConfig()
    config.cache_config.cache_dtype = "fp8_ds_mla"
    config.cache_config.block_size = 256
    found: dict[str, Any] = {}
    with set_current_vllm_config(config):
        for i, ratio in enumerate(FLASH[:LAYERS]):
            name = f"model.layers.{i}.self_attn"
            window = f"{name}.swa_cache"
            found[window] = DeepseekV4SWACache(512, 128, torch.uint8, window, config.cache_config)
            if not ratio:
                continue
            found[name] = concrete.__new__(concrete)
            torch.nn.Module.__init__(found[name])
            found[name].compress_ratio, found[name].head_dim = ratio, 512
            found[name].kv_cache_dtype = "fp8_ds_mla"
            state = f"{name}.compressor.state_cache"
            width = 2048 if ratio == 4 else 1024
            found[state] = CompressorStateCache(width, torch.float32, ratio, state)
            if ratio == 4:
                keys = f"{name}.indexer.k_cache"
                found[keys] = DeepseekV4IndexerCache(
                    132, torch.uint8, keys, config.cache_config, ratio
                )
                state = f"{name}.indexer.compressor.state_cache"
                found[state] = CompressorStateCache(512, torch.float32, ratio, state)
    return found | {"": config}


def groups_of(specs: dict[str, Any]) -> Any:
    """The KVCacheConfig that vLLM makes of these specs."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        num_gpu_blocks_override=5,
        prefix_cache_retention_interval=None,
    )
    settings: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=cache_config,
        speculative_config=None,
    )
    groups = kv_cache_utils._get_packed_kv_cache_groups(settings, specs) or [
        KVCacheGroupSpec(list(specs), next(iter(specs.values())))
    ]
    config = kv_cache_utils.get_kv_cache_config_from_groups(settings, groups, 1 << 24)
    config.kv_cache_layout = "BLHNC"
    return config


def connector(layers: dict[str, Any], config: Any) -> Any:
    """The worker's half, as far as register_kv_caches reads it before the first copy."""
    from kvx_adapters.vllm_plugin.connector import KVXConnector

    made = KVXConnector.__new__(KVXConnector)
    from kvx_adapters.vllm_plugin.states import States

    context = SimpleNamespace(static_forward_context=layers)
    made._vllm_config = SimpleNamespace(compilation_config=context)
    made._kv_cache_config = config
    made._states = States(None, {}, dict(enumerate(config.kv_cache_groups)))
    return made


KINDS = {
    "model.layers.0.self_attn.swa_cache": ("DeepseekV4SWACache", "SlidingWindowMLASpec", 1),
    "model.layers.2.self_attn": ("Attention", "MLAAttentionSpec", 4),
    "model.layers.3.self_attn": ("Attention", "MLAAttentionSpec", 128),
    "model.layers.2.self_attn.indexer.k_cache": ("DeepseekV4IndexerCache", "MLAAttentionSpec", 4),
    "model.layers.2.self_attn.compressor.state_cache": (
        *("CompressorStateCache", "SlidingWindowMLASpec"),
        1,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_cache_is_refused_by_name(caches: dict[str, Any], name: str) -> None:
    kind, spec, entry = KINDS[name]
    found = caches[name].get_kv_cache_spec(caches[""])
    says = f"layer '{name}' is a {kind} with a {spec}, {entry} tokens per entry, expected an atten"
    with pytest.raises(UnsupportedError, match=says):
        connector({name: caches[name]}, groups_of({name: found})).register_kv_caches({})


def test_a_model_is_refused_at_its_start(caches: dict[str, Any]) -> None:
    """All caches of the model in vLLM's groups; nothing is registered."""
    layers = {name: cache for name, cache in caches.items() if name}
    specs = {name: cache.get_kv_cache_spec(caches[""]) for name, cache in layers.items()}
    config = groups_of(specs)
    assert len(config.kv_cache_groups) > 1
    made = connector(layers, config)
    with pytest.raises(UnsupportedError, match="vLLM does not say enough of other caches to move"):
        made.register_kv_caches({})
    assert not hasattr(made, "_worker")
