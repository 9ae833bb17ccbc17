"""Sentences for wrong arguments, checks that raise them, and the parts of reprs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from operator import index
from typing import Any, ParamSpec, TypeVar

from kvx_core.errors import InvalidArgumentError

_T = TypeVar("_T")
_P = ParamSpec("_P")
Check = Callable[[str, Any], Any]  # of a name and a value: the value, as it is taken, or raises


def shown(value: object) -> str:
    """A value in a sentence: its repr if that is short, else its type."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def bad_argument(name: str, value: object, expected: str) -> InvalidArgumentError:
    """The exception for a wrong argument: its name, its value and what was expected."""
    return InvalidArgumentError(f"{name} is {shown(value)}, expected {expected}")


def instance(name: str, value: object, kind: type[_T] | tuple[type[_T], ...], expected: str) -> _T:
    """`value` if it is a `kind`. Raises InvalidArgumentError."""
    if not isinstance(value, kind):
        raise bad_argument(name, value, expected)
    return value


def one_of(name: str, value: Any, *words: str) -> str:
    """`value` if it is one of these words. Raises InvalidArgumentError."""
    if isinstance(value, str) and value in words:
        return value
    *others, last = map(repr, words)
    raise bad_argument(name, value, f"{', '.join(others)} or {last}")


def integer(name: str, value: Any, lowest: int = 0, highest: int = 2**32 - 1) -> int:
    """`value` as an int, from any integer type but bool. Raises InvalidArgumentError."""
    expected = f"{lowest} to {highest}"
    if isinstance(value, bool) or hasattr(value, "__dlpack__"):
        raise bad_argument(name, value, f"an integer, {expected}")
    try:
        number = index(value)
    except TypeError:
        raise bad_argument(name, value, f"an integer, {expected}") from None
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
    raise bad_argument(name, value, "True or False")


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """A shape or strides as a tuple of int. Raises InvalidArgumentError."""
    if not isinstance(value, (tuple, list)):
        raise bad_argument(name, value, "a tuple of integers")
    return tuple(int64(f"{name}[{i}]", number) for i, number in enumerate(value))


def text(name: str, value: Any) -> str:
    """`value` if it is a str that UTF-8 can encode. Raises InvalidArgumentError."""
    with suppress(UnicodeEncodeError):
        instance(name, value, str, "a str").encode()
        return str(value)
    raise bad_argument(name, value, "a text of Unicode characters")


def items(name: str, value: Any) -> Any:
    """`value` if it has a length and positions, as a list has. Raises InvalidArgumentError."""
    if not isinstance(value, (str, bytes, dict)) and hasattr(value, "__getitem__"):
        try:
            len(value)
        except (TypeError, RuntimeError):  # a tensor without axes; torch's sparse ones
            pass
        else:
            return value
    raise bad_argument(name, value, "a list or an array of integers")


def int64s(name: str, value: Any) -> tuple[int, ...]:
    """Integers that can be gone through, as a tuple. Raises InvalidArgumentError."""
    found = each(name, value, "a list of integers")
    return tuple(int64(f"{name}[{i}]", number) for i, number in enumerate(found))


def each(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """What can be gone through, but no text or dict, as a tuple. Raises InvalidArgumentError."""
    if not isinstance(value, (str, bytes, dict)):
        with suppress(TypeError):
            return tuple(value)
    raise bad_argument(name, value, expected)


def list_of(name: str, given: Any, kind: type[_T], expected: str) -> tuple[_T, ...]:
    """`given`, a list or tuple of `kind`. Raises InvalidArgumentError."""
    if not isinstance(given, (list, tuple)):
        raise bad_argument(name, given, f"a list or tuple of {expected}")
    for i, one in enumerate(given):
        if not isinstance(one, kind):
            raise bad_argument(
                f"{name}[{i}]", one, f"a {kind.__name__}: a list or tuple of {expected}"
            )
    return tuple(given)


def or_none(check: Check) -> Check:
    """The same check, which None passes."""
    return lambda name, value: None if value is None else check(name, value)


def is_a(kind: type, expected: str = "") -> Check:
    """The check that a value is a `kind`."""
    said = expected or f"a {kind.__name__}"
    return lambda name, value: instance(name, value, kind, said)


def each_is_a(kind: type) -> Check:
    """The check that a value is a list or tuple of `kind`."""
    return lambda name, value: list_of(name, value, kind, kind.__name__)


def takes(**checks: Check) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Checks arguments of a function, by their names, before it runs: it gets what checks return.

    What is not given is not checked.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        names = list(inspect.signature(function).parameters)
        places = [(names.index(name), name, check) for name, check in checks.items()]

        @wraps(function)
        def checked(*args: Any, **given: Any) -> _T:
            found = list(args)
            for at, name, check in places:
                if at < len(found):
                    found[at] = check(name, found[at])
                elif name in given:
                    given[name] = check(name, given[name])
            return function(*found, **given)

        return checked

    return decorate


def coerce_fields(desc: object, **fields: Callable[[str, Any], Any]) -> None:
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
    numbers = shape + stride
    if not numbers:
        return True
    return set(map(type, numbers)) == {int} and -(2**63) <= min(numbers) <= max(numbers) < 2**63


def plural(count: int, noun: str) -> str:
    """'1 block', '2 blocks'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def product(extents: Iterable[int | str]) -> str:
    """'2 x 3 x 4'; 'one element' if there are no axes."""
    return " x ".join(map(str, extents)) or "one element"


def format_repr(name: str, *parts: str | None) -> str:
    """'Name(part, part)' without empty parts."""
    return f"{name}({', '.join(part for part in parts if part)})"
