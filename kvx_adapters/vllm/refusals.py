"""Models whose prefixes the connectors do not share: the reasons, for engines that start and for
`kvx doctor`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvx_adapters.vllm.states import STATE_AXES
from kvx_core.errors import InvalidArgumentError
from kvx_core.model.recurrent import has_recurrent_state, recurrent_state


def refusal(
    *,
    states: bool = False,
    indexed: bool = False,
    other: bool = False,
    is_chunked: bool = False,
    has_encoder: bool = False,
) -> str:
    """Why a connector does not share the prefixes of a model; "" if it does.

    states:   some layers keep a state: Mamba, linear attention, convolution
    indexed:  some layers keep an indexer's keys
    other:    some layers keep what KVX does not know
    """
    reasons = [
        (states, "layers keep a state"),
        (indexed, "an indexer's keys are not described"),
        (other, "some layers are unknown"),
        (is_chunked, "chunked attention"),
        (has_encoder, "an encoder"),
    ]
    return ", ".join(reason for is_so, reason in reasons if is_so)


def knows_states(text: Any) -> bool:
    """Whether KVXConnector shares the states of a model, if it has some. text: hf_text_config"""
    if not has_recurrent_state(text):
        return False
    with suppress(InvalidArgumentError):  # it does not say all sizes
        sizes = recurrent_state(text)
        return sizes.kind in STATE_AXES or not sizes.state
    return False


def model_refusal(model_config: Any) -> str:
    """Why KVXConnector does not share the prefixes of a model, by its configuration alone.

    model_config: vllm_config.model_config, also before any weights are loaded
    Chunked attention is refused where its blocks are freed: see the connector.
    Source: vllm 0.32 config/model.py, is_hybrid, is_attention_free
    """
    text = model_config.hf_text_config
    return refusal(
        states=model_config.is_attention_free
        or (model_config.is_hybrid and not knows_states(text)),
        indexed=hasattr(text, "index_topk"),
        has_encoder=bool(model_config.is_encoder_decoder),
    )
