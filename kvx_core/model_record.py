"""ModelRecord: all that keys and values depend on besides the tokens, in no engine's words.

Every adapter maps its engine's resolved configuration to one. Engines whose records are equal
compute the same keys and values, up to rounding, and may share a store; all others may not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvx_core.rope import KEYS, Rope, number

# What a loaded config says of how it was loaded, not of what the model computes.
_CONFIG_IGNORED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
_QUANTIZATION = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What an engine serves. The values of mappings are those of JSON."""

    files: str  # model_files_digest of the model's files, or a name of one's own for them
    architecture: str  # model_type of the decoder
    rope: Rope  # as applied, by layer type: see standard_rope and as_applied
    latent: bool = False  # MLA: the cache holds latents, not the heads' keys and values
    weights: str = "files"  # or what is known of other ones, such as random ones
    # Of weights or activations, beyond what the files say; None: as they say
    quantization: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of config.json, but rope's
    adapters: tuple[str, ...] = ()  # such as LoRA's
    multimodal: tuple[str, ...] = ()  # hashes of what stands behind placeholder tokens
    # Settings of one engine that may matter: engine, version, setting and value
    salts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """SHA-256, as hex: of CacheFacts and PrefixStore."""
        found = ["kvx record 1", number(asdict(self))]
        text = json.dumps(found, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def without_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config, or overrides of one, says besides its rotary parameters.

    How much of a head rotates stays: models have it in places of their own.
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in KEYS and isinstance(value, Mapping):
            factors = {
                name: part["partial_rotary_factor"]
                for name, part in {"": value, **value}.items()
                if isinstance(part, Mapping) and part.get("partial_rotary_factor") is not None
            }
            if factors:
                found["partial_rotary_factor"] = number(factors.get("", sorted(factors.items())))
        elif key not in KEYS and key not in _CONFIG_IGNORED:
            # A quantiser's dtypes say what it computes.
            is_part = isinstance(value, Mapping) and key not in _QUANTIZATION
            found[key] = without_rope(value) if is_part else number(value)
    return found
