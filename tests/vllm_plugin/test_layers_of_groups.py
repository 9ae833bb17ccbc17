"""How the connector takes vLLM's KV cache groups apart, and which it refuses."""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_adapters import vllm
from kvx_core import UnsupportedError

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

SIZES: dict[str, Any] = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


def group_of(*layers: int) -> vllm.LayerGroup:
    names = tuple(f"model.layers.{i}" for i in layers)
    specs: Any = tuple(
        SimpleNamespace(layer=i, num_kv_heads=1 + (i == 6), kv_cache_dtype="auto") for i in layers
    )
    return vllm.LayerGroup(names, layers, specs, None)


def config_of(first: int, last: int, shared: int = 0) -> Any:
    """Of a rank with layers [first, last) of 8, of which the last `shared` have no K and V."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(num_kv_shared_layers=shared),
        get_layers_start_end_indices=lambda parallel: (first, last),
        get_total_num_hidden_layers=lambda: 8,
    )
    return SimpleNamespace(model_config=model, parallel_config=None)


def test_a_workers_groups_have_each_of_its_layers() -> None:
    from kvx_adapters.vllm_plugin.connector import _check_layers
    from kvx_adapters.vllm_plugin.states import States

    none = States(None, {}, {})

    _check_layers([group_of(4, 2), group_of(3)], none, config_of(2, 5))
    _check_layers([group_of(4, 2), group_of(3)], none, config_of(2, 8, shared=3))
    for groups, found in (
        ([group_of(2, 3)], "[2, 3]"),
        ([group_of(2, 3, 4, 5)], "[2, 3, 4, 5]"),
        ([group_of(2, 3), group_of(3, 4)], "[2, 3, 3, 4]"),
        ([], "[]"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            _check_layers(groups, none, config_of(2, 5))
        told = f"the KV cache has layers {found}, expected each of 2 to 4 once: "
        assert str(caught.value).startswith(told)


def test_the_window_of_a_group() -> None:
    from vllm.v1 import kv_cache_interface as of_vllm

    from kvx_adapters.vllm_plugin.windows import reach_of, window_of

    full = of_vllm.FullAttentionSpec(16, **SIZES, sliding_window=7)  # it keeps all blocks
    sliding = of_vllm.SlidingWindowSpec(16, **SIZES, sliding_window=7)
    chunked = of_vllm.ChunkedLocalAttentionSpec(16, **SIZES, attention_chunk_size=32)
    several = of_vllm.UniformTypeKVCacheSpecs(16, {"a": sliding, "b": sliding})
    assert [window_of(spec) for spec in (full, sliding, several)] == [0, 7, 7]
    groups = [
        of_vllm.KVCacheGroupSpec([f"model.layers.{i}.attn"], spec)
        for i, spec in enumerate((full, sliding, several))
    ]
    assert reach_of(groups) == {1: 7 + 16, 2: 7 + 16}  # vLLM keeps the block that it begins in
    with pytest.raises(UnsupportedError, match="a KV cache group has a ChunkedLocalAttentionSp"):
        window_of(chunked)


def test_chunked_layers_beside_full_ones_without_the_hybrid_manager() -> None:
    """--disable-hybrid-kv-cache-manager: vLLM makes one group of them, which keeps all blocks."""
    from vllm.v1 import kv_cache_interface as of_vllm
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvx_adapters.vllm_plugin.windows import window_of

    chunked = of_vllm.ChunkedLocalAttentionSpec(16, **SIZES, attention_chunk_size=32)
    specs = {"0": of_vllm.FullAttentionSpec(16, **SIZES), "1": chunked, "2": chunked}

    def groups(*, disable: bool) -> list[Any]:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=disable),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
                hash_block_size=None,
                block_size=16,
                prefix_cache_retention_interval=None,
                enable_prefix_caching=True,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1
            ),
            speculative_config=None,
            kv_transfer_config=None,
            attention_config=SimpleNamespace(hisparse_config=None),
        )
        return get_kv_cache_groups(config, dict(specs))

    with pytest.raises(UnsupportedError, match=r"Use --disable-hybrid-kv-cache-manager$"):
        [window_of(group.kv_cache_spec) for group in groups(disable=False)]
    assert [window_of(group.kv_cache_spec) for group in groups(disable=True)] == [0]


def test_layers_of_a_group_have_windows_of_their_own() -> None:
    from kvx_adapters.vllm_plugin.connector import _alike

    group = group_of(0, 1, 2, 3, 6)
    windows = zip(group.layer_names, (7, None, 5, 7, 7), strict=True)
    layers = {name: SimpleNamespace(sliding_window=window) for name, window in windows}
    del layers["model.layers.1"].sliding_window
    parts = _alike(group, layers)
    assert [(part.window, part.layers) for part in parts] == [
        (0, (1,)), (5, (2,)), (7, (0, 3)), (7, (6,)),
    ]  # fmt: skip
    for part in parts:
        assert part.layer_names == group_of(*part.layers).layer_names
        assert part.specs == group_of(*part.layers).specs


def test_a_description_that_cannot_be_tested_is_used_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvx_adapters import vllm
    from kvx_adapters.vllm_plugin.connector import _tested

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    group = group_of(0)
    kv_caches = {"model.layers.0": torch.zeros(1)}
    layer = SimpleNamespace(impl=object(), _k_scale=None, _v_scale=None)
    layers = {"model.layers.0": layer}
    _tested(partial(vllm.self_test_group, group, kv_caches, layers), "KV cache")
    assert "KVX has not tested its description of the KV cache: object has no do_kv" in caplog.text
