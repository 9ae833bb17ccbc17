"""watch: lets a context run around every call of a method of an engine's class.

Engines tell a connector nothing of what their users do to weights. So the methods that write them
are wrapped, once per process. An error in watching a call is not its caller's affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

# A context around a call, made from its arguments. What it yields, if anything, takes the result.
Judge = Callable[..., AbstractContextManager[list[Any] | None]]
# Is told of an error in watching: a call may have gone unseen.
GiveUp = Callable[[Exception], object]


def watch(kind: type, name: str, judge: Judge, give_up: GiveUp) -> None:
    """Wraps a method of `kind`. Idempotent; without such a method it does nothing."""
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
    """A call that is watched."""

    context: AbstractContextManager[list[Any] | None]
    takes: list[Any] | None


def _begin(
    judge: Judge,
    give_up: GiveUp,
    owner: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> _Call | None:
    """Never raises."""
    try:
        context = judge(owner, *arguments, **keywords)
        return _Call(context, context.__enter__())
    except Exception as error:
        give_up(error)
        return None


def _end(
    call: _Call | None, give_up: GiveUp, error: BaseException | None, result: Any = None
) -> None:
    """Never raises."""
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
