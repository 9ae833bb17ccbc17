"""The Python reference: a page for each public module, of its names' signatures, fields and
docstrings, as the sources have them. Imports nothing that it describes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.site.prose import Sections, escaped, markdown

_METHODS = ("__init__", "__call__")  # those with two underscores that are shown


@dataclass(frozen=True)
class Module:
    """A module's source."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @classmethod
    @cache
    def of(cls, name: str, root: Path) -> Module:
        path = root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = path.read_text()
        return cls(name, path, text, ast.parse(text))

    def names(self) -> list[str]:
        """__all__ or, without it, what is defined here without an underscore."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
                return list(ast.literal_eval(node.value))
        found = [name for node in self.tree.body for name in _targets(node)]
        return sorted({name for name in found if not name.startswith("_")})

    def define(self, name: str, root: Path) -> tuple[Module, ast.stmt] | None:
        """The module that defines a name, and where; None if it is no source's, or a module."""
        found = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvx_"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and not found:
                        below = root.joinpath(*str(node.module).split("."), alias.name)
                        if below.is_dir() or below.with_suffix(".py").is_file():
                            return None
                        found = Module.of(str(node.module), root).define(alias.name, root)
        for node in self.tree.body:
            if name in _targets(node):
                found = self, node  # the last: overloads come before
        return found

    def lines(self, first: int, last: int) -> str:
        return inspect.cleandoc("\n" + "\n".join(self.text.split("\n")[first - 1 : last]))


def page(name: str, root: Path, sections: Sections) -> str:
    """A module as Markdown."""
    module = Module.of(name, root)
    out = [f"# {escaped(name)}\n", _doc(module.tree, sections)]
    for public in module.names():
        found = module.define(public, root)
        if found:
            out += _entry(public, *found, sections)
    return "\n".join(out)


def _entry(name: str, module: Module, node: ast.stmt, sections: Sections) -> Iterator[str]:
    yield f"## {escaped(name)}\n"
    if isinstance(node, ast.ClassDef):
        yield _fence("\n".join([_head(module, node), *_fields(module, node)]))
        yield _doc(node, sections)
        for method in node.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _shown(method):
                yield f"### {escaped(f'{name}.{method.name}')}\n"
                decorators = [f"@{ast.unparse(d)}" for d in method.decorator_list]
                yield _fence("\n".join([*decorators, _head(module, method)]))
                yield _doc(method, sections)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield _fence(_head(module, node))
        yield _doc(node, sections)
    else:
        yield _fence(module.lines(node.lineno, node.end_lineno or node.lineno))
    yield f"Defined in `{module.name}`.\n"


def _head(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """`def` or `class` up to the colon."""
    return module.lines(node.lineno, max(node.lineno, node.body[0].lineno - 1)).rstrip()


def _fields(module: Module, node: ast.ClassDef) -> Iterator[str]:
    """Public fields of a dataclass or members of an enum, with the comments beside and above."""
    all_lines = module.text.split("\n")
    for field in node.body:
        names = _targets(field)
        if isinstance(field, ast.FunctionDef) or not names or names[0].startswith("_"):
            continue
        first, last = field.lineno, field.end_lineno or field.lineno
        if "init=False" in "".join(all_lines[first - 1 : last]):
            continue
        while all_lines[first - 2].lstrip().startswith("#"):
            first -= 1
        yield from ("    " + line.strip() for line in all_lines[first - 1 : last])


def _shown(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    overloaded = any(ast.unparse(d) == "overload" for d in method.decorator_list)
    public = not method.name.startswith("_") or method.name in _METHODS
    return public and not overloaded and bool(ast.get_docstring(method))


def _doc(node: ast.AST, sections: Sections) -> str:
    return markdown(ast.get_docstring(node) or "", sections, "python")  # type: ignore[arg-type]


def _fence(code: str) -> str:
    return f"```python\n{code}\n```\n"


def _targets(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
