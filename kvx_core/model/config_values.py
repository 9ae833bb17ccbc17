"""An engine's configuration as JSON that is the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

# Keys of a config that do not change what a model computes: who saved it, with which version, and
# the dtype to load it in.
IGNORED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
# In these objects the same keys say how weights and activations are quantised.
QUANTIZATION = ("quantization_config", "compression_config")


def values(config: Any) -> dict[str, Any]:
    """The fields of a dataclass or pydantic model and their values."""
    fields = getattr(type(config), "model_fields", None)
    names = fields or [field.name for field in dataclasses.fields(config)]
    return {name: getattr(config, name, None) for name in names}


def defaults(config: Any) -> dict[str, Any]:
    """The default of each field that has one, of a dataclass or pydantic model."""
    found = {}
    fields = getattr(type(config), "model_fields", None)
    if fields is None:
        fields = {field.name: field for field in dataclasses.fields(config)}
    for name, field in fields.items():
        # In a pydantic dataclass, the default is a pydantic Field.
        inner: Any = getattr(field, "default", None)
        inner = inner if hasattr(inner, "default_factory") else field
        if callable(inner.default_factory):
            found[name] = inner.default_factory()
        elif not _is_missing(inner.default):
            found[name] = inner.default
    return found


def changed(config: Any, names: Collection[str]) -> dict[str, Any]:
    """The named fields that differ from their defaults, as JSON."""
    found, known = values(config), defaults(config)
    return {
        name: as_json(found[name])
        for name in names
        if name not in known or as_json(found[name]) != as_json(known[name])
    }


def as_json(value: Any) -> Any:
    """`value` as JSON. Objects that cannot be compared get a random text, equal to nothing."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    name = getattr(value, "__qualname__", "<")
    if "<" not in name:  # not of a function in a function
        return f"{value.__module__}.{name}"
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) or hasattr(type(value), "model_fields"):
        fields = {name: as_json(item) for name, item in values(value).items()}
        return {"": type(value).__qualname__} | fields
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=str)
    if hasattr(value, "to_dict"):
        return {"": type(value).__qualname__} | as_json(value.to_dict())
    if isinstance(value, (str, int, float, Path)) or type(value).__module__ == "torch":
        return str(value)
    return f"{type(value).__qualname__} {secrets.token_hex(16)}"


def _is_missing(default: Any) -> bool:
    return (
        default is dataclasses.MISSING
        or default is ...
        or type(default).__name__ == "PydanticUndefinedType"
    )
