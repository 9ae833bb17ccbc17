"""Settings of vLLM that may change keys and values, and that ModelRecord has no word for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kvx_adapters.vllm.config_values import as_json, defaults
from kvx_adapters.vllm.judged_fields import COUNT, DO_NOT_MATTER, ENVIRONMENT, MAPPED, WALKED


def salts(
    vllm_config: Any, environment: Mapping[str, str], *, version: str
) -> tuple[dict[str, Any], list[str]]:
    """Settings that are not at their default and count, or that nobody has judged.

    Returns what salts the record, and of it the names that nobody has judged.
    """
    found: dict[str, Any] = {}
    unjudged = []
    for config in walk(vllm_config):
        kind = type(config).__name__
        known = defaults(config)
        for name in (field.name for field in dataclasses.fields(config)):
            how = judgement(kind, name)
            if how not in (None, "counts"):
                continue
            value = as_json(getattr(config, name, None))
            if name in known and value == as_json(known[name]):
                continue
            found[f"{kind}.{name}"] = value
            if how is None:
                unjudged.append(f"{kind}.{name}")
    for names in ENVIRONMENT.values():
        found |= {name: environment[name] for name in names.split() if environment.get(name)}
    return ({"engine": f"vllm {version}", **found} if found else {}), unjudged


def walk(vllm_config: Any) -> Iterator[Any]:
    """The configuration and the parts of it that are judged field by field."""
    yield vllm_config
    for name in WALKED:
        part = getattr(vllm_config, name, None)
        if part is not None:
            yield part


def judgement(kind: str, name: str) -> str | None:
    """What is known of a field: "does not matter", "mapped", "counts" or "walked"; else None."""
    if kind == "VllmConfig" and name in WALKED:
        return "walked"
    for how, lists in (
        ("does not matter", DO_NOT_MATTER),
        ("mapped", MAPPED),
        ("counts", COUNT),
    ):
        if any(name in names.split() for names in lists.get(kind, {}).values()):
            return how
    return None
