"""watch: wraps a method of an engine's class, so that a context runs around each call.

Engines do not tell a connector when users change weights. So the methods that write weights are
wrapped, once per process. An error in watching a call never reaches the method's caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

# Makes a context for a call from its arguments. If it yields a list, the result is appended to it.
Judge = Callable[..., AbstractContextManager[list[Any] | None]]
# Takes an error in watching: a call may have gone unseen.
GiveUp = Callable[[Exception], object]


def watch(kind: type, name: str, judge: Judge, give_up: GiveUp) -> None:
    """Wraps the method `name` of `kind`. Idempotent. Does nothing if there is no such method."""
    own = getattr(kind, name, None)
    if own is None or hasattr(own, "kvx_watches"):
        return

    @functools.wraps(own)
    def watched(self: Any, *arguments: Any, **keywords: Any) -> Any:
        call = _begin(judge, give_up, self, arguments, keywords)
        try:
            result = own(self, *arguments, **keywords)
        except BaseException as error:
            _end(call, give_up, error)
            raise
        _end(call, give_up, None, result)
        return result

    watched.kvx_watches = True  # type: ignore[attr-defined]
    setattr(kind, name, watched)


@dataclass(slots=True)
class _Call:
    """A watched call that is under way."""

    context: AbstractContextManager[list[Any] | None]
    takes: list[Any] | None


def _begin(
    judge: Judge,
    give_up: GiveUp,
    owner: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> _Call | None:
    """Enters the context of a call; None after an error. Never raises."""
    try:
        context = judge(owner, *arguments, **keywords)
        return _Call(context, context.__enter__())
    except Exception as error:
        give_up(error)
        return None


def _end(
    call: _Call | None, give_up: GiveUp, error: BaseException | None, result: Any = None
) -> None:
    """Leaves the context of a call. Never raises."""
    if call is None:
        return
    try:
        if call.takes is not None:
            call.takes.append(result)
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        call.context.__exit__(kind, error, trace)
    except Exception as found:
        if found is not error:
            give_up(found)
