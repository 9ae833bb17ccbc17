"""Values of vLLM's configuration as JSON: the same for the same setting in every process."""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def defaults(config: Any) -> dict[str, Any]:
    """The default of each field that has one, of an object whose class is a dataclass."""
    found = {}
    for field in dataclasses.fields(config):
        default, factory = field.default, field.default_factory
        # pydantic's Field stands where the default does.
        factory = getattr(default, "default_factory", None) or factory
        default = getattr(default, "default", default)
        if factory is not dataclasses.MISSING and callable(factory):
            found[field.name] = factory()
        elif default is not dataclasses.MISSING and default is not ...:
            found[field.name] = default
    return found


def as_json(value: Any) -> Any:
    """`value` as JSON. What cannot be told from others of its type is like nothing else at all."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    name = getattr(value, "__qualname__", "<")
    if "<" not in name:  # not of a function in a function
        return f"{value.__module__}.{name}"
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {"": type(value).__qualname__} | {n: as_json(getattr(value, n, None)) for n in names}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=str)
    if hasattr(value, "to_dict"):
        return {"": type(value).__qualname__} | as_json(value.to_dict())
    text = str(value)
    if isinstance(value, (str, int, float, Path)) or type(value).__module__ == "torch":
        return text
    return f"{type(value).__qualname__} {secrets.token_hex(16)}"
