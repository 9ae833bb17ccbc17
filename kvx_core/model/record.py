"""ModelRecord: all that keys and values depend on besides the tokens, in engine-neutral terms.

Every adapter maps its engine's resolved configuration to a record. Engines with equal records
compute the same keys and values, up to rounding, and may share a store; others may not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvx_core.model.config_values import IGNORED, QUANTIZATION
from kvx_core.model.rope import KEYS, Rope, number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What an engine serves. Values in mappings are JSON values."""

    files: str  # model_files_digest of the model's files, or the user's own name for them
    architecture: str  # model_type of the decoder
    rope: Rope  # as applied, by layer type: see standard_rope and as_applied
    latent: bool = False  # MLA: the cache holds latents, not the heads' keys and values
    weights: str = "files"  # or a description of others, such as random weights
    # Quantisation of weights or activations that the files do not describe; None: there is none
    quantization: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = field(
        default_factory=dict
    )  # of config.json, except rotary parameters
    adapters: tuple[str, ...] = ()  # such as LoRA's
    multimodal: tuple[str, ...] = ()  # hashes of the inputs behind placeholder tokens
    # Settings that only one engine has and that may matter: engine and version, and values by name
    salts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> bytes:
        """All fields as JSON: the record's one text."""
        found = ["kvx record 1", number(asdict(self))]
        return json.dumps(found, sort_keys=True, allow_nan=False).encode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the text as hex: the fingerprint that CacheFacts and PrefixStore take."""
        return hashlib.sha256(self.text).hexdigest()


def without_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, or overrides of one, without its rotary parameters.

    Keeps partial_rotary_factor: models read it from different places.
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
        elif key not in KEYS and key not in IGNORED:
            # In a quantiser's config dtypes matter, so nothing is left out of it.
            is_part = isinstance(value, Mapping) and key not in QUANTIZATION
            found[key] = without_rope(value) if is_part else number(value)
    return found
