"""Which formats a KvCacheStore stores keys and values in: any of the table, and named pairs."""

from __future__ import annotations

from typing import NamedTuple

from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.types import DType
from kvx_core.words import wrong


class Preset(NamedTuple):
    """The names of two formats."""

    key: str
    value: str


# The one place that says what a preset is. A format is looked up in the table by its name, and
# never replaced by another. "balanced" and "experimental-max" are TurboQuant.
# Source: SKaiNET, KvCacheStore.kt, fromPreset; its "safe-lowbit" has values of TurboQuant's 4 bits
PRESETS = {
    "safe-lowbit": Preset("Q8_0", "Q4_0"),
    "balanced": Preset("TQ4", "TQ4"),
    "experimental-max": Preset("TQ3", "TQ3"),
}


def of_preset(preset: object) -> tuple[DType, DType]:
    """The formats of keys and values of a preset.

    Raises InvalidArgumentError for an unknown name, UnsupportedError for a format that the table
    does not have.
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise wrong("preset", preset, " or ".join(map(repr, PRESETS)))
    found = []
    for half, name in PRESETS[preset]._asdict().items():
        try:
            found.append(DType.from_name(name))
        except InvalidArgumentError:
            raise UnsupportedError(
                f"preset {preset!r} stores {half}s as {name}, which is not in this version's table "
                f"of formats (spec 4.3, E.10). Pass key_encoding and value_encoding instead, such "
                "as Q4_0"
            ) from None
    return found[0], found[1]


def encoding_of(name: str, given: object, num_heads: int, head_dim: int) -> DType:
    """A format whose units fit head_dim, or else all heads of a token.

    name: of the argument
    What libkvx cannot write into a cache, libkvx refuses: see Half.
    Raises InvalidArgumentError.
    """
    dtype = DType.called(name, given)
    if dtype is DType.INVALID:
        raise wrong(name, "INVALID", "a format of spec 4.3 or E.10")
    if head_dim % dtype.numbers and num_heads * head_dim % dtype.numbers:
        raise InvalidArgumentError(
            f"head_dim is {head_dim} and num_heads * head_dim {num_heads * head_dim}, expected one "
            f"of them to be a multiple of {dtype.numbers}: {name} is {dtype.name}, whose units "
            f"hold {dtype.numbers} numbers (spec E.10). Choose a format with smaller units"
        )
    return dtype
