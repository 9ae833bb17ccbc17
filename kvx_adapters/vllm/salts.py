"""Settings of vLLM that may change keys and values and for which ModelRecord has no field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvx_adapters.vllm.judged_fields import COUNT, DO_NOT_MATTER, ENVIRONMENT, MAPPED, WALKED
from kvx_core.model.config_values import changed, values


def salts(
    vllm_config: Any, environment: Mapping[str, str], *, version: str
) -> tuple[dict[str, Any], list[str]]:
    """Settings that differ from their default, if they count or are in none of the lists.

    Returns these settings, which salt the record, and the names among them that are in no list.
    """
    found: dict[str, Any] = {}
    unjudged = []
    for config in walk(vllm_config):
        kind = type(config).__name__
        how = {name: judgement(kind, name) for name in values(config)}
        names = [name for name in how if how[name] in (None, "counts")]
        for name, value in changed(config, names).items():
            found[f"{kind}.{name}"] = value
            if how[name] is None:
                unjudged.append(f"{kind}.{name}")
    variables = " ".join(ENVIRONMENT.values()).split()
    found |= {name: environment[name] for name in variables if environment.get(name)}
    return ({"engine": f"vllm {version}", **found} if found else {}), unjudged


def walk(vllm_config: Any) -> Iterator[Any]:
    """The configuration and those parts of it whose fields are listed one by one."""
    yield vllm_config
    for name in WALKED:
        part = getattr(vllm_config, name, None)
        if part is not None:
            yield part


def judgement(kind: str, name: str) -> str | None:
    """The list that a field is in: "does not matter", "mapped", "counts", "walked", or None."""
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
