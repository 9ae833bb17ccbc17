"""Sentences for wrong arguments, checks that raise them, and the parts of reprs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, TypeVar

from kvx_core.errors import InvalidArgumentError

_T = TypeVar("_T")


def found(value: object) -> str:
    """A value in a sentence: its repr if that is short, else its type."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def wrong(name: str, value: object, expected: str) -> InvalidArgumentError:
    """The exception for a wrong argument: its name, its value and what was expected."""
    return InvalidArgumentError(f"{name} is {found(value)}, expected {expected}")


def instance(name: str, value: object, kind: type[_T], expected: str) -> _T:
    """`value` if it is a `kind`. Raises InvalidArgumentError."""
    if not isinstance(value, kind):
        raise wrong(name, value, expected)
    return value


def one_of(name: str, value: Any, *words: str) -> str:
    """`value` if it is one of these words. Raises InvalidArgumentError."""
    if isinstance(value, str) and value in words:
        return value
    *others, last = map(repr, words)
    raise wrong(name, value, f"{', '.join(others)} or {last}")


def integer(name: str, value: Any, lowest: int = 0, highest: int = 2**32 - 1) -> int:
    """`value` as an int, from any integer type but bool. Raises InvalidArgumentError."""
    expected = f"{lowest} to {highest}"
    if isinstance(value, bool) or hasattr(value, "__dlpack__"):
        raise wrong(name, value, f"an integer, {expected}")
    try:
        number = index(value)
    except TypeError:
        raise wrong(name, value, f"an integer, {expected}") from None
    if not lowest <= number <= highest:
        raise InvalidArgumentError(f"{name} is {number}, expected {expected}")
    return number


def int64(name: str, value: Any) -> int:
    """`value` as an int of 64 bits. Raises InvalidArgumentError."""
    return integer(name, value, -(2**63), 2**63 - 1)


def address(name: str, value: Any) -> int:
    """`value` as an address. Raises InvalidArgumentError."""
    return integer(name, value, 0, 2**64 - 1)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool, from Python's or numpy's. Raises InvalidArgumentError."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise wrong(name, value, "True or False")


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """A shape or strides as a tuple of int. Raises InvalidArgumentError."""
    if not isinstance(value, (tuple, list)):
        raise wrong(name, value, "a tuple of integers")
    if all(type(number) is int for number in value):
        return tuple(value)
    return tuple(int64(f"{name}[{i}]", number) for i, number in enumerate(value))


def fix(desc: object, **fields: Callable[[str, Any], Any]) -> None:
    """Converts fields of a frozen descriptor while it is made, each by its function."""
    for name, make in fields.items():
        object.__setattr__(desc, name, make(name, getattr(desc, name)))


def same_length(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Raises unless there are as many strides as axes."""
    if len(shape) != len(stride):
        raise InvalidArgumentError(
            f"stride has {len(stride)} numbers, expected {len(shape)} as shape has"
        )


def are_sizes(shape: Any, stride: Any) -> bool:
    """Whether these are as many ints as `sizes` would return."""
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        return False
    return set(map(type, shape + stride)) <= {int}


def many(count: int, noun: str) -> str:
    """'1 block', '2 blocks'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def product(extents: Iterable[int | str]) -> str:
    """'2 x 3 x 4'; 'one element' if there are no axes."""
    return " x ".join(map(str, extents)) or "one element"


def listed(name: str, *parts: str | None) -> str:
    """'Name(part, part)' without empty parts."""
    return f"{name}({', '.join(part for part in parts if part)})"
