"""A running request leaves this vLLM, so that another one goes on with it: docs/live_migration.md.

While it runs, KVXConnector stores its full chunks as always. What is left is stored here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvx_adapters.vllm.live import engine_core
from kvx_adapters.vllm_plugin.connector import KVXConnector
from kvx_core import InvalidArgumentError, UnsupportedError


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What `hand_over` did."""

    tokens: list[int]  # prompt and answer; the last one has no keys and values yet
    is_stored: bool  # all of it; False: the other engine computes what it does not find


def hand_over(llm: Any, request_id: str) -> HandedOver:
    """Stores what this engine has computed of a running request, and ends the request here.

    llm:        a vllm.LLM with KVXConnector and VLLM_ENABLE_V1_MULTIPROCESSING=0, one rank
    request_id: as llm.llm_engine.add_request returned it
    Call it between two steps. The request is aborted, with no further output. Files that could not
    be written are no error: the engine that goes on computes their tokens.
    Raises InvalidArgumentError, UnsupportedError; then the request goes on.
    Source: vllm 0.32 v1/engine/llm_engine.py, abort_request
    """
    scheduler = engine_core(llm).scheduler
    connector = scheduler.connector
    if not isinstance(connector, KVXConnector):
        raise UnsupportedError(
            f"the engine's connector is {type(connector).__name__}, expected KVXConnector. Start "
            "it with kv_connector='KVXConnector' in its kv_transfer_config"
        )
    request = scheduler.requests.get(request_id)
    if request is None:
        raise InvalidArgumentError(
            f"request_id is {request_id!r}, which is not an unfinished request. Pass the id that "
            "add_request returned, before the request finishes"
        )
    save = connector.to_hand_over(request)
    is_stored = save is not None and get_kv_transfer_group().save_now(save)
    tokens = list(request.all_token_ids)
    llm.llm_engine.abort_request([request_id], internal=True)
    return HandedOver(tokens, is_stored)
