"""The recurrent layers of vLLM's groups: which engines are refused, where a request's states are,
and what lies behind its last token.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_core import CacheDesc, CacheView, InvalidArgumentError, UnsupportedError, describe
from tests.facts import SAME_MODEL
from tests.states import GDN_CONFIG

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

SIZE = 8
FACTS = replace(SAME_MODEL, first_kv_head=0)
SHAPES = ((3, 44), (4, 6, 5))
MAMBA = dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv"), 4)
MAMBA |= {"mamba_n_groups": 1, "mamba_d_ssm": 16}


def spec(name: str) -> Any:
    """Of a group: "attention", "window", or states in a mode."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    of_tokens = {"block_size": SIZE, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    if name == "attention":
        return FullAttentionSpec(**of_tokens)
    if name == "window":
        return SlidingWindowSpec(**of_tokens, sliding_window=32)
    return MambaSpec(
        block_size=SIZE,
        shapes=SHAPES,
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode=name if name in ("none", "all") else "align",
        num_speculative_blocks=2 if name == "drafts" else 0,
    )


def states(*specs: str, num_layers: int = 3, **fields: Any) -> Any:
    """Layer i is in group i. fields: of vLLM's configuration, by its parts."""
    from kvx_adapters.vllm_plugin.states import States

    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**GDN_CONFIG, num_hidden_layers=num_layers)
        ),
        cache_config=SimpleNamespace(use_replayssm=False, cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        mamba_config=SimpleNamespace(enable_stochastic_rounding=False),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        speculative_config=None,
    )
    for name, value in fields.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part) if field else config, field or part, value)
    groups = [
        SimpleNamespace(layer_names=[f"model.layers.{i}.mixer"], kv_cache_spec=spec(name))
        for i, name in enumerate(specs)
    ]
    return States.of(config, SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"parallel_config__tensor_parallel_size": 8},
            "tensor_parallel_size is 8, expected a divisor of 4, the heads into which a store",
        ),
        ({"parallel_config__pipeline_parallel_size": 3}, "pipeline_parallel_size is 3, expected 1"),
        ({"cache_config__use_replayssm": True}, "use_replayssm is True, expected False"),
        (
            {"mamba_config__enable_stochastic_rounding": True},
            "enable_stochastic_rounding is True, expected False",
        ),
        (
            {"cache_config__cache_dtype": "int8_per_token_head"},
            "kv_cache_dtype is 'int8_per_token_head', expected one of auto, float16",
        ),
        ({"speculative_config": object()}, "speculative_config is set, expected none"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector_extra_config={"layerwise": True})},
            "layerwise is True, expected False",
        ),
    ],
)
def test_engines_that_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        states("align", "attention", **fields)
    assert not states("attention", **fields)  # without states none of it matters


