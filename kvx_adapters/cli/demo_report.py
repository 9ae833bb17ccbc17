"""What `kvx demo --json` tells of the caches, the prompts and the route. Times are in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvx_adapters.cli.demo_hops import Hop, Stop
from kvx_adapters.cli.demo_model import ANSWER, PROMPTS, QUESTION
from kvx_adapters.cli.demo_route import Leg, Station


def hops_report(stops: Sequence[Stop], hops: Sequence[Hop]) -> list[dict[str, Any]]:
    """A migration each. An engine with an asterisk is not running."""
    return [
        {
            "from": src.cache_of,
            "to": dst.cache_of,
            "found_by": dst.found_by,
            "block_size": dst.span.view.layers[0].block_size,
            "bytes": hop.num_bytes,
            "first_seconds": hop.first,
            "again_seconds": hop.again,
            "verified": hop.arrived.ok,
        }
        for src, dst, hop in zip(stops, stops[1:], hops, strict=False)
    ]


def prompts_report(
    prompt_lens: Sequence[int],
    from_vllm: Sequence[list[int]],
    from_hf: Sequence[list[int]],
    text: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """A prompt each.

    text: of tokens
    """
    return [
        {
            "prompt": prompt,
            "num_tokens": length,
            "vllm": text(ours),
            "transformers": text(theirs),
            "equal": ours == theirs,
        }
        for prompt, length, ours, theirs in zip(
            PROMPTS, prompt_lens, from_vllm, from_hf, strict=True
        )
    ]


def route_report(
    stations: Sequence[Station],
    absent: Mapping[Station, str],
    legs: Sequence[Leg],
    alone: list[int],
    text: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The conversation.

    absent: why each of the other engines is not here
    alone:  the tokens that vLLM says alone
    text:   of tokens
    """
    versions = [sys.modules["vllm"].__version__, *(station.version for station in stations)]
    return {
        "question": QUESTION,
        "learnt": ANSWER,
        "said": text([token for leg in legs for token in leg.tokens]),
        "vllm_alone": text(alone),
        "engines": [
            _leg_report(leg, version, text) for leg, version in zip(legs, versions, strict=True)
        ],
        "left_out": [
            {"engine": station.title, "why": why, "install": station.install}
            for station, why in absent.items()
        ],
    }


def _leg_report(leg: Leg, version: str, text: Callable[[list[int]], str]) -> dict[str, Any]:
    said = {
        "engine": leg.title,
        "version": version,
        "says": text(leg.tokens),
        "num_tokens": len(leg.tokens),
        "words_seconds": leg.spoke,
    }
    if leg.arrival is None:
        return said
    return said | {
        "tokens_moved": leg.arrival.num_tokens,
        "bytes": leg.arrival.num_bytes,
        "room_seconds": leg.arrival.room,
        "kvx_seconds": leg.arrival.moved,
        "again_seconds": leg.arrival.again,
        "verified": leg.arrival.verification.ok,
        "flipped_bit_found": leg.arrival.flip.is_found,
        "says_from_zeros": text(leg.from_zeros),
    }
