"""States of recurrent layers in vLLM's pages, as planes of one entry per sequence.

A group of recurrent layers has pages of one state each: the convolution, then the recurrent state,
then padding. The pages of all groups lie in one storage, so that a block belongs to one group at a
time; block 0 is nobody's. A request's running state is in one block of each group: with prefix
caching in the column of its last computed token, else in its only column.
Source: vllm 0.32 v1/kv_cache_interface.py, MambaSpec; v1/worker/mamba_utils.py; model_executor/
layers/mamba/mamba_utils.py, is_conv_state_dim_first; as measured on CPU
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from kvx_adapters.vllm.facts import cache_facts
from kvx_adapters.vllm.groups import group_view, layer_groups, layer_index
from kvx_adapters.vllm.live import engine_core, held_tokens, model_runner, vllm_version
from kvx_adapters.vllm.tables import block_table
from kvx_core import (
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Plane,
    UnsupportedError,
)
from kvx_core.argument_checks import one_of
from kvx_core.model.recurrent import RecurrentState, recurrent_state

_SPEC = "MambaSpec"
_CONV = {"SD": ("block", "time", "channel"), "DS": ("block", "channel", "time")}
STATE_AXES = {
    "gdn": ("block", "head", "value", "key"),
    "mamba2": ("block", "head", "head_dim", "state"),
    "mamba1": ("block", "channel", "state"),
}


def state_view(
    states: Mapping[int, Sequence[Tensor]],
    block_ids: Mapping[int, Sequence[int]],
    facts: CacheFacts,
    *,
    config: Any,
    num_tokens: Sequence[int],
    conv_layout: Literal["SD", "DS"],
    rank: int = 0,
    num_ranks: int = 1,
) -> CacheView:
    """The states of some requests, zero-copy: a dense view of planes, without K and V.

    states:      of each recurrent layer, by its index in the model, its kv_cache in
                 static_forward_context: (num_blocks, kernel - 1, channels) or (num_blocks,
                 channels, kernel - 1) and, but for short convolutions, (num_blocks, heads, ...)
    block_ids:   of each of these layers, the block of each request's running state
    facts:       of the model
    config:      model_config.hf_text_config: says what a state is made of
    num_tokens:  that each state stands for, now: a step changes states in place, and makes another
                 block the running one. Make a new view after each
    conv_layout: "SD", vLLM's default, or "DS": VLLM_SSM_CONV_STATE_LAYOUT of this process
    rank, num_ranks: of tensor parallelism
    On CPU the state of a gated delta net is [key, value] in memory, whatever its shape says.
    Raises UnsupportedError, InvalidArgumentError.
    """
    one_of("conv_layout", conv_layout, *_CONV)
    sizes = recurrent_state(config)
    if sizes.state and sizes.kind not in STATE_AXES:
        raise UnsupportedError(
            f"config is of a model with states of {sizes.kind}, expected one of "
            f"{', '.join(STATE_AXES)} or short convolutions: of others it is not known which axis "
            "is which"
        )
    planes: list[Plane] = []
    for layer, tensors in states.items():
        blocks = [int(block) for block in block_ids[layer]]
        if len(blocks) != len(num_tokens) or min(blocks, default=1) < 1:
            raise InvalidArgumentError(
                f"block_ids of layer {layer} are {blocks}, expected {len(num_tokens)} of 1 or "
                "more: block 0 holds no state"
            )
        ranks = {"rank": rank, "num_ranks": num_ranks}
        planes += _planes(layer, tensors, blocks, sizes, conv_layout, ranks)
    counts = [int(count) for count in num_tokens]
    return CacheView((), facts, planes=tuple(planes), dense=True, state_tokens=counts)


def _planes(
    layer: int,
    tensors: Sequence[Tensor],
    blocks: list[int],
    sizes: RecurrentState,
    conv_layout: str,
    ranks: Mapping[str, int],
) -> Iterator[Plane]:
    name = f"states[{layer}]"
    if len(tensors) != 1 + bool(sizes.state):
        raise InvalidArgumentError(
            f"{name} has {len(tensors)} tensors, expected {1 + bool(sizes.state)}: a convolution "
            "and a state, but for short ones"
        )
    conv = tensors[0]
    axes: tuple[str, ...] = _CONV[conv_layout]
    columns = conv.shape[axes.index("time")]
    if columns != sizes.num_columns:
        raise UnsupportedError(
            f"{name}[0] has {columns} columns in layout {conv_layout}, expected "
            f"{sizes.num_columns}, kernel size - 1. Give the layout that this process has, or "
            "start vLLM without speculation: with drafts there are more columns, and which ones "
            "count changes in each step"
        )
    facts = sizes.conv_facts(rank=ranks["rank"], num_ranks=ranks["num_ranks"])
    yield Plane.of_state(conv, axes, facts, layer, slots=blocks, name=f"{name}[0]")
    if not sizes.state:
        return
    state, axes = tensors[1], STATE_AXES[sizes.kind]
    if sizes.kind == "gdn" and state.device.type == "cpu":
        heads, values, keys = state.shape[1:]
        strides = (*state.stride()[:2], values, 1)
        state = state.as_strided((state.shape[0], heads, keys, values), strides)
        axes = ("block", "head", "key", "value")
    of_state = sizes.state_facts(rank=ranks["rank"], num_ranks=ranks["num_ranks"])
    yield Plane.of_state(state, axes, of_state, layer, slots=blocks, name=f"{name}[1]")


def live_hybrid_span(
    llm: Any, request_ids: Sequence[str], *, fingerprint: str | None = None
) -> CacheSpan:
    """Unfinished requests of a hybrid model in an engine that runs in this process: their tokens
    and their states, one end of a migration.

    llm:         with VLLM_ENABLE_V1_MULTIPROCESSING=0 and async_scheduling=False, one rank, one
                 group of layers with attention
    request_ids, fingerprint: as for `live_span`
    At each use a request that has computed other tokens since, or lies in other blocks, is refused:
    make a new span after each step.
    Raises UnsupportedError, InvalidArgumentError.
    """
    runner, scheduler = model_runner(llm), engine_core(llm).scheduler
    config = runner.kv_cache_config
    groups = config.kv_cache_groups
    attention = [i for i, one in enumerate(groups) if type(one.kv_cache_spec).__name__ != _SPEC]
    if len(attention) != 1 or len(attention) == len(groups):
        raise UnsupportedError(
            f"the engine has {len(groups)} KV cache groups, {len(attention)} of them with keys and "
            "values, expected one of these and some with states. Use live_span for others"
        )
    if getattr(llm.llm_engine.vllm_config.scheduler_config, "async_scheduling", False):
        raise UnsupportedError(
            "async_scheduling is True, expected False: a step that is under way changes the states "
            "in place. Start vLLM with async_scheduling=False"
        )
    (index,) = attention
    layers = runner.compilation_config.static_forward_context
    (group,) = layer_groups(
        replace(config, kv_cache_groups=[groups[index]]), layers, vllm_version(llm)
    )
    model_config = llm.llm_engine.model_config
    facts = cache_facts(
        model_config,
        runner.model.modules(),
        version=vllm_version(llm),
        fingerprint=fingerprint,
        first_kv_head=0,
    )
    caches = {name: layers[name].kv_cache for name in group.layer_names}
    view, cut = group_view(group, caches, facts, layers)
    counts = held_tokens(scheduler, request_ids)
    blocks = [scheduler.kv_cache_manager.get_block_ids(one) for one in request_ids]
    states, running = {}, {}
    for i, one in enumerate(groups):
        if i == index:
            continue
        column = partial(state_column, one.kv_cache_spec)
        for name in one.layer_names:
            states[layer_index(name)] = layers[name].kv_cache
            running[layer_index(name)] = [
                ids[i][column(count)] for ids, count in zip(blocks, counts, strict=True)
            ]
    found = state_view(
        states,
        running,
        view.facts,
        config=model_config.hf_text_config,
        num_tokens=counts,
        conv_layout=conv_layout_here(),
    )
    moved = partial(_moved_on, scheduler, tuple(request_ids), counts, blocks)
    whole = replace(view, outdated=moved, holds=lambda: held_tokens(scheduler, request_ids))
    table = block_table([ids[index] for ids in blocks], kernel_blocks_per_block=cut)
    return whole.beside(found).at(table)


def state_column(spec: Any, num_tokens: int) -> int:
    """The column of a request's blocks that has the state after so many tokens."""
    if getattr(spec, "num_speculative_blocks", 0):
        raise UnsupportedError(
            "the engine speculates, expected none: a state is then in the column of the last "
            "accepted token. Start vLLM without speculative_config"
        )
    mode = spec.mamba_cache_mode
    if mode not in ("none", "align"):
        raise UnsupportedError(
            f"mamba_cache_mode is {mode!r}, expected 'none' or 'align', as vllm 0.32 has it"
        )
    return (num_tokens - 1) // int(spec.block_size) if mode == "align" else 0


def conv_layout_here() -> Literal["SD", "DS"]:
    """The layout of convolutions in this process."""
    utils = sys.modules["vllm.model_executor.layers.mamba.mamba_utils"]
    return "DS" if utils.is_conv_state_dim_first() else "SD"


def _moved_on(
    scheduler: Any, request_ids: Sequence[str], counts: list[int], blocks: list[Any]
) -> str | None:
    """Why requests are no longer as they were described; None if they are."""
    for name, count, then in zip(request_ids, counts, blocks, strict=True):
        if name not in scheduler.requests:
            return f"request {name!r} is finished, and its blocks are free"
        (now,) = held_tokens(scheduler, [name])
        if now != count or scheduler.kv_cache_manager.get_block_ids(name) != then:
            return (
                f"request {name!r} has computed {now} tokens and lies in other blocks, or had "
                f"{count} when the span was made. Make a new span"
            )
    return None
