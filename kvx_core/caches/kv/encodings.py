"""Which formats a KvCacheStore stores keys and values in: any of the table, and named pairs."""

from __future__ import annotations

from typing import NamedTuple

from kvx_core.argument_checks import bad_argument
from kvx_core.errors import InvalidArgumentError
from kvx_core.formats import ELEMENTS, Formats, no_dtype
from kvx_core.types import DType


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

# Formats that write_kv converts to: not bytes without a meaning, and none whose scales and zero
# points only a migration writes (spec E.14, E.18).
_WRITTEN = Formats(lambda: (d for d in ELEMENTS if d is not DType.U8 and not d.format.affine))


def of_preset(preset: object) -> Preset:
    """The formats of keys and values of a preset. Raises InvalidArgumentError for another name."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise bad_argument("preset", preset, " or ".join(map(repr, PRESETS)))
    return PRESETS[preset]


def encoding_of(name: str, given: object, num_heads: int, head_dim: int) -> DType:
    """A format whose units fit head_dim, or else all heads of a token.

    name: of the argument
    Raises InvalidArgumentError, which lists the formats that fit.
    """

    def fits(dtype: DType) -> bool:
        return head_dim % dtype.numbers == 0 or num_heads * head_dim % dtype.numbers == 0

    fitting = tuple(filter(fits, _WRITTEN))
    dtype = DType.of(given, name, takes=fitting)
    if dtype not in _WRITTEN:
        raise no_dtype(name, dtype, fitting)
    if not fits(dtype):
        raise InvalidArgumentError(
            f"head_dim is {head_dim} and num_heads * head_dim {num_heads * head_dim}, expected one "
            f"of them to be a multiple of {dtype.numbers}: {name} is {dtype.name}, whose units "
            f"hold {dtype.numbers} numbers (spec E.10). Choose a format with smaller units"
        )
    return dtype
