"""Which formats a KvCacheStore stores keys and values in: any of the table, and named pairs."""

from __future__ import annotations

from typing import NamedTuple

from kvx_core.errors import InvalidArgumentError
from kvx_core.types import DType
from kvx_core.words import wrong


class Preset(NamedTuple):
    """Two formats."""

    key: DType
    value: DType


# The one place that says what a preset is. TurboQuant's units hold 128 numbers, of a head or of
# several: where they divide neither head_dim nor num_heads * head_dim, a preset is refused.
# Source: SKaiNET, KvCacheStore.kt, fromPreset
PRESETS = {
    "safe-lowbit": Preset(DType.Q8_0, DType.TQ4),
    "balanced": Preset(DType.TQ4, DType.TQ4),
    "experimental-max": Preset(DType.TQ3, DType.TQ3),
}


def of_preset(preset: object) -> Preset:
    """The formats of keys and values of a preset. Raises InvalidArgumentError for another name."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise wrong("preset", preset, " or ".join(map(repr, PRESETS)))
    return PRESETS[preset]


def encoding_of(name: str, given: object, num_heads: int, head_dim: int) -> DType:
    """A format whose units fit head_dim, or else all heads of a token.

    name: of the argument
    What libkvx cannot write into a cache, libkvx refuses: see Half.
    Raises InvalidArgumentError.
    """
    dtype = DType.called(name, given)
    if dtype is DType.INVALID:
        raise wrong(name, "INVALID", "a format of spec 4.3 or E.10")
    numbers = dtype.format.rounding or dtype.numbers > 1 or dtype.format.affine
    if not numbers:
        raise wrong(name, dtype.name, "a format of numbers, such as bfloat16 or Q8_0 (spec E.10)")
    if head_dim % dtype.numbers and num_heads * head_dim % dtype.numbers:
        raise InvalidArgumentError(
            f"head_dim is {head_dim} and num_heads * head_dim {num_heads * head_dim}, expected one "
            f"of them to be a multiple of {dtype.numbers}: {name} is {dtype.name}, whose units "
            f"hold {dtype.numbers} numbers (spec E.10). Choose a format with smaller units"
        )
    return dtype
