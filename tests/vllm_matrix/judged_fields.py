"""Every field of the installed vLLM's config classes has been judged, or an error names it.

python tests/vllm_matrix/judged_fields.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import vllm.config

from kvx_adapters.vllm.judged_fields import WALKED
from kvx_adapters.vllm.salts import judgement


class UnjudgedError(Exception):
    """Fields that are in no list."""


def classes() -> list[Any]:
    """VllmConfig, and of its parts those whose fields are judged one by one."""
    parts = [
        getattr(vllm.config, "".join(word.capitalize() for word in name.split("_")))
        for name in WALKED
    ]
    return [vllm.config.VllmConfig, *parts]


def unjudged() -> list[str]:
    return [
        f"{kind.__name__}.{field.name}"
        for kind in classes()
        for field in dataclasses.fields(kind)
        if judgement(kind.__name__, field.name) is None
    ]


if __name__ == "__main__" and unjudged():
    raise UnjudgedError(f"nobody has judged {', '.join(unjudged())}")
