"""States on n ranks: KVX's sections against vLLM's own loaders of the weights that make them.

A convolution works on each channel by itself, so a rank keeps inputs of the channels whose weights
it loads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
    _make_fused_conv1d_weight_loader,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

from kvx_core import CacheFacts, CacheView, InvalidArgumentError, Plane, migrate
from kvx_core.model.recurrent import RecurrentState, recurrent_state

FACTS = CacheFacts(fingerprint="model", rotary="none", rotary_dim=0, rope_applied=False)
NEXT = {
    "model_type": "qwen3_next",
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "mamba_n_heads": 16,
    "mamba_d_head": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
}
MODELS = {
    "gdn": NEXT,
    "mamba2": GRANITE,
    "mamba2 of 8 groups": GRANITE | {"mamba_n_groups": 8},
    "kda": {
        "model_type": "kimi_linear",
        "linear_attn_config": {"num_heads": 8, "head_dim": 6, "short_conv_kernel_size": 4},
    },
}


def by_vllm(sizes: RecurrentState, full: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """The channels of a rank, as vLLM loads the convolution's weight."""
    if sizes.kind == "kda":
        widths = [width for _, width in sizes.conv]
        out = torch.full((sum(widths) // count, *full.shape[1:]), -1.0)
        load = _make_fused_conv1d_weight_loader(widths, count, rank)
        for i, section in enumerate(full.split(widths)):
            load(out, section, i)
        return out
    extra = 0
    if sizes.groups:
        groups = MambaStateShapeCalculator.extra_groups_for_head_shards(sizes.num_groups, count)
        extra = groups * sizes.state[2]
    spec = [
        (width + extra, extra, sizes.num_groups == 1) if name in sizes.groups else (width, 0, False)
        for name, width in sizes.conv
    ]
    out = torch.full((sum(width for width, *_ in spec) // count, *full.shape[1:]), -1.0)
    mamba_v2_sharded_weight_loader(spec, count, rank)(out, full)
    return out


def view(sizes: RecurrentState, conv: Any, rank: int, count: int) -> CacheView:
    facts = sizes.conv_facts(rank=rank, num_ranks=count)
    plane = Plane.of_state(conv[None], ("block", "channel", "time"), facts)
    return CacheView((), FACTS, planes=(plane,), dense=True, state_tokens=5)


@pytest.mark.parametrize("steps", [(1, 2, 4, 8, 1), (8, 4, 2, 1, 8)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_hold_what_vllm_loads(model: str, steps: tuple[int, ...]) -> None:
    sizes = recurrent_state(MODELS[model])
    channels = sum(width for _, width in sizes.conv)
    full = torch.arange(channels * 3, dtype=torch.float32).view(channels, 1, 3)
    now = [by_vllm(sizes, full, rank, steps[0])[:, 0].contiguous() for rank in range(steps[0])]
    for before, count in pairwise(steps):
        expected = [by_vllm(sizes, full, rank, count)[:, 0] for rank in range(count)]
        found = [torch.full_like(one, -7.0) for one in expected]
        for a, src in enumerate(now):
            for b, dst in enumerate(found):
                ends = view(sizes, src, a, before), view(sizes, dst, b, count), [5]
                common = a * count < (b + 1) * before and b * before < (a + 1) * count
                if common or sizes.num_groups == 1 < len(sizes.groups):
                    migrate(*ends)
                else:
                    with pytest.raises(InvalidArgumentError, match="no channel or head in common"):
                        migrate(*ends)
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got, wanted)
        now = found


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_shapes_are_those_that_vllm_asks_for(count: int) -> None:
    for name in ("mamba2", "mamba2 of 8 groups", "gdn"):
        sizes = recurrent_state(MODELS[name])
        held = sizes.conv_facts(rank=count - 1, num_ranks=count).held()
        channels = sum(part.end - part.begin for part in held)
        if name == "gdn":
            conv, state = MambaStateShapeCalculator.gated_delta_net_state_shape(
                tp_world_size=count,
                num_k_heads=8,
                num_v_heads=16,
                head_k_dim=4,
                head_v_dim=6,
                conv_kernel_size=4,
            )
        else:
            conv, state = MambaStateShapeCalculator.mamba2_state_shape(
                tp_world_size=count,
                intermediate_size=64,
                n_groups=sizes.num_groups,
                num_heads=16,
                head_dim=4,
                state_size=10,
                conv_kernel=4,
            )
        assert sorted(conv) == sorted((channels, sizes.num_columns))
        assert state[0] == sizes.state[0] // count
        assert np.prod(state[1:]) == np.prod(sizes.state[1:])
