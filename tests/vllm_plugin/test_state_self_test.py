"""The self-test of states: vLLM's own ops add tokens, KVX reads; wrong descriptions are caught."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_adapters import vllm
from kvx_core import InvalidArgumentError, Plane, UnsupportedError
from kvx_core.model.recurrent import RecurrentState, recurrent_state
from tests.fakes.vllm import needs_cpu_op

pytestmark = needs_cpu_op

BLOCKS, BLOCK = 5, 3
NAME = "model.layers.0.mixer"
CONFIGS: dict[str, dict[str, Any]] = {
    "gdn": {
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    },
    "mamba2": {
        "model_type": "granitemoehybrid",
        "hidden_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "short_conv": {"model_type": "lfm2", "hidden_size": 96, "conv_L_cache": 3},
}
KINDS = [*CONFIGS]


def bare(cls: Any, **attributes: Any) -> Any:
    """A layer of vLLM without weights: its __init__ wants an engine."""
    layer = torch.nn.Module.__new__(cls)
    layer.__dict__.update(attributes)
    return layer


def layer_of(kind: str) -> tuple[Any, RecurrentState]:
    """A layer with its cache, and the sizes of its states."""
    sizes = recurrent_state(CONFIGS[kind])
    channels = sum(width for _, width in sizes.conv)
    conv = torch.randn(BLOCKS, sizes.num_columns, channels, dtype=torch.bfloat16)
    weight = torch.zeros(channels, 1, sizes.num_columns + 1, dtype=torch.bfloat16)
    known: dict[str, Any] = {
        "prefix": NAME,
        "kv_cache": (conv,),
        "conv1d": SimpleNamespace(weight=weight, bias=None),
        "activation": "silu",
        "tp_size": 1,
    }
    if kind == "short_conv":
        from vllm.model_executor.layers.mamba.short_conv import ShortConv

        return bare(ShortConv, **known | {"conv": known["conv1d"]}), sizes
    heads, rows, columns = sizes.state
    shape = (heads, columns, rows) if kind == "gdn" else (heads, rows, columns)
    known["kv_cache"] = (conv, torch.randn(BLOCKS, *shape))
    if kind == "gdn":
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

        widths = dict(sizes.conv)
        known |= {
            "key_dim": widths["k"],
            "value_dim": widths["v"],
            "head_k_dim": rows,
            "head_v_dim": columns,
            "A_log": torch.zeros(heads),
            "dt_bias": torch.zeros(heads, dtype=torch.bfloat16),
        }
        return bare(qwen_gdn_linear_attn.QwenGatedDeltaNetAttention, **known), sizes
    from vllm.config.mamba import MambaConfig
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend

    initialize_mamba_ssu_backend(MambaConfig(), a_group_of_states())
    parts = [width for _, width in sizes.conv]
    known |= {
        "tped_intermediate_size": parts[0],
        "tped_conv_size": channels,
        "tped_dt_size": heads,
        "num_heads": heads,
        "head_dim": rows,
        "n_groups": parts[1] // columns,
        "ssm_state_size": columns,
        "conv_weights": weight[:, 0],
        "cache_config": SimpleNamespace(),
        "num_spec": 0,
        "use_replayssm": False,
        "is_blackwell": False,
        "A": torch.zeros(heads),
        "D": torch.zeros(heads),
        "dt_bias": torch.zeros(heads),
        "split_hidden_states_B_C_fn": lambda x: torch.split(x, parts, dim=-1),
    }
    return bare(MambaMixer2, **known), sizes


def a_group_of_states() -> Any:
    """A KVCacheConfig, as far as it says that there are states of Mamba 2."""
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=8, shapes=((1,),), dtypes=(torch.float32,))
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


def planes_of(layer: Any, kind: str, block: int = BLOCK, tensors: Any = None) -> list[Plane]:
    from kvx_adapters.vllm.state_self_test import FACTS

    view = vllm.state_view(
        {0: tensors or layer.kv_cache},
        {0: [block]},
        FACTS,
        config=CONFIGS[kind],
        num_tokens=[0],
        conv_layout="SD",
    )
    return list(view.planes)


def self_test(layer: Any, sizes: RecurrentState, planes: list[Plane]) -> None:
    from kvx_adapters.vllm_plugin.state_steps import self_test_of_layers

    before = [tensor.clone() for tensor in layer.kv_cache]
    try:
        self_test_of_layers({NAME: planes}, sizes, {NAME: layer}, BLOCK)
    finally:  # everything is as it was
        for tensor, was in zip(layer.kv_cache, before, strict=True):
            assert torch.equal(tensor, was)


@pytest.mark.parametrize("kind", KINDS)
def test_the_description_passes(kind: str) -> None:
    layer, sizes = layer_of(kind)
    self_test(layer, sizes, planes_of(layer, kind))


WRONG = [
    ("gdn", "transposed", "the state of gdn: vLLM wrote"),
    ("mamba2", "transposed", "the state of mamba2: vLLM wrote"),
    ("gdn", "newest first", "the convolution of gdn: vLLM wrote"),
    ("mamba2", "newest first", "the convolution of mamba2: vLLM wrote"),
    ("short_conv", "newest first", "the convolution of short_conv: vLLM wrote"),
    ("gdn", "sections", "the convolution of gdn: vLLM wrote"),
    ("mamba2", "sections", "the convolution of mamba2: vLLM wrote"),
    ("gdn", "another block", "the convolution of gdn: vLLM wrote"),
    ("mamba2", "another block", "the convolution of mamba2: vLLM wrote"),
    ("short_conv", "another block", "the convolution of short_conv: vLLM wrote"),
    ("gdn", "a head further", "the state of gdn: vLLM wrote"),
    ("mamba2", "a number further", "the state of mamba2: vLLM wrote"),
    ("short_conv", "a number further", "the convolution of short_conv: vLLM wrote"),
]


def misdescribed(planes: list[Plane], layer: Any, how: str, kind: str) -> list[Plane]:
    conv, state = planes[0], planes[-1]
    assert conv.state is not None
    if how == "another block":
        return planes_of(layer, kind, BLOCK - 1)
    if how == "newest first":
        return [replace(conv, state=replace(conv.state, newest_first=True)), *planes[1:]]
    if how == "sections":
        others = tuple(reversed(conv.state.sections))
        return [replace(conv, state=replace(conv.state, sections=others)), *planes[1:]]
    if how.endswith("further"):
        tensor = layer.kv_cache[-1]
        by = 1 if how == "a number further" else tensor.stride(1)
        moved = tensor.as_strided((BLOCKS - 1, *tensor.shape[1:]), tensor.stride(), by)
        return [*planes[:-1], planes_of(layer, kind, tensors=(*layer.kv_cache[:-1], moved))[-1]]
    swapped = (*state.stride[:2], state.stride[3], state.stride[2])
    return [conv, replace(state, stride=swapped)]


@pytest.mark.parametrize(("kind", "how", "sentence"), WRONG)
def test_a_wrong_description_is_caught(kind: str, how: str, sentence: str) -> None:
    layer, sizes = layer_of(kind)
    planes = misdescribed(planes_of(layer, kind), layer, how, kind)
    with pytest.raises(InvalidArgumentError, match=f"^{NAME}, {sentence}") as error:
        self_test(layer, sizes, planes)
    assert str(error.value).endswith("differ. The description is wrong")


def test_a_kind_of_which_no_step_is_known() -> None:
    from kvx_adapters.vllm_plugin.state_steps import self_test_of_layers

    sizes = RecurrentState("mamba1", (("x", 8),), 3, (8, 4))
    with pytest.raises(UnsupportedError, match="no step of mamba1 is known, expected one of"):
        self_test_of_layers({}, sizes, {}, BLOCK)
    with pytest.raises(UnsupportedError, match="has states of mamba1, expected one of gdn, mamba2"):
        vllm.self_test_states([], sizes, lambda step: None, name=NAME)


def test_a_step_that_fails_is_no_proof_and_no_error_of_the_description() -> None:
    layer, sizes = layer_of("short_conv")
    planes = planes_of(layer, "short_conv")
    del layer.__dict__["conv"]
    with pytest.raises(UnsupportedError, match="a step of ShortConv alone failed: AttributeError"):
        self_test(layer, sizes, planes)


def test_an_op_that_writes_nothing_is_caught() -> None:
    sizes = recurrent_state(CONFIGS["gdn"])
    layer, _ = layer_of("gdn")
    with pytest.raises(InvalidArgumentError, match="the convolution of gdn: vLLM wrote"):
        vllm.self_test_states(planes_of(layer, "gdn"), sizes, lambda step: None, name=NAME)


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_states_of_bfloat16_pass(kind: str) -> None:
    """Their numbers are rounded after each token."""
    layer, sizes = layer_of(kind)
    conv, state = layer.kv_cache
    layer.__dict__["kv_cache"] = (conv, state.to(torch.bfloat16))
    self_test(layer, sizes, planes_of(layer, kind))
