"""Sizes of recurrent states by a model's configuration, against what the models make.

That every family's tensors have these sizes is shown by tests/adapters/test_transformers_states.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvx_core import InvalidArgumentError, UnsupportedError
from kvx_core.model.recurrent import has_recurrent_state, recurrent_state

GRANITE = {
    "model_type": "granitemoehybrid",
    "hidden_size": 64,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
}
KIMI = {
    "model_type": "kimi_linear",
    "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
}


def test_a_config_of_a_folder() -> None:
    found = recurrent_state(GRANITE)
    assert found.conv == (("x", 128), ("b", 12), ("c", 12))
    assert (found.num_columns, found.state) == (3, (8, 16, 12))


def test_kimi_says_its_sizes_in_two_ways() -> None:
    flat = {"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
    found = recurrent_state(KIMI)
    assert found == recurrent_state({"model_type": "kimi_linear", **flat})
    assert (found.conv, found.state) == ((("q", 64), ("k", 64), ("v", 64)), (4, 16, 16))


def test_one_group_is_on_every_rank() -> None:
    facts = recurrent_state(GRANITE).conv_facts(rank=1, num_ranks=2)
    assert [(part.name, part.begin, part.end, part.offset) for part in facts.held()] == [
        ("x", 64, 128, 0),
        ("b", 0, 12, 64),
        ("c", 0, 12, 76),
    ]
    groups = recurrent_state(GRANITE | {"mamba_n_groups": 4})
    assert [p.end - p.begin for p in groups.conv_facts(num_ranks=4).held()] == [32, 12, 12]
    with pytest.raises(UnsupportedError, match="section b has 4 groups and num_ranks is 8"):
        groups.conv_facts(num_ranks=8)


def test_some_sections_of_a_convolution() -> None:
    facts = recurrent_state(KIMI).conv_facts(("k",))
    assert [section.name for section in facts.sections] == ["k"]
    with pytest.raises(InvalidArgumentError, match="expected some of"):
        recurrent_state(KIMI).conv_facts(("x",))


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "llama"}, {"model_type": ["mamba"]}, object()]
)
def test_other_models(config: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"whose recurrent state is not known.*Plane.of_state"
    ):
        recurrent_state(config)


def test_whether_it_is_known() -> None:
    assert has_recurrent_state(GRANITE)
    assert not has_recurrent_state({"model_type": "llama"})


@pytest.mark.parametrize("value", [None, 0, -4, 2.5, True, "4", 2**31])
def test_sizes_that_are_none(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"config.mamba_d_conv is .*, expected a number"):
        recurrent_state(GRANITE | {"mamba_d_conv": value})


def test_a_short_convolution_has_no_state() -> None:
    found = recurrent_state({"model_type": "lfm2", "hidden_size": 64, "conv_L_cache": 3})
    assert found.num_columns == 2
    with pytest.raises(InvalidArgumentError, match="short_conv has no recurrent state"):
        found.state_facts()
