"""A case: one promise, checked on one subject."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any


class Outcome(StrEnum):
    """How a case ended."""

    PASS = "pass"
    WRONG = "wrong"  # other bytes, states or tokens of an answer than there should be
    LOST = "lost"  # tokens that should be found, moved or answered, and are not
    REFUSED = "refused"  # an error in place of an answer
    CRASH = "crash"  # the process ended
    HANG = "hang"  # the case did not end within its limit
    NOT_APPLICABLE = "n/a"  # the subject has no such part


class Finding(Exception):
    """A case did not pass; the text says what was expected and what came."""

    outcome: Outcome


class Wrong(Finding):
    """Other bytes, states or tokens than there should be."""

    outcome = Outcome.WRONG


class Lost(Finding):
    """Tokens that should be found, moved or answered, and are not."""

    outcome = Outcome.LOST


class Hung(Finding):
    """The engine waited for what it should not wait for."""

    outcome = Outcome.HANG


class NotApplicable(Finding):
    """The subject has no such part. The text says which."""

    outcome = Outcome.NOT_APPLICABLE


@dataclass(frozen=True)
class Case:
    """One promise.

    check: takes the subject; returns if the promise holds, else raises `Wrong`, `Lost` or
        `NotApplicable`. Any other exception is Outcome.REFUSED.
    says: the promise, in one sentence.
    source: where it was broken, or where it is promised.
    seconds: after these it hangs.
    """

    name: str
    says: str
    source: str
    check: Callable[[Any], None]
    seconds: float


def case(source: str, *, seconds: float = 60) -> Callable[[Callable[[Any], None]], Case]:
    """Makes a case of a function; its docstring is the promise, its name and module the name."""

    def make(check: Callable[[Any], None]) -> Case:
        room = check.__module__.rsplit(".", 1)[-1]
        says = inspect.getdoc(check)
        if not says:
            raise TypeError(
                f"{check.__module__}.{check.__name__} has no docstring to say its promise"
            )
        name = f"{room}.{check.__name__.removeprefix('_')}"
        return Case(name, " ".join(says.split()), source, check, seconds)

    return make


def summary(error: Exception) -> str:
    """An exception and where it was raised, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def cases_in(module: ModuleType) -> Iterator[Case]:
    """The cases of a module, in its order."""
    return (value for value in vars(module).values() if isinstance(value, Case))
