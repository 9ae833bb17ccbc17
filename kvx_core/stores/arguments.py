"""Checks the arguments of a PrefixStore. See kvx_core.argument_checks.takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvx_core.argument_checks import (
    Check,
    bad_argument,
    each_is_a,
    flag,
    instance,
    int64,
    int64s,
    integer,
    is_a,
    items,
    one_of,
    or_none,
)
from kvx_core.errors import InvalidArgumentError
from kvx_core.model.record import ModelRecord
from kvx_core.snapshot import Precision, Section, Snapshot
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.covers import Heads, heads_of
from kvx_core.stores.match import Match
from kvx_core.stores.names import is_key

_MAX_SPANS = 1 << 20  # in one sequence: more than any has; a list of so many is 150 MB


def model(value: Any) -> tuple[str, bytes]:
    """Returns the fingerprint of a model and the text of its record, b"" if only a string is given.

    Raises InvalidArgumentError.
    """
    if isinstance(value, ModelRecord):
        return value.fingerprint, value.text
    return instance("fingerprint", value, str, "a string or a ModelRecord"), b""


def accept(name: str, value: Any) -> str:
    """Returns "same" or "lossy". Raises InvalidArgumentError for any other value."""
    return one_of(name, value, "same", "lossy")


def node(name: str, value: Any) -> str:
    """Returns the key of all tokens before a chunk. Raises InvalidArgumentError."""
    if not is_key(instance(name, value, str, "one of nodes(tokens)")):
        raise bad_argument(name, value, "one of nodes(tokens)")
    return str(value)


def heads(name: str, value: Any) -> Heads:
    """Returns one range of heads, or a tuple with a range for each of some layers.

    Raises InvalidArgumentError.
    """
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        if all(_is_range(one) for one in value):
            return tuple(value)
        return tuple(_range(f"{name}[{i}]", one) for i, one in enumerate(value))
    return _range(name, value)


def _is_range(value: Any) -> bool:
    """True for a range of heads as this package writes it: the quick path of every save."""
    if type(value) is not tuple or len(value) != 2:
        return False
    first, last = value
    return type(first) is int and type(last) is int and 0 <= first < last


def _range(name: str, value: Any) -> tuple[int, int]:
    """Returns the first head and one past the last. Raises InvalidArgumentError."""
    found = int64s(name, value)
    if len(found) != 2 or not 0 <= found[0] < found[1]:
        raise InvalidArgumentError(f"{name} is {value}, expected first and one past the last head")
    return found[0], found[1]


BLOBS = is_a(BlobStore, "a BlobStore, such as a Directory")
SECTIONS = each_is_a(Section)
SNAPSHOT = is_a(Snapshot)
SNAPSHOTS = each_is_a(Snapshot)
PRECISION = is_a(Precision)
MATCH = is_a(Match)
CHUNK: dict[str, Check] = {
    "tokens": items,
    "start": int64,
    "stop": int64,
    "node": or_none(node),
    "base": int64,
    "states": flag,
}


def of_layers(name: str, value: Any, num_layers: int) -> tuple[int, ...]:
    """Returns a number of heads for every layer. Raises InvalidArgumentError."""
    if isinstance(value, (list, tuple)):
        found = int64s(name, value)
        if len(found) != num_layers or min(found) < 0 or not any(found):
            raise bad_argument(
                name, value, f"a number of heads for each of the {num_layers} layers"
            )
        return tuple(found)
    return (integer(name, value, 1),) * num_layers


def precisions(value: Any, num_layers: int) -> tuple[Precision, ...]:
    """Returns a precision for every layer. Raises InvalidArgumentError."""
    each = tuple(value) if isinstance(value, (list, tuple)) else (value,) * num_layers
    if len(each) != num_layers or not all(isinstance(p, Precision) and p.formats for p in each):
        raise InvalidArgumentError(
            f"precision is {value!r}, expected Precision.of(dtype of the computation, dtype of K "
            f"and V), or one for each of the {num_layers} layers"
        )
    return each


def check_part(kv_heads: Sequence[int], layers: Sequence[int], heads: Heads) -> None:
    """Raises InvalidArgumentError unless a model has these layers and heads.

    kv_heads: the number of KV heads (or of state heads) of each layer of the model
    """
    if not layers or not 0 <= min(layers) <= max(layers) < len(kv_heads):
        raise InvalidArgumentError(
            f"layers is {list(layers)}, expected some of the {len(kv_heads)} layers of the model"
        )
    ranges = heads_of(heads, len(layers))
    if len(ranges) != len(layers):
        raise InvalidArgumentError(
            f"heads has {len(ranges)} ranges, expected one, or one for each of the {len(layers)} "
            "layers"
        )
    for layer, (_, last) in zip(layers, ranges, strict=True):
        if last > kv_heads[layer]:
            raise InvalidArgumentError(
                f"heads end at {last}, expected at most {kv_heads[layer]}, those of layer {layer}"
            )


def check_chunk(start: int, stop: int, base: int, end: int, chunk_tokens: int) -> None:
    """Raises InvalidArgumentError unless tokens `start` to `stop` are a chunk or its first tokens.

    They must lie within tokens `base` to `end`.
    """
    if start % chunk_tokens or not 0 <= base <= start < stop <= min(start + chunk_tokens, end):
        raise InvalidArgumentError(
            f"start is {start} and stop is {stop} of tokens {base} (base) to {end}, which are "
            f"not a chunk of at most {chunk_tokens} tokens, expected what spans() returned"
        )


def check_range(start: int, stop: int, end: int) -> None:
    """Raises InvalidArgumentError unless `start` to `stop` lie within a match of `end` tokens."""
    if not 0 <= start <= stop <= end:
        raise InvalidArgumentError(
            f"start is {start}, stop is {stop}, expected 0 <= start <= stop <= {end}, the tokens "
            "of the match"
        )


def check_spans(num_tokens: int, chunk_tokens: int) -> None:
    """Raises InvalidArgumentError if `num_tokens` are more tokens than a sequence can have."""
    if num_tokens > _MAX_SPANS * chunk_tokens:
        raise InvalidArgumentError(
            f"num_tokens is {num_tokens}, expected at most {_MAX_SPANS * chunk_tokens}: "
            f"{_MAX_SPANS} chunks of {chunk_tokens} tokens"
        )
