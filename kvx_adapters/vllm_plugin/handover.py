"""Hands a running request over to another vLLM: see docs/live_migration.md.

While the request runs, KVXConnector stores its full chunks as always. `hand_over` stores the rest.
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
    """The result of `hand_over`."""

    tokens: list[int]  # prompt and answer; the last token has no keys and values yet
    is_stored: bool  # True: all of it; False: the other engine computes missing tokens


def hand_over(llm: Any, request_id: str) -> HandedOver:
    """Stores the tokens that this engine has computed of a running request, and ends it here.

    llm:        a vllm.LLM with KVXConnector and VLLM_ENABLE_V1_MULTIPROCESSING=0, one rank
    request_id: as llm.llm_engine.add_request returned it
    Call it between two steps. It aborts the request, which has no further output. A file that it
    cannot write raises no error: the other engine computes its tokens.
    Raises InvalidArgumentError, UnsupportedError; the request then goes on in this engine.
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
