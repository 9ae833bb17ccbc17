"""ggml's tensor types, by number, and the formats of KVX that they are."""

from __future__ import annotations

from kvx_core import DType, UnsupportedError
from kvx_core.argument_checks import integer

# Source: llama.cpp v0.5.0 ggml/include/ggml.h, enum ggml_type; common/arg.cpp, kv_cache_types
_DTYPES = {
    0: DType.F32,
    1: DType.F16,
    2: DType.Q4_0,
    3: DType.Q4_1,
    6: DType.Q5_0,
    7: DType.Q5_1,
    8: DType.Q8_0,
    20: DType.IQ4_NL,
    30: DType.BF16,
}
# Types that a context accepts or a blob may name, and that are no format of a cache here. Units of
# the K types have 256 numbers, which is several heads.
_REFUSED = {
    9: "q8_1",
    10: "q2_K",
    11: "q3_K",
    12: "q4_K",
    13: "q5_K",
    14: "q6_K",
    15: "q8_K",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    28: "f64",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
    41: "q1_0",
    42: "q2_0",
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_ACCEPTED = ", ".join(dtype.name.lower() for dtype in _DTYPES.values())


def dtype_of(number: int, name: str = "type") -> DType:
    """The format of a ggml_type.

    name: what errors call it
    Raises UnsupportedError for types that no cache of llama.cpp's command line has.
    """
    number = integer(name, number)
    found = _DTYPES.get(number)
    if found is None:
        known = f" ({_REFUSED[number]})" if number in _REFUSED else ""
        raise UnsupportedError(
            f"{name} is ggml_type {number}{known}, expected one of {_ACCEPTED}. Make the context "
            "with one of these as type_k and type_v"
        )
    return found


def ggml_type(dtype: DType | str) -> int:
    """The ggml_type of a format, for type_k and type_v of llama_context_params.

    Raises UnsupportedError for formats that are no cache type, InvalidArgumentError.
    """
    return _NUMBERS[cache_type(dtype)]


def cache_type(dtype: DType | str, name: str = "dtype") -> DType:
    """A format that caches of llama.cpp have, from a DType or its name.

    Raises UnsupportedError for formats that are no cache type, InvalidArgumentError.
    """
    wanted = DType.of(dtype, name, takes=_NUMBERS)
    if wanted not in _NUMBERS:
        raise UnsupportedError(f"{name} is {wanted.name.lower()}, expected one of {_ACCEPTED}")
    return wanted


def is_quantized(dtype: DType) -> bool:
    """Whether a unit has several numbers, so that values are rounded when they are stored."""
    return dtype.numbers > 1


def row_bytes(dtype: DType, numbers: int) -> int:
    """Bytes of `numbers` consecutive numbers, which are whole units."""
    return numbers // dtype.numbers * dtype.itemsize
