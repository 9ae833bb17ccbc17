"""What is checked, and the cases that check it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from kvx_conformance.case import Case, cases_in

SUBJECT = "KVX_CONFORMANCE_SUBJECT"  # a variable: whose imports are done ahead
_OF_CONNECTORS = "kvx_conformance.connector_cases"
# The kinds of subjects, each with the package of its cases.
KINDS = {
    "engine": "kvx_conformance.engine_cases",
    "store": _OF_CONNECTORS,
    "connector": _OF_CONNECTORS,
}

# The functions that subjects of each kind have.
_NEEDED = {
    "engine": ("describe", "write", "read", "table", "facts"),
    "store": ("match", "load", "save", "close"),
    "connector": ("start",),
}


class BadSubject(ValueError):
    """A name stands for nothing, or for something without the functions of its kind."""


def cases_of(kind: str) -> list[Case]:
    """All cases of a kind of subject, by their modules' names."""
    package = importlib.import_module(KINDS[kind])
    found: list[Case] = []
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        found += cases_in(importlib.import_module(f"{package.__name__}.{module.name}"))
    return found


def made(name: str) -> Any:
    """What `MODULE` or `MODULE:NAME` stands for; a class or function is called without arguments.

    Raises BadSubject if there is none.
    """
    value = load(name)
    return value() if callable(value) else value


def load(name: str) -> Any:
    """What `MODULE` or `MODULE:NAME` stands for. Raises BadSubject if there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise BadSubject(f"no module {module_name!r}; expected MODULE or MODULE:NAME") from None
        raise
    if not attribute:
        return value
    if not hasattr(value, attribute):
        raise BadSubject(f"{module_name} has no {attribute!r}")
    return getattr(value, attribute)


def require(kind: str, name: str, value: Any) -> None:
    """Raises BadSubject if an object has not all functions of its kind.

    name: of the subject
    """
    needed = _NEEDED[kind]
    missing = next((function for function in needed if not hasattr(value, function)), None)
    if missing is not None:
        functions = ", ".join(f"{function}()" for function in needed)
        raise BadSubject(
            f"{name} has no {missing}(); expected MODULE:NAME of a subject of kind {kind}, with "
            f"{functions}"
        )
