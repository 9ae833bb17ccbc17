"""Comments and docstrings of the Python sources as Markdown, for mkdocstrings.

It loads `Prose` (mkdocs.yml), which changes what griffe has read; no module is imported.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

from docs.site.links import ROOT
from docs.site.prose import Sections, escaped, markdown

_SHOWN = ("__init__", "__call__")  # of the methods with two underscores
_COMMENT = re.compile(r"""^(?:[^#"']|"[^"]*"|'[^']*')*?#(?!:) ?(.*)$""")


class Prose(griffe.Extension):
    """Docstrings of this project's form, and fields that comments beside them explain."""

    def __init__(self) -> None:
        super().__init__()
        self._sections = Sections((ROOT / "docs/spec.md").read_text(), "../../spec.md")

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Changes every object of a package."""
        self._walk(pkg)

    def _walk(self, scope: griffe.Module | griffe.Class) -> None:
        text = self._markdown(scope)
        for name, member in list(scope.members.items()):
            if member.is_alias:
                continue
            if isinstance(member, griffe.Module | griffe.Class):
                self._walk(member)
            elif isinstance(member, griffe.Function):
                if scope.is_class and _is_hidden(member):
                    scope.del_member(name)
                _set(member, self._markdown(member))
            elif _is_field(member, scope):
                text += self._item(member)  # a line of its class
                scope.del_member(name)
            else:
                _set(member, self._markdown(member))
        _set(scope, text)

    def _item(self, field: griffe.Attribute) -> str:
        """A field of a class as an item of a list; nothing of one that callers do not give."""
        if field.name.startswith("_") or "init=False" in str(field.value):
            return ""
        kind = f" `{field.annotation}`" if field.annotation else f" = `{field.value}`"
        text = self._sections.link(escaped(" ".join(comments(field).split())))
        return f"\n- **`{field.name}`**{kind}{text and ': ' + text}\n"

    def _markdown(self, member: griffe.Object) -> str:
        text = member.docstring.value if member.docstring else ""
        if isinstance(member, griffe.Attribute) and not text:
            text = comments(member)
        if not text:
            return ""
        text, summary = inspect.cleandoc(text), ""
        if isinstance(member, griffe.Module):  # "name: what it is" is no parameter
            summary, _, text = text.partition("\n")
            summary = escaped(summary) + "\n"
        return summary + markdown(text, self._sections, "python")


def _is_field(member: griffe.Attribute, scope: griffe.Module | griffe.Class) -> bool:
    """No property, and nothing of a TypedDict, of which griffe makes parameters of functions."""
    if not isinstance(scope, griffe.Class) or "property" in member.labels:
        return False
    return "TypedDict" not in map(str, scope.bases)


def _is_hidden(method: griffe.Function) -> bool:
    """Private, or a method that says nothing; __init__ has the signature of its class."""
    if method.name.startswith("_") and method.name not in _SHOWN:
        return True
    return method.name != "__init__" and not (method.docstring or method.overloads)


def _set(member: griffe.Object, text: str) -> None:
    member.docstring = griffe.Docstring(text, parent=member) if text else None


def comments(field: griffe.Attribute) -> str:
    """The comments above a field and beside its lines, as one text."""
    if field.lineno is None or field.endlineno is None:
        return ""
    lines = field.lines_collection[field.filepath]
    first, found = field.lineno - 1, []
    while first and lines[first - 1].lstrip().startswith("# "):
        first -= 1
    for line in lines[first : field.endlineno]:
        if comment := _COMMENT.match(line):
            found.append(comment[1])
    return "\n".join(found)