@pytest.mark.parametrize(
    ("specs", "sentence"),
    [
        (["all", "attention"], "mamba_cache_mode is 'all', expected 'none' or 'align'"),
        (["drafts", "attention"], "the engine speculates"),
        (["align", "attention", "window"], "others a sliding window or no keys and values"),
        (["align"], "others a sliding window or no keys and values"),
    ],
)
def test_groups_that_are_refused(specs: list[str], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        states(*specs)


def test_the_layers_of_a_model() -> None:
    found = states("align", "attention", "align")
    assert found.layers == (0, 2)
    assert [found.has_kv(layer) for layer in range(3)] == [False, True, False]
    words = ["CONV_STATE", "role 1001", "role 1002", "STATE"]  # Q, K and V of the convolution
    assert [plane.words for plane in found.planes] == [
        f"{one} of layer {layer}" for layer in (0, 2) for one in words
    ]
    assert not any(plane.replicated for plane in found.planes)
    assert found.heads == 4  # of 12, 12 and 20 channels, and 4 heads
    without = states("attention")
    assert not without
    assert all(map(without.has_kv, range(9)))
    assert without.planes == []


def test_falcon_h1_has_both_in_each_layer() -> None:
    """vLLM counts the layers of states on behind those of attention."""
    found = states("attention", "align", num_layers=1)
    vars(found.config).update(MAMBA | {"model_type": "falcon_h1"})
    assert found.has_kv(0)
    assert found.layers == (0,)
    assert {plane.layer for plane in found.planes} == {0}


@pytest.mark.parametrize("mode", ["align", "none"])
def test_the_block_of_a_state(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the last token's column, or the only one."""
    from kvx_adapters.vllm_plugin import states as of_plugin

    monkeypatch.setattr(of_plugin, "conv_layout_here", lambda: "SD")
    found = states(mode, "attention")
    memory = torch.randn(9, 3, 44), torch.randn(9, 4, 5, 6)
    found.bind({"model.layers.0.mixer": SimpleNamespace(kv_cache=list(memory))})
    blocks = ([7, 5, 3], [1, 2, 4])
    for count, aligned in ((1, 7), (8, 7), (9, 5), (16, 5), (17, 3)):
        section = found.section(blocks, count, FACTS)
        block, conv = aligned if mode == "align" else 7, memory[0]
        sections = [conv[..., :12], conv[..., 12:24], conv[..., 24:]]  # Q, K and V
        for plane, tensor in zip(section.view.planes, [*sections, memory[1]], strict=True):
            assert plane.data == tensor.data_ptr()
            assert plane.slots is not None
            assert plane.slots.owner.tolist() == [block]
        assert section.view.state_tokens() == count
        assert section.state_tokens == count
    if mode == "align":
        with pytest.raises(
            InvalidArgumentError, match="of group 0 after 3 tokens is in block 0, expected 1 or"
        ):
            found.section(([0, 5], [1, 2]), 3, FACTS)
        with pytest.raises(IndexError):
            found.section(([7], [1, 2]), 9, FACTS)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_heads_of_a_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvx_adapters.vllm_plugin import states as of_plugin

    monkeypatch.setattr(of_plugin, "conv_layout_here", lambda: "SD")
    found = states("align", "attention", parallel_config__tensor_parallel_size=2)
    memory = [torch.randn(9, 3, 22), torch.randn(9, 2, 5, 6)]
    found.bind({"model.layers.0.mixer": SimpleNamespace(kv_cache=memory)})
    held = 2 * rank, 2 * rank + 2
    assert found.heads_of(rank) == held
    assert found.section(([7], [1]), 5, FACTS, rank).heads == held


@pytest.mark.parametrize(("count", "is_there"), [(8, False), (9, True), (16, True), (17, False)])
def test_requests_that_have_no_block_for_a_state(count: int, is_there: bool) -> None:
    """It was of a step before, or is of a step to come."""
    found = states("align", "attention", "align")
    assert found.has_blocks(([0, 5], [1, 2, 4], [0, 6]), count) is is_there
    assert not found.has_blocks(([7, 5, 3], [1, 2, 4], [0, 0]), count)


def test_boundaries_that_vllm_offers() -> None:
    """Of all groups: a block may be outside of a request's table."""
    found = states("align", "attention", "align")
    blocks = ([0, 5, 3], [1, 2, 4], [0, 6, 8])
    offers = [(0, 11, 8), (2, 12, 8), (0, 5, 16), (2, 6, 16), (0, 3, 20)]
    assert list(found.offered(offers, blocks)) == [
        (8, ([11], [1, 2, 4], [12])),
        (16, ([0, 5], [1, 2, 4], [0, 6])),
    ]


@pytest.mark.parametrize("layout", ["BLOCK_NHD", "BLOCK_HND"])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16])
def test_what_lies_behind_the_last_token_is_zeroed(num_tokens: int, layout: str) -> None:
    shape = (6, SIZE, 2, 16) if layout == "BLOCK_NHD" else (6, 2, SIZE, 16)
    from kvx_adapters.vllm_plugin.states import zero_behind

    k, v = torch.full((2, *shape), torch.nan, dtype=torch.bfloat16)
    view = CacheView((CacheDesc.from_kv(describe(k, layout), describe(v, layout)),), SAME_MODEL)
    zero_behind(view, SIZE, [4, 2], num_tokens, torch.device("cpu"))
    expected = torch.full((6, SIZE), True)
    if num_tokens % SIZE:
        expected[[4, 2][num_tokens // SIZE], num_tokens % SIZE :] = False
    for tensor in (k, v):
        by_token = tensor if layout == "BLOCK_NHD" else tensor.transpose(1, 2)
        assert torch.equal(by_token.isnan().all(-1).all(-1), expected)
        assert not by_token[~expected].any()
