"""The cache of an engine that runs in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvx_adapters.vllm.facts import cache_facts
from kvx_adapters.vllm.groups import group_view, layer_groups, layout_before_29
from kvx_adapters.vllm.tables import block_table
from kvx_core import BlockTable, CacheSpan, CacheView, InvalidArgumentError, UnsupportedError


def live_view(llm: Any, *, fingerprint: str | None = None) -> CacheView:
    """The whole cache of a vllm.LLM that runs in this process, zero-copy.

    llm:         with VLLM_ENABLE_V1_MULTIPROCESSING=0, one rank, one group of layers
    fingerprint: of the model as it is computed, see kvx_core.ModelRecord
    The view is valid as long as the engine lives; its blocks change with every engine step.
    Raises UnsupportedError, InvalidArgumentError.
    Source: vllm 0.32 v1/worker/gpu_model_runner.py, initialize_kv_cache; v1/kv_cache_interface.py
    """
    runner = model_runner(llm)
    layers = runner.compilation_config.static_forward_context
    groups = layer_groups(
        runner.kv_cache_config, layers, vllm_version(llm), layout=layout_before_29()
    )
    if len(groups) != 1:
        raise UnsupportedError(
            f"the engine has {len(groups)} KV cache groups, expected 1. Describe each group with "
            "group_view: every group has its own block table"
        )
    (group,) = groups
    kv_caches = {name: layers[name].kv_cache for name in group.layer_names}
    facts = cache_facts(
        llm.llm_engine.model_config,
        runner.model.modules(),
        version=vllm_version(llm),
        fingerprint=fingerprint,
        first_kv_head=0,
    )
    return group_view(group, kv_caches, facts, layers)[0]


def live_span(llm: Any, request_ids: Sequence[str], *, fingerprint: str | None = None) -> CacheSpan:
    """Unfinished requests in the cache of `live_view`: one end of a migration of their tokens.

    llm, fingerprint: as for `live_view`
    request_ids:      as llm.llm_engine.add_request returned them
    At each use more tokens than a request has computed are refused, and a request that is finished
    or has other blocks: one that was preempted. The token that was sampled last is not computed.
    Raises UnsupportedError, InvalidArgumentError.
    Source: vllm 0.32 v1/request.py, Request.num_computed_tokens, num_output_placeholders
    """
    view, table = live_view(llm, fingerprint=fingerprint), live_block_table(llm, request_ids)
    scheduler = engine_core(llm).scheduler
    ids = tuple(request_ids)
    blocks = {one: _blocks(scheduler, one) for one in ids}
    held = replace(
        view,
        outdated=partial(_outdated, scheduler, blocks),
        holds=partial(held_tokens, scheduler, ids),
    )
    return held.at(table)


def _blocks(scheduler: Any, request_id: str) -> list[int]:
    return list(scheduler.kv_cache_manager.get_block_ids(request_id)[0])


def _outdated(scheduler: Any, blocks: dict[str, list[int]]) -> str | None:
    """Why requests lie no longer where they did; None if they do."""
    for name, then in blocks.items():
        if name not in scheduler.requests:
            return (
                f"request {name!r} is finished, and its blocks are free. Make a span of requests "
                "that are not"
            )
        now = _blocks(scheduler, name)
        if now[: len(then)] != then:
            return (
                f"request {name!r} has the blocks {now}, expected {then} as when the span was "
                "made. Make a new span"
            )
    return None


def held_tokens(scheduler: Any, request_ids: Sequence[str]) -> list[int]:
    """The tokens that requests have computed; a step that is under way counts as not done."""
    found = [scheduler.requests[request_id] for request_id in request_ids]
    return [
        max(0, int(one.num_computed_tokens) - int(getattr(one, "num_output_placeholders", 0)))
        for one in found
    ]


def live_block_table(llm: Any, request_ids: Sequence[str]) -> BlockTable:
    """The block table of unfinished requests in `live_view(llm)`, as it is now.

    request_ids: as llm.llm_engine.add_request returned them
    Blocks are freed when a request finishes, so use them before the step that finishes it.
    Raises UnsupportedError, InvalidArgumentError.
    Source: vllm 0.32 v1/core/kv_cache_manager.py, KVCacheManager.get_block_ids
    """
    scheduler = engine_core(llm).scheduler
    gone = [request_id for request_id in request_ids if request_id not in scheduler.requests]
    if gone:
        raise InvalidArgumentError(
            f"request_ids has {gone[0]!r}, which is not an unfinished request. Pass the ids that "
            "add_request returned, before the request finishes: its blocks are then freed"
        )
    runner = model_runner(llm)
    name = runner.kv_cache_config.kv_cache_groups[0].layer_names[0]
    kernel_blocks = runner.compilation_config.static_forward_context[name].kv_cache.shape[0]
    return block_table(
        [scheduler.kv_cache_manager.get_block_ids(request_id)[0] for request_id in request_ids],
        kernel_blocks_per_block=kernel_blocks // runner.kv_cache_config.num_blocks,
    )


def engine_core(llm: Any) -> Any:
    """vLLM's EngineCore of a vllm.LLM that runs in this process, one rank.

    Raises UnsupportedError.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise UnsupportedError(
            "the engine runs in another process, where its cache cannot be seen. Set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported"
        )
    parallel = llm.llm_engine.vllm_config.parallel_config
    for field in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, field, 1) != 1:
            raise UnsupportedError(
                f"{field} is {getattr(parallel, field)}, expected 1: the other ranks run in other "
                "processes. Describe each rank's tensors there, with cache_view"
            )
    return core


def model_runner(llm: Any) -> Any:
    return engine_core(llm).model_executor.driver_worker.worker.model_runner


def vllm_version(llm: Any) -> str:
    return str(sys.modules[type(llm).__module__.partition(".")[0]].__version__)
